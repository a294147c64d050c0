"""The checkpoints of the benchmarks are what their tables say."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, prod
from pathlib import Path

import pytest

import ckptx
from benchmarks.checkpoints import Model, deepseek, dtype_of, experts, llama, write_checkpoint


def parameters(model: Model) -> int:
    return sum(prod(shape) for _, shape in model.shapes)


@pytest.mark.parametrize(
    ("model", "tensors", "elements"),
    [
        (llama(), 183, 1_032_931_328),
        (experts(), 18_723, 1_584_429_568),
        (deepseek(predictors=0), 45_395, 671_026_419_200),
        (deepseek(), 46_183, 684_489_845_504),
    ],
    ids=["llama", "experts", "deepseek", "deepseek with its further head"],
)
def test_a_model_has_as_many_tensors_and_parameters_as_published(model: Model, tensors: int, elements: int) -> None:
    shapes = dict(model.shapes)
    assert len(shapes) == tensors
    assert sum(map(prod, shapes.values())) == elements


def test_deepseek_has_the_counts_of_its_release_by_dtype() -> None:
    shapes = dict(deepseek().shapes)
    # The release keeps these in fp8, each with an fp32 scale for every 128 x 128 block.
    wide = ("embed_tokens", "lm_head", "shared_head", "eh_proj", "mlp.gate.")
    fp8 = [shape for name, shape in shapes.items() if len(shape) == 2 and not any(part in name for part in wide)]
    scales = sum(ceil(rows / 128) * ceil(columns / 128) for rows, columns in fp8)
    fp32 = sum(prod(shape) for name, shape in shapes.items() if dtype_of(name).name == "F32")
    assert len(shapes) + len(fp8) == 91_991  # keys of its index
    assert sum(map(prod, fp8)) == 680_571_043_840
    assert scales + fp32 == 41_555_600
    assert sum(map(prod, shapes.values())) - sum(map(prod, fp8)) - fp32 == 3_918_786_560


@pytest.mark.parametrize(
    "model", [llama(1), experts(1, 4), deepseek(4, predictors=0)], ids=["llama", "experts", "deepseek"]
)
def test_the_tensors_match_the_config(model: Model, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", model, sparse=True)
    report = ckptx.convert("to-dcp", tmp_path / "hf", tmp_path / "dcp", dry_run=True)
    assert report.exit == 0
    assert report.notes == []


def test_the_size_grows_with_the_layers_that_have_experts() -> None:
    sizes = [parameters(deepseek(layers)) for layers in (3 + 14, 3 + 29, 3 + 58)]
    first, second = (after - before for before, after in pairwise(sizes))
    assert first * 29 == second * 15  # as many more layers in each step


def test_a_sparse_checkpoint_opens_and_takes_no_room(tmp_path: Path) -> None:
    root = tmp_path / "deepseek"
    nbytes = write_checkpoint(root, deepseek(), shards=163, sparse=True)
    catalog = ckptx.open_checkpoint(root)
    assert len(catalog.tensors) == 46_183
    assert sum(entry.nbytes for entry in catalog.tensors.values()) == nbytes == 2 * 684_489_845_504 + 2 * 15_104
    assert len(catalog.files) == 163
    assert sum(file.stat().st_blocks * 512 for file in root.iterdir()) < 32 << 20


def test_a_checkpoint_with_bytes_differs_from_its_holes(tmp_path: Path) -> None:
    small = Model(iter([("a.weight", (64, 64)), ("b.weight", (64,))]), {})
    write_checkpoint(tmp_path / "full", small, shards=2)
    full = ckptx.open_checkpoint(tmp_path / "full")
    assert sorted(full.tensors) == ["a.weight", "b.weight"]
    chunk = full.tensors["a.weight"].chunks[0]
    payload = (tmp_path / "full" / chunk.file).read_bytes()[chunk.offset :]
    assert len(payload) == 64 * 64 * 2
    assert any(payload)
