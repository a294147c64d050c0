"""`verify --run` of two checkpoints of which one has no config, in either order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ckptx
from ckptx.errors import InputError
from tests.support.checkpoint_writers import LLAMA, llama, write_dcp, write_hf

CONFIG = LLAMA | {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 16,
    "intermediate_size": 24,
    "dtype": "bfloat16",
}


@pytest.fixture
def sides(tmp_path: Path) -> dict[str, Path]:
    tensors = llama(dtype="F32")
    return {
        "with config": write_hf(tmp_path / "hf", tensors, config=CONFIG),
        "without": write_dcp(tmp_path / "dcp", tensors, config=None),
    }


@pytest.mark.parametrize("reference", ["with config", "without"])
def test_the_config_of_the_other_is_used(sides: dict[str, Path], reference: str) -> None:
    (checkpoint,) = sides.keys() - {reference}
    report = ckptx.verify(sides[reference], sides[checkpoint], run=True, backward=False, compute_dtype="bf16")
    assert report.exit == 0
    hf, dcp = sides["with config"], sides["without"]
    assert report.notes[0] == f"{dcp}: no config.json; using that of {hf}"
    (row,) = report.dtype_differences
    other_config = (
        f"{hf / 'config.json'}, the config of the reference," if checkpoint == "without" else "its config.json"
    )
    assert (row["against"], row["stored"], row["expected"]) == ("config", "F32", "BF16")
    assert any(f"but {other_config} sets BF16" in note for note in report.notes)


def test_two_checkpoints_without_a_config_are_refused_at_once(
    tmp_path: Path, sides: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ckptx.runtime.parity.forward", None)
    other = write_dcp(tmp_path / "other", llama(), config=None)
    with pytest.raises(InputError, match=r"has a config\.json, which --run requires to build the model; add one, or"):
        ckptx.verify(other, sides["without"], run=True)
