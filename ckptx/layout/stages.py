"""Assignment of layers, and of all other tensors, to pipeline stages.

Frameworks split layers over stages differently, and a stage whose layer is in the file of another stage has to read
that file too. So the user names the rule of a framework, or gives the counts:

    10 layers, 4 stages     even    3 3 2 2     the first stages get the remainder
                            vllm    2 3 3 2     stages before the last get it, from the back (vLLM, get_pp_indices)
                            torchtitan 2 3 3 2  embedding and head count as a layer each
                            hf      2 2 2 4     the last stage gets it (transformers)
                            1,4,4,1             explicit counts

Interleaved and V schedules have several stages on each pipeline rank:

    2 ranks, 4 stages       loop    rank 0: stages 0, 2     rank 1: stages 1, 3     (Interleaved1F1B)
                            v       rank 0: stages 0, 3     rank 1: stages 1, 2     (ZBVZeroBubble, DualPipeV)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from ckptx.errors import UnsupportedError, UsageError
from ckptx.wording import counted

SPLIT_RULES = ("even", "vllm", "torchtitan", "hf")
FORMER_SPLITS = {"titan": "torchtitan"}  # former names of rules, which still work


ScheduleStyle = Literal["loop", "v"]


class StageAssignment(NamedTuple):
    """Assignment of pipeline stages to pipeline ranks.

    Attributes:
        pp: Number of pipeline ranks.
        stages_per_rank: Number of stages of each rank; 2 if the style is "v".
        style: "loop" (with 2 ranks: stages 0 and 2, 1 and 3) or "v" (0 and 3, 1 and 2).
    """

    pp: int
    stages_per_rank: int = 1
    style: ScheduleStyle = "loop"

    @property
    def stage_count(self) -> int:
        """Return the number of stages of all ranks."""
        return self.pp * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that has a stage."""
        return self.stage_count - 1 - stage if self.style == "v" and stage >= self.pp else stage % self.pp

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, in ascending order."""
        return (
            (rank, self.stage_count - 1 - rank) if self.style == "v" else tuple(range(rank, self.stage_count, self.pp))
        )


def split_layers(layers: int, stages: int, rule: str = "even") -> tuple[int, ...]:
    """Return the number of layers of each stage.

    Args:
        layers: Total number of layers.
        stages: Number of stages.
        rule: One of `SPLIT_RULES` or `FORMER_SPLITS`, or comma-separated counts. Only counts may leave a stage empty.

    Raises:
        UsageError: The rule is unknown or leaves a stage without a layer, or the counts do not match.
    """
    rule = FORMER_SPLITS.get(rule, rule)
    if rule not in SPLIT_RULES:
        return _parse_counts(layers, stages, rule)
    if 1 < stages > layers:
        raise UsageError(
            f"pipeline split {rule}: {counted(layers, 'layer')} for {counted(stages, 'stage')}, but each stage "
            "requires a layer; use fewer stages, or pass explicit counts, which may be 0"
        )
    share, rest = divmod(layers, stages)
    counts = [share + (stage < rest) for stage in range(stages)]
    if rule == "vllm":
        counts = [share] * stages
        for stage in range(rest):
            counts[stages - 2 - stage] += 1
    elif rule == "hf":
        counts = [share] * (stages - 1) + [share + rest]
    elif rule == "torchtitan":
        share, rest = divmod(layers + 2, stages)
        counts = [share + (stage < rest) for stage in range(stages)]
        counts[0] -= 1
        counts[-1] -= 1
    if stages > 1 and min(counts) < 1:
        raise UsageError(
            f"pipeline split {rule}: {counted(layers, 'layer')} over {counted(stages, 'stage')} give "
            f"{','.join(map(str, counts))}, but each stage requires a layer; use fewer stages, or pass these counts "
            "explicitly"
        )
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack: a list of layers of a model that run one after another; an encoder-decoder has two.

    Attributes:
        path: Path of the list in the model: "model.layers".
        count: Number of layers.
        before: Modules or parameters that run right before the first layer.
        after: Modules or parameters that run right after the last layer: "model.norm", "lm_head".
    """

    path: str
    count: int
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class StageMap:
    """Assignment of every tensor of a model to a stage.

    Attributes:
        count: Number of stages.
        counts: Number of layers of each stage, over all stacks; (0,) without a stack.
        stacks: Lists of layers in forward order.
    """

    def __init__(
        self, stacks: Sequence[Stack], count: int, rule: str = "even", subject: str = "this model", advice: str = ""
    ) -> None:
        """Split the layers of the stacks over the stages, in forward order.

        Args:
            stacks: Lists of layers in forward order; the encoder before the decoder.
            count: Number of stages.
            rule: Rule or counts, see `split_layers`.
            subject: Name of the model class, for errors.
            advice: Advice for the error about unknown layers, as an imperative clause; empty for none.

        Raises:
            UnsupportedError: There is no stack and more than one stage.
            UsageError: The split is invalid.
        """
        if not stacks and count > 1:
            raise UnsupportedError(
                f"{subject}: cannot find the layer list, which splitting into {count} pipeline stages requires; "
                + (f"{advice}, or leave out --pp" if advice else "leave out --pp")
            )
        self.count = count
        self.counts = split_layers(sum(stack.count for stack in stacks), count, rule) if stacks else (0,)
        self.stacks = tuple(stacks)
        self._first_indices = tuple(accumulate((stack.count for stack in stacks), initial=0))  # global index of layer 0
        self._stage_by_layer = [stage for stage, count in enumerate(self.counts) for _ in range(count)]
        prefixes = [(f"{stack.path}.", index) for index, stack in enumerate(stacks)]
        self._stack_prefixes = sorted(prefixes, key=lambda item: -len(item[0]))  # the innermost first
        self._stage_by_path: dict[str, int] = {}
        for index, stack in enumerate(stacks):
            first = self._layer_stage(index, 0) if index else 0
            last = self._layer_stage(index, stack.count - 1) if index < len(stacks) - 1 else count - 1
            self._stage_by_path |= dict.fromkeys(stack.before, first) | dict.fromkeys(stack.after, last)
        self._has_plain_layers = [
            not any(path.startswith(f"{stack.path}.") for path in self._stage_by_path) for stack in stacks
        ]  # nothing that runs before or after a stack is inside one of its layers

    def stage_of(self, name: str) -> int:
        """Return the stage of a tensor, by its longest known path.

        A layer is on the stage that the split assigns to it, a layer after the last of its stack (an MTP layer) on the
        stage of that last layer, and modules that run before or after a stack on the stage of its first or last layer.
        All other tensors, such as embeddings and towers, are on stage 0.
        """
        layer = self._find_layer(name)
        if layer is not None and self._has_plain_layers[layer[0]]:
            return self._layer_stage(*layer)
        path = self._find_longest_path(name)
        if layer is not None and len(path) <= len(self.stacks[layer[0]].path):
            return self._layer_stage(*layer)
        return self._stage_by_path.get(path, 0)

    def is_in_layer(self, name: str) -> bool:
        """Return True for a tensor of a layer of one of the stacks."""
        return self._find_layer(name) is not None

    def is_after_last_layer(self, name: str) -> bool:
        """Return True for a tensor of a layer after the last one of its stack."""
        layer = self._find_layer(name)
        return layer is not None and layer[1] >= self.stacks[layer[0]].count

    def layers_of(self, stage: int) -> list[tuple[str, int, int]]:
        """Return the layers of a stage as (path of the stack, first index, index after the last).

        Stacks without a layer on the stage are omitted.
        """
        begin = sum(self.counts[:stage])
        end = begin + self.counts[stage]
        spans = []
        for stack, first in zip(self.stacks, self._first_indices, strict=False):
            low, high = max(begin - first, 0), min(end - first, stack.count)
            if low < high:
                spans.append((stack.path, low, high))
        return spans

    def _layer_stage(self, stack: int, layer: int) -> int:
        """Return the stage of a layer, or of the last layer if the index is beyond it; 0 for a model without layers.

        Args:
            stack: Index of the stack.
            layer: Index of the layer in the stack.
        """
        index = self._first_indices[stack] + min(layer, self.stacks[stack].count - 1)
        return self._stage_by_layer[max(index, 0)] if self._stage_by_layer else 0

    def _find_layer(self, name: str) -> tuple[int, int] | None:
        """Return the index of the stack and of the layer in it, for the innermost layer that holds a tensor.

        None if there is no such layer. The layer may come after the last one of the stack.
        """
        for prefix, stack in self._stack_prefixes:
            if name.startswith(prefix):
                index = name[len(prefix) :].partition(".")[0]
                if index.isdecimal():
                    return stack, int(index)
        return None

    def _find_longest_path(self, name: str) -> str:
        """Return the longest path before or after a stack that holds a tensor; "" if there is none."""
        path = name
        while path and path not in self._stage_by_path:
            path = path.rpartition(".")[0]
        return path


def _parse_counts(layers: int, stages: int, rule: str) -> tuple[int, ...]:
    """Parse and check explicit counts."""
    try:
        counts = tuple(int(part) for part in rule.split(","))
    except ValueError:
        raise UsageError(
            f'pipeline split "{rule}": must be one of {", ".join(SPLIT_RULES)}, or the layers of each stage, such as '
            '"8,9,8,7"'
        ) from None
    if len(counts) != stages or min(counts) < 0 or sum(counts) != layers:
        raise UsageError(
            f'pipeline split "{rule}": expected {counted(stages, "stage")} with {counted(layers, "layer")}, none below '
            f"0, found {counted(len(counts), 'stage')} with {counted(sum(counts), 'layer')}; pass one count for each "
            "stage"
        )
    return counts
