"""docs/recipes.md has every key of a recipe, with its default and its meaning, and every recipe that is shipped."""

from __future__ import annotations

import re

from msgspec import structs

from ckptx.options.recipes import list_shipped_recipes, shipped_recipes_text
from ckptx.runtime.training.recipe import Recipe
from tests.support.import_tool import tool

build = tool("build_recipes_page")


def test_the_tables_are_those_of_the_dataclasses() -> None:
    text = build.PATH.read_text(encoding="utf-8")
    assert build.page(text) == text, "run tools/build_recipes_page.py"
    for name, cls in build.blocks():
        for each in structs.fields(cls):
            assert f"| `{each.name}` |" in text.partition(f"### {name}\n")[2].partition("\n### ")[0]


def test_every_block_is_there() -> None:
    named = {name for name, _ in build.blocks()} | {"description", "name", "notes"}
    assert named == {each.name for each in structs.fields(Recipe)}


def test_every_shipped_recipe_that_trains_here_is_listed() -> None:
    text = build.PATH.read_text(encoding="utf-8").partition("## Write a recipe")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert listed <= set(list_shipped_recipes())
    assert {"llama_tiny", "gemma4_31b", "phi_4_squad"} <= listed


def test_the_help_lists_every_recipe_once() -> None:
    listed = re.findall(r"[a-z]\w*_\w+|accelerate|torchtitan", shipped_recipes_text())
    assert sorted(listed) == [*list_shipped_recipes()]
