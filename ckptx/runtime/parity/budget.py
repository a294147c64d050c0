"""How many pieces the reference of `verify --run` is cut into, so that it takes no more memory than it may.

What is counted, where it is most:

    weights          of a piece, and of the last one beside the first where they share a parameter
    gradients        of the piece; once more while batches are added up for the moved embeddings
    activations      of one batch through the piece, by the widths of its matrices
    between pieces   what each is given, of every batch and compute_pass
    logits           of every batch, and some copies of one in float32
    comparing        some elements at a time, in float64
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from ckptx.errors import SpaceError
from ckptx.layout.stages import Stack, StageMap
from ckptx.report.report import human_bytes
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.pipeline.ties import ties_across_stages
from ckptx.runtime.parity import noise
from ckptx.runtime.parity.distances import BAND
from ckptx.runtime.parity.inputs.batch import Inputs
from ckptx.wording import counted

_PASSES = 1 + noise.DRAWS
_COPIES = 4  # of the logits of one batch, in float32: themselves, softmax, their gradient, what noise made of them
_TO_COMPARE = 40  # bytes: both in float64, their difference, its magnitude, and that without NaN
_LOST = 1.05  # to what is between tensors in memory
_PER_WIDTH = 3  # activations for each input and output of a matrix: before, after, and what is between


@dataclass(frozen=True)
class Budget:
    """What a model takes in pieces.

    Attributes:
        model: On the meta device, without wrappers.
        stacks: Its layers.
        batches: Microbatches of a step.
        backward: Compute gradients, too.
        both: The checkpoint is walked by the same process, after each piece of the reference.
        ways: What else a user can do about it.
    """

    model: nn.Module
    stacks: Sequence[Stack]
    batches: Sequence[Inputs]
    backward: bool
    both: bool
    ways: Sequence[str] = ()

    def partition(self, limit: int) -> StageMap:
        """The fewest pieces that stay below a limit, in bytes.

        Raises:
            SpaceError: There is no such number; the message names the least limit.
        """
        layers = sum(stack.count for stack in self.stacks)
        least: int | None = None
        for count in range(2, layers + 1):
            stages = self._stages(count)
            needed = self.needed(stages)
            if needed <= limit:
                return stages
            least = needed if least is None else min(least, needed)
        name, ways = type(self.model).__name__, ", ".join([*self.ways, "a machine with more"])
        if least is None:
            raise SpaceError(
                f"{name}: the reference takes {human_bytes(self.whole)} in one piece and may take "
                f"{human_bytes(limit)}; found {counted(layers, 'layer')}, needed two or more to run it in pieces; use "
                f"{ways}, or compare the bytes without --run"
            )
        raise SpaceError(
            f"{name}: the reference may take {human_bytes(limit)}, needed {human_bytes(least)} at least, in up to "
            f"{layers} pieces; use --reference-memory {-(-least // 10**6)}MB, {ways}, or compare the bytes without "
            "--run"
        )

    def _stages(self, count: int) -> StageMap:
        return StageMap(self.stacks, count, "even", type(self.model).__name__)

    @cached_property
    def _parameters(self) -> list[tuple[tuple[str, ...], nn.Parameter]]:
        """Each with all its names."""
        names: dict[int, list[str]] = {}
        found = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(canonical_name(name))
            found[id(parameter)] = parameter
        return [(tuple(each), found[key]) for key, each in names.items()]

    @cached_property
    def whole(self) -> int:
        """Bytes at the peak, in one piece."""
        return self.needed(StageMap(self.stacks, 1))

    def needed(self, stages: StageMap) -> int:
        """Bytes at the peak, when it is cut like this."""
        weights, largest, activations = Counter[int](), Counter[int](), Counter[int]()
        tokens = max((each.labels.numel() for each in self.batches), default=0)
        for names, parameter in self._parameters:
            nbytes = _bytes_of(parameter)
            for stage in set(map(stages.stage_of, names)):
                weights[stage] += nbytes
                largest[stage] = max(largest[stage], nbytes)
                if parameter.dim() > 1:
                    width = sum(parameter.shape[-2:]) * _PER_WIDTH
                    activations[stage] += tokens * min(width, parameter.numel()) * max(parameter.element_size(), 2)
        shared, kept, last = Counter[int](), 0, stages.pp - 1
        again = len(self.batches) > 1
        for tie in ties_across_stages(self.model, stages) if self.backward else ():
            parameter = next(each for names, each in self._parameters if tie.name in names)
            if len(tie.copies) == 2 and last in tie.copies:
                shared[min(tie.copies)] = weights[last] - _bytes_of(parameter)  # which is there once
            else:
                kept += _bytes_of(parameter) * _PASSES * len(self.batches)
        peaks = []
        for stage in range(stages.pp):
            own = weights[stage] + activations[stage] + shared[stage]
            if self.backward:  # what is largest is tied, perhaps: its gradient comes from two places
                own += weights[stage] + largest[stage] + (weights[stage] if again else largest[stage])
            second = 3 * weights[stage] + activations[stage] if self.both and self.backward else 0
            peaks.append(max(own, second))
        compared = max((each.numel() for _, each in self._parameters), default=0)
        counted = max(peaks) + kept + self._between(stages, tokens) + min(compared, BAND) * _TO_COMPARE
        return int(counted * _LOST)

    def _between(self, stages: StageMap, tokens: int) -> int:
        """Hidden states and logits."""
        try:
            weight = getattr(self.model.get_input_embeddings(), "weight", None)
        except (AttributeError, NotImplementedError):  # a class that only listens, or of another library
            weight = None
        if weight is None or weight.dim() != 2:
            return 0
        words, width = weight.shape
        passes = _PASSES + self.both
        hidden = tokens * width * weight.element_size() * len(self.batches) * passes * stages.pp
        logits = tokens * words * (weight.element_size() * len(self.batches) * (1 + self.both) + 4 * _COPIES)
        return int(hidden + logits)


def _bytes_of(parameter: nn.Parameter) -> int:
    return int(parameter.numel() * parameter.element_size())
