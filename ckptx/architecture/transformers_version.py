"""Compare the installed transformers with the version from which the generated files were made, for one class."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.model_files import read_index, source_of


def source_digest(models: Path, directories: Iterable[str]) -> str:
    """Return a digest of the code that defines models.

    Args:
        models: Directory `models` of a transformers package.
        directories: Names of model directories in it.
    """
    import hashlib  # slower to import than the rest of this file, and needed only if versions differ

    digest = hashlib.sha256()
    for directory in sorted(directories):
        for path in sorted((models / directory).glob("*.py")):
            if path.name.startswith(("modeling_", "configuration_")):
                digest.update(f"{directory}/{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _transformers_directory() -> Path | None:
    """Return the directory of the installed transformers; None if it is not installed."""
    try:
        spec = find_spec("transformers")
    except (ImportError, ValueError):  # a finder hides it, or a module replaces it
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@functools.cache
def version_note(class_name: str) -> str | None:
    """Return a note if the installed transformers has other code for this class than the introspected version.

    Nothing of transformers is imported. Without transformers there is no note.
    """
    version, package = read_index()["transformers"], _transformers_directory()
    if package is None:
        return None
    if (package.parent / f"transformers-{version}.dist-info").is_dir():
        return None
    source = source_of(class_name)
    if source is None or source_digest(package / "models", source["directories"]) == source["digest"]:
        return None
    return (
        f"{class_name}: names, ties and plans are those of transformers {version}; the installed version has different "
        "code for this class, which was not checked"
    )


def architecture_note(architecture: Architecture | None) -> str | None:
    """Return the version note for a class from the generated files."""
    if architecture is None or architecture.known_from != "table":
        return None
    return version_note(architecture.class_name)
