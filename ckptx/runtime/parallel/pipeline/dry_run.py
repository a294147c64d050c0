"""Runs the stages of a small model one after another in one process, and compares them with the unsplit model.

`discover_boundaries` checks one call at a time. The dry run checks all of them together: the stages run with the values
that they send each other, forward and backward. It finds state that passes between layers other than as an argument,
gradients that would be lost between stages, and schedules that cannot split the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ckptx.errors import UnsupportedError
from ckptx.layout.stages import StageMap
from ckptx.runtime.parallel.pipeline.boundaries import Batch, StageBoundaries, stage_of
from ckptx.runtime.parallel.pipeline.boundary_slots import is_same
from ckptx.runtime.parallel.pipeline.run import StageRun, as_stage_inputs, backward_roots, clone_outputs, input_grads
from ckptx.runtime.torch_private import stage_backward_input, stage_backward_weight

_TOLERANCE = 1e-5  # relative to the largest element of a float32 gradient; another order of sums differs far less

Gradients = dict[str, Tensor]


def dry_run_stages(
    model: nn.Module,
    stages: StageMap,
    boundaries: StageBoundaries,
    batches: Sequence[Batch],
    output: Callable[[Any], Tensor],
    *,
    split_backward: bool = False,
) -> None:
    """Run all stages on each batch and compare outputs and gradients with the unsplit model.

    Args:
        model: The model that was passed to `discover_boundaries`.
        stages: Assignment of layers to stages.
        boundaries: Values that stages send each other.
        batches: Arguments for its forward.
        output: Takes the tensor to compare from the output of the model.
        split_backward: Compute gradients of inputs and of weights separately, as zero-bubble schedules do.

    Raises:
        UnsupportedError: The stages fail, or differ from the unsplit model.
    """
    name = type(model).__name__
    parts = [
        StageRun(stage_of(model, stages, each, boundaries.forms), stages, each, boundaries)
        for each in range(stages.count)
    ]
    for batch in batches:
        with _gradients(model) as expected_gradients:
            expected = output(model(**batch))
            _loss(expected).backward()
        with _gradients(model) as found:
            try:
                given, sent, last = _forward(parts, batch, output)
                if not is_same(last.detach(), expected.detach()):
                    raise UnsupportedError(
                        f"{name}: the output of {stages.count} pipeline stages differs from that of the whole model; "
                        "state passes between layers other than as an argument; leave out --pp"
                    )
                _backward(parts, given, [*sent, (_loss(last),)], split=split_backward)
            except RuntimeError as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                hint = "use --schedule 1f1b, which does not split the backward pass, or " if split_backward else ""
                raise UnsupportedError(
                    f"{name}: cannot run it as {stages.count} pipeline stages: {reason[:160]}; {hint}leave out --pp"
                ) from error
        _compare(name, expected_gradients, found)


def _loss(found: Tensor) -> Tensor:
    return found.float().pow(2).mean()


def _forward(
    parts: Sequence[StageRun], batch: Batch, output: Callable[[Any], Tensor]
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], Tensor]:
    """Return the inputs of each stage, the values that each stage but the last sends, and the output of the last."""
    given: list[tuple[Any, ...]] = [()]
    sent: list[tuple[Any, ...]] = []
    for part in parts:
        found, values = part(part.model, batch, given[-1])
        if part is parts[-1]:
            return given, sent, output(found)
        sent.append(clone_outputs(values))
        given.append(as_stage_inputs(sent[-1]))
    raise AssertionError("no stages")


def _backward(
    parts: Sequence[StageRun],
    inputs_by_stage: Sequence[Sequence[Any]],
    outputs_by_stage: Sequence[Sequence[Any]],
    *,
    split: bool,
) -> None:
    """Run the backward passes from the last stage to the first."""
    later: list[Callable[[], Any]] = []
    for part in reversed(parts):
        outputs, gradients = list(outputs_by_stage[part.number]), None
        if part is not parts[-1]:
            outputs, gradients = backward_roots(outputs, input_grads(inputs_by_stage[part.number + 1]))
        inputs = [each for each in inputs_by_stage[part.number] if isinstance(each, Tensor) and each.requires_grad]
        if split and part.number:
            _, groups = stage_backward_input(outputs, gradients, inputs, part.model.parameters())
            later.append(partial(stage_backward_weight, part.model.parameters(), groups))
        else:
            torch.autograd.backward(outputs, gradients)
    for each in later:
        each()


@contextmanager
def _gradients(model: nn.Module) -> Iterator[Gradients]:
    """Collect the gradients of the block, filled in at its end; the model keeps none."""
    found: Gradients = {}
    model.zero_grad(set_to_none=True)
    try:
        with torch.enable_grad():
            yield found
        found.update({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    finally:
        model.zero_grad(set_to_none=True)


def _compare(name: str, expected_gradients: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for parameter, expected in expected_gradients.items():
        gradient = found.get(parameter)
        size = float(expected.abs().max()) if expected.numel() else 0.0
        difference = size if gradient is None else float((expected - gradient).abs().max()) if expected.numel() else 0.0
        if not difference <= _TOLERANCE * size:
            raise UnsupportedError(
                f"{name}: split into pipeline stages, the gradient of {parameter} differs by {difference:.3g} from "
                f"that of the whole model (largest element {size:.3g}); a value passes between layers without its "
                "gradient; omit --pp"
            )
