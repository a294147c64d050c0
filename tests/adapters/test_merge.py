"""Merged models equal what PEFT computes, in their tensors and outputs, for adapters that PEFT itself saved."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

import ckptx
from ckptx.errors import UnsupportedError
from tests.support.models import RECIPES, Recipe, load, outputs, read_hf, write
from tests.support.peft_adapters import VARIANTS, Trained, train, ulps
from tests.support.slow import slow_but

FAMILIES = (
    "llama-untied", "llama-tied", "qwen2", "gemma2", "gpt2", "phi3", "gpt-neox", "mixtral", "bert-mlm", "t5", "bloom",
    "llava", "qwen2.5-vl", "whisper",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WITH_BIASES = ("qwen2", "gpt2", "gpt-neox", "bert-mlm", "bloom", "whisper")
CASES = [
    (family, variant, dtype)
    for family in FAMILIES
    for variant in VARIANTS
    for dtype in DTYPES
    if family in WITH_BIASES or not VARIANTS[variant].has_bias
]
FAST = [
    ("llama-untied", "plain", "bfloat16"), ("llama-tied", "saved", "bfloat16"), ("qwen2", "patterns", "float32"),
    ("gpt2", "dora-embedding", "float32"), ("gpt2", "rslora", "bfloat16"), ("llava", "dora", "bfloat16"),
    ("bert-mlm", "bias", "float32"), ("gpt2", "lora-bias", "bfloat16"), ("qwen2", "lora-bias", "float32"),
    ("t5", "plain", "float32"), ("whisper", "head", "bfloat16"),
]  # fmt: skip
# The class has one tensor for the head, the embedding and those of both stacks, whatever the config says.
ALWAYS_TIED = {("t5", variant) for variant in ("saved", "embedding", "dora-embedding", "head")}


@cache
def _directories() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def trained(family: str, variant: str, dtype: str) -> tuple[Recipe, Trained]:
    """Train an adapter once for all tests that use it."""
    recipe = replace(RECIPES[family], dtype=DTYPES[dtype])
    root = Path(_directories().name) / f"{family} {variant} {dtype}"
    root.mkdir()
    return recipe, train(recipe, VARIANTS[variant], recipe.inputs(), root)


@pytest.fixture(scope="module", autouse=True)
def _remove_directories() -> Iterator[None]:
    yield
    trained.cache_clear()
    _directories().cleanup()
    _directories.cache_clear()


def assert_close_to_exact(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], names: set[str]) -> None:
    """Check that tensors are within one unit in the last place of the correctly rounded ones."""
    distances = {name: ulps(state[name], expected[name]) for name in names if expected[name].is_floating_point()}
    assert max(distances.values()) <= 1, max(distances, key=distances.__getitem__)


@pytest.mark.parametrize(("family", "variant", "dtype"), slow_but(CASES, FAST))
def test_merged_model_equals_that_of_peft(family: str, variant: str, dtype: str, tmp_path: Path) -> None:
    recipe, found = trained(family, variant, dtype)
    if (family, variant) in ALWAYS_TIED:
        with pytest.raises(UnsupportedError, match="always ties"):
            ckptx.merge(found.model, found.adapter, tmp_path / "out")
        return
    report = ckptx.merge(found.model, found.adapter, tmp_path / "out")
    merged = load(tmp_path / "out")
    state = merged.state_dict()
    assert state.keys() == found.merged.keys()
    assert {name: tensor.dtype for name, tensor in state.items()} == {
        name: tensor.dtype for name, tensor in found.merged.items()
    }
    # PEFT changes both names of a tied weight although the adapter has one; the outputs below show which is right.
    other = found.unchanged_ties
    assert_close_to_exact(state, found.exact, state.keys() - other)
    assert all(torch.equal(state[name], found.base[name]) for name in other)
    if dtype == "float32":
        for mine, expected in zip(outputs(merged, recipe.inputs()), found.outputs, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    assert report.merged_weights is not None and report.merged_weights + len(report.adapters[0]["replaced"]) >= 1
    assert sum(not torch.equal(state[name], found.base[name]) for name in state) == len(found.changed - other)


def test_untouched_tensors_are_copied_byte_for_byte(tmp_path: Path) -> None:
    _, found = trained("llama-untied", "plain", "bfloat16")
    ckptx.merge(found.model, found.adapter, tmp_path / "out")
    before, after = read_hf(found.model), read_hf(tmp_path / "out")
    assert before.keys() == after.keys()
    unchanged = [name for name in before if name not in found.changed]
    assert unchanged and all(torch.equal(before[name], after[name]) for name in unchanged)
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads(
        (found.model / "config.json").read_text()
    )


@pytest.mark.parametrize(
    "options", [{"tp": 2}, {"tp": 2, "pp": 2, "dp_shard": 2}, {"to": "dcp"}, {"tp": 3, "to": "dcp"}, {"workers": 4}]
)
def test_bytes_do_not_depend_on_layout_and_format(options: dict[str, object], tmp_path: Path) -> None:
    """A merged, sharded checkpoint has the bytes of the merged one, also where shards cut the blocks of a weight."""
    _, found = trained("llama-untied", "dora", "bfloat16")
    ckptx.merge(found.model, found.adapter, tmp_path / "hf")
    ckptx.merge(found.model, found.adapter, tmp_path / "out", **options)
    report = ckptx.verify(tmp_path / "hf", tmp_path / "out")
    assert report.exit == 0 and report.compared == len(read_hf(found.model))


def test_model_may_be_a_dcp_or_sharded(tmp_path: Path) -> None:
    _, found = trained("llama-untied", "plain", "bfloat16")
    ckptx.merge(found.model, found.adapter, tmp_path / "expected")
    ckptx.convert("to-dcp", found.model, tmp_path / "dcp", prefix="model.")
    ckptx.reshard(found.model, tmp_path / "sharded", tp=2, pp=2)
    for source in ("dcp", "sharded"):
        ckptx.merge(tmp_path / source, found.adapter, tmp_path / f"{source} merged", to="hf")
        assert ckptx.verify(tmp_path / "expected", tmp_path / f"{source} merged").exit == 0


def test_names_of_a_trainer_become_those_of_the_hub(tmp_path: Path) -> None:
    """torchtitan permutes the rows of q and k; the adapter has those of transformers."""
    _, found = trained("llama-untied", "plain", "bfloat16")
    ckptx.merge(found.model, found.adapter, tmp_path / "expected")
    ckptx.convert("to-dcp", found.model, tmp_path / "titan", names="torchtitan")
    ckptx.merge(tmp_path / "titan", found.adapter, tmp_path / "out", base=found.model)
    assert ckptx.verify(tmp_path / "expected", tmp_path / "out").exit == 0


def test_several_adapters_are_added_with_their_factors(tmp_path: Path) -> None:
    """The sum is rounded once; for float32, PEFT in float64 shows the exact result."""
    _, first = trained("llama-untied", "plain", "float32")
    _, second = trained("llama-untied", "rslora", "float32")
    ckptx.merge(first.model, first.adapter, tmp_path / "out", add=[f"{second.adapter}:-0.5"])
    state = read_hf(tmp_path / "out")
    for name in first.changed:
        exact = first.wide[name] - 0.5 * (second.wide[name] - second.base[name].double())
        assert ulps(state[name], exact.float()) <= 1


def test_resumed_merge_with_another_adapter_starts_again(tmp_path: Path) -> None:
    _, first = trained("llama-untied", "plain", "float32")
    _, second = trained("llama-untied", "rslora", "float32")
    ckptx.merge(first.model, first.adapter, tmp_path / "out")
    report = ckptx.merge(first.model, second.adapter, tmp_path / "out", overwrite=True, resume=True)
    assert report.bytes_written
    ckptx.merge(first.model, second.adapter, tmp_path / "expected")
    assert ckptx.verify(tmp_path / "expected", tmp_path / "out").exit == 0


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "deepseek-v3"])
def test_experts_with_an_adapter_each(family: str, tmp_path: Path) -> None:
    """Trainers that have a module for each expert save such names; PEFT converts them for fused experts."""
    recipe = replace(RECIPES[family], dtype=torch.float32)
    write(recipe, tmp_path / "model")
    base, generator = read_hf(tmp_path / "model"), torch.Generator().manual_seed(0)
    expected, adapter = dict(base), {}
    for name, weight in base.items():
        if ".experts." not in name or "shared" in name:
            continue
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a = torch.randn(4, weight.shape[1], generator=generator) * 0.2
        b = torch.randn(weight.shape[0], 4, generator=generator) * 0.2
        adapter |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        expected[name] = (weight.double() + 1.5 * (b.double() @ a.double())).float()
    (tmp_path / "adapter").mkdir()
    save_file(adapter, tmp_path / "adapter/adapter_model.safetensors", {"format": "pt"})
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in adapter})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "target_modules": targets}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    ckptx.merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
    found = read_hf(tmp_path / "out")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = PeftModel.from_pretrained(load(tmp_path / "model"), tmp_path / "adapter").eval()
    for mine, theirs in zip(
        outputs(load(tmp_path / "out"), recipe.inputs()), outputs(peft_model, recipe.inputs()), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
