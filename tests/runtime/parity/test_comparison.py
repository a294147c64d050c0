"""What two runs are told apart by: distances, limits, rows and their names, held against numbers computed by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

from ckptx.catalog.region import Region
from ckptx.runtime.parallel.distributed import RankContext, process_group
from ckptx.runtime.parity import comparison, distances
from ckptx.runtime.parity.comparison import (
    Comparison,
    RankParameter,
    ReferenceGradient,
    ReferenceResult,
    make_difference,
)
from ckptx.runtime.parity.distances import max_abs_difference
from ckptx.runtime.parity.execution import StepResult
from ckptx.runtime.parity.noise import NOISE_MULTIPLE

INF, NAN = math.inf, math.nan
EPS = 2.0**-23  # of float32

vectors = arrays.arrays(np.float32, st.integers(0, 6), elements=st.floats(width=32))


@pytest.fixture(scope="module")
def process() -> Iterator[RankContext]:
    """One process, a group of its own."""
    with process_group("cpu", "gloo") as found:
        yield found


# ------------------------------------------------------------------------------------------- distances


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], 0), ([1, 2, 3], [1, 2.5, 2], 1), ([0, 0], [0, -4], 4), ([0.0], [-0.0], 0),
        ([NAN, 1], [NAN, 1], 0), ([NAN, 1], [NAN, 3], 2), ([NAN], [0], INF), ([0], [NAN], INF), ([INF], [INF], 0),
        ([INF], [-INF], INF), ([INF], [1e30], INF), ([INF, 1], [INF, 2], 1), ([NAN], [INF], INF), ([], [], 0),
        ([3e38], [-3e38], 6e38),
    ],
)  # fmt: skip
def test_furthest(a: list[float], b: list[float], expected: float) -> None:
    assert max_abs_difference(torch.tensor(a), torch.tensor(b)) == pytest.approx(expected, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(vectors, st.data())
def test_furthest_is_what_numpy_says(a: np.ndarray[Any, Any], data: st.DataObject) -> None:
    b = data.draw(arrays.arrays(np.float32, a.shape, elements=st.floats(width=32)))
    with np.errstate(invalid="ignore"):
        apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
    apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.where(np.isnan(apart), np.inf, apart))
    found = max_abs_difference(torch.from_numpy(a), torch.from_numpy(b))
    assert found == apart.max(initial=0)
    assert found == max_abs_difference(torch.from_numpy(b), torch.from_numpy(a))
    order = data.draw(st.permutations(range(len(a))))
    assert found == max_abs_difference(torch.from_numpy(a[order]), torch.from_numpy(b[order]))


def test_the_largest_value_is_nan_in_any_chunk() -> None:
    values = torch.ones(3 * distances.CHUNK_NUMEL)
    values[-1] = math.nan
    assert math.isnan(distances.max_abs(values)) and math.isnan(distances.max_abs(values.flip(0)))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=5), st.data())
def test_furthest_grows_with_what_was_added(values: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(values) - 1))
    before, found = torch.tensor(values, dtype=torch.float32), []
    for by in sorted(data.draw(st.sets(st.integers(0, 1000), min_size=2, max_size=4))):
        after = before.clone()
        after[at] += by
        found.append(max_abs_difference(before, after))
        assert found[-1] == by
    assert found == sorted(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_furthest_of_two_dtypes_is_that_of_their_values(dtype: torch.dtype) -> None:
    third = torch.tensor([1 / 3, 2.0])
    assert max_abs_difference(third, third.to(dtype)) == abs(float(third[0].double() - third[0].to(dtype).double()))
    assert max_abs_difference(third.to(dtype), third.to(dtype)) == 0


def test_divergence_and_cosine() -> None:
    """Of (1/2, 1/2) from (1/4, 3/4), averaged with a row of no divergence; of (1, 0, 1, 0) and (0, 0, 1, 0)."""
    p, q = torch.tensor([[[0.5, 0.5], [0.1, 0.9]]]).log(), torch.tensor([[[0.25, 0.75], [0.1, 0.9]]]).log()
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert distances.kl_divergence(p, q + 5) == pytest.approx(expected / 2, rel=1e-5)  # a constant changes no chance
    assert distances.kl_divergence(q, p) != pytest.approx(expected / 2, rel=1e-2)
    a, b = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    assert distances.cosine_similarity(a, b) == pytest.approx(1 / math.sqrt(2))
    assert distances.cosine_similarity(a, -3 * a) == pytest.approx(-1)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.sampled_from("wxyz"), min_size=1, unique=True)))
def test_a_difference_is_named_as_on_disk(stored: dict[str, list[str]]) -> None:
    for name in "abc":
        names = stored.get(name, [name])
        row = make_difference("bytes", 3, name, {key: tuple(each) for key, each in stored.items()})
        assert (row["level"], row["rank"], row["name"]) == ("bytes", 3, names[0])
        assert row.get("names", 1) == len(names)
        assert row.get("model_name", names[0]) == name


# ------------------------------------------------------------------------------------------- forward


LOGITS = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])


def forward(
    process: RankContext, found: torch.Tensor, *, loss: float = 2.0, exact: bool = False, noise: float = 0.25,
    noise_of_loss: float = 0.125, expected: torch.Tensor = LOGITS, expected_loss: float = 2.0,
) -> Comparison:  # fmt: skip
    made = Comparison(process, {"logits": ("logits",)}, exact)
    made.compare_forward(
        ReferenceResult(StepResult([expected], expected_loss), noise, noise_of_loss), StepResult([found], loss), 0
    )
    return made


def names_of(made: Comparison) -> list[tuple[str, str]]:
    return [(row["level"], row["name"]) for row in made.differences]


def test_what_is_the_same_differs_nowhere(process: RankContext) -> None:
    made = forward(process, LOGITS.clone(), exact=True)
    assert made.differences == []
    numbers = made.metrics
    assert (numbers["max_abs"], numbers["max_abs_tolerance"], numbers["loss_tolerance"]) == (0, 0, 0)
    assert (numbers["loss"], numbers["loss_reference"]) == (2, 2)
    assert (numbers["kl"], numbers["cosine"]) == (pytest.approx(0, abs=1e-12), pytest.approx(1))


@pytest.mark.parametrize(("exact", "limit"), [(True, 0.0), (False, NOISE_MULTIPLE * 0.25)])
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_may_be_as_far_away_as_the_limit(process: RankContext, exact: bool, limit: float, sign: int) -> None:
    for further, names in ((0.0, []), (2.0**-10, [("forward", "logits")])):
        found = LOGITS.clone()
        found[0, 1, 0] += sign * (limit + further)
        made = forward(process, found, exact=exact)
        assert names_of(made) == names
        assert (made.metrics["max_abs"], made.metrics["max_abs_tolerance"]) == (limit + further, limit)
        assert [(row["max_abs"], row["tolerance"]) for row in made.differences] == [(limit + further, limit)] * len(
            names
        )


@pytest.mark.parametrize(
    ("exact", "noise_of_loss", "limit"),
    [(True, 0.125, 0.0), (False, 0.125, NOISE_MULTIPLE * 0.125), (False, 0.0, NOISE_MULTIPLE * 2 * EPS)],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_loss_may_too_and_by_its_last_place(
    process: RankContext, exact: bool, noise_of_loss: float, limit: float, sign: int
) -> None:
    for further, names in ((0.0, []), (2.0**-30, [("forward", "loss")])):
        for scale in (1, -1):  # a loss may be negative
            given = {"exact": exact, "noise_of_loss": noise_of_loss, "expected_loss": 2.0 * scale}
            made = forward(process, LOGITS.clone(), loss=2.0 * scale + sign * (limit + further), **given)  # type: ignore[arg-type]  # of several types
            assert names_of(made) == names
            assert made.metrics["loss_tolerance"] == limit


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("side", ["reference", "checkpoint", "both"])
def test_what_is_not_finite_differs_even_from_itself(process: RankContext, value: float, side: str) -> None:
    bad = LOGITS.clone()
    bad[0, 0, 0] = bad[0, 1, 1] = value
    made = forward(
        process, LOGITS.clone() if side == "reference" else bad, loss=NAN,
        expected=LOGITS.clone() if side == "checkpoint" else bad, noise=INF,
    )  # fmt: skip
    sides = ["reference", "checkpoint"] if side == "both" else [side]
    assert names_of(made) == [("forward", "logits")] * len(sides)
    assert all(word in row["what"] for row, each in zip(made.differences, sides, strict=True) for word in ("2", each))
    assert all(math.isnan(row["max_abs"]) for row in made.differences)


def test_a_loss_that_is_no_number_differs(process: RankContext) -> None:
    assert names_of(forward(process, LOGITS.clone(), loss=NAN)) == [("forward", "loss")]
    assert names_of(forward(process, LOGITS.clone(), loss=INF)) == [("forward", "loss")]


def test_each_rank_has_its_batch_and_the_loss_is_the_mean_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of two, which is told what the reference computed; rank 0 had a loss of 3."""
    whole = [LOGITS, LOGITS + 8]
    said = (False, 2.0, 0.0, 0.0, [(tuple(each.shape), each.dtype) for each in whole])
    sent = iter(whole)
    monkeypatch.setattr(comparison, "broadcast_object", lambda value: said)
    monkeypatch.setattr(comparison, "all_gather_object", lambda value: [(3.0, True), (7.0, False), value])
    monkeypatch.setattr(comparison, "broadcast", lambda tensor, shape, dtype, place: next(sent))
    made = Comparison(RankContext(1, 2, torch.device("cpu")), {}, False)
    made.compare_forward(None, StepResult([LOGITS + 8], 1.0), 1)
    assert (made.differences, made.metrics["max_abs"], made.metrics["loss"]) == ([], 0, 2)
    sent = iter(whole)
    made.compare_forward(None, StepResult([LOGITS + 8], 1.0), 0)
    assert [(row["rank"], row["max_abs"]) for row in made.differences] == [(1, 8)]


