"""`fixtures/quantized/`: checkpoints written by stock safetensors, decoded by torch and transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptx
from ckptx.formats.registry import open_checkpoint
from ckptx.quantization.checkpoint import open_dequantized
from tests.support.catalog_tensors import read_safetensors, read_tensor
from tests.support.checkpoint_writers import Value, tree_bytes

ROOT = Path(__file__).resolve().parents[2] / "fixtures" / "quantized"
NAMES = sorted(path.name for path in ROOT.iterdir() if path.is_dir())


def truth_of(name: str, dtype: str) -> dict[str, Value]:
    """Return the decoded weights in float32, or all tensors in bfloat16."""
    files = read_safetensors(ROOT, f"{name}.safetensors")
    return {each.removeprefix(f"{dtype}/"): tensor for each, tensor in files.items() if each.startswith(f"{dtype}/")}


def test_the_fixtures_are_there() -> None:
    assert len(NAMES) == 16
    assert sum(len(data) for data in tree_bytes(ROOT).values()) < 300_000


@pytest.mark.parametrize("name", NAMES)
def test_torch_decodes_to_the_same_values(name: str) -> None:
    catalog = open_checkpoint(ROOT / name)
    for dtype, torch_dtype in (("BF16", "bfloat16"), ("F32", "float32")):
        expected = truth_of(name, torch_dtype)
        decoded = open_dequantized(catalog, dtype)
        assert {key: read_tensor(decoded, key) for key in expected} == expected
        assert decoded.tensors.keys() == truth_of(name, "bfloat16").keys()


@pytest.mark.parametrize("name", NAMES)
def test_converted_there_and_back(tmp_path: Path, name: str) -> None:
    """Decoded to a DCP, the weights are those of torch; quantized like the base, the files are those of the base."""
    ckptx.convert("to-dcp", ROOT / name, tmp_path / "dcp", dequantize=True)
    ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "hf", base=ROOT / name, quantize="base")
    ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "plain")
    assert read_safetensors(tmp_path / "plain") == truth_of(name, "bfloat16")
    written = tree_bytes(tmp_path / "hf")
    assert written.pop("ckptx.json")
    assert written == tree_bytes(ROOT / name)
