"""What an oracle says of two moments, and of numbers."""

from __future__ import annotations

from math import inf, nan

import pytest

from ckptx.robustness_suite.oracles import (
    EXACT_ORACLES,
    Difference,
    Verdict,
    check_finite,
    compare,
    compare_measurements,
    compare_replicas,
    failed_verdicts,
    largest_value,
)

SAME = {("model", "a"): "1", ("moments", "a.exp_avg"): "2", ("rng", "torch"): "3"}


@pytest.mark.parametrize("oracle", EXACT_ORACLES)
def test_an_item_that_differs_is_named_by_its_oracle_on_its_rank(oracle: str) -> None:
    before = [SAME | {(oracle, "x"): "was"}] * 2
    after = [before[0], before[0] | {(oracle, "x"): "is"}]
    (found,) = failed_verdicts(compare(before, after))
    assert (found.oracle, list(found.differences)) == (oracle, [Difference(oracle, "x", 1, "was", "is")])


def test_what_is_missing_and_what_is_new_differ() -> None:
    less = {key: value for key, value in SAME.items() if key[0] != "moments"}
    (missing,) = failed_verdicts(compare([SAME], [less]))
    assert missing.differences[0].actual is None and missing.differences[0].reference == "2"
    (new,) = failed_verdicts(compare([less], [SAME]))
    assert new.differences[0].reference is None


def test_equal_moments_are_equal_and_counted() -> None:
    verdicts = compare([SAME, SAME], [SAME, SAME])
    assert all(each.ok for each in verdicts)
    assert {each.oracle: each.compared for each in verdicts} == {"model": 2, "moments": 2, "rng": 2}


def test_moments_of_other_numbers_of_ranks_are_not_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare([SAME], [SAME, SAME])


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("others", [(), ((1.0, 1.0),)])
def test_a_number_that_is_not_finite_is_never_within_a_limit(
    value: float, place: int, others: tuple[tuple[float, float], ...]
) -> None:
    """Also where both are the same: NaN is not below, and Python's `max` keeps it or not by its place."""
    pair = (value, 1.0) if place else (1.0, value)
    for pairs in ([pair, *others], [*others, pair], [(value, value)]):
        assert not compare_measurements("loss", pairs, 1e30, 8.0, 8.0).ok


def test_a_limit_is_noise_times_what_the_recipe_says() -> None:
    found = compare_measurements("loss", [(1.0, 1.5), (1.0, 1.25)], 0.1, 8.0, 8.0)
    assert (found.value, found.limit, found.ok, found.is_widened) == (0.5, 0.8, True, False)
    assert not compare_measurements("loss", [(1.0, 2.0)], 0.1, 8.0, 8.0).ok
    assert compare_measurements("loss", [(1.0, 2.0)], 0.1, 16.0, 8.0).is_widened
    assert not compare_measurements("loss", [(1.0, 1.0 + 1e-9)], 0.0, 8.0, 8.0).ok
    assert compare_measurements("loss", [(1.0, 1.0)], 0.0, 8.0, 8.0).ok


def test_without_a_limit_nothing_measured_is_fine() -> None:
    assert not Verdict("logits", 1, value=0.0).ok


def test_the_largest_of_some_numbers() -> None:
    assert largest_value([]) == 0.0
    assert largest_value([1.0, 3.0, 2.0]) == 3.0
    assert all(each != each for each in (largest_value([nan, 1.0]), largest_value([1.0, nan])))


def test_replicas_are_held_against_the_first_that_has_them() -> None:
    whole, part = ("norm", "whole"), ("q", "rows 0-8")
    held = [{whole: "1", part: "2"}, {whole: "1", ("q", "rows 8-16"): "3"}, {whole: "9"}]
    found = compare_replicas(held)
    assert found.compared == 2
    assert [(each.item, each.rank) for each in found.differences] == [("norm", 2)]


def test_nan_on_both_sides_is_not_equal() -> None:
    items = {("finite", "a"): "2 NaN", ("finite", "b"): "finite"}
    assert [each.item for each in check_finite([items]).differences] == ["a"]
    assert check_finite([{("finite", "b"): "finite"}]).ok


def test_what_is_missing_is_not_said_to_be_infinite() -> None:
    before = {("finite", "m"): "finite", ("moments", "m"): "1", ("finite", "w"): "finite"}
    found = {each.oracle: len(each.differences) for each in compare([before], [{("finite", "w"): "1 NaN"}])}
    assert found == {"finite": 1, "moments": 1}
