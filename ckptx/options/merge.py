"""Options of `merge`."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ckptx.errors import UsageError
from ckptx.options.adapter import AdapterOptions
from ckptx.options.conversion import (
    BASE,
    FILES,
    NAMES,
    PREFIX,
    TIED,
    AdapterPath,
    DcpOptions,
    Names,
    TiedMode,
    ToHfOptions,
)
from ckptx.options.mesh import OutputShardingOptions
from ckptx.options.option import OUTPUT_CHECKPOINT, SOURCE, Argument, Option, settings_of
from ckptx.options.sizes import parse_size
from ckptx.options.source import REVISION

if TYPE_CHECKING:  # not imported for a help page
    from ckptx.catalog.format_traits import FormatTraits

MergeOutput = Literal["hf", "dcp", "safetensors"]


class MergeOptions(AdapterOptions, DcpOptions, OutputShardingOptions, kw_only=False):
    """Options of `merge`.

    Attributes:
        optimizer: Not an option of this command: optimizer state belongs to the weights before merging.
    """

    command: ClassVar[str] = "merge"
    optimizer: ClassVar[Literal["drop"]] = "drop"  # type: ignore[misc]  # a field of the base class

    model: Annotated[
        str | Path,
        Argument(
            "Model that the adapter was trained on, in any format that ckptx reads: a directory, a file or a Hub id. "
            "Quantized weights require --dequantize.",
            "MODEL",
        ),
    ]
    adapter: Annotated[
        str | Path,
        Argument(
            "LoRA adapter: a directory with adapter_config.json and adapter_model.safetensors or adapter_model.bin, as "
            "PEFT saves it, a Hub id, or a training checkpoint with LoRA tensors (pass --adapter-config or --alpha, "
            "unless an adapter_config.json or verl's lora_train_meta.json is next to it).",
            "ADAPTER",
        ),
    ]
    dst: Annotated[str | Path, Argument("Directory to write.", "DST")]
    _: KW_ONLY
    add: Annotated[
        Sequence[str],
        Option(
            "Adapter to add as well, with its change multiplied by FACTOR (a number; 1 without it). Repeatable.",
            SOURCE,
            metavar="ADAPTER[:FACTOR]",
            default="not set",
        ),
    ] = ()
    to: Annotated[
        MergeOutput | None,
        Option(
            "Output format: hf (HF safetensors), dcp, or safetensors (sharded safetensors: each file has shards of one "
            "rank, with their offsets).",
            OUTPUT_CHECKPOINT,
            default="hf; with --tp, --pp or --dp-shard: dcp if MODEL is a DCP, per-rank FSDP files, DeepSpeed or "
            "torch_checkpointing, else safetensors",
        ),
    ] = None
    names: Annotated[
        Names | None,
        NAMES._replace(
            default="--to hf: hf; --to safetensors: model; --to dcp: hf, or the names of MODEL if it is a training "
            "checkpoint other than Megatron's"
        ),
    ] = None
    tied: Annotated[
        TiedMode,
        TIED._replace(
            help="Tied weights: alias (two names for one stored tensor; --to dcp only), copy (stored under both "
            "names), drop (stored under one name), or auto (alias in a DCP, copy in sharded safetensors, one name in "
            "HF files). If the adapter changes only one of two tied names, both are stored, as separate tensors."
        ),
    ] = "auto"
    prefix: Annotated[
        str,
        PREFIX._replace(
            help="Prefix to add to every tensor name (--to dcp only). Rejected if MODEL is a training checkpoint."
        ),
    ] = ""
    files: Annotated[
        int | None, FILES._replace(help="Number of .distcp files, per rank if sharded (--to dcp only).")
    ] = None
    max_shard_size: Annotated[
        int | str | None,
        Option(
            "Maximum size of the tensors in each safetensors file, without its header; a larger tensor gets a file of "
            "its own (--to hf only).",
            OUTPUT_CHECKPOINT,
            parse=parse_size,
            replaces=("shard_size", "max_file_size"),
            default="5GB",
        ),
    ] = None
    index: Annotated[
        Literal["auto", "always"],
        Option("Write an index file: auto (only for several files) or always (--to hf only).", OUTPUT_CHECKPOINT),
    ] = "auto"

    allow_config_mismatch: Annotated[
        bool,
        Option(
            "Allow missing, extra and differently shaped tensors, such as those of a partial model, and an adapter "
            "whose base_model_name_or_path is another model. If the vocabulary of MODEL is padded, vocab_size in the "
            "written config.json becomes its number of rows.",
            SOURCE,
            aliases=("--allow-misfit",),
        ),
    ] = False
    revision: Annotated[
        str | None,
        REVISION._replace(
            help="Branch, tag or commit of MODEL and --base on the Hub, not of adapters; for two different ones, "
            "download one first."
        ),
    ] = None
    base: Annotated[
        str | Path | None,
        BASE._replace(
            help="HF checkpoint (a directory or Hub id) to take config.json and tokenizer files from; none writes "
            "tensors only. Required if MODEL has no config.json.",
            default="config and tokenizer of MODEL, if any",
        ),
    ] = None

    @property
    def adapters(self) -> tuple[AdapterPath, ...]:
        """Return the adapters to merge, in order, with their factors.

        Raises:
            UsageError: A factor is no finite number other than 0.
        """
        return (AdapterPath(str(self.adapter), 1.0), *map(_parse_added, self.add))

    def output(self, source: "FormatTraits") -> MergeOutput:
        """Return the output format for a model of this format."""
        if self.to is not None:
            return self.to
        return source.reshard_output if self.dims.world_size > 1 else "hf"

    def hf_options(self) -> ToHfOptions:
        """Return the options of an output in HF safetensors.

        Raises:
            UsageError: An option requires DCP output.
        """
        values = self.values_shared_with(ToHfOptions)
        return ToHfOptions("to-hf", self.model, self.dst, **values)

    def check(self) -> None:
        super().check()
        if len(self.adapters) != len({(os.path.realpath(each.path), each.factor) for each in self.adapters}):
            raise UsageError("--add: names the same adapter twice; leave one of them out")

    def check_output(self, output: MergeOutput) -> None:
        """Check the options against the output format.

        Raises:
            UsageError: An option requires another output format.
        """
        if output != "dcp":
            self.check_safetensors()
        required = {"files": "dcp", "prefix": "dcp", "max_shard_size": "hf", "index": "hf"}
        for setting, _ in self.values():
            if required.get(setting.name, output) != output:
                raise UsageError(f"{setting.flag} requires --to {required[setting.name]}; the output is {output}")
        if output == "hf" and self.dims.world_size > 1:
            flag = next(settings_of(type(self))[axis].flag for axis in ("tp", "pp", "dp_shard") if getattr(self, axis))
            raise UsageError(f"{flag} requires --to dcp or --to safetensors; HF files are not sharded")

    def check_source(self, source: "FormatTraits") -> None:
        if not source.is_training_format:
            self.check_source_prefix(source, "MODEL")

    @property
    def drop_reason(self) -> str:
        return "is not kept: it belongs to the weights before merging"

    def fingerprint(self) -> dict[str, object]:
        return {**super().fingerprint(), "adapters": [list(each) for each in self.adapters], "index": self.index}


def _parse_added(text: str) -> AdapterPath:
    """Return path and factor of `ADAPTER[:FACTOR]`.

    Raises:
        UsageError: The factor is no finite number other than 0, or the path is empty.
    """
    path, separator, number = text.rpartition(":")
    if not separator or "/" in number or not number:
        path, number = text.removesuffix(":"), "1"
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if not path or not isfinite(factor) or not factor:
        raise UsageError(f'--add: "{text:.80}" must be ADAPTER or ADAPTER:FACTOR, with a number other than 0')
    return AdapterPath(path, factor)
