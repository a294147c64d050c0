"""`--dequantize`: the source as a checkpoint of plain floats, which all later steps read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPE_BY_OPTION, DType
from ckptx.catalog.entry import TensorEntry
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.errors import UsageError
from ckptx.mapping.config_edits import apply_edits, dequantization_edits
from ckptx.options.conversion import ConversionOptions
from ckptx.quantization.checkpoint import dequantize, read_declared_quantization
from ckptx.storage.interface import SourceFiles
from ckptx.transfer.plan import CopyPlan

if TYPE_CHECKING:  # imported for a quantized source only
    from ckptx.quantization.checkpoint import DequantizedCheckpoint

_DROP_REASON = "scale of activations or of the KV cache, which weights in floating point do not have"


@dataclass(frozen=True, slots=True)
class DequantizedSource:
    """The source, with its quantized weights decoded if `--dequantize` asks for it.

    Attributes:
        base: Source and base, see `BaseCheckpoint`; with decoded weights and a config without quantization if
            `--dequantize` asks for it.
        files: Files of the source.
        checkpoint: Decoded checkpoint; None if nothing is decoded.
        config_edits: Changes to config.json that remove the quantization.
    """

    base: BaseCheckpoint
    files: SourceFiles
    checkpoint: DequantizedCheckpoint | None = None
    config_edits: tuple[dict[str, Any], ...] = ()

    @property
    def dropped(self) -> list[dict[str, str]]:
        """Stored `name` and `reason` of each tensor that decoded weights do not need; empty if nothing is decoded."""
        if self.checkpoint is None:
            return []
        return [{"name": name, "reason": _DROP_REASON} for name in self.checkpoint.decoded.quantized.activation_scales]

    @property
    def decoded(self) -> Mapping[str, str]:
        """Stored name of each scale or other part -> name of the weight that it is decoded into."""
        return {} if self.checkpoint is None else self.checkpoint.decoded.quantized.companion_names

    def stored_names(self, names: Iterable[str]) -> set[str]:
        """Return the stored names of tensors in `base.source`; a decoded weight has that of its quantized values."""
        stored = {} if self.checkpoint is None else self.checkpoint.decoded.stored_names
        return {stored.get(name, name) for name in names}

    def stored_dtype(self, entry: TensorEntry) -> DType:
        """Return the dtype of an entry in the source files; a decoded weight has that of its quantized values."""
        decoders = {} if self.checkpoint is None else self.checkpoint.decoded.decoder_by_file
        decoder = decoders.get(entry.position[0]) if decoders and entry.chunks else None
        return entry.dtype if decoder is None else decoder.tensor.codes.dtype

    def bytes_to_read(self, plan: CopyPlan) -> int:
        """Return the bytes that a plan reads from the source files; a decoded weight counts with its quantized size."""
        if self.checkpoint is None:
            return plan.bytes_read
        decoders, saved = self.checkpoint.decoded.decoder_by_file, 0
        for step in plan.steps():
            for chunk in step.source.chunks if type(step.source.chunks) is tuple else ():
                decoder = decoders.get(chunk.file)
                if decoder is not None:
                    saved += chunk.nbytes - chunk.nbytes * decoder.tensor.nbytes // decoder.nbytes
        return plan.bytes_read - saved

    def report_entry(self) -> dict[str, Any] | None:
        """Return the entry `dequantized` of the report; None if nothing is decoded."""
        if self.checkpoint is None:
            return None
        from ckptx.quantization.tensors import describe_schemes

        decoded = self.checkpoint.decoded
        return {"schemes": describe_schemes(decoded.quantized.tensors.values()), "decoded": dict(self.decoded)}


def dequantize_source(base: BaseCheckpoint, files: SourceFiles, options: ConversionOptions) -> DequantizedSource:
    """Decode the quantized weights of the source if `--dequantize` asks for it.

    Args:
        base: Source and base, see `BaseCheckpoint`.
        files: Files of the source.
        options: `dequantize` and `dtype`.

    Raises:
        UsageError: `--dtype` without `--dequantize`, and the source is quantized.
        InputError, UnsupportedError: See `ckptx.quantization.checkpoint.dequantize`.
    """
    target, source = DTYPE_BY_OPTION.get(options.dtype), base.source
    if not options.dequantize:
        if target is not None:
            _refuse_cast(source, base.config, options.dtype)
        return DequantizedSource(base, files)
    is_declared = source.config is not None and read_declared_quantization(source, source.config) is not None
    needs_float32 = options.dtype == "base" or (target is not None and target.name != "BF16")
    checkpoint = dequantize(
        source, files, "F32" if needs_float32 else "BF16", source.config if is_declared else base.config
    )
    edits = tuple(dequantization_edits(base.config or {}))
    config = None if base.config is None else apply_edits(base.config, edits)
    return DequantizedSource(
        replace(base, source=checkpoint.catalog, config=config, is_dequantized=True),
        checkpoint.files,
        checkpoint,
        edits,
    )


def _refuse_cast(source: Catalog, config: Mapping[str, Any] | None, dtype: str) -> None:
    """Refuse to cast a quantized source, of which only norms and embeddings would change."""
    if not any(dequantization_edits(each) for each in (config, source.config) if each is not None):
        return
    from ckptx.quantization.tensors import CODE_DTYPES

    for name, entry in source.tensors.items():
        if entry.dtype.name in CODE_DTYPES and len(entry.shape) > 1:
            raise UsageError(
                f'--dtype {dtype}: "{name}" of {source.location} is quantized ({entry.dtype.name}), and --dtype does '
                "not cast quantized weights; add --dequantize to decode them"
            )
