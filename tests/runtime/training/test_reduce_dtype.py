"""Mixed precision of a recipe: the defaults of FSDP2, and of the options of `forecast`."""

from __future__ import annotations

import itertools

import pytest
import torch

import ckptx
from ckptx.runtime.training.rank_model import _make_mixed_precision_policy
from ckptx.runtime.training.recipe_file import read_recipe

DTYPES = ("null", "float32", "bfloat16")


@pytest.mark.parametrize(("param", "reduce"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("model", DTYPES[1:])
def test_gradients_are_reduced_in_the_dtype_that_fsdp2_would_choose(model: str, param: str, reduce: str) -> None:
    """`MixedPrecisionPolicy`: without a reduce_dtype, that of the computation."""
    recipe = read_recipe(
        "llama_tiny", [f"model.dtype={model}", f"layout.param_dtype={param}", f"layout.reduce_dtype={reduce}"]
    )
    policy = _make_mixed_precision_policy(recipe, recipe.layout)
    compute = model if param == "null" else param
    if param == reduce == "null":
        assert policy is None
    else:
        assert policy is not None
        assert policy.param_dtype == getattr(torch, compute)
        assert policy.reduce_dtype == getattr(torch, compute if reduce == "null" else reduce)


def test_forecast_reports_the_dtype_of_the_reduction_for_options_and_recipes() -> None:
    report = ckptx.forecast(recipe="llama_tiny", overrides=["layout.param_dtype=bfloat16"])
    assert (report.settings["param_dtype"], report.settings["reduce_dtype"]) == ("bfloat16", "bfloat16")
