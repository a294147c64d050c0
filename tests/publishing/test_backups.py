"""`--overwrite` replaces files of a checkpoint, files that ckptx wrote, and files with an equal copy in a backup."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from ckptx.errors import OutputError
from ckptx.publishing.overwrite_checks import list_removed_files, refuse_unrelated_files, removal_note
from ckptx.report.report import Report
from tests.support.checkpoint_writers import llama, write_hf

MIB = 1 << 20
CONTENTS = {"empty": b"", "short": b"mine", "a block": b"m" * MIB, "more than a block": b"m" * MIB + b"mine"}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "out", llama(layers=1))


def refused(target: Path, backup: Path | None = None) -> str:
    with pytest.raises(OutputError) as error:
        refuse_unrelated_files(target, backup)
    return str(error.value)


def unrelated(target: Path, listed: str) -> str:
    """Return the message for a target with unrelated files."""
    return (
        f"{target}: contains files that do not belong to a checkpoint: {listed}; --overwrite would delete them; move "
        "them elsewhere, or choose another DST"
    )


@pytest.mark.parametrize("name", ["train.py", "sub/train.py"])
@pytest.mark.parametrize("contents", CONTENTS)
def test_a_file_with_an_equal_copy_in_the_backup_may_be_replaced(
    target: Path, tmp_path: Path, name: str, contents: str
) -> None:
    backup = tmp_path / "backup"
    for root in (target, backup):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(CONTENTS[contents])
    assert refused(target) == unrelated(target, name)
    refuse_unrelated_files(target, backup)
    (target / "thesis.tex").write_bytes(b"mine")
    assert refused(target, backup) == unrelated(target, "thesis.tex")


def _write(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


COPIES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "shorter": _write(CONTENTS["more than a block"][:-1]),
    "longer": _write(CONTENTS["more than a block"] + b"\0"),
    "other first byte": _write(b"n" + CONTENTS["more than a block"][1:]),
    "other last byte": _write(CONTENTS["more than a block"][:-1] + b"\0"),
    "only the first block": _write(CONTENTS["a block"]),
    "a directory": Path.mkdir,
    "a link": lambda path: path.symlink_to("../out/train.py"),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("copy", COPIES)
def test_a_file_without_an_equal_copy_in_the_backup_is_kept(target: Path, tmp_path: Path, copy: str) -> None:
    backup = tmp_path / "backup"
    backup.mkdir()
    (target / "train.py").write_bytes(CONTENTS["more than a block"])
    COPIES[copy](backup / "train.py")
    assert refused(target, backup) == unrelated(target, "train.py")


def test_a_link_or_pipe_is_kept_even_if_the_backup_has_its_name(target: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    for root in (target, backup):
        root.mkdir(exist_ok=True)
        (root / "link.py").symlink_to("config.json")
        os.mkfifo(root / "pipe")
    assert refused(target, backup) == unrelated(target, "link.py, pipe")


def test_a_backup_that_is_missing_is_an_error(target: Path, tmp_path: Path) -> None:
    assert refused(target, tmp_path / "gone").startswith(f"{tmp_path / 'gone'}: cannot be opened: No such file")


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7])
def test_up_to_three_unrelated_files_are_listed(target: Path, number: int) -> None:
    for index in range(number):
        (target / f"{index}.tex").touch()
    listed = ", ".join(f"{index}.tex" for index in range(min(number, 3)))
    assert refused(target) == unrelated(target, listed + (f" and {number - 3} more" if number > 3 else ""))


@pytest.mark.parametrize("kind", ["missing", "empty", "a file", "a link to an empty directory"])
def test_nothing_is_lost_in_a_directory_that_is_missing_or_empty(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "out"
    if kind == "empty":
        target.mkdir()
    elif kind == "a file":
        target.touch()
    elif kind != "missing":
        (tmp_path / "directory").mkdir()
        target.symlink_to("directory")
    refuse_unrelated_files(target)
    assert list_removed_files(target, []) == []


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert refused(tmp_path) == (
        f"{tmp_path}: cannot be opened as a checkpoint and has no ckptx.json; --overwrite replaces only checkpoints; "
        "remove it yourself, or choose another DST"
    )


def test_a_directory_above_a_checkpoint_is_not_taken_for_one(tmp_path: Path) -> None:
    """Only names that a checkpoint may have, but its weights are one level below."""
    write_hf(tmp_path / "model", llama(layers=1))
    assert "cannot be opened as a checkpoint" in refused(tmp_path)


NAMES = {  # names in subdirectories of trainers and of the Hub client, and whether they belong to a checkpoint
    "model/config.json": True, "optim/__0_0.distcp": True, "optimizer/.metadata": True, "train/model.safetensors": True,
    "pytorch_model_fsdp_0/__0_0.distcp": True, "optimizer_12/__0_0.distcp": True, "weights/common.pt": True,
    ".hf_metadata/config.json": True, "rng/rank_0.pt": True, "dataloader/state.json": True, "scheduler/a.b-c.pt": True,
    "lr_scheduler/x.json": True, "step_scheduler/x.pt": True, ".cache/huggingface/.gitignore": True,
    ".cache/huggingface/CACHEDIR.TAG": True, ".cache/huggingface/download/x.safetensors.metadata": True,
    ".cache/huggingface/download/x.lock": True,
    "model/ckptx.json": False, "model/deep/config.json": False, "models/config.json": False, "rng/rank_0.txt": False,
    "rng/.pt": False, "rng/a b.pt": False, "rng/deep/a.pt": False, "dataloader/notes.md": False,
    ".cache/huggingface/notes.md": False, ".cache/huggingface/x.metadata.bak": False, ".cache/x.lock": False,
    ".cache/huggingface/download/deep/x.lock": False, "pytorch_model_fsdp_/__0_0.distcp": False,
    "optimizer_x/__0_0.distcp": False,
}  # fmt: skip


@pytest.mark.parametrize("as_link", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_names_in_subdirectories_of_trainers_are_known(target: Path, name: str, as_link: bool) -> None:
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    (target / name).symlink_to("/dev/null") if as_link else (target / name).write_bytes(b"{}")
    if NAMES[name]:
        refuse_unrelated_files(target)
    else:
        assert refused(target) == unrelated(target, name)


@pytest.mark.parametrize(
    "name",
    [
        ".metadata", "x.safetensors", "__0_0.distcp", "x.gguf", "x.safetensors.index.json", "x.bin.index.json",
        "x.h5.index.json", "x.msgpack.index.json", "pytorch_model.bin", "adapter_model.bin", "consolidated.00.pth",
        "tf_model.h5", "flax_model.msgpack", "model.onnx", "model.onnx_data", "model-00001-of-00002.pt", "model_x.bin",
        "shard-1-model-2-of-3.pt", "ckptx.json",
    ],
)  # fmt: skip
def test_names_of_weights_are_known_and_not_listed_as_removed(target: Path, name: str) -> None:
    if not (target / name).exists():
        (target / name).write_bytes(b"{}")
    (target / "README.md").write_bytes(b"mine")
    with pytest.raises(OutputError) if name == ".metadata" else nullcontext():  # of a DCP without files
        refuse_unrelated_files(target)
    assert list_removed_files(target, []) == ["README.md", "config.json"]


@pytest.mark.parametrize(
    "name", [".safetensors", ".distcp", "x.safetensors.index", "x.bin", "model.txt2", "models.bin", "pytorch_model.pkl"]
)
def test_names_like_those_of_weights_are_kept(target: Path, name: str) -> None:
    (target / name).write_bytes(b"{}")
    assert refused(target) == unrelated(target, name)


def test_files_that_the_new_output_has_are_not_listed_as_removed_without_a_manifest(target: Path) -> None:
    for name in ("README.md", "LICENSE", "sub/notes.md"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(b"mine")
    (target / "report.json").write_text(Report(command="verify").to_json())
    (target / "link.md").symlink_to("README.md")
    os.mkfifo(target / "pipe")
    everything = ["LICENSE", "README.md", "config.json", "link.md", "pipe", "sub/notes.md"]
    assert list_removed_files(target, []) == everything
    assert list_removed_files(target, ["README.md", "pipe"]) == ["LICENSE", "config.json", "link.md", "sub/notes.md"]
    target.parent.joinpath("link").symlink_to("out")
    assert list_removed_files(target.parent / "link", []) == everything


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("number", [1, 2, 20, 21, 30])
def test_up_to_twenty_removed_files_are_listed(number: int, dry_run: bool) -> None:
    names = [f"{index:02}.md" for index in range(number)]
    listed = ", ".join(names[:20]) + (f" and {number - 20} more" if number > 20 else "")
    verb, files = "would remove" if dry_run else "removed", "1 file" if number == 1 else f"{number} files"
    assert removal_note(Path("out"), names, dry_run=dry_run) == (
        f"out: --overwrite {verb} {files} of the old directory: {listed}"
    )
