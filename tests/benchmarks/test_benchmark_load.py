"""What the benchmark of loading checks: bytes, files and digests; never time."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_a_rank_reads_its_part_from_its_own_files_and_has_what_others_load(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCHMARKS / "load.py"),
        "--tiny",
        "--ram",
        str(tmp_path),
        "--results",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ranks = json.loads((tmp_path / "load.json").read_text())["ranks"]
    assert [row["files"] for row in ranks] == [
        [".metadata", "__0_0.distcp", "ckptx.json", "config.json"],
        [".metadata", "__0_0.distcp", "__1_0.distcp", "ckptx.json", "config.json"],
    ]


def row(**changes: Any) -> dict[str, Any]:
    """What a rank says when all is well."""
    files = [".metadata", "__0_0.distcp", "__1_0.distcp", "config.json"]
    good = {
        "method": "ckptx",
        "tensors": 2,
        "needed": 1000,
        "read": 1100,
        "files": files,
        "memory_growth": 2000,
        "digest": "a",
    }
    return good | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"digest": "b"}, "different bytes from ckptx and stock"),
        ({"files": [*row()["files"], "__2_0.distcp"]}, "opened .*__2_0"),
        ({"files": [".metadata"]}, "expected only its own files"),
        ({"read": 1000 + 100 + 2 * (6 << 10) + 1}, "read 13389 bytes for shards of 1000"),
        ({"memory_growth": 1001 + (200 << 20)}, "bytes of memory"),
    ],
)
def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    check = importlib.import_module("load").check
    check([row(), row(method="stock")], 1, 100)
    with pytest.raises(SystemExit, match=said):
        check([row(**changes), row(method="stock")], 1, 100)
