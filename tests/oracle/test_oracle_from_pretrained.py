"""What the runtime builds and loads is what `from_pretrained` does, in a process that never imports ckptx.

`runtime/checkpointing/test_load.py` asks the same of every format, in the dtype of each recipe, with transformers in
this process. Here nothing that ckptx does to transformers or torch can reach the other side; gradients are compared,
too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.against_transformers import (
    TransformersResults,
    compute_results,
    list_differences,
    load_unsharded_model,
)
from tests.support.models import EVERY
from tests.support.slow import slow_but

FAST = ("llama-tied", "gemma3-vlm", "qwen3-moe", "deepseek-v3", "phi3", "gpt2")
# Frozen by the constructor of the class: `from_pretrained` forgets it, the runtime does not.
FROZEN = {
    "whisper": ["model.encoder.embed_positions.weight"],
    "qwen2-audio": ["model.audio_tower.embed_positions.weight"],
    "voxtral": ["model.audio_tower.embed_positions.weight"],
}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> TransformersResults:
    return TransformersResults(tmp_path_factory.mktemp("float32"), FAST)


@pytest.fixture(scope="module")
def judge_of_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> TransformersResults:
    return TransformersResults(tmp_path_factory.mktemp("bfloat16"), (), dtype="bfloat16")


def equal(judge: TransformersResults, name: str) -> None:
    theirs = judge(name)
    model = load_unsharded_model(judge.work, name)
    assert list_differences(compute_results(judge.work, name, model), theirs) == []
    frozen = [each for each, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == theirs["frozen"] == FROZEN.get(name, [])


@pytest.mark.parametrize("name", slow_but(EVERY, FAST))
def test_every_tensor_output_and_gradient_is_equal_bit_for_bit(judge: TransformersResults, name: str) -> None:
    equal(judge, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_in_bfloat16_too(judge_of_bfloat16: TransformersResults, name: str) -> None:
    equal(judge_of_bfloat16, name)


# ----------------------------------------------------------------------------------------------------- injected defects


def _exchange_experts(model: torch.nn.Module) -> None:
    experts = model.get_parameter("model.layers.1.mlp.experts.down_proj").data
    experts[[0, 1]] = experts[[1, 0]]


def _move_a_frequency(model: torch.nn.Module) -> None:
    model.get_buffer("model.rotary_emb.inv_freq")[-1] *= 1 + 2**-20


def _lose_a_gradient(model: torch.nn.Module) -> None:
    model.get_parameter("model.norm.weight").requires_grad_(False)


@pytest.mark.parametrize(
    ("inject", "found"),
    [
        (_exchange_experts, "model.layers.1.mlp.experts.down_proj: "),
        (_move_a_frequency, "model.rotary_emb.inv_freq: "),
        (_lose_a_gradient, "gradient of model.norm.weight"),
    ],
)
def test_an_injected_defect_is_found(
    judge: TransformersResults, inject: Callable[[torch.nn.Module], None], found: str
) -> None:
    theirs = judge("qwen3-moe")
    model = load_unsharded_model(judge.work, "qwen3-moe")
    inject(model)
    faults = list_differences(compute_results(judge.work, "qwen3-moe", model), theirs)
    assert any(each.startswith(found) for each in faults), faults
