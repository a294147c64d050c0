"""What a run is judged by: the measured noise, the first module that differs, and the report of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.small import PLACE, ULP, Chosen, InPlace, Looped, Scaled, inputs_of
from torch import nn

from ckptx.verification import forward

IDS = [[0, 1], [2, 3]]


def side_of(model: nn.Module) -> Any:
    """A reference that is already built."""
    return SimpleNamespace(whole=lambda place: model)


def first_divergence(
    reference: nn.Module, model: nn.Module, ids: Sequence[Sequence[int]] = IDS, *, is_exact: bool = True
) -> dict[str, Any] | None:
    return forward._first_divergence(side_of(reference), model, inputs_of(ids), PLACE, is_exact=is_exact)


# ------------------------------------------------------------------------------------------- the first that differs


def test_a_module_that_is_called_twice_is_compared_call_by_call() -> None:
    """Layers that share a module, and rotary embeddings that are asked for each kind of layer."""
    assert first_divergence(Looped(), Looped()) is None
    other = Looped()
    with torch.no_grad():
        other.last.weight[0, 1] += 0.5
    found = first_divergence(Looped(), other)
    assert found is not None
    assert found["module"] == "last"


def test_what_is_added_in_place_belongs_to_what_comes_after() -> None:
    other = InPlace()
    with torch.no_grad():
        other.scale += 1
    found = first_divergence(InPlace(), other)
    assert found == {"module": "last", "max_abs": 1.0, "limit": 0.0}


@pytest.mark.parametrize(("factor", "is_far"), [(8, False), (9, True), (-8, False), (-9, True)])
def test_a_module_may_differ_by_eight_times_its_noise(factor: int, is_far: bool) -> None:
    """Also on one rank, where compiled layers or a device with atomic additions round otherwise."""
    other = Scaled()
    with torch.no_grad():
        other.embed.weight[3] += factor * ULP
    found = first_divergence(Scaled(), other, is_exact=False)
    assert found == ({"module": "embed", "max_abs": 9 * ULP, "limit": 8 * ULP} if is_far else None)
    exact = first_divergence(Scaled(), other)
    assert exact == {"module": "embed", "max_abs": abs(factor) * ULP, "limit": 0.0}


@pytest.mark.parametrize("ids", [IDS, [[0]], [[1]], [[2]], [[3]]])
def test_experts_that_get_other_tokens_are_not_compared(ids: list[list[int]]) -> None:
    """The noise itself sends some tokens elsewhere, or all that an expert had."""
    other = Chosen()
    with torch.no_grad():
        other.last.weight += 0.5
    found = first_divergence(Chosen(), other, ids, is_exact=False)
    assert found is not None
    assert (found["module"], found["max_abs"]) == ("last", 1.0)