# ------------------------------------------------------------------------------------------- gradients


GRADIENT = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


class Two(nn.Module):
    """`a` and `b` with these gradients."""

    def __init__(self, a: torch.Tensor | None, b: torch.Tensor | None = None) -> None:
        super().__init__()
        for name, grad in (("a", a), ("b", b)):
            made = nn.Parameter(torch.zeros_like(GRADIENT if grad is None else grad))
            made.grad = grad
            setattr(self, name, made)


def backward(
    process: RankContext, model: nn.Module, *, exact: bool = False, moved: float = 0.25, regions: Any = None,
    **gradients: torch.Tensor,
) -> Comparison:  # fmt: skip
    made = Comparison(process, {"a": ("disk.a",), "b": ("b.0", "b.1")}, exact)
    held = [RankParameter(name, each, regions and regions(name)) for name, each in model.named_parameters()]
    made.compare_gradients([ReferenceGradient(name, each, moved) for name, each in gradients.items()], held)
    made.report_extra_gradients()
    made.finish_gradients()
    return made


def test_copies_on_several_stages_are_each_compared_and_not_to_the_last_bit(process: RankContext) -> None:
    for copied, far in ((("a",), 1), ((), 2)):
        copies = [RankParameter("a", Two(GRADIENT + each).a, None) for each in (0.0, 2.0**-22, 1.0)]
        made = Comparison(process, {}, is_exact=True, tied_copies=copied)
        made.compare_gradients([ReferenceGradient("a", GRADIENT, 0.0)], copies)
        made.finish_gradients()
        assert [(row["name"], row.get("what")) for row in made.differences] == [("a", None)] * far
        assert made.gradient_distances["a"][0] == 1.0


