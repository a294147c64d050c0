"""Errors of ckptx, one class per exit code.

A message is one line that names the file or tensor, then the problem, the requirement, and the next step:
`model-00002.safetensors: tensor "x" ends at byte 912, but the file has 900; the file is truncated, download it again`.
"""

from __future__ import annotations

import errno
import re


class CkptxError(Exception):
    """Base class of all errors.

    Attributes:
        exit_code: Exit code of the command line. Each direct subclass has its own; a `PeerFailure` has that of the
            process that failed.
    """

    exit_code = 1


class UsageError(CkptxError):
    """The call is invalid: options that exclude each other, a value out of range."""

    exit_code = 2


class ArgumentTypeError(UsageError, TypeError):
    """An argument of a Python function is unknown or missing, or its type is not accepted."""


class InputError(CkptxError):
    """The input is unreadable, corrupt or incomplete."""

    exit_code = 3


class ReadError(InputError):
    """A file or directory exists and cannot be read, for example because permission is missing."""


class StorageFailure(ReadError):
    """The storage failed while reading (an I/O error, a stale handle).

    A search for files stops at this error, while it skips files and directories with other input errors: it cannot know
    whether the storage has what it searches for.
    """


class UnsupportedError(CkptxError):
    """The input is valid, but of a kind that ckptx does not support; the message names it."""

    exit_code = 4


class OutputError(CkptxError):
    """The output exists, overlaps the input, or cannot be written."""

    exit_code = 5


class OutputFailure(OutputError):
    """The storage of the output failed (an I/O error, a stale handle); which files it contains now is unknown."""


class ReportTargetError(OutputError):
    """The file for the report is also the output, so that not even a report of the failure may be written to it."""


class SpaceError(CkptxError):
    """There is not enough space, on disk for the output or in memory for models."""

    exit_code = 6


class EnvironmentProblem(CkptxError):
    """The environment lacks a package, a device or a resource."""

    exit_code = 7


# Error of the dynamic loader, also inside the text of numpy's ImportError.
_UNMAPPED_LIBRARY = re.compile(r"(\S+): (?:failed to map segment|cannot allocate memory|cannot create)", re.IGNORECASE)


def find_environment_problem(error: BaseException) -> EnvironmentProblem | None:
    """Return the error for an exception that the environment causes; None for other exceptions.

    These are limits of the system, too many open files or threads or too little memory for a library, and a current
    directory that was removed.
    """
    if isinstance(error, ImportError) and (match := _UNMAPPED_LIBRARY.search(str(error))) is not None:
        return EnvironmentProblem(
            f"{match[1]}: not enough memory to load this library; raise the limit (ulimit -v), or use a machine with "
            "more memory"
        )
    if isinstance(error, FileNotFoundError) and error.filename is None:  # raised by `os.getcwd()`
        return EnvironmentProblem("the current directory was removed; run ckptx in another directory")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        subject = error.filename or "files"
        return EnvironmentProblem(f"{subject}: cannot be opened: {error.strerror}; raise the limit (ulimit -n)")
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return EnvironmentProblem(
            "threads: the system cannot start another thread; raise its limits (ulimit -u, ulimit -v), or pass a "
            "smaller --workers"
        )
    return None


# Import name of a package -> the extra of ckptx that installs it.
_EXTRA_BY_PACKAGE = {
    "torch": "run",
    "transformers": "run",
    "tokenizers": "run",
    "ruamel": "run",
    "datasets": "data",
    "PIL": "data",
    "tensorboard": "tensorboard",
}


def missing_package(subject: str, error: ImportError) -> EnvironmentProblem:
    """Return the error for a package that cannot be imported, with the command to install it.

    Args:
        subject: Option, class or input that requires the package.
        error: The failed import.
    """
    package = (error.name or "").partition(".")[0]
    if package in _EXTRA_BY_PACKAGE:
        return EnvironmentProblem(
            f"{subject}: requires {package}, which is not installed; pip install 'ckptx[{_EXTRA_BY_PACKAGE[package]}]'"
        )
    if package:
        return EnvironmentProblem(f"{subject}: requires the package {package}, which is not installed; install it")
    reason = (str(error).splitlines() or ["an import failed"])[0]
    return EnvironmentProblem(f"{subject}: a package is missing: {reason.rstrip('.')}; install it")


class PeerFailure(CkptxError):
    """Another process of the same run failed.

    Attributes:
        exit_code: Exit code of that process.
        is_reported: True if another process prints the error: the rank that failed, or rank 0 for a rank that died.
    """

    def __init__(self, message: str, exit_code: int, is_reported: bool = True) -> None:
        super().__init__(message)
        self.exit_code, self.is_reported = exit_code, is_reported


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt it is not an Exception, so that no handler suppresses it."""


class HungUp(Terminated):
    """SIGHUP arrived: the terminal was closed."""


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an exception; 70, that of an internal error, for unexpected ones."""
    if isinstance(error, CkptxError):
        return error.exit_code
    if isinstance(error, HungUp):
        return 129
    if isinstance(error, Terminated):
        return 143
    return 130 if isinstance(error, KeyboardInterrupt) else InternalError.exit_code


class InternalError(CkptxError):
    """ckptx detected a bug in itself. No output was created; the message asks for a report."""

    exit_code = 70
