"""Opens a checkpoint of any format and naming under the names of its model, and reads regions of it into tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.extra_tensors import ExtraTensors
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_TORCH_NAME, DType
from ckptx.catalog.entry import LazyChunks, TensorEntry
from ckptx.catalog.region import Region
from ckptx.errors import UnsupportedError
from ckptx.formats.registry import open_checkpoint
from ckptx.mapping.rules import RenamedTensors, TrainerRules
from ckptx.model_view.megatron_names import with_disk_names
from ckptx.model_view.view import (
    ModelView,
    decide_ties,
    locate_archives,
    resolve_duplicates,
    rules_of,
    view_model,
    view_model_under,
)  # fmt: skip
from ckptx.quantization.checkpoint import open_dequantized
from ckptx.runtime.checkpointing.load_report import OPTIMIZER_STATE, OTHER_STATE, UNKNOWN_TO_CLASS
from ckptx.storage.interface import Location, SourceFiles
from ckptx.transfer.digest_sink import stream_cast
from ckptx.transfer.stream import TensorReader

_STAGING_BYTES = 4 << 20  # bytes that are staged at a time if a tensor cannot be filled in place
_MAX_STRIDED_BYTES = 32 << 20  # bytes that a reader may buffer for a tensor that is not stored row-major


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """An open checkpoint in the names of the model.

    Attributes:
        view: The model in the checkpoint.
        files: Files of the checkpoint.
        tensors: Tensors by model name. A tensor without a naming rule has its name on disk.
        stored_names: Names on disk that each tensor is made of.
    """

    view: ModelView
    files: SourceFiles
    tensors: dict[str, TensorEntry]
    stored_names: dict[str, tuple[str, ...]]

    @property
    def root(self) -> Location:
        """The directory of the checkpoint."""
        return self.view.catalog.location

    @property
    def architecture(self) -> Architecture | None:
        """The architecture of the class in the config; None without a config, or if the class is unknown."""
        return self.view.architecture

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The config in use: the one the checkpoint was opened with, or else its own; None if there is neither."""
        return self.view.config

    @property
    def non_model_names(self) -> dict[str, str]:
        """Name on disk of a tensor or other value that is not part of the model -> reason."""
        optimizer = dict.fromkeys(self.view.optimizer, OPTIMIZER_STATE)
        others = {name: each.description for each in self.view.other_models for name in each.names}
        return optimizer | dict.fromkeys(self.view.other, OTHER_STATE) | others

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first plain float tensor, the default of transformers for a config without one.

        None if there is no such tensor.
        """
        stored_dtypes = (entry.dtype for entry in self.tensors.values())
        dtype_name = next(
            (each.torch_name for each in stored_dtypes if each.is_castable and each.torch_name is not None), None
        )
        return None if dtype_name is None else getattr(torch, dtype_name)

    def uses_other_layer(self, name: str) -> bool:
        """Return True if the model uses the tensor of another layer in place of this one.

        Args:
            name: Model name, or name on disk.
        """
        return (
            self.architecture is not None and self.config is not None and self.architecture.is_unused(name, self.config)
        )

    def explain_extra_tensors(self) -> dict[str, str]:
        """Return name on disk -> reason, for each tensor that the class does not have.

        The reason is `UNKNOWN_TO_CLASS` for a tensor that is not expected, see `ExtraTensor`. Empty without a config
        or a known class.
        """
        if self.architecture is None or self.config is None:
            return {}
        extra_tensors = ExtraTensors(self.architecture, self.config, self.view.tensors).by_name
        return {
            self.view.tensors[name].name: extra.reason if extra.is_expected else UNKNOWN_TO_CLASS
            for name, extra in extra_tensors.items()
        }

    def find_tied_names(self) -> dict[str, str]:
        """Return model names whose values are stored under another name -> that name, if the config ties the two.

        Raises:
            InputError: A name is missing, and nothing stored can replace it.
        """
        pairs = self.architecture.ties if self.architecture is not None else ()
        stored_as = {}
        for pair, decision in zip(pairs, decide_ties(self.view, self.files), strict=True):
            if decision.declared and decision.action == "alias":
                stored_as[pair.namings[0][0]] = pair.namings[0][1]  # the first naming has the model names
        return stored_as

    def find_untied_names(self) -> tuple[str, ...]:
        """Return model names that the config ties to others, but that are stored with a value of their own.

        Tensor bytes are read, and compared, only if both names of a pair are stored separately.

        Raises:
            InputError: A name is missing, and nothing stored can replace it.
        """
        pairs = self.architecture.ties if self.architecture is not None else ()
        return tuple(
            pair.namings[0][0]
            for pair, decision in zip(pairs, decide_ties(self.view, self.files), strict=True)
            if decision.declared and decision.action == "keep-both"
        )


@contextmanager
def open_source(
    path: Path,
    *,
    config: Mapping[str, Any] | None = None,
    config_checkpoint: Catalog | None = None,
    prefix: str | None = None,
    is_prefix_optional: bool = False,
    trust_remote_code: bool = False,
    dequantize: bool = False,
    allow_adapter: bool = False,
) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint of any format that ckptx reads; only headers are read.

    Args:
        path: Path of the checkpoint.
        config: Replaces the `config.json` of the checkpoint; None uses that file.
        config_checkpoint: Checkpoint that `config` and its custom code come from; None for this one.
        prefix: Prefix of the model's names in a training checkpoint; None detects it.
        is_prefix_optional: True if the prefix may belong to the checkpoint that this one is compared with: then it
            applies only if this checkpoint has a model under it.
        trust_remote_code: See `build_model`.
        dequantize: True to decode quantized weights to bfloat16 as they are read.
        allow_adapter: True to accept tensors of an adapter among those of the model; not with `is_prefix_optional`.

    Raises:
        InputError: There is no checkpoint, it is damaged or incomplete, or no model has the prefix.
        UnsupportedError: ckptx does not read its format.
    """
    config_values = dict(config) if config is not None else None
    catalog = open_checkpoint(path)
    if catalog.traits.is_adapter:
        raise UnsupportedError(
            f"{catalog.location}: is an adapter, not a model; add it to its model with `ckptx merge MODEL ADAPTER DST`"
        )
    catalog = with_disk_names(catalog, config if config is not None else catalog.config)
    if dequantize:
        catalog = open_dequantized(catalog)
    find_view = view_model_under if is_prefix_optional else partial(view_model, allow_adapter=allow_adapter)
    view = find_view(
        catalog,
        prefix=prefix,
        config=config_values,
        trust_remote_code=trust_remote_code,
        code_checkpoint=config_checkpoint,
    )
    with catalog.source.open() as files:
        view = resolve_duplicates(locate_archives(view, files, lazy=True), files, with_state=False)
        renamed = RenamedTensors.identity(view.tensors)
        if view.trainer_conversions:
            renamed = renamed.then(TrainerRules(view.trainer_conversions).from_trainer(renamed.tensors))
        rules = rules_of(view)
        if rules is not None:
            renamed = renamed.then(rules.to_model(renamed.tensors))
        stored_names = {
            name: tuple(view.tensors[each].name for each in sources) for name, sources in renamed.sources.items()
        }
        yield OpenCheckpoint(view, files, renamed.tensors, stored_names)