def test_of_copies_one_without_a_gradient_is_named(process: RankContext) -> None:
    copies = [RankParameter("a", Two(each).a, None) for each in (None, GRADIENT.clone())]
    made = Comparison(process, {}, is_exact=True, tied_copies=("a",))
    made.compare_gradients([ReferenceGradient("a", GRADIENT, 0.0)], copies)
    made.finish_gradients()
    assert [row["what"] for row in made.differences] == ["no gradient"]


@pytest.mark.parametrize(("exact", "limit"), [(True, 0.0), (False, NOISE_MULTIPLE * 0.25)])
def test_a_gradient_may_be_as_far_away_as_its_limit(process: RankContext, exact: bool, limit: float) -> None:
    for further in (0.0, 2.0**-10):
        found = GRADIENT.clone()
        found[2, 1] -= limit + further
        made = backward(process, Two(found, GRADIENT.clone()), exact=exact, a=GRADIENT, b=GRADIENT)
        assert names_of(made) == ([("gradients", "disk.a")] if further else [])
        assert all((row["max_abs"], row["tolerance"]) == (limit + further, limit) for row in made.differences)
        assert made.gradient_distances == {"a": (limit + further, limit), "b": (0.0, limit)}
        assert (made.metrics["gradients"], made.metrics["grad_max_abs"]) == (2, limit + further)
        assert made.metrics["grad_closest_to_tolerance"] == (["", 0.0] if exact else ["a", (limit + further) / limit])


