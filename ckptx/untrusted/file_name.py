"""Check untrusted names of output files, which must not lead out of the output directory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MAX_COMPONENT_NBYTES = 255  # limit of common file systems, in UTF-8
_MAX_NAME_NBYTES = 1024  # in UTF-8, with all components
_WEIGHTS_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_STAGING_SUFFIXES = (".ckptx-partial", ".ckptx-old")


def find_name_fault(name: str) -> str | None:
    """Return the reason why a name is not valid for a file in a directory, or None if it is valid.

    Example:
        find_name_fault("onnx/model.json") is None; find_name_fault("../x") is "it leads out of the directory".
    """
    if not name:
        return "it is empty"
    if name.startswith("/") or "\\" in name:
        return "it is not a relative path"
    if any(ord(char) < 32 or 127 <= ord(char) < 160 for char in name):
        return "it contains control characters"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "it is not Unicode"
    parts = name.split("/")
    if ".." in parts:
        return "it leads out of the directory"
    if "" in parts or "." in parts:
        return "it has an empty component"
    if size > _MAX_NAME_NBYTES or any(len(part.encode()) > _MAX_COMPONENT_NBYTES for part in parts):
        return "it is too long"
    if any(part.startswith(".") and part.endswith(_STAGING_SUFFIXES) for part in parts):
        return "it is reserved for staging directories"
    return None


def find_conflicting_name(names: Iterable[str]) -> str | None:
    """Return the first name that conflicts with an earlier one, or None if there is none.

    Two names conflict if they are equal, or if one would be a directory that contains the other.

    Example:
        find_conflicting_name(["a", "a/b"]) is "a/b".
    """
    files: set[str] = set()
    directories: set[str] = set()
    for name in names:
        parts = name.split("/")
        parents = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        if name in files or name in directories or parents & files:
            return name
        files.add(name)
        directories |= parents
    return None


def find_weights_fault(files: Sequence[str], index: str | None) -> str | None:
    """Return the reason why names are not valid for the safetensors files and index of an HF checkpoint, or None.

    Loaders prefer `model.safetensors` to any index, and look for an index only at the top of a checkpoint, so some
    names would hide tensors from them.

    Args:
        files: Names of the safetensors files; at least one.
        index: Name of the index; None if there is none, for a single file.

    Example:
        find_weights_fault(["a.safetensors"], None) is None; find_weights_fault(["config.json"], None) is not.
    """
    for name in files:
        fault = _find_suffix_fault(name, _WEIGHTS_SUFFIX)
        if fault is None and name.rpartition("/")[2].startswith("adapter_"):
            fault = "it is the name of an adapter"
        if fault is not None:
            return f"{name!r:.80}: {fault}"
    if index is not None:
        fault = _find_suffix_fault(index, _INDEX_SUFFIX)
        if fault is not None:
            return f"{index!r:.80}: {fault}"
    elif len(files) != 1:
        return f"{len(files)} files require an index"
    main_file = index if index is not None else files[0]
    if "/" in main_file:
        return f"{main_file!r:.80}: it is not at the top of the checkpoint"
    if len(files) > 1 and _SINGLE_FILE in files:
        return f'"{_SINGLE_FILE}": loaders would ignore the other files'
    conflict = find_conflicting_name([*files, *([] if index is None else [index])])
    return None if conflict is None else f"{conflict!r:.80}: it is a duplicate"


def _find_suffix_fault(name: str, suffix: str) -> str | None:
    return find_name_fault(name) or (None if name.endswith(suffix) else f"it does not end in {suffix}")
