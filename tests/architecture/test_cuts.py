"""A cut of a model's tensors, pulled back to the tensors on disk: against transformers' own way back to disk.

Every element of a model's tensor is given the number of the rank that holds it. Transformers then takes these numbers
to disk as it takes weights there, and they must be those of the blocks that the tensors on disk are cut into.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from ckptx.architecture import class_table
from ckptx.catalog.entry import Block
from ckptx.catalog.region import Shape
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement, blocks_of_stage
from ckptx.layout.tensor_parallel_plan import decide_placement
from ckptx.mapping.pull_back import PullBack
from ckptx.mapping.rules import NameRules
from tests.architecture.small_models import SMALL, small_model


def owners(shape: Shape, blocks: tuple[Block, ...]) -> torch.Tensor:
    """Per element of a tensor the rank_in_stage that holds it; -1 where none does."""
    held = torch.full(shape, -1, dtype=torch.int64)
    for block in blocks:
        place = tuple(slice(o, o + s) for o, s in zip(block.region.offsets, block.region.sizes, strict=True))
        assert (held[place] == -1).all()
        held[place] = block.rank_in_stage
    return held


def compared(class_name: str, dims: ParallelDims, injected: bool = False) -> tuple[int, list[str]]:
    """How many tensors on disk were cut, and those that are cut otherwise than the model's."""
    model, config = small_model(class_name, **copy.deepcopy(SMALL[class_name]))
    known = class_table.lookup(class_name)
    assert known is not None
    plan = known.tensor_parallel_plan(config)
    state = dict(model.state_dict())

    def blocks_of(name: str, shape: Shape) -> tuple[Block, ...]:
        placement = decide_placement(plan, name, shape, dims.tp).placement
        return blocks_of_stage(shape, placement, dims, replicate=False)

    def wrong_blocks_of(name: str, shape: Shape) -> tuple[Block, ...]:
        placement = Placement(len(shape) - 1, (shape[-1],)) if name.endswith("gate_up_proj") else None
        return blocks_of_stage(shape, placement, dims, replicate=False)

    ranks = {name: owners(tuple(value.shape), blocks_of(name, tuple(value.shape))) for name, value in state.items()}
    expected = revert_weight_conversion(model, ranks)
    rules = NameRules(
        known.conversions(config),
        known.base_prefix,
        known.model_name_patterns,
        shape_of=lambda name: tuple(state[name].shape) if name in state else None,
    )
    shapes: dict[str, Shape] = {name: tuple(value.shape) for name, value in expected.items()}
    pulled = PullBack(rules, shapes, wrong_blocks_of if injected else blocks_of)
    wrong = []
    for name, held in expected.items():
        blocks = pulled.blocks(name)
        if blocks is None or not torch.equal(owners(shapes[name], blocks), held):
            wrong.append(name)
    return sum(len(held.unique()) > 1 for held in expected.values()), wrong


@pytest.mark.parametrize("class_name", SMALL)
@pytest.mark.parametrize("dims", [ParallelDims(tp=2), ParallelDims(tp=3, dp_shard=2)], ids=["tp2", "tp3 dp2"])
def test_disk_tensors_are_cut_as_the_model_s(class_name: str, dims: ParallelDims) -> None:
    count, wrong = compared(class_name, dims)
    assert count > 3 and not wrong


def test_another_cut_would_be_told_from_it() -> None:
    assert compared("MixtralForCausalLM", ParallelDims(tp=2), injected=True)[1]


@pytest.mark.slow
@pytest.mark.parametrize("class_name", SMALL)
@pytest.mark.parametrize("tp", [4, 5, 7])
def test_disk_tensors_are_cut_as_the_model_s_at_other_sizes(class_name: str, tp: int) -> None:
    assert not compared(class_name, ParallelDims(tp=tp))[1]
