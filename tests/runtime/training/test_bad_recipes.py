"""Every shipped recipe, spoiled in every place: each ends in one of our errors, in one line, or is a recipe."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptx.errors import CkptxError
from ckptx.options.recipes import list_shipped_recipes
from ckptx.runtime.training.recipe import Recipe
from ckptx.runtime.training.recipe_file import read_recipe
from ckptx.untrusted.yaml_text import parse_yaml

# Of every type, at the edges of what is allowed, and beyond.
VALUES = (None, True, -1, 0, 3, 1 << 40, 0.5, -1e30, "", "x", "4,4", [], [1], ["x"], [[]], {}, {"x": 1}, {"tp": "x"})


def places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a recipe."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def at(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def spoiled(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was done, and the recipe that is left."""
    for path in [(), *places(values)]:
        if isinstance(at(values, path), dict):
            made = copy.deepcopy(values)
            at(made, path)["no_such_key"] = 1
            yield f"{path}: a key", made
        if not path:
            continue
        for value in VALUES:
            made = copy.deepcopy(values)
            at(made, path[:-1])[path[-1]] = value
            yield f"{path}: {value!r}", made
        if isinstance(path[-1], str):
            made = copy.deepcopy(values)
            block = at(made, path[:-1])
            block[f"{path[-1]}s"] = block.pop(path[-1])
            yield f"{path}: another name", made


@pytest.mark.parametrize("name", list_shipped_recipes())
def test_a_spoiled_recipe_is_refused_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ckptx.runtime.training.recipe_file as recipe_file

    source = recipe_file.find_recipe(name)
    values = parse_yaml(source.read_text(encoding="utf-8"), "recipe")
    assert values == yaml.safe_load(yaml.safe_dump(values))
    kept, current = 0, {}
    monkeypatch.setattr(recipe_file, "parse_yaml", lambda text, where: copy.deepcopy(current))
    refused = []
    for what, made in spoiled(values):
        current = made
        try:
            assert isinstance(read_recipe(source), Recipe), what
            kept += 1
            assert "a key" not in what or "config" in what or "shrunk_from" in what or "environment" in what, what
        except CkptxError as error:
            said = str(error)
            assert "\n" not in said and len(said) < 600, (what, said)
            assert said.startswith((f"{source}: ", "mesh: ")), (what, said)
            refused.append(said)
    assert len(refused) > 150
    assert kept


@pytest.mark.parametrize("cut", range(0, 900, 37))
def test_a_recipe_that_ends_anywhere_is_refused_or_read(cut: int, tmp_path: Path) -> None:
    text = (Path(read_recipe.__code__.co_filename).parent / "recipes" / "llama_tiny.yaml").read_text(encoding="utf-8")
    path = tmp_path / "cut.yaml"
    for broken in (text[:cut], text[:cut] + "\t", text[:cut] + ": :", text[:cut] + "\x01", text[cut:]):
        path.write_text(broken, encoding="utf-8")
        try:
            read_recipe(path)
        except CkptxError as error:
            assert "\n" not in str(error)
