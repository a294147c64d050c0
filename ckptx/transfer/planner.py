"""From two catalogs to a copy plan, with the proof that every element of the target is written exactly once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Chunk, Frame, TensorEntry
from ckptx.catalog.region import Shape, coverage_fault
from ckptx.errors import Defect
from ckptx.transfer.plan import CopyPlan, Item, TargetFile

FrameOf = Callable[[DType, Shape], Frame]


def plan_copy(
    source: Catalog,
    target: Catalog,
    origin: Mapping[str, str],
    *,
    frame_of: FrameOf | None = None,
    prologues: Mapping[str, bytes] | None = None,
) -> CopyPlan:
    """Plans the copy of every tensor of `target` from its tensor of `source`.

    Args:
        source: Opened, payloads located.
        target: Allocated: every chunk has its file and offset.
        origin: Name in `target` -> name in `source`.
        frame_of: Frame around a block, for formats that have one; chunks of `target` then span the frame too.
        prologues: First bytes of a target file, by file name.

    Raises:
        Defect: The target is not exactly covered by its chunks, or a file is not exactly covered by blocks.
    """
    prologues = prologues or {}
    items: dict[str, list[Item]] = {name: [] for name in target.files}
    bytes_read = 0
    for entry in target.tensors.values():
        read_from = source.tensors[origin[entry.name]]
        _check_pair(read_from, entry)
        bytes_read += read_from.nbytes
        for chunk in entry.chunks:
            frame = frame_of(entry.dtype, chunk.region.sizes) if frame_of else None
            items[chunk.file].append(_item(entry, chunk, read_from, frame))
    files = []
    for name, blocks in items.items():
        blocks.sort(key=lambda item: item.offset)
        file = TargetFile(name, target.files[name], prologues.get(name, b""), tuple(blocks))
        _check_file(file)
        files.append(file)
    return CopyPlan(tuple(files), bytes_read, sum(target.files.values()))


def _item(entry: TensorEntry, chunk: Chunk, source: TensorEntry, frame: Frame | None) -> Item:
    nbytes = entry.dtype.nbytes(chunk.region.numel)
    return Item(entry.name, source, chunk.region, entry.dtype, chunk.offset, nbytes, frame)


def _check_pair(source: TensorEntry, target: TensorEntry) -> None:
    if source.shape != target.shape:
        raise Defect(
            f'tensor "{target.name}": planned with shape {target.shape}, the source has {source.shape}; this is a '
            "defect of ckptx, please report it"
        )
    if len(target.chunks) == 1 and target.chunks[0].region.sizes == target.shape:
        return
    fault = coverage_fault(target.shape, [chunk.region for chunk in target.chunks])
    if fault is not None:
        raise Defect(
            f'tensor "{target.name}": planned with {fault.kind} {fault.region}; this is a defect of ckptx, '
            "please report it"
        )


def _check_file(file: TargetFile) -> None:
    position = len(file.prologue)
    for item in file.items:
        if item.offset != position:
            raise Defect(
                f'{file.name}: block of "{item.name}" planned at byte {item.offset}, needed {position}; this is a '
                "defect of ckptx, please report it"
            )
        position = item.end
    if position != file.nbytes:
        raise Defect(
            f"{file.name}: planned {file.nbytes} bytes, blocks end at {position}; this is a defect of ckptx, "
            "please report it"
        )
