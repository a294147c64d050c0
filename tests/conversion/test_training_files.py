"""Files next to a DCP from which its trainer resumes: copied with the training state, noted without it."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptx
from tests.support.checkpoint_writers import write_dcp

RESUMED = (
    "scheduler.bin", "scheduler_1.bin", "random_states_0.pkl", "random_states_12.pkl", "custom_checkpoint_0.pkl",
    "sampler.bin", "dl_state_dict.bin", "scaler.pt", "scheduler.pt", "trainer_state.json", "rng_state_3.pth",
)  # fmt: skip
OTHER = ("training_args.bin", "unrelated.txt", "my_scheduler.bin")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Write the two DCPs of accelerate, and files next to them that are not pickles."""
    path = tmp_path / "state"
    write_dcp(path / "pytorch_model_fsdp_0", {"model.w": ("F32", (4, 2), bytes(32))})
    write_dcp(path / "optimizer_0", {"state.w.exp_avg": ("F32", (4, 2), bytes(32))})
    for name in (*RESUMED, *OTHER):
        (path / name).write_bytes(b"hostile " + name.encode())
    return path


def test_they_are_copied_unread_by_every_output_that_keeps_the_state(state: Path, tmp_path: Path) -> None:
    ckptx.reshard(state, tmp_path / "once", dp_shard=2, base="none")
    report = ckptx.convert("to-dcp", tmp_path / "once", tmp_path / "twice", base="none")
    for out in ("once", "twice"):
        for name in RESUMED:
            assert (tmp_path / out / name).read_bytes() == b"hostile " + name.encode()
        assert not any((tmp_path / out / name).exists() for name in OTHER)
    assert not [note for note in report.notes if "not copied" in note]


def test_they_are_noted_if_the_state_is_dropped(state: Path, tmp_path: Path) -> None:
    report = ckptx.reshard(state, tmp_path / "out", base="none", optimizer="drop")
    assert not [name for name in RESUMED if (tmp_path / "out" / name).exists()]
    (note,) = [note for note in report.notes if note.startswith("not copied, because")]
    assert note.endswith("and 6 more")


def test_they_are_copied_again_when_one_changes(state: Path, tmp_path: Path) -> None:
    ckptx.reshard(state, tmp_path / "out", base="none")
    (state / "scheduler.bin").write_bytes(b"a later step")
    ckptx.reshard(state, tmp_path / "out", base="none", overwrite=True)
    assert (tmp_path / "out" / "scheduler.bin").read_bytes() == b"a later step"


def test_they_are_shown(state: Path) -> None:
    assert ckptx.inspect(state).other_files == sorted(RESUMED)
