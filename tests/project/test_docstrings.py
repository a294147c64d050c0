"""Docstrings are sentences that stand alone: no first line and no attribute begins with a fragment such as "Of ..."."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptx

ROOT = Path(ckptx.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
_FRAGMENT = re.compile(r"(Of|What|Where|Whether|How|As|Who|Which|When|Why)\b")
_ENTRY = re.compile(r"\s+\*{0,2}[a-z_]\w*(?:, \w+)*: (?P<text>.*)")
_FORMULA = re.compile(r", needed\b|\bneeded (a|an|one|two)\b")


def docstrings(source: str) -> Iterator[tuple[int, list[str]]]:
    """Line and lines of each docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield node.body[0].lineno, text.strip("\n").splitlines()


def fragments(source: str) -> list[str]:
    """First lines and entries that begin with a fragment, with their line numbers."""
    found = []
    for line, text in docstrings(source):
        if _FRAGMENT.match(text[0].strip()):
            found.append(f"line {line}: {text[0].strip()}")
        for number, each in enumerate(text):
            entry = _ENTRY.fullmatch(each)
            if entry is not None and _FRAGMENT.match(entry["text"]):
                found.append(f"line {line + number}: {each.strip()}")
    return found


def formulas(source: str) -> list[str]:
    """Strings with the formula "found ..., needed ..."."""
    strings = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return [
        f"line {each.lineno}: {each.value}"
        for each in strings
        if isinstance(each.value, str) and _FORMULA.search(each.value)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_are_sentences(file: Path) -> None:
    assert fragments(file.read_text(encoding="utf-8")) == [], "say what it is, with its unit and the meaning of None"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_messages_say_what_is_required(file: Path) -> None:
    assert formulas(file.read_text(encoding="utf-8")) == [], 'say "expected ..., found ..." or "requires ..."'


def test_the_search_finds_fragments() -> None:
    source = 'def f(a):\n    """Of a.\n\n    Args:\n        a: Where it is.\n        b: The path.\n    """\n'
    assert fragments(source) == ["line 2: Of a.", "line 5: a: Where it is."]
    assert fragments('def f():\n    """Return the path."""\n') == []
    assert formulas('raise E(f"{x}: found 2, needed one")') and not formulas('raise E("requires --tp")')
