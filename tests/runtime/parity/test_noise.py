"""The yardstick: every embedding moved by one unit in the last place, and put back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckptx.runtime.parity import noise
from ckptx.runtime.parity.noise import perturb_copy, perturb_embeddings
from tests.support.small_modules import ULP, Scaled


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """As whole numbers: NaN is equal to itself, and -0 is not 0."""
    return tensor.detach().clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


# ------------------------------------------------------------------------------------------- one tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_becomes_one_beside_it(dtype: torch.dtype) -> None:
    """Beside it: in the sorted list of all numbers. What is not finite, zero, subnormal or the largest stays."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    info = torch.finfo(dtype)
    usual = every.isfinite() & (every.abs().double() >= info.tiny) & (every.abs().double() < info.max)
    line = np.unique(every[every.isfinite()].double().numpy())  # sorted
    for seed in range(2):
        found = perturb_copy(every, seeded(seed))
        assert torch.equal(bits_of(found)[~usual], bits_of(every)[~usual])
        before, after = (np.searchsorted(line, each[usual].double().numpy()) for each in (every, found))
        assert set(after - before) == {-1, 1}


@pytest.mark.parametrize("width", [32, 64])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_wider_numbers_become_one_beside_them(width: int, data: st.DataObject) -> None:
    values = np.array(data.draw(st.lists(st.floats(width=width), min_size=1, max_size=8)), f"f{width // 8}")
    found = perturb_copy(torch.from_numpy(values.copy()), seeded(data.draw(st.integers(0, 99)))).numpy()
    info = np.finfo(values.dtype)
    for before, after in zip(values, found, strict=True):
        if info.tiny <= abs(before) < info.max:
            assert after in (np.nextafter(before, info.max), np.nextafter(before, info.min))
        else:
            assert before.tobytes() == after.tobytes()


def test_half_goes_up_and_half_goes_down_whatever_the_sign() -> None:
    for value in (3.0, -3.0):
        change = perturb_copy(torch.full((4000,), value), seeded()).double() - value
        assert set(change.tolist()) == {-ULP, ULP}
        assert 0.45 < float((change > 0).double().mean()) < 0.55


def test_a_draw_depends_on_its_seed_and_leaves_its_input_alone() -> None:
    before = torch.arange(1.0, 65.0).reshape(8, 8).t()  # in another order in memory
    kept = before.clone()
    first, again, other = (
        perturb_copy(before, seeded(1)),
        perturb_copy(before, seeded(1)),
        perturb_copy(before, seeded(2)),
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, kept)
    assert first.shape == before.shape
    assert float(((first - before).abs() / before).max()) <= 2.0**-23


# ------------------------------------------------------------------------------------------- a model


class Tied(nn.Module):
    """Two embeddings that are one, an output head that is the same tensor, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there, self.other = (nn.Embedding(6, 4) for _ in range(3))
        self.head = nn.Linear(4, 6)
        self.there.weight = self.head.weight = self.here.weight
        with torch.no_grad():
            self.here.weight.fill_(3)
            self.other.weight.fill_(3)
            self.other.weight[0] = torch.tensor([0.0, -0.0, float("nan"), float("inf")])


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: bits_of(each) for name, each in model.state_dict().items()}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in a if not torch.equal(a[name], b[name])}


def test_embeddings_alone_are_moved_each_once_and_put_back() -> None:
    model = Tied()
    before, weight = state_of(model), model.here.weight
    with perturb_embeddings(model, 0):
        inside = state_of(model)
        assert model.here.weight is model.there.weight is model.head.weight is weight
        assert set((weight.detach().double() - 3).flatten().tolist()) == {-ULP, ULP}  # not twice that
        assert set((model.other.weight[1:].detach().double() - 3).flatten().tolist()) == {-ULP, ULP}
        assert torch.equal(inside["other.weight"][0], before["other.weight"][0])
        assert not torch.equal(inside["here.weight"][1:], inside["other.weight"][1:])
        assert weight.requires_grad and weight.grad_fn is None
    assert differing(before, inside) == {"here.weight", "there.weight", "head.weight", "other.weight"}
    assert differing(before, state_of(model)) == set()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float32,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.float16, torch.float64)),
    ],
)
def test_every_number_is_put_back(dtype: torch.dtype) -> None:
    """Also those at the edge, which a step makes subnormal or the largest; in bands, and in any order in memory."""
    info = torch.finfo(dtype)
    ends = [info.tiny, -info.tiny, info.max, -info.max, 0.0, -0.0, 1.0, float("inf"), float("nan")]
    edges = torch.tensor(ends, dtype=torch.float64).to(dtype)
    beside = [torch.nextafter(edges, torch.full_like(edges, end)) for end in (-9.0, 9.0)]
    if dtype is not torch.float64:
        of_16_bits = torch.bfloat16 if dtype is torch.float32 else dtype
        beside.append(torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(of_16_bits).to(dtype))
    numbers = torch.cat([edges, *beside]).repeat(64)
    for weight in (numbers.reshape(-1, 1), numbers.reshape(64, -1).t()):
        model = nn.ModuleList([nn.Embedding(*weight.shape, _weight=weight.clone(memory_format=torch.preserve_format))])
        before = bits_of(model[0].weight.contiguous())  # type: ignore[operator]
        for seed in range(3):
            with perturb_embeddings(model, seed):
                assert not torch.equal(bits_of(model[0].weight.contiguous()), before)  # type: ignore[operator]
            assert torch.equal(bits_of(model[0].weight.contiguous()), before)  # type: ignore[operator]


def test_an_error_inside_leaves_nothing_moved() -> None:
    model = Tied()
    before = state_of(model)
    with pytest.raises(KeyError), perturb_embeddings(model, 0):
        raise KeyError
    assert differing(before, state_of(model)) == set()


def test_draws_are_different_and_repeatable() -> None:
    model, found = Tied(), []
    for seed in (0, 1, 2, 0):
        with perturb_embeddings(model, seed):
            found.append(bits_of(model.here.weight))
    assert torch.equal(found[0], found[3])
    assert not any(torch.equal(found[a], found[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_a_model_without_embeddings_is_left_alone() -> None:
    model = nn.Linear(3, 3)
    before = state_of(model)
    with perturb_embeddings(model, 0):
        assert differing(before, state_of(model)) == set()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_narrower_dtype_is_moved_further(dtype: torch.dtype) -> None:
    """By its own epsilon times the power of two below the value, 2 for 3."""
    model = Scaled(dtype)
    with perturb_embeddings(model, 0):
        change = (model.embed.weight.detach().double() - 3).abs()
    assert set(change.flatten().tolist()) == {2 * torch.finfo(dtype).eps}


def test_there_are_several_draws_and_some_room() -> None:
    assert noise.NUM_DRAWS >= 2
    assert noise.NOISE_MULTIPLE > 1
