"""Choose the number of stages of the reference of `verify --run` so that it stays within its memory limit.

Counted at the peak:

    weights          of a stage, and of the last one if it shares a parameter with the first
    gradients        of the stage; twice while those of several batches are summed for perturbed embeddings
    activations      of one batch through the stage, by the widths of its matrices
    between stages   inputs of each stage, for every batch and compute pass
    logits           of every batch, and some float32 copies of one
    comparison       some elements at a time, in float64
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ckptx.errors import SpaceError
from ckptx.layout.stages import Stack, StageMap
from ckptx.processes.threads import lazy_property
from ckptx.report.report import human_bytes
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.pipeline.ties import find_ties_across_stages
from ckptx.runtime.parity import noise
from ckptx.runtime.parity.distances import CHUNK_NUMEL
from ckptx.runtime.parity.inputs.batch import Inputs
from ckptx.wording import counted

_PASSES = 1 + noise.NUM_DRAWS  # compute passes of the reference: one unchanged, the others with perturbed embeddings
_LOGITS_COPIES = 4  # float32 copies of the logits of a batch: logits, softmax, gradient, perturbed logits
# Bytes per compared element: both values in float64, their difference, its magnitude, and that without NaN.
_COMPARISON_BYTES = 40
_ALLOCATION_OVERHEAD = 1.05  # factor for gaps between tensors in memory
_ACTIVATIONS_PER_FEATURE = 3  # activations for each input and output of a matrix: before, after, and what is between


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of a reference that runs stage by stage.

    Attributes:
        model: Model on the meta device, without wrappers.
        stacks: Lists of layers of the model.
        batches: Microbatches of a step, of all ranks.
        backward: True if gradients are computed, too.
        includes_checkpoint: True if the same process runs each stage of the checkpoint after that of the reference.
        advice: Other ways for the user to save memory.
    """

    model: nn.Module
    stacks: Sequence[Stack]
    batches: Sequence[Inputs]
    backward: bool
    includes_checkpoint: bool
    advice: Sequence[str] = ()

    def partition(self, limit: int) -> StageMap:
        """Return the assignment to the fewest stages that stay within a limit, in bytes.

        Raises:
            SpaceError: No number of stages stays within the limit; the message names the memory that the model takes.
        """
        layers = sum(stack.count for stack in self.stacks)
        min_bytes: int | None = None
        for count in range(2, layers + 1):
            stages = self._split_evenly(count)
            peak_bytes = self.peak_bytes(stages)
            if peak_bytes <= limit:
                return stages
            min_bytes = peak_bytes if min_bytes is None else min(min_bytes, peak_bytes)
        name, advice = type(self.model).__name__, ", ".join([*self.advice, "a machine with more"])
        if min_bytes is None:
            raise SpaceError(
                f"{name}: the reference requires {human_bytes(self.whole_bytes)} as a whole, the limit is "
                f"{human_bytes(limit)}, and a model with {counted(layers, 'layer')} cannot run in parts; use "
                f"{advice}, or compare the bytes without --run"
            )
        raise SpaceError(
            f"{name}: the reference requires at least {human_bytes(min_bytes)} in up to {layers} parts, and the limit "
            f"is {human_bytes(limit)}; use --reference-memory {-(-min_bytes // 10**6)}MB, {advice}, or compare the "
            "bytes without --run"
        )

    def _split_evenly(self, count: int) -> StageMap:
        return StageMap(self.stacks, count, "even", type(self.model).__name__)

    @lazy_property
    def _named_parameters(self) -> list[tuple[tuple[str, ...], nn.Parameter]]:
        """(all canonical names, parameter) of each parameter."""
        names_by_id: dict[int, list[str]] = {}
        parameters_by_id = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names_by_id.setdefault(id(parameter), []).append(canonical_name(name))
            parameters_by_id[id(parameter)] = parameter
        return [(tuple(names), parameters_by_id[key]) for key, names in names_by_id.items()]

    @lazy_property
    def whole_bytes(self) -> int:
        """Peak bytes as a whole model."""
        return self.peak_bytes(StageMap(self.stacks, 1))

    def peak_bytes(self, stages: StageMap) -> int:
        """Return the peak bytes with this assignment of layers to stages."""
        # Bytes by stage: of all weights, of the largest parameter, and of the activations of one batch.
        weights, largest, activations = Counter[int](), Counter[int](), Counter[int]()
        tokens = max((each.labels.numel() for each in self.batches), default=0)
        for names, parameter in self._named_parameters:
            nbytes = _bytes_of(parameter)
            for stage in set(map(stages.stage_of, names)):
                weights[stage] += nbytes
                largest[stage] = max(largest[stage], nbytes)
                if parameter.dim() > 1:
                    width = sum(parameter.shape[-2:]) * _ACTIVATIONS_PER_FEATURE
                    activations[stage] += tokens * min(width, parameter.numel()) * max(parameter.element_size(), 2)
        # Stage -> bytes of the last stage, which is loaded in addition for a tied head.
        head_stage_bytes, tied_gradient_bytes, last = Counter[int](), 0, stages.count - 1
        sums_batches = len(self.batches) > 1
        for tie in find_ties_across_stages(self.model, stages) if self.backward else ():
            parameter = next(each for names, each in self._named_parameters if tie.name in names)
            if len(tie.copies) == 2 and last in tie.copies:
                # both stages share the storage of the parameter
                head_stage_bytes[min(tie.copies)] = weights[last] - _bytes_of(parameter)
            else:
                tied_gradient_bytes += _bytes_of(parameter) * _PASSES * len(self.batches)
        peaks = []
        for stage in range(stages.count):
            reference_bytes = weights[stage] + activations[stage] + head_stage_bytes[stage]
            if self.backward:  # the largest may be tied: its gradient has two sources
                reference_bytes += (
                    weights[stage] + largest[stage] + (weights[stage] if sums_batches else largest[stage])
                )
            checkpoint_bytes = (  # weights and gradients of the checkpoint, and gradients of the reference
                3 * weights[stage] + activations[stage] if self.includes_checkpoint and self.backward else 0
            )
            peaks.append(max(reference_bytes, checkpoint_bytes))
        max_numel = max((each.numel() for _, each in self._named_parameters), default=0)
        total_bytes = (
            max(peaks)
            + tied_gradient_bytes
            + self._boundary_bytes(stages, tokens)
            + min(max_numel, CHUNK_NUMEL) * _COMPARISON_BYTES
        )
        return int(total_bytes * _ALLOCATION_OVERHEAD)

    def _boundary_bytes(self, stages: StageMap, tokens: int) -> int:
        """Return the bytes of the hidden states between stages, and of the logits; 0 if the embedding is not known.

        Args:
            stages: Assignment of layers to stages.
            tokens: Tokens of the largest batch.
        """
        try:
            weight = getattr(self.model.get_input_embeddings(), "weight", None)
        except (AttributeError, NotImplementedError):  # an audio-only class, or one of another library
            weight = None
        if weight is None or weight.dim() != 2:
            return 0
        vocabulary_size, width = weight.shape
        passes = _PASSES + self.includes_checkpoint
        hidden_bytes = tokens * width * weight.element_size() * len(self.batches) * passes * stages.count
        logits_bytes = (
            tokens
            * vocabulary_size
            * (weight.element_size() * len(self.batches) * (1 + self.includes_checkpoint) + 4 * _LOGITS_COPIES)
        )
        return int(hidden_bytes + logits_bytes)


def _bytes_of(parameter: nn.Parameter) -> int:
    return int(parameter.numel() * parameter.element_size())
