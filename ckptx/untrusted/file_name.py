"""Which names a file of an output may have: those that cannot lead out of its directory, whoever thought of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MAX_COMPONENT = 255  # bytes, on every common file system
_MAX_NAME = 1024
_WEIGHTS_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_SINGLE = "model.safetensors"
_STAGING = (".ckptx-partial", ".ckptx-old")


def name_fault(name: str) -> str | None:
    """What is wrong with `name` as the name of a file below a directory; None when nothing is.

    Example:
        name_fault("onnx/model.json") is None, name_fault("../model.json") is "it leads out of the directory".
    """
    if not name:
        return "it is empty"
    if name.startswith("/") or "\\" in name:
        return "it is no relative path"
    if any(ord(char) < 32 or 127 <= ord(char) < 160 for char in name):
        return "it holds control characters"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "it is not Unicode"
    parts = name.split("/")
    if ".." in parts:
        return "it leads out of the directory"
    if "" in parts or "." in parts:
        return "it has an empty part"
    if size > _MAX_NAME or any(len(part.encode()) > _MAX_COMPONENT for part in parts):
        return "it is too long"
    if any(part.startswith(".") and part.endswith(_STAGING) for part in parts):
        return "it is that of a staging directory"
    return None


def colliding_name(names: Iterable[str]) -> str | None:
    """The first of `names` that is there twice, or that would have to be a file and a directory; None without one."""
    files: set[str] = set()
    directories: set[str] = set()
    for name in names:
        parts = name.split("/")
        above = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        if name in files or name in directories or above & files:
            return name
        files.add(name)
        directories |= above
    return None


def weights_fault(files: Sequence[str], index: str | None) -> str | None:
    """What is wrong with names as those of the safetensors files of an HF checkpoint and of its index.

    Loaders prefer `model.safetensors` to any index, and look for an index beside them only, so that some names would
    hide tensors from them.

    Example:
        weights_fault(["a.safetensors"], None) is None, weights_fault(["config.json"], None) is not.
    """
    for name in files:
        fault = _ending_fault(name, _WEIGHTS_SUFFIX)
        if fault is None and name.rpartition("/")[2].startswith("adapter_"):
            fault = "it is that of an adapter"
        if fault is not None:
            return f"{name!r:.80}: {fault}"
    if index is not None:
        fault = _ending_fault(index, _INDEX_SUFFIX)
        if fault is not None:
            return f"{index!r:.80}: {fault}"
    elif len(files) != 1:
        return f"{len(files)} files need an index"
    beside = index if index is not None else files[0]
    if "/" in beside:
        return f"{beside!r:.80}: it is not at the top of the checkpoint"
    if len(files) > 1 and _SINGLE in files:
        return f'"{_SINGLE}": loaders would look into no other file'
    twice = colliding_name([*files, *([] if index is None else [index])])
    return None if twice is None else f"{twice!r:.80}: it is there twice"


def _ending_fault(name: str, suffix: str) -> str | None:
    return name_fault(name) or (None if name.endswith(suffix) else f"it does not end in {suffix}")
