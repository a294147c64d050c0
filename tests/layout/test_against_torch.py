"""The same rectangles as torch and transformers give their ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, product

import numpy as np
import pytest

from ckptx.catalog.region import Region, full_region
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement, blocks_of_stage, tp_regions
from ckptx.layout.stages import split_layers
from ckptx.layout.styles import STYLES
from ckptx.layout.tensor_parallel_plan import Rule, TensorParallelPlan, decide_placement
from tests.layout.fake_ranks import Answers, Asked, Elements, Model, Shape, ask

# Sizes that divide by nothing, that divide, and with fewer rows than ranks.
FSDP = [
    *(((10, 4), dim, 2, 2) for dim in (0, 1, None)),
    *(((97, 7), dim, 2, 3) for dim in (0, 1, None)),
    ((64, 2), 0, 3, 4),
    ((7, 5), 0, 2, 3),
    ((3, 5), 1, 3, 2),
    *(((n,), dim, 2, 3) for n in (10, 7) for dim in (0, None)),
]
MORE_FSDP = [
    ((rows, columns), dim, tp, dp)
    for (rows, columns), dim in product([(10, 4), (101, 4), (97, 5), (64, 8), (7, 10), (3, 7)], [0, 1, None])
    for tp, dp in ((2, 2), (2, 3), (3, 2), (3, 4), (4, 3))
]
SHARDED = [(shape, dim, tp) for shape in ((10, 101, 7), (97, 3, 64)) for dim in range(3) for tp in (2, 3, 4, 8)]
PACKED = list(product([48, 194, 101, 50, 10, 6, 3], [2, 3, 4, 7]))
STAGES = list(product([4, 10, 32, 61], [1, 2, 3, 4]))
SIZES = (2, 3, 4)
MODELS = ["llama-untied", "qwen2", "phi3", "qwen3-moe", "gemma4-vlm"]
MORE_MODELS = ["gemma4-moe", "gemma4-ple", "gpt-neox", "deepseek-v3", "mixtral", "gemma3-vlm", "qwen2.5-vl"]


@pytest.fixture(scope="module")
def answers() -> Answers:
    return ask(Asked(FSDP, SHARDED, PACKED, STAGES, MODELS, SIZES[:2]))


def elements(shape: Shape, regions: list[Region]) -> Iterator[Elements]:
    """The row-major indices of the elements of each rectangle."""
    numbered = np.arange(int(np.prod(shape))).reshape(shape)
    for offsets, sizes in regions:
        yield numbered[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))]


def is_same(shape: Shape, regions: list[Region], dim: int, theirs: Elements) -> bool:
    """True when the rectangles, one after another along `dim`, are the local tensor of a rank."""
    ours = list(elements(shape, regions))
    if not ours:
        return theirs.size == 0
    return np.array_equal(np.concatenate(ours, axis=dim), theirs)


def assert_holds_alike(cases: list[tuple[Shape, int | None, int, int]], held: list[list[Elements]]) -> None:
    for (shape, dim, tp, dp), ranks in zip(cases, held, strict=True):
        placement = None if dim is None else Placement(dim, (shape[dim],))
        blocks = blocks_of_stage(shape, placement, ParallelDims(tp=tp, dp_shard=dp), True)
        for rank, theirs in enumerate(ranks):
            mine = [block.region for block in blocks if block.rank_in_stage == rank]
            assert is_same(shape, mine, 0, theirs), (shape, dim, tp, dp, rank)


def test_fsdp_inside_tp_holds_what_fully_shard_holds(answers: Answers) -> None:
    assert_holds_alike(FSDP, answers.fsdp)


@pytest.mark.slow
def test_fsdp_inside_tp_on_more_shapes_and_meshes() -> None:
    assert_holds_alike(MORE_FSDP, ask(Asked(MORE_FSDP, [], [], [], [], ())).fsdp)


def test_cutting_by_fsdp_first_would_be_noticed(answers: Answers) -> None:
    case = FSDP.index(((10, 4), 0, 2, 2))
    wrong = [Region((0, 0), (3, 4)), Region((3, 0), (2, 4)), Region((5, 0), (3, 4)), Region((8, 0), (2, 4))]
    same = [is_same((10, 4), [region], 0, theirs) for region, theirs in zip(wrong, answers.fsdp[case], strict=True)]
    assert same == [True, False, False, True]


def test_a_plain_shard_lies_where_dtensor_says(answers: Answers) -> None:
    for (shape, dim, tp), ranks in zip(SHARDED, answers.sharded, strict=True):
        ours = tp_regions(shape, Placement(dim, (shape[dim],)), tp)
        for mine, (sizes, offsets) in zip(ours, ranks, strict=True):
            theirs = (Region(tuple(offsets), tuple(sizes)),) if all(sizes) else ()
            assert mine == theirs, (shape, dim, tp)


def test_halves_are_read_as_transformers_reads_packed_weights(answers: Answers) -> None:
    for (n, tp), ranks in zip(PACKED, answers.packed, strict=True):
        ours = tp_regions((n, 2), Placement(0, (n - n // 2, n // 2)), tp)
        spans = [[(region.offsets[0], region.offsets[0] + region.sizes[0]) for region in mine] for mine in ours]
        assert spans == ranks, (n, tp)


def test_layers_are_split_as_transformers_splits_them(answers: Answers) -> None:
    for (layers, pp), ranges in zip(STAGES, answers.stages, strict=True):
        counts = split_layers(layers, pp, "hf")
        assert list(zip(accumulate(counts, initial=0), accumulate(counts), strict=False)) == ranges


def test_every_style_of_transformers_is_known(answers: Answers) -> None:
    assert len(answers.styles) >= 19
    assert set(answers.styles) <= set(STYLES)


def differences(model: Model, tp: int, styles: Mapping[str, str] = {}) -> list[str]:
    """Parameters of which some rank reads another part than the plan of the model gives it here."""
    plan = TensorParallelPlan(
        {pattern: Rule(style, "model plan") for pattern, style in {**model.plan, **styles}.items()}
    )
    found = []
    for name, shape in model.shapes.items():
        placement = decide_placement(plan, name, shape, tp).placement
        dim = placement.dim if placement else 0
        for mine, ranks in zip(tp_regions(shape, placement, tp), model.held[tp], strict=True):
            if not is_same(shape, list(mine), dim, ranks[name]):
                found.append(name)
                break
    return found


def assert_reads_alike(model: Model) -> None:
    for tp in model.held:
        assert differences(model, tp) == []
    is_cut = [ranks.size < np.prod(model.shapes[name]) for name, ranks in model.held[2][0].items()]
    assert sum(is_cut) >= 4  # a model that transformers did not cut would agree with anything


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_cut_as_transformers_cuts_it(answers: Answers, name: str) -> None:
    assert_reads_alike(answers.models[name])


@pytest.mark.slow
def test_more_models_are_cut_as_transformers_cuts_them() -> None:
    for model in ask(Asked([], [], [], [], MORE_MODELS, SIZES)).models.values():
        assert_reads_alike(model)


@pytest.mark.parametrize(
    ("name", "pattern", "style", "parameters"),
    [
        ("llama-untied", "model.layers.*.self_attn.o_proj", "colwise", ["o_proj.weight"]),
        ("qwen2", "model.layers.*.self_attn.q_proj", "rowwise", ["q_proj.weight", "q_proj.bias"]),
        ("qwen3-moe", "model.layers.*.mlp.experts.gate_up_proj", "colwise", ["experts.gate_up_proj"]),
        ("phi3", "model.layers.0.mlp.down_proj", "replicate", ["down_proj.weight"]),
    ],
)
def test_another_style_would_be_noticed(
    answers: Answers, name: str, pattern: str, style: str, parameters: list[str]
) -> None:
    found = differences(answers.models[name], 3, {pattern: style})
    assert found
    assert all(any(parameter.endswith(ending) for ending in parameters) for parameter in found)
    assert all(any(parameter.endswith(ending) for parameter in found) for ending in parameters)


def test_what_nobody_cuts_is_whole_on_every_rank(answers: Answers) -> None:
    model = answers.models["llama-untied"]
    for ranks in model.held[3]:
        assert is_same(model.shapes["model.norm.weight"], [full_region((32,))], 0, ranks["model.norm.weight"])
