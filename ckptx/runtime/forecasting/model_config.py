"""The config.json that a forecast is made from; no weights are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptx.errors import InputError, UsageError
from ckptx.formats.hf.hub import CONFIG_FILES, resolve
from ckptx.formats.hf.reader import read_json
from ckptx.runtime.training.recipe import ModelBlock
from ckptx.runtime.training.source import merged

_CONFIG = "config.json"


def config_of_model(
    model: str, *, revision: str | None = None, token: str | None = None, cache_dir: str | Path | None = None
) -> Path:
    """The directory of the config.json of a model.

    Args:
        model: A config.json, a directory with one, or a Hub id.
        revision: Of the Hub id.
        token: For the Hub.
        cache_dir: Of the Hub.

    Raises:
        InputError: There is none.
        UsageError: It is a file of another name.
    """
    found = resolve(model, revision=revision, token=token, cache_dir=cache_dir, patterns=CONFIG_FILES)
    if found.is_file():
        if found.name != _CONFIG:
            raise UsageError(
                f"{found}: found a file of this name, needed a config.json, a directory with one, or a Hub id"
            )
        return found.parent
    if not (found / _CONFIG).is_file():
        raise InputError(f"{found}: has no config.json, needed one; name the directory that has it")
    return found


def config_of_recipe(model: ModelBlock, directory: Path) -> tuple[Path, tuple[str, ...]]:
    """Writes the config.json of what a recipe trains.

    Args:
        model: Of the recipe.
        directory: Where to.

    Returns:
        The directory, and notes.

    Raises:
        InputError: Its checkpoint cannot be had, and the recipe has no keys to take in its place.
        UsageError: It names no model.
    """
    values, notes = _values_of(model)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(merged(values, model.config), indent=2) + "\n"
    (directory / _CONFIG).write_text(text, encoding="utf-8")
    return directory, notes


def _values_of(model: ModelBlock) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    if model.pretrained is None:
        if not model.config:
            raise UsageError("model: found neither pretrained nor config, needed one of them; name a checkpoint")
        return {}, ()
    try:
        return read_json(config_of_model(model.pretrained, revision=model.revision) / _CONFIG), ()
    except InputError:
        if not model.shrunk_from:
            raise
        return model.shrunk_from, (
            f"{model.pretrained}: its config.json cannot be had here; the keys of model.shrunk_from are taken for it",
        )
