"""Write reports and HTML pages to a new file, or over an earlier report or page of ckptx.

Reports are JSON (`--report`) or JUnit XML; pages show layouts (`inspect --html`) or forecasts.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from ckptx.errors import OutputError, SpaceError
from ckptx.storage.open_file import OpenFile
from ckptx.untrusted.remote_name import refuse_remote

GENERATOR = '<meta name="generator" content="ckptx">'
_HEAD_NBYTES = 4096  # bytes at the beginning that identify a report or page
# Beginning of a JSON report, with the first fields of `Report`. The alternatives for "command" are the first words of
# all commands of the command line; "usage" is the command of a report on a wrong call.
_REPORT = re.compile(
    rb'\{\s*"schema_version":\s*\d+,\s*"command":\s*"'
    rb'(convert|reshard|merge|inspect|diff|verify|env|forecast|robustness|usage)[^"]*",\s*"exit":\s*\d+,\s*'
    rb'"ok":\s*(true|false)'
)
# Beginning of the JUnit XML of `robustness --junit`.
XML_HEAD = '<?xml version="1.0" encoding="utf-8"?>\n<testsuites name="ckptx '
# Beginning of older pages, which did not name their generator.
_OLD_PAGE = re.compile(
    rb'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" '
    rb"content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[^\"]*\">\n(<meta [^>]*>\n)+"
    rb"<title>[^<]* - layout</title>"
)


def check_report_path(path: str | Path) -> None:
    """Check that a report or page may be written to a path; commands call this before any other work.

    Raises:
        OutputError: The path exists and is not a report or page of ckptx, or its directory is missing.
        UnsupportedError: The path is a URL.
    """
    refuse_remote(path)
    path = Path(path)
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        if not os.path.isdir(Path(os.path.abspath(path)).parent):
            raise OutputError(f"{path}: its directory does not exist; create it, or choose another file") from None
        return
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}; choose another file") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        raise OutputError(f"{path}: is {kind}; choose a new file, or an earlier report or HTML page of ckptx")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with OpenFile(descriptor, path) as file:
            is_earlier = stat.S_ISREG(os.fstat(descriptor).st_mode) and is_earlier_output(file)
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror}; choose another file") from error
    if not is_earlier:
        raise OutputError(
            f"{path}: exists and is not a report or HTML page that ckptx wrote; choose another file, or remove it"
        )


def is_earlier_output(file: OpenFile) -> bool:
    """Return True for a file that begins like a report, a page or JUnit XML of ckptx."""
    head = file.read(_HEAD_NBYTES, 0)
    if _REPORT.match(head) or head.startswith(XML_HEAD.encode()):
        return True
    is_page = head.startswith(b"<!doctype html>\n") and b"\n" + GENERATOR.encode() + b"\n" in head
    return is_page or _OLD_PAGE.match(head) is not None


def write_text(path: str | Path, text: str) -> None:
    """Write a report or page atomically, in UTF-8; characters that UTF-8 cannot encode become `?`.

    Raises:
        OutputError: The path is not allowed or cannot be written.
        SpaceError: The disk is full.
        UnsupportedError: The path is a URL.
    """
    check_report_path(path)
    path = Path(path)
    temporary = path.parent / f".{path.name}.{os.getpid()}.ckptx-new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(text.encode("utf-8", "replace"))
        os.replace(temporary, path)
    except BaseException as error:  # remove the temporary file; raised again below
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(
                f"{path}: cannot be written: {error.strerror}; free some space, or choose a file on another disk"
            ) from error
        if isinstance(error, OSError):
            raise OutputError(f"{path}: cannot be written: {error.strerror}; choose another file") from error
        raise
