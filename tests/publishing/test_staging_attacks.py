"""Somebody works in the staging directory: whatever is injected, removed or changed there, at whatever moment, nothing
outside is touched, and a run that ends with success has published what an undisturbed one publishes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import CkptxError
from ckptx.publishing import publish as publish_module
from ckptx.publishing.staging import Staging
from tests.support.checkpoint_writers import llama, tree_bytes, write_hf

STAGING = ".out.ckptx-partial"
# Of `hf2dcp` with two files: both tensor files, sidecars at two depths, marker, manifest, and what ckptx itself keeps.
FILES = (
    "tree/__0_0.distcp", "tree/__1_0.distcp", "tree/config.json", "tree/sub/vocab.txt", "tree/.metadata",
    "tree/ckptx.json", "journal/00000-0000000", "plan", "lock",
)  # fmt: skip
DIRECTORIES = ("tree", "tree/sub", "journal", "")

Change = Callable[[Path, Path], None]


def _removed(path: Path, outside: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _with(make: Callable[[Path, Path], Any]) -> Change:
    """Puts something else in the place of `path`."""

    def change(path: Path, outside: Path) -> None:
        _removed(path, outside)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path, outside)

    return change


def _other(path: Path, outside: Path) -> None:
    """The same bytes under another inode."""
    data = path.read_bytes() if path.is_file() else b"bytes of somebody else"
    new = path.parent / "new"
    new.write_bytes(data)
    os.replace(new, path)


def _moved(path: Path, outside: Path) -> None:
    """A directory with the same contents in the place of the one that was claimed."""
    if path.is_dir():
        shutil.copytree(path, outside.parent / "moved", symlinks=True)
        shutil.rmtree(path)
        shutil.move(outside.parent / "moved", path)


FILE_CHANGES: dict[str, Change] = {
    "link to a file": _with(lambda path, outside: path.symlink_to(outside / "victim")),
    "link to a directory": _with(lambda path, outside: path.symlink_to(outside)),
    "link to nothing yet": _with(lambda path, outside: path.symlink_to(outside / "injected")),
    "second name of a file": _with(lambda path, outside: os.link(outside / "victim", path)),
    "pipe": _with(lambda path, outside: os.mkfifo(path)),
    "directory": _with(lambda path, outside: path.mkdir()),
    "removed": _removed,
    "empty": _with(lambda path, outside: path.write_bytes(b"")),
    "truncated": lambda path, outside: os.truncate(path, path.stat().st_size // 2) if path.is_file() else None,
    "grown": lambda path, outside: os.truncate(path, path.stat().st_size + 100) if path.is_file() else None,
    "other inode, same bytes": _other,
}
DIRECTORY_CHANGES: dict[str, Change] = {
    "link to a directory": FILE_CHANGES["link to a directory"],
    "link to nothing yet": FILE_CHANGES["link to nothing yet"],
    "file": _with(lambda path, outside: path.write_bytes(b"")),
    "pipe": FILE_CHANGES["pipe"],
    "removed": _removed,
    "empty": FILE_CHANGES["directory"],
    "replaced by a copy": _moved,
    "one name more": lambda path, outside: (path / "more.bin").write_bytes(b"") if path.is_dir() else None,
}
MOMENTS = ("left by an interrupted run", "before the copy", "after the copy", "before the rename")
CASES = [(name, how) for name in FILES for how in FILE_CHANGES]
CASES += [(name, how) for name in DIRECTORIES for how in DIRECTORY_CHANGES]


def _is_fast(name: str, how: str, moment: str) -> bool:
    """Every change of every name at one moment, of which each name and each change has all four."""
    names, changes = (FILES, FILE_CHANGES) if name in FILES else (DIRECTORIES, DIRECTORY_CHANGES)
    return (names.index(name) + list(changes).index(how) + MOMENTS.index(moment)) % len(MOMENTS) == 0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power here, and waiting for the disk would be most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_hf(tmp_path_factory.mktemp("in") / "hf", llama(layers=1), shards=2)
    (root / "sub").mkdir()
    (root / "sub" / "vocab.txt").write_bytes(b"a\nb\n")
    return root


@pytest.fixture(scope="module")
def undisturbed(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    dst = tmp_path_factory.mktemp("alone") / "out"
    ckptx.convert("hf2dcp", hf, dst, files=2)
    return tree_bytes(dst)


def _interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


def _once(change: Callable[[], None]) -> Callable[[], None]:
    left = [change]
    return lambda: left.pop()() if left else None


def _at(moment: str, patch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Has `change` happen at a moment of the next run."""
    execute, publish = publish_module.execute, Staging.publish

    def executing(*arguments: Any, **named: Any) -> Any:
        if moment == "before the copy":
            change()
        outcome = execute(*arguments, **named)
        if moment == "after the copy":
            change()
        return outcome

    def publishing(self: Staging, *arguments: Any) -> None:
        if moment == "before the rename":
            change()
        publish(self, *arguments)

    patch.setattr(publish_module, "execute", executing)
    patch.setattr(Staging, "publish", publishing)


