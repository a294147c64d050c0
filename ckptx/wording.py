"""Numbers with their nouns, as every message and report says them."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """A number and its noun: `1 tensor`, `20,000 tensors`, `2 aliases`, `1 copy`, `2 copies`."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """The plural of a noun that is regular, or ends with a y after a consonant, or hisses."""
    if noun.endswith("y") and noun[-2:-1] not in ("", *"aeiou"):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def first_of(names: Sequence[str]) -> str:
    """The first of several names, in quotes: `"a"`, `"a" and more`."""
    return f'"{names[0]}"{" and more" if len(names) > 1 else ""}'
