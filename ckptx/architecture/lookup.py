"""Find the architecture for the contents of ``config.json``: in the table, else from the meta model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptx.architecture.architecture import Architecture, TieFlag
from ckptx.architecture.class_table import find_class_record
from ckptx.architecture.configs import invalid_value_message
from ckptx.architecture.suffix_ties import suffix_architecture
from ckptx.errors import InputError, missing_package


def find_architecture(
    config: Mapping[str, Any],
    *,
    config_dir: Path | None = None,
    trust_remote_code: bool = False,
) -> Architecture | None:
    """Return the architecture of the class that a checkpoint names, the first in ``architectures``.

    Args:
        config: The contents of ``config.json``.
        config_dir: Directory of the config, from which remote code is loaded; None to run none.
        trust_remote_code: Allow Python files in ``config_dir`` to be executed.

    Returns:
        The architecture, or None if the config names no class. ``known_from`` is its source; ``suffix table`` means
        that the class is unknown and only the most common tied names are considered.

    Raises:
        InputError: A key that identifies the class has a value of another kind.
        EnvironmentProblem: The class has to be built, and torch, transformers or a package of the model is missing.
        UnsupportedError: The class exists but cannot be built from this config.
    """
    _refuse_invalid_keys(config)
    names = config.get("architectures")
    if not names:
        return None
    class_name, model_type = names[0], str(config.get("model_type") or "")
    has_remote_code = bool(config.get("auto_map"))
    # Class names are not unique among remote code; a config with code of its own must match the model type, too.
    record = find_class_record(class_name, model_type if has_remote_code else None)
    known = record.architecture_for(config) if record is not None and record.covers(config) else None
    if known is not None:
        return _with_text_config_paths(known, config)
    if record is None and ((has_remote_code and not trust_remote_code) or not class_name.isidentifier()):
        # Its code must not run, or it cannot be a class.
        return dataclasses.replace(suffix_architecture(class_name, model_type), is_in_table=False)
    built = _introspect(config, class_name, config_dir, trust_remote_code and record is None)
    if built is None:
        return dataclasses.replace(suffix_architecture(class_name, model_type), is_in_table=False)
    return dataclasses.replace(_with_text_config_paths(built, config), is_in_table=record is not None)


def _refuse_invalid_keys(config: Mapping[str, Any]) -> None:
    """Refuse a config in which a key that identifies the class has a value of another kind.

    Raises:
        InputError: There is such a key; the message names the first.
    """
    names = config.get("architectures")
    if names is not None and not (isinstance(names, (list, tuple)) and all(isinstance(each, str) for each in names)):
        raise InputError(invalid_value_message(("architectures",), names, "a list of class names"))
    for key, kind, expected in (("model_type", str, "a string"), ("auto_map", dict, "an object")):
        if config.get(key) is not None and not isinstance(config[key], kind):
            raise InputError(invalid_value_message((key,), config[key], expected))
    if config.get("text_config") is not None and not isinstance(config["text_config"], Mapping):
        raise InputError(invalid_value_message(("text_config",), config["text_config"], "an object"))


def _with_text_config_paths(architecture: Architecture, config: Mapping[str, Any]) -> Architecture:
    """Return the architecture with its config keys moved into ``text_config`` if they are there.

    This is so if a class of the text model alone has the config of a composite around it.
    """
    nested = config.get("text_config")
    if not isinstance(nested, Mapping) or config.get("model_type") == architecture.model_type:
        return architecture
    if nested.get("model_type") != architecture.model_type:
        return architecture
    ties = []
    for pair in architecture.ties:
        paths = tuple(("text_config", *path) for path in pair.flag.paths)
        ties.append(dataclasses.replace(pair, flag=TieFlag(paths, pair.flag.truth)))
    structure = dataclasses.replace(architecture.structure, root=("text_config",))
    return dataclasses.replace(architecture, ties=tuple(ties), structure=structure)


def _introspect(
    config: Mapping[str, Any], class_name: str, config_dir: Path | None, trust_remote_code: bool
) -> Architecture | None:
    try:
        # takes seconds, so only for a class that the table does not have
        from ckptx.architecture.introspection import meta_model
    except ImportError as error:
        raise missing_package(f"{class_name}: not covered by the table, so it must be built", error) from error
    return meta_model.introspect(config, config_dir=config_dir, trust_remote_code=trust_remote_code)
