"""A prefix to put in front of the names of a DCP: accepted when the reader finds the model under it again."""

from __future__ import annotations

from collections.abc import Collection

from ckptx.architecture.infer import infer_class
from ckptx.architecture.names_found import ModelNames, find_names
from ckptx.errors import UsageError
from ckptx.mapping.models import below
from ckptx.mapping.names import is_optimizer, is_trainer_state
from ckptx.model_view.view import ModelView
from ckptx.untrusted.limits import NAME_LENGTH


def refuse_unreadable_prefix(prefix: str, names: Collection[str], view: ModelView) -> None:
    """Reads the names that would be written, as `view_model` does, and compares the model in them with the one given.

    Args:
        prefix: To put in front of each name.
        names: Without it.
        view: The model that they are of.

    Raises:
        UsageError: Another model would be found, or none.
    """
    what = _what_becomes_of(prefix, names, view)
    if what is not None:
        raise UsageError(f'--prefix "{prefix}": {what}; choose another prefix, as "app."')


def _what_becomes_of(prefix: str, names: Collection[str], view: ModelView) -> str | None:
    """Return the reason why the reader does not find the model again; None if it does."""
    if "*" in prefix.split("."):
        return 'a component "*" stands for an index where names are looked up'
    longest = max(map(len, names), default=0) + len(prefix)
    if longest > NAME_LENGTH:
        return f"it makes a name of {longest:,} characters, allowed at most {NAME_LENGTH:,}"
    written = {prefix + name: name for name in names}
    config, own = view.config, view.catalog.config
    if config is not None and own is not None and own.get("architectures") in (None, []):
        inferred = infer_class(own, written)
        if inferred is None or [inferred.class_name] != config.get("architectures"):
            return "under it, the names no longer tell the class that config.json leaves out"
    is_unknown = view.published is None or not view.published.name_patterns
    # The names of an unknown class say nothing: whoever reads them has to give the prefix.
    is_state = [is_optimizer(name) or is_trainer_state(name) for name in written]
    if (is_unknown and any(is_state)) or all(is_state):
        return "names that begin with it are read as those of optimizer or training state"
    found = find_names(written, view.published, config, prefix if is_unknown else None)
    if _is_found_again(prefix, written, found):
        return None
    if found.unwrapped.counts or found.unwrapped.duplicates:
        wrapper = next(iter(found.unwrapped.counts))
        return f'names are read without the wrapper "{wrapper}."'
    if len(found.models.complete) > 1:
        return f"{len(found.models.complete)} complete models would be found in the names"
    if found.models.roles.prefix != prefix:
        return f"no model would be found under it, but one {below(found.models.roles.prefix)}"
    return "some of the names that begin with it are read as those of optimizer or training state"


def _is_found_again(prefix: str, written: dict[str, str], found: ModelNames) -> bool:
    roles = found.models.roles
    return (
        roles.prefix == prefix
        and roles.model == {name: full for full, name in written.items()}
        and all(name == short for name, short in found.unwrapped.names.items())
        and len(found.models.complete) == 1
    )
