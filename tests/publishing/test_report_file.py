"""`--report` and `--html` replace an earlier report or page of ckptx and nothing else, decided before the work."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.cli.main import cli
from ckptx.errors import OutputError, SpaceError
from ckptx.options.commands import commands_by_name
from ckptx.publishing import report_file
from ckptx.publishing.report_file import check_report_path, write_text
from ckptx.report.report import Report
from tests.support.checkpoint_writers import llama, names_in, tree_bytes, write_hf
from tests.support.runner import CliRunner


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "in" / "hf", llama(layers=1), shards=2)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], standalone_mode=False)


def commands(hf: Path, tmp_path: Path, file: Path) -> dict[str, tuple[object, ...]]:
    """Every command that writes a document."""
    return {
        "convert --report": ("convert", "hf2dcp", hf, tmp_path / "out", "--report", file),
        "reshard --report": ("reshard", hf, tmp_path / "out", "--tp", 2, "--report", file),
        "verify --report": ("verify", hf, hf, "--report", file),
        "convert that fails --report": ("convert", "hf2dcp", tmp_path / "gone", tmp_path / "out", "--report", file),
        "inspect --html": ("inspect", hf, "--html", file),
    }


COMMANDS = list(commands(Path(), Path(), Path()))
EXISTING: dict[str, bytes] = {
    "text": b"mine",
    "nothing": b"",
    "json of somebody": b'{"schema_version": 1, "results": [1, 2]}',
    "json with a command": b'{"command": "convert"}',
    "a list": b"[]",
    "html of somebody": b"<!doctype html>\n<html>\n<head>\n<title>thesis</title>",
    "html that mentions ckptx": b'<!doctype html>\n<html><body>&lt;meta name="generator" content="ckptx"&gt;',
    "a marker late in a file": b"mine\n" + report_file.GENERATOR.encode() + b"\n",
    "a report behind something": b'mine {"schema_version": 1, "command": "verify", "exit": 0, "ok": true}',
    "binary": bytes(range(256)) * 20,
}
PLANTED: dict[str, Callable[[Path], object]] = {
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
    "link to a file": lambda path: path.symlink_to("victim"),
    "link to a report": lambda path: path.symlink_to("report"),
    "link to nothing": lambda path: path.symlink_to("injected"),
    "link to a directory": lambda path: path.symlink_to("."),
    "link to a device": lambda path: path.symlink_to("/dev/null"),
}


def state(root: Path) -> dict[str, object]:
    """Everything below, links unfollowed."""
    return {
        str(path): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else path.stat().st_mode
        for path in sorted(root.rglob("*"))
    }


def is_refused(hf: Path, tmp_path: Path, command: str, file: Path) -> None:
    before = state(tmp_path)
    result = run(*commands(hf, tmp_path, file)[command])
    assert result.return_value == 5, result.stderr
    assert str(file) in result.stderr and len(result.stderr.splitlines()) == 1
    assert state(tmp_path) == before  # nothing was converted either


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("existing", EXISTING)
def test_a_file_that_is_neither_report_nor_page_stays(hf: Path, tmp_path: Path, command: str, existing: str) -> None:
    (tmp_path / "file").write_bytes(EXISTING[existing])
    is_refused(hf, tmp_path, command, tmp_path / "file")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("injected", PLANTED)
def test_what_is_no_file_stays(hf: Path, tmp_path: Path, command: str, injected: str) -> None:
    (tmp_path / "victim").write_bytes(b"mine")
    (tmp_path / "report").write_text(Report(command="verify").to_json())
    PLANTED[injected](tmp_path / "file")
    is_refused(hf, tmp_path, command, tmp_path / "file")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_file_of_the_source_stays(hf: Path, tmp_path: Path, command: str) -> None:
    for name in tree_bytes(hf):
        is_refused(hf, tmp_path, command, hf / name)
    is_refused(hf, tmp_path, command, hf)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_directory_that_is_missing_is_said_before_the_work(hf: Path, tmp_path: Path, command: str) -> None:
    is_refused(hf, tmp_path, command, tmp_path / "missing" / "file")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("other", COMMANDS)
def test_documents_replace_each_other_and_leave_nothing(hf: Path, tmp_path: Path, command: str, other: str) -> None:
    file = tmp_path / "file"
    for each in (command, other):
        if (tmp_path / "out").exists():
            (tmp_path / "out").rename(tmp_path / "in" / "before")
        result = run(*commands(hf, tmp_path, file)[each])
        assert result.return_value == (3 if "fails" in each else 0), result.stderr
        assert (b'"command": "' + each.split()[0].encode() in file.read_bytes()) == ("--report" in each)
        assert set(names_in(tmp_path)) <= {"file", "in", "out"}


def test_a_page_from_before_pages_named_their_generator_is_known(hf: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    ckptx.inspect(hf, html=page)
    page.write_text(page.read_text().replace(report_file.GENERATOR + "\n", ""))
    assert report_file.GENERATOR not in page.read_text()
    ckptx.inspect(hf, html=page)
    assert report_file.GENERATOR in page.read_text()


def test_a_document_whose_disk_is_full_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_text(file, Report(command="verify").to_json())
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report_file.os, "replace", full)
    with pytest.raises(SpaceError, match="No space left"):
        write_text(file, Report(command="diff").to_json())
    assert file.read_bytes() == before and names_in(tmp_path) == ["file"]


def test_what_came_between_the_look_and_the_writing_stays(tmp_path: Path) -> None:
    check_report_path(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(OutputError):
        write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("spelling", ["out", "./out", "there/../out"])
def test_a_report_that_is_also_the_output_is_refused_before_the_work(hf: Path, tmp_path: Path, spelling: str) -> None:
    (tmp_path / "there").mkdir()
    for words in (("convert", "to-dcp"), ("reshard", "--tp", 2)):
        result = run(*words, hf, tmp_path / "out", "--report", f"{tmp_path}/{spelling}")
        assert result.return_value == 5, result.output
        assert "is the report and DST;" in result.stderr
        assert {each.name for each in tmp_path.iterdir()} == {"there", "in"}


@pytest.mark.parametrize("command", [*commands_by_name(), "usage"])
def test_a_report_of_every_command_may_be_overwritten(command: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(Report(command=command, exit=0).to_json())
    check_report_path(tmp_path / "report.json")
