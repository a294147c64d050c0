"""Pipeline schedules by name: which stages a rank has, and what cannot be combined.

torch.distributed.pipelining has them all. Two of its combinations give wrong gradients in silence, or fail late; these
are refused here, each with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from ckptx.errors import UnsupportedError, UsageError

_SPLITS_SINCE = (2, 13)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule of torch.

    Attributes:
        name: As torch spells it.
        stages: Of each rank.
        is_v: Whether ranks have stages in the form of a V (0 and 3, 1 and 2) instead of a loop (0 and 2, 1 and 3).
        splits_backward: Whether gradients of inputs and of weights are computed at different times ("zero bubble").
    """

    name: str
    stages: int = 1
    is_v: bool = False
    splits_backward: bool = False

    @property
    def cls(self) -> Any:
        """The class of torch."""
        return get_schedule_class(self.name)

    def stages_of(self, rank: int, pp: int) -> tuple[int, ...]:
        """The stages of a rank of the pipeline, in ascending order."""
        if self.is_v:
            return (rank, 2 * pp - 1 - rank)
        return tuple(range(rank, pp * self.stages, pp))

    def rank_of(self, stage: int, pp: int) -> int:
        """The rank that has a stage."""
        return 2 * pp - 1 - stage if self.is_v and stage >= pp else stage % pp

    def bubble_fraction(self, pp: int, microbatches: int) -> float:
        """The part of a step in which a rank waits, when forward and backward of every stage take the same time.

        The zero-bubble schedules fill most of this with gradients of weights: for them it is a bound.
        """
        return (pp - 1) / (self.stages * microbatches + pp - 1)


SCHEDULES = {
    each.name.lower(): each
    for each in (
        Schedule("GPipe"),
        Schedule("1F1B"),
        Schedule("Interleaved1F1B", stages=2),
        Schedule("InterleavedZeroBubble", stages=2, splits_backward=True),
        Schedule("ZBVZeroBubble", stages=2, is_v=True, splits_backward=True),
        Schedule("DualPipeV", stages=2, is_v=True, splits_backward=True),
    )
}


def splits_backward_right() -> bool:
    """Whether this torch can run the schedules that split the backward."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= _SPLITS_SINCE


def find_schedule(name: str) -> Schedule:
    """The schedule of a name, in any case.

    Raises:
        UsageError: There is none.
    """
    found = SCHEDULES.get(name.lower())
    if found is None:
        names = ", ".join(sorted(SCHEDULES))
        raise UsageError(f"--schedule {name}: is unknown, needed one of {names}")
    return found


def check_schedule(
    schedule: Schedule,
    *,
    pp: int,
    microbatches: int,
    data_parallel: int,
    activation_checkpointing: str,
    sequence_parallel: bool,
) -> None:
    """Refuses what torch computes wrongly, or not at all.

    Raises:
        UnsupportedError: A combination that is not right; the message says which.
        UsageError: Too few microbatches.
    """
    said = f"--schedule {schedule.name.lower()}"
    if schedule.splits_backward and data_parallel > 1:
        raise UnsupportedError(with_fsdp(schedule, f"dp_shard x dp_replicate is {data_parallel}"))
    if schedule.splits_backward and activation_checkpointing == "selective":
        raise UnsupportedError(
            f"{said}: with --activation-checkpointing selective torch goes backward through a layer a second time, "
            "which it cannot; use full, or 1f1b"
        )
    if schedule.splits_backward and not splits_backward_right():
        raise UnsupportedError(
            f"{said}: torch {torch.__version__} cannot compute gradients of inputs and of weights apart when anything "
            "that is sent has no gradient, needed torch 2.13; use 1f1b, interleaved1f1b or gpipe"
        )
    if sequence_parallel:
        raise UnsupportedError(
            f"{said}: pipeline stages send whole activations, needed no sequence parallel; leave it out"
        )
    stages = pp * schedule.stages
    if schedule.name == "1F1B" and microbatches < stages:
        raise UsageError(
            f"{said}: found {microbatches} microbatches for {stages} stages, needed as many at least; give more, or "
            "use gpipe"
        )
    rounds = max(1, microbatches // pp)
    if schedule.name.startswith("Interleaved") and microbatches % rounds:
        raise UsageError(
            f"{said}: found {microbatches} microbatches for {rounds} rounds over {pp} ranks of the pipeline, needed as "
            f"many in each; give a multiple of {pp}"
        )
    if schedule.name == "DualPipeV" and microbatches < 2 * pp:
        raise UsageError(
            f"{said}: found {microbatches} microbatches for {2 * pp} stages, needed as many at least; use zbvzerobubble"
        )


def with_fsdp(schedule: Schedule, why: str) -> str:
    """Why a schedule that splits the backward is refused with FSDP2."""
    return (
        f"--schedule {schedule.name.lower()}: with FSDP2 ({why}) torch gives wrong gradients, for it computes those of "
        "weights at another time than FSDP2 sums them; use 1f1b, interleaved1f1b or gpipe"
    )
