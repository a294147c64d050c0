"""Checkpoints without a config: seen by that of the other side, given back where a manifest remembers their files."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import InputError, UsageError
from tests.support.checkpoint_writers import LLAMA, SINGLE, framed, header, llama, value, write_dcp, write_hf
from tests.support.slow import slow_but

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 2,
    "vocab_size": 16,
}


def original(root: Path, is_tied: bool) -> Path:
    return write_hf(root, llama(head=not is_tied), config=LLAMA | SIZES | {"tie_word_embeddings": is_tied})


FORMS: dict[str, Callable[[Path, Path], Any]] = {
    "hf": lambda source, to: shutil.copytree(source, to),
    "dcp": lambda source, to: ckptx.convert("hf2dcp", source, to),
    "dcp-prefix": lambda source, to: ckptx.convert("hf2dcp", source, to, prefix="model."),
    "dcp-torchtitan": lambda source, to: ckptx.convert("hf2dcp", source, to, names="torchtitan"),
    "dcp-tp2": lambda source, to: ckptx.reshard(source, to, tp=2, to="dcp"),
    "sharded-tp2": lambda source, to: ckptx.reshard(source, to, tp=2, to="safetensors"),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("keeps_manifest", slow_but((False, True), (False,)))
@pytest.mark.parametrize(("form", "other"), itertools.permutations(FORMS, 2))
def test_the_config_of_one_side_does_for_both(
    tmp_path: Path, form: str, other: str, keeps_manifest: bool, is_tied: bool
) -> None:
    source = original(tmp_path / "source", is_tied)
    FORMS[form](source, tmp_path / "a")
    FORMS[other](source, tmp_path / "b")
    (tmp_path / "b" / "config.json").unlink()
    if not keeps_manifest:
        for side in "ab":
            (tmp_path / side / "ckptx.json").unlink(missing_ok=True)
    for pair in ((tmp_path / "a", tmp_path / "b"), (tmp_path / "b", tmp_path / "a")):
        report = ckptx.verify(*pair)
        assert (report.exit, report.differing) == (0, [])
        assert any("no config.json; using that of" in note for note in report.notes)
        assert ckptx.diff(*pair).exit == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_difference_is_still_seen(tmp_path: Path, form: str) -> None:
    source = original(tmp_path / "source", is_tied=False)
    tensors = llama()
    tensors["model.norm.weight"] = value("BF16", 8, seed=99)
    spoiled = write_hf(tmp_path / "spoiled", tensors, config=LLAMA | SIZES)
    FORMS[form](spoiled, tmp_path / "b")
    (tmp_path / "b" / "config.json").unlink()
    report = ckptx.verify(source, tmp_path / "b")
    assert report.exit == 1
    assert [row["name"] for row in report.differing] == ["model.norm.weight"]


@pytest.mark.parametrize("form", ["hf", "dcp", "sharded-tp2"])
def test_a_config_that_does_not_fit_decides_nothing(tmp_path: Path, form: str) -> None:
    """A smaller checkpoint than the config of the other side says is different, not unreadable."""
    source = original(tmp_path / "source", is_tied=False)
    config = LLAMA | SIZES | {"num_hidden_layers": 1}
    tensors = {name: tensor for name, tensor in llama().items() if "layers.1." not in name}
    FORMS[form](write_hf(tmp_path / "small", tensors, config=config), tmp_path / "b")
    (tmp_path / "b" / "config.json").unlink()
    for pair in ((source, tmp_path / "b"), (tmp_path / "b", source)):
        report = ckptx.verify(*pair)
        assert report.exit == 1
        assert {row["what"] for row in report.differing} == {"missing"}
        assert all("model.layers.1." in row["name"] for row in report.differing)


# --- files given back


def _odd_header(root: Path) -> None:
    tensors = llama()
    rows = json.dumps({"__metadata__": {"format": "pt", "by": "hand"}} | header(tensors), indent=1)
    (root / SINGLE).write_bytes(framed(rows, b"".join(data for _, _, data in tensors.values())))


BARE: dict[str, Callable[[Path], Any]] = {
    "one file": lambda root: write_hf(root, llama(), config=None),
    "two files": lambda root: write_hf(root, llama(), shards=2, config=None),
    "five files": lambda root: write_hf(root, llama(), shards=5, config=None),
    "a header by hand": _odd_header,
}
WAYS: dict[str, dict[str, Any]] = {"plain": {}, "tp 2": {"tp": 2}, "pp 2": {"tp": 1, "files": 3}}


def files_of(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir() if path.name != "ckptx.json"}


def bare(tmp_path: Path, kind: str, way: str) -> tuple[Path, Path]:
    source = tmp_path / "bare"
    source.mkdir()
    BARE[kind](source)
    (source / "tokenizer.json").write_text("{}")
    ckptx.convert("hf2dcp", source, tmp_path / "dcp", **WAYS[way])
    return source, tmp_path / "dcp"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", BARE)
def test_a_checkpoint_that_never_had_a_config_comes_back(tmp_path: Path, kind: str, way: str) -> None:
    source, dcp = bare(tmp_path, kind, way)
    report = ckptx.convert("dcp2hf", dcp, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(source)
    assert any("ckptx.json records; tied weights are not detected" in note for note in report.notes)


def _drop_manifest(dcp: Path) -> None:
    (dcp / "ckptx.json").unlink()


def _another_save(dcp: Path) -> None:
    (dcp / ".metadata").write_bytes((dcp / ".metadata").read_bytes() + b"x")


def _longer_file(dcp: Path) -> None:
    with next(dcp.glob("*.distcp")).open("ab") as file:
        file.write(b"x")


def _forgets_files(dcp: Path) -> None:
    manifest = json.loads((dcp / "ckptx.json").read_text())
    manifest["origin"] = None
    (dcp / "ckptx.json").write_text(json.dumps(manifest))


def _had_a_config(dcp: Path) -> None:
    manifest = json.loads((dcp / "ckptx.json").read_text())
    manifest["sidecars"]["config.json"] = manifest["sidecars"]["tokenizer.json"]
    (dcp / "ckptx.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("spoil", [_drop_manifest, _another_save, _longer_file, _forgets_files, _had_a_config])
def test_otherwise_the_error_names_base(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    _, dcp = bare(tmp_path, "two files", "plain")
    spoil(dcp)
    with pytest.raises(InputError, match=r"has no config\.json.*--base PATH.*--base none"):
        ckptx.convert("dcp2hf", dcp, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("options", [{"dtype": "fp32"}, {"max_shard_size": "1KB"}, {"tied": "copy"}])
def test_whoever_asks_for_something_else_needs_a_config(tmp_path: Path, options: dict[str, str]) -> None:
    _, dcp = bare(tmp_path, "two files", "plain")
    with pytest.raises(InputError, match="--base PATH"):
        ckptx.convert("dcp2hf", dcp, tmp_path / "back", **options)


def test_base_none_writes_the_tensors_alone(tmp_path: Path) -> None:
    _, dcp = bare(tmp_path, "two files", "plain")
    ckptx.convert("dcp2hf", dcp, tmp_path / "back", base="none")
    assert set(files_of(tmp_path / "back")) == {SINGLE}


@pytest.mark.parametrize("command", ["to-dcp", "to-hf", "reshard", "reshard to a DCP"])
def test_base_none_writes_no_config_that_is_next_to_the_tensors(tmp_path: Path, command: str) -> None:
    hf = write_hf(tmp_path / "hf", llama())
    out = tmp_path / "out"
    if command.startswith("reshard"):
        report: Any = ckptx.reshard(hf, out, tp=2, base="none", to="dcp" if "DCP" in command else "safetensors")
    else:
        report = ckptx.convert(command, hf, out, base="none")
    assert f"--base none: {hf}/config.json is read but not written; loaders need a config" in report.notes
    assert [name for name in files_of(out) if name.endswith(".json") and name != "ckptx.json"] == []


def test_the_error_without_a_config_describes_the_base(tmp_path: Path) -> None:
    dcp = write_dcp(tmp_path / "dcp", llama(), config=None)
    with pytest.raises(InputError, match=r"--base PATH with an HF checkpoint whose config\.json describes the model"):
        ckptx.convert("to-hf", dcp, tmp_path / "out")


@pytest.mark.parametrize(
    ("prefix", "said"),
    [("0.", "ckptx could not detect this prefix in the output"), ("module.", 'the wrapper "module." would be removed')],
)
def test_a_prefix_that_cannot_be_detected_later_is_refused(tmp_path: Path, prefix: str, said: str) -> None:
    hf = write_hf(tmp_path / "hf", llama())
    with pytest.raises(UsageError, match=said):
        ckptx.convert("to-dcp", hf, tmp_path / "out", prefix=prefix)
