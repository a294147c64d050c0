"""Every sample of an epoch once, on any number of data ranks, however often a run is resumed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.errors import UsageError
from ckptx.runtime.training.sampler import Sampler, split_over_ranks


@given(
    length=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    per_rank=st.integers(1, 4),
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_each_epoch_has_each_sample_once_whatever_ranks_go_on_with_it(
    length: int, seed: int, per_rank: int, sizes: list[int]
) -> None:
    """The number of data ranks changes at every step, and with it the processes."""
    global_batch = 12 * per_rank
    state, seen = Sampler(length, seed, global_batch).state_dict(), []
    for dp in sizes * 2:
        ranks = [Sampler(length, seed, global_batch) for _ in range(dp)]
        for each in ranks:
            each.load_state_dict(state)
        steps = [each.next_step() for each in ranks]
        seen += [sample for rank, step in enumerate(steps) for sample in split_over_ranks(step, rank, dp)]
        assert all(step == steps[0] for step in steps)
        state = ranks[0].state_dict()
    assert state["samples"] == len(seen)
    for begin in range(0, len(seen) - length + 1, length):
        assert sorted(seen[begin : begin + length]) == list(range(length))
    assert max(Counter(seen[len(seen) // length * length :]).values(), default=1) == 1


def test_an_epoch_ends_within_a_step() -> None:
    sampler = Sampler(5, 3, 2)
    assert [sampler.epoch for _ in range(4) if sampler.next_step()] == [0, 0, 1, 1]
    assert (sampler.samples_seen, sampler.epoch) == (8, 1)


def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides() -> None:
    def orders(seed: int) -> list[list[int]]:
        sampler = Sampler(30, seed, 30)
        return [sampler.next_step() for _ in range(3)]

    assert orders(1) == orders(1)
    assert len({tuple(each) for seed in (1, 2) for each in orders(seed)}) == 6


@pytest.mark.parametrize(
    ("length", "seed", "said"), [(9, 1, "length 8 and this run 9"), (8, 2, "seed 1 and this run 2")]
)
def test_a_place_in_other_data_is_refused(length: int, seed: int, said: str) -> None:
    sampler = Sampler(length, seed, 4)
    with pytest.raises(UsageError, match=said):
        sampler.load_state_dict(Sampler(8, 1, 4).state_dict())
    assert sampler.samples_seen == 0


def test_sizes_that_mean_nothing_are_refused() -> None:
    for length, batch in ((0, 1), (1, 0)):
        with pytest.raises(UsageError, match="must be 1 or more"):
            Sampler(length, 1, batch)
    with pytest.raises(UsageError, match="6 samples cannot be split over 4 data-parallel ranks"):
        split_over_ranks(range(6), 0, 4)
