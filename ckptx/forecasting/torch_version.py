"""Which torch can count the bytes of a step."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ckptx.errors import EnvironmentProblem

_NEEDED = (2, 13)


def can_count() -> bool:
    """Whether this torch lets operations of DTensors be seen one by one: before 2.13 some of them fail then."""
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= _NEEDED


def check_torch() -> None:
    """Refuses a torch that cannot.

    Raises:
        EnvironmentProblem: It is too old, or missing.
    """
    if not can_count():
        try:
            found = f"torch {version('torch')}"
        except PackageNotFoundError:
            found = "none"
        raise EnvironmentProblem(
            f"a forecast of memory: found {found}, needed torch {'.'.join(map(str, _NEEDED))}; install it, or go on "
            "without a forecast"
        )
