"""Steps that hold several models, as stock torch writes them: the one that is asked for loads and computes the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptx
from ckptx.errors import InputError
from tests.support.models import EVERY, assert_same_outputs, load, outputs, write
from tests.support.slow import slow_but
from tests.support.torch_dcp import load as stock_load

CLASSES = ("llama-tied", "llama-both-different", "gpt2", "t5", "bert-pretraining", "qwen3-moe", "mixtral", "gemma3-vlm")


def save(state: dict[str, Any], path: Path) -> Path:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path


def moved(state: dict[str, torch.Tensor], by: float) -> dict[str, torch.Tensor]:
    """Other values under the same names; what shares storage still does."""
    changed: dict[int, torch.Tensor] = {}
    for tensor in state.values():
        changed.setdefault(tensor.data_ptr(), tensor.detach() + by if tensor.is_floating_point() else tensor.detach())
    return {name: changed[tensor.data_ptr()] for name, tensor in state.items()}


@pytest.mark.parametrize("recipe", slow_but(CLASSES, CLASSES[:2]))
@pytest.mark.parametrize(
    "where", [("model", "ema"), ("student", "teacher"), ("actor", "ref_policy"), ("policy", "critic")]
)
def test_each_of_two_models_is_published_when_it_is_asked_for(
    recipe: str, where: tuple[str, str], tmp_path: Path
) -> None:
    write(EVERY[recipe], tmp_path / "hf")
    model = load(tmp_path / "hf")
    models = {name: moved(model.state_dict(), by) for name, by in zip(where, (0.25, 0.5), strict=True)}
    saved = save({**models, "train_state": {"step": torch.tensor(3)}}, tmp_path / "dcp")
    with pytest.raises(InputError, match="holds 2 complete models") as refused:
        ckptx.convert("dcp2hf", saved, tmp_path / "none", base=str(tmp_path / "hf"))
    assert all(f'under "{name}."' in str(refused.value) for name in where)
    for name, other in zip(where, reversed(where), strict=True):
        out = tmp_path / name
        report = ckptx.convert("dcp2hf", saved, out, base=str(tmp_path / "hf"), source_prefix=f"{name}.")
        assert {row["reason"] for row in report.dropped} == {
            f'second model under "{other}.", not converted',
            "training state is not converted to HF",
        }
        model.load_state_dict(models[name])
        expected = outputs(model, EVERY[recipe].inputs())
        assert_same_outputs(outputs(load(out), EVERY[recipe].inputs()), expected)


def test_verify_run_takes_the_model_that_is_asked_for(tmp_path: Path) -> None:
    write(EVERY["llama-tied"], tmp_path / "hf")
    state = load(tmp_path / "hf").state_dict()
    saved = save({"model": dict(state), "ema": moved(state, 0.5)}, tmp_path / "dcp")
    shutil.copy(tmp_path / "hf" / "config.json", saved)
    for first, second in ((tmp_path / "hf", saved), (saved, tmp_path / "hf")):
        with pytest.raises(InputError, match="holds 2 complete models"):
            ckptx.verify(first, second, run=True, backward=False)
        assert ckptx.verify(first, second, run=True, backward=False, source_prefix="model.").exit == 0
        assert ckptx.verify(first, second, run=True, backward=False, source_prefix="ema.").exit == 1
        with pytest.raises(InputError, match="holds 2 complete models"):
            ckptx.verify(first, second, run=True, backward=False, source_prefix="teacher.")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("wrapper", ["_orig_mod", "_fsdp_wrapped_module", "module"])
def test_a_dcp_keeps_both_names_of_a_tensor_and_of_its_state(wrapper: str, tp: int, tmp_path: Path) -> None:
    """Stock torch reads the same bytes under each."""
    write(EVERY["llama-tied"], tmp_path / "hf")
    state = {name: tensor.detach() for name, tensor in load(tmp_path / "hf").state_dict().items()}
    name = "model.norm.weight"
    both = {
        **state,
        f"{wrapper}.{name}": state[name].clone(),
        **{f"optimizer.state.{each}.exp_avg": torch.full_like(tensor, 0.5) for each, tensor in state.items()},
        f"optimizer.state.{wrapper}.{name}.exp_avg": torch.full_like(state[name], 0.5),
    }
    saved = save(both, tmp_path / "dcp")
    report = ckptx.reshard(saved, tmp_path / "out", base=str(tmp_path / "hf"), tp=tp)
    loaded = stock_load(tmp_path / "out")
    assert loaded.keys() == both.keys()
    assert all(torch.equal(loaded[each], both[each]) for each in both)
    assert report.ledger["source"] == len(both) == report.ledger["written"] + report.ledger["tied"]
    assert ckptx.verify(saved, tmp_path / "out").exit == 0
    both[f"optimizer.state.{wrapper}.{name}.exp_avg"] += 1
    saved = save(both, tmp_path / "other")
    with pytest.raises(InputError, match="one parameter under two names"):
        ckptx.reshard(saved, tmp_path / "none", base=str(tmp_path / "hf"), tp=tp)
    assert ckptx.convert("dcp2hf", saved, tmp_path / "plain", base=str(tmp_path / "hf")).exit == 0
