"""Schedules: what is refused, where stages are, and how long ranks wait, held against torch's own tables."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from ckptx.errors import CkptxError, UnsupportedError, UsageError
from ckptx.runtime.parallel.pipeline.schedules import SCHEDULES, Schedule, check_schedule, find_schedule

PLAIN: dict[str, Any] = {
    "pp": 2, "microbatches": 4, "data_parallel": 1, "activation_checkpointing": "none", "sequence_parallel": False,
}  # fmt: skip
SPLIT = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")
KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
ENOUGH = {"dualpipev": 8}  # microbatches, where 4 are too few for 4 ranks


def made(schedule: Schedule, pp: int, microbatches: int, rank: int = 0) -> Any:
    """The schedule of torch for stages that have nothing in them."""
    count = pp * schedule.stages_per_rank
    stages = [
        SimpleNamespace(
            stage_index=number, num_stages=count, group_rank=rank, group_size=pp, is_first=number == 0,
            is_last=number == count - 1, stage_index_to_group_rank={}, submod=nn.Module(),
        )
        for number in schedule.stages_of(rank, pp)
    ]  # fmt: skip
    given: Any = stages if schedule.stages_per_rank > 1 else stages[0]
    return schedule.cls(given, n_microbatches=microbatches, loss_fn=lambda output, target: output)


def works_of(actions: list[Any]) -> list[tuple[str, int, int]]:
    """What a rank does, in its order: F, I (gradients of inputs), W (of weights) or B (both); stage; microbatch."""
    found = []
    for action in actions:
        for each in getattr(action, "sub_actions", None) or ([] if action is None else [action]):
            if each.computation_type.name in KINDS:
                found.append((KINDS[each.computation_type.name], each.stage_index, each.microbatch_index))
    return found


def one_forward_one_backward(rank: int, pp: int, microbatches: int) -> list[tuple[str, int, int]]:
    """What a rank does under 1F1B: as many forwards as there are stages from it on, then in turns, then backwards."""
    first = min(microbatches, pp - rank)
    turns = [(("B", rank, index), ("F", rank, first + index)) for index in range(microbatches - first)]
    return [
        *(("F", rank, index) for index in range(first)), *itertools.chain(*turns),
        *(("B", rank, index) for index in range(microbatches - first, microbatches)),
    ]  # fmt: skip


def waited(schedule: Schedule, pp: int, microbatches: int) -> float:
    """The part of a step in which ranks wait when they follow torch's table; forward and backward take 2 each."""
    left = {rank: works_of(actions) for rank, actions in made(schedule, pp, microbatches).pipeline_order.items()}
    if schedule.name == "1F1B":  # what torch draws of it leaves out the first microbatch on the last rank
        left = {rank: one_forward_one_backward(rank, pp, microbatches) for rank in range(pp)}
    long = {"F": 2, "B": 2, "I": 1, "W": 1}
    last, busy = pp * schedule.stages_per_rank - 1, sum(long[kind] for works in left.values() for kind, *_ in works)
    ends: dict[tuple[str, int, int], int] = {}
    free = dict.fromkeys(left, 0)
    while any(left.values()):
        before = len(ends)
        for rank, works in left.items():
            while works:
                kind, stage, batch = works[0]
                if kind == "F":
                    needed = [("F", stage - 1, batch)] if stage else []
                elif kind == "W":
                    needed = [("I", stage, batch)]
                else:
                    needed = [("F", stage, batch), *([("I", stage + 1, batch)] if stage < last else [])]
                if not all(each in ends for each in needed):
                    break
                free[rank] = max([free[rank], *(ends[each] for each in needed)]) + long[kind]
                ends[kind, stage, batch] = free[rank]
                if kind == "B":
                    ends["I", stage, batch] = free[rank]
                works.pop(0)
        assert len(ends) > before, "a table that can be followed"
    return 1 - busy / (pp * max(free.values()))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_schedule_is_found_in_any_case(name: str) -> None:
    assert find_schedule(name.upper()) is SCHEDULES[name]
    assert find_schedule(SCHEDULES[name].name).cls.__name__ == f"Schedule{SCHEDULES[name].name}"


