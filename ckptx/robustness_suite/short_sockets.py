"""Shorten the paths of multiprocessing's sockets, so that its fork server starts with any TMPDIR.

The path of a socket has at most 107 bytes on Linux. multiprocessing creates a directory in TMPDIR, and its sockets in
that directory; their names add 14 and 18 bytes, so a TMPDIR of 76 bytes is too long for its fork server. This module
opens the directory and uses its path below /proc/PID/fd. Child processes can use this path while this process runs.
"""

from __future__ import annotations

import os
from multiprocessing import process, util

from ckptx.errors import EnvironmentProblem

_MAX_PATH_BYTES = 104  # smallest limit of any system for the path of a socket, with its final NUL
_SOCKET_NAME_BYTES = len("/listener-") + 8  # bytes that the name of a socket from `tempfile` adds to its directory
_descriptors: dict[str, int] = {}  # directory -> descriptor, open until this process ends


def shorten_socket_paths() -> None:
    """Shorten the path of multiprocessing's directory for sockets; call this before a fork server starts.

    Raises:
        EnvironmentProblem: TMPDIR is too long, and /proc is not available.
    """
    directory = util.get_temp_dir()
    if len(os.fsencode(directory)) + _SOCKET_NAME_BYTES < _MAX_PATH_BYTES:
        return
    config = process.current_process()._config  # type: ignore[attr-defined]  # `get_temp_dir` reads it
    try:
        descriptor = _descriptors.get(directory)
        if descriptor is None:
            descriptor = _descriptors[directory] = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        short = f"/proc/{os.getpid()}/fd/{descriptor}"
        if not os.path.samefile(short, directory):
            raise FileNotFoundError(short)
    except OSError as error:
        parent, name = os.path.split(directory)
        limit = _MAX_PATH_BYTES - 1 - _SOCKET_NAME_BYTES - len(os.fsencode(f"/{name}"))
        raise EnvironmentProblem(
            f"TMPDIR: {parent} has {len(os.fsencode(parent))} bytes, too many for the path of a socket, at most "
            f"{limit} are possible, and /proc has no shorter name for it; set TMPDIR to a shorter path"
        ) from error
    config["tempdir"] = short
