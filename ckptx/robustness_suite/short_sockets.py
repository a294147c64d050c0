"""Give multiprocessing a place for its sockets whose path is short enough, whatever TMPDIR is.

The path of a socket has at most 107 bytes on Linux. multiprocessing listens in a directory that it makes below TMPDIR,
with names of 32 characters, so that a TMPDIR of 76 bytes is too long for its fork server. Here that directory is opened
and reached through /proc/PID/fd: the same place, under another name. Processes that inherit the name can use it for as
long as this one runs.
"""

from __future__ import annotations

import os
from multiprocessing import process, util

from ckptx.errors import EnvironmentProblem

_MAX_PATH_BYTES = 104  # bytes of the path of a socket, with a zero at the end: the least of the systems that have them
_NAME_BYTES = len("/listener-") + 8  # of a socket in the directory, as `tempfile` makes it
_descriptors: dict[str, int] = {}  # directory -> descriptor, which stays open as long as multiprocessing can ask for it


def shorten_socket_paths() -> None:
    """Make the directory of multiprocessing's sockets reachable by a short path; call it before a fork server starts.

    Raises:
        EnvironmentProblem: TMPDIR is too long, and this system has no other name for it.
    """
    directory = util.get_temp_dir()
    if len(os.fsencode(directory)) + _NAME_BYTES < _MAX_PATH_BYTES:
        return
    config = process.current_process()._config  # type: ignore[attr-defined]  # where `get_temp_dir` looks
    try:
        descriptor = _descriptors.get(directory)
        if descriptor is None:
            descriptor = _descriptors[directory] = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        short = f"/proc/{os.getpid()}/fd/{descriptor}"
        if not os.path.samefile(short, directory):
            raise FileNotFoundError(short)
    except OSError as error:
        raise EnvironmentProblem(
            f"TMPDIR: {len(os.fsencode(directory))} bytes are too long for the path of a socket, at most "
            f"{_MAX_PATH_BYTES - _NAME_BYTES - 1} are possible, and /proc has no shorter name for it; set TMPDIR to a "
            "shorter path"
        ) from error
    config["tempdir"] = short