def test_gradients_may_come_in_portions_in_any_order(process: RankContext) -> None:
    """Whether one is zero but for rounding depends on those beside it, which may come later."""
    tiny = torch.full((2,), EPS)
    large = torch.tensor([1.0, 2.0])
    for order in ((0, 1), (1, 0)):
        made = Comparison(process, {}, is_exact=False)
        for number in order:
            name, gradient = (("layer.k.bias", tiny), ("layer.q.bias", large))[number]
            held = RankParameter(name, nn.Parameter(torch.zeros(2)), None)
            held.parameter.grad = gradient * (3 if number == 0 else 1)
            made.compare_gradients([ReferenceGradient(name, gradient, 0.0)], [held])
        made.report_extra_gradients()
        made.finish_gradients()
        assert (made.differences, made.inconclusive, made.metrics["gradients"]) == ([], [], 2)


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_gradient_that_is_no_number_differs(process: RankContext, value: float) -> None:
    found = GRADIENT.clone()
    found[0, 0] = value
    made = backward(process, Two(found), a=GRADIENT)
    assert names_of(made) == [("gradients", "disk.a")]
    assert made.differences[0]["max_abs"] == INF
    assert made.metrics["grad_closest_to_tolerance"] == ["a", INF]


@pytest.mark.parametrize(("reference", "largest"), [(GRADIENT - 9, 8.0), (torch.empty(0, 2), 0.0)])
def test_a_gradient_that_is_lost_is_named_with_its_size(
    process: RankContext, reference: torch.Tensor, largest: float
) -> None:
    for names in ({"a": reference}, {"c": reference}):  # without a gradient; not in the model at all
        made = backward(process, Two(None), **names)
        (row,) = made.differences
        assert (row["level"], row["max_abs"], row["tolerance"]) == ("gradients", largest, NOISE_MULTIPLE * 0.25)
        assert (row["name"], row.get("model_name", "c")) == (("disk.a", "a") if "a" in names else ("c", "c"))
        assert made.gradient_distances == {}


def test_a_gradient_too_many_is_named_unless_it_is_zero(process: RankContext) -> None:
    made = backward(process, Two(GRADIENT.clone(), -GRADIENT), a=GRADIENT)
    (row,) = made.differences
    assert (row["name"], row["names"], row["model_name"], row["max_abs"], row["tolerance"]) == ("b.0", 2, "b", 6, 0)
    assert backward(process, Two(GRADIENT.clone(), torch.zeros(2)), a=GRADIENT).differences == []


