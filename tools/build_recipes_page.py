"""Write the tables of docs/recipes.md, one for each block of a recipe, from the classes of the blocks.

Run it as `python tools/build_recipes_page.py`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from msgspec import NODEFAULT, structs

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout, installed or not

from ckptx.runtime.training.recipe import RecipeKeys
from ckptx.runtime.training.recipe_schema import describe_type, is_block

PATH = Path(__file__).parent.parent / "docs" / "recipes.md"
_TOP_LEVEL = """### Top level

Blocks have tables of their own below.

| key | type | default | meaning |
|---|---|---|---|
| `description` | a string | `\"\"` | Text for people; it has no effect. |

"""
_BEGIN, _END = "<!-- the tables of tools/build_recipes_page.py -->\n", "<!-- end of the tables -->\n"


def blocks() -> Iterator[tuple[str, Any]]:
    """Yield the key and the class of each block."""
    for each in structs.fields(RecipeKeys):
        block = next(filter(is_block, (each.type, *get_args(each.type))), None)
        if block is not None:
            yield each.name, block


def meanings_of(cls: Any) -> dict[str, str]:
    """Return the description of each key of a block from the docstring of its class."""
    _, _, attributes = (cls.__doc__ or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    for line in attributes.splitlines():
        match = re.match(r" {8}(\w+): (.*)", line)
        if match is not None:
            found[match[1]] = match[2]
        elif line.strip() and found:
            found[list(found)[-1]] += f" {line.strip()}"
    return found


def to_yaml(value: Any) -> str:
    """Return a default value as YAML on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(to_yaml, value))}]"
    return "{}" if isinstance(value, dict) else str(value)


def default_of(field: Any) -> str:
    """Return the default of a key as a cell of a table."""
    if field.default_factory is not NODEFAULT:
        return f"`{to_yaml(field.default_factory())}`"
    return "required" if field.default is NODEFAULT else f"`{to_yaml(field.default)}`"


def type_of(hint: Any) -> str:
    """Return the type of a key as a cell of a table."""
    inner = next(filter(is_block, get_args(hint)), None)
    return f"a list of mappings as `{inner.__name__.removesuffix('Block').lower()}`" if inner else describe_type(hint)


def tables() -> str:
    """Return a heading and a table for each block."""
    found = [_TOP_LEVEL]
    for name, cls in blocks():
        meanings = meanings_of(cls)
        summary = inspect.cleandoc(cls.__doc__ or "").partition("\n\nAttributes:")[0]
        found.append(f"### {name}\n\n{summary}\n\n| key | type | default | meaning |\n|---|---|---|---|\n")
        for each in structs.fields(cls):
            cells = (f"`{each.name}`", type_of(each.type), default_of(each), meanings[each.name])
            row = re.sub(r"\bNone\b", "null", " | ".join(cells))
            found.append(f"| {row} |\n")
        found.append("\n")
    return "".join(found)


def page(text: str) -> str:
    """Return the text of the page with the current tables."""
    before, after = text.index(_BEGIN) + len(_BEGIN), text.index(_END)
    return f"{text[:before]}\n{tables()}{text[after:]}"


if __name__ == "__main__":
    PATH.write_text(page(PATH.read_text(encoding="utf-8")), encoding="utf-8")
