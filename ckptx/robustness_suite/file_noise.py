"""Differences between identical runs of a trainer: times and paths in files, and the number of steps to take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptx.robustness_suite.oracles import Items
from ckptx.robustness_suite.stored_items import is_of_bytes
from ckptx.untrusted.printable import one_line

_DIGITS = re.compile(r"[0-9]+")
_OF_SETTINGS = ("other", "step")  # oracles; a counter of steps would be the second number in both checkpoints
_LISTED = 8  # names in a line
_LONGEST_LINE = 400  # characters of them


def noisy_files(first: Items, second: Items, third: Items) -> set[tuple[str, str]]:
    """Return the files that differ between two identical runs, among those that are compared by their bytes.

    Names may have times in them: so a file that only the third checkpoint has is one of these, too, if its name is that
    of such a file but for digits.

    Args:
        first: Items of a checkpoint.
        second: Items of the same step in an identical run; if empty, no file is noisy.
        third: Items of the checkpoint that is compared with the first.
    """
    if not second:
        return set()
    every = {**first, **second}
    of_bytes = {key for key in every if is_of_bytes(first.get(key)) or is_of_bytes(second.get(key))}
    found = {key for key in of_bytes if first.get(key) != second.get(key)}
    patterns = {(oracle, _DIGITS.sub("#", name)) for oracle, name in found if _DIGITS.search(name)}
    new = {key for key in third if key not in every and is_of_bytes(third[key])}
    return found | {key for key in new if (key[0], _DIGITS.sub("#", key[1])) in patterns}


def following_steps(before: Items, after: Items, steps: int, save_at: int) -> set[tuple[str, str]]:
    """Return settings of a trainer that are equal to the number of steps it was given.

    Args:
        before: Items of the checkpoint that was resumed from.
        after: Items of the checkpoint that was saved again.
        steps: Number of steps of the first run.
        save_at: Number of steps of the second run.
    """
    wanted = (str(steps), str(save_at))
    return {key for key in before if key[0] in _OF_SETTINGS and (before[key], after.get(key)) == wanted}


def not_compared_line(keys: Iterable[tuple[str, str]], why: str) -> str:
    """Return a note on items that are not compared, with the reason."""
    return f"not compared: {_listed(sorted({name for _, name in keys}))}: {why}"


def lines_on_files(found: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield notes on files that are not compared.

    Args:
        found: Names of files by reason.
    """
    return (f"not compared ({reason}): {_listed(names)}" for reason, names in sorted(found.items()))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    return one_line(", ".join(names[:_LISTED]), _LONGEST_LINE) + more
