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

_TOLERANCE = 1e-5  # of the largest number of a gradient, in float32: what is summed in another order is nearer by far

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
    """Runs all stages on each batch.

    Args:
        model: As `discover_boundaries` was given it.
        stages: How it is cut.
        boundaries: The values that travel between stages.
        batches: Arguments for its forward.
        output: Takes from what the model returns what counts.
        split_backward: Compute gradients of inputs and of weights apart, as zero-bubble schedules do.

    Raises:
        UnsupportedError: The stages give something else than the model in one piece, or fail.
    """
    name = type(model).__name__
    parts = [
        StageRun(stage_of(model, stages, each, boundaries.forms), stages, each, boundaries) for each in range(stages.pp)
    ]
    for batch in batches:
        with _gradients(model) as wanted:
            right = output(model(**batch))
            _loss(right).backward()
        with _gradients(model) as found:
            try:
                given, sent, last = _forward(parts, batch, output)
                if not is_same(last.detach(), right.detach()):
                    raise UnsupportedError(
                        f"{name}: {stages.pp} pipeline stages give something else than the whole model; something "
                        "travels between its layers by another way than arguments; leave out --pp"
                    )
                _backward(parts, given, [*sent, (_loss(last),)], split=split_backward)
            except RuntimeError as error:
                said = str(error).splitlines()[0] if str(error) else type(error).__name__
                way = "use --schedule 1f1b, which goes backward in one part, or " if split_backward else ""
                raise UnsupportedError(
                    f"{name}: {stages.pp} pipeline stages of it cannot be run: {said[:160]}; {way}leave out --pp"
                ) from error
        _compare(name, wanted, found)


def _loss(found: Tensor) -> Tensor:
    return found.float().pow(2).mean()


def _forward(
    parts: Sequence[StageRun], batch: Batch, output: Callable[[Any], Tensor]
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], Tensor]:
    """What each stage was given, what each but the last sent, and what the last gave."""
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
    parts: Sequence[StageRun], given: Sequence[Sequence[Any]], sent: Sequence[Sequence[Any]], *, split: bool
) -> None:
    """From the last stage to the first."""
    later: list[Callable[[], Any]] = []
    for part in reversed(parts):
        outputs, gradients = list(sent[part.number]), None
        if part is not parts[-1]:
            outputs, gradients = backward_roots(outputs, input_grads(given[part.number + 1]))
        inputs = [each for each in given[part.number] if isinstance(each, Tensor) and each.requires_grad]
        if split and part.number:
            _, groups = stage_backward_input(outputs, gradients, inputs, part.model.parameters())
            later.append(partial(stage_backward_weight, part.model.parameters(), groups))
        else:
            torch.autograd.backward(outputs, gradients)
    for each in later:
        each()


@contextmanager
def _gradients(model: nn.Module) -> Iterator[Gradients]:
    """The gradients that come in the block, filled at its end; the model keeps none."""
    found: Gradients = {}
    model.zero_grad(set_to_none=True)
    try:
        with torch.enable_grad():
            yield found
        found.update({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    finally:
        model.zero_grad(set_to_none=True)


def _compare(name: str, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for parameter, right in wanted.items():
        gradient = found.get(parameter)
        size = float(right.abs().max()) if right.numel() else 0.0
        difference = size if gradient is None else float((right - gradient).abs().max()) if right.numel() else 0.0
        if not difference <= _TOLERANCE * size:
            raise UnsupportedError(
                f"{name}: split into pipeline stages, the gradient of {parameter} differs by {difference:.3g} from "
                f"that of the whole model (largest element {size:.3g}); a value passes between layers without its "
                "gradient; omit --pp"
            )
