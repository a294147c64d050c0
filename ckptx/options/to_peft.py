"""Options of `convert to-peft`."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from dataclasses import KW_ONLY
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ckptx.errors import UsageError
from ckptx.options.adapter import AdapterOptions
from ckptx.options.buffers import DTYPE_SPELLINGS
from ckptx.options.conversion import BASE, DIRECTION_HELP, DST_HELP, ConversionOptions, TiedMode
from ckptx.options.option import OUTPUT_CHECKPOINT, Argument, Option
from ckptx.options.source import REVISION


class ToPeftOptions(AdapterOptions, ConversionOptions, kw_only=False):
    """Options of `convert to-peft`.

    Attributes:
        names, tied, tie_missing, optimizer, weights, dequantize, source_prefix, allow_config_mismatch,
            trust_remote_code: Not options of this command: an adapter has the names that PEFT gives it, no tied
            weights, and no state of an optimizer.
    """

    command: ClassVar[str] = "convert to-peft"
    names: ClassVar[None] = None  # type: ignore[misc]  # a field of the base class that this command does not have
    tied: ClassVar[TiedMode] = "auto"  # type: ignore[misc]
    tie_missing: ClassVar[bool] = False  # type: ignore[misc]
    optimizer: ClassVar[None] = None  # type: ignore[misc]
    weights: ClassVar[Literal["auto"]] = "auto"  # type: ignore[misc]
    dequantize: ClassVar[bool] = False  # type: ignore[misc]
    source_prefix: ClassVar[str] = "auto"  # type: ignore[misc]
    allow_config_mismatch: ClassVar[bool] = False  # type: ignore[misc]
    trust_remote_code: ClassVar[bool] = False  # type: ignore[misc]

    direction: Annotated[Literal["to-peft"], Argument(DIRECTION_HELP)]
    src: Annotated[
        str | Path,
        Argument(
            "Training checkpoint with LoRA tensors, a local directory or file: a DCP, per-rank FSDP files, or a dict "
            "saved with torch.save.",
            "SRC",
        ),
    ]
    dst: Annotated[str | Path, Argument(DST_HELP, "DST")]
    _: KW_ONLY
    base: Annotated[
        str | Path | None,
        BASE._replace(
            help="HF checkpoint (a directory or Hub id) that the adapter was trained on; its config.json is read. "
            "Required for torchtitan's names.",
            default="config of SRC, if any",
            metavar="PATH",
            keywords=(),
        ),
    ] = None

    revision: Annotated[str | None, REVISION._replace(help="Branch, tag or commit of --base on the Hub.")] = None
    dtype: Annotated[
        Literal["auto", "base", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32"],
        Option(
            "Dtype of the tensors (auto: unchanged).",
            OUTPUT_CHECKPOINT,
            metavar="auto|bf16|fp16|fp32",
            spellings=DTYPE_SPELLINGS,
        ),
    ] = "auto"
    base_model_name: Annotated[
        str | None,
        Option(
            "Hub id or path of the model that the adapter was trained on, to record as base_model_name_or_path.",
            OUTPUT_CHECKPOINT,
            metavar="NAME",
            default="as in --adapter-config, else --base, else not recorded",
            replaces=("base_model", "base_model_name_or_path"),
        ),
    ] = None

    def check(self) -> None:
        super().check()
        if self.dtype == "base":
            raise UsageError("--dtype base: an adapter has no tensors of its base; pass bf16, fp16 or fp32")

    @property
    def base_name(self) -> str | None:
        """Return the name or path of the base to record; None for that in the config, if any."""
        if self.base_model_name is not None or self.base is None or self.adapter_config is not None:
            return self.base_model_name
        return str(self.base)

    def fingerprint(self) -> dict[str, Any]:
        settings = self.adapter_settings(self.base_name)
        return {**super().fingerprint(), "adapter": list(settings)}
