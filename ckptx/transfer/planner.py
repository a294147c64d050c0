"""Planner of a copy between two catalogs, with a check that every target element is written exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Block, BytesEntry, Chunk, ShardedChunks, TensorEntry
from ckptx.catalog.object_ids import ObjectIds
from ckptx.catalog.region import Shape, find_coverage_fault, full_region
from ckptx.errors import InternalError
from ckptx.transfer.plan import ArchiveFrameBuilder, CopyPlan, CopyStep, FileGroup, TargetFile

_REPORT_BUG = "this is a bug in ckptx, please report it"


def plan_copy(
    source: Catalog,
    target: Catalog,
    source_names: Mapping[str, str],
    *,
    build_frame: ArchiveFrameBuilder | None = None,
    prologues: Mapping[str, bytes] | None = None,
    file_groups: Iterable[Sequence[str]] | None = None,
) -> CopyPlan:
    """Plan the copy of every tensor and pickled object of `target` from the one of `source` with its name there.

    Args:
        source: Source catalog, whose chunks are those of the elements also where the format has archives
            (`locate_payloads`).
        target: Target catalog, in which every chunk has its file and offset. Tensors of a file group with several files
            are in the order of their blocks.
        source_names: Name in `target` -> name in `source`, for tensors and objects.
        build_frame: Function that returns the archive frame around a block from dtype and shape of the block; offsets
            and lengths of the chunks of `target` then include the frame. None for formats without frames.
        prologues: File name -> bytes before the first block of the file; None for no file.
        file_groups: Names of the files of each group that is written together; None to write each file on its own.

    Raises:
        InternalError: A tensor has another shape in the source, the target is not exactly covered by its chunks, or a
            file is not exactly covered by blocks.
    """
    prologues = prologues or {}
    steps = [CopyStep(entry, source.tensors[source_names[entry.name]], True) for entry in target.tensors.values()]
    steps += [
        CopyStep(_convert_to_tensor(entry), _convert_to_tensor(source.objects[source_names[entry.name]]), False)
        for entry in target.objects.values()
    ]
    coverage_check = _CoverageCheck()
    for step in steps:
        coverage_check.check(step)
    groups = [tuple(group) for group in file_groups] if file_groups is not None else [(name,) for name in target.files]
    group_by_file = {name: index for index, group in enumerate(groups) for name in group}
    steps_by_group: list[list[CopyStep]] = [[] for _ in groups]
    for step in steps:
        steps_by_group[group_by_file[step.target.position[0]]].append(step)
    files = list(target.files)
    end_by_file = {name: len(prologues.get(name, b"")) for name in files}
    block_counts = dict.fromkeys(files, 0)
    for index, group in enumerate(steps_by_group):
        if len(groups[index]) == 1:
            group.sort(key=lambda step: step.target.position[1])
        _check_files(group, frozenset(groups[index]), end_by_file, block_counts)
    for name, nbytes in target.files.items():
        if end_by_file[name] != nbytes:
            raise InternalError(f"{name}: planned {nbytes} bytes, blocks end at {end_by_file[name]}; {_REPORT_BUG}")
    index_by_file = {name: index for index, name in enumerate(files)}
    return CopyPlan(
        tuple(TargetFile(name, target.files[name], prologues.get(name, b""), block_counts[name]) for name in files),
        tuple(
            FileGroup(tuple(index_by_file[name] for name in names), tuple(group_steps))
            for names, group_steps in zip(groups, steps_by_group, strict=True)
        ),
        build_frame,
        sum(step.source.nbytes for step in steps),
        sum(target.files.values()),
    )


def _convert_to_tensor(entry: BytesEntry) -> TensorEntry:
    """Return the entry of a pickled object as a 1-d U8 tensor of its bytes."""
    shape = (entry.nbytes,)
    return TensorEntry(
        entry.name, DTYPES_BY_NAME["U8"], shape, (Chunk(full_region(shape), entry.file, entry.offset, entry.nbytes),)
    )


class _CoverageCheck:
    """Check that each target element is written exactly once; tensors with the same blocks are checked only once."""

    def __init__(self) -> None:
        self._checked: set[tuple[int, Shape]] = set()
        self._ids = ObjectIds()

    def check(self, step: CopyStep) -> None:
        """Check that source and target have the same shape, and that the target is covered exactly by its chunks.

        Raises:
            InternalError: The shapes differ, or elements are missing or written twice.
        """
        target = step.target
        if step.source.shape != target.shape:
            raise InternalError(
                f'tensor "{target.name}": planned with shape {target.shape}, but the source has {step.source.shape}; '
                f"{_REPORT_BUG}"
            )
        chunks = target.chunks
        if type(chunks) is ShardedChunks:
            key = (self._ids(chunks.blocks), target.shape)
            if key not in self._checked:
                self._checked.add(key)
                _check_coverage(target, [block for block in chunks.blocks if not block.is_replica])
                _check_replicas(target, chunks.blocks)
        elif len(chunks) != 1 or chunks[0].region.sizes != target.shape:
            _check_coverage(target, [Block(0, chunk.region) for chunk in chunks])


def _check_coverage(target: TensorEntry, blocks: Sequence[Block]) -> None:
    fault = find_coverage_fault(target.shape, [block.region for block in blocks])
    if fault is not None:
        raise InternalError(f'tensor "{target.name}": planned with {fault.kind} {fault.region}; {_REPORT_BUG}')


def _check_replicas(target: TensorEntry, blocks: Sequence[Block]) -> None:
    regions = {block.region for block in blocks if not block.is_replica}
    for block in blocks:
        if block.is_replica and block.region not in regions:
            raise InternalError(
                f'tensor "{target.name}": a replica of {block.region} was planned, but no block of this region; '
                f"{_REPORT_BUG}"
            )


def _check_files(
    steps: Sequence[CopyStep], files: frozenset[str], end_by_file: dict[str, int], block_counts: dict[str, int]
) -> None:
    """Check that each block of a file group begins where the one before it in its file ends.

    Args:
        steps: Steps of the file group, in the order of their blocks.
        files: Names of the files of the group.
        end_by_file: File name -> end of the last block in bytes, first that of the prologue; updated.
        block_counts: File name -> number of blocks; updated.

    Raises:
        InternalError: A block is in a file of another group, or there is a gap or an overlap.
    """
    for step in steps:
        chunks = step.target.chunks
        positions: Iterable[tuple[str, int, int]]
        if type(chunks) is ShardedChunks:
            positions = zip(chunks.files, chunks.offsets, chunks.lengths, strict=True)
        else:
            positions = ((chunk.file, chunk.offset, chunk.nbytes) for chunk in chunks)
        for file, offset, nbytes in positions:
            if file not in files:
                raise InternalError(
                    f'{file}: block of "{step.target.name}" planned outside of its group; {_REPORT_BUG}'
                )
            if offset != end_by_file[file]:
                raise InternalError(
                    f'{file}: block of "{step.target.name}" planned at byte {offset}, expected {end_by_file[file]}; '
                    f"{_REPORT_BUG}"
                )
            end_by_file[file] = offset + nbytes
            block_counts[file] += 1
