"""`--weights masters`: which tensors are converted and compared in place of the weights of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import InputError
from tests.conversion.steps import TIED
from tests.support.catalog_tensors import read_checkpoint, read_safetensors
from tests.support.checkpoint_writers import Value, llama, value, write_dcp, write_hf
from tests.support.forged_deepspeed import Checkpoint, bf16, numbers

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def masters_of(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Random fp32 masters, one for each tensor but the output head."""
    return {name: value("F32", *shape, seed=100 + i) for i, (name, (_, shape, _)) in enumerate(tensors.items())}


def in_state(tensors: Mapping[str, Value], leaf: str = "master_param") -> dict[str, Value]:
    return {f"optimizer.state.{name}.{leaf}": tensor for name, tensor in tensors.items()}


def write_tied(root: Path, prefix: str = "", **changes: Value | None) -> tuple[Path, dict[str, Value]]:
    """Write a Llama with a tied head that is stored twice, masters of all other names, and moments.

    Args:
        root: Directory to write.
        prefix: Prefix of the weights, which the optimizer state lacks.
        changes: Stored tensors to add, or to leave out if None.
    """
    weights = llama()
    weights[HEAD] = weights[EMBED]
    masters = {name: each for name, each in masters_of(weights).items() if name != HEAD}
    stored = {f"{prefix}{name}": each for name, each in weights.items()}
    stored |= in_state(masters) | in_state(masters_of(masters), "exp_avg")
    for name, tensor in changes.items():
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    write_dcp(root, stored, config=TIED)
    return root, {**masters, HEAD: masters[EMBED]}


@pytest.mark.parametrize("prefix", ["", "model.", "module."])
def test_masters_replace_weights_and_tied_copies(prefix: str, tmp_path: Path) -> None:
    checkpoint, masters = write_tied(tmp_path / "dcp", prefix)
    report = ckptx.convert("to-hf", checkpoint, tmp_path / "hf", weights="masters")
    found = read_safetensors(tmp_path / "hf")
    assert {**found, HEAD: found[EMBED]} == masters
    reasons = {each["name"]: each["reason"] for each in report.dropped}
    assert {name for name, reason in reasons.items() if "fp32 master" in reason} == {
        f"{prefix}{name}" for name in masters
    }
    assert report.ledger["source"] == report.ledger["written"] + report.ledger["dropped"] + report.ledger["tied"]
    assert report.ledger["written"] == len(masters) - 1
    assert not ckptx.verify(checkpoint, tmp_path / "hf", weights="masters").exit
    assert ckptx.verify(checkpoint, tmp_path / "hf").exit == 1


def test_a_dcp_keeps_the_other_state(tmp_path: Path) -> None:
    checkpoint, masters = write_tied(tmp_path / "dcp")
    ckptx.reshard(checkpoint, tmp_path / "out", tp=2, weights="masters")
    moments = {name: each for name, each in read_checkpoint(checkpoint).items() if name.endswith("exp_avg")}
    moments[f"optimizer.state.{HEAD}.exp_avg"] = moments[f"optimizer.state.{EMBED}.exp_avg"]
    assert read_checkpoint(tmp_path / "out") == {**masters, **moments}


def test_weights_without_master_are_unchanged(tmp_path: Path) -> None:
    """Frozen weights and buffers keep their bytes and dtype, and a note has their number."""
    checkpoint = Checkpoint([numbers((5, 3), (7,))], 2, 2, numbers((3,), prefix="frozen"), shared={"tied": "w0"})
    report = ckptx.convert("to-hf", checkpoint.write(tmp_path / "ds"), tmp_path / "hf", base="none", weights="masters")
    expected = {name: ("F32", each.shape, each.tobytes()) for name, each in checkpoint.parameters().items()}
    expected |= {name: ("BF16", each.shape, bf16(each)) for name, each in checkpoint.frozen.items()}
    assert read_safetensors(tmp_path / "hf") == {**expected, "tied": expected["w0"]}
    assert 'weights: 3 fp32 master weights of the optimizer; 1 tensor without one as stored, "frozen0"' in report.notes
    assert not ckptx.verify(tmp_path / "ds", tmp_path / "hf", weights="masters").exit


def test_dtypes_of_masters_are_cast(tmp_path: Path) -> None:
    checkpoint = Checkpoint([numbers((5, 3), (7,))], 2, 2).write(tmp_path / "ds")
    ckptx.convert("to-hf", checkpoint, tmp_path / "cast", base="none", weights="masters", dtype="bf16")
    ckptx.convert("to-hf", checkpoint, tmp_path / "stored", base="none")
    assert read_safetensors(tmp_path / "cast") == read_safetensors(tmp_path / "stored")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({f"optimizer.state.{NORM}.master_param": value("F32", 4)}, r"has shape \[4\], but tensor .* has \[8\]"),
        ({"optimizer.state.other.weight.master_param": value("F32", 8)}, "belongs to no tensor of the model"),
        ({f"optimizer.state.{NORM}.group.master_param": value("F32", 8)}, "belongs to no tensor of the model"),
        ({f"optim.state.{NORM}.master_param": value("F32", 8)}, "has two master weights"),
    ],
)
def test_masters_that_do_not_fit_are_refused(changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    checkpoint, _ = write_tied(tmp_path / "dcp", **changes)
    with pytest.raises(InputError, match=error):
        ckptx.convert("to-hf", checkpoint, tmp_path / "hf", weights="masters")
    assert not (tmp_path / "hf").exists()


def test_checkpoints_without_masters_are_refused(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", llama(), config=TIED)
    stage_3 = Checkpoint([numbers((5, 3))], 2, 3).write(tmp_path / "ds")
    with pytest.raises(InputError, match=r"requires fp32 master weights in the optimizer state, .* there are none; "):
        ckptx.convert("to-dcp", tmp_path / "hf", tmp_path / "out", weights="masters")
    with pytest.raises(InputError, match="the weights themselves are the masters"):
        ckptx.convert("to-hf", stage_3, tmp_path / "out", base="none", weights="masters")
    with pytest.raises(InputError, match=r"neither .*hf nor .*hf has fp32 master weights"):
        ckptx.verify(tmp_path / "hf", tmp_path / "hf", weights="masters")