@pytest.mark.parametrize(
    ("name", "how", "moment"),
    [
        pytest.param(
            name, how, moment, id=f"{how}: {name or 'root'}-{moment}",
            marks=() if _is_fast(name, how, moment) else pytest.mark.slow,
        )
        for name, how in CASES
        for moment in MOMENTS
    ],
)  # fmt: skip
def test_nothing_outside_is_touched_and_success_is_true(
    hf: Path,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    how: str,
    moment: str,
) -> None:
    place, outside = tmp_path / "place", tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_bytes(b"mine" * 40)
    before, dst, staging = tree_bytes(outside), place / "out", place / STAGING
    changes = FILE_CHANGES if name in FILES else DIRECTORY_CHANGES

    def change() -> None:
        path = staging / name
        if path.parent.is_dir():
            changes[how](path, outside)

    options: dict[str, Any] = {"files": 2, "workers": 1}
    if moment == MOMENTS[0]:
        with pytest.raises(KeyboardInterrupt):
            ckptx.convert("hf2dcp", hf, dst, on_progress=_interrupt, **options)
        change()
        options["resume"] = True
    else:
        _at(moment, monkeypatch, _once(change))
    try:
        ckptx.convert("hf2dcp", hf, dst, **options)
    except CkptxError as error:
        assert error.exit_code == 5
        assert "\n" not in str(error)
        assert not dst.exists()
    else:
        assert tree_bytes(dst) == undisturbed
        assert all(path.is_dir() or path.stat().st_nlink == 1 for path in dst.rglob("*"))
        assert not any(path.is_symlink() for path in dst.rglob("*"))
    assert tree_bytes(outside) == before


@pytest.mark.parametrize("name", ["tree/__0_0.distcp", "tree/__1_0.distcp"])
@pytest.mark.parametrize("moment", MOMENTS[2:])
@pytest.mark.parametrize("how", ["removed", "truncated", "grown", "other inode, same bytes", "link to a file", "pipe"])
def test_a_tensor_file_that_is_not_what_was_written_is_never_published(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, moment: str, how: str
) -> None:
    """The same again, without a way out: each of these must be found."""
    (tmp_path / "victim").write_bytes(b"")
    _at(moment, monkeypatch, _once(lambda: FILE_CHANGES[how](tmp_path / "place" / STAGING / name, tmp_path)))
    with pytest.raises(CkptxError) as refused:
        ckptx.convert("hf2dcp", hf, tmp_path / "place" / "out", files=2)
    assert refused.value.exit_code == 5
    assert not (tmp_path / "place" / "out").exists()


