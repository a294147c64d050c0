"""Hub ids: a local path wins, offline opens no socket, the rest is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.hub import resolve_source


def test_a_local_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_source("org/name") == Path("org/name")


@pytest.mark.parametrize("source", ["s3://bucket/x", "gs://b/x", "hf://org/name", "https://huggingface.co/org/name"])
def test_remote_storage_is_refused(source: str) -> None:
    with pytest.raises(UnsupportedError, match="is a URL"):
        resolve_source(source)


@pytest.mark.parametrize("source", ["gone", "/gone/x", "a/b/c", "./org/name", "org/", "-x/y", ""])
def test_what_is_no_hub_id_is_a_missing_path(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no such file or directory"):
        resolve_source(source)


_OFFLINE = """
import socket, sys
def refuse(*args, **kwargs):
    raise SystemExit("a socket was opened")
socket.socket.connect = refuse
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.hub import resolve_source
try:
    print(resolve_source(sys.argv[1], cache_dir=sys.argv[2]))
except InputError as error:
    print(error)
"""


def offline(source: str, cache: Path) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _OFFLINE, source, str(cache)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_offline_looks_into_the_cache_alone(tmp_path: Path) -> None:
    said = offline("org/name", tmp_path)
    advice = "download it first (hf download org/name)"
    assert said == f"org/name: no such path, and not in the Hub cache (HF_HUB_OFFLINE is set); {advice}"
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("a" * 40)
    assert offline("org/name", tmp_path) == str(snapshot)


def test_a_missing_file_of_a_directory_is_not_to_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model-dcp").mkdir()
    assert offline("model-dcp/missing", tmp_path / "cache") == (
        "model-dcp/missing: no such file or directory in model-dcp, and not in the Hub cache (HF_HUB_OFFLINE is set)"
    )
