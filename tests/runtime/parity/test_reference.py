"""A reference in pieces gives what it gives as a whole: logits, loss, gradients, and how much rounding moves each."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ckptx.layout.stages import StageMap
from ckptx.options.verify import RunOptions
from ckptx.runtime.parallel.distributed import RankContext
from ckptx.runtime.parity.comparison import ReferenceResult
from ckptx.runtime.parity.model_loaders import ModelLoader
from ckptx.runtime.parity.reference import ReferenceModel, StagewiseReference, WholeReference, partition_reference
from tests.support.models import EVERY, write
from tests.support.staged_models import build_deep_model

PLACE = RankContext(0, 1, torch.device("cpu"))
# The hidden state alone, tied and untied; inputs of every layer, shared keys and values; one weight tied at three
# places; a tower; experts.
SOME = ("llama-tied", "llama-untied", "gemma4-ple", "gemma4-shared-kv", "t5", "bart", "gemma3-vlm", "qwen3-moe")


class Given(NamedTuple):
    """All that a reference gives."""

    forward: ReferenceResult
    gradients: dict[str, Tensor]
    moved: dict[str, float]


def all_of(running: ReferenceModel) -> Given:
    forward = running.forward()
    portions = [{each.name: each for each in portion} for portion in running.gradients()]
    assert len(portions) == running.stage_count
    found = {name: each for portion in portions for name, each in portion.items()}
    assert sum(map(len, portions)) == len(found), "each gradient comes once"
    gradients = {name: each.tensor.clone() for name, each in found.items()}
    return Given(forward, gradients, {name: each.noise for name, each in found.items()})


def both(path: Path, pieces: int, batches: int, split: str = "even", **options: str) -> tuple[Given, Given]:
    side = ModelLoader(path, path, RunOptions(device="cpu", **options))
    seen = side.inspect_model()
    model, stacks = side.build_with_stacks()
    given = side.make_batches(seen, batches)
    stages = StageMap(stacks, pieces, split)
    whole = WholeReference(side, given, PLACE, backward=True)
    return all_of(whole), all_of(
        StagewiseReference(side, given, PLACE, partition_reference(model, stages, seen), backward=True)
    )


def assert_alike(whole: Given, pieces: Given, *, apart: frozenset[str] = frozenset()) -> None:
    """Bit for bit, but for gradients of `apart`, which are summed in another order."""
    assert all(map(torch.equal, whole.forward.result.logits, pieces.forward.result.logits))
    assert len(whole.forward.result.logits) == len(pieces.forward.result.logits)
    assert whole.forward.result.loss == pieces.forward.result.loss
    assert whole.forward[1:] == pieces.forward[1:]
    assert whole.gradients.keys() == pieces.gradients.keys()
    wrong = {name for name, each in whole.gradients.items() if not torch.equal(each, pieces.gradients[name])}
    assert wrong <= apart
    for name in wrong:
        right = whole.gradients[name]
        assert float((right - pieces.gradients[name]).abs().max()) <= 3e-7 * float(right.abs().max())
    assert {name for name in whole.moved if whole.moved[name] != pieces.moved[name]} <= apart


@pytest.mark.sampled(3)
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("name", SOME)
def test_pieces_give_what_the_whole_gives(tmp_path: Path, name: str, batches: int) -> None:
    write(EVERY[name], tmp_path)
    assert_alike(*both(tmp_path, 2, batches))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EVERY if name not in SOME])
def test_pieces_of_every_model_give_what_the_whole_gives(tmp_path: Path, name: str) -> None:
    write(EVERY[name], tmp_path)
    assert_alike(*both(tmp_path, 2, 2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "split"),
    [
        (name, split)
        for name in ("llama-tied", "gemma4-shared-kv", "qwen3-vl")
        for split in ("1,1,1,1,1,1", "1,4,1", "3,1,2")
    ],
)
def test_pieces_of_a_deeper_model_give_what_the_whole_gives(tmp_path: Path, name: str, split: str) -> None:
    build_deep_model(name).save_pretrained(tmp_path)
    assert_alike(*both(tmp_path, split.count(",") + 1, 2, split))


@pytest.mark.parametrize("name", ["llama-tied", "gemma4-ple"])
def test_pieces_in_bfloat16_give_what_the_whole_gives(tmp_path: Path, name: str) -> None:
    write(EVERY[name], tmp_path)
    assert_alike(*both(tmp_path, 2, 3, compute_dtype="bf16"))
