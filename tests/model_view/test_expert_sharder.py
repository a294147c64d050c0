"""Which tensors `--ep` distributes, in whatever form experts are stored, and which forms are refused; no files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import TensorEntry
from ckptx.errors import UnsupportedError, UsageError
from ckptx.layout.expert_parallel import InnerSharding, find_position
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.stages import Stack, StageAssignment, StageMap
from ckptx.layout.tensor_parallel_plan import Rule, TensorParallelPlan
from ckptx.model_view.expert_sharder import ExpertSharder
from ckptx.model_view.sharder import Sharder

Shape = tuple[int, ...]
Held = dict[str, dict[int, Shape]]

DENSE: dict[str, Shape] = {"l.0.mlp.gate.weight": (4, 6), "l.0.mlp.shared_experts.up_proj.weight": (8, 6)}
FUSED: dict[str, Shape] = {"l.0.mlp.experts.gate_up_proj": (4, 8, 6), "l.0.mlp.experts.down_proj": (4, 6, 4)}
SINGLE: dict[str, Shape] = {
    f"l.0.mlp.experts.{expert}.{leaf}": shape
    for expert in range(4)
    for leaf, shape in {
        "up.weight": (8, 6),
        "up.weight_scale_inv": (2, 2),
        "up.bias": (8,),
        "up.input_scale": (),
    }.items()
}


def placed(
    shapes: Mapping[str, Shape],
    loaded: Mapping[str, str] | None = None,
    inner: InnerSharding = "experts",
    *,
    replicate: bool = False,
    ep: int = 2,
) -> Held:
    """Sizes that each rank of tp 2 x dp_shard 2 holds of each tensor of experts."""
    tensors = {name: TensorEntry(name, DTYPES_BY_NAME["BF16"], shape, ()) for name, shape in shapes.items()}
    names = {**{name: name for name in shapes}, **(loaded or {})}
    dims = ParallelDims(tp=2, dp_shard=2, ep=ep)
    sharder = ExpertSharder(tensors, names.get, dims, inner, replicate=replicate)
    found = {name: sharder.place(name) for name in shapes}
    return {
        name: {block.rank_in_stage: block.region.sizes for block in each.blocks}
        for name, each in found.items()
        if each is not None
    }


def test_dense_tensors_are_left_to_the_plan() -> None:
    assert placed({**DENSE, **FUSED}).keys() == FUSED.keys()


def test_an_expert_of_its_own_lies_on_one_rank() -> None:
    held = placed(SINGLE)
    assert [list(held[f"l.0.mlp.experts.{expert}.up.weight"]) for expert in range(4)] == [[0], [2], [1], [3]]
    assert all(held[f"l.0.mlp.experts.{expert}.up.bias"].keys() == held[f"l.0.mlp.experts.{expert}.up.weight"].keys()
               for expert in range(4))  # fmt: skip


@pytest.mark.parametrize(("inner", "weight"), [("rows", (4, 6)), ("columns", (8, 3))])
def test_rows_and_columns_divide_each_expert_but_no_scale(inner: InnerSharding, weight: Shape) -> None:
    held = placed(SINGLE, inner=inner)
    assert held["l.0.mlp.experts.3.up.weight"] == {1: weight, 3: weight}
    assert held["l.0.mlp.experts.3.up.bias"] == {1: (4,), 3: (4,)}
    assert held["l.0.mlp.experts.3.up.weight_scale_inv"] == {1: (2, 2)}
    assert held["l.0.mlp.experts.3.up.input_scale"] == {1: ()}
    replicated = placed(SINGLE, inner=inner, replicate=True)
    assert replicated["l.0.mlp.experts.3.up.weight_scale_inv"] == {1: (2, 2), 3: (2, 2)}


def test_a_stored_name_without_experts_is_found_by_its_model_name() -> None:
    stored, model = "l.0.block_sparse_moe.input_linear.weight", "l.0.block_sparse_moe.experts.gate_up_proj"
    assert placed({stored: (4, 8, 6)}, {stored: model}) == {stored: dict.fromkeys(range(4), (1, 8, 6))}


def test_a_stored_name_without_experts_is_not_that_of_one_expert() -> None:
    """A fused tensor of a trainer whose rules name the first of the tensors that it is made of."""
    with pytest.raises(UnsupportedError, match=r'does not know where the experts are in "l\.0\.moe\.weights"'):
        placed({**FUSED, "l.0.moe.weights": (4, 8, 6)}, {"l.0.moe.weights": "l.0.mlp.experts.0.up.weight"})


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (
            {**FUSED, "l.0.ffn.experts.mlp.w1": (32, 6)},
            'does not know where the experts are in "l.0.ffn.experts.mlp.w1"',
        ),
        ({**FUSED, "l.0.mlp.input_linear.weight": (4, 8, 6)}, 'experts are in "l.0.mlp.input_linear.weight"'),
        ({**FUSED, "l.0.mlp.experts.other": (3, 6)}, "different sizes along dim 0, 4 and 3"),
        ({name: shape for name, shape in SINGLE.items() if ".1." not in name}, "has 4 experts, but no expert 1"),
        ({**FUSED, "l.0.mlp.experts.7.up.weight": (8, 6)}, "has 4 experts, but no expert 0"),
        ({**FUSED, "l.0.mlp.experts.999999999.up.weight": (8, 6)}, "has 4 experts, but no expert 0"),
        ({"l.0.mlp.experts.999999998.up.weight": (8, 6)}, "but no expert 0"),
        ({**FUSED, **SINGLE, "l.0.mlp.experts.4.up.weight": (8, 6)}, "has 4 experts, but an expert 4"),
    ],
)
def test_unknown_forms_are_refused(shapes: Mapping[str, Shape], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        placed(shapes)


@pytest.mark.parametrize("name", ["l.0.conv1d.weight", "l.0.mixer.conv.weight"])
def test_a_convolution_is_no_tensor_of_experts(name: str) -> None:
    assert placed({**FUSED, name: (4, 8, 6)}).keys() == FUSED.keys()


def test_a_claimed_number_of_experts_takes_no_time() -> None:
    with pytest.raises(UsageError, match=r"belongs to a layer with 1099511627777; use one of 1, 257$"):
        placed({"l.0.mlp.experts.up": ((1 << 40) + 1, 0)})


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UsageError, match="the checkpoint has no experts; leave out --ep"):
        placed(DENSE)


def test_an_unknown_layer_after_the_last_is_distributed_too() -> None:
    """MTP layers have experts; they stay on the last stage."""
    shapes = {name.replace("l.0", f"l.{layer}"): shape for layer in range(3) for name, shape in FUSED.items()}
    tensors = {name: TensorEntry(name, DTYPES_BY_NAME["BF16"], shape, ()) for name, shape in shapes.items()}
    dims = ParallelDims(tp=2, pp=2, dp_shard=2, ep=4)
    stages = StageMap([Stack("l", 2)], 2)
    sharder = Sharder(TensorParallelPlan({"l.*.mlp.up": Rule("colwise", "model plan")}), dims, stages, None, False)
    model = sharder.place(tensors, [name for name in shapes if name.startswith("l.2.")])
    assert {name: placement.stage for name, placement in model.placements.items()} == {
        name: int(not name.startswith("l.0.")) for name in shapes
    }
    assert model.unknown_tensors == () and all(len(each.blocks) == 4 for each in model.placements.values())


@pytest.mark.parametrize(
    ("style", "layers_by_rank"), [("loop", {0: [0, 1, 4], 1: [2, 3, 5]}), ("v", {0: [0, 1, 5], 1: [2, 3, 4]})]
)
def test_a_rank_gets_all_its_virtual_stages(style: Any, layers_by_rank: dict[int, list[int]]) -> None:
    shapes = {f"l.{layer}.up": (4, 4) for layer in range(6)}
    tensors = {name: TensorEntry(name, DTYPES_BY_NAME["BF16"], shape, ()) for name, shape in shapes.items()}
    assignment = StageAssignment(2, 2, style)
    stages = StageMap([Stack("l", 6)], assignment.stage_count)
    sharder = Sharder(TensorParallelPlan({}), ParallelDims(pp=2), stages, None, False, assignment=assignment)
    model = sharder.place(tensors, [])
    found = {
        rank: [layer for layer in range(6) if model.placements[f"l.{layer}.up"].stage == rank] for rank in range(2)
    }
    assert found == layers_by_rank
    assert model.layers() == [[["l", 0, 2]], [["l", 2, 4]], [["l", 4, 5]], [["l", 5, 6]]]


def test_the_plans_of_transformers_name_the_same_tensors() -> None:
    """Every `base_model_ep_plan`: a parameter that it shards by expert is one with all experts along dim 0."""
    transformers = pytest.importorskip("transformers")
    patterns: dict[str, str] = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/configuration_*.py")):
        for plan in re.findall(r"base_model_ep_plan = \{(.*?)\}", file.read_text(), re.DOTALL):
            patterns |= dict(re.findall(r'"([^"\n]+)": "([^"\n]+)"', plan))
    by_expert = {pattern for pattern, style in patterns.items() if style == "grouped_gemm"}
    found = {pattern for pattern in patterns if find_position(pattern.replace("*", "0"), (4, 8, 6)) is not None}
    assert by_expert and found >= by_expert
    assert {patterns[pattern] for pattern in found - by_expert} <= {"replicated_with_grad_allreduce"}
