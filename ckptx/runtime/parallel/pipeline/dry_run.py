"""Runs the stages of a small model one after another in one process, and compares them with the unsplit model.

`discover_boundaries` runs each stage alone, with values that were recorded from the unsplit model. In the dry run the
stages run with the values that they send each other, forward and backward. It finds state that passes between layers
other than as an argument, gradients that would be lost between stages, and a backward pass that a zero-bubble schedule
cannot split.
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
from ckptx.runtime.parallel.pipeline.boundaries import Batch, StageBoundaries, make_shared_stage
from ckptx.runtime.parallel.pipeline.boundary_slots import is_identical
from ckptx.runtime.parallel.pipeline.run import (
    StageRunner,
    as_stage_inputs,
    clone_outputs,
    find_backward_roots,
    get_input_grads,
)
from ckptx.runtime.torch_private import stage_backward_input, stage_backward_weight

_TOLERANCE = 1e-5  # relative to the largest element of a float32 gradient; adding in another order changes far less

Gradients = dict[str, Tensor]  # parameter name -> gradient; parameters without a gradient are missing


def dry_run_stages(
    model: nn.Module,
    stages: StageMap,
    boundaries: StageBoundaries,
    batches: Sequence[Batch],
    get_output: Callable[[Any], Tensor],
    *,
    split_backward: bool = False,
) -> None:
    """Run all stages on each batch and compare outputs and gradients with the unsplit model.

    Args:
        model: The model that was passed to `discover_boundaries`.
        stages: Assignment of layers to stages.
        boundaries: Values that stages send each other.
        batches: Arguments for the forward of the model.
        get_output: Returns the tensor that must be the same with and without stages, given the output of the model.
        split_backward: Compute gradients of inputs and of weights separately, as zero-bubble schedules do.

    Raises:
        UnsupportedError: A stage fails with a RuntimeError, or the stages differ from the unsplit model.
    """
    name = type(model).__name__
    runners = [
        StageRunner(make_shared_stage(model, stages, each, boundaries.output_structures), stages, each, boundaries)
        for each in range(stages.count)
    ]
    for batch in batches:
        with _collect_gradients(model) as expected_gradients:
            expected = get_output(model(**batch))
            _loss(expected).backward()
        with _collect_gradients(model) as gradients:
            try:
                inputs_by_stage, sent_by_stage, last_output = _forward(runners, batch, get_output)
                if not is_identical(last_output.detach(), expected.detach()):
                    raise UnsupportedError(
                        f"{name}: the output of {stages.count} pipeline stages differs from that of the whole model; "
                        "state passes between layers other than as an argument; leave out --pp"
                    )
                _backward(runners, inputs_by_stage, [*sent_by_stage, (_loss(last_output),)], split=split_backward)
            except RuntimeError as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                hint = "use --schedule 1f1b, which does not split the backward pass, or " if split_backward else ""
                raise UnsupportedError(
                    f"{name}: cannot run it as {stages.count} pipeline stages: {reason[:160]}; {hint}leave out --pp"
                ) from error
        _compare_gradients(name, expected_gradients, gradients)


def _loss(output: Tensor) -> Tensor:
    """Return a scalar whose gradient depends on every element of the output."""
    return output.float().pow(2).mean()


def _forward(
    runners: Sequence[StageRunner], batch: Batch, get_output: Callable[[Any], Tensor]
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], Tensor]:
    """Run all stages forward.

    Returns:
        The inputs of each stage (empty for the first), the values that each stage but the last sends, and what
        `get_output` returns for the output of the last stage.
    """
    inputs_by_stage: list[tuple[Any, ...]] = [()]
    sent_by_stage: list[tuple[Any, ...]] = []
    for runner in runners:
        result, values = runner(runner.model, batch, inputs_by_stage[-1])
        if runner is runners[-1]:
            return inputs_by_stage, sent_by_stage, get_output(result)
        sent_by_stage.append(clone_outputs(values))
        inputs_by_stage.append(as_stage_inputs(sent_by_stage[-1]))
    raise AssertionError("no stages")


def _backward(
    runners: Sequence[StageRunner],
    inputs_by_stage: Sequence[Sequence[Any]],
    outputs_by_stage: Sequence[Sequence[Any]],
    *,
    split: bool,
) -> None:
    """Run the backward passes from the last stage to the first.

    Args:
        runners: All stages in ascending order.
        inputs_by_stage: Inputs of each stage, as `_forward` returned them.
        outputs_by_stage: Values that each stage sent, and for the last stage its loss.
        split: Compute the gradients of all weights after those of all inputs. The first stage, whose inputs need no
            gradient, is not split.
    """
    weight_passes: list[Callable[[], Any]] = []
    for runner in reversed(runners):
        outputs, gradients = list(outputs_by_stage[runner.number]), None
        if runner is not runners[-1]:
            outputs, gradients = find_backward_roots(outputs, get_input_grads(inputs_by_stage[runner.number + 1]))
        inputs = [each for each in inputs_by_stage[runner.number] if isinstance(each, Tensor) and each.requires_grad]
        if split and runner.number:
            _, groups = stage_backward_input(outputs, gradients, inputs, runner.model.parameters())
            weight_passes.append(partial(stage_backward_weight, runner.model.parameters(), groups))
        else:
            torch.autograd.backward(outputs, gradients)
    for each in weight_passes:
        each()


@contextmanager
def _collect_gradients(model: nn.Module) -> Iterator[Gradients]:
    """Yield a dict that gets the gradients of the model at the end of the block; the model keeps none."""
    gradients: Gradients = {}
    model.zero_grad(set_to_none=True)
    try:
        with torch.enable_grad():
            yield gradients
        gradients.update({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    finally:
        model.zero_grad(set_to_none=True)


def _compare_gradients(name: str, expected_gradients: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Compare the gradients of the stages with those of the unsplit model; a missing gradient counts as zeros.

    Args:
        name: Class name of the model, for messages.
        expected_gradients: Gradients of the unsplit model.
        gradients: Gradients of the stages, by the same names.

    Raises:
        UnsupportedError: An element differs by more than the tolerance.
    """
    for parameter, expected in expected_gradients.items():
        gradient = gradients.get(parameter)
        if gradient is not None and torch.equal(expected, gradient):
            continue  # much faster than a difference, and the usual case
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        difference = (
            largest if gradient is None else float((expected - gradient).abs().max()) if expected.numel() else 0.0
        )
        if not difference <= _TOLERANCE * largest:
            raise UnsupportedError(
                f"{name}: split into pipeline stages, the gradient of {parameter} differs by {difference:.3g} from "
                f"that of the whole model (largest element {largest:.3g}); a value passes between layers without its "
                "gradient; leave out --pp"
            )
