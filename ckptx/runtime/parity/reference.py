"""The reference of `verify --run`: on one device, as a whole, or stage by stage if it is too large for that.

Either way it runs unchanged, and several times with its embeddings perturbed by one ULP: see `noise`.
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
from ckptx.runtime.parallel.pipeline.ties import find_ties_across_stages
from ckptx.runtime.parity import memory, noise
from ckptx.runtime.parity.budget import MemoryBudget
from ckptx.runtime.parity.comparison import ReferenceGradient, ReferenceResult
from ckptx.runtime.parity.distances import max_abs_difference
from ckptx.runtime.parity.divergence import OutputsByCall, record_outputs
from ckptx.runtime.parity.execution import StepResult, logits_or_hidden_states, run_step
from ckptx.runtime.parity.inputs.batch import Inputs
from ckptx.runtime.parity.model_loaders import ModelFacts, ModelLoader
from ckptx.runtime.parity.stages import make_batch_factory
from ckptx.runtime.parity.stagewise_model import ComputePass, StagePartition, StagewiseModel, share_parameters


def make_reference(
    loader: ModelLoader, facts: ModelFacts, microbatches: Sequence[Inputs], rank_context: RankContext
) -> ReferenceModel:
    """Return the reference as a whole, or in the fewest stages that stay within the memory limit.

    Args:
        loader: Loader of the reference.
        facts: Facts about its model.
        microbatches: Microbatches of one step, of all ranks.
        rank_context: Context of the rank that runs it.

    Raises:
        SpaceError: The reference exceeds the limit with any number of stages; the message names the memory that it
            requires.
        UnsupportedError: The reference has to be split into stages, and cannot be.
    """
    options = loader.options
    limits = memory.find_memory_limits(facts, options, rank_context)
    model, stacks = loader.build_with_stacks()
    advice = memory.advise_to_save_memory(facts, options)
    budget = MemoryBudget(model, stacks, microbatches, options.backward, rank_context.world_size == 1, advice)
    if limits is None or budget.whole_bytes <= limits.whole:
        return WholeReference(loader, microbatches, rank_context, options.backward)
    return StagewiseReference(
        loader,
        microbatches,
        rank_context,
        partition_reference(model, budget.partition(limits.stagewise), facts),
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
    ties = tuple(find_ties_across_stages(model, stages))
    boundaries = find_and_check_boundaries(model, stages, make_batch_factory(model, facts), logits_or_hidden_states)
    return StagePartition(stages, boundaries, ties, noise.find_embeddings(model), dtype)


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

    def forward(self) -> ReferenceResult:
        """Compute logits and loss, and how much the noise changes them."""
        ...

    def gradients(self) -> Iterator[list[ReferenceGradient]]:
        """Yield the gradients after `forward`, stage by stage from the last; call it once.

        A whole model yields all of them at once; without a backward pass, the only list is empty.
        """
        ...

    def iter_module_outputs(self, inputs: Inputs) -> Iterator[tuple[OutputsByCall, OutputsByCall]]:
        """Yield the outputs of module calls without and with perturbed embeddings, stage by stage."""
        ...


@dataclass(slots=True)
class WholeReference(ReferenceModel):
    """A reference that fits in memory.

    Attributes:
        loader: Loader of the reference.
        microbatches: Microbatches of one step.
        rank_context: Context of the rank that runs it.
        backward: Also compute gradients.
    """

    loader: ModelLoader
    microbatches: Sequence[Inputs]
    rank_context: RankContext
    backward: bool
    partition: StagePartition | None = None
    _gradients: list[ReferenceGradient] = field(default_factory=list)  # of `forward`, until `gradients` yields them

    def forward(self) -> ReferenceResult:
        """Run the model unchanged and perturbed; of perturbed gradients, only the largest difference is kept."""
        model = self.loader.load_whole(self.rank_context)
        result = run_step(model, self.microbatches, backward=self.backward)
        is_repeatable = self.rank_context.device.type == "cpu" or self._is_repeatable(model, result)
        gradients, result.gradients = result.gradients, {}
        distances = dict.fromkeys(gradients, 0.0)
        logits_noise = loss_noise = 0.0

        def measure(name: str, gradient: Tensor) -> None:
            if name in gradients:
                distances[name] = max(distances[name], max_abs_difference(gradients[name], gradient))

        for draw in range(noise.NUM_DRAWS):
            with noise.perturb_embeddings(model, draw):
                perturbed_result = run_step(model, self.microbatches, backward=self.backward, on_gradient=measure)
            logits_pairs = zip(result.logits, perturbed_result.logits, strict=True)
            logits_noise = max(logits_noise, *(max_abs_difference(*pair) for pair in logits_pairs))
            loss_noise = max(loss_noise, abs(result.loss - perturbed_result.loss))
        self._gradients = [ReferenceGradient(name, each, distances[name]) for name, each in gradients.items()]
        return ReferenceResult(result, logits_noise, loss_noise, is_repeatable)

    def gradients(self) -> Iterator[list[ReferenceGradient]]:
        gradients, self._gradients = self._gradients, []
        yield gradients

    def iter_module_outputs(self, inputs: Inputs) -> Iterator[tuple[OutputsByCall, OutputsByCall]]:
        model = self.loader.load_whole(self.rank_context)
        outputs: OutputsByCall = {}
        perturbed_outputs: OutputsByCall = {}
        with record_outputs(model, outputs):
            run_step(model, [inputs], backward=False)
        with noise.perturb_embeddings(model, 0), record_outputs(model, perturbed_outputs):
            run_step(model, [inputs], backward=False)
        yield outputs, perturbed_outputs

    def _is_repeatable(self, model: nn.Module, result: StepResult) -> bool:
        """Run the model again, and return True if logits, loss and gradients equal those of `result` bit for bit."""
        differing_names: list[str] = []

        def compare(name: str, gradient: Tensor) -> None:
            if not torch.equal(result.gradients[name], gradient):
                differing_names.append(name)

        second_result = run_step(model, self.microbatches, backward=self.backward, on_gradient=compare)
        are_logits_equal = all(torch.equal(a, b) for a, b in zip(result.logits, second_result.logits, strict=True))
        return not differing_names and are_logits_equal and result.loss == second_result.loss


class StagewiseReference(ReferenceModel):
    """A reference that is loaded, run and released stage by stage; on a CPU it equals the whole one bit for bit.

    Each time that a stage is loaded, its weights are read from the checkpoint. Other devices are not tested for
    repeatability: their results are compared within the noise.
    """

    def __init__(
        self,
        loader: ModelLoader,
        microbatches: Sequence[Inputs],
        rank_context: RankContext,
        partition: StagePartition,
        *,
        backward: bool,
    ) -> None:
        """Prepare the passes; no stage is loaded yet.

        Args:
            loader: Loader of the reference.
            microbatches: Microbatches of one step.
            rank_context: Context of the rank that runs it.
            partition: Its stages.
            backward: Also compute gradients.
        """
        self.partition: StagePartition | None = partition
        self._passes = [ComputePass(draw=None), *(ComputePass(draw=draw) for draw in range(noise.NUM_DRAWS))]
        self._backward, self._is_repeatable = backward, rank_context.device.type == "cpu"
        self._stage_opener = partial(_open_stage, loader, partition, rank_context.device)
        self._model = StagewiseModel(partition, microbatches, self._passes, self._stage_opener, rank_context.device)
        self._device = rank_context.device

    def forward(self) -> ReferenceResult:
        plain_pass = self._passes[0]
        result, logits_differences, microbatches_seen = StepResult(), [0.0], dict.fromkeys(self._passes, 0)

        def record(compute_pass: ComputePass, logits: Tensor) -> None:
            if compute_pass is plain_pass:
                result.logits.append(logits)
            else:
                logits_differences.append(max_abs_difference(result.logits[microbatches_seen[compute_pass]], logits))
                microbatches_seen[compute_pass] += 1

        self._model.forward(record, backward=self._backward)
        result.loss = plain_pass.loss
        loss_noise = max(abs(plain_pass.loss - each.loss) for each in self._passes)
        return ReferenceResult(result, max(logits_differences), loss_noise, self._is_repeatable)

    def gradients(self) -> Iterator[list[ReferenceGradient]]:
        if not self._backward:
            yield []
            return
        plain_gradients: dict[str, Tensor] = {}
        distances: dict[str, float] = {}

        def record(compute_pass: ComputePass, name: str, gradient: Tensor) -> None:
            if compute_pass is self._passes[0]:
                plain_gradients[name], distances[name] = gradient, 0.0
            elif name in plain_gradients:
                distances[name] = max(distances[name], max_abs_difference(plain_gradients[name], gradient))

        for number in reversed(range(self._model.partition.stages.count)):
            with self._model.backward(number, record):
                pass  # `record` has the gradients; the stage is not needed any more
            yield [ReferenceGradient(name, each, distances[name]) for name, each in plain_gradients.items()]
            plain_gradients.clear()

    def iter_module_outputs(self, inputs: Inputs) -> Iterator[tuple[OutputsByCall, OutputsByCall]]:
        passes = [ComputePass(draw=None), ComputePass(draw=0)]
        model = StagewiseModel(self._model.partition, [inputs], passes, self._stage_opener, self._device)
        for outputs_by_pass in model.iter_module_outputs():
            yield outputs_by_pass[0], outputs_by_pass[1]


def _open_stage(
    loader: ModelLoader,
    partition: StagePartition,
    device: torch.device,
    number: int,
    shared: Mapping[str, nn.Parameter],
) -> nn.Module:
    """Build and load one stage of the reference; see `stagewise_model.StageOpener`."""
    with loader.open_checkpoint() as source:
        model = loader.build_meta_model(source)
        make_stage(model, partition.stages, number, partition.boundaries.output_structures, device)
        share_parameters(model, shared)
        materialize(model, device)
        loader.load(model, source, None)
    return model
