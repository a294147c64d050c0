"""Phrases with numbers and names, for messages and reports."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """Return a number and its noun: `1 tensor`, `20,000 tensors`, `2 aliases`, `1 copy`, `2 copies`."""
    return f"{count:,} {noun if count == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Return the plural of a noun that is regular, or ends with a y after a consonant or with a sibilant."""
    if noun.endswith("y") and noun[-2:-1] not in ("", *"aeiou"):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def list_names(names: Sequence[str], limit: int = 5) -> str:
    """Return the first `limit` names, and the number of the others: `a, b, and 3 more`."""
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def first_of(names: Sequence[str]) -> str:
    """Return the first of one or more names in quotes, with an ellipsis if there are more: `"a"`, `"a", ...`."""
    return f'"{names[0]}"{", ..." if len(names) > 1 else ""}'


def human_bytes(nbytes: float) -> str:
    """Return a size in binary units: `1.92 GiB`."""
    for unit, digits in (("B", 0), ("KiB", 2), ("MiB", 2), ("GiB", 2)):
        if abs(round(nbytes, digits)) < 1024:  # 1 MiB less one byte is "1.00 MiB", not "1024.00 KiB"
            return f"{nbytes:.{digits}f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
