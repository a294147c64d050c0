"""Names that look like patterns, or like parts of names: refused, or carried like any other, by every command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import CkptxError, UnsupportedError
from tests.fuzz.seeds import CONFIG
from tests.support.checkpoint_writers import llama, write_dcp, write_hf

STARRED = ["*", "*.*", "model.*", "model.layers.*", "model.layers.*.mlp.up_proj.weight", "layers.*.mlp.up_proj.weight"]
ODD = [
    "8", "8.0", "0.weight", "model.layers.²", "model.layers.².mlp.up_proj.weight", "model.layers.٣.mlp.up_proj.weight",
    "model.layers.00.mlp.up_proj.weight", "model.layers.007.x", "model.layers.1e3.x", "a**b", "model.*x.weight",
    "a..b", "model.", "model.layers.", "model.layers..mlp.up_proj.weight",
]  # fmt: skip
USUAL = "model.layers.0.mlp.up_proj.weight"
Command = Callable[[Path, Path, bool], Any]
WRITING: dict[str, Command] = {
    "convert": lambda src, dst, misfit: ckptx.convert(
        "dcp2hf" if (src / ".metadata").exists() else "hf2dcp", src, dst, allow_config_mismatch=misfit
    ),
    "reshard dcp": lambda src, dst, misfit: ckptx.reshard(src, dst, tp=2, pp=2, to="dcp", allow_config_mismatch=misfit),
    "reshard hf": lambda src, dst, misfit: ckptx.reshard(
        src, dst, tp=2, pp=2, to="safetensors", allow_config_mismatch=misfit
    ),
}
LOOKING: dict[str, Callable[[Path], Any]] = {
    "inspect": ckptx.inspect,
    "diff": lambda src: ckptx.diff(src, src),
    "verify": lambda src: ckptx.verify(src, src),
}


def checkpoint(root: Path, kind: str, name: str, *, renamed: bool) -> Path:
    """A small Llama with a tensor of that name, one more or in the place of another."""
    tensors = dict(llama())
    value = tensors.pop(USUAL) if renamed else tensors[USUAL]
    return {"hf": write_hf, "dcp": write_dcp}[kind](root, {**tensors, name: value}, config=CONFIG)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("renamed", [False, True], ids=["one more", "renamed"])
@pytest.mark.parametrize("kind", ["hf", "dcp"])
@pytest.mark.parametrize("name", ODD)
def test_an_odd_name_is_one_like_any_other(tmp_path: Path, name: str, kind: str, renamed: bool) -> None:
    source = checkpoint(tmp_path / "src", kind, name, renamed=renamed)
    for look in LOOKING.values():
        look(source)
    made = 0
    for number, command in enumerate(WRITING.values()):
        for misfit in (False, True):
            output = tmp_path / f"out-{number}-{misfit}"
            try:
                command(source, output, misfit)
            except CkptxError as error:
                assert not misfit or error.exit_code == 4, str(error)
            else:
                made += 1
                assert ckptx.verify(source, output).exit == 0
    assert made


@pytest.mark.parametrize("kind", ["hf", "dcp"])
@pytest.mark.parametrize("name", STARRED)
def test_a_star_is_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    source = checkpoint(tmp_path / "src", kind, name, renamed=False)
    for look in LOOKING.values():
        with pytest.raises(UnsupportedError, match="stands for an index"):
            look(source)
    for command in WRITING.values():
        with pytest.raises(UnsupportedError, match="stands for an index"):
            command(source, tmp_path / "out", True)
        assert not (tmp_path / "out").exists()
