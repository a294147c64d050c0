"""A class name stands for one class of the package: one word for one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import ckptx

ROOT = Path(ckptx.__file__).parent
SCRIPTS = ROOT / "runtime" / "training" / "recipes" / "scripts"  # programs of users, which nothing imports


def used_twice(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Class names with the places of their classes, where there are several."""
    places: dict[str, list[str]] = defaultdict(list)
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_class_name_is_used_twice() -> None:
    files = [path for path in ROOT.rglob("*.py") if SCRIPTS not in path.parents]
    assert used_twice({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(files)}) == {}


def test_an_injected_name_is_found() -> None:
    sources = {
        "a.py": "class Plan:\n    pass",
        "b.py": "def f():\n    class Plan:\n        pass",
        "c.py": "class Step: ...",
    }
    assert used_twice(sources) == {"Plan": ["a.py:1", "b.py:2"]}
