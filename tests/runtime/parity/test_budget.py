"""How many pieces a reference is cut into: the fewest that take no more than they may, as counted while they run."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckptx.errors import SpaceError
from ckptx.layout.stages import StageMap
from ckptx.options.verify import RunOptions
from ckptx.runtime.parallel.distributed import RankContext
from ckptx.runtime.parity import budget as budget_module
from ckptx.runtime.parity.budget import MemoryBudget
from ckptx.runtime.parity.model_loaders import ModelFacts, ModelLoader
from ckptx.runtime.parity.reference import StagewiseReference, partition_reference
from tests.support.models import randomize, transformers
from tests.support.slow import slow_but

PLACE = RankContext(0, 1, torch.device("cpu"))


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those among the arguments of an operation, also in lists."""
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from tensors_in(each)


class Live(TorchDispatchMode):  # type: ignore[misc]
    """Counts the bytes of all tensors that are made inside of it and still there.

    Attributes:
        peak: The most at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(each.untyped_storage()) for each in tensors_in((*args, *(kwargs or {}).values()))}
        output = function(*args, **(kwargs or {}))
        for each in tensors_in((output,)):
            if each.device.type == "cpu":
                self._add(each.untyped_storage(), given)
        return output

    def _add(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = storage._cdata
        if key in self._known or id(storage) in given:
            return
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        self._known[key] = weakref.finalize(storage, self._end, key, storage.nbytes())

    def _end(self, key: int, nbytes: int) -> None:
        self._known.pop(key, None)
        self.now -= nbytes


def side_of(path: Path, *, tied: bool) -> tuple[ModelLoader, ModelFacts]:
    config = transformers.LlamaConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=2000, tie_word_embeddings=tied,
    )  # fmt: skip
    randomize(transformers.LlamaForCausalLM(config)).save_pretrained(path)
    side = ModelLoader(path, path, RunOptions(device="cpu"))
    return side, side.inspect_model()


def budget_of(side: ModelLoader, seen: ModelFacts, batches: int, **settings: Any) -> MemoryBudget:
    given = {"backward": True, "includes_checkpoint": False, **settings}
    model, stacks = side.build_with_stacks()
    return MemoryBudget(model, stacks, side.make_batches(seen, batches), **given)


@pytest.mark.parametrize(
    ("tied", "batches", "pieces"),
    slow_but(product((True, False), (1, 3), (2, 4, 8)), [(True, 1, 4), (False, 3, 2)]),
)
def test_what_is_live_at_a_time_stays_below_what_is_counted(
    tmp_path: Path, tied: bool, batches: int, pieces: int
) -> None:
    side, seen = side_of(tmp_path, tied=tied)
    budget = budget_of(side, seen, batches)
    stages = StageMap(budget.stacks, pieces)
    cut = partition_reference(budget.model, stages, seen)
    with Live() as live:
        running = StagewiseReference(side, budget.batches, PLACE, cut, backward=True)
        running.forward()
        for portion in running.gradients():
            del portion
    assert 0.4 < live.peak / budget.peak_bytes(stages) <= 1


def test_the_fewest_pieces_that_fit_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "CHUNK_NUMEL", 1)  # else that is most of what so small a model takes
    budget = budget_of(*side_of(tmp_path, tied=True), 1)
    needed = {pieces: budget.peak_bytes(StageMap(budget.stacks, pieces)) for pieces in range(2, 9)}
    assert budget.whole_bytes > needed[2] > needed[4] > needed[8]
    for pieces in (2, 4, 8):
        assert budget.partition(needed[pieces]).count == pieces
    assert budget.partition(needed[2] - 1).count == 3


def test_the_least_is_named(tmp_path: Path) -> None:
    budget = budget_of(*side_of(tmp_path, tied=True), 1, advice=("--no-backward",))
    least = min(budget.peak_bytes(StageMap(budget.stacks, pieces)) for pieces in range(2, 9))
    assert budget.partition(least).count <= 8
    with pytest.raises(SpaceError) as refused:
        budget.partition(least - 1)
    assert f"use --reference-memory {-(-least // 10**6)}MB, --no-backward, a machine with more" in str(refused.value)
    assert "in up to 8 parts" in str(refused.value)


def test_a_single_layer_cannot_be_cut(tmp_path: Path) -> None:
    side, seen = side_of(tmp_path, tied=True)
    budget = budget_of(side, seen, 1)
    one = MemoryBudget(budget.model, [budget.stacks[0].__class__("model.layers", 1)], budget.batches, True, False)
    with pytest.raises(SpaceError, match="a model with 1 layer cannot run in parts"):
        one.partition(1000)


@pytest.mark.parametrize(
    ("settings", "is_more"), [({"backward": False}, False), ({"includes_checkpoint": True, "backward": False}, False)]
)
def test_without_gradients_it_takes_less(tmp_path: Path, settings: dict[str, bool], is_more: bool) -> None:
    side, seen = side_of(tmp_path, tied=True)
    stages = StageMap(budget_of(side, seen, 1).stacks, 4)
    assert (
        budget_of(side, seen, 1, **settings).peak_bytes(stages) > budget_of(side, seen, 1).peak_bytes(stages)
    ) == is_more


def test_more_batches_take_more(tmp_path: Path) -> None:
    side, seen = side_of(tmp_path, tied=True)
    stages = StageMap(budget_of(side, seen, 1).stacks, 4)
    one, two, three = (budget_of(side, seen, count).peak_bytes(stages) for count in (1, 2, 3))
    assert one < two < three


@pytest.mark.parametrize("error", [NotImplementedError, AttributeError])
def test_a_class_without_an_embedding_takes_something_too(tmp_path: Path, error: type[Exception]) -> None:
    class Listens(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3, device="meta")

        def get_input_embeddings(self) -> torch.nn.Module:
            raise error

    assert MemoryBudget(Listens(), [], [], True, False).whole_bytes > 4 * (9 + 3) * 2
