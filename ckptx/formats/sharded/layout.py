"""Plan sharded safetensors: `shard-RRRRR-model-IIIII-of-NNNNN.safetensors`, one set of files per rank.

A file is a plain safetensors file with the shards of its rank; its `__metadata__` records their offsets in the whole
tensors, in the format of torch's `HuggingFaceStorageWriter(save_distributed=True)`. A file can contain a name only
once, so the second block of a tensor on a rank goes to the second file of that rank. A rank without elements has no
file: torch's consolidation refuses files without tensors, and torch's writer omits them too.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Block, ShardedChunks, TensorEntry
from ckptx.catalog.region import Shape
from ckptx.errors import UnsupportedError
from ckptx.formats.by_stage import ShardedTensor, group_by_stage
from ckptx.formats.hf.safetensors import format_header_text, frame_header, pad_header
from ckptx.formats.sharded.file_names import shard_name
from ckptx.formats.sharding_info import OFFSETS_KEY, SHARDING_INFO, VERSION, VERSION_KEY
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.storage.interface import Location


class ShardedLayout(NamedTuple):
    """Planned files of sharded safetensors.

    Attributes:
        catalog: Tensors with the file and byte offset of each block.
        prologues: File name -> first bytes of the file: length of the safetensors header, and the header.
        file_groups: For each pipeline stage with files, the names of its files, which are written together.
    """

    catalog: Catalog
    prologues: dict[str, bytes]
    file_groups: tuple[tuple[str, ...], ...]


def allocate(root: Location, tensors: Iterable[ShardedTensor], dims: ParallelDims) -> ShardedLayout:
    """Assign sharded tensors to planned files, without writing them.

    In each file, wide dtypes come first, so that the offset of each block is a multiple of the element size; tensors of
    one width are in the given order.

    Args:
        root: Output directory.
        tensors: Names, dtypes and shapes, with stage and blocks. A rank may have several blocks of a tensor.
        dims: The mesh.

    Raises:
        UnsupportedError: safetensors cannot hold a tensor, or a block of it.
    """
    catalog, prologues, groups = Catalog(root, "sharded", {}), {}, []
    for stage, members in enumerate(group_by_stage(tensors, dims)):
        members.sort(key=lambda member: -member[0].dtype.bits)
        stage_files = _StageFiles(dims.ranks_of_stage(stage), members)
        for entry, blocks in members:
            stage_files.append(entry, blocks)
        starts = {}
        for name, prologue, nbytes in stage_files.finish():
            prologues[name], starts[name] = prologue, len(prologue)
            catalog.files[name] = len(prologue) + nbytes
        for entry, chunks in stage_files.allocated:
            for i, file in enumerate(chunks.files):
                chunks.offsets[i] += starts[file]
            catalog.tensors[entry.name] = entry._replace(chunks=chunks, replicas=())
        if starts:
            groups.append(tuple(starts))
    return ShardedLayout(catalog, prologues, tuple(groups))


def _block_positions(blocks: tuple[Block, ...]) -> list[tuple[int, int]]:
    """Return (rank in stage, file number from 0) for each block: block i of a rank goes to file i of the rank."""
    last_numbers: dict[int, int] = {}
    positions = []
    for block in blocks:
        last_numbers[block.rank_in_stage] = last_numbers.get(block.rank_in_stage, -1) + 1
        positions.append((block.rank_in_stage, last_numbers[block.rank_in_stage]))
    return positions


class _PlannedFile:
    """The header of one file while tensors are appended.

    Attributes:
        header_tensors: (name, dtype, shape, begin, end) of each block, as for `format_header_text`.
        sharding_info: Tensor name -> its entry in DCP_SHARDING_INFO.
        nbytes: Bytes of the tensors appended so far.
    """

    __slots__ = ("header_tensors", "nbytes", "sharding_info")

    def __init__(self) -> None:
        self.header_tensors: list[tuple[str, DType, Shape, int, int]] = []
        self.sharding_info: dict[str, dict[str, Shape]] = {}
        self.nbytes = 0

    def prologue(self) -> bytes:
        metadata = {SHARDING_INFO: json.dumps(self.sharding_info), VERSION_KEY: VERSION, "format": "pt"}
        return frame_header(pad_header(format_header_text(self.header_tensors, metadata)))


class _StageFiles:
    """The files of one pipeline stage, while tensors are appended to them.

    Attributes:
        allocated: Each tensor with its chunks. Their offsets count from the end of the header, whose length is known
            only after the last tensor.
    """

    def __init__(self, ranks: range, members: list[tuple[TensorEntry, tuple[Block, ...]]]) -> None:
        """Name the files.

        Args:
            ranks: Global ranks of the stage.
            members: All tensors of the stage with their blocks, which must be kept alive: their `id` is a key.
        """
        # `id` of blocks -> (rank in stage, file number) of each.
        self._positions = {
            id(blocks): _block_positions(blocks) for blocks in {id(blocks): blocks for _, blocks in members}.values()
        }
        counts: dict[int, int] = {}
        for positions in self._positions.values():
            for rank_in_stage, number in positions:
                counts[rank_in_stage] = max(counts.get(rank_in_stage, 0), number + 1)
        self._names = {
            (rank_in_stage, number): shard_name(ranks[rank_in_stage] + 1, number + 1, counts[rank_in_stage])
            for rank_in_stage in sorted(counts)
            for number in range(counts[rank_in_stage])
        }
        self._files = {name: _PlannedFile() for name in self._names.values()}
        # (`id` of blocks, dtype) -> file, number of bytes, and entry in DCP_SHARDING_INFO, of each block.
        self._shardings: dict[tuple[int, DType], tuple[tuple[str, ...], tuple[int, ...], list[dict[str, Shape]]]] = {}
        self.allocated: list[tuple[TensorEntry, ShardedChunks]] = []

    def append(self, entry: TensorEntry, blocks: tuple[Block, ...]) -> None:
        """Append the blocks of a tensor to the files of their ranks."""
        key = (id(blocks), entry.dtype)
        sharding = self._shardings.get(key)
        if sharding is None:
            sharding = self._shardings[key] = (
                tuple(self._names[position] for position in self._positions[id(blocks)]),
                tuple(_block_nbytes(entry, block) for block in blocks),
                [{OFFSETS_KEY: block.region.offsets} for block in blocks],
            )
        files, lengths, infos = sharding
        offsets = array("q")
        for block, name, length, info in zip(blocks, files, lengths, infos, strict=True):
            file = self._files[name]
            offsets.append(file.nbytes)
            file.header_tensors.append((entry.name, entry.dtype, block.region.sizes, file.nbytes, file.nbytes + length))
            file.sharding_info[entry.name] = info
            file.nbytes += length
        self.allocated.append((entry, ShardedChunks(blocks, files, offsets, lengths)))

    def finish(self) -> Iterable[tuple[str, bytes, int]]:
        """Yield the name of each file, its first bytes (length and header), and the number of bytes of its tensors."""
        for name, file in self._files.items():
            yield name, file.prologue(), file.nbytes


def _block_nbytes(entry: TensorEntry, block: Block) -> int:
    """Return the bytes of a block; raises UnsupportedError if safetensors cannot hold the block."""
    if not entry.dtype.in_safetensors:
        raise UnsupportedError(
            f'tensor "{entry.name}" has dtype {entry.dtype}, which safetensors cannot hold; write a DCP instead'
        )
    numel = block.region.numel
    if numel * entry.dtype.bits % 8:
        raise UnsupportedError(
            f'tensor "{entry.name}" has dtype {entry.dtype}; block {block.region} does not fill whole bytes, '
            "shard it along another dim"
        )
    return entry.dtype.nbytes(numel)
