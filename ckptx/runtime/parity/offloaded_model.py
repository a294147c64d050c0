"""Run a model that never needs to be in memory as a whole: stage by stage, with storage for one stage at a time.

These are pipeline stages that run one after another in one process. All batches go through a stage while it is loaded,
and its outputs are kept for the next. Backward, from the last stage to the first, each stage is loaded again and
recomputes its forward pass.

    forward     load 0, run every batch, release    load 1, run, release    ...    load n: logits, loss
    backward    load n, run, backward, release      ...                        load 0, run, backward, release

A parameter of several stages, such as a tied embedding and head, gets the sum of its gradients batch by batch, as
autograd sums them in a whole model: the results are equal bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptx.layout.stages import StageMap
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries
from ckptx.runtime.parallel.pipeline.run import StageRun, as_stage_inputs, backward_roots, clone_outputs, input_grads
from ckptx.runtime.parallel.pipeline.ties import Tie, parameter_of
from ckptx.runtime.parallel.release import release, return_memory
from ckptx.runtime.parity import noise
from ckptx.runtime.parity.divergence import Outputs, record_outputs
from ckptx.runtime.parity.execution import (
    full_tensor,
    gradient_hooks,
    logits_or_hidden_states,
    loss_of,
    translate_model_errors,
)
from ckptx.runtime.parity.inputs.batch import Inputs

OnGradient = Callable[["ComputePass", str, Tensor], None]


class StagePartition(NamedTuple):
    """The stages of an offloaded model, and what connects them.

    Attributes:
        stages: Assignment of layers to stages.
        boundaries: Values that each stage passes to the next.
        ties: Parameters that several stages share.
        embeddings: Result of `noise.embeddings_of` for the whole model.
        dtype: Dtype of the first floating-point parameter, to which floating-point inputs are converted.
    """

    stages: StageMap
    boundaries: StageBoundaries
    ties: tuple[Tie, ...]
    embeddings: Mapping[str, str]
    dtype: torch.dtype

    @property
    def last(self) -> int:
        return self.stages.count - 1


@dataclass(slots=True, eq=False)
class ComputePass:
    """One of several computations that run through the stages together, such as a run with perturbed embeddings.

    Attributes:
        draw: Seed of the perturbed embeddings; None leaves them unchanged.
        loss: Mean over the batches.
        stage_inputs: Inputs of each stage that was reached, one tuple per batch.
        output_grads: For each batch, gradients of the inputs of the last stage that ran backward.
        tied_grads: Gradients of tied parameters from later stages, by name of the tie and index of the batch.
    """

    draw: int | None = None
    loss: float = 0.0
    stage_inputs: dict[int, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))
    output_grads: list[list[Tensor | None]] = field(default_factory=list)
    tied_grads: dict[tuple[str, int], Tensor] = field(default_factory=dict)


# Builds and loads the stage of a number, with the given parameters (by name) in place of its own.
StageOpener = Callable[[int, Mapping[str, nn.Parameter]], nn.Module]


class OffloadedModel:
    """A model whose stages are loaded, run and released one after another."""

    def __init__(
        self,
        partition: StagePartition,
        batches: Sequence[Inputs],
        passes: Sequence[ComputePass],
        open_stage: StageOpener,
        device: torch.device,
    ) -> None:
        """Move the inputs to the device; no stage is loaded yet.

        Args:
            partition: Stages of the model, and what connects them.
            batches: Microbatches of one step; gradients are those of the mean loss.
            passes: Computations to run.
            open_stage: Builds and loads a stage.
            device: Device of the inputs and stages.
        """
        self.partition, self._passes, self._opener, self._device = partition, passes, open_stage, device
        self._batches = batches
        self._batch_inputs = [
            {
                name: value.to(device, partition.dtype) if value.is_floating_point() else value.to(device)
                for name, value in each.batch.items()
            }
            for each in batches
        ]
        return_memory()

    def forward(self, on_logits: Callable[[ComputePass, Tensor], None], *, backward: bool) -> None:
        """Run all passes forward.

        Args:
            on_logits: Called with the logits of each pass and batch, in order.
            backward: Keep the stage inputs for a backward pass.

        Raises:
            UnsupportedError, SpaceError: See `execution.run`.
        """
        for compute_pass in self._passes:
            compute_pass.stage_inputs[0] = [()] * len(self._batches)
        for number in range(self.partition.stages.count):
            with self._open_stage(number) as part:
                for compute_pass in self._passes:
                    with self._perturbed(part.model, compute_pass), torch.set_grad_enabled(backward):
                        for index in range(len(self._batches)):
                            self._forward(part, compute_pass, index, on_logits)
            if not backward:
                for compute_pass in self._passes:
                    del compute_pass.stage_inputs[number]

    def _forward(
        self, part: StageRun, compute_pass: ComputePass, index: int, on_logits: Callable[[ComputePass, Tensor], None]
    ) -> None:
        with translate_model_errors(part.model):
            output, sent = part(
                part.model, self._batch_inputs[index], as_stage_inputs(compute_pass.stage_inputs[part.number][index])
            )
            if part.number == self.partition.last:
                found = logits_or_hidden_states(part.model, output)
                compute_pass.loss += float(loss_of(found, self._batches[index]).detach() / len(self._batches))
                on_logits(compute_pass, full_tensor(found.detach()))
            else:
                compute_pass.stage_inputs[part.number + 1].append(as_stage_inputs(sent))

    def observed(self) -> Iterator[list[Outputs]]:
        """Yield the outputs of module calls on the first batch, stage by stage; each item has one dict per pass."""
        given: list[tuple[Any, ...]] = [()] * len(self._passes)
        for number in range(self.partition.stages.count):
            seen: list[Outputs] = [{} for _ in self._passes]
            with self._open_stage(number) as part, torch.no_grad():
                for index, compute_pass in enumerate(self._passes):
                    with (
                        self._perturbed(part.model, compute_pass),
                        record_outputs(part.model, seen[index], self.partition.stages, number),
                    ):
                        _, sent = part(part.model, self._batch_inputs[0], given[index])
                    given[index] = clone_outputs(sent)
            yield seen

    @contextmanager
    def backward(self, number: int, on_gradient: OnGradient | None = None) -> Iterator[StageRun]:
        """Run a stage backward, from the last to the first; yields it while it is loaded.

        Its gradients are complete; that of a tied parameter belongs to the first stage that has it.

        Args:
            number: Number of the stage.
            on_gradient: Called with each gradient of each pass as soon as it is complete; the parameter does not keep
                the gradient. With None, the parameters keep the gradients of the only pass.
        """
        if number == self.partition.last:
            for compute_pass in self._passes:
                compute_pass.output_grads = [[] for _ in self._batches]
        with self._open_stage(number) as part:
            with self._tied_head_stage(part) as head:
                for compute_pass in self._passes:
                    with (
                        self._perturbed(part.model, compute_pass),
                        self._perturbed(head and head.model, compute_pass, part.model),
                    ):
                        self._backward(part, head, compute_pass, on_gradient)
            yield part
        if number < self.partition.last or not self._recomputed_ties:
            for compute_pass in self._passes:
                del compute_pass.stage_inputs[number]

    def _backward(
        self, part: StageRun, head: StageRun | None, compute_pass: ComputePass, on_gradient: OnGradient | None
    ) -> None:
        plain = {canonical_name(name): each for name, each in part.model.named_parameters() if each.requires_grad}
        first, later = self._tied(part, plain)
        parameters = [
            *plain.values(),
            *first.values(),
            *(each for name, each in later.items() if name not in self._recomputed_ties),
        ]
        totals: dict[str, Tensor] = {}
        for index in range(len(self._batches)):
            self._add_later_grads(head, first, compute_pass, index)
            is_last = index == len(self._batches) - 1

            def complete(name: str, gradient: Tensor) -> None:
                assert on_gradient is not None
                on_gradient(compute_pass, name, gradient)

            with (
                translate_model_errors(part.model),
                gradient_hooks(plain if is_last and on_gradient is not None else {}, complete),
            ):
                self._backward_of_batch(part, compute_pass, index, parameters)
            for name, parameter in first.items():
                if parameter.grad is not None:
                    totals[name] = totals[name].add_(parameter.grad) if name in totals else parameter.grad
                    parameter.grad = None
            for name, parameter in later.items():
                if parameter.grad is not None:
                    before = compute_pass.tied_grads.get((name, index))
                    compute_pass.tied_grads[name, index] = (
                        parameter.grad if before is None else before.add_(parameter.grad)
                    )
                    parameter.grad = None
        for name, parameter in first.items():
            parameter.grad = totals.get(name)
        for name, parameter in (plain | first).items() if on_gradient is not None else ():
            if parameter.grad is not None:  # a tied one, or one that the last batch did not reach
                complete(name, parameter.grad)
                parameter.grad = None

    def _backward_of_batch(
        self, part: StageRun, compute_pass: ComputePass, index: int, parameters: Sequence[Tensor]
    ) -> None:
        """Recompute one batch forward, then run it backward."""
        given = as_stage_inputs(compute_pass.stage_inputs[part.number][index])
        leaves = [each for each in given if isinstance(each, Tensor) and each.requires_grad]
        with torch.enable_grad():
            output, sent = part(part.model, self._batch_inputs[index], given)
            if part.number == self.partition.last:
                outputs, gradients = [self._loss(part, output, index)], None
            else:
                outputs, gradients = backward_roots(clone_outputs(sent), compute_pass.output_grads[index])
        if outputs:
            torch.autograd.backward(outputs, gradients, inputs=[*parameters, *leaves])
        compute_pass.output_grads[index] = input_grads(given)

    def _loss(self, part: StageRun, output: Any, index: int) -> Tensor:
        return loss_of(logits_or_hidden_states(part.model, output), self._batches[index]) / len(self._batches)

    # ------------------------------------------------------------------------------------------- ties

    @property
    def _recomputed_ties(self) -> frozenset[str]:
        """Ties of the last stage and one other, such as a tied head: their gradient is computed when the other runs,
        with the last one loaded again. Otherwise it would have to be kept for each batch and pass until then.
        """
        return frozenset(
            tie.name for tie in self.partition.ties if len(tie.copies) == 2 and self.partition.last in tie.copies
        )

    def _tied(
        self, part: StageRun, plain: dict[str, nn.Parameter]
    ) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """Remove the tied parameters of a stage from `plain`, and return them.

        Returns:
            Tied parameters by name of the tie: those whose first stage this is, and those whose first stage is an
            earlier one.
        """
        first: dict[str, nn.Parameter] = {}
        later: dict[str, nn.Parameter] = {}
        for tie in self.partition.ties:
            if part.number in tie.copies:
                name = tie.copies[part.number]
                parameter = parameter_of(part.model, name)
                if plain.pop(name, None) is not None:
                    (first if part.number == min(tie.copies) else later)[tie.name] = parameter
        return first, later

    def _add_later_grads(
        self, head: StageRun | None, first: Mapping[str, nn.Parameter], compute_pass: ComputePass, index: int
    ) -> None:
        """Set the gradients of tied parameters from later stages, to which autograd adds their own."""
        for name, parameter in first.items():
            parameter.grad = compute_pass.tied_grads.pop((name, index), None)
        again = [parameter for name, parameter in first.items() if name in self._recomputed_ties]
        if head is not None and again:
            with translate_model_errors(head.model), torch.enable_grad():
                output, _ = head(
                    head.model,
                    self._batch_inputs[index],
                    as_stage_inputs(compute_pass.stage_inputs[head.number][index]),
                )
                torch.autograd.backward([self._loss(head, output, index)], inputs=again)

    @contextmanager
    def _tied_head_stage(self, part: StageRun) -> Iterator[StageRun | None]:
        """Load the last stage again with tied parameters of this stage; None if it has no gradient for this stage."""
        shared = {
            tie.copies[self.partition.last]: parameter_of(part.model, tie.copies[part.number])
            for tie in self.partition.ties
            if tie.name in self._recomputed_ties and part.number == min(tie.copies)
        }
        with self._open_stage(self.partition.last, shared) if shared else nullcontext() as head:
            yield head

    # ------------------------------------------------------------------------------------------- memory

    @contextmanager
    def _open_stage(self, number: int, shared: Mapping[str, nn.Parameter] | None = None) -> Iterator[StageRun]:
        """Load a stage; parameters in `shared` belong to another stage, and keep their storage at the end."""
        model = self._opener(number, shared or {})
        try:
            yield StageRun(model, self.partition.stages, number, self.partition.boundaries)
        finally:
            release(model, (shared or {}).values())

    def _perturbed(self, model: nn.Module | None, compute_pass: ComputePass, other: nn.Module | None = None) -> Any:
        """Perturb the embeddings of a stage, except those that it shares with `other`."""
        if model is None or compute_pass.draw is None:
            return nullcontext()
        known = self.partition.embeddings
        if other is not None:
            shared = {id(each) for each in other.parameters()}
            own = {canonical_name(name) for name, each in model.named_parameters() if id(each) not in shared}
            known = {name: first for name, first in known.items() if name in own}
        return noise.perturbed_embeddings(model, compute_pass.draw, known)


def share_parameters(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Replace the parameters of these names, which have no storage yet, by parameters of another model."""
    for name, parameter in parameters.items():
        own = parameter_of(model, name)
        for module in model.modules():
            for leaf, each in module._parameters.items():
                if each is own:
                    module._parameters[leaf] = parameter
