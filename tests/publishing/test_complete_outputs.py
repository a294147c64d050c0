"""`--resume` over an output that is there: it counts as complete for its bytes, whatever its manifest says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import OutputError
from ckptx.formats.dcp.reader import locate_payloads
from ckptx.formats.registry import open_checkpoint
from ckptx.report.documents.conversion import ConversionReport
from ckptx.storage.files import FilePool
from ckptx.transfer.digest import bytes_digest_hex
from tests.support.checkpoint_writers import flip, llama, tree_bytes, value, write_hf, write_safetensors

OUTPUTS: dict[str, Callable[..., ConversionReport]] = {
    "dcp": lambda src, dst, **more: ckptx.convert("hf2dcp", src, dst, **more),
    "cut dcp": lambda src, dst, **more: ckptx.reshard(src, dst, tp=2, pp=2, to="dcp", **more),
    "sharded": lambda src, dst, **more: ckptx.reshard(src, dst, tp=2, dp_shard=2, to="safetensors", **more),
    "huggingface": lambda src, dst, **more: ckptx.convert("dcp2hf", src, dst, **more),
}


def places(root: Path) -> list[tuple[str, int]]:
    """A byte of every block of every tensor, replicas too."""
    catalog = open_checkpoint(root)
    if catalog.format == "dcp":
        with FilePool(root) as files:
            catalog = locate_payloads(catalog, files)
    chunks = [chunk for entry in catalog.tensors.values() for chunk in (*entry.chunks, *entry.replicas)]
    return [
        (chunk.file, chunk.offset + (7 * number) % chunk.nbytes) for number, chunk in enumerate(chunks) if chunk.nbytes
    ]


def forge(root: Path, changed: str) -> None:
    """Makes the manifest agree with a file that was changed; digests of tensors stay those of the source."""
    path = root / "ckptx.json"
    manifest: Any = json.loads(path.read_text())
    data = (root / changed).read_bytes()
    manifest["files"][changed] = {"bytes": len(data), "digest": bytes_digest_hex(data)}
    path.write_text(json.dumps(manifest))


@pytest.fixture
def source(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    hf = write_hf(tmp_path / "hf", llama(), shards=2)
    if request.getfixturevalue("output") != "huggingface":
        return hf
    ckptx.convert("hf2dcp", hf, tmp_path / "in")
    return tmp_path / "in"


@pytest.mark.parametrize("output", OUTPUTS)
def test_what_is_as_it_was_is_complete(output: str, source: Path, tmp_path: Path) -> None:
    make, dst = OUTPUTS[output], tmp_path / "dst"
    make(source, dst)
    before = tree_bytes(dst)
    assert any("already complete" in warning for warning in make(source, dst, resume=True).notes)
    assert tree_bytes(dst) == before


@pytest.mark.sampled(4)
@pytest.mark.parametrize("forged", [False, True], ids=["", "forged"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_a_changed_byte_of_any_block_is_found(output: str, source: Path, tmp_path: Path, forged: bool) -> None:
    make, dst = OUTPUTS[output], tmp_path / "dst"
    make(source, dst)
    manifest = (dst / "ckptx.json").read_bytes()
    everywhere = places(dst)
    for file, at in everywhere[:: max(1, len(everywhere) // 12)]:
        flip(dst / file, at)
        if forged:
            forge(dst, file)
        with pytest.raises(OutputError, match="exists and is not empty"):
            make(source, dst, resume=True)
        flip(dst / file, at)
        (dst / "ckptx.json").write_bytes(manifest)
    assert make(source, dst, resume=True).bytes_written == 0


@pytest.mark.parametrize("output", ["sharded", "huggingface"])
def test_a_changed_header_is_found(output: str, source: Path, tmp_path: Path) -> None:
    """Two names swapped: every byte of a tensor is where it was, under another name."""
    make, dst = OUTPUTS[output], tmp_path / "dst"
    make(source, dst)
    a, b = b".mlp.gate_proj.weight", b".mlp.up_proj.weight"
    for file in sorted(path.name for path in dst.glob("*.safetensors")):
        data = (dst / file).read_bytes()
        (dst / file).write_bytes(data.replace(a, b"@").replace(b, a).replace(b"@", b))
        forge(dst, file)
        with pytest.raises(OutputError, match="exists and is not empty"):
            make(source, dst, resume=True)
        (dst / file).write_bytes(data)


@pytest.mark.parametrize("output", OUTPUTS)
def test_weights_that_would_be_read_in_its_place_are_found(output: str, source: Path, tmp_path: Path) -> None:
    make, dst = OUTPUTS[output], tmp_path / "dst"
    make(source, dst)
    for name in ("consolidated.safetensors", "model.safetensors", "x.safetensors.index.json", "pytorch_model.bin"):
        write_safetensors(dst / name, {"x": value("F32", 1)})
        with pytest.raises(OutputError, match="exists and is not empty"):
            make(source, dst, resume=True)
        (dst / name).unlink()
