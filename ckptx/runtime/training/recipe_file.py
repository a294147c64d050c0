"""Read a recipe: find its file by name, apply `--set`, and check it against the blocks of `recipe`."""

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
    """Return the names of the recipes that come with ckptx."""
    return tuple(sorted(each.stem for each in SHIPPED.glob("*.yaml")))


def find_recipe(name_or_file: str | Path) -> Path:
    """Return the file of a recipe.

    Args:
        name_or_file: File, or name of a recipe that comes with ckptx.

    Raises:
        UsageError: No such file or name; the message lists the names, and the closest one.
        UnsupportedError: It is a URL.
    """
    refuse_remote(name_or_file)
    text = str(name_or_file)
    if text.endswith(_ENDINGS) or "/" in text:
        path = Path(text)
        if not path.is_file():
            raise UsageError(f"{one_line(text)}: no such file; pass a recipe in YAML, or one of {_names()}")
        return path
    if text in shipped_recipes():
        return SHIPPED / f"{text}.yaml"
    near = difflib.get_close_matches(text, shipped_recipes(), 1, 0.5)
    offered = f'did you mean "{near[0]}"? Known names:' if near else "known names:"
    raise UsageError(
        f"{one_line(text)}: no recipe has this name; {offered} {_names()}; the name of a file must end with .yaml"
    )


def _names() -> str:
    return ", ".join(shipped_recipes())


def read_recipe(name_or_file: str | Path, sets: Sequence[str] = (), world_size: int | None = None) -> Recipe:
    """Return a complete and valid recipe.

    Args:
        name_or_file: File or name, as for `find_recipe`.
        sets: Changes such as `layout.tp=2`: the path of a key, and its value in YAML. They are applied in order.
            Missing blocks on the path, and blocks that are null, are created.
        world_size: Number of ranks: it determines `dp_shard`, and a layout for another number is refused. With None,
            `dp_shard` is 1 unless the recipe sets it. Layouts of `checks` are completed for the ranks of the recipe's
            own layout; one that requires more ranks gets a `dp_shard` of 1.

    Raises:
        UsageError: A key is unknown, a value has another type, or the sizes are invalid together.
        UnsupportedError: The schedule is not supported with this layout, or a path is a URL.
    """
    path = find_recipe(name_or_file)
    values = parse_yaml(_text_of(path), str(path))
    if not isinstance(values, dict):
        raise UsageError(
            f"{path}: expected a mapping with the blocks of a recipe, found {found_as(values)}; see docs/recipes.md"
        )
    set_by: dict[str, str] = {}
    for each in sets:
        _set(values, each, set_by)

    def subject(*keys: str) -> str:
        """Return the option that sets one of these keys, its parent or its child; else the file."""
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
    """Fill in data-parallel sizes, check all sizes, and add notes."""
    layout = with_data_ranks(recipe.layout, world_size, subject)
    ranks = layout.dims.world_size
    others = tuple(
        with_data_ranks(each, _ranks_of(each, ranks), subject, f"checks.layouts[{at}]")
        for at, each in enumerate(recipe.checks.layouts)
    )
    recipe = replace(recipe, layout=layout, checks=replace(recipe.checks, layouts=others))
    return replace(recipe, notes=check_sizes(recipe, subject))


def _ranks_of(layout: LayoutBlock, ranks: int) -> int | None:
    """Return the number of ranks that determines `dp_shard` of a layout of `checks`; None if it is given or 1."""
    needed = layout.tp * layout.pp * layout.dp_replicate
    return None if layout.dp_shard is not None or needed > ranks else ranks


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot read this recipe: {error.strerror}") from error
    if len(content) > _MOST_BYTES:
        raise UsageError(f"{path}: has more than {_MOST_BYTES:,} bytes, too many for a recipe; pass a recipe in YAML")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not valid UTF-8; pass a recipe in YAML") from error


def _set(values: dict[str, Any], option: str, set_by: dict[str, str]) -> None:
    """Apply one change, in place.

    Raises:
        UsageError: It has no key and value, or its path leads through a value that is not a mapping.
    """
    option_text = f"--set {one_line(option, 200)}"
    path, sign, text = option.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise UsageError(f"{option_text}: expected KEY=VALUE, such as layout.tp=2")
    block: Any = values
    for at, key in enumerate(keys[:-1]):
        below = block.get(key)
        if below is None:
            below = block[key] = {}
        if not isinstance(below, dict):
            where = one_line(".".join(keys[: at + 1]), 200)
            raise UsageError(f"{option_text}: {where} is {found_as(below)}, not a mapping; set {where} as a whole")
        block = below
    block[keys[-1]] = parse_yaml(text, option_text)
    set_by[".".join(keys)] = option
