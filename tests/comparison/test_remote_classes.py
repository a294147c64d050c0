"""Comparisons of a model whose class only its own code tells: tied weights and prefixes of names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckptx
from ckptx.errors import InputError
from tests.support.checkpoint_writers import flip, tree_bytes, write_dcp
from tests.support.tied_remote_model import (
    CONFIG,
    HEAD,
    optimizer_state,
    tensors,
    write_code,
    write_model,
)  # fmt: skip


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers import the code of the model in a directory of the test."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def reshard(source: Path, out: Path, **mesh: int) -> Path:
    ckptx.reshard(source, out, trust_remote_code=True, **mesh)
    return out


# Tied weights


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2}])
def test_a_tie_in_the_manifest_is_no_difference(mesh: dict[str, int], swapped: bool, tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf")
    pair = source, reshard(source, tmp_path / "out", **mesh)
    report = ckptx.verify(*(pair[::-1] if swapped else pair))
    assert report.exit == 0 and report.compared == len(tensors()) + 1
    compared = ckptx.diff(*pair)
    assert compared.exit == 0 and [each["name"] for each in compared.tied_tensors] == [HEAD]


@pytest.mark.usefixtures("modules")
def test_the_bytes_of_a_recorded_tie_are_compared(tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf")
    out = reshard(source, tmp_path / "out", pp=2)
    (last,) = [name for name in tree_bytes(out) if name.startswith("shard-00002")]
    data = (out / last).read_bytes()
    length = int.from_bytes(data[:8], "little")
    begin, _ = json.loads(data[8 : 8 + length])[HEAD]["data_offsets"]
    flip(out / last, 8 + length + begin)
    report = ckptx.verify(source, out)
    assert report.exit == 1 and [(each["name"], each["what"]) for each in report.differing] == [(HEAD, "content")]


@pytest.mark.usefixtures("modules")
def test_a_tie_without_a_manifest_needs_the_code(tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf")
    out = reshard(source, tmp_path / "out", pp=2)
    (out / "ckptx.json").unlink()
    for command in (ckptx.verify, ckptx.diff):
        report = command(source, out)
        assert report.exit == 1 and [each["name"] for each in report.differing] == [HEAD]
        (note,) = [each for each in report.notes if "missing names may be tied" in each]
        assert "pass --trust-remote-code to use its code, modeling_mine.MineForCausalLM of auto_map" in note
        report = command(source, out, trust_remote_code=True)
        assert report.exit == 0 and not any("may be tied" in each for each in report.notes)


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_training_state_of_a_recorded_tie_is_no_difference(prefix: str, swapped: bool, tmp_path: Path) -> None:
    model = {prefix + name: each for name, each in tensors().items()}
    saved = write_code(write_dcp(tmp_path / "step", model | optimizer_state(), config=CONFIG))
    options = {"source_prefix": prefix} if prefix else {}
    ckptx.reshard(saved, tmp_path / "out", tp=2, trust_remote_code=True, optimizer="keep", to="dcp", **options)
    pair = saved, tmp_path / "out"
    report = ckptx.verify(*(pair[::-1] if swapped else pair), strict=True)
    assert report.exit == 0 and not any(report.not_compared.values())


# Prefixes


def write_step(root: Path, prefix: str) -> Path:
    return write_dcp(root, {prefix + name: each for name, each in tensors().items()} | optimizer_state())


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("prefix", ["model.", "model._orig_mod.", "app.net.", "model.module."])
def test_the_prefix_that_conversion_removes_is_found(prefix: str, swapped: bool, tmp_path: Path) -> None:
    base, saved = write_model(tmp_path / "base"), write_step(tmp_path / "step", prefix)
    converted = ckptx.convert("dcp2hf", saved, tmp_path / "hf", base=base)
    pair = saved, tmp_path / "hf"
    for command in (ckptx.verify, ckptx.diff):
        report = command(*(pair[::-1] if swapped else pair))
        assert report.exit == 0 and report.compared == len(tensors())
        (note,) = [each for each in report.notes if "removed from names" in each]
        assert f'{saved}: prefix "{converted.prefix}"' in note
    assert ckptx.verify(*pair, source_prefix=prefix).exit == 0


@pytest.mark.parametrize("lost", [False, True])
def test_a_missing_name_does_not_hide_the_prefix(lost: bool, tmp_path: Path) -> None:
    base, names = write_model(tmp_path / "base"), list(tensors())
    kept = {name: each for name, each in tensors().items() if not lost or name != names[3]}
    saved = write_dcp(tmp_path / "step", {f"model.{name}": each for name, each in kept.items()})
    report = ckptx.verify(base, saved)
    assert [each["name"] for each in report.differing] == ([names[3]] if lost else [])


@pytest.mark.parametrize("root", ["trainer", "train_state", "state.trainer"])
def test_an_explicit_prefix_comes_before_roles(root: str, tmp_path: Path) -> None:
    base, prefix = write_model(tmp_path / "base"), f"{root}.model.net."
    saved = write_step(tmp_path / "step", prefix)
    report = ckptx.convert("dcp2hf", saved, tmp_path / "hf", base=base, source_prefix=prefix)
    assert report.prefix == prefix and ckptx.verify(base, tmp_path / "hf").exit == 0
    assert ckptx.verify(base, saved, source_prefix=prefix).exit == 0


@pytest.mark.parametrize(
    ("prefix", "fault"),
    [
        ("nothing.", 'no tensor name begins with "nothing."'),
        ("trainer.lr_scheduler.", 'the tensors under "trainer.lr_scheduler." are state of a trainer, not a model'),
        ("optimizer.state.", 'the tensors under "optimizer.state." are optimizer state, not a model'),
    ],
)
def test_an_error_about_a_prefix_is_true(prefix: str, fault: str, tmp_path: Path) -> None:
    state = {"trainer.lr_scheduler.scheduler.step": next(iter(tensors().values()))}
    saved = write_dcp(tmp_path / "step", tensors() | optimizer_state() | state, config=CONFIG)
    with pytest.raises(InputError) as error:
        ckptx.convert("dcp2hf", saved, tmp_path / "hf", source_prefix=prefix)
    assert fault in str(error.value)
