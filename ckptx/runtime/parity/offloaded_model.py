"""Runs a model that is not there as a whole: piece by piece, of which one has storage at a time.

Pieces are pipeline stages that run one after another in one process. All batches go through a piece while it is loaded,
and what it gives to the next is kept. Backward, from the last piece to the first, each is loaded again, and computes
again what it is to be differentiated.

    forward     load 0, run every batch, release    load 1, run, release    ...    load n: logits, loss
    backward    load n, run, go back, release       ...                            load 0, run, go back, release

What several pieces have, as a tied embedding and head, gets the sum of its gradients batch by batch, as autograd sums
in a whole model: the results are the same, bit for bit.
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
    """How a model is cut into pieces.

    Attributes:
        stages: Who has what.
        boundaries: What one gives to the next.
        ties: Parameters of several pieces.
        embeddings: See `noise.embeddings_of`, of the whole model.
        dtype: Of its first parameter: what inputs are given in.
    """

    stages: StageMap
    boundaries: StageBoundaries
    ties: tuple[Tie, ...]
    embeddings: Mapping[str, str]
    dtype: torch.dtype

    @property
    def last(self) -> int:
        return self.stages.pp - 1


@dataclass(slots=True, eq=False)
class ComputePass:
    """One of the computations that go through the pieces side by side.

    Attributes:
        draw: Of the embeddings that are moved, if any.
        loss: Mean over the batches.
        stage_inputs: Of each piece that was reached, what it is given of each batch.
        output_grads: Of each batch, the gradients of what the piece was given that last went back.
        tied_grads: Gradients of a tied parameter from later pieces, by its name and batch.
    """

    draw: int | None = None
    loss: float = 0.0
    stage_inputs: dict[int, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))
    output_grads: list[list[Tensor | None]] = field(default_factory=list)
    tied_grads: dict[tuple[str, int], Tensor] = field(default_factory=dict)


# Makes a piece, loaded; with these parameters, by name, instead of its own.
StageOpener = Callable[[int, Mapping[str, nn.Parameter]], nn.Module]


class OffloadedModel:
    """Takes passes through the pieces of a model."""

    def __init__(
        self,
        partition: StagePartition,
        batches: Sequence[Inputs],
        passes: Sequence[ComputePass],
        open_stage: StageOpener,
        device: torch.device,
    ) -> None:
        """Args:
        cut: How the model is cut.
        batches: Microbatches of one step; gradients are those of the mean loss.
        passes: What is computed.
        open_stage: Builds and loads a piece.
        device: Where to.
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
        """Runs everything forward.

        Args:
            on_logits: Is shown the logits of each pass and batch, in order.
            backward: Keep what the backward pass begins with.

        Raises:
            UnsupportedError, SpaceError: As `execution.run`.
        """
        for compute_pass in self._passes:
            compute_pass.stage_inputs[0] = [()] * len(self._batches)
        for number in range(self.partition.stages.pp):
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
        """What calls of modules give, of one piece after another, in each pass; of the first batch."""
        given: list[tuple[Any, ...]] = [()] * len(self._passes)
        for number in range(self.partition.stages.pp):
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
        """Goes back through a piece, from the last one to the first; within the block it is there.

        Its gradients are complete; that of a tied parameter is with the first piece that has it.

        Args:
            number: Of the piece.
            on_gradient: Called with each gradient of each pass as soon as it is complete; the parameter does not keep
                the gradient. With None, the parameters keep the gradients of the only pass.
        """
        if number == self.partition.last:
            for compute_pass in self._passes:
                compute_pass.output_grads = [[] for _ in self._batches]
        with self._open_stage(number) as part:
            with self._tied_head_stage(part) as beside:
                for compute_pass in self._passes:
                    with (
                        self._perturbed(part.model, compute_pass),
                        self._perturbed(beside and beside.model, compute_pass, part.model),
                    ):
                        self._backward(part, beside, compute_pass, on_gradient)
            yield part
        if number < self.partition.last or not self._recomputed_ties:
            for compute_pass in self._passes:
                del compute_pass.stage_inputs[number]

    def _backward(
        self, part: StageRun, head: StageRun | None, compute_pass: ComputePass, on_gradient: OnGradient | None
    ) -> None:
        plain = {canonical_name(name): each for name, each in part.model.named_parameters() if each.requires_grad}
        first, later = self._tied(part, plain)
        wanted = [
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
                self._backward_of_batch(part, compute_pass, index, wanted)
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
        self, part: StageRun, compute_pass: ComputePass, index: int, wanted: Sequence[Tensor]
    ) -> None:
        """One batch: forward again, and back."""
        given = as_stage_inputs(compute_pass.stage_inputs[part.number][index])
        leaves = [each for each in given if isinstance(each, Tensor) and each.requires_grad]
        with torch.enable_grad():
            output, sent = part(part.model, self._batch_inputs[index], given)
            if part.number == self.partition.last:
                outputs, gradients = [self._loss(part, output, index)], None
            else:
                outputs, gradients = backward_roots(clone_outputs(sent), compute_pass.output_grads[index])
        if outputs:
            torch.autograd.backward(outputs, gradients, inputs=[*wanted, *leaves])
        compute_pass.output_grads[index] = input_grads(given)

    def _loss(self, part: StageRun, output: Any, index: int) -> Tensor:
        return loss_of(logits_or_hidden_states(part.model, output), self._batches[index]) / len(self._batches)

    # ------------------------------------------------------------------------------------------- ties

    @property
    def _recomputed_ties(self) -> frozenset[str]:
        """Ties of the last piece and one other, as those of a head: the last one is there again with the other, and
        computes their gradient then. Otherwise it would have to be kept, of each batch and pass, until then.
        """
        return frozenset(
            tie.name for tie in self.partition.ties if len(tie.copies) == 2 and self.partition.last in tie.copies
        )

    def _tied(
        self, part: StageRun, plain: dict[str, nn.Parameter]
    ) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """Takes from the parameters of a piece those that it shares with others.

        Returns:
            By the name of the tie, those of which this is the first piece, and those of which it is a later one.
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
        """Gives tied parameters the gradients of later pieces, to which autograd will add their own."""
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
        """The last piece, with tied parameters of this one, where they get a gradient from it."""
        shared = {
            tie.copies[self.partition.last]: parameter_of(part.model, tie.copies[part.number])
            for tie in self.partition.ties
            if tie.name in self._recomputed_ties and part.number == min(tie.copies)
        }
        with self._open_stage(self.partition.last, shared) if shared else nullcontext() as beside:
            yield beside

    # ------------------------------------------------------------------------------------------- memory

    @contextmanager
    def _open_stage(self, number: int, shared: Mapping[str, nn.Parameter] | None = None) -> Iterator[StageRun]:
        """A piece with storage, but for what is shared, which is another's."""
        model = self._opener(number, shared or {})
        try:
            yield StageRun(model, self.partition.stages, number, self.partition.boundaries)
        finally:
            release(model, (shared or {}).values())

    def _perturbed(self, model: nn.Module | None, compute_pass: ComputePass, other: nn.Module | None = None) -> Any:
        """Moves the embeddings of a piece, but those that it shares with another."""
        if model is None or compute_pass.draw is None:
            return nullcontext()
        known = self.partition.embeddings
        if other is not None:
            shared = {id(each) for each in other.parameters()}
            own = {canonical_name(name) for name, each in model.named_parameters() if id(each) not in shared}
            known = {name: first for name, first in known.items() if name in own}
        return noise.perturbed_embeddings(model, compute_pass.draw, known)


def share_parameters(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Puts parameters of another model in the place of those of these names, which have no storage yet."""
    for name, parameter in parameters.items():
        own = parameter_of(model, name)
        for module in model.modules():
            for leaf, each in module._parameters.items():
                if each is own:
                    module._parameters[leaf] = parameter
