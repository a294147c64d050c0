"""Docstrings are sentences that stand alone, and document only arguments and attributes that exist.

Every first line and every entry of a section such as Args must not begin with a fragment such as "Of ...". The checks
cover the package, `benchmarks/`, `tools/` and the support modules of the tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    ROOT / "tests" / "conftest.py",
    *(
        path
        for name in ("ckptx", "benchmarks", "tools", "tests/support")
        for path in sorted((ROOT / name).rglob("*.py"))
    ),
]
_FRAGMENT = re.compile(r"(Of|What|Where|Whether|How|As|Who|Which|When|Why)\b|Args:")
_ENTRY = re.compile(r"\s+\*{0,2}[a-z_]\w*(?:, \w+)*: (?P<text>.*)")
_NAMES = re.compile(r"\*{0,2}(?P<names>[A-Za-z_]\w*(?:, [A-Za-z_]\w*)*): ")
_FORMULA = re.compile(r", needed\b|\bneeded (a|an|one|two)\b")


def docstrings(source: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the lines of each docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield node.body[0].lineno, text.strip("\n").splitlines()


def fragments(source: str) -> list[str]:
    """Return the first lines and entries that begin with a fragment, with their line numbers."""
    lines = []
    for line, text in docstrings(source):
        if _FRAGMENT.match(text[0].strip()):
            lines.append(f"line {line}: {text[0].strip()}")
        for number, each in enumerate(text):
            entry = _ENTRY.fullmatch(each)
            if entry is not None and _FRAGMENT.match(entry["text"]):
                lines.append(f"line {line + number}: {each.strip()}")
    return lines


def _entries(text: str, title: str) -> list[str]:
    """Return the names of the entries of a section such as Args."""
    entries: list[str] = []
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
                entries += entry["names"].split(", ")
    return entries


def unknown_names(source: str) -> list[str]:
    """Return the documented arguments and attributes that the function or class does not have."""
    unknown = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = node.args
            known = {each.arg for each in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs)}
            known |= {each.arg for each in (parameters.vararg, parameters.kwarg) if each is not None}
            title = "Args"
        elif isinstance(node, ast.ClassDef):
            known = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            known |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
            known |= {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}
            title = "Attributes"
        else:
            continue
        names = _entries(ast.get_docstring(node) or "", title)
        unknown += [f"line {node.lineno}: {node.name}: {name}" for name in names if name not in known]
    return unknown


def formulas(source: str) -> list[str]:
    """Return the strings with the old formula "found ..., needed ..."."""
    strings = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return [
        f"line {each.lineno}: {each.value}"
        for each in strings
        if isinstance(each.value, str) and _FORMULA.search(each.value)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_are_sentences(file: Path) -> None:
    assert fragments(file.read_text(encoding="utf-8")) == [], (
        "begin with a verb or a noun, and state the unit and the meaning of None"
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_documented_names_exist(file: Path) -> None:
    assert unknown_names(file.read_text(encoding="utf-8")) == [], "rename the entry with the argument or attribute"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_messages_state_the_requirement(file: Path) -> None:
    assert formulas(file.read_text(encoding="utf-8")) == [], 'write "expected ..., found ..." or "requires ..."'


def test_fragments_and_formulas_are_found() -> None:
    source = 'def f(a):\n    """Of a.\n\n    Args:\n        a: Where it is.\n        b: The path.\n    """\n'
    assert fragments(source) == ["line 2: Of a.", "line 5: a: Where it is."]
    assert fragments('def f():\n    """Return the path."""\n') == []
    assert formulas('raise E(f"{x}: found 2, needed one")') and not formulas('raise E("requires --tp")')


def test_unknown_names_are_found() -> None:
    function = 'def f(a):\n    """Return a.\n\n    Args:\n        a: The path.\n        b: The mode.\n    """\n'
    class_ = (
        'class A:\n    """A.\n\n    Attributes:\n        x, y: Numbers.\n            z: Not an entry.\n    """\n\n'
        "    x: int\n"
    )
    assert unknown_names(function) == ["line 1: f: b"]
    assert unknown_names(class_) == ["line 1: A: y"]
