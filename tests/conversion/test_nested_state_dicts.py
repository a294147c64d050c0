"""`torch.save({"model": model.state_dict(), "optimizer": ...})`, as training loops write it, in every direction."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptx
from ckptx.errors import InputError, UsageError
from tests.support.checkpoint_writers import LLAMA, llama, write_hf

CONFIG = LLAMA | {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "hf", llama(), config=CONFIG)


def trained(hf: Path, key: str, **others: Any) -> Path:
    """Save the model under a key, with others beside it, next to its config."""
    root = hf.parent / "run"
    root.mkdir()
    (root / "config.json").write_text(json.dumps(CONFIG))
    torch.save({key: load_file(hf / "model.safetensors"), **others}, root / "step-5.pt")
    return root / "step-5.pt"


def adam(hf: Path) -> dict[str, Any]:
    tensors = load_file(hf / "model.safetensors").values()
    state = {
        number: {"step": torch.tensor(5.0), "exp_avg": torch.ones_like(each)} for number, each in enumerate(tensors)
    }
    return {"state": state, "param_groups": [{"lr": 1e-3, "params": list(state)}]}


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "module", "net", "app.model"])
def test_the_model_is_found_and_the_rest_reported(hf: Path, tmp_path: Path, key: str) -> None:
    count = len(load_file(hf / "model.safetensors"))
    source = trained(hf, key, optimizer=adam(hf), rng=torch.get_rng_state(), step=5)
    report = ckptx.convert("to-hf", source, tmp_path / "out")
    assert ckptx.verify(hf, tmp_path / "out").ok and ckptx.verify(hf, source).ok and ckptx.diff(hf, source).ok
    assert {row["name"] for row in report.dropped} == {
        "rng",
        *(f"optimizer.state.{number}.{name}" for number in range(count) for name in ("step", "exp_avg")),
    }
    assert any(
        "values other than tensors ignored, in 'optimizer.param_groups', 'step'" in note for note in report.notes
    )


def test_it_is_resharded_and_becomes_a_dcp_that_torch_reads(hf: Path, tmp_path: Path) -> None:
    source = trained(hf, "model", optimizer=adam(hf))
    ckptx.reshard(source, tmp_path / "tp2", tp=2)
    assert ckptx.verify(hf, tmp_path / "tp2").ok
    ckptx.convert("to-dcp", source, tmp_path / "dcp")
    expected = {f"model.{name}": tensor for name, tensor in load_file(hf / "model.safetensors").items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata.keys() == expected.keys()


def test_two_models_are_refused_until_one_is_chosen(hf: Path, tmp_path: Path) -> None:
    average = {name: tensor + 1 for name, tensor in load_file(hf / "model.safetensors").items()}
    source = trained(hf, "model", ema=average)
    with pytest.raises(InputError, match=r'holds 2 complete models: under "ema\.", under "model\."; choose one with'):
        ckptx.convert("to-hf", source, tmp_path / "out")
    ckptx.convert("to-hf", source, tmp_path / "out", source_prefix="ema.")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == average.keys() and all(torch.equal(found[name], each) for name, each in average.items())


def test_optimizer_state_cannot_be_kept(hf: Path, tmp_path: Path) -> None:
    source = trained(hf, "model", optimizer=adam(hf))
    with pytest.raises(
        UsageError,
        match="--optimizer keep requires a DCP, per-rank FSDP files, DeepSpeed or torch_checkpointing; SRC is",
    ):
        ckptx.convert("to-dcp", source, tmp_path / "out", optimizer="keep")


def test_names_get_no_prefix_and_the_error_states_the_format(hf: Path, tmp_path: Path) -> None:
    source = trained(hf, "model")
    with pytest.raises(UsageError) as caught:
        ckptx.convert("to-dcp", source, tmp_path / "out", prefix="app.")
    assert str(caught.value) == (
        "--prefix requires HF or sharded safetensors files; SRC is a training checkpoint (format: torch.save dict), "
        "whose names are kept; use --source-prefix to select the model in it"
    )


def test_the_model_is_selected_by_a_prefix_as_in_a_dcp(hf: Path, tmp_path: Path) -> None:
    source = trained(hf, "model")
    ckptx.convert("to-dcp", source, tmp_path / "dcp", source_prefix="model.")
    assert ckptx.verify(hf, tmp_path / "dcp").ok
    assert ckptx.inspect(source, source_prefix="model.").prefix == "model."


@pytest.mark.parametrize("kind", ["HF safetensors", "sharded safetensors"])
def test_options_of_training_checkpoints_are_refused_for_other_formats(hf: Path, tmp_path: Path, kind: str) -> None:
    source = hf
    if kind != "HF safetensors":
        source = tmp_path / "sharded"
        ckptx.reshard(hf, source, tp=2)
    expected = "(a DCP, per-rank FSDP files, DeepSpeed, torch_checkpointing or a file of torch.save)"
    for call, subject in (
        (lambda: ckptx.convert("to-dcp", source, tmp_path / "out", source_prefix="model."), "SRC"),
        (lambda: ckptx.inspect(source, source_prefix="model."), str(source)),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert str(caught.value) == (
            f"--source-prefix requires a training checkpoint {expected}; {subject} is not one (format: {kind}); "
            "leave out --source-prefix"
        )
    with pytest.raises(UsageError, match=re.escape(f"SRC is not one (format: {kind}) and has no optimizer state")):
        ckptx.convert("to-dcp", source, tmp_path / "out", optimizer="drop")


@pytest.mark.parametrize("key", ["model", "ema"])
def test_the_wrappers_of_a_model_that_is_not_converted_are_not_counted(hf: Path, tmp_path: Path, key: str) -> None:
    plain = load_file(hf / "model.safetensors")
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in plain.items()}
    source = trained(hf, "model", ema=plain)
    torch.save({"model": wrapped, "ema": plain}, source)
    notes = ckptx.convert("to-hf", source, tmp_path / "out", source_prefix=f"{key}.").notes
    expected = [f'wrapper "_orig_mod." removed from {len(plain)} names'] if key == "model" else []
    assert [note for note in notes if "wrapper" in note] == expected
