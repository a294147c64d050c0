"""The first module whose output differs, from recorded outputs of stages; and which outputs are recorded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ckptx.layout.stages import Stack, StageMap
from ckptx.runtime.parallel.pipeline.stage import Stub
from ckptx.runtime.parity.divergence import OutputsByCall, find_first_divergence, record_outputs
from ckptx.runtime.parity.execution import ModuleCall

A, B, C = (ModuleCall(name, 0) for name in "abc")
B_AGAIN = ModuleCall("b", 1)
NAN = float("nan")


def outputs_of(**values: float) -> OutputsByCall:
    return {ModuleCall(name, 0): torch.full((2, 2), value) for name, value in values.items()}


def find(
    reference: list[OutputsByCall], checkpoint: list[OutputsByCall], *, noise: float = 0.25, is_exact: bool = False
) -> tuple[str, float, float] | None:
    """Return module, difference and tolerance; every element of the perturbed reference differs by `noise`."""
    pairs = ((outputs, {call: output + noise for call, output in outputs.items()}) for outputs in reference)
    found = find_first_divergence(pairs, iter(checkpoint), is_exact=is_exact)
    return None if found is None else (found["module"], found["max_abs"], found["tolerance"])


@pytest.mark.parametrize("distance", [0.0, 1.0, 2.0, 2.5, NAN])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_output_differs_beyond_eight_times_its_noise(distance: float, sign: int) -> None:
    reference, checkpoint = [outputs_of(a=1.0, b=1.0)], [outputs_of(a=1.0, b=1 + sign * distance)]
    found = find(reference, checkpoint)
    if distance <= 2.0:
        assert found is None
    else:
        assert found == ("b", float("inf") if distance != distance else distance, 2.0)
    exact = find(reference, checkpoint, is_exact=True)
    assert exact == (None if distance == 0 else ("b", float("inf") if distance != distance else distance, 0.0))


def test_the_first_module_in_the_order_of_the_reference_is_found() -> None:
    """Whatever the order of the checkpoint, and whichever differs most."""
    reference = outputs_of(a=1.0, b=1.0, c=1.0)
    for names in ("abc", "cba", "bca"):
        values = {"a": 1.0, "b": 4.0, "c": 9.0}
        assert find([reference], [outputs_of(**{name: values[name] for name in names})]) == ("b", 3.0, 2.0)


@pytest.mark.parametrize("split_reference", [False, True])
@pytest.mark.parametrize("split_checkpoint", [False, True])
def test_stages_of_either_side_make_no_difference(split_reference: bool, split_checkpoint: bool) -> None:
    reference, checkpoint = (
        [outputs_of(**{name: value}) for name, value in values.items()] if is_split else [outputs_of(**values)]
        for is_split, values in (
            (split_reference, {"a": 1, "b": 1, "c": 1}),
            (split_checkpoint, {"a": 1, "b": 1, "c": 9}),
        )
    )
    assert find(reference, checkpoint) == ("c", 8.0, 2.0)
    assert find(reference, checkpoint[:-1] if split_checkpoint else []) is None


def test_of_two_outputs_of_one_call_the_first_counts() -> None:
    reference = [outputs_of(a=1.0, b=1.0)]
    assert find(reference, [outputs_of(a=1.0), outputs_of(a=9.0, b=1.0)]) is None
    assert find(reference, [outputs_of(b=1.0), outputs_of(a=9.0, b=9.0)]) == ("a", 8.0, 2.0)


def test_stages_are_run_only_as_far_as_necessary() -> None:
    stages_run: list[str] = []

    def iterate(side: str, *outputs: OutputsByCall) -> Iterator[OutputsByCall]:
        for number, each in enumerate(outputs):
            stages_run.append(f"{side}{number}")
            yield each

    reference = ((each, each) for each in iterate("r", outputs_of(a=1.0), outputs_of(b=1.0), outputs_of(c=1.0)))
    checkpoint = iterate("c", outputs_of(a=1.0), outputs_of(b=2.0), outputs_of(c=1.0))
    assert find_first_divergence(reference, checkpoint, is_exact=True) == {
        "module": "b", "max_abs": 1.0, "tolerance": 0.0,
    }  # fmt: skip
    assert stages_run == ["r0", "c0", "r1", "c1"]


def test_calls_of_one_module_are_compared_one_by_one() -> None:
    reference = {A: torch.ones(2), B: torch.ones(2), B_AGAIN: torch.full((2,), 3.0)}
    assert find([reference], [{A: torch.ones(2), B: torch.ones(2), B_AGAIN: torch.full((2,), 3.0)}]) is None
    assert find([reference], [{A: torch.ones(2), B: torch.ones(2), B_AGAIN: torch.ones(2)}], noise=0.125) == (
        "b", 2.0, 1.0,
    )  # fmt: skip


@pytest.mark.parametrize("odd", ["reference", "perturbed", "checkpoint"])
@pytest.mark.parametrize("is_missing", [False, True])
def test_an_output_of_another_shape_or_of_one_side_only_is_not_compared(odd: str, is_missing: bool) -> None:
    sides = {
        name: outputs_of(a=value, b=value) for name, value in (("reference", 1), ("perturbed", 1), ("checkpoint", 9))
    }
    if is_missing:
        del sides[odd][A]
    else:
        sides[odd][A] = torch.full((3, 3), 5.0)
    pair = sides["reference"], sides["perturbed"]
    found = find_first_divergence(iter([pair]), iter([sides["checkpoint"]]), is_exact=False)
    assert found == {"module": "b", "max_abs": 8.0, "tolerance": 0.0}


# ------------------------------------------------------------------------------------------- recording


class Layered(nn.Module):
    """Doubles its input in two layers below `model`, then in `head`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        self.model.forward = lambda x: self.model.layers[1](self.model.layers[0](x))  # type: ignore[method-assign]
        self.head = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.model(x))
        return found


STAGES = StageMap([Stack("model.layers", 2)], 2)
LAYERS = {"model.layers.0": 2.0, "model.layers.1": 4.0, "head": 8.0}


@pytest.mark.parametrize(
    ("stages", "number", "names"),
    [
        (None, 0, {**LAYERS, "model": 4.0}),
        (STAGES, 0, LAYERS),
        (STAGES, 1, {**LAYERS, "model": 4.0}),
        (StageMap([Stack("model.layers", 2)], 1), 0, {**LAYERS, "model": 4.0}),
    ],
)
def test_modules_around_the_layers_are_recorded_on_the_last_stage(
    stages: StageMap | None, number: int, names: dict[str, float]
) -> None:
    model, outputs = Layered(), OutputsByCall()
    with record_outputs(model, outputs, stages, number):
        model(torch.ones(1, 1))
    model(torch.full((1, 1), 100.0))
    assert {call.module: float(output) for call, output in outputs.items()} == names
    assert {call.number for call in outputs} == {0}
    assert not any(output.requires_grad for output in outputs.values())


def test_modules_of_other_stages_are_not_recorded() -> None:
    model, outputs = Layered(), OutputsByCall()
    model.head = Stub(model.head.to("meta"), None, "cpu")
    with record_outputs(model, outputs):
        model(torch.ones(1, 1))
    assert {call.module for call in outputs} == {"model.layers.0", "model.layers.1", "model"}


def test_outputs_are_copied_before_they_change() -> None:
    model, outputs = Layered(), OutputsByCall()
    with record_outputs(model, outputs), torch.no_grad():
        hidden = model.model.layers[1](torch.ones(1, 1))
        hidden.mul_(100.0)
    assert {call.module: float(output) for call, output in outputs.items()} == {"model.layers.1": 2.0}
