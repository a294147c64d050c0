"""Group sharded tensors by pipeline stage, for formats in which each rank has files of its own."""

from __future__ import annotations

from collections.abc import Iterable

from ckptx.catalog.entry import Block, TensorEntry
from ckptx.layout.parallel_dims import ParallelDims

# A tensor, its pipeline stage, and its block on each rank of the stage.
ShardedTensor = tuple[TensorEntry, int, tuple[Block, ...]]


def group_by_stage(
    tensors: Iterable[ShardedTensor], dims: ParallelDims
) -> list[list[tuple[TensorEntry, tuple[Block, ...]]]]:
    """Return, for each of the `dims.pp` stages, its tensors with their blocks, in the order given.

    Equal tuples of blocks become one object, so that values derived from them can be cached by `id` and are computed
    once per distinct sharding.
    """
    stages: list[list[tuple[TensorEntry, tuple[Block, ...]]]] = [[] for _ in range(dims.pp)]
    unique_blocks: dict[tuple[Block, ...], tuple[Block, ...]] = {}
    unique_ids: set[int] = set()
    for entry, stage, blocks in tensors:
        if id(blocks) not in unique_ids:
            blocks = unique_blocks.setdefault(blocks, blocks)
            unique_ids.add(id(blocks))
        stages[stage].append((entry, blocks))
    return stages
