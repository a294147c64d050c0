"""What lies beside the tensors in a `torch_dist` checkpoint of Megatron: a DCP with two files of its own.

    metadata.json   which format the files have: {"sharded_backend": "torch_dist", ...}
    common.pt       a pickle of what is the same on every rank: arguments, iteration, state of the optimizer

Its tensors are read as those of any DCP, under Megatron's own names. `common.pt` is carried as bytes and never parsed.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptx.catalog.entry import Sidecar
from ckptx.errors import InputError
from ckptx.formats.hf.reader import json_in
from ckptx.storage.interface import Source

BACKEND_FILE = "metadata.json"
COMMON_FILE = "common.pt"
_BACKEND = "torch_dist"


def is_torch_dist(source: Source) -> bool:
    """True for the directory of a `torch_dist` checkpoint, by what its `metadata.json` says."""
    if not source.listing().is_file(BACKEND_FILE):
        return False
    try:
        return json_in(source, BACKEND_FILE).get("sharded_backend") == _BACKEND
    except InputError:
        return False  # another program's file of this name, which decides nothing


def torch_dist_sidecars(source: Source) -> tuple[Sidecar, ...]:
    """The files of a `torch_dist` checkpoint that belong to its tensors even without a config."""
    return tuple(
        Sidecar(name, source.size(name)) for name in (COMMON_FILE, BACKEND_FILE) if source.listing().is_file(name)
    )


def without_backend(source: Source, sidecars: Iterable[Sidecar]) -> list[str]:
    """The sidecars that go along into another format: `metadata.json` would call that `torch_dist`."""
    left = {BACKEND_FILE} if is_torch_dist(source) else set()
    return [sidecar.name for sidecar in sidecars if sidecar.name not in left]
