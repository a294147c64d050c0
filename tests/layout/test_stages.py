"""Pipeline stages: who gets which layer, and what goes with it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ckptx.errors import UnsupportedError, UsageError
from ckptx.layout.stages import SPLIT_RULES, Stack, StageMap, split_layers

LLAMA = Stack("model.layers", 10, before=("model.embed_tokens",), after=("model.norm", "lm_head"))
T5 = (
    Stack("encoder.block", 4, before=("shared",), after=("encoder.final_layer_norm",)),
    Stack("decoder.block", 6, before=("decoder.embed_tokens",), after=("decoder.final_layer_norm", "lm_head")),
)


@pytest.mark.parametrize(
    ("how", "count", "pp", "layers"),
    [
        ("even", 10, 4, (3, 3, 2, 2)),
        ("even", 8, 4, (2, 2, 2, 2)),
        ("vllm", 10, 4, (2, 3, 3, 2)),
        ("vllm", 61, 2, (31, 30)),
        ("vllm", 61, 4, (15, 15, 16, 15)),  # the example of its documentation
        ("vllm", 11, 4, (3, 3, 3, 2)),
        ("torchtitan", 32, 4, (8, 9, 8, 7)),
        ("torchtitan", 10, 4, (2, 3, 3, 2)),
        ("torchtitan", 2, 2, (1, 1)),
        ("torchtitan", 7, 3, (2, 3, 2)),
        ("titan", 10, 4, (2, 3, 3, 2)),  # the former name
        ("hf", 32, 3, (10, 10, 12)),
        ("hf", 10, 4, (2, 2, 2, 4)),
        ("8,9,8,7", 32, 4, (8, 9, 8, 7)),
        ("0,10", 10, 2, (0, 10)),
        (" 4, 6", 10, 2, (4, 6)),
        *((how, 7, 1, (7,)) for how in (*SPLIT_RULES, "7")),
        *((how, 3, 3, (1, 1, 1)) for how in ("even", "vllm", "hf")),
    ],
)
def test_split(how: str, count: int, pp: int, layers: tuple[int, ...]) -> None:
    assert split_layers(count, pp, how) == layers


@pytest.mark.parametrize("how", SPLIT_RULES)
def test_every_layer_is_on_one_stage(how: str) -> None:
    for count in range(10, 40):
        for pp in range(1, 7):
            counts = split_layers(count, pp, how)
            assert (len(counts), sum(counts)) == (pp, count)
            assert min(counts) > 0


@pytest.mark.parametrize("how", SPLIT_RULES)
def test_more_stages_than_layers_is_refused(how: str) -> None:
    with pytest.raises(UsageError, match=f"split {how}: 3 layers for 4 stages, but each stage requires a layer"):
        split_layers(3, 4, how)


def test_a_rule_leaves_no_stage_empty() -> None:
    with pytest.raises(UsageError, match="give 1,2,0, but each stage requires a layer"):
        split_layers(3, 3, "torchtitan")
    assert split_layers(3, 3, "1,2,0") == (1, 2, 0)


@pytest.mark.parametrize("how", ["", "evn", "a,b", "5,5,", "5;5", "5.0,5"])
def test_what_is_no_rule_and_no_counts_is_refused(how: str) -> None:
    with pytest.raises(UsageError, match=r"must be one of even, vllm, torchtitan, hf, or the layers of each stage"):
        split_layers(10, 2, how)


@pytest.mark.parametrize("how", ["10", "4,5", "5,6", "3,3,4", "-1,11"])
def test_counts_that_do_not_fit_are_refused(how: str) -> None:
    with pytest.raises(UsageError, match="expected 2 stages with 10 layers"):
        split_layers(10, 2, how)


# --------------------------------------------------------------------------------------------------------------------
# Tensors


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("model.embed_tokens.weight", 0),
        ("model.layers.0.mlp.up_proj.weight", 0),
        ("model.layers.2.mlp.up_proj.weight", 0),
        ("model.layers.3.mlp.up_proj.weight", 1),
        ("model.layers.9.norm.weight", 3),
        ("model.layers.10.eh_proj.weight", 3),  # predicts further tokens
        ("model.norm.weight", 3),
        ("lm_head.weight", 3),
        ("visual.blocks.9.attn.qkv.weight", 0),
        ("model.layers_extra.9.weight", 0),
        ("model.layers.scale", 0),
        ("something", 0),
    ],
)
def test_a_decoder_over_four_stages(name: str, stage: int) -> None:
    assert StageMap([LLAMA], 4).stage_of(name) == stage


def test_only_layers_behind_the_last_are_extra() -> None:
    stages = StageMap([LLAMA], 4)
    assert stages.is_after_last_layer("model.layers.10.eh_proj.weight")
    for name in ("model.layers.9.x.weight", "model.embed_tokens.weight", "other.layers.99.weight", "model.norm.weight"):
        assert not stages.is_after_last_layer(name)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("shared.weight", 0),
        ("encoder.block.3.w", 0),
        ("encoder.final_layer_norm.weight", 0),
        ("decoder.embed_tokens.weight", 0),
        ("decoder.block.0.w", 0),
        ("decoder.block.1.w", 1),
        ("decoder.final_layer_norm.weight", 1),
        ("lm_head.weight", 1),
    ],
)
def test_a_decoder_follows_its_encoder(name: str, stage: int) -> None:
    assert StageMap(T5, 2).stage_of(name) == stage


def test_the_layers_of_a_stage_may_be_of_two_stacks() -> None:
    stages = StageMap(T5, 2)
    assert stages.layers_of(0) == [("encoder.block", 0, 4), ("decoder.block", 0, 1)]
    assert stages.layers_of(1) == [("decoder.block", 1, 6)]


def test_what_stands_between_two_stacks_stands_at_their_ends() -> None:
    stages = StageMap(T5, 5)  # 2 2 | 2 2 2
    assert stages.stage_of("encoder.final_layer_norm.weight") == 1
    assert stages.stage_of("decoder.embed_tokens.weight") == 2


def test_an_empty_stage_has_what_runs_before_or_after_its_neighbour() -> None:
    stages = StageMap([LLAMA], 3, "0,10,0")
    assert [stages.layers_of(stage) for stage in range(3)] == [[], [("model.layers", 0, 10)], []]
    assert stages.stage_of("model.embed_tokens.weight") == 0
    assert stages.stage_of("model.layers.0.w") == stages.stage_of("model.layers.11.w") == 1
    assert stages.stage_of("lm_head.weight") == 2


def test_the_longest_path_decides() -> None:
    stages = StageMap([Stack("model", 4, after=("model.3.head", "model.norm"))], 2)
    assert [stages.stage_of(f"model.{i}.w") for i in range(4)] == [0, 0, 1, 1]
    assert StageMap([Stack("m", 4, before=("m.3.early",))], 2).stage_of("m.3.early.w") == 0


def test_one_stage_holds_everything() -> None:
    for stages in (StageMap([], 1), StageMap([LLAMA], 1), StageMap([Stack("layers", 0)], 1)):
        assert {stages.stage_of(name) for name in ("model.layers.9.w", "lm_head.weight", "layers.3.w")} == {0}


def test_layers_of_all_stages_are_all_layers() -> None:
    for how in (*SPLIT_RULES, "1,2,3,4"):
        stages = StageMap([LLAMA], 4, how)
        spans = [span for stage in range(4) for span in stages.layers_of(stage)]
        assert spans[0][1] == 0
        assert spans[-1][2] == 10
        assert all(a[2] == b[1] for a, b in pairwise(spans))
        for stage in range(4):
            for _, first, stop in stages.layers_of(stage):
                assert {stages.stage_of(f"model.layers.{i}.w") for i in range(first, stop)} == {stage}


def test_a_model_without_known_layers_cannot_be_split() -> None:
    with pytest.raises(UnsupportedError, match="Oddball: cannot find the layer list, which splitting into"):
        StageMap([], 2, subject="Oddball")
