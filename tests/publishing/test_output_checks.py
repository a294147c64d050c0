"""Targets that are refused before any work: the current directory and what contains it, inputs, and the Hub cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptx.errors import OutputError
from ckptx.publishing.output_checks import refuse_existing, refuse_files_inside

CURRENT = "is or contains the current directory"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory two levels below tmp_path."""
    directory = tmp_path / "above" / "here"
    (directory / "below").mkdir(parents=True)
    monkeypatch.chdir(directory)
    return directory


@pytest.mark.parametrize("target", [".", "..", "../..", "link"])
def test_the_current_directory_is_not_replaced(here: Path, target: str) -> None:
    (here / "link").symlink_to(here.parent)
    with pytest.raises(OutputError, match=CURRENT):
        refuse_existing(Path(target), overwrite=True)


@pytest.mark.parametrize("target", ["below", "../sibling", "missing"])
def test_directories_without_the_current_one_are_accepted(here: Path, target: str) -> None:
    (here.parent / "sibling").mkdir()
    refuse_existing(Path(target), overwrite=True)


def test_a_directory_with_files_requires_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    refuse_existing(tmp_path / "out", overwrite=False)
    (tmp_path / "out" / "file").touch()
    refuse_existing(tmp_path / "out", overwrite=True)
    with pytest.raises(OutputError, match="exists and is not empty"):
        refuse_existing(tmp_path / "out", overwrite=False)
    with pytest.raises(OutputError, match="not a directory"):
        refuse_existing(tmp_path / "out" / "file", overwrite=True)


@pytest.mark.parametrize(
    ("target", "is_refused"),
    [
        ("hub/models--a", True),
        ("hub/models--a/blobs", True),
        ("hub/models--a/snapshots", True),
        ("hub/models--a/snapshots/1/out", True),
        ("hub/models--a/new", True),
        ("hub", True),
        ("hub/models--b", False),
        ("out", False),
    ],
)
def test_a_target_in_the_cache_of_an_input_is_refused(tmp_path: Path, target: str, is_refused: bool) -> None:
    repository = tmp_path / "hub" / "models--a"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots" / "1").mkdir(parents=True)
    (repository / "blobs" / "0").touch()
    file = repository / "snapshots" / "1" / "model.safetensors"
    file.symlink_to("../../blobs/0")
    if is_refused:
        with pytest.raises(OutputError, match="overlaps the input"):
            refuse_files_inside([file], tmp_path / target)
    else:
        refuse_files_inside([file], tmp_path / target)


@pytest.mark.parametrize(("target", "is_refused"), [("in", True), (".", True), ("in/below", False), ("other", False)])
def test_a_target_that_contains_an_input_file_is_refused(tmp_path: Path, target: str, is_refused: bool) -> None:
    """Directories named blobs are special only next to snapshots."""
    (tmp_path / "in" / "below").mkdir(parents=True)
    (tmp_path / "in" / "file").touch()
    if is_refused:
        with pytest.raises(OutputError, match="overlaps the input"):
            refuse_files_inside([tmp_path / "in" / "file"], tmp_path / target)
    else:
        refuse_files_inside([tmp_path / "in" / "file"], tmp_path / target)
