"""Pipeline schedules by name: the stages of each rank, and the combinations that are refused.

torch.distributed.pipelining implements the schedules. Some combinations give wrong gradients silently, or fail late;
these are refused here, each with the reason. Functions import torch when they require it, so that options are checked
without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptx.errors import UnsupportedError, UsageError
from ckptx.layout.stages import StageAssignment

_MIN_SPLIT_BACKWARD_VERSION = (2, 13)  # of torch


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule of torch.

    Attributes:
        name: Name as torch spells it.
        stages_per_rank: Number of stages of each rank.
        is_v_shaped: True if the stages are assigned to the ranks in a V (with 2 ranks: 0 and 3, 1 and 2) instead of a
            loop (0 and 2, 1 and 3).
        splits_backward: True if gradients of inputs and of weights are computed at different times ("zero bubble").
    """

    name: str
    stages_per_rank: int = 1
    is_v_shaped: bool = False
    splits_backward: bool = False

    @property
    def cls(self) -> Any:
        """The schedule class of torch."""
        from torch.distributed.pipelining.schedules import get_schedule_class

        return get_schedule_class(self.name)

    def assignment(self, pp: int) -> StageAssignment:
        """Return the assignment of stages to ranks in a pipeline of `pp` ranks."""
        return StageAssignment(pp, self.stages_per_rank, "v" if self.is_v_shaped else "loop")

    def stages_of(self, rank: int, pp: int) -> tuple[int, ...]:
        """Return the numbers of the stages of a rank in a pipeline of `pp` ranks, in ascending order."""
        return self.assignment(pp).stages_of(rank)

    def rank_of(self, stage: int, pp: int) -> int:
        """Return the rank that has a stage, within a pipeline of `pp` ranks."""
        return self.assignment(pp).rank_of(stage)

    def bubble_fraction(self, pp: int, microbatches: int) -> float:
        """Return the fraction (0 to 1) of a step in which a rank is idle, if all stages take the same time.

        Sending counts as taking no time. The zero-bubble schedules fill most of this with gradients of weights: for
        them it is an upper bound.

        Args:
            pp: Number of pipeline ranks.
            microbatches: Microbatches per step.
        """
        return (pp - 1) / (self.stages_per_rank * microbatches + pp - 1)


SCHEDULES = {  # name in lower case -> schedule
    each.name.lower(): each
    for each in (
        Schedule("GPipe"),
        Schedule("1F1B"),
        Schedule("Interleaved1F1B", stages_per_rank=2),
        Schedule("InterleavedZeroBubble", stages_per_rank=2, splits_backward=True),
        Schedule("ZBVZeroBubble", stages_per_rank=2, is_v_shaped=True, splits_backward=True),
        Schedule("DualPipeV", stages_per_rank=2, is_v_shaped=True, splits_backward=True),
    )
}


def count_stages(pp: int, schedule: str) -> int:
    """Return the number of pipeline stages; 1 without a pipeline.

    Args:
        pp: Number of pipeline ranks.
        schedule: Name of the schedule.

    Raises:
        UsageError: No schedule has this name.
    """
    return pp * find_schedule(schedule).stages_per_rank if pp > 1 else 1


def can_split_backward() -> bool:
    """Return True if this torch can run the schedules that split the backward pass."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= _MIN_SPLIT_BACKWARD_VERSION


def find_schedule(name: str) -> Schedule:
    """Return the schedule with a name; upper and lower case are equal.

    Raises:
        UsageError: No schedule has this name.
    """
    schedule = SCHEDULES.get(name.lower())
    if schedule is None:
        names = ", ".join(sorted(SCHEDULES))
        raise UsageError(f"--schedule {name}: unknown schedule; choose one of {names}")
    return schedule


def check_schedule(
    schedule: Schedule,
    *,
    pp: int,
    microbatches: int,
    data_parallel: int,
    activation_checkpointing: str,
    sequence_parallel: bool,
) -> None:
    """Refuse combinations that torch computes wrongly or cannot run.

    Args:
        schedule: The schedule.
        pp: Number of pipeline ranks.
        microbatches: Microbatches per step and data-parallel rank.
        data_parallel: Number of data-parallel ranks, dp_shard x dp_replicate.
        activation_checkpointing: Mode of activation checkpointing.
        sequence_parallel: True if the sequence is sharded.

    Raises:
        UnsupportedError: The combination gives wrong gradients or fails; the message names it.
        UsageError: The number of microbatches is invalid for the schedule.
    """
    option = f"--schedule {schedule.name.lower()}"
    if schedule.splits_backward and data_parallel > 1:
        raise UnsupportedError(make_fsdp_refusal(schedule, f"dp_shard x dp_replicate is {data_parallel}"))
    if schedule.splits_backward and activation_checkpointing == "selective":
        raise UnsupportedError(
            f"{option}: cannot be combined with --activation-checkpointing selective, as torch would run the backward "
            "pass of a layer twice; use full, or 1f1b"
        )
    if schedule.splits_backward and not can_split_backward():
        import torch

        raise UnsupportedError(
            f"{option}: requires torch 2.13, as torch {torch.__version__} cannot split the backward pass when a value "
            "between stages has no gradient; use 1f1b, interleaved1f1b or gpipe"
        )
    if sequence_parallel:
        raise UnsupportedError(
            f"{option}: cannot be combined with sequence parallelism, as stages send whole activations; leave out "
            "sequence_parallel=True of find_plan"
        )
    stage_count = pp * schedule.stages_per_rank
    if schedule.name == "1F1B" and microbatches < stage_count:
        raise UsageError(
            f"{option}: requires at least {stage_count} microbatches for {stage_count} stages, not {microbatches}; "
            "use more, or use gpipe"
        )
    rounds = max(1, microbatches // pp)
    if schedule.name.startswith("Interleaved") and microbatches % rounds:
        raise UsageError(
            f"{option}: {microbatches} microbatches cannot be divided evenly into {rounds} rounds over {pp} pipeline "
            f"ranks; use a multiple of {pp}"
        )
    if schedule.name == "DualPipeV" and microbatches < 2 * pp:
        raise UsageError(
            f"{option}: requires at least {2 * pp} microbatches for {2 * pp} stages, not {microbatches}; use more, or "
            "use zbvzerobubble"
        )


def make_fsdp_refusal(schedule: Schedule, reason: str) -> str:
    """Return the message that refuses to combine FSDP2 with a schedule that splits the backward pass.

    Args:
        schedule: The schedule.
        reason: Reason why FSDP2 is used, which the message quotes.
    """
    return (
        f"--schedule {schedule.name.lower()}: with FSDP2 ({reason}) torch gives wrong gradients, as it computes those "
        "of weights at another time than FSDP2 reduces them; use 1f1b, interleaved1f1b or gpipe"
    )