def test_a_rank_is_held_against_the_rows_that_it_has(process: RankContext) -> None:
    """Rows 0 and 2 of three; what the reference has in row 1 is another rank's."""
    held = [Region((0, 0), (1, 2)), Region((2, 0), (1, 2))]
    model = Two(None)
    local = GRADIENT[[0, 2]].clone()
    model.a = nn.Parameter(torch.zeros(2, 2))
    model.a.grad = local
    assert backward(process, model, regions=lambda name: held, a=GRADIENT).differences == []
    assert model.a.grad is None  # it has been compared, and takes memory no more
    other = GRADIENT.clone()
    other[1] = 1e6
    model.a.grad = local
    assert backward(process, model, regions=lambda name: held, a=other).differences == []
    local[1, 0] += 3
    model.a.grad = local
    made = backward(process, model, regions=lambda name: held, a=other)
    assert [(row["name"], row["max_abs"]) for row in made.differences] == [("disk.a", 3)]


# ------------------------------------------------------------------------------------------- what cannot be decided


@pytest.mark.parametrize(("noise_is", "names"), [(0.125, []), (0.25, [("forward", "logits")])])
def test_logits_that_may_be_further_away_than_they_deviate_are_undecided(
    process: RankContext, noise_is: float, names: list[tuple[str, str]]
) -> None:
    """1, 2, 3, 4 deviate by the root of 1.25; eight times the noise is 1, or 2."""
    made = forward(process, LOGITS.clone(), noise=noise_is)
    assert made.metrics["logits_std"] == pytest.approx(1.25**0.5)
    assert made.differences == []
    assert [(row["level"], row["name"]) for row in made.inconclusive] == names
    assert [(row["tolerance"], row["magnitude"]) for row in made.inconclusive] == [(2.0, 1.25**0.5)] * len(names)
    assert forward(process, LOGITS.clone(), noise=noise_is, exact=True).inconclusive == []
    found = forward(process, LOGITS + 4, noise=noise_is)
    assert (names_of(found), found.inconclusive) == ([("forward", "logits")], [])


@pytest.mark.parametrize(("size", "is_decided"), [(2.5, True), (2.0, True), (1.5, False)])
def test_a_gradient_that_may_be_further_away_than_it_is_large_is_undecided(
    process: RankContext, size: float, is_decided: bool
) -> None:
    """The limit is 2, eight times the noise."""
    reference = torch.tensor([[size, -1.0]])
    made = backward(process, Two(reference + 0.25), a=reference)
    assert made.differences == []
    rows = [
        (row["level"], row["name"], row["model_name"], row["tolerance"], row["magnitude"]) for row in made.inconclusive
    ]
    assert rows == ([] if is_decided else [("gradients", "disk.a", "a", 2.0, size)])
    assert backward(process, Two(reference.clone()), exact=True, a=reference).inconclusive == []
    made = backward(process, Two(reference + 2.25), a=reference)
    assert (names_of(made), made.inconclusive) == ([("gradients", "disk.a")], [])


