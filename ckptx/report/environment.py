"""Versions and machine of a run, for a report that is read elsewhere and later."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from ckptx.version import __version__

_PACKAGES = ("torch", "transformers", "numpy")


def installed_version(package: str) -> str | None:
    """Return the version of a package without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment(**additional: str) -> dict[str, str]:
    """Return versions and machine by name.

    Args:
        additional: Additional entries, such as device and backend.
    """
    packages = {package: found for package in _PACKAGES if (found := installed_version(package)) is not None}
    return {
        "ckptx": __version__,
        "python": platform.python_version(),
        **packages,
        "platform": platform.platform(),
        "cores": str(len(os.sched_getaffinity(0))),
        **additional,
    }
