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
from ckptx.runtime.parallel.pipeline.carry import Carry
from ckptx.runtime.parallel.pipeline.run import StageRun, apart, go_back, gradients_of, received
from ckptx.runtime.parallel.pipeline.ties import Tie, parameter_of
from ckptx.runtime.parallel.release import release, return_memory
from ckptx.runtime.parity import noise
from ckptx.runtime.parity.divergence import Outputs, kept
from ckptx.runtime.parity.execution import compared, failing, loss_of, shown, whole
from ckptx.runtime.parity.inputs.batch import Inputs

See = Callable[["Lane", str, Tensor], None]


class Pieces(NamedTuple):
    """How a model is cut into pieces.

    Attributes:
        stages: Who has what.
        carry: What one gives to the next.
        ties: Parameters of several pieces.
        embeddings: See `noise.embeddings_of`, of the whole model.
        dtype: Of its first parameter: what inputs are given in.
    """

    stages: StageMap
    carry: Carry
    ties: tuple[Tie, ...]
    embeddings: Mapping[str, str]
    dtype: torch.dtype

    @property
    def last(self) -> int:
        return self.stages.pp - 1


@dataclass(slots=True, eq=False)
class Lane:
    """One of the computations that go through the pieces side by side.

    Attributes:
        draw: Of the embeddings that are moved, if any.
        loss: Mean over the batches.
        given: Of each piece that was reached, what it is given of each batch.
        flow: Of each batch, the gradients of what the piece was given that last went back.
        parts: Gradients of a tied parameter from later pieces, by its name and batch.
    """

    draw: int | None = None
    loss: float = 0.0
    given: dict[int, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))
    flow: list[list[Tensor | None]] = field(default_factory=list)
    parts: dict[tuple[str, int], Tensor] = field(default_factory=dict)


# Makes a piece, loaded; with these parameters, by name, instead of its own.
Open = Callable[[int, Mapping[str, nn.Parameter]], nn.Module]


