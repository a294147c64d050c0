"""What lies beside the tensors in a `torch_dist` checkpoint of Megatron: a DCP with two files of its own.

    metadata.json   which format the files have: {"sharded_backend": "torch_dist", ...}
    common.pt       a pickle of what is the same on every rank: arguments, iteration, state of the optimizer

Its tensors are read as those of any DCP, under Megatron's own names. `common.pt` is carried as bytes and never parsed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ckptx.catalog.entry import Sidecar
from ckptx.errors import InputError
from ckptx.formats.hf.reader import read_json

BACKEND_FILE = "metadata.json"
COMMON_FILE = "common.pt"
_BACKEND = "torch_dist"


def is_torch_dist(root: Path) -> bool:
    """True for the directory of a `torch_dist` checkpoint, by what its `metadata.json` says."""
    path = root / BACKEND_FILE
    if not path.is_file():
        return False
    try:
        return read_json(path).get("sharded_backend") == _BACKEND
    except InputError:
        return False  # another program's file of this name, which decides nothing


def torch_dist_sidecars(root: Path) -> tuple[Sidecar, ...]:
    """The files of a `torch_dist` checkpoint that belong to its tensors even without a config."""
    return tuple(
        Sidecar(name, (root / name).stat().st_size) for name in (COMMON_FILE, BACKEND_FILE) if (root / name).is_file()
    )


def without_backend(root: Path, sidecars: Iterable[Sidecar]) -> list[str]:
    """The sidecars of `root` that go along into another format: its `metadata.json` would call that `torch_dist`."""
    left = {BACKEND_FILE} if is_torch_dist(root) else set()
    return [sidecar.name for sidecar in sidecars if sidecar.name not in left]
