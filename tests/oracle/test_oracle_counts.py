"""Numbers that add up, for real classes: a tied tensor counts once in every form, however its class ties it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ckptx
from tests.report.test_counting import agree
from tests.support.models import RECIPES, Recipe, read_hf, write
from tests.support.slow import slow_but

FAST = ("llama-tied", "llama-both-different", "gpt2", "mixtral", "t5", "gemma3-vlm", "qwen3-moe", "bert-pretraining")
# What else a form can be made by, from an HF checkpoint.
FORMS: dict[str, dict[str, Any]] = {
    "dcp": {},
    "cut dcp": {"tp": 2, "pp": 2, "to": "dcp"},
    "cut dcp, names of the model": {"tp": 2, "to": "dcp", "names": "model"},
    "sharded": {"tp": 2, "pp": 2, "to": "safetensors"},
}


class Written(NamedTuple):
    recipe: Recipe
    hf: Path


@pytest.fixture(scope="module", params=slow_but(RECIPES, FAST))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    recipe = RECIPES[request.param]
    root = tmp_path_factory.mktemp("counts")
    write(recipe, root / "hf")
    yield Written(recipe, root / "hf")
    shutil.rmtree(root)


def parameters(written: Written) -> int:
    """Elements of what is on disk, names that the recipe calls tied left out where both are there."""
    tensors = read_hf(written.hf)
    twice = {name for name, stored in written.recipe.aliases.items() if name in tensors and stored in tensors}
    return sum(prod(tensor.shape) for name, tensor in tensors.items() if name not in twice)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", FORMS)
def test_numbers_add_up_for_every_class(written: Written, tmp_path: Path, form: str) -> None:
    options = FORMS[form]
    try:
        if options:
            report = ckptx.reshard(written.hf, tmp_path / "there", **options)
        else:
            report = ckptx.convert("hf2dcp", written.hf, tmp_path / "there")
    except ckptx.errors.UnsupportedError as error:
        assert "pipeline stages" in str(error)  # a class without a list of layers
        return
    agree(written.hf, tmp_path / "there", report, parameters(written))
    back = ckptx.convert("dcp2hf", tmp_path / "there", tmp_path / "back")
    agree(tmp_path / "there", tmp_path / "back", back, parameters(written))
