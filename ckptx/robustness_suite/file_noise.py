"""Find items that differ between runs for other reasons than lost state: timestamps, paths, the number of steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptx.robustness_suite.oracles import Items
from ckptx.robustness_suite.stored_items import is_file_digest
from ckptx.untrusted.printable import one_line

_DIGITS = re.compile(r"[0-9]+")
# Oracles that a setting with the number of steps may have; a step counter has the same value in both checkpoints.
_SETTING_ORACLES = ("other", "step")
_MAX_LISTED_NAMES = 8  # names in a note
_MAX_NAMES_LENGTH = 400  # characters of the names in a note


def noisy_files(reference: Items, repeated: Items, compared: Items) -> set[tuple[str, str]]:
    """Return the keys (oracle, name) of files that differ between identical runs, of those compared by their bytes.

    File names may contain timestamps, so a file that only `compared` has is also included if its name equals that of a
    noisy file except for digits.

    Args:
        reference: Items of a checkpoint.
        repeated: Items of the same step in an identical run; if empty, no file is noisy.
        compared: Items of the checkpoint that is compared with the first.
    """
    if not repeated:
        return set()
    known = {**reference, **repeated}
    file_keys = {key for key in known if is_file_digest(reference.get(key)) or is_file_digest(repeated.get(key))}
    noisy = {key for key in file_keys if reference.get(key) != repeated.get(key)}
    patterns = {(oracle, _DIGITS.sub("#", name)) for oracle, name in noisy if _DIGITS.search(name)}
    new = {key for key in compared if key not in known and is_file_digest(compared[key])}
    return noisy | {key for key in new if (key[0], _DIGITS.sub("#", key[1])) in patterns}


def step_count_settings(
    source_items: Items, resaved_items: Items, source_run_steps: int, resaved_run_steps: int
) -> set[tuple[str, str]]:
    """Return the keys (oracle, name) of items that in each checkpoint equal the number of steps its run was given.

    Args:
        source_items: Items of the checkpoint that was resumed from.
        resaved_items: Items of the checkpoint that was saved again.
        source_run_steps: Number of steps of the run that saved the first.
        resaved_run_steps: Number of steps of the run that saved the second.
    """
    step_counts = (str(source_run_steps), str(resaved_run_steps))
    return {
        key
        for key in source_items
        if key[0] in _SETTING_ORACLES and (source_items[key], resaved_items.get(key)) == step_counts
    }


def not_compared_note(keys: Iterable[tuple[str, str]], reason: str) -> str:
    """Return a note on items that are not compared, by their keys (oracle, name), with the reason."""
    return f"not compared: {_join_names(sorted({name for _, name in keys}))}: {reason}"


def not_compared_file_notes(files_by_reason: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield notes on files that are not compared.

    Args:
        files_by_reason: Names of files by reason.
    """
    return (f"not compared ({reason}): {_join_names(names)}" for reason, names in sorted(files_by_reason.items()))


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED_NAMES:,} more" if len(names) > _MAX_LISTED_NAMES else ""
    return one_line(", ".join(names[:_MAX_LISTED_NAMES]), _MAX_NAMES_LENGTH) + more
