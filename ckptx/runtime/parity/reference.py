"""The reference of `verify --run`: on one device, as a whole, or in pieces where it is too large for that.

Either way it runs as it is, and again with its embeddings moved by one unit in the last place: see `noise`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from ckptx.layout.stages import StageMap
from ckptx.runtime.model.build import materialize
from ckptx.runtime.parallel.distributed import Process
from ckptx.runtime.parallel.pipeline.cut import carry_found
from ckptx.runtime.parallel.pipeline.stage import make_stage
from ckptx.runtime.parallel.pipeline.ties import tied_over
from ckptx.runtime.parity import memory, noise
from ckptx.runtime.parity.budget import Budget
from ckptx.runtime.parity.comparison import Gradient, Reference
from ckptx.runtime.parity.distances import furthest
from ckptx.runtime.parity.divergence import Outputs, kept
from ckptx.runtime.parity.execution import ForwardResult, compared, run
from ckptx.runtime.parity.inputs.batch import Inputs
from ckptx.runtime.parity.side import ModelFacts, Side
from ckptx.runtime.parity.staging import small_batches
from ckptx.runtime.parity.walk import Lane, Pieces, Walk, share


def reference_of(side: Side, seen: ModelFacts, batches: Sequence[Inputs], process: Process) -> Running:
    """The reference as a whole, or in the fewest pieces that take no more memory than they may.

    Args:
        side: The reference.
        seen: What is known of it.
        batches: Microbatches of one step, of all ranks.
        process: Where it runs.

    Raises:
        SpaceError: It takes too much in any number of pieces; the message names the least.
        UnsupportedError: It would have to be cut, and cannot be.
    """
    options = side.options
    limits = memory.allowed(seen, options, process)
    model, stacks = side.stacked()
    ways = memory.ways_to_take_less(seen, options)
    budget = Budget(model, stacks, batches, options.backward, process.world_size == 1, ways)
    if limits.whole is None or limits.pieces is None or budget.whole <= limits.whole:
        return InOnePiece(side, batches, process, options.backward)
    return InPieces(side, batches, process, cut_into(model, budget.cut(limits.pieces), seen), backward=options.backward)


def cut_into(model: nn.Module, stages: StageMap, seen: ModelFacts) -> Pieces:
    """What `InPieces` needs to know.

    Args:
        model: On the meta device.
        stages: The pieces.
        seen: What is known of it.

    Raises:
        UnsupportedError: The pieces cannot be made to compute what it does.
    """
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    ties = tuple(tied_over(model, stages))
    carry = carry_found(model, stages, small_batches(model, seen), compared)
    return Pieces(stages, carry, ties, noise.embeddings_of(model), dtype)


class Running(Protocol):
    """A reference that runs.

    Attributes:
        cut: Into which pieces, if any.
    """

    cut: Pieces | None

    @property
    def pieces(self) -> int:
        """How many."""
        return 1 if self.cut is None else self.cut.stages.pp

    def forward(self) -> Reference:
        """Computes logits and loss, and how much rounding moves them."""
        ...

    def gradients(self) -> Iterator[list[Gradient]]:
        """After `forward`: some gradients at a time, until there are no more."""
        ...

    def observed(self, inputs: Inputs) -> Iterator[tuple[Outputs, Outputs]]:
        """What calls of modules give, as it is and with moved embeddings; of one part after another."""
        ...


@dataclass(slots=True)
class InOnePiece(Running):
    """A reference that fits.

    Attributes:
        side: The reference.
        batches: Microbatches of one step.
        process: Where it runs.
        backward: Compute gradients, too.
    """

    side: Side
    batches: Sequence[Inputs]
    process: Process
    backward: bool
    cut: Pieces | None = None
    _gradients: list[Gradient] = field(default_factory=list)

    def forward(self) -> Reference:
        """Of the moved runs only distances are kept, each taken when its gradient is complete."""
        model = self.side.whole(self.process)
        outcome = run(model, self.batches, backward=self.backward)
        is_repeatable = self.process.device.type == "cpu" or self._is_repeated(model, outcome)
        gradients, outcome.gradients = outcome.gradients, {}
        distances = dict.fromkeys(gradients, 0.0)
        logits = loss = 0.0

        def measure(name: str, gradient: Tensor) -> None:
            if name in gradients:
                distances[name] = max(distances[name], furthest(gradients[name], gradient))

        for draw in range(noise.DRAWS):
            with noise.moved_embeddings(model, draw):
                other = run(model, self.batches, backward=self.backward, see=measure)
            logits = max(logits, *(furthest(a, b) for a, b in zip(outcome.logits, other.logits, strict=True)))
            loss = max(loss, abs(outcome.loss - other.loss))
        self._gradients = [Gradient(name, each, distances[name]) for name, each in gradients.items()]
        return Reference(outcome, logits, loss, is_repeatable)

    def gradients(self) -> Iterator[list[Gradient]]:
        found, self._gradients = self._gradients, []
        yield found

    def observed(self, inputs: Inputs) -> Iterator[tuple[Outputs, Outputs]]:
        model = self.side.whole(self.process)
        seen: Outputs = {}
        other: Outputs = {}
        with kept(model, seen):
            run(model, [inputs], backward=False)
        with noise.moved_embeddings(model, 0), kept(model, other):
            run(model, [inputs], backward=False)
        yield seen, other

    def _is_repeated(self, model: nn.Module, outcome: ForwardResult) -> bool:
        """Whether the device gives the same again, bit for bit."""
        differing: list[str] = []

        def compare(name: str, gradient: Tensor) -> None:
            if not torch.equal(outcome.gradients[name], gradient):
                differing.append(name)

        again = run(model, self.batches, backward=self.backward, see=compare)
        logits = all(torch.equal(a, b) for a, b in zip(outcome.logits, again.logits, strict=True))
        return not differing and logits and outcome.loss == again.loss


class InPieces(Running):
    """A reference that is loaded, run and released piece by piece; on a CPU it gives what the whole one gives.

    Another device is not asked whether it gives the same twice: results are held against noise there.
    """

    def __init__(self, side: Side, batches: Sequence[Inputs], process: Process, cut: Pieces, *, backward: bool) -> None:
        """Args:
        side: The reference.
        batches: Microbatches of one step.
        process: Where it runs.
        cut: How it is cut.
        backward: Compute gradients, too.
        """
        self.cut: Pieces | None = cut
        self._lanes = [Lane(), *map(Lane, range(noise.DRAWS))]
        self._backward, self._is_repeatable = backward, process.device.type == "cpu"
        self._opened = partial(_open_piece, side, cut, process.device)
        self._walk = Walk(cut, batches, self._lanes, self._opened, process.device)
        self._device = process.device

    def forward(self) -> Reference:
        unmoved = self._lanes[0]
        outcome, moved, seen = ForwardResult(), [0.0], dict.fromkeys(self._lanes, 0)

        def see(lane: Lane, logits: Tensor) -> None:
            if lane is unmoved:
                outcome.logits.append(logits)
            else:
                moved.append(furthest(outcome.logits[seen[lane]], logits))
                seen[lane] += 1

        self._walk.forward(see, backward=self._backward)
        outcome.loss = unmoved.loss
        loss = max(abs(unmoved.loss - each.loss) for each in self._lanes)
        return Reference(outcome, max(moved), loss, self._is_repeatable)

    def gradients(self) -> Iterator[list[Gradient]]:
        if not self._backward:
            yield []
            return
        own: dict[str, Tensor] = {}
        distances: dict[str, float] = {}

        def see(lane: Lane, name: str, gradient: Tensor) -> None:
            if lane is self._lanes[0]:
                own[name], distances[name] = gradient, 0.0
            elif name in own:
                distances[name] = max(distances[name], furthest(own[name], gradient))

        for number in reversed(range(self._walk.cut.stages.pp)):
            with self._walk.backward(number, see):
                pass
            yield [Gradient(name, each, distances[name]) for name, each in own.items()]
            own.clear()

    def observed(self, inputs: Inputs) -> Iterator[tuple[Outputs, Outputs]]:
        lanes = [Lane(), Lane(0)]
        found = Walk(self._walk.cut, [inputs], lanes, self._opened, self._device).observed()
        yield from ((seen, other) for seen, other in found)


def _open_piece(
    side: Side, cut: Pieces, device: torch.device, number: int, shared: Mapping[str, nn.Parameter]
) -> nn.Module:
    with side.opened() as source:
        model = side.model(source)
        make_stage(model, cut.stages, number, cut.carry.forms, device)
        share(model, shared)
        materialize(model, device)
        side.load(model, source, None)
    return model
