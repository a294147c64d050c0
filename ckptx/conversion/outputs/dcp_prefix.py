"""Check of `--prefix`: the reader must find the same model under the prefixed names."""

from __future__ import annotations

from collections.abc import Collection

from ckptx.architecture.infer_class import infer_class
from ckptx.architecture.model_names import ModelNames, find_model_names
from ckptx.errors import UsageError
from ckptx.mapping.models import describe_prefix
from ckptx.mapping.names import is_optimizer, is_trainer_state
from ckptx.model_view.view import ModelView
from ckptx.untrusted.limits import MAX_NAME_LENGTH


def refuse_unreadable_prefix(prefix: str, names: Collection[str], view: ModelView) -> None:
    """Refuse a prefix under which `view_model` would not find the same model.

    Args:
        prefix: Prefix to add to each name.
        names: Names of the model tensors without the prefix.
        view: Model that the names belong to.

    Raises:
        UsageError: The reader would find another model, or none.
    """
    reason = _unreadable_reason(prefix, names, view)
    if reason is not None:
        raise UsageError(f'--prefix "{prefix}": {reason}; choose another prefix, such as "app."')


def _unreadable_reason(prefix: str, names: Collection[str], view: ModelView) -> str | None:
    """Return why the reader would not find the model under the prefix; None if it would."""
    if "*" in prefix.split("."):
        return 'a component "*" stands for an index where names are looked up'
    longest = max(map(len, names), default=0) + len(prefix)
    if longest > MAX_NAME_LENGTH:
        return f"the longest name would have {longest:,} characters, at most {MAX_NAME_LENGTH:,} are allowed"
    prefixed_names = {prefix + name: name for name in names}
    config, source_config = view.config, view.catalog.config
    if config is not None and source_config is not None and source_config.get("architectures") in (None, []):
        inferred = infer_class(source_config, prefixed_names)
        if inferred is None or [inferred.class_name] != config.get("architectures"):
            return "config.json names no class, and the class cannot be inferred from names with this prefix"
    is_unknown = view.disk_architecture is None or not view.disk_architecture.name_patterns
    # Names of an unknown class do not identify a prefix: the user passes it when reading.
    state_flags = [is_optimizer(name) or is_trainer_state(name) for name in prefixed_names]
    if (is_unknown and any(state_flags)) or all(state_flags):
        return "names with this prefix would be read as training state"
    found = find_model_names(prefixed_names, view.disk_architecture, config, prefix if is_unknown else None)
    if _finds_same_model(prefix, prefixed_names, found):
        return None
    if found.unwrapped.counts or found.unwrapped.duplicates:
        wrapper = next(iter(found.unwrapped.counts))
        return f'the wrapper "{wrapper}." would be removed from names when the output is read'
    if len(found.models.complete_prefixes) > 1:
        return f"ckptx would find {len(found.models.complete_prefixes)} complete models in the output"
    if found.models.roles.prefix != prefix:
        found_prefix = describe_prefix(found.models.roles.prefix)
        return f"ckptx could not detect this prefix in the output, but would find a model {found_prefix}"
    return "some names with this prefix would be read as training state"


def _finds_same_model(prefix: str, prefixed_names: dict[str, str], found: ModelNames) -> bool:
    roles = found.models.roles
    return (
        roles.prefix == prefix
        and roles.model == {name: full for full, name in prefixed_names.items()}
        and all(name == short for name, short in found.unwrapped.names.items())
        and len(found.models.complete_prefixes) == 1
    )
