"""Whether the installed transformers is the one that the generated files were made from, as far as a class goes."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from ckptx.architecture.model_files import index, source_of
from ckptx.architecture.spec import Architecture


def source_digest(models: Path, directories: Iterable[str]) -> str:
    """A digest of the code that says what models are.

    Args:
        models: The directory `models` of a transformers package.
        directories: Of models in it.
    """
    import hashlib  # takes longer than the rest of this file, and is needed where versions differ

    found = hashlib.sha256()
    for directory in sorted(directories):
        for path in sorted((models / directory).glob("*.py")):
            if path.name.startswith(("modeling_", "configuration_")):
                found.update(f"{directory}/{path.name}\0".encode() + path.read_bytes())
    return found.hexdigest()[:32]


def _package() -> Path | None:
    """The directory of the installed transformers; None where there is none."""
    try:
        spec = find_spec("transformers")
    except (ImportError, ValueError):  # as a finder that hides it, or a module that was put in its place, makes it
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@functools.cache
def version_note(class_name: str) -> str | None:
    """What to say when another transformers is installed, whose code for this class is not what was asked; else None.

    Nothing of transformers is imported. Where it is not installed there is nothing to differ from.
    """
    asked, package = index()["transformers"], _package()
    if package is None:
        return None
    if (package.parent / f"transformers-{asked}.dist-info").is_dir():
        return None
    source = source_of(class_name)
    if source is None or source_digest(package / "models", source["directories"]) == source["digest"]:
        return None
    return (
        f"{class_name}: its names, ties and plans are known from transformers {asked}; the installed one has other "
        "code for it, which was not looked at"
    )


def note_on(architecture: Architecture | None) -> str | None:
    """The note for a class that the generated files answer for."""
    if architecture is None or architecture.known_from != "table":
        return None
    return version_note(architecture.class_name)
