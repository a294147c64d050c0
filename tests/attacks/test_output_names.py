"""Names out of a checkpoint that could become names of files: none leads out of the output, none hides another.

File names of a manifest have tests of their own; here are those of the files beside the weights, of tensors, and of
what an index or `.metadata` points at.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import CkptxError
from tests.support.checkpoint_writers import (
    INDEX,
    LLAMA,
    Value,
    tree_bytes,
    value,
    write_dcp,
    write_hf,
    write_index,
    write_safetensors,
)

OUTPUTS: dict[str, Callable[[Path, Path], Any]] = {
    "dcp": lambda src, dst: ckptx.reshard(src, dst, tp=2, to="dcp", base="none"),
    "sharded": lambda src, dst: ckptx.reshard(src, dst, tp=2, to="safetensors", base="none"),
}
CONFIGURED: dict[str, Callable[[Path, Path], Any]] = {
    "dcp": lambda src, dst: ckptx.convert("hf2dcp", src, dst),
    "sharded": lambda src, dst: ckptx.reshard(src, dst, to="safetensors"),
}
NAMES = [
    "../x", "/etc/x", "a/../../x", "..", ".", "", "a\0b", "a\nb", "\x1b[2J", "\u202ea", "\u2028", "a\\b", "-", " ",
    "x" * 3000,
    "ckptx.json", "config.json", ".metadata", "__0_0.distcp", "model.safetensors", "é", "__metadata__x", "__metadata",
]  # fmt: skip
TENSORS: dict[str, Value] = {"a": value("F32", 4, 2), "b": value("F32", 6, seed=1)}


class Box:
    """A directory in which a source lies, with files around it that nobody may touch."""

    def __init__(self, root: Path) -> None:
        (root / "home").mkdir(parents=True)
        (root / "home" / "canary").write_text("mine\n")
        self.root, self.source, self.out = root, root / "deep" / "in", root / "deep" / "out"

    def run(self, make: Callable[[Path, Path], Any]) -> str | None:
        """The error, or None for an output that holds what the source holds; nothing around it changed."""
        before = tree_bytes(self.root)
        said = None
        try:
            make(self.source, self.out)
        except CkptxError as error:
            assert error.exit_code in (3, 4, 5), repr(error)
            said = str(error)
        after = {name: data for name, data in tree_bytes(self.root).items() if not name.startswith("deep/out/")}
        assert after == before
        assert os.listdir(self.root / "deep") == ["in"] or said is None
        if said is None:
            assert ckptx.verify(self.source, self.out).exit == 0
        return said


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path / "box")


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("output", OUTPUTS)
def test_tensors_are_called_anything(box: Box, output: str, name: str) -> None:
    """Names of tensors are data, and never names of files."""
    write_hf(box.source, {**TENSORS, name: value("F32", 3, seed=2)}, config=None)
    assert box.run(OUTPUTS[output]) is None


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_tensors_of_a_dcp_are_called_anything(box: Box, name: str) -> None:
    write_dcp(box.source, {**TENSORS, name: value("F32", 3, seed=2)})
    assert box.run(lambda src, dst: ckptx.convert("dcp2hf", src, dst, base="none")) is None


@pytest.mark.parametrize("to", ["huggingface", "sharded"])
def test_the_name_that_safetensors_keeps_for_itself_is_refused(box: Box, to: str) -> None:
    write_dcp(box.source, {**TENSORS, "__metadata__": value("F32", 3, seed=2)})
    make = OUTPUTS["sharded"] if to == "sharded" else lambda src, dst: ckptx.convert("dcp2hf", src, dst, base="none")
    assert 'tensor "__metadata__"' in str(box.run(make))


SIDECARS = [
    "a\nb.json", "\x1b[2J.json", "\u202e.json", "a\\b.json", "\udcff.json", " .json", "x" * 250 + ".json",
    "ckptx.json/x.json", ".metadata/x.json", "__0_0.distcp/x.json", "CKPTX.json", "model.safetensors.d/x.json",
    "shard-00001-model-00001-of-00001.safetensors/x.json", ".hidden", "-rf.json", "...", "a/b/c/d/e.json",
    ".x.ckptx-partial", ".x.ckptx-old/a.json",
]  # fmt: skip


@pytest.mark.parametrize("name", SIDECARS, ids=ascii)
@pytest.mark.parametrize("output", CONFIGURED)
def test_files_beside_the_weights_are_called_anything(box: Box, output: str, name: str) -> None:
    """They are carried, or left behind and named; none takes the place of a file of the output."""
    write_hf(box.source, TENSORS, config={**LLAMA, "architectures": ["Nobody"], "model_type": "nobody"})
    path = box.source / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b'{"mine": 1}')
    said = box.run(CONFIGURED[output])
    if said is None:
        manifest = json.loads((box.out / "ckptx.json").read_text())
        assert manifest["files"].keys().isdisjoint(manifest["sidecars"])
        ckptx.inspect(box.out, ranks=True)
        back = box.out.rename(box.root / "deep" / "chained")
        if output == "dcp":
            ckptx.convert("dcp2hf", back, box.out)
            assert ckptx.verify(box.source, box.out).exit == 0


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/x.safetensors",
        "a/../../x.safetensors",
        "",
        "\0",
        "a\\b.safetensors",
        "..",
        ".",
        INDEX,
        "config.json",
    ],
    ids=ascii,
)
def test_an_index_points_at_anything(box: Box, name: str) -> None:
    write_hf(box.source, TENSORS)
    (box.source / "model.safetensors").rename(box.source / "a.safetensors")
    write_safetensors(box.root / "deep" / "x.safetensors", {"b": TENSORS["b"]})
    before = box.root / "deep" / "x.safetensors"
    write_index(box.source, {"a": "a.safetensors", "b": name})
    try:
        ckptx.convert("hf2dcp", box.source, box.out)
    except CkptxError as error:
        assert error.exit_code == 3
    else:
        pytest.fail("it was read")
    assert before.exists()
    assert not box.out.exists()
