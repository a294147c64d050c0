"""Stages of a small model, one after another in one process: what does not add up is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptx.errors import UnsupportedError
from ckptx.runtime.parallel.pipeline import dry_run as rehearsal
from ckptx.runtime.parallel.pipeline.boundaries import discover_boundaries
from ckptx.runtime.parallel.pipeline.dry_run import dry_run_stages
from tests.support.models import EVERY, randomize
from tests.support.staged_models import split_into_stages


def model_of(name: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    model = EVERY[name].model().float()
    randomize(model)
    model.config.use_cache = False
    return model.eval(), [EVERY[name].inputs()]


def logits(output: Any) -> Tensor:
    found: Tensor = output.logits
    return found


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["llama-tied", "gemma4-shared-kv", "mllama"])
def test_what_is_found_passes_and_leaves_no_gradients(name: str, split: bool) -> None:
    model, batches = model_of(name)
    stages = split_into_stages(model, 2)
    dry_run_stages(
        model, stages, discover_boundaries(model, stages, batches, logits), batches, logits, split_backward=split
    )
    assert all(each.grad is None for each in model.parameters())


def test_a_class_that_cannot_go_backward_in_two_parts_is_refused_for_such_schedules_alone() -> None:
    model, batches = model_of("t5")
    stages = split_into_stages(model, 4)
    carry = discover_boundaries(model, stages, batches, logits)
    dry_run_stages(model, stages, carry, batches, logits)
    with pytest.raises(UnsupportedError, match=r"^T5For.* 4 pipeline stages: .*a second time.*use --schedule 1f1b"):
        dry_run_stages(model, stages, carry, batches, logits, split_backward=True)


@pytest.mark.parametrize("lost", [0, 1])
def test_what_is_not_sent_is_noticed(lost: int) -> None:
    model, batches = model_of("gemma4-shared-kv")
    stages = split_into_stages(model, 2)
    carry = discover_boundaries(model, stages, batches, logits)
    left = tuple(slot for index, slot in enumerate(carry.slots[1]) if index != lost)
    with pytest.raises(UnsupportedError, match="Gemma4ForCausalLM: the output of 2 pipeline stages differs"):
        dry_run_stages(model, stages, replace(carry, slots=((), left)), batches, logits)


def test_a_gradient_that_is_lost_between_stages_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = model_of("llama-untied")
    stages = split_into_stages(model, 2)
    carry = discover_boundaries(model, stages, batches, logits)
    backward = rehearsal._backward

    def lost(parts: Sequence[Any], given: Any, sent: Any, *, split: bool) -> None:
        for each in sent[0]:
            each.register_hook(torch.zeros_like)
        backward(parts, given, sent, split=split)

    monkeypatch.setattr(rehearsal, "_backward", lost)
    with pytest.raises(
        UnsupportedError, match=r"the gradient of model\.embed_tokens\.weight differs .* without its gradient"
    ):
        dry_run_stages(model, stages, carry, batches, logits)
