"""Partition of the parameters of a group over the ranks by ZeRO, and the checks of its flat tensors.

The formulas are in `flat_chunks`. DeepSpeed also stores `param_slice_mappings`, which are wrong with
`round_robin_gradients`; the order of `param_shapes` is right in any case.

Source: `get_data_parallel_partitions` in `deepspeed/runtime/zero/stage_1_and_2.py`, `partition_parameters.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import prod

from ckptx.catalog.region import Shape
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.deepspeed.flat_chunks import FlatChunks, FlatLayout, FlatPart
from ckptx.formats.unsupported import SAVE_WHERE_TRAINED

_ALIGNMENT = 2  # the flat tensor of stages 1 and 2 is padded to a multiple of this number of elements per rank


class Partition:
    """Partition of the parameters of one group over the ranks.

    Attributes:
        layouts: Layout of each parameter, by name.
        first: Index of the first element of each parameter in the flat tensors of stage 3; 0 in stages 1 and 2.
        numel: Number of elements of the flat tensor of each rank, with padding.
        required: For each rank, the minimum number of elements of its flat tensor. It is less than `numel` in stages 1
            and 2, where the file may lack the padding at the end.
        checked_ranks: Parameter name -> ranks whose flat tensor is checked when that parameter is read, see
            `FlatChunks`.
    """

    __slots__ = ("checked_ranks", "first", "layouts", "numel", "required")

    def __init__(self, layouts: dict[str, FlatLayout], first: dict[str, int], numel: int, required: list[int]) -> None:
        self.layouts, self.first, self.numel, self.required = layouts, first, numel, required
        self.checked_ranks: dict[str, set[int]] = {}

    def chunks(self, name: str, parts: Sequence[FlatPart]) -> FlatChunks:
        """Return the chunks of one parameter in flat tensors of this group, one per rank."""
        return FlatChunks(
            self.layouts[name], parts, self.first[name], frozenset(self.checked_ranks.get(name, frozenset()))
        )

    def check(self, parts: Sequence[FlatPart], where: str, what: str) -> None:
        """Check length and dtype of the flat tensors of all ranks.

        Args:
            parts: The flat tensor of each rank.
            where: Location to which file names are relative, for error messages.
            what: Noun phrase for the flat tensors, for error messages.

        Raises:
            InputError: One is too short or too long, or has another dtype than that of rank 0.
        """
        for part, required in zip(parts, self.required, strict=True):
            if not required <= part.numel <= self.numel:
                raise InputError(
                    f"{where}/{part.file}: {what} has {part.numel:,} elements, but the shapes of the parameters "
                    f"require {_count_text(required, self.numel)}; the files are damaged or of different "
                    "saves, copy them again"
                )
            if part.dtype is not parts[0].dtype:
                raise InputError(
                    f"{where}/{part.file}: {what} is {part.dtype}, but {parts[0].dtype} in {parts[0].file}; the files "
                    "are of different saves, copy them again"
                )


def _count_text(required: int, numel: int) -> str:
    return f"{numel:,}" if required == numel else f"{required:,} to {numel:,}"


def partition_by_group(
    shapes: Mapping[str, Shape], paddings: Sequence[int] | None, parts: Sequence[FlatPart], where: str
) -> Partition:
    """Return the partition of a group in stages 1 and 2.

    Args:
        shapes: Shapes of the parameters, in their order in the flat tensor.
        paddings: Elements between each parameter and the next; None for none.
        parts: Flat tensor of the masters on each rank. That of the last rank may lack the padding at its end.
        where: Location of the checkpoint, for error messages.

    Raises:
        InputError: The flat tensors do not have the length that the shapes require, or there are paddings of another
            number of parameters.
    """
    if paddings is not None and len(paddings) != len(shapes):
        raise InputError(
            f"{where}/{parts[0].file}: param_alignment_paddings are of {len(paddings)} parameters, but param_shapes "
            f"has {len(shapes)}; the files are of different saves, copy them again"
        )
    starts: list[int] = []
    end = total = 0
    for shape, padding in zip(shapes.values(), paddings or (0,) * len(shapes), strict=True):
        starts.append(end)
        total = end + prod(shape)
        end = total + padding
    ranks = len(parts)
    # The flat tensor of a single rank lacks its padding.
    numel_per_rank = parts[0].numel if ranks > 1 else -(-total // _ALIGNMENT) * _ALIGNMENT
    if not 0 <= numel_per_rank * ranks - total < _ALIGNMENT * ranks:
        raise InputError(
            f"{where}/{parts[0].file}: the fp32 masters have {parts[0].numel:,} elements on each of {ranks} ranks, but "
            f"the parameters have {total:,}; the files are damaged or of different saves, copy them again"
        )
    numel_per_rank = max(numel_per_rank, 1)
    layouts = {
        name: FlatLayout(shape, start, numel_per_rank)
        for (name, shape), start in zip(shapes.items(), starts, strict=True)
    }
    required = [max(min(total - rank * numel_per_rank, numel_per_rank), 0) for rank in range(ranks)]
    partition = Partition(layouts, dict.fromkeys(shapes, 0), numel_per_rank, required)
    names = list(shapes)
    for rank in range(ranks):  # the first parameter with elements on a rank checks its flat tensor
        index = max(bisect_right(starts, rank * numel_per_rank) - 1, 0)
        while index < len(names) and rank not in layouts[names[index]].ranks:
            index += 1  # skips parameters without elements, and one that ends before the padding between two
            if index < len(names) and starts[index] >= (rank + 1) * numel_per_rank:
                break
        if index < len(names) and rank in layouts[names[index]].ranks:
            partition.checked_ranks.setdefault(names[index], set()).add(rank)
    return partition


def partition_by_parameter(shapes: Mapping[str, Shape], ranks: int) -> Partition:
    """Return the partition of a sub-group in stage 3, or of frozen parameters, each in a flat tensor of its own.

    Args:
        shapes: Shapes of the parameters, in their order in the flat tensor.
        ranks: Number of data parallel ranks.
    """
    layouts: dict[str, FlatLayout] = {}
    known: dict[str, FlatLayout] = {}  # parameters of one shape share a layout
    first: dict[str, int] = {}
    total = 0
    for name, shape in shapes.items():
        numel_per_rank = -(-prod(shape) // ranks)
        layouts[name] = known.setdefault(repr(shape), FlatLayout(shape, 0, max(numel_per_rank, 1)))
        first[name] = total
        total += numel_per_rank
    partition = Partition(layouts, first, total, [total] * ranks)
    names = [name for name, layout in layouts.items() if layout.ranks]
    for rank in range(ranks) if names else ():  # the checks of flat tensors are spread over the parameters
        for attempt in range(min(len(names), 8)):  # a small parameter is not on every rank
            name = names[(rank + attempt) % len(names)]
            if rank in layouts[name].ranks:
                partition.checked_ranks.setdefault(name, set()).add(rank)
                break
        else:
            largest = max(names, key=lambda name: len(layouts[name].ranks))
            if rank in layouts[largest].ranks:
                partition.checked_ranks.setdefault(largest, set()).add(rank)
    return partition


def check_partition_counts(counts: Sequence[int], ranks: int, where: str) -> None:
    """Check that every group is partitioned over all ranks.

    Raises:
        InputError: A group is partitioned over more ranks than have files.
        UnsupportedError: It is partitioned over fewer.
    """
    for count in counts:
        if count > ranks:
            raise InputError(
                f"{where}: optimizer states of {ranks} of {count} ranks; copy the *_optim_states.pt files of the other "
                "ranks"
            )
        if count < ranks:
            raise UnsupportedError(
                f"{where}: a group of parameters is partitioned over {count} of {ranks} ranks, as with MiCS or "
                f"experts, and no file records which; {SAVE_WHERE_TRAINED}"
            )
