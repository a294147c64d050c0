"""Distinguish names of one rank's part of a checkpoint from names with a step, version or size.

    model_0.safetensors, model_1.safetensors        one checkpoint of two ranks
    tp_rank_00/, tp_rank_01/                        the same, in directories
    model-00001-of-00002.safetensors                one of two files
    step-100/, step-200/; v1/, v2/; model-7b/       independent checkpoints

A name is split into its numbers, each with the word before it. Names form a group if they differ only in numbers that
may be ranks. If the names do not decide, the contents of the files do; see `rank_files`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"([A-Za-z]+)[-_.=]*$")
_ENDING = re.compile(r"\.(safetensors|bin|pt|pth)$")
_OF_TOTAL = re.compile(r"[-_.]?of[-_.]?(\d+)", re.IGNORECASE)
_WORLD_SIZE = re.compile(r"(?:world_?size|n_?ranks|num_?ranks)[-_.=]?(\d+)", re.IGNORECASE)

# Words before a rank; ranks count from 0, unlike the numbers of a LoRA of rank 8 or of a layout tp4.
_RANK_WORDS = frozenset({"rank", "ranks", "tp", "pp", "dp", "mp", "shard"})
# Words before a number that distinguishes independent checkpoints.
_NON_RANK_WORDS = frozenset({
    "attempt", "b", "ba", "batch", "best", "checkpoint", "checkpoints", "ckpt", "config", "date", "ema", "ep", "epoch",
    "epochs", "eval", "exp", "experiment", "fold", "gs", "it", "iter", "iteration", "iterations", "iters", "job",
    "last", "phase", "release", "rev", "revision", "round", "run", "sample", "samples", "save", "seed", "snapshot",
    "size", "step", "steps", "t", "test", "time", "tokens", "trial", "update", "updates", "v", "variant", "ver",
    "version",
})  # fmt: skip
# Directories may have any name; those with one of these words before a number may be parts.
_DIRECTORY_PART_WORDS = frozenset({
    "chunk", "consolidated", "device", "gpu", "host", "model", "node", "params", "part", "partition", "piece",
    "proc", "process", "slice", "split", "stage", "state", "weights", "worker",
})  # fmt: skip

_NumberKind = Literal["rank", "n_of_m", "plain", "other"]


class _NameNumber(NamedTuple):
    """A number in a name.

    Attributes:
        kind: "rank" after a word for a rank, "n_of_m" for the N of "N of M", "other" for a step, version or size,
            else "plain".
        value: Value of the number.
        word: Word before it in lower case; empty if there is none.
        total: M of "N of M"; None for other numbers.
    """

    kind: _NumberKind
    value: int
    word: str
    total: int | None = None


class NameGroup(NamedTuple):
    """Names in one directory that differ only in numbers which may be ranks.

    Attributes:
        names: All names, at least two, in the order of their numbers.
        kind: "rank" for a number after a word for a rank, "n_of_m" for the N of "N of M", "plain" for other numbers.
        first: The smallest number. If the names differ in several numbers, the largest of their smallest values.
        is_gapless: True if no number between the smallest and the largest is missing, in each number that differs.
    """

    names: tuple[str, ...]
    kind: Literal["rank", "n_of_m", "plain"]
    first: int
    is_gapless: bool


def world_size_from_name(name: str) -> int | None:
    """Return the world size in a name ("world_size_8_rank_0", "rank-0-of-2"), or None."""
    found = _WORLD_SIZE.search(name)
    if found is not None:
        return int(found[1])
    return max((number.total or 0 for number in _numbers_in(name) if number.kind == "rank"), default=0) or None


def file_count_from_name(name: str) -> int | None:
    """Return M > 1 for the name of file N of M ("model-00001-of-00002.safetensors"), or None."""
    totals = [number.total or 0 for number in _numbers_in(_ENDING.sub("", name)) if number.kind == "n_of_m"]
    return max(totals, default=0) if max(totals, default=0) > 1 else None


def has_rank(name: str) -> bool:
    """Return True if the name contains a word for a rank with a number."""
    return any(number.kind == "rank" for number in _numbers_in(_ENDING.sub("", name)))


def may_be_part(name: str) -> bool:
    """Return True if the name of a directory contains a number that may be a rank."""
    return bool(_rank_positions(_parse_name(name)[0], directories=True))


def has_only_ranks(name: str) -> bool:
    """Return True if the name of a directory consists of ranks only: "rank_0", "tp_rank_00_pp_rank_1"."""
    return re.fullmatch(r"((tp|pp|dp|mp|cp|ep|shard|rank)[-_]?(rank)?[-_]?\d+[-_.]?)+", name, re.IGNORECASE) is not None


def group_of(name: str, names: Iterable[str], *, directories: bool) -> NameGroup | None:
    """Return the group of a name.

    Args:
        name: The name of a file or directory.
        names: Names of all files, or of all directories, in the same directory.
        directories: True for names of directories, in which a plain number counts only after certain words.

    Returns:
        None if the name contains no possible rank, or if no other name differs only in possible ranks.
    """
    own_numbers, template = _parse_name(name)
    free_positions = _rank_positions(own_numbers, directories)
    if not free_positions:
        return None
    names_by_numbers: dict[tuple[int, ...], str] = {}
    for other in names:
        numbers, other_template = _parse_name(other)
        is_same_group = template == other_template and all(
            a.value == b.value
            for position, (a, b) in enumerate(zip(own_numbers, numbers, strict=False))
            if position not in free_positions
        )
        if is_same_group:
            names_by_numbers[tuple(number.value for number in numbers)] = other
    if len(names_by_numbers) < 2:
        return None
    kind = own_numbers[free_positions[0]].kind
    assert kind != "other"
    differing = [position for position in free_positions if len({values[position] for values in names_by_numbers}) > 1]
    columns = [sorted({values[position] for values in names_by_numbers}) for position in differing]
    first = max((column[0] for column in columns), default=0)
    is_gapless = all(column == list(range(column[0], column[-1] + 1)) for column in columns)
    return NameGroup(tuple(names_by_numbers[values] for values in sorted(names_by_numbers)), kind, first, is_gapless)


def _parse_name(name: str) -> tuple[list[_NameNumber], str]:
    """Return the numbers in a name, and the name with a NUL character in place of each of them."""
    stem = _ENDING.sub("", name)
    return _numbers_in(stem), _NUMBER.sub("\0", stem) + name[len(stem) :]


def _rank_positions(numbers: list[_NameNumber], directories: bool) -> list[int]:
    """Return the indices in `numbers` of those that may differ in a group; the first one determines its kind."""
    n_of_m_positions = [position for position, number in enumerate(numbers) if number.kind == "n_of_m"]
    ranks = [position for position, number in enumerate(numbers) if number.kind == "rank"]
    if ranks:
        return [*ranks, *n_of_m_positions]
    if n_of_m_positions:
        return n_of_m_positions
    plain = [position for position, number in enumerate(numbers) if number.kind == "plain"][-1:]
    return [position for position in plain if not directories or numbers[position].word in _DIRECTORY_PART_WORDS]


def _numbers_in(stem: str) -> list[_NameNumber]:
    return [_classify_number(stem, match) for match in _NUMBER.finditer(stem)]


def _classify_number(stem: str, match: re.Match[str]) -> _NameNumber:
    before, after = stem[: match.start()], stem[match.end() :]
    value = int(match[0])
    total = _OF_TOTAL.match(after)
    word = _WORD.search(before)
    word_before = word[1].lower() if word is not None else ""
    if word_before == "of":
        return _NameNumber("other", value, word_before)
    if word_before in _RANK_WORDS or word_before.endswith("rank"):
        return _NameNumber("rank", value, word_before, None if total is None else int(total[1]))
    if total is not None:
        return _NameNumber("n_of_m", value, word_before, int(total[1]))
    is_size = after[:1].isalpha()  # 7b, 128k
    is_version = re.search(r"\d\.$", before) is not None or re.match(r"\.\d", after) is not None  # 3.1
    # A number of ten or more digits is a time stamp, for example, and never a rank.
    if word_before in _NON_RANK_WORDS or is_size or is_version or len(match[0]) > 9:
        return _NameNumber("other", value, word_before)
    return _NameNumber("plain", value, word_before)