def test_an_unknown_schedule_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(UsageError) as caught:
        find_schedule("2f2b")
    names = "1f1b, dualpipev, gpipe, interleaved1f1b, interleavedzerobubble, zbvzerobubble"
    assert str(caught.value) == f"--schedule 2f2b: unknown schedule; choose one of {names}"


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_stages_are_where_torch_has_them(name: str, pp: int) -> None:
    schedule = SCHEDULES[name]
    count = pp * schedule.stages_per_rank
    mapping = generate_stage_to_rank_mapping(pp, count, style="v" if schedule.is_v_shaped else "loop")
    assert {stage: schedule.rank_of(stage, pp) for stage in range(count)} == mapping
    for rank in range(pp):
        assert list(schedule.stages_of(rank, pp)) == [stage for stage in range(count) if mapping[stage] == rank]


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_torch_lets_a_rank_run_the_stages_that_it_has(name: str, pp: int) -> None:
    schedule = SCHEDULES[name]
    for rank, actions in made(schedule, pp, ENOUGH.get(name, 2 * pp)).pipeline_order.items():
        works = works_of(actions)
        assert {stage for _, stage, _ in works} == set(schedule.stages_of(rank, pp))
        assert any(kind in "IW" for kind, *_ in works) is schedule.splits_backward


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (2, 6), (3, 3), (3, 6), (4, 4), (4, 8), (4, 16)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_what_torchs_table_leaves(name: str, pp: int, microbatches: int) -> None:
    found = waited(SCHEDULES[name], pp, microbatches)
    assert SCHEDULES[name].bubble_fraction(pp, microbatches) == pytest.approx(found, abs=1e-12)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (2, 8), (3, 6), (3, 12), (4, 8), (4, 16)])
@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"gpipe", "1f1b"}))
def test_the_bubble_is_at_most_what_is_said(name: str, pp: int, microbatches: int) -> None:
    found = waited(SCHEDULES[name], pp, microbatches)
    assert found <= SCHEDULES[name].bubble_fraction(pp, microbatches) + 1e-12


def test_one_rank_never_waits() -> None:
    assert [schedule.bubble_fraction(1, 4) for schedule in SCHEDULES.values()] == [0] * len(SCHEDULES)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_plain_run_is_allowed(name: str) -> None:
    check_schedule(SCHEDULES[name], **PLAIN)
    check_schedule(SCHEDULES[name], **PLAIN | {"activation_checkpointing": "full"})


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - set(SPLIT)))
def test_schedules_with_whole_backwards_are_allowed_with_data_parallelism_and_selective(name: str) -> None:
    check_schedule(SCHEDULES[name], **PLAIN | {"data_parallel": 2, "activation_checkpointing": "selective"})


@pytest.mark.parametrize("name", SPLIT)
def test_split_backward_with_fsdp_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_schedule(SCHEDULES[name], **PLAIN | {"data_parallel": 4})
    assert str(caught.value) == (
        f"--schedule {name}: with FSDP2 (dp_shard x dp_replicate is 4) torch gives wrong gradients, as it computes "
        "those of weights at another time than FSDP2 reduces them; use 1f1b, interleaved1f1b or gpipe"
    )


@pytest.mark.parametrize("name", SPLIT)
def test_split_backward_with_selective_checkpointing_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_schedule(SCHEDULES[name], **PLAIN | {"activation_checkpointing": "selective"})
    assert str(caught.value) == (
        f"--schedule {name}: cannot be combined with --activation-checkpointing selective, as torch would run the "
        "backward pass of a layer twice; use full, or 1f1b"
    )


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_sequence_parallel_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_schedule(SCHEDULES[name], **PLAIN | {"sequence_parallel": True})
    assert str(caught.value) == (
        f"--schedule {name}: cannot be combined with sequence parallelism, as stages send whole activations; "
        "leave out sequence_parallel=True of find_plan"
    )


ROUNDS = "microbatches cannot be divided evenly into 2 rounds over {} pipeline ranks; use a multiple of"


@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "said"),
    [
        ("1f1b", 4, 3, "requires at least 4 microbatches for 4 stages, not 3; use more, or use gpipe"),
        ("interleaved1f1b", 2, 5, f"5 {ROUNDS.format(2)} 2"),
        ("interleavedzerobubble", 3, 7, f"7 {ROUNDS.format(3)} 3"),
        ("dualpipev", 2, 3, "requires at least 4 microbatches for 4 stages, not 3; use more, or use zbvzerobubble"),
    ],
)
def test_too_few_microbatches_are_refused(name: str, pp: int, microbatches: int, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_schedule(SCHEDULES[name], **PLAIN | {"pp": pp, "microbatches": microbatches})
    assert str(caught.value) == f"--schedule {name}: {said}"


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_what_torch_refuses_is_refused_before(name: str) -> None:
    for pp, microbatches in itertools.product((2, 3, 4), range(1, 13)):
        try:
            check_schedule(SCHEDULES[name], **PLAIN | {"pp": pp, "microbatches": microbatches})
        except CkptxError:
            continue
        assert works_of(made(SCHEDULES[name], pp, microbatches).pipeline_order[0])
