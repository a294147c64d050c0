"""Adapters of training checkpoints become adapters that PEFT loads, with the tensors that were trained."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel, get_peft_model_state_dict

import ckptx
from ckptx.errors import InputError, UnsupportedError, UsageError
from tests.support import peft_ranks
from tests.support.models import RECIPES, load, outputs, read_file, tokens
from tests.support.peft_adapters import VARIANTS, Trained, train
from tests.support.pool import GlooPool


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Return a function that trains an adapter of a variant once."""
    found: dict[str, Trained] = {}

    def get(variant: str) -> Trained:
        if variant not in found:
            recipe = replace(RECIPES["llama-untied"], dtype=torch.float32)
            found[variant] = train(recipe, VARIANTS[variant], tokens(), tmp_path_factory.mktemp(variant))
        return found[variant]

    return get


def peft_model(found: Trained, adapter: Path | None = None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(load(found.model), adapter or found.adapter).eval()


def state_dicts(model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the forms in which trainers save the state dict of a PeftModel."""
    state = model.state_dict()
    yield "whole", {"model": state}
    yield "adapter only", {"model": get_peft_model_state_dict(model)}
    yield "without a prefix", dict(state)
    yield (
        "trainable",
        {
            "app": {
                "model": {name: each for name, each in state.items() if "lora_" in name or "modules_to_save" in name}
            }
        },
    )
    yield "wrapped", {"model": {f"_orig_mod.{name}": each for name, each in state.items()}, "train_state": {"step": 3}}


FORMS = ("whole", "adapter only", "without a prefix", "trainable", "wrapped")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", ["plain", "dora", "saved"])
def test_adapter_of_a_dcp_is_loaded_by_peft(
    variant: str, form: str, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    found = trained(variant)
    dcp.save(dict(state_dicts(peft_model(found)))[form], checkpoint_id=tmp_path / "step")
    report = ckptx.convert(
        "to-peft", tmp_path / "step", tmp_path / "out", adapter_config=found.adapter / "adapter_config.json"
    )
    ledger = report.ledger
    assert ledger["source"] == ledger["written"] + ledger["dropped"]
    assert (
        read_file(tmp_path / "out/adapter_model.safetensors").keys()
        == read_file(found.adapter / "adapter_model.safetensors").keys()
    )
    assert ckptx.verify(found.adapter, tmp_path / "out").exit == 0
    for mine, expected in zip(outputs(peft_model(found, tmp_path / "out"), tokens()), found.outputs, strict=True):
        assert torch.equal(mine, expected)


def test_config_from_alpha_is_that_of_plain_lora(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    found = trained("plain")
    dcp.save({"model": peft_model(found).state_dict()}, checkpoint_id=tmp_path / "step")
    report = ckptx.convert("to-peft", tmp_path / "step", tmp_path / "out", alpha="6", base_model_name="org/name")
    assert any("rsLoRA" in note for note in report.notes)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 6, "org/name")
    for mine, expected in zip(outputs(peft_model(found, tmp_path / "out"), tokens()), found.outputs, strict=True):
        assert torch.equal(mine, expected)


def test_alpha_is_required(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    found = trained("plain")
    dcp.save({"model": peft_model(found).state_dict()}, checkpoint_id=tmp_path / "step")
    with pytest.raises(InputError, match=r"--adapter-config FILE .* or --alpha N"):
        ckptx.convert("to-peft", tmp_path / "step", tmp_path / "out")
    for alpha in ("0", "nan", "much"):
        with pytest.raises(UsageError, match="--alpha"):
            ckptx.convert("to-peft", tmp_path / "step", tmp_path / "out", alpha=alpha)
    with pytest.raises(InputError, match="rank 4, but the config gives it rank 8"):
        values = json.loads((found.adapter / "adapter_config.json").read_text())
        (tmp_path / "other.json").write_text(json.dumps({**values, "r": 8}))
        ckptx.convert("to-peft", tmp_path / "step", tmp_path / "out", adapter_config=tmp_path / "other.json")
    assert not (tmp_path / "out").exists()


def test_model_without_an_adapter_is_rejected(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no LoRA tensors"):
        ckptx.convert("to-peft", trained("plain").model, tmp_path / "out", alpha="6")


def test_model_with_an_adapter_is_not_converted_as_a_model(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    found = trained("plain")
    dcp.save({"model": peft_model(found).state_dict()}, checkpoint_id=tmp_path / "step")
    with pytest.raises(UnsupportedError, match="convert to-peft"):
        ckptx.convert("to-hf", tmp_path / "step", tmp_path / "out", base=found.model)


def test_adapter_becomes_a_dcp_and_returns(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    found = trained("saved")
    ckptx.convert("to-dcp", found.adapter, tmp_path / "dcp")
    state = {name: torch.empty_like(each) for name, each in get_peft_model_state_dict(peft_model(found)).items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")  # what accelerate asks for when it resumes
    stored = read_file(found.adapter / "adapter_model.safetensors")
    assert all(torch.equal(state[name], stored[name]) for name in stored)
    ckptx.convert("to-peft", tmp_path / "dcp", tmp_path / "back")  # the config was copied
    assert ckptx.verify(found.adapter, tmp_path / "back").exit == 0


def test_config_above_the_checkpoint_is_used(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    """Trainer writes the config into `checkpoint-N`, and the DCP into a directory in it."""
    found = trained("patterns")
    dcp.save(
        {"model": get_peft_model_state_dict(peft_model(found))},
        checkpoint_id=tmp_path / "checkpoint-3/pytorch_model_fsdp_0",
    )
    shutil.copy(found.adapter / "adapter_config.json", tmp_path / "checkpoint-3")
    ckptx.convert("to-peft", tmp_path / "checkpoint-3", tmp_path / "out")
    assert ckptx.verify(found.adapter, tmp_path / "out").exit == 0


def test_merge_reads_the_adapter_of_a_dcp(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    found = trained("plain")
    dcp.save({"model": peft_model(found).state_dict()}, checkpoint_id=tmp_path / "step")
    ckptx.merge(found.model, found.adapter, tmp_path / "expected")
    ckptx.merge(found.model, tmp_path / "step", tmp_path / "out", alpha="6")
    assert ckptx.verify(tmp_path / "expected", tmp_path / "out").exit == 0


@pytest.mark.parametrize("writer", [peft_ranks.save_dcp, peft_ranks.save_with_accelerate])
def test_adapter_that_two_ranks_trained(
    writer: Callable[..., Any], pool: GlooPool, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    """Two ranks train and save an adapter; PEFT loads it, and it has the tensors that they had."""
    found = trained("plain")
    weights = pool.run(writer, 2, found.model, found.adapter, tmp_path / "step")[0]
    ckptx.convert("to-peft", tmp_path / "step", tmp_path / "out", alpha="6")
    loaded = dict(peft_model(found, tmp_path / "out").named_parameters())
    assert len(weights) == 28
    for name, tensor in weights.items():
        assert torch.equal(loaded[name.removeprefix("_orig_mod.")], tensor), name
    assert not torch.equal(tensor, dict(peft_model(found).named_parameters())[name])  # they trained
    ckptx.merge(found.model, tmp_path / "step", tmp_path / "merged", alpha="6")
    for mine, expected in zip(
        outputs(load(tmp_path / "merged"), tokens()),
        outputs(peft_model(found, tmp_path / "out"), tokens()),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_verl_records_alpha(pool: GlooPool, trained: Callable[[str], Trained], tmp_path: Path) -> None:
    found, step = trained("plain"), tmp_path / "step"
    step.mkdir()
    weights = pool.run(peft_ranks.save_rank_files, 2, found.model, found.adapter, step)[0]
    (step / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 0, "task_type": "CAUSAL_LM"}))
    with pytest.raises(InputError, match="lora_alpha is 0"):
        ckptx.convert("to-peft", step, tmp_path / "out")
    (step / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"}))
    ckptx.convert("to-peft", step, tmp_path / "out")
    loaded = dict(peft_model(found, tmp_path / "out").named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def test_torchtitan_adapter_follows_the_rows_of_its_weight(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    """The sum that torchtitan computes, converted, is the merged model."""
    found = trained("plain")
    ckptx.convert("to-dcp", found.model, tmp_path / "titan", names="torchtitan")
    state: dict[str, torch.Tensor] = {}
    for name, entry in ckptx.open_checkpoint(tmp_path / "titan").tensors.items():
        state[name] = torch.empty(entry.shape)
    dcp.load(state, checkpoint_id=tmp_path / "titan")
    generator = torch.Generator().manual_seed(0)
    adapter, merged = {}, dict(state)
    for name, weight in state.items():
        if name.startswith("layers.") and weight.dim() == 2:
            module = name.removesuffix(".weight")
            a = torch.randn(4, weight.shape[1], generator=generator) * 0.2
            b = torch.randn(weight.shape[0], 4, generator=generator) * 0.2
            adapter |= {f"{module}.lora_a.weight": a, f"{module}.lora_b.weight": b}
            merged[name] = (weight.double() + 1.5 * (b.double() @ a.double())).float()
    dcp.save({**state, **adapter}, checkpoint_id=tmp_path / "trained")
    dcp.save(merged, checkpoint_id=tmp_path / "merged in torchtitan")
    ckptx.convert("to-hf", tmp_path / "merged in torchtitan", tmp_path / "expected", base=found.model)
    ckptx.merge(found.model, tmp_path / "trained", tmp_path / "out", alpha="6")
    assert ckptx.verify(tmp_path / "expected", tmp_path / "out").exit == 0
    with pytest.raises(InputError, match="--base PATH"):
        ckptx.convert("to-peft", tmp_path / "trained", tmp_path / "adapter", alpha="6")
    ckptx.convert("to-peft", tmp_path / "trained", tmp_path / "adapter", alpha="6", base=found.model)
    ckptx.merge(found.model, tmp_path / "adapter", tmp_path / "again")
    assert ckptx.verify(tmp_path / "expected", tmp_path / "again").exit == 0