@pytest.mark.parametrize("at", [0, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp"])
def test_bytes_that_changed_in_what_a_resumed_run_takes_over_are_copied_again(
    hf: Path, undisturbed: dict[str, bytes], tmp_path: Path, name: str, at: float
) -> None:
    dst = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        ckptx.convert("hf2dcp", hf, dst, files=2, on_progress=_interrupt)
    path = tmp_path / STAGING / "tree" / name
    data = bytearray(path.read_bytes() or b"?")  # a file that was not begun yet gets a byte nobody wrote
    data[int(at * len(data))] ^= 0x40
    path.write_bytes(data)
    ckptx.convert("hf2dcp", hf, dst, files=2, resume=True)
    assert tree_bytes(dst) == undisturbed


@pytest.mark.parametrize("at", [0, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("name", [name.removeprefix("tree/") for name in FILES if name.startswith("tree/")])
def test_resuming_over_an_output_with_other_bytes_does_not_call_it_complete(
    hf: Path, tmp_path: Path, name: str, at: float
) -> None:
    dst = tmp_path / "out"
    ckptx.convert("hf2dcp", hf, dst, files=2)
    data = bytearray((dst / name).read_bytes())
    data[int(at * len(data))] ^= 0x40
    (dst / name).write_bytes(data)
    before = tree_bytes(dst)
    try:
        report = ckptx.convert("hf2dcp", hf, dst, files=2, resume=True)
    except CkptxError as error:
        assert error.exit_code == 5
    else:  # what the manifest says of things that decide nothing
        assert name == "ckptx.json" and report.exit == 0
    assert tree_bytes(dst) == before


@pytest.mark.parametrize(
    "foreign", ["link", "file", "precious", "tree/precious", "journal file", "nothing but a lock link"]
)
def test_a_staging_directory_that_is_not_ours_is_refused_and_left_alone(hf: Path, tmp_path: Path, foreign: str) -> None:
    staging, outside = tmp_path / "place" / STAGING, tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_bytes(b"mine")
    staging.parent.mkdir()
    if foreign == "link":
        staging.symlink_to(outside)
    elif foreign == "file":
        staging.write_bytes(b"mine")
    else:
        staging.mkdir()
        if foreign == "nothing but a lock link":
            (staging / "lock").symlink_to(outside / "victim")
        else:
            name = "journal" if foreign == "journal file" else foreign
            (staging / name).parent.mkdir(exist_ok=True)
            (staging / name).write_bytes(b"mine")
    before = {path: path.lstat().st_ino for path in sorted(tmp_path.rglob("*"))}
    for resume in (False, True):
        with pytest.raises(CkptxError) as refused:
            ckptx.convert("hf2dcp", hf, tmp_path / "place" / "out", resume=resume)
        assert refused.value.exit_code == 5
        assert STAGING in str(refused.value)
    assert {path: path.lstat().st_ino for path in sorted(tmp_path.rglob("*"))} == before


@pytest.mark.parametrize("foreign", ["link", "file", "directory", "checkpoint"])
@pytest.mark.parametrize("target", ["absent", "there"])
def test_what_has_the_name_of_an_old_output_is_neither_removed_nor_moved(
    hf: Path, tmp_path: Path, foreign: str, target: str
) -> None:
    aside, dst = tmp_path / ".out.ckptx-old", tmp_path / "out"
    if target == "there":
        ckptx.convert("hf2dcp", hf, dst)
    if foreign == "link":
        (tmp_path / "elsewhere").mkdir()
        aside.symlink_to("elsewhere")
    elif foreign == "file":
        aside.write_bytes(b"mine")
    elif foreign == "checkpoint":
        write_hf(aside, llama(layers=1))
    else:
        aside.mkdir()
        (aside / "thesis.tex").write_bytes(b"mine")
    before = {path: path.lstat().st_ino for path in sorted(tmp_path.rglob("*"))}
    with pytest.raises(
        CkptxError, match=r"ckptx-old: exists, but is not the directory that ckptx moved there"
    ) as refused:
        ckptx.convert("hf2dcp", hf, dst, overwrite=True)
    assert refused.value.exit_code == 5
    assert {path: path.lstat().st_ino for path in sorted(tmp_path.rglob("*"))} == before
