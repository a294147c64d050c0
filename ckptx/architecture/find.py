"""From the contents of ``config.json`` to an architecture: the table first, then the meta model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptx.architecture.configs import refusal
from ckptx.architecture.overrides import suffix_architecture
from ckptx.architecture.spec import Architecture, TieFlag
from ckptx.architecture.table import find_row
from ckptx.errors import InputError, missing_package


def find_architecture(
    config: Mapping[str, Any],
    *,
    config_dir: Path | None = None,
    trust_remote_code: bool = False,
) -> Architecture | None:
    """What is known about the class that a checkpoint names.

    Args:
        config: The contents of ``config.json``.
        config_dir: The directory it lies in, for remote code.
        trust_remote_code: Whether Python files in ``config_dir`` may be executed.

    Returns:
        None when the config names no class. ``known_from`` says where the answer comes from; ``suffix table``
        means that the class is unknown and only the most common tied names are considered.

    Raises:
        InputError: A key that says which class it is holds something of another kind.
        EnvironmentProblem: The class must be built and torch, transformers or a package of the model is
            missing.
        UnsupportedError: The class exists and cannot be built from this config.
    """
    _refuse_other_kinds(config)
    names = config.get("architectures")
    if not names:
        return None
    class_name, model_type = names[0], str(config.get("model_type") or "")
    brings_code = bool(config.get("auto_map"))
    # A class name is not unique among remote code; with code of its own the model type must agree as well.
    row = find_row(class_name, model_type if brings_code else None)
    known = row.architecture_for(config) if row is not None and row.covers(config) else None
    if known is not None:
        return _placed(known, config)
    if row is None and ((brings_code and not trust_remote_code) or not class_name.isidentifier()):
        return suffix_architecture(class_name, model_type)  # no class has such a name: nothing is imported to look
    built = _introspected(config, class_name, config_dir, trust_remote_code and row is None)
    return _placed(built, config) if built else suffix_architecture(class_name, model_type)


def _refuse_other_kinds(config: Mapping[str, Any]) -> None:
    """Names the first of the keys that say which class it is whose value is none that they can have."""
    names = config.get("architectures")
    if names is not None and not (isinstance(names, (list, tuple)) and all(isinstance(each, str) for each in names)):
        raise InputError(refusal(("architectures",), names, "a list of class names"))
    for key, kind, needed in (("model_type", str, "a word"), ("auto_map", dict, "an object")):
        if config.get(key) is not None and not isinstance(config[key], kind):
            raise InputError(refusal((key,), config[key], needed))
    if config.get("text_config") is not None and not isinstance(config["text_config"], Mapping):
        raise InputError(refusal(("text_config",), config["text_config"], "an object"))


def _placed(architecture: Architecture, config: Mapping[str, Any]) -> Architecture:
    """Read keys below ``text_config`` when a text-only class is used with the config of its composite."""
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


def _introspected(
    config: Mapping[str, Any], class_name: str, config_dir: Path | None, trust_remote_code: bool
) -> Architecture | None:
    try:
        # costs seconds: only for a class that the table cannot answer
        from ckptx.architecture.introspection import meta_model
    except ImportError as error:
        raise missing_package(f"{class_name}: the table does not answer for it, so it must be built", error) from error
    return meta_model.introspect(config, config_dir=config_dir, trust_remote_code=trust_remote_code)
