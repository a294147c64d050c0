"""`--quantize base`: weights that are quantized in the base are quantized in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import TensorEntry
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.conversion.steps.naming import NamedTarget
from ckptx.errors import InputError, UnsupportedError
from ckptx.quantization.checkpoint import find_quantized_tensors, read_declared_quantization
from ckptx.quantization.computed_files import ComputedFile, ComputedFiles
from ckptx.storage.interface import SourceFiles
from ckptx.wording import counted, first_of

if TYPE_CHECKING:  # numpy is imported with `--quantize` only
    from ckptx.quantization.quantize import BaseContents, WeightEncoder


@dataclass(frozen=True, slots=True)
class QuantizedTarget:
    """Target with quantized values and scales in place of the weights that are quantized in the base.

    Attributes:
        named_target: Target tensors under their new names.
        files: Files of the source, and computed files of the quantized values and scales.
        encoders: Encoder of each quantized weight by name; empty without `--quantize`.
        schemes: Entries of the report for the schemes of these weights, see `describe_schemes`.
        notes: Notes for the user.
    """

    named_target: NamedTarget
    files: SourceFiles
    encoders: Mapping[str, WeightEncoder] = field(default_factory=dict)
    schemes: tuple[dict[str, object], ...] = ()
    notes: tuple[str, ...] = ()
    _encoder_by_file: Mapping[str, WeightEncoder] = field(default_factory=dict, repr=False)
    _base_contents: BaseContents | None = None

    def min_bytes_to_read(self, nbytes: int) -> int:
        """Return a lower bound of the bytes that are read from source and base.

        It is no exact number, because a weight that differs from the base is read twice.

        Args:
            nbytes: Bytes that the copy plan reads, in which a quantized weight counts with its size in the base.
        """
        replaced = sum(encoder.base.nbytes for encoder in self.encoders.values())
        return nbytes - replaced + sum(encoder.min_bytes_to_read for encoder in self.encoders.values())

    @property
    def base_bytes_read(self) -> int:
        """Bytes that were read from the base so far."""
        return 0 if self._base_contents is None else self._base_contents.bytes_read

    def float_dtype(self, entry: TensorEntry) -> DType | None:
        """Return the source dtype of the weight from which an entry is quantized.

        None for an entry that holds no quantized values or scales.
        """
        encoder = self._encoder_by_file.get(entry.position[0]) if self._encoder_by_file and entry.chunks else None
        return None if encoder is None else encoder.source_dtype

    def report_entry(self) -> dict[str, Any] | None:
        """Return the entry `quantized` of the report; None without `--quantize`."""
        if not self.encoders:
            return None
        from ckptx.quantization.quantize import unchanged_count_and_encoded_names

        unchanged, encoded = unchanged_count_and_encoded_names(self.encoders)
        return {"schemes": list(self.schemes), "unchanged": unchanged, "encoded": encoded}


def quantize_target(
    named_target: NamedTarget, base: BaseCheckpoint, files: SourceFiles, base_files: SourceFiles | None
) -> QuantizedTarget:
    """Replace the weights that are quantized in the base by quantized values and scales in its scheme.

    Args:
        named_target: Target tensors in floating point, under the names of the base.
        base: Source and base, see `BaseCheckpoint`; the base has the quantized weights.
        files: Files of the source.
        base_files: Files of the base; None without `--quantize`.

    Raises:
        InputError: The base is not quantized, or has other names than the target.
        UnsupportedError: A tensor is no plain float, or has scales that ckptx does not compute.
    """
    if base_files is None:
        return QuantizedTarget(named_target, files)
    from ckptx.quantization.quantize import (
        BaseContents,
        BaseTensorFile,
        WeightEncoder,
        computed_entry,
        computed_file_name,
    )
    from ckptx.quantization.tensors import describe_schemes

    assert base.catalog is not None
    catalog = base.catalog
    quantized = find_quantized_tensors(catalog)
    declared = read_declared_quantization(catalog, catalog.config)
    target = named_target.target
    by_name = {tensor.name: tensor for tensor in quantized.tensors.values()}
    if not by_name:
        raise InputError(f"{catalog.location}: no tensor is quantized; leave out --quantize")
    missing = [name for name in by_name if name not in target.tensors]
    if len(missing) == len(by_name):
        raise InputError(
            f"{base.source.location}: has none of the weights that are quantized in {catalog.location}, such as "
            f'"{missing[0]}"; pass the base that the model was trained from'
        )
    other_names = [name for name in target.tensors if name not in by_name and name not in catalog.tensors]
    if missing and other_names:
        advice = "pass the base that the model was trained from"
        if "experts" in missing[0]:
            advice = "pass a base in which each expert is a separate tensor, as on the Hub"
        raise InputError(
            f'{base.source.location}: has no "{missing[0]}", which is quantized in {catalog.location}, but has '
            f'"{other_names[0]}" instead, which is not in it, so their names differ; {advice}'
        )
    contents = BaseContents(base_files)
    tensors: dict[str, TensorEntry] = {}
    source_tensors = dict(target.source.tensors)
    source_names, stored_names = dict[str, str](), dict[str, tuple[str, ...]]()
    computed: dict[str, ComputedFile] = {}
    encoders: dict[str, WeightEncoder] = {}
    encoder_by_file: dict[str, WeightEncoder] = {}

    def add_computed(entry: TensorEntry, made_of: tuple[str, ...]) -> None:
        """Add a tensor of the base that is read from a computed file; `made_of` are the stored names in the source."""
        if entry.name in target.tensors and entry.name not in by_name:
            raise UnsupportedError(
                f'{base.source.location}: tensor "{entry.name}" has the name of a scale in the base; is the checkpoint '
                "quantized already? Leave out --quantize"
            )
        own, file_name = computed_entry(entry), computed_file_name(entry)
        source_tensors[file_name] = own.with_name(file_name)
        tensors[entry.name], source_names[entry.name], stored_names[entry.name] = own, file_name, made_of

    for name, entry in target.tensors.items():
        tensor = by_name.get(name)
        if tensor is None:
            tensors[name] = entry
            source_names[name], stored_names[name] = target.source_names[name], target.stored_names[name]
            continue
        encoder = encoders[name] = WeightEncoder(
            target.source.tensors[target.source_names[name]],
            tensor,
            contents,
            has_power_of_two_scales=declared is not None and declared.has_power_of_two_scales,
        )
        for each in (tensor.codes, *tensor.companions.values()):
            add_computed(each, target.stored_names[name])
        for file in encoder.computed_files():
            file_name = computed_file_name(file.entry)
            computed[file_name], encoder_by_file[file_name] = file, encoder
    for name in quantized.activation_scales:
        add_computed(catalog.tensors[name], ())
        computed[computed_file_name(catalog.tensors[name])] = BaseTensorFile(catalog.tensors[name], contents)
    new_target = replace(
        target,
        source=replace(target.source, tensors=source_tensors),
        tensors=tensors,
        source_names=source_names,
        stored_names=stored_names,
    )
    notes = []
    if missing:
        count = counted(len(missing), "weight")
        notes.append(f"quantized in the base, but not in the source: {count}, {first_of(missing)}")
    if quantized.activation_scales:
        count = counted(len(quantized.activation_scales), "scale")
        notes.append(
            f"copied from the base: {count} of activations or of the KV cache, {first_of(quantized.activation_scales)}"
        )
    schemes = tuple(describe_schemes(encoder.base for encoder in encoders.values()))
    return QuantizedTarget(
        replace(named_target, target=new_target),
        ComputedFiles(files, computed),
        encoders,
        schemes,
        tuple(notes),
        encoder_by_file,
        contents,
    )
