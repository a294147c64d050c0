"""Numbers and their nouns: `1 alias`, never `1 aliases`; held for every message that is made of both."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ckptx
from ckptx.wording import counted

ROOT = Path(ckptx.__file__).parent
PACKAGES = (
    "api", "cli", "comparison", "conversion", "layout", "mapping", "model_view", "options", "publishing",
    "report", "runtime/parity",
)  # fmt: skip
FILES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]

# Words behind a value that are no plural of what is counted.
_NO_NOUN = {
    "is",
    "has",
    "was",
    "as",
    "its",
    "this",
    "does",
    "holds",
    "says",
    "lists",
    "bytes",
    "needs",
    "whose",
    "cuts",
}


@pytest.mark.parametrize(
    ("noun", "many"),
    [
        ("tensor", "tensors"), ("alias", "aliases"), ("copy", "copies"), ("key", "keys"), ("chunk", "chunks"),
        ("more file", "more files"), ("optimizer tensor", "optimizer tensors"), ("prefix", "prefixes"),
        ("branch", "branches"), ("entry", "entries"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("number", [0, 1, 2, 20_000])
def test_counted(noun: str, many: str, number: int) -> None:
    assert counted(number, noun) == f"{number:,} {noun if number == 1 else many}"


def plurals_behind_values(source: str) -> list[str]:
    """`{count} names` in f-strings: right for every number but 1."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for before, after in zip(node.values, node.values[1:], strict=False):
            if not (isinstance(before, ast.FormattedValue) and isinstance(after, ast.Constant)):
                continue
            words = re.match(r" (?:more )?([a-z]+s)\b", str(after.value))
            shown = ast.unparse(before.value)
            if words and words[1] not in _NO_NOUN and re.search(r"len\(|count|number|sum\(|\bpp\b|unrecorded", shown):
                found.append(f"line {node.lineno}: {{{shown}}}{after.value!r}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_message_says_a_plural_of_one(file: Path) -> None:
    assert plurals_behind_values(file.read_text(encoding="utf-8")) == [], "say counted(number, noun)"


def test_the_search_finds_one() -> None:
    assert plurals_behind_values('f"{len(names)} tensors"') and plurals_behind_values('f"{count} more files"')
    assert not plurals_behind_values("f\"{counted(len(names), 'tensor')} left\"")
