"""Notes on models of a class that ckptx does not know, and the search for a prefix that all their names share."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ckptx.architecture.configs import remote_reference
from ckptx.catalog.catalog import Catalog
from ckptx.formats.hf.hf_metadata import config_source
from ckptx.model_view.view import ModelView, read_valid_manifest

_MAX_PREFIX_COMPONENTS = 3


def unknown_class_note(view: ModelView, config_checkpoint: Catalog, *, accepts_code: bool = True) -> str | None:
    """Return a note on a model of an unknown class: what was not checked, and what to do; None for a known class.

    Args:
        view: Model of the checkpoint.
        config_checkpoint: Checkpoint with the config in use, and with its custom code if there is any.
        accepts_code: True for a command that accepts `--trust-remote-code`.
    """
    architecture = view.disk_architecture
    if architecture is None or not architecture.is_unknown_class:
        return None
    class_name = architecture.class_name
    code = _find_code(view, class_name, config_checkpoint)
    if code is None:
        advice = "the checkpoint has no code of it"
        if accepts_code:
            advice = f"compare the names with those of its state_dict(), or {code_advice(code)}"
    else:
        advice = code_advice(code) if accepts_code else "convert and reshard check them with --trust-remote-code"
    return f"{class_name} is an unknown class: its tied weights, layers, names and shapes were not checked; {advice}"


def note_on_unknown_ties(*views: ModelView) -> tuple[str, ...]:
    """Return a note on names that a comparison calls missing, which may be tied in a model of an unknown class.

    The note is about the first view with an unknown class and a config; empty if there is none.
    """
    for view in views:
        architecture = view.disk_architecture
        if architecture is not None and architecture.is_unknown_class and view.config is not None:
            advice = code_advice(remote_reference(view.config, architecture.class_name))
            return (f"{architecture.class_name} is an unknown class, so missing names may be tied to others; {advice}",)
    return ()


def code_advice(code: str | None) -> str:
    """Return a clause that advises how to use the code of an unknown class.

    Args:
        code: Reference to the code in `auto_map`, such as `file.Class`; None if there is none.
    """
    if code is None:
        return "put its Python code next to config.json, with auto_map, and pass --trust-remote-code"
    return f"pass --trust-remote-code to use its code, {code} of auto_map"


def _find_code(view: ModelView, class_name: str, config_checkpoint: Catalog) -> str | None:
    """Return the `file.Class` of `auto_map` with the code of the class; None if the checkpoint lacks the file."""
    reference = None if view.config is None else remote_reference(view.config, class_name)
    if reference is None or "--" in reference:  # the code of "repository--file.Class" is in that repository
        return reference
    file_name = f"{reference.partition('.')[0]}.py"
    return reference if config_source(config_checkpoint).listing().has(file_name) else None


class SharedPrefix(NamedTuple):
    """Prefix of all names of a model.

    Attributes:
        prefix: The prefix, with the dot at its end.
        is_absent_in_base: True if at least half of the names of the base, prefixed with it, are names of the model;
            False if there is no base that confirms the prefix.
    """

    prefix: str
    is_absent_in_base: bool


def shared_prefix_of_unknown_class(view: ModelView, base_names: Collection[str]) -> SharedPrefix | None:
    """Return the prefix that a trainer may have added to all names of a model of an unknown class.

    Args:
        view: Model found without a prefix.
        base_names: Names of the model in the checkpoint that it was trained from, or that it is compared with; empty if
            there is none.

    Returns:
        The prefix. None for a known class or a format that is no training format, if the view already has a prefix, or
        if the names share none. A prefix that the base does not confirm is also not returned if names of the base occur
        in the view without it, if there is no config, or if ckptx wrote the checkpoint.
    """
    architecture, is_training_format = view.disk_architecture, view.catalog.traits.is_training_format
    if (architecture is not None and not architecture.is_unknown_class) or not is_training_format:
        return None
    if view.prefix or not view.tensors:
        return None
    prefixes = _shared_prefixes(view)
    counts = {prefix: sum(f"{prefix}{name}" in view.tensors for name in base_names) for prefix in ("", *prefixes)}
    best = max(counts, key=counts.__getitem__)
    if best and 2 * counts[best] >= len(base_names):
        return SharedPrefix(best, True)
    if not prefixes or counts[""] or architecture is None or read_valid_manifest(view.catalog, []) is not None:
        return None
    return SharedPrefix(prefixes[0], False)


def _shared_prefixes(view: ModelView) -> list[str]:
    """Return the prefixes of at most `_MAX_PREFIX_COMPONENTS` components that all names share, the shortest first.

    The last component of a name, which names a parameter, is never part of a prefix.
    """
    names = iter(view.tensors)
    shared = next(names).split(".")[:-1]
    for name in names:
        parts = name.split(".")[:-1]
        length = next((at for at, (a, b) in enumerate(zip(shared, parts, strict=False)) if a != b), len(parts))
        shared = shared[:length]
    component_counts = range(1, min(len(shared), _MAX_PREFIX_COMPONENTS) + 1)
    return ["".join(f"{component}." for component in shared[:count]) for count in component_counts]
