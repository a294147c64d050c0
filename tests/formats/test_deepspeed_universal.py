"""Universal checkpoints of DeepSpeed: the tensors of each stage, and files that are missing, foreign or hostile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptx
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.registry import open_checkpoint
from tests.formats.test_deepspeed import SYSTEM, expected_tensors, usual
from tests.support.catalog_tensors import read_checkpoint, read_safetensors
from tests.support.forged_deepspeed import Checkpoint
from tests.support.forged_fsdp import Archive

MODEL = "mp_rank_00_model_states.pt"


def expected(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what the files of the step hold; a universal checkpoint of stage 3 has no step."""
    tensors = expected_tensors(checkpoint)
    return {name: each for name, each in tensors.items() if checkpoint.stage < 3 or not name.endswith(".step")}


@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (2, 3), (3, 1), (3, 3)])
def test_every_tensor_is_read(stage: int, ranks: int, tmp_path: Path) -> None:
    checkpoint = usual(stage, ranks=ranks)
    assert read_checkpoint(checkpoint.write_universal(tmp_path)) == expected(checkpoint)


def test_the_latest_step_is_read(tmp_path: Path) -> None:
    """`latest` is of the step that it was made from, and is read first if both are in one directory."""
    (tmp_path / "latest_universal").write_text("global_step5_universal")
    checkpoint = usual(2)
    checkpoint.write_universal(tmp_path / "global_step5_universal")
    catalog = open_checkpoint(tmp_path)
    assert f"{catalog.source.location}" == f"{tmp_path}"
    assert read_checkpoint(tmp_path) == expected(checkpoint)
    (tmp_path / "latest").write_text("global_step5")
    usual(1, buffers={}).write(tmp_path / "global_step5")
    assert "buffer0" not in open_checkpoint(tmp_path).tensors


def test_weights_and_masters_are_converted(tmp_path: Path) -> None:
    checkpoint = usual(2)
    source = checkpoint.write_universal(tmp_path / "source")
    stored, masters = expected(checkpoint), {name: each.shape for name, each in checkpoint.parameters().items()}
    for weights in ("auto", "masters"):
        ckptx.convert("to-hf", source, tmp_path / weights, base="none", weights=weights)
        found = read_safetensors(tmp_path / weights)
        for name in masters:
            assert found[name] == stored[name if weights == "auto" else f"optimizer.state.{name}.master_param"]
        assert found["frozen0"] == stored["frozen0"]
        assert found["tied"] == found["w0"]


def test_unread_copies_are_noted(tmp_path: Path) -> None:
    notes = open_checkpoint(usual(2).write_universal(tmp_path)).notes
    assert any("copies of 3 tensors that the optimizer does not update are not read" in note for note in notes)
    assert any("zero/optimizer_state.pt" in note for note in notes)


def remove(name: str) -> Callable[[Path, Checkpoint], None]:
    return lambda root, _: (root / name).unlink()


def write(name: str, value: Any) -> Callable[[Path, Checkpoint], None]:
    return lambda root, _: Archive().write(root / name, value)


def cut(name: str) -> Callable[[Path, Checkpoint], None]:
    return lambda root, _: (root / name).write_bytes((root / name).read_bytes()[:200])


def replace_values(name: str, *shape: int) -> Callable[[Path, Checkpoint], None]:
    return lambda root, checkpoint: checkpoint.write_parameter(root / name, np.ones(shape, np.float32))


MASTER = "zero/w0/fp32.pt"


@pytest.mark.parametrize(
    ("stage", "damage", "error", "message"),
    [
        (2, remove(MASTER), InputError, "zero/w0: fp32.pt is missing, but the model states list"),
        (3, remove(MASTER), InputError, "zero/w0: fp32.pt is missing, but the model states list"),
        (2, remove("zero/w1/exp_avg.pt"), InputError, "zero/w1: exp_avg.pt is missing"),
        (2, remove("zero/w1/step.pt"), InputError, "zero/w1: step.pt is missing"),
        (2, remove(MODEL), UnsupportedError, "pass the directory with zero/ and the .*_model_states.pt files"),
        (2, replace_values(MASTER, 5, 3), InputError, 'master of "w0" does not round to the weight in'),
        (2, replace_values(MASTER, 3, 5), InputError, r"has shape \[3, 5\], but the model states have \[5, 3\]"),
        (3, replace_values(MASTER, 14), InputError, r"has shape \[14\], but the model states have \[5, 3\]"),
        (2, replace_values("zero/other/fp32.pt", 3), InputError, 'has 1 parameter that .* does not have, "other"'),
        (2, write(MASTER, {"cat_dim": 0}), InputError, "has no tensor"),
        (2, write(MASTER, {"param": 3}), InputError, "has no tensor"),
        (2, write(MASTER, SYSTEM), CkptxError, "posix.mkdir, which is not allowed in a checkpoint"),
        (2, cut(MASTER), InputError, "damaged torch archive"),
        (3, remove("zero_pp_rank_0_mp_rank_00_model_states.pt"), InputError, "rank_0_mp_rank_00_model_states.pt is"),
    ],
)
def test_malformed_checkpoints_are_refused(
    stage: int,
    damage: Callable[[Path, Checkpoint], None],
    error: type[CkptxError],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = usual(stage)
    damage(checkpoint.write_universal(tmp_path / "source"), checkpoint)
    with pytest.raises(error, match=message):
        ckptx.convert("to-dcp", tmp_path / "source", tmp_path / "output", base="none")
    assert not (tmp_path / "output").exists()
    assert not (tmp_path / "was-executed").exists()


def test_tensor_parallel_ranks_without_rules_are_refused(tmp_path: Path) -> None:
    checkpoint = usual(2)
    checkpoint.write_universal(tmp_path)
    checkpoint.write_model(tmp_path / "mp_rank_01_model_states.pt")  # as if there were two ranks
    with pytest.raises(UnsupportedError, match="tensor parallelism of 2 ranks without universal_checkpoint_info"):
        open_checkpoint(tmp_path)
