"""A failed access to the output, at any position of any command: exit 5 or 6, and either all or nothing is there."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import CkptxError
from tests.support.checkpoint_writers import LLAMA, llama, write_hf
from tests.support.failing_calls import WRITES, failing_calls

CONFIG = LLAMA | {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
STAGING, OLD = ".out.ckptx-partial", ".out.ckptx-old"
Command = Callable[[Path, Path], Any]

COMMANDS: dict[str, Command] = {
    "hf2dcp": lambda at, out: ckptx.convert("hf2dcp", at / "hf", out, workers=1),
    "dcp2hf": lambda at, out: ckptx.convert("dcp2hf", at / "dcp", out, workers=1),
    "reshard": lambda at, out: ckptx.reshard(at / "hf", out, tp=2, workers=1),
    "overwrite": lambda at, out: ckptx.convert("dcp2hf", at / "dcp", out, workers=1, overwrite=True),
    "resume": lambda at, out: ckptx.convert("dcp2hf", at / "dcp", out, workers=1, resume=True),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model in two formats."""
    at = tmp_path_factory.mktemp("sources")
    write_hf(at / "hf", llama(), shards=2, config=CONFIG)
    ckptx.convert("hf2dcp", at / "hf", at / "dcp")
    return at


def contents(root: Path) -> dict[str, bytes]:
    """Files below a directory, without manifests, which have times."""
    files = (each for each in root.rglob("*") if each.is_file() and each.name != "ckptx.json")
    return {str(each.relative_to(root)): each.read_bytes() for each in files}


def prepare(name: str, checkpoints: Path, root: Path) -> dict[str, bytes]:
    """Empty `root`, or write what the command replaces or finds complete; return the contents."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    if name == "overwrite":
        COMMANDS["hf2dcp"](checkpoints, root / "out")
    if name == "resume":
        COMMANDS["dcp2hf"](checkpoints, root / "out")
    return contents(root)


def check(checkpoints: Path, name: str, root: Path, indices: Sequence[int] | None, number: int) -> None:
    """Fail the accesses with these indices (None: every access), one in each run."""
    prepare(name, checkpoints, root)
    with failing_calls(root, names=WRITES) as calls:
        COMMANDS[name](checkpoints, root / "out")
    complete, count = contents(root), len(calls.calls)
    for index in range(count) if indices is None else sorted({each % count for each in indices}):
        before, error, notes = prepare(name, checkpoints, root), None, [""]
        with failing_calls(root, index, number, WRITES) as calls:
            try:
                notes = COMMANDS[name](checkpoints, root / "out").notes
            except CkptxError as raised:
                error = raised
        call, text = calls.calls[index], " ".join(notes) if error is None else str(error)
        # The directory of the run, which one failed access may leave behind.
        left = {each for each in root.rglob("*") if each.name in (STAGING, OLD)}
        after = {path: data for path, data in contents(root).items() if ".ckptx-" not in path}
        if error is None:
            assert after == complete, (call, text)
            assert all(f"{each}: could not be removed" in text for each in left), (call, text, left)
        else:
            assert error.exit_code in ((6, 5) if number == errno.ENOSPC else (5,)), (call, error)
            assert os.strerror(number) in text, (call, error)
            assert after == complete if " is complete" in text else after == before, (call, error)
            assert left == set(), (call, error)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", COMMANDS)
def test_all_or_nothing_is_there(checkpoints: Path, name: str, tmp_path: Path, number: int) -> None:
    check(checkpoints, name, tmp_path / "root", [7, 23, 31, 47, 61, 83, 113, 137, 149], number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", COMMANDS)
def test_all_or_nothing_is_there_at_every_position(checkpoints: Path, name: str, tmp_path: Path, number: int) -> None:
    check(checkpoints, name, tmp_path / "root", None, number)
