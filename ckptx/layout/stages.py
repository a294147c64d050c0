"""Which pipeline stage holds which layer, and with it every tensor.

Every framework splits layers over stages in its own way, and a stage that finds a layer in another's file has to read
that one too. So the rule is named, or the counts are given:

    10 layers, 4 stages     even    3 3 2 2     the first stages take the remainder
                            vllm    2 3 3 2     middle stages take it, the last never does (vLLM, get_pp_indices)
                            titan   2 3 3 2     embedding and head count as a layer each (torchtitan)
                            hf      2 2 2 4     the last stage takes it (transformers)
                            1,4,4,1             as given
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ckptx.errors import UnsupportedError, UsageError
from ckptx.wording import counted

SPLITS = ("even", "vllm", "titan", "hf")


def split_layers(count: int, pp: int, how: str = "even") -> tuple[int, ...]:
    """Layers per stage.

    Args:
        count: Layers in all.
        pp: Number of stages.
        how: One of `SPLITS`, or the counts themselves with commas between them. Only these may leave a stage empty.

    Raises:
        UsageError: The rule is unknown, there are fewer layers than stages, or counts do not fit.
    """
    if how not in SPLITS:
        return _explicit(count, pp, how)
    if 1 < pp > count:
        raise UsageError(
            f"pipeline split {how}: found {counted(count, 'layer')} for {counted(pp, 'stage')}, needed one for each; "
            "use fewer stages, or give the counts, of which some may be 0"
        )
    share, rest = divmod(count, pp)
    counts = [share + (stage < rest) for stage in range(pp)]
    if how == "vllm":
        counts = [share] * pp
        for stage in range(rest):
            counts[pp - 2 - stage] += 1
    elif how == "hf":
        counts = [share] * (pp - 1) + [share + rest]
    elif how == "titan":
        share, rest = divmod(count + 2, pp)
        counts = [share + (stage < rest) for stage in range(pp)]
        counts[0] -= 1
        counts[-1] -= 1
    if pp > 1 and min(counts) < 1:
        raise UsageError(
            f"pipeline split {how}: {counted(count, 'layer')} over {counted(pp, 'stage')} make "
            f"{','.join(map(str, counts))}, needed one for each stage; use fewer stages, or "
            "give these counts if that is what you want"
        )
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class Stack:
    """A list of layers that run one after another.

    Attributes:
        path: Of the list, in the names of the model: "model.layers".
        count: Its layers.
        before: Modules or parameters that run right before its first layer.
        after: Modules or parameters that run right after its last: "model.norm", "lm_head".
    """

    path: str
    count: int
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class StageMap:
    """The stage of every tensor of a model.

    Attributes:
        pp: Number of stages.
        counts: Layers of each stage, over all stacks.
        stacks: In the order they run.
    """

    def __init__(self, stacks: Sequence[Stack], pp: int, how: str = "even", subject: str = "this model") -> None:
        """Splits the layers of the stacks, one stack after another in the order they run.

        Args:
            stacks: In forward order; the encoder before the decoder.
            pp: Number of stages.
            how: As in `split_layers`.
            subject: Name of the model class, for errors.

        Raises:
            UnsupportedError: There is no stack and more than one stage.
            UsageError: The layers cannot be split so.
        """
        if not stacks and pp > 1:
            raise UnsupportedError(
                f"{subject}: no list of layers is known for it, needed one to split it into {pp} pipeline stages; "
                "leave out --pp"
            )
        self.pp = pp
        self.counts = split_layers(sum(stack.count for stack in stacks), pp, how) if stacks else (0,)
        self.stacks = tuple(stacks)
        self._firsts = tuple(accumulate((stack.count for stack in stacks), initial=0))  # global index of layer 0
        self._stage_of_layer = [stage for stage, count in enumerate(self.counts) for _ in range(count)]
        leads = [(f"{stack.path}.", index) for index, stack in enumerate(stacks)]
        self._leads = sorted(leads, key=lambda lead: -len(lead[0]))  # the innermost first
        self._stage_at: dict[str, int] = {}
        for index, stack in enumerate(stacks):
            first = self._stage(index, 0) if index else 0
            last = self._stage(index, stack.count - 1) if index < len(stacks) - 1 else pp - 1
            self._stage_at |= dict.fromkeys(stack.before, first) | dict.fromkeys(stack.after, last)
        self._is_plain = [
            not any(path.startswith(f"{stack.path}.") for path in self._stage_at) for stack in stacks
        ]  # nothing before or after a stack lies inside of one of its layers

    def stage_of(self, name: str) -> int:
        """The stage that holds a tensor, by the longest path that is known.

        A layer is where the split puts it, a layer behind the last of its stack (an MTP layer) where
        that last one is, and what runs before or after a stack at that end of it. The rest, embeddings and towers, is
        on stage 0.
        """
        layer = self._layer_of(name)
        if layer is not None and self._is_plain[layer[0]]:
            return self._stage(*layer)
        path = self._longest(name)
        if layer is not None and len(path) <= len(self.stacks[layer[0]].path):
            return self._stage(*layer)
        return self._stage_at.get(path, 0)

    def is_in_layer(self, name: str) -> bool:
        """Return True for a tensor of a layer of one of the stacks."""
        return self._layer_of(name) is not None

    def is_extra(self, name: str) -> bool:
        """True for a tensor of a layer behind the last one of its stack."""
        layer = self._layer_of(name)
        return layer is not None and layer[1] >= self.stacks[layer[0]].count

    def layers_of(self, stage: int) -> list[tuple[str, int, int]]:
        """The layers of a stage as (path of the stack, first, stop); stacks it has no layer of are left out."""
        begin = sum(self.counts[:stage])
        end = begin + self.counts[stage]
        spans = []
        for stack, first in zip(self.stacks, self._firsts, strict=False):
            low, high = max(begin - first, 0), min(end - first, stack.count)
            if low < high:
                spans.append((stack.path, low, high))
        return spans

    def _stage(self, stack: int, layer: int) -> int:
        """The stage of a layer; of the nearest one before it where there is no such layer."""
        index = self._firsts[stack] + min(layer, self.stacks[stack].count - 1)
        return self._stage_of_layer[max(index, 0)] if self._stage_of_layer else 0

    def _layer_of(self, name: str) -> tuple[int, int] | None:
        """The stack, and the index in it, of the innermost layer that holds a tensor."""
        for lead, stack in self._leads:
            if name.startswith(lead):
                index = name[len(lead) :].partition(".")[0]
                if index.isdecimal():
                    return stack, int(index)
        return None

    def _longest(self, name: str) -> str:
        """The longest path among those before and after stacks that holds a tensor."""
        path = name
        while path and path not in self._stage_at:
            path = path.rpartition(".")[0]
        return path


def _explicit(count: int, pp: int, how: str) -> tuple[int, ...]:
    """Counts that the user gave."""
    try:
        counts = tuple(int(part) for part in how.split(","))
    except ValueError:
        raise UsageError(
            f'pipeline split "{how}": needed one of {", ".join(SPLITS)}, or the layers of each stage, such as "8,9,8,7"'
        ) from None
    if len(counts) != pp or min(counts) < 0 or sum(counts) != count:
        raise UsageError(
            f'pipeline split "{how}": found {counted(len(counts), "stage")} of {counted(sum(counts), "layer")}, '
            f"needed {counted(pp, 'stage')} of {counted(count, 'layer')}, none below 0; give one count for each stage"
        )
    return counts