@pytest.mark.parametrize("size", [0.5, 2.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_gradient_may_differ_in_its_last_places_though_no_draw_moved_it(
    process: RankContext, size: float, sign: int
) -> None:
    reference = torch.full((2, 2), size)
    for places, names in ((NOISE_MULTIPLE, []), (NOISE_MULTIPLE + 1, [("gradients", "disk.a")])):
        found = reference.clone()
        found[0, 0] += sign * places * EPS * size
        made = backward(process, Two(found), moved=0.0, a=reference)
        assert names_of(made) == names
        assert made.gradient_distances["a"][1] == NOISE_MULTIPLE * EPS * size
    assert names_of(backward(process, Two(found), moved=0.0, exact=True, a=reference)) == [("gradients", "disk.a")]


@pytest.mark.parametrize(("size", "is_zero"), [(NOISE_MULTIPLE * EPS, True), (2 * NOISE_MULTIPLE * EPS, False)])
def test_a_gradient_that_is_zero_but_for_rounding_is_equal(process: RankContext, size: float, is_zero: bool) -> None:
    """Beside one of 1: whatever the two make of a sum that is zero. One that has more is none of these."""
    beside, small = torch.ones(2), torch.tensor([size, 0.0])
    other = Two(beside.clone(), -small)
    made = backward(process, other, moved=0.0, a=beside, b=small)
    assert names_of(made) == ([] if is_zero else [("gradients", "b.0")])
    made = backward(process, Two(beside.clone(), torch.ones(2)), moved=0.0, a=beside, b=small)
    assert names_of(made) == [("gradients", "b.0")]


# Modules next to each other share a scope, such as the projections of an attention.
PLACES = {
    "layers.0.attn.k.bias": "layers.0.attn", "layers.0.attn.q.weight": "layers.0.attn",
    "layers.0.mlp.up.weight": "layers.0.mlp", "layers.1.attn.q.weight": "layers.1.attn",
    "layers.0.attn.weight": "layers.0", "norm.weight": "", "a": "",
}  # fmt: skip


@pytest.mark.parametrize("large", PLACES)
@pytest.mark.parametrize("small", PLACES)
def test_zero_but_for_rounding_is_judged_beside_neighbors_and_not_the_whole_model(
    process: RankContext, small: str, large: str
) -> None:
    """A large gradient in another module does not excuse that all of a small one is wrong."""
    if small == large:
        names = {small: 1.0}
    else:
        names = {small: 1.0, large: 1e9}
    parameters = []
    for name, size in names.items():
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.full((2,), size if name == large and small != large else -size)
        parameters.append(RankParameter(name, parameter, None))
    made = Comparison(process, {}, is_exact=False)
    made.compare_gradients(
        [ReferenceGradient(name, torch.full((2,), size), 0.0) for name, size in names.items()], parameters
    )
    made.report_extra_gradients()
    made.finish_gradients()
    is_excused = small != large and PLACES[small] == PLACES[large]
    assert [row["name"] for row in made.differences] == ([] if is_excused else [small])
    assert made.inconclusive == []


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(PLACES)), st.floats(0, 10), min_size=1))
def test_the_largest_of_neighbors(sizes: dict[str, float]) -> None:
    found = comparison._largest_by_module(sizes)
    for name in sizes:
        assert found[name] == max(size for other, size in sizes.items() if PLACES[other] == PLACES[name])
    assert found.keys() == sizes.keys()


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_gradient_that_is_no_number_on_both_sides_differs(process: RankContext, value: float) -> None:
    both = GRADIENT.clone()
    both[1, 1] = value
    (row,) = backward(process, Two(both.clone()), a=both).differences
    assert (row["name"], row["what"]) == ("disk.a", "not finite in the reference and the checkpoint")


def test_bands_change_no_number(process: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, 5, 7, generator=generator) for _ in range(2))

    def numbers() -> list[float]:
        return [
            max_abs_difference(a, b),
            distances.kl_divergence(a, b),
            distances.cosine_similarity(a, b),
            distances.standard_deviation(a),
        ]

    whole = numbers()
    assert whole[3] == pytest.approx(float(a.double().std(correction=0)))
    for band in (1, 7, 16, 104, 105):
        monkeypatch.setattr(distances, "CHUNK_NUMEL", band)
        assert numbers() == pytest.approx(whole)


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(["x", "y", "z"]), far=st.sets(st.sampled_from("xyz")))
def test_the_order_of_names_is_no_difference(process: RankContext, order: list[str], far: set[str]) -> None:
    model = nn.Module()
    for name in order:
        made = nn.Parameter(torch.zeros(2))
        made.grad = torch.full((2,), 9.0 if name in far else 1.0)
        setattr(model, name, made)
    expected = {name: torch.ones(2) for name in "xyz"}
    assert [row["name"] for row in backward(process, model, **expected).differences] == sorted(far)
