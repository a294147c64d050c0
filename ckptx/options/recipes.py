"""Recipes that come with ckptx, by name."""

from __future__ import annotations

from pathlib import Path

RECIPES_DIR = Path(__file__).parents[1] / "runtime" / "training" / "recipes"


def list_shipped_recipes() -> tuple[str, ...]:
    """Return the names of the recipes that come with ckptx."""
    return tuple(sorted(each.stem for each in RECIPES_DIR.glob("*.yaml")))
