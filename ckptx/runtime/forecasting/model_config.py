"""Find or write the config.json that a memory forecast uses; no weights are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptx.errors import CkptxError, InputError, ReadError, UsageError
from ckptx.formats.hf.hub import CONFIG_FILES, resolve_source
from ckptx.formats.hf.reader import read_json
from ckptx.mapping.config_edits import dequantization_edits, format_edited_config
from ckptx.runtime.training.recipe import ModelBlock, Recipe
from ckptx.storage.files import is_regular_file

_CONFIG_NAME = "config.json"


def find_model_config(
    model: str,
    copy_dir: Path | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
) -> Path:
    """Return the directory of the config.json of a model.

    Args:
        model: A config.json, a JSON file of another name with the same contents, a directory with a config.json, or a
            Hub id.
        copy_dir: Directory to copy a file of another name to, as config.json, with the Python files next to it. None
            means that such a file is refused.
        revision: Git revision on the Hub; None for the default branch.
        token: Access token of the Hub; None for the stored one.
        cache_dir: Cache directory of the Hub; None for the default.

    Raises:
        InputError: The directory has no config.json, the file is not JSON, or the Hub id cannot be fetched.
        UsageError: The path is a file without the keys of a config.json, or one of another name without `copy_dir`.
    """
    path = resolve_source(model, revision=revision, token=token, cache_dir=cache_dir, patterns=CONFIG_FILES)
    if is_regular_file(path):
        if path.name == _CONFIG_NAME:
            return path.parent
        if path.suffix != ".json" or copy_dir is None or not read_json(path).keys() & {"model_type", "architectures"}:
            raise UsageError(f"{path} is not a config.json; pass a config.json, a directory that has one, or a Hub id")
        shutil.copyfile(path, copy_dir / _CONFIG_NAME)
        for code in filter(Path.is_file, path.parent.glob("*.py")):
            shutil.copyfile(code, copy_dir / code.name)
        return copy_dir
    if not is_regular_file(path / _CONFIG_NAME):
        raise InputError(f"{path}: has no config.json; pass the directory that has it")
    return path


def without_quantization_config(config_dir: Path, copy_dir: Path) -> tuple[Path, str | None]:
    """Return a directory whose config.json declares no quantization, since training uses the dequantized weights.

    Args:
        config_dir: Directory of a config.json; it is not changed.
        copy_dir: Directory to write an edited copy to, with the Python files next to it.

    Returns:
        `config_dir` and None if the config declares no quantization; else `copy_dir` and a note for the user.
    """
    values = read_json(config_dir / _CONFIG_NAME)
    edits = dequantization_edits(values)
    if not edits:
        return config_dir, None
    (copy_dir / _CONFIG_NAME).write_bytes(format_edited_config(values, edits))
    for code in filter(Path.is_file, config_dir.glob("*.py")):
        if code.parent != copy_dir:
            shutil.copyfile(code, copy_dir / code.name)
    return copy_dir, "config.json declares a quantization; this is the forecast of the dequantized model"


@contextmanager
def config_path_in_errors_as(source: str, directory: Path) -> Iterator[None]:
    """Replace the path of the config.json in `directory`, a temporary copy, by `source` in errors of the block."""
    try:
        yield
    except CkptxError as error:
        error.args = (str(error).replace(str(directory / _CONFIG_NAME), source), *error.args[1:])
        raise


def write_recipe_config(recipe: Recipe, directory: Path) -> tuple[Path, tuple[str, ...]]:
    """Write the config.json of the model that a recipe trains: the shrunk model if the recipe has `shrunk: true`.

    Args:
        recipe: Recipe that names the model.
        directory: Directory to write to.

    Returns:
        `directory`, and notes for the user.

    Raises:
        InputError: The config of its checkpoint is unavailable, and the recipe has no `model.shrunk_from` to
            fall back to.
        UsageError: The recipe names no model.
        UnsupportedError: The class is unknown, or cannot be shrunk.
    """
    from ckptx.runtime.training.source import merge_config, write_shrunk_config  # imports torch

    model = recipe.model
    if model.shrunk:
        return write_shrunk_config(recipe, directory), ()
    values, notes = _read_base_config(model)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(merge_config(values, model.config), indent=2) + "\n"
    (directory / _CONFIG_NAME).write_text(text, encoding="utf-8")
    return directory, notes


def _read_base_config(model: ModelBlock) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the config that `model.config` of a recipe overrides ({} if there is no other), and notes for the user."""
    if model.pretrained is None:
        if not model.config:
            raise UsageError("model: has neither pretrained nor config; set model.pretrained to a checkpoint")
        return {}, ()
    try:
        return read_json(find_model_config(model.pretrained, revision=model.revision) / _CONFIG_NAME), ()
    except InputError as error:
        if isinstance(error, ReadError) or not model.shrunk_from:
            raise
        return model.shrunk_from, (
            f"{model.pretrained}: its config.json is not available here; using model.shrunk_from of the recipe",
        )
