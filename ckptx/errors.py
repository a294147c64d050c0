"""Every way ckptx can refuse, one class per exit code.

A message says subject, found, needed, next step, in one line, and names the file or tensor:
`model-00002.safetensors: tensor "x" ends at byte 912, file has 900; the file is truncated, download it again`.
"""

from __future__ import annotations


class CkptxError(Exception):
    """Base of every refusal; `exit_code` is what the command line returns for it."""

    exit_code = 1


class UsageError(CkptxError):
    """The call itself is wrong: options that exclude each other, a value out of range."""

    exit_code = 2


class InputError(CkptxError):
    """The input is unreadable, corrupt or incomplete."""

    exit_code = 3


class UnsupportedError(CkptxError):
    """The input is understood, but ckptx does not support what it holds; the message names it."""

    exit_code = 4


class OutputError(CkptxError):
    """The output exists, overlaps the input, or cannot be written."""

    exit_code = 5


class SpaceError(CkptxError):
    """There is not enough space: on a disk for the output, or in memory for models."""

    exit_code = 6


class EnvironmentProblem(CkptxError):
    """The environment lacks something: a package, a device."""

    exit_code = 7


_BY_EXTRA = {
    "torch": "run",
    "transformers": "run",
    "tokenizers": "run",
    "ruamel": "run",
    "datasets": "data",
    "PIL": "data",
    "tensorboard": "tensorboard",
}


def missing_package(subject: str, error: ImportError) -> EnvironmentProblem:
    """The refusal for a package that cannot be imported: what needs it, and how to install it.

    Args:
        subject: What needs the package: an option, a class.
        error: What the import said.
    """
    package = (error.name or "").partition(".")[0]
    if package in _BY_EXTRA:
        return EnvironmentProblem(
            f"{subject}: needs {package}, which is not installed; pip install 'ckptx[{_BY_EXTRA[package]}]'"
        )
    if package:
        return EnvironmentProblem(f"{subject}: needs the package {package}, which is not installed; install it")
    said = (str(error).splitlines() or ["an import failed"])[0]
    return EnvironmentProblem(f"{subject}: a package is missing: {said.rstrip('.')}; install it")


class PeerFailure(CkptxError):
    """Another process of the same run failed; carries its exit code.

    Attributes:
        is_said: True when somebody else tells the user: the rank that failed, or rank 0 of one that died.
    """

    def __init__(self, message: str, exit_code: int, is_said: bool = True) -> None:
        super().__init__(message)
        self.exit_code, self.is_said = exit_code, is_said


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt it is no Exception: nothing may swallow it."""


class HungUp(Terminated):
    """SIGHUP arrived: the terminal is gone."""


def exit_code_of(error: BaseException) -> int:
    """The exit code of whatever was raised."""
    if isinstance(error, CkptxError):
        return error.exit_code
    if isinstance(error, HungUp):
        return 129
    if isinstance(error, Terminated):
        return 143
    return 130 if isinstance(error, KeyboardInterrupt) else Defect.exit_code


class Defect(CkptxError):
    """ckptx caught itself about to do something wrong. Nothing was published; the message asks for a report."""

    exit_code = 70
