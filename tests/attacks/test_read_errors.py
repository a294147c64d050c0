"""A failed read, at any position of any command, is an error with the file and the errno text; nothing is left."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import CkptxError, StorageFailure
from tests.support.checkpoint_writers import LLAMA, llama, write_hf
from tests.support.failing_calls import failing_calls

CONFIG = LLAMA | {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
Command = Callable[[Path, Path], Any]

COMMANDS: dict[str, tuple[str, Command]] = {
    "inspect hf": ("hf", lambda at, out: ckptx.inspect(at / "hf")),
    "inspect dcp": ("dcp", lambda at, out: ckptx.inspect(at / "dcp")),
    "inspect ranks": ("shards", lambda at, out: ckptx.inspect(at / "shards", ranks=True)),
    "hf2dcp": ("hf", lambda at, out: ckptx.convert("hf2dcp", at / "hf", out)),
    "dcp2hf": ("dcp", lambda at, out: ckptx.convert("dcp2hf", at / "dcp", out)),
    "dcp2hf, base": ("hf", lambda at, out: ckptx.convert("dcp2hf", at / "bare", out, base=at / "hf")),
    "reshard": ("shards", lambda at, out: ckptx.reshard(at / "shards", out, tp=2, pp=2)),
    "to torchtitan": ("hf", lambda at, out: ckptx.convert("hf2dcp", at / "hf", out, names="torchtitan")),
    "from torchtitan": ("titan", lambda at, out: ckptx.convert("dcp2hf", at / "titan", out)),
    "diff": ("dcp", lambda at, out: ckptx.diff(at / "hf", at / "dcp")),
    "verify": ("dcp", lambda at, out: ckptx.verify(at / "hf", at / "dcp")),
    "verify shards": ("shards", lambda at, out: ckptx.verify(at / "hf", at / "shards")),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model in each form."""
    at = tmp_path_factory.mktemp("sources")
    write_hf(at / "hf", llama(), shards=2, config=CONFIG)
    ckptx.convert("hf2dcp", at / "hf", at / "dcp")
    ckptx.convert("hf2dcp", at / "hf", at / "titan", names="torchtitan")
    ckptx.reshard(at / "hf", at / "shards", tp=2)
    shutil.copytree(at / "dcp", at / "bare")
    for name in ("config.json", "ckptx.json"):
        (at / "bare" / name).unlink(missing_ok=True)
    return at


def contents(root: Path) -> dict[str, bytes]:
    """Files below a directory, without manifests, which have times."""
    files = (each for each in root.rglob("*") if each.is_file() and each.name != "ckptx.json")
    return {str(each.relative_to(root)): each.read_bytes() for each in files}


def check(checkpoints: Path, name: str, tmp_path: Path, indices: Sequence[int] | None, number: int) -> None:
    """Fail the accesses with these indices (None: every access), one in each run."""
    source, command = COMMANDS[name]
    with failing_calls(checkpoints / source) as reads:
        command(checkpoints, tmp_path / "out")
    expected, count = contents(tmp_path), len(reads.calls)
    for index in range(count) if indices is None else sorted({each % count for each in indices}):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        error = None
        with failing_calls(checkpoints / source, index, number) as reads:
            try:
                command(checkpoints, tmp_path / "out")
            except CkptxError as raised:
                error = raised
        called, path = reads.calls[index]
        if error is None:  # a link that is resolved, or a file that need not exist
            assert called in ("stat", "lstat"), (called, path)
            assert contents(tmp_path) == expected, (called, path)
        else:
            assert error.exit_code == 3, (called, path, error)
            assert os.strerror(number) in str(error) and os.path.basename(path) in str(error), (called, path, error)
            assert list(tmp_path.iterdir()) == [], (called, path, error)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", COMMANDS)
def test_it_is_named(checkpoints: Path, name: str, tmp_path: Path, number: int) -> None:
    check(checkpoints, name, tmp_path, [3, 11, 17, 29, 43, 71, 113, 149], number)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_position_is_named(checkpoints: Path, name: str, tmp_path: Path) -> None:
    check(checkpoints, name, tmp_path, None, errno.EIO)


@pytest.mark.parametrize(("number", "is_found"), [(errno.EIO, False), (errno.ESTALE, False), (errno.EACCES, True)])
def test_a_search_goes_on_only_where_permission_is_missing(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_found: bool
) -> None:
    shutil.copytree(checkpoints / "dcp", tmp_path / "run" / "step-1")
    (tmp_path / "run" / "step-2").mkdir()
    real = os.scandir

    def scandir(path: Any) -> Any:
        if os.path.basename(path) == "step-2":
            raise OSError(number, os.strerror(number), path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    if is_found:
        assert ckptx.inspect(tmp_path / "run").format == "dcp"
    else:
        with pytest.raises(StorageFailure, match=f"step-2: cannot be read: {os.strerror(number)}"):
            ckptx.inspect(tmp_path / "run")
