"""Optimizer state that is keyed by the index of a parameter is refused, and no other name."""

from __future__ import annotations

import pytest

from ckptx.errors import UnsupportedError
from ckptx.mapping.state_names import ParameterIndex, refuse_indexed_state

PARAMETERS = ParameterIndex.of({name: name for name in ("model.w", "w0", "0.weight", "12.0.bias", "3", "exp_avg")})


@pytest.mark.parametrize("name", ["optimizer.state.0.exp_avg", "optim.state.12.step", "optimizer.state.3.exp_avg_sq"])
def test_an_index_after_state_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        refuse_indexed_state(["model.w", name], PARAMETERS, "runs/step-1")
    assert str(refusal.value).startswith(f'runs/step-1: optimizer state "{name}" is keyed by the index')


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.state.model.layers.0.weight.exp_avg",
        "optimizer.state.w0.step",
        "optimizer.param_groups.0.lr",
        "model.state.0.weight",
        "optimizer.0.state",
        "optimizer.state.0.weight.exp_avg",
        "optim.state.12.0.bias.step",
    ],
)
def test_an_index_elsewhere_is_not(name: str) -> None:
    refuse_indexed_state([name], PARAMETERS, "runs/step-1")
