"""`ckptx.json`: what goes in comes out, line by line; what is no manifest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptx.catalog.manifest import emit_manifest, read_manifest
from ckptx.errors import InputError, UnsupportedError

MANIFEST: dict[str, Any] = {
    "ckptx": 1,
    "tool": "0.1.0",
    "format": "dcp",
    "origin": None,
    "files": {"__0_0.distcp": {"bytes": 7, "digest": "ab"}},
    "sidecars": {},
    "tensors": {'a "quoted" ü': {"dtype": "BF16", "shape": (2, 3)}, "b": {"dtype": "F32", "shape": ()}},
}


def test_it_reads_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ckptx.json"
    path.write_bytes(emit_manifest(MANIFEST))
    assert read_manifest(path) == json.loads(json.dumps(MANIFEST))


@pytest.mark.parametrize("name", ["a},", '},"', "}", '"', "\\", '},\n"', ":{", ",", "\u2028", '"},"', "{}"])
def test_names_that_look_like_json(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ckptx.json"
    row = {"dtype": "F32", "shape": [1], "tied_to": name}
    manifest = MANIFEST | {"tensors": {name: row, "b": row, name + name: row}, "files": {name: {"bytes": 1}}}
    path.write_bytes(emit_manifest(manifest))
    assert read_manifest(path) == manifest


def test_there_is_one_line_for_each_tensor() -> None:
    lines = emit_manifest(MANIFEST).decode().splitlines()
    assert '  "b":{"dtype":"F32","shape":[]}' in lines
    assert emit_manifest(MANIFEST).isascii()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "{}", '{"ckptx": 1}', '{"ckptx": 1, "files": [], "sidecars": {}, "tensors": {}}', "\x00", "1"],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ckptx.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"ckptx\.json: is not a manifest"):
        read_manifest(path)


def test_a_newer_manifest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ckptx.json"
    path.write_bytes(emit_manifest(MANIFEST | {"ckptx": 2}))
    with pytest.raises(UnsupportedError, match="version 2"):
        read_manifest(path)
