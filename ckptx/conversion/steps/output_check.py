"""Check after writing: compare the staged files, as a reader sees them, with the plan.

Headers are parsed again from the files, and markers from the bytes that will be written, by the code that opens
checkpoints: file, offset, dtype and shape of each tensor must be those of the plan. This finds defects of a writer, and
of a header that was restored from the record in `ckptx.json`. `dcp_check` does the same for a DCP.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, ShardedChunks, TensorEntry
from ckptx.catalog.object_ids import ObjectIds
from ckptx.catalog.region import Shape
from ckptx.errors import InputError, InternalError
from ckptx.formats.hf.layout import HuggingFaceLayout
from ckptx.formats.hf.reader import parse_index, read_header
from ckptx.formats.hf.safetensors import HeaderTensor
from ckptx.formats.sharding_info import contains_shards, read_sharding_info, recorded_offsets
from ckptx.storage.interface import Source
from ckptx.transfer.executor import CopyResult
from ckptx.wording import counted


def check_huggingface(tree: Source, layout: HuggingFaceLayout) -> None:
    """Read headers and index back, and compare them with the plan.

    Raises:
        InputError: A header that the manifest records marks whole tensors as parts of larger ones.
        InternalError: Anything else differs from the plan.
    """
    catalog = layout.catalog
    planned = _PlannedBlocks(catalog)
    with tree.open() as files:
        for name in catalog.files:
            header = read_header(files, name)
            if contains_shards(header, name):
                raise InputError(
                    f"{name}: its header, as recorded in ckptx.json, marks whole tensors as parts of larger ones; "
                    "remove ckptx.json and convert again"
                )
            for tensor in header.tensors:
                planned.record_found(tensor, None, name)
    planned.require_all_found()
    files_by_name = {name: entry.chunks[0].file for name, entry in catalog.tensors.items()}
    if layout.index_text is None:
        if len(catalog.files) != 1:
            raise plan_difference_error(str(tree.location), f"{counted(len(catalog.files), 'file')} and no index")
    elif parse_index(layout.index_text, tree.location / layout.index_name) != files_by_name:
        raise plan_difference_error(layout.index_name, "an index that does not list the files of the tensors")


def check_sharded(tree: Source, catalog: Catalog) -> None:
    """Read the headers of shards back, and compare them with the plan.

    Raises:
        InternalError: A block differs from the plan.
    """
    planned = _PlannedBlocks(catalog)
    with tree.open() as files:
        for name in catalog.files:
            header = read_header(files, name)
            info = read_sharding_info(header.metadata, name) or {}
            for tensor in header.tensors:
                offsets = recorded_offsets(info.get(tensor.name), tensor.name, tensor.shape, name)
                planned.record_found(tensor, offsets, name)
    planned.require_all_found()


def check_digests(outcome: CopyResult, recorded: Mapping[str, str]) -> None:
    """Compare the digests of the copied tensors with those recorded at the first conversion.

    Raises:
        InputError: A digest differs.
    """
    for name, digest in recorded.items():
        if outcome.digests[name] != digest:
            raise changed_bytes_error(name, outcome.digests[name], digest)


def changed_bytes_error(name: str, found: str, recorded: str) -> InputError:
    """Return the error for a tensor whose digest differs from the recorded one."""
    return InputError(
        f'tensor "{name}": digest is {found}, but ckptx.json records {recorded}; the bytes changed since they '
        "were converted, restore the checkpoint from a copy"
    )


class _PlannedBlocks:
    """Planned blocks by tensor and file, with a count of those found.

    A file has at most one block of each tensor, and tensors with the same shards share the list of their files.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._file_indices: dict[int, dict[str, int]] = {}
        self._ids = ObjectIds()
        self._found = 0

    def record_found(self, tensor: HeaderTensor, offsets: Shape | None, file: str) -> None:
        """Record a block that was found, and compare it with the plan.

        Args:
            tensor: Tensor from the header of the file.
            offsets: Offset of the block in the whole tensor, by dimension; None for the whole tensor.
            file: Name of the file.

        Raises:
            InternalError: No such block was planned.
        """
        name, dtype, shape, begin, end = tensor
        entry = self._catalog.tensors.get(name)
        chunk = self._planned_chunk(entry, file) if entry is not None and entry.dtype is dtype else None
        if (
            chunk is None
            or (chunk.offset, chunk.nbytes, chunk.region.sizes) != (begin, end - begin, shape)
            or (any(chunk.region.offsets) if offsets is None else chunk.region.offsets != offsets)
        ):
            raise plan_difference_error(file, f'"{name}" {dtype} {list(shape)} at byte {begin}')
        self._found += 1

    def _planned_chunk(self, entry: TensorEntry, file: str) -> Chunk | None:
        chunks = entry.chunks
        if type(chunks) is not ShardedChunks:
            return next((chunk for chunk in chunks if chunk.file == file), None)
        key = self._ids(chunks.files)
        numbers = self._file_indices.get(key)
        if numbers is None:
            numbers = self._file_indices[key] = {name: number for number, name in enumerate(chunks.files)}
        return chunks[numbers[file]] if file in numbers else None

    def require_all_found(self) -> None:
        """Raise InternalError if a planned block was not found.

        Comparing numbers is enough, because names in a header are unique, so that no block counts twice.
        """
        planned = sum(len(entry.chunks) for entry in self._catalog.tensors.values())
        if self._found != planned:
            raise plan_difference_error(str(self._catalog.root), f"{self._found} blocks of {planned}")


def plan_difference_error(where: str, found: str) -> InternalError:
    """Return the error for a file that differs from the plan.

    Args:
        where: The file.
        found: Contents of the file that differ.
    """
    return InternalError(f"{where}: contains {found}, which differs from the plan; please report it")
