"""A recipe from its file: found by name, changed by `--set`, checked against the blocks of `recipe`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from ckptx.errors import UsageError
from ckptx.runtime.training.recipe import LayoutBlock, Recipe, RecipeKeys
from ckptx.runtime.training.recipe_schema import Subject, decode, found_as
from ckptx.runtime.training.sizes import check_sizes, with_data_ranks
from ckptx.runtime.training.yaml_text import parse_yaml
from ckptx.untrusted.printable import one_line
from ckptx.untrusted.remote_name import refuse_remote

SHIPPED = Path(__file__).parent / "recipes"
_ENDINGS = (".yaml", ".yml")
_MOST_BYTES = 1 << 20


def shipped_recipes() -> tuple[str, ...]:
    """The names of the recipes that come with ckptx."""
    return tuple(sorted(each.stem for each in SHIPPED.glob("*.yaml")))


def find_recipe(name_or_file: str | Path) -> Path:
    """The file of a recipe.

    Args:
        name_or_file: A file, or the name of a recipe that comes with ckptx.

    Raises:
        UsageError: There is neither; the message has the nearest name, and all of them.
        UnsupportedError: It is a URL.
    """
    refuse_remote(name_or_file)
    text = str(name_or_file)
    if text.endswith(_ENDINGS) or "/" in text:
        path = Path(text)
        if not path.is_file():
            raise UsageError(f"{one_line(text)}: no such file; needed a recipe in YAML, or a name: {_names()}")
        return path
    if text in shipped_recipes():
        return SHIPPED / f"{text}.yaml"
    near = difflib.get_close_matches(text, shipped_recipes(), 1, 0.5)
    offered = f'did you mean "{near[0]}"? There are' if near else "there are"
    raise UsageError(
        f"{one_line(text)}: no recipe has this name; {offered} {_names()}; a file of your own ends with .yaml"
    )


def _names() -> str:
    return ", ".join(shipped_recipes())


def read_recipe(name_or_file: str | Path, sets: Sequence[str] = (), world_size: int | None = None) -> Recipe:
    """A recipe that can be run.

    Args:
        name_or_file: As `find_recipe` takes it.
        sets: Changes as `layout.tp=2`: the path of a key, and its value in YAML. They are made in order. Null in place
            of a block, and a path through one that is not there, make it.
        world_size: The ranks there are: `dp_shard` is filled in from it, and a layout of another number is refused.
            Without it, `dp_shard` is 1 unless the recipe says otherwise. The layouts of `checks` are filled in from the
            ranks of the recipe's own; one that needs more than these has 1.

    Raises:
        UsageError: A key is unknown, a value is of another type, or the numbers cannot be run together.
        UnsupportedError: A schedule that is not right with this layout, or a path that is a URL.
    """
    path = find_recipe(name_or_file)
    values = parse_yaml(_text_of(path), str(path))
    if not isinstance(values, dict):
        raise UsageError(
            f"{path}: found {found_as(values)}, needed a mapping with the blocks of a recipe; see docs/recipes.md"
        )
    set_by: dict[str, str] = {}
    for each in sets:
        _set(values, each, set_by)

    def subject(*keys: str) -> str:
        """The option that sets one of these keys, or what is above or below it; else the file."""
        for key in keys:
            for place, option in reversed(set_by.items()):
                if f"{key}.".startswith((f"{place}.", f"{place}[")) or place.startswith(f"{key}."):
                    return f"--set {one_line(option, 200)}"
        return str(path)

    recipe = Recipe(name=path.stem, **asdict(decode(values, RecipeKeys, subject)))
    _refuse_remote_paths(recipe)
    return _checked(recipe, subject, world_size)


def _refuse_remote_paths(recipe: Recipe) -> None:
    """Refuse URLs where a key of the recipe is a path."""
    refuse_remote(recipe.model.pretrained, recipe.data.path)
    if recipe.train is not None:
        refuse_remote(recipe.train.checkpoint, recipe.train.losses)


def _checked(recipe: Recipe, subject: Subject, world_size: int | None) -> Recipe:
    """With numbers of data ranks, and notes."""
    layout = with_data_ranks(recipe.layout, world_size, subject)
    ranks = layout.dims.world_size
    others = tuple(
        with_data_ranks(each, _ranks_of(each, ranks), subject, f"checks.layouts[{at}]")
        for at, each in enumerate(recipe.checks.layouts)
    )
    recipe = replace(recipe, layout=layout, checks=replace(recipe.checks, layouts=others))
    return replace(recipe, notes=check_sizes(recipe, subject))


def _ranks_of(layout: LayoutBlock, ranks: int) -> int | None:
    """What `dp_shard` of a layout of `checks` is filled in from; None where it is given, or is to be 1."""
    needed = layout.tp * layout.pp * layout.dp_replicate
    return None if layout.dp_shard is not None or needed > ranks else ranks


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; needed a recipe in YAML") from error
    if len(content) > _MOST_BYTES:
        raise UsageError(f"{path}: has more than {_MOST_BYTES:,} bytes, needed a recipe; is it another file?")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: byte {error.start} is no UTF-8, needed a recipe in YAML; is it another file?"
        ) from error


def _set(values: dict[str, Any], option: str, set_by: dict[str, str]) -> None:
    """Makes one change, in place.

    Raises:
        UsageError: It is no change, or its path leads through a value that has no keys.
    """
    said = f"--set {one_line(option, 200)}"
    path, sign, text = option.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise UsageError(f"{said}: found no key with a value, needed both, such as layout.tp=2")
    block: Any = values
    for at, key in enumerate(keys[:-1]):
        below = block.get(key)
        if below is None:
            below = block[key] = {}
        if not isinstance(below, dict):
            where = one_line(".".join(keys[: at + 1]), 200)
            raise UsageError(f"{said}: {where} is {found_as(below)}, needed a mapping; set the whole of {where}")
        block = below
    block[keys[-1]] = parse_yaml(text, said)
    set_by[".".join(keys)] = option
