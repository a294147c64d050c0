"""The reference of `verify --run`: on one device, as a whole, or stage by stage if it is too large for that.

Either way it runs unchanged, and again with its embeddings perturbed by one ULP: see `noise`.
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
from ckptx.runtime.parallel.distributed import RankContext
from ckptx.runtime.parallel.pipeline.plan import find_and_check_boundaries
from ckptx.runtime.parallel.pipeline.stage import make_stage
from ckptx.runtime.parallel.pipeline.ties import ties_across_stages
from ckptx.runtime.parity import memory, noise
from ckptx.runtime.parity.budget import Budget
from ckptx.runtime.parity.comparison import Gradient, Reference
from ckptx.runtime.parity.distances import furthest
from ckptx.runtime.parity.divergence import Outputs, record_outputs
from ckptx.runtime.parity.execution import ForwardResult, logits_or_hidden_states, run
from ckptx.runtime.parity.inputs.batch import Inputs
from ckptx.runtime.parity.offloaded_model import ComputePass, OffloadedModel, StagePartition, share_parameters
from ckptx.runtime.parity.side import ModelFacts, ModelSide
from ckptx.runtime.parity.stages import small_batches


def reference_of(side: ModelSide, facts: ModelFacts, batches: Sequence[Inputs], process: RankContext) -> ReferenceModel:
    """Return the reference as a whole, or in the fewest stages that stay within the memory limit.

    Args:
        side: Side of the reference.
        facts: Facts about its model.
        batches: Microbatches of one step, of all ranks.
        process: Context of the rank that runs it.

    Raises:
        SpaceError: It exceeds the limit with any number of stages; the message names the smallest sufficient limit.
        UnsupportedError: It has to be split into stages, and cannot be.
    """
    options = side.options
    limits = memory.memory_limits(facts, options, process)
    model, stacks = side.stacked()
    advice = memory.advice_to_save_memory(facts, options)
    budget = Budget(model, stacks, batches, options.backward, process.world_size == 1, advice)
    if limits.whole is None or limits.offloaded is None or budget.whole_bytes <= limits.whole:
        return WholeReference(side, batches, process, options.backward)
    return OffloadedReference(
        side,
        batches,
        process,
        partition_reference(model, budget.partition(limits.offloaded), facts),
        backward=options.backward,
    )


def partition_reference(model: nn.Module, stages: StageMap, facts: ModelFacts) -> StagePartition:
    """Split the reference into stages, and find what connects them.

    Args:
        model: Model on the meta device.
        stages: Assignment of layers to stages.
        facts: Facts about the model.

    Raises:
        UnsupportedError: The stages do not compute the same as the whole model.
    """
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    ties = tuple(ties_across_stages(model, stages))
    boundaries = find_and_check_boundaries(model, stages, small_batches(model, facts), logits_or_hidden_states)
    return StagePartition(stages, boundaries, ties, noise.embeddings_of(model), dtype)


class ReferenceModel(Protocol):
    """A runnable reference.

    Attributes:
        partition: Its stages; None for a model that runs as a whole.
    """

    partition: StagePartition | None

    @property
    def stage_count(self) -> int:
        """Number of stages; 1 for a model that runs as a whole."""
        return 1 if self.partition is None else self.partition.stages.count

    def forward(self) -> Reference:
        """Compute logits and loss, and how much the noise changes them."""
        ...

    def gradients(self) -> Iterator[list[Gradient]]:
        """Yield the gradients after `forward`, some at a time."""
        ...

    def observed(self, inputs: Inputs) -> Iterator[tuple[Outputs, Outputs]]:
        """Yield the outputs of module calls without and with perturbed embeddings, part by part."""
        ...


@dataclass(slots=True)
class WholeReference(ReferenceModel):
    """A reference that fits in memory.

    Attributes:
        side: Side of the reference.
        batches: Microbatches of one step.
        process: Context of the rank that runs it.
        backward: Also compute gradients.
    """

    side: ModelSide
    batches: Sequence[Inputs]
    process: RankContext
    backward: bool
    partition: StagePartition | None = None
    _gradients: list[Gradient] = field(default_factory=list)

    def forward(self) -> Reference:
        """Run the model; of perturbed runs, only the distance of each gradient is kept."""
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
            with noise.perturbed_embeddings(model, draw):
                other = run(model, self.batches, backward=self.backward, on_gradient=measure)
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
        with record_outputs(model, seen):
            run(model, [inputs], backward=False)
        with noise.perturbed_embeddings(model, 0), record_outputs(model, other):
            run(model, [inputs], backward=False)
        yield seen, other

    def _is_repeated(self, model: nn.Module, outcome: ForwardResult) -> bool:
        """Return True if the device gives the same bits again."""
        differing: list[str] = []

        def compare(name: str, gradient: Tensor) -> None:
            if not torch.equal(outcome.gradients[name], gradient):
                differing.append(name)

        again = run(model, self.batches, backward=self.backward, on_gradient=compare)
        logits = all(torch.equal(a, b) for a, b in zip(outcome.logits, again.logits, strict=True))
        return not differing and logits and outcome.loss == again.loss


class OffloadedReference(ReferenceModel):
    """A reference that is loaded, run and released stage by stage; on a CPU it equals the whole one bit for bit.

    Other devices are not tested for repeatability: their results are compared within the noise.
    """

    def __init__(
        self,
        side: ModelSide,
        batches: Sequence[Inputs],
        process: RankContext,
        partition: StagePartition,
        *,
        backward: bool,
    ) -> None:
        """Prepare the passes; no stage is loaded yet.

        Args:
            side: Side of the reference.
            batches: Microbatches of one step.
            process: Context of the rank that runs it.
            partition: Its stages.
            backward: Also compute gradients.
        """
        self.partition: StagePartition | None = partition
        self._passes = [ComputePass(), *map(ComputePass, range(noise.DRAWS))]
        self._backward, self._is_repeatable = backward, process.device.type == "cpu"
        self._opener = partial(_open_stage, side, partition, process.device)
        self._model = OffloadedModel(partition, batches, self._passes, self._opener, process.device)
        self._device = process.device

    def forward(self) -> Reference:
        unmoved = self._passes[0]
        outcome, moved, seen = ForwardResult(), [0.0], dict.fromkeys(self._passes, 0)

        def record(compute_pass: ComputePass, logits: Tensor) -> None:
            if compute_pass is unmoved:
                outcome.logits.append(logits)
            else:
                moved.append(furthest(outcome.logits[seen[compute_pass]], logits))
                seen[compute_pass] += 1

        self._model.forward(record, backward=self._backward)
        outcome.loss = unmoved.loss
        loss = max(abs(unmoved.loss - each.loss) for each in self._passes)
        return Reference(outcome, max(moved), loss, self._is_repeatable)

    def gradients(self) -> Iterator[list[Gradient]]:
        if not self._backward:
            yield []
            return
        own: dict[str, Tensor] = {}
        distances: dict[str, float] = {}

        def record(compute_pass: ComputePass, name: str, gradient: Tensor) -> None:
            if compute_pass is self._passes[0]:
                own[name], distances[name] = gradient, 0.0
            elif name in own:
                distances[name] = max(distances[name], furthest(own[name], gradient))

        for number in reversed(range(self._model.partition.stages.count)):
            with self._model.backward(number, record):
                pass
            yield [Gradient(name, each, distances[name]) for name, each in own.items()]
            own.clear()

    def observed(self, inputs: Inputs) -> Iterator[tuple[Outputs, Outputs]]:
        passes = [ComputePass(), ComputePass(0)]
        found = OffloadedModel(self._model.partition, [inputs], passes, self._opener, self._device).observed()
        yield from ((seen, other) for seen, other in found)


def _open_stage(
    side: ModelSide, partition: StagePartition, device: torch.device, number: int, shared: Mapping[str, nn.Parameter]
) -> nn.Module:
    with side.open_checkpoint() as source:
        model = side.model(source)
        make_stage(model, partition.stages, number, partition.boundaries.forms, device)
        share_parameters(model, shared)
        materialize(model, device)
        side.load(model, source, None)
    return model
