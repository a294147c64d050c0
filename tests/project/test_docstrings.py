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
_FRAGMENT = re.compile(r"(Of|What|Where|Whether|How|As|Who|Which|When|Why)\b|Args:")
_ENTRY = re.compile(r"\s+\*{0,2}[a-z_]\w*(?:, \w+)*: (?P<text>.*)")
_NAMES = re.compile(r"\*{0,2}(?P<names>[A-Za-z_]\w*(?:, [A-Za-z_]\w*)*): ")
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


def _entries(text: str, title: str) -> list[str]:
    """Names of the entries of a section such as Args."""
    found: list[str] = []
    base = indent = None
    for line in text.expandtabs().splitlines():
        depth = len(line) - len(line.lstrip())
        if line.strip() == f"{title}:":
            base, indent = depth, None
        elif base is not None and line.strip():
            indent = depth if indent is None else indent
            if depth <= base:
                base = None
            elif depth == indent and (entry := _NAMES.match(line.strip())):
                found += entry["names"].split(", ")
    return found


def unknown_names(source: str) -> list[str]:
    """Documented arguments and attributes that the function or class does not have."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            known = {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
            known |= {each.arg for each in (given.vararg, given.kwarg) if each is not None}
            title = "Args"
        elif isinstance(node, ast.ClassDef):
            known = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            known |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
            known |= {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}
            title = "Attributes"
        else:
            continue
        names = _entries(ast.get_docstring(node) or "", title)
        found += [f"line {node.lineno}: {node.name}: {name}" for name in names if name not in known]
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
def test_documented_names_exist(file: Path) -> None:
    assert unknown_names(file.read_text(encoding="utf-8")) == [], "rename the entry with the argument or attribute"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_messages_say_what_is_required(file: Path) -> None:
    assert formulas(file.read_text(encoding="utf-8")) == [], 'say "expected ..., found ..." or "requires ..."'


def test_the_search_finds_fragments() -> None:
    source = 'def f(a):\n    """Of a.\n\n    Args:\n        a: Where it is.\n        b: The path.\n    """\n'
    assert fragments(source) == ["line 2: Of a.", "line 5: a: Where it is."]
    assert fragments('def f():\n    """Return the path."""\n') == []
    assert formulas('raise E(f"{x}: found 2, needed one")') and not formulas('raise E("requires --tp")')


def test_the_search_finds_names_that_do_not_exist() -> None:
    function = 'def f(a):\n    """Return a.\n\n    Args:\n        a: The path.\n        b: The mode.\n    """\n'
    class_ = (
        'class A:\n    """A.\n\n    Attributes:\n        x, y: Numbers.\n            z: Not an entry.\n    """\n\n'
        "    x: int\n"
    )
    assert unknown_names(function) == ["line 1: f: b"]
    assert unknown_names(class_) == ["line 1: A: y"]