# ----------------------------------------------------------------------------------------- bytes


class MemorySink:
    """A `ckptx.transfer.stream.Sink` that writes directly into a row-major CPU tensor."""

    def __init__(self, target: Tensor) -> None:
        self._memory, self._offset = _as_memoryview(target), 0

    def space(self, nbytes: int) -> memoryview:
        return self._memory[self._offset : self._offset + nbytes]

    def commit(self, view: memoryview) -> None:
        self._offset += len(view)


class StagedSink:
    """A `ckptx.transfer.stream.Sink` that writes into a row-major tensor on a device, through a CPU buffer."""

    def __init__(self, target: Tensor) -> None:
        self._target_bytes, self._offset = _as_bytes(target), 0
        self._buffer = torch.empty(min(_STAGING_BYTES, max(1, self._target_bytes.numel())), dtype=torch.uint8)
        self._buffer_view = memoryview(self._buffer.numpy())

    def space(self, nbytes: int) -> memoryview:
        return self._buffer_view[:nbytes]

    def commit(self, view: memoryview) -> None:
        self._target_bytes[self._offset : self._offset + len(view)].copy_(self._buffer[: len(view)])
        self._offset += len(view)


class RegionReader:
    """Reads regions into tensors, from any number of threads."""

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._thread_local = threading.local()
        self._readers: list[TensorReader] = []
        self._unverified: list[int] = []

    @property
    def bytes_read(self) -> int:
        """Bytes read from the files so far, including gaps between the rows of narrow regions."""
        return sum(reader.bytes_read for reader in self._readers)

    @property
    def unverified_bytes(self) -> int:
        """Bytes read from archive members (`Record`) whose CRC-32 also covers bytes that were not read."""
        return sum(self._unverified)

    def _thread_reader(self) -> TensorReader:
        reader: TensorReader | None = getattr(self._thread_local, "reader", None)
        if reader is None:
            reader = self._thread_local.reader = TensorReader(self._files, _MAX_STRIDED_BYTES)
            self._readers.append(reader)
        return reader

    def fill(self, entry: TensorEntry, region: Region, target: Tensor) -> None:
        """Read `region` of `entry` into `target`, which has the shape of the region, cast to its dtype.

        Row-major CPU memory is filled in place, other memory through a CPU buffer.

        Raises:
            InputError: The file ends early or is corrupt.
            UnsupportedError: The dtypes differ, and one of them cannot be cast.
        """
        dtype = target_dtype(entry, target.dtype)
        entry = self._drop_partial_checksums(entry, region)
        if target.is_contiguous():
            sink = MemorySink(target) if target.device.type == "cpu" else StagedSink(target)
            stream_cast(self._thread_reader(), entry, region, dtype, sink)
            return
        for part in split_region(region, max(1, _STAGING_BYTES // dtype.itemsize)):
            _narrow_within(target, region, part).copy_(self._read_staged(entry, part, target.dtype, dtype))

    def is_equal(self, entry: TensorEntry, region: Region, target: Tensor) -> bool:
        """Return True if `target` has exactly the bytes that `fill` would write."""
        dtype = target_dtype(entry, target.dtype)
        entry = self._drop_partial_checksums(entry, region)
        for part in split_region(region, max(1, _STAGING_BYTES // dtype.itemsize)):
            actual = _narrow_within(target, region, part).cpu().contiguous()
            if _as_memoryview(actual) != _as_memoryview(self._read_staged(entry, part, target.dtype, dtype)):
                return False
        return True

    def _read_staged(self, entry: TensorEntry, part: Region, torch_dtype: torch.dtype, dtype: DType) -> Tensor:
        """Return a part of an entry as a CPU tensor; `torch_dtype` and `dtype` are the same dtype."""
        staged = torch.empty(part.sizes, dtype=torch_dtype)
        stream_cast(self._thread_reader(), entry, part, dtype, MemorySink(staged))
        return staged

    def _drop_partial_checksums(self, entry: TensorEntry, region: Region) -> TensorEntry:
        """Return the entry with only the chunks that overlap a region, and no checksum of records read in part.

        The bytes read from such records are counted in `unverified_bytes`. Verifying a checksum requires all bytes of
        the record, so that every rank would read the whole model. `ckptx verify` reads and verifies all records.
        """
        chunks = []
        stored_chunks = entry.chunks
        for chunk in (
            stored_chunks.parse_overlapping(region) if isinstance(stored_chunks, LazyChunks) else stored_chunks
        ):
            overlap = chunk.region.intersect(region)
            if overlap is None:
                continue
            if chunk.record is not None and overlap != chunk.region:
                self._unverified.append(entry.dtype.nbytes(overlap.numel))
                chunk = chunk._replace(record=None)
            chunks.append(chunk)
        return entry._replace(chunks=tuple(chunks))


def target_dtype(entry: TensorEntry, target: torch.dtype) -> DType:
    """Return the `DType` of the torch dtype `target`, if the elements of `entry` can be read as it.

    Raises:
        UnsupportedError: The dtypes differ, and one of them cannot be cast.
    """
    name = str(target).removeprefix("torch.")
    dtype = DTYPES_BY_TORCH_NAME.get(name)
    if dtype is None or (dtype is not entry.dtype and not (dtype.is_castable and entry.dtype.is_castable)):
        stored_dtype = entry.dtype.torch_name or entry.dtype.name
        raise UnsupportedError(
            f'tensor "{entry.name}": is {stored_dtype} on disk, expected {name}; only floating-point '
            "tensors can be cast, pass dequantize=True (--dequantize) to decode quantized weights"
        )
    return dtype


def split_region(region: Region, max_numel: int) -> Iterator[Region]:
    """Yield `region` in parts of at most `max_numel` elements, in row-major order; nothing for an empty region."""
    if region.numel <= max_numel:
        if region.numel:
            yield region
        return
    dim = next(dim for dim, size in enumerate(region.sizes) if size > 1)
    step = max(1, max_numel // prod(region.sizes[dim + 1 :]))
    for begin in range(0, region.sizes[dim], step):
        size = min(step, region.sizes[dim] - begin)
        part = Region(
            (*region.offsets[:dim], region.offsets[dim] + begin, *region.offsets[dim + 1 :]),
            (*region.sizes[:dim], size, *region.sizes[dim + 1 :]),
        )
        yield from split_region(part, max_numel)


def _narrow_within(target: Tensor, region: Region, part: Region) -> Tensor:
    """Return the view of `target`, which holds `region`, that holds `part`; both are regions of the whole tensor."""
    for dim, (origin, offset, size) in enumerate(zip(region.offsets, part.offsets, part.sizes, strict=True)):
        target = target.narrow(dim, offset - origin, size)
    return target


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a row-major tensor as a uint8 view of one dim.

    `view` alone would refuse a tensor with a single element and a stride other than 1.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _as_memoryview(tensor: Tensor) -> memoryview:
    """Return the memory of a CPU tensor, for file readers; it keeps the tensor alive."""
    return memoryview(_as_bytes(tensor).numpy()) if tensor.numel() else memoryview(bytearray())