class Walk:
    """Takes lanes through the pieces of a model."""

    def __init__(
        self, cut: Pieces, batches: Sequence[Inputs], lanes: Sequence[Lane], open_piece: Open, device: torch.device
    ) -> None:
        """Args:
        cut: How the model is cut.
        batches: Microbatches of one step; gradients are those of the mean loss.
        lanes: What is computed.
        open_piece: Builds and loads a piece.
        device: Where to.
        """
        self.cut, self._lanes, self._open, self._device = cut, lanes, open_piece, device
        self._batches = batches
        self._given = [
            {
                name: value.to(device, cut.dtype) if value.is_floating_point() else value.to(device)
                for name, value in each.batch.items()
            }
            for each in batches
        ]
        return_memory()

    def forward(self, see: Callable[[Lane, Tensor], None], *, backward: bool) -> None:
        """Runs everything forward.

        Args:
            see: Is shown the logits of each lane and batch, in order.
            backward: Keep what the backward pass begins with.

        Raises:
            UnsupportedError, SpaceError: As `execution.run`.
        """
        for lane in self._lanes:
            lane.given[0] = [()] * len(self._batches)
        for number in range(self.cut.stages.pp):
            with self._opened(number) as part:
                for lane in self._lanes:
                    with self._moved(part.model, lane), torch.set_grad_enabled(backward):
                        for index in range(len(self._batches)):
                            self._forward(part, lane, index, see)
            if not backward:
                for lane in self._lanes:
                    del lane.given[number]

    def _forward(self, part: StageRun, lane: Lane, index: int, see: Callable[[Lane, Tensor], None]) -> None:
        with failing(part.model):
            output, sent = part(part.model, self._given[index], received(lane.given[part.number][index]))
            if part.number == self.cut.last:
                found = compared(part.model, output)
                lane.loss += float(loss_of(found, self._batches[index]).detach() / len(self._batches))
                see(lane, whole(found.detach()))
            else:
                lane.given[part.number + 1].append(received(sent))

    def observed(self) -> Iterator[list[Outputs]]:
        """What calls of modules give, of one piece after another, in each lane; of the first batch."""
        given: list[tuple[Any, ...]] = [()] * len(self._lanes)
        for number in range(self.cut.stages.pp):
            seen: list[Outputs] = [{} for _ in self._lanes]
            with self._opened(number) as part, torch.no_grad():
                for index, lane in enumerate(self._lanes):
                    with self._moved(part.model, lane), kept(part.model, seen[index], self.cut.stages, number):
                        _, sent = part(part.model, self._given[0], given[index])
                    given[index] = apart(sent)
            yield seen

    @contextmanager
    def backward(self, number: int, see: See | None = None) -> Iterator[StageRun]:
        """Goes back through a piece, from the last one to the first; within the block it is there.

        Its gradients are complete; that of a tied parameter is with the first piece that has it.

        Args:
            number: Of the piece.
            see: Is shown each gradient of each lane as soon as it is complete. The parameter does not keep it then;
                without, it has that of the only lane.
        """
        if number == self.cut.last:
            for lane in self._lanes:
                lane.flow = [[] for _ in self._batches]
        with self._opened(number) as part:
            with self._beside(part) as beside:
                for lane in self._lanes:
                    with self._moved(part.model, lane), self._moved(beside and beside.model, lane, part.model):
                        self._go_back(part, beside, lane, see)
            yield part
        if number < self.cut.last or not self._again:
            for lane in self._lanes:
                del lane.given[number]

    def _go_back(self, part: StageRun, beside: StageRun | None, lane: Lane, see: See | None) -> None:
        plain = {canonical_name(name): each for name, each in part.model.named_parameters() if each.requires_grad}
        first, later = self._tied(part, plain)
        wanted = [*plain.values(), *first.values(), *(each for name, each in later.items() if name not in self._again)]
        totals: dict[str, Tensor] = {}
        for index in range(len(self._batches)):
            self._come_from_later(beside, first, lane, index)
            is_last = index == len(self._batches) - 1

            def complete(name: str, gradient: Tensor) -> None:
                assert see is not None
                see(lane, name, gradient)

            with failing(part.model), shown(plain if is_last and see is not None else {}, complete):
                self._differentiate(part, lane, index, wanted)
            for name, parameter in first.items():
                if parameter.grad is not None:
                    totals[name] = totals[name].add_(parameter.grad) if name in totals else parameter.grad
                    parameter.grad = None
            for name, parameter in later.items():
                if parameter.grad is not None:
                    before = lane.parts.get((name, index))
                    lane.parts[name, index] = parameter.grad if before is None else before.add_(parameter.grad)
                    parameter.grad = None
        for name, parameter in first.items():
            parameter.grad = totals.get(name)
        for name, parameter in (plain | first).items() if see is not None else ():
            if parameter.grad is not None:  # a tied one, or one that the last batch did not reach
                complete(name, parameter.grad)
                parameter.grad = None

    def _differentiate(self, part: StageRun, lane: Lane, index: int, wanted: Sequence[Tensor]) -> None:
        """One batch: forward again, and back."""
        given = received(lane.given[part.number][index])
        leaves = [each for each in given if isinstance(each, Tensor) and each.requires_grad]
        with torch.enable_grad():
            output, sent = part(part.model, self._given[index], given)
            if part.number == self.cut.last:
                outputs, gradients = [self._loss(part, output, index)], None
            else:
                outputs, gradients = go_back(apart(sent), lane.flow[index])
        if outputs:
            torch.autograd.backward(outputs, gradients, inputs=[*wanted, *leaves])
        lane.flow[index] = gradients_of(given)

    def _loss(self, part: StageRun, output: Any, index: int) -> Tensor:
        return loss_of(compared(part.model, output), self._batches[index]) / len(self._batches)

    # ------------------------------------------------------------------------------------------- ties

    @property
    def _again(self) -> frozenset[str]:
        """Ties of the last piece and one other, as those of a head: the last one is there again with the other, and
        computes their gradient then. Otherwise it would have to be kept, of each batch and lane, until then.
        """
        return frozenset(tie.name for tie in self.cut.ties if len(tie.copies) == 2 and self.cut.last in tie.copies)

    def _tied(
        self, part: StageRun, plain: dict[str, nn.Parameter]
    ) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """Takes from the parameters of a piece those that it shares with others.

        Returns:
            By the name of the tie, those of which this is the first piece, and those of which it is a later one.
        """
        first: dict[str, nn.Parameter] = {}
        later: dict[str, nn.Parameter] = {}
        for tie in self.cut.ties:
            if part.number in tie.copies:
                name = tie.copies[part.number]
                parameter = parameter_of(part.model, name)
                if plain.pop(name, None) is not None:
                    (first if part.number == min(tie.copies) else later)[tie.name] = parameter
        return first, later

    def _come_from_later(
        self, beside: StageRun | None, first: Mapping[str, nn.Parameter], lane: Lane, index: int
    ) -> None:
        """Gives tied parameters the gradients of later pieces, to which autograd will add their own."""
        for name, parameter in first.items():
            parameter.grad = lane.parts.pop((name, index), None)
        again = [parameter for name, parameter in first.items() if name in self._again]
        if beside is not None and again:
            with failing(beside.model), torch.enable_grad():
                output, _ = beside(beside.model, self._given[index], received(lane.given[beside.number][index]))
                torch.autograd.backward([self._loss(beside, output, index)], inputs=again)

    @contextmanager
    def _beside(self, part: StageRun) -> Iterator[StageRun | None]:
        """The last piece, with tied parameters of this one, where they get a gradient from it."""
        shared = {
            tie.copies[self.cut.last]: parameter_of(part.model, tie.copies[part.number])
            for tie in self.cut.ties
            if tie.name in self._again and part.number == min(tie.copies)
        }
        with self._opened(self.cut.last, shared) if shared else nullcontext() as beside:
            yield beside

    # ------------------------------------------------------------------------------------------- memory

    @contextmanager
    def _opened(self, number: int, shared: Mapping[str, nn.Parameter] | None = None) -> Iterator[StageRun]:
        """A piece with storage, but for what is shared, which is another's."""
        model = self._open(number, shared or {})
        try:
            yield StageRun(model, self.cut.stages, number, self.cut.carry)
        finally:
            release(model, (shared or {}).values())

    def _moved(self, model: nn.Module | None, lane: Lane, other: nn.Module | None = None) -> Any:
        """Moves the embeddings of a piece, but those that it shares with another."""
        if model is None or lane.draw is None:
            return nullcontext()
        known = self.cut.embeddings
        if other is not None:
            shared = {id(each) for each in other.parameters()}
            own = {canonical_name(name) for name, each in model.named_parameters() if id(each) not in shared}
            known = {name: first for name, first in known.items() if name in own}
        return noise.moved_embeddings(model, lane.draw, known)


def share(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Puts parameters of another model in the place of those of these names, which have no storage yet."""
    for name, parameter in parameters.items():
        own = parameter_of(model, name)
        for module in model.modules():
            for leaf, each in module._parameters.items():
                if each is own:
                    module._parameters[leaf] = parameter
