"""Read a recipe: find its file by name, apply `--set`, and check it against the blocks of `recipe`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from ckptx.errors import InputError, UsageError
from ckptx.options.recipes import RECIPES_DIR, list_shipped_recipes
from ckptx.runtime.training.recipe import LayoutBlock, Recipe, RecipeKeys
from ckptx.runtime.training.recipe_schema import DescribeSubject, decode, describe_value
from ckptx.runtime.training.sizes import check_sizes, fill_dp_shard
from ckptx.untrusted.printable import one_line
from ckptx.untrusted.remote_name import refuse_remote
from ckptx.untrusted.yaml_text import parse_yaml

_ENDINGS = (".yaml", ".yml")
_MAX_BYTES = 1 << 20  # maximum size of a recipe file


def find_recipe(name_or_file: str | Path) -> Path:
    """Return the file of a recipe.

    Args:
        name_or_file: File, or name of a recipe that comes with ckptx.

    Raises:
        UsageError: No such file or name; the message lists the known names, and the most similar one if there is any.
        UnsupportedError: It is a URL.
    """
    refuse_remote(name_or_file)
    text = str(name_or_file)
    if text.endswith(_ENDINGS) or "/" in text:
        path = Path(text)
        if not path.is_file():
            raise UsageError(f"{one_line(text)}: no such file; pass a recipe in YAML, or one of {_list_names()}")
        return path
    if text in list_shipped_recipes():
        return RECIPES_DIR / f"{text}.yaml"
    close_names = difflib.get_close_matches(text, list_shipped_recipes(), 1, 0.5)
    suggestion = f'did you mean "{close_names[0]}"? Known names:' if close_names else "known names:"
    raise UsageError(
        f"{one_line(text)}: no recipe has this name; {suggestion} {_list_names()}; the name of a file must end with "
        ".yaml"
    )


def _list_names() -> str:
    return ", ".join(list_shipped_recipes())


def read_recipe(name_or_file: str | Path, overrides: Sequence[str] = (), world_size: int | None = None) -> Recipe:
    """Return a complete and valid recipe.

    Args:
        name_or_file: File or name, as for `find_recipe`.
        overrides: Changes such as `layout.tp=2`: the path of a key, and its value in YAML. They are applied in order.
            Missing blocks on the path, and blocks that are null, are created.
        world_size: Number of ranks. It determines a `dp_shard` that the recipe does not set, and a layout for another
            number of ranks is refused. None means that it is unknown: then `dp_shard` is 1 unless the recipe sets it.
            Layouts of `checks` are completed for the number of ranks of the recipe's own layout; one that requires more
            ranks gets a `dp_shard` of 1.

    Raises:
        UsageError: There is no such recipe, it cannot be read, a key is unknown, a value has another type, or the sizes
            are invalid together.
        UnsupportedError: The schedule is not supported with this layout, or a path is a URL.
    """
    path = find_recipe(name_or_file)
    values = _parse(_read_text(path), str(path))
    if not isinstance(values, dict):
        raise UsageError(
            f"{path}: expected a mapping with the blocks of a recipe, found {describe_value(values)}; see "
            "docs/recipes.md"
        )
    override_by_key: dict[str, str] = {}
    for each in overrides:
        _apply_override(values, each, override_by_key)

    def subject(*keys: str) -> str:
        """Return the last option that sets the first of these keys that any option sets; see `DescribeSubject`."""
        for key in keys:
            for set_key, option in reversed(override_by_key.items()):
                if f"{key}.".startswith((f"{set_key}.", f"{set_key}[")) or set_key.startswith(f"{key}."):
                    return f"--set {one_line(option, 200)}"
        return str(path)

    recipe = Recipe(name=path.stem, **asdict(decode(values, RecipeKeys, subject)))
    _refuse_remote_paths(recipe)
    return _complete_and_check(recipe, subject, world_size)


def _refuse_remote_paths(recipe: Recipe) -> None:
    """Refuse URLs where a key of the recipe is a path."""
    refuse_remote(recipe.model.pretrained, recipe.data.path)
    if recipe.trainer is not None:
        refuse_remote(recipe.trainer.checkpoint, recipe.trainer.losses)


def _complete_and_check(recipe: Recipe, subject: DescribeSubject, world_size: int | None) -> Recipe:
    """Fill in data-parallel sizes, check all sizes, and add notes."""
    layout = fill_dp_shard(recipe.layout, world_size, subject)
    ranks = layout.dims.world_size
    check_layouts = tuple(
        fill_dp_shard(each, _find_world_size(each, ranks), subject, f"checks.layouts[{index}]")
        for index, each in enumerate(recipe.checks.layouts)
    )
    recipe = replace(recipe, layout=layout, checks=replace(recipe.checks, layouts=check_layouts))
    return replace(recipe, notes=check_sizes(recipe, subject))


def _find_world_size(layout: LayoutBlock, ranks: int) -> int | None:
    """Return the number of ranks that determines `dp_shard` of a layout of `checks`.

    Returns:
        None if `dp_shard` is given, or if tp x pp x dp_replicate exceeds `ranks`, so that it becomes 1.
    """
    others = layout.tp * layout.pp * layout.dp_replicate
    return None if layout.dp_shard is not None or others > ranks else ranks


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot read this recipe: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise UsageError(f"{path}: has more than {_MAX_BYTES:,} bytes, too many for a recipe; pass a recipe in YAML")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not valid UTF-8; pass a recipe in YAML") from error


def _parse(text: str, subject: str) -> Any:
    try:
        return parse_yaml(text, subject)
    except InputError as error:
        raise UsageError(str(error)) from error


def _apply_override(values: dict[str, Any], option: str, override_by_key: dict[str, str]) -> None:
    """Apply one change, in place, and record it.

    Args:
        values: Content of the recipe file.
        option: The change, `KEY=VALUE`.
        override_by_key: Path of a key -> the option that set it last; this option is added.

    Raises:
        UsageError: The option has no key or no `=`, its value is not valid YAML, or its path leads through a value that
            is not a mapping.
    """
    option_text = f"--set {one_line(option, 200)}"
    path, sign, text = option.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise UsageError(f"{option_text}: expected KEY=VALUE, such as layout.tp=2")
    block: Any = values
    for depth, key in enumerate(keys[:-1]):
        child = block.get(key)
        if child is None:
            child = block[key] = {}
        if not isinstance(child, dict):
            parent_path = one_line(".".join(keys[: depth + 1]), 200)
            raise UsageError(
                f"{option_text}: {parent_path} is {describe_value(child)}, not a mapping; set {parent_path} as a whole"
            )
        block = child
    block[keys[-1]] = _parse(text, option_text)
    override_by_key[".".join(keys)] = option
