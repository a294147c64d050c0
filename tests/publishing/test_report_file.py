"""`--report` and `--html` replace an earlier report or page of ckptx and nothing else, decided before the work."""

from __future__ import annotations

import errno
import os
import stat
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


FAILURES: dict[BaseException, tuple[type[BaseException], str]] = {
    **{
        OSError(number, text): (SpaceError, f"{text}; free some space, or choose a file on another disk")
        for number, text in ((errno.ENOSPC, "No space left on device"), (errno.EDQUOT, "Disk quota exceeded"))
    },
    OSError(errno.EIO, "Input/output error"): (OutputError, "Input/output error; choose another file"),
    KeyboardInterrupt(): (KeyboardInterrupt, ""),
    MemoryError(): (MemoryError, ""),
}


@pytest.mark.parametrize("call", ["open", "replace"])
@pytest.mark.parametrize("failure", FAILURES, ids=repr)
@pytest.mark.parametrize("is_new", [False, True])
def test_a_document_that_cannot_be_written_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, call: str, is_new: bool
) -> None:
    file = tmp_path / "file"
    if not is_new:
        write_text(file, Report(command="verify").to_json())
    before = tree_bytes(tmp_path)
    real = getattr(os, call)

    def failing(path: Path, *arguments: Any, **named: Any) -> Any:
        if str(path).endswith(".ckptx-new"):
            raise failure
        return real(path, *arguments, **named)

    kind, message = FAILURES[failure]
    with monkeypatch.context() as patch:
        patch.setattr(report_file.os, call, failing)
        with pytest.raises(kind) as failed:
            write_text(file, Report(command="diff").to_json())
    assert str(failed.value) == (f"{file}: cannot be written: {message}" if message else "")
    assert tree_bytes(tmp_path) == before


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_mode_of_a_document_follows_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize(("text", "data"), [("é€\n", "é€\n".encode()), ("a\ud800b", b"a?b"), ("", b"")])
def test_a_document_is_written_in_utf_8(tmp_path: Path, text: str, data: bytes) -> None:
    write_text(str(tmp_path / "file"), text)
    assert tree_bytes(tmp_path) == {"file": data}


def test_a_file_with_the_name_of_the_temporary_file_stays(tmp_path: Path) -> None:
    """Another process may have placed a link there."""
    temporary = tmp_path / f".file.{os.getpid()}.ckptx-new"
    (tmp_path / "victim").write_bytes(b"mine")
    temporary.symlink_to("victim")
    with pytest.raises(OutputError, match="file: cannot be written: File exists; choose another file"):
        write_text(tmp_path / "file", "text")
    assert (tmp_path / "victim").read_bytes() == b"mine"
    assert not (tmp_path / "file").exists()


UNUSABLE = {  # path below the temporary directory, and the message about it
    "x" * 256: "cannot be written: File name too long; choose another file",
    "loop/file": "cannot be written: Too many levels of symbolic links; choose another file",
    "victim/file": "cannot be written: Not a directory; choose another file",
    "missing/file": "its directory does not exist; create it, or choose another file",
    "victim": "exists and is not a report or HTML page that ckptx wrote; choose another file, or remove it",
    "link": "is a symbolic link; choose a new file, or an earlier report or HTML page of ckptx",
    "loop": "is a symbolic link; choose a new file, or an earlier report or HTML page of ckptx",
    "pipe": "is not a regular file; choose a new file, or an earlier report or HTML page of ckptx",
    "directory": "is not a regular file; choose a new file, or an earlier report or HTML page of ckptx",
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "victim").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("report")
    (tmp_path / "report").write_text(Report(command="verify").to_json())
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = state(tmp_path)
    for refuse in (lambda path: check_report_path(str(path)), check_report_path, lambda path: write_text(path, "new")):
        with pytest.raises(OutputError) as refused:
            refuse(tmp_path / name)
        assert str(refused.value) == f"{tmp_path / name}: {UNUSABLE[name]}"
    assert state(tmp_path) == before


def test_a_name_that_leaves_no_room_for_a_temporary_name_is_refused_when_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)
    check_report_path(path)
    with pytest.raises(OutputError) as refused:
        write_text(path, "new")
    assert str(refused.value) == f"{path}: cannot be written: File name too long; choose another file"
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    file = tmp_path / "file"
    write_text(file, Report(command="verify").to_json())
    before = len(os.listdir("/proc/self/fd"))

    def failing(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(OutputError) as refused:
            check_report_path(file)
    message = "read: Input/output error; choose another file" if call == "open" else "accessed: Input/output error"
    assert str(refused.value) == f"{file}: cannot be {message}"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["", "sub"])
def test_a_relative_path_is_that_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    write_text(Path(name) / "file", "text")
    assert (tmp_path / name / "file").read_text() == "text"


HEADS = {  # beginnings of files, and whether ckptx wrote them
    report_file.XML_HEAD + "1.0": True,
    " " + report_file.XML_HEAD: False,
    report_file.XML_HEAD[:-7]: False,
    f"<!doctype html>\n<html>\n{report_file.GENERATOR}\n": True,
    f"<!doctype html>\n<html>{report_file.GENERATOR}\n": False,
    f"<!doctype html>\n<html>\n{report_file.GENERATOR}": False,
    f"<!doctype html> \n{report_file.GENERATOR}\n": False,
    f"<!doctype html>\n{' ' * 4000}\n{report_file.GENERATOR}\n": True,
    f"<!doctype html>\n{' ' * 4096}\n{report_file.GENERATOR}\n": False,
    '{"schema_version": 12, "command": "verify", "exit": 3, "ok": false': True,
    '{"schema_version":1,"command":"convert to-dcp","exit":0,"ok":true': True,
    '{\n  "schema_version": 1,\n  "command": "usage",\n  "exit": 2,\n  "ok": false': True,
    '{"schema_version": 1, "command": "verify", "exit": 3, "ok": null': False,
    '{"schema_version": 1, "command": "other", "exit": 3, "ok": true': False,
    '{"schema_version": "1", "command": "verify", "exit": 3, "ok": true': False,
    '{"command": "verify", "schema_version": 1, "exit": 3, "ok": true': False,
    "<!DOCTYPE html>\n<html>": False,
}


@pytest.mark.parametrize("head", HEADS)
def test_a_document_of_ckptx_is_recognized_by_its_beginning(tmp_path: Path, head: str) -> None:
    file = tmp_path / "file"
    file.write_text(head)
    if HEADS[head]:
        write_text(file, "new")
        assert file.read_text() == "new"
    else:
        with pytest.raises(OutputError, match="exists and is not a report"):
            write_text(file, "new")
        assert file.read_text() == head


OLD_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; script-src 'sha256-abc='">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>model &amp; more - layout</title>
"""


@pytest.mark.parametrize(
    ("old", "new", "is_known"),
    [
        ("utf-8", "utf-8", True), ("light dark", "dark", True), ("model", "other", True), (' lang="en"', "", False),
        ("- layout", "- thesis", False), ("sha256-abc=", "self", False), ("'none'", "'self'", False),
        ("<title>", "<b><title>", False), ("utf-8", "latin-1", False),
    ],
)  # fmt: skip
def test_an_older_page_is_recognized_by_its_head(tmp_path: Path, old: str, new: str, is_known: bool) -> None:
    """These were written before pages named their generator."""
    file = tmp_path / "page.html"
    assert old in OLD_PAGE
    file.write_text(OLD_PAGE.replace(old, new))
    if is_known:
        check_report_path(file)
    else:
        with pytest.raises(OutputError, match="exists and is not a report"):
            check_report_path(file)


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
