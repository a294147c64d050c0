"""Recognize a Megatron `torch_dist` checkpoint: a DCP with two additional files.

    metadata.json   the format of the checkpoint: {"sharded_backend": "torch_dist", ...}
    common.pt       a pickle of the state that is equal on every rank: arguments, iteration, optimizer state

Its tensors are read like those of any DCP, under Megatron's own names, which `ckptx.model_view.megatron_names` maps to
those of the Hub if there is a config. Without one, `common.pt` is copied without being opened.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptx.catalog.entry import Sidecar
from ckptx.errors import InputError, ReadError
from ckptx.formats.hf.reader import read_json_object
from ckptx.storage.interface import Source

BACKEND_FILE = "metadata.json"
COMMON_FILE = "common.pt"
NAMES_NOTE = "Megatron torch_dist: tensors have Megatron's own names and layout"
TORCH_DIST = "torch_dist"


def is_torch_dist(source: Source) -> bool:
    """Return True if `metadata.json` identifies the directory as a `torch_dist` checkpoint."""
    if not source.listing().is_file(BACKEND_FILE):
        return False
    try:
        return read_json_object(source, BACKEND_FILE).get("sharded_backend") == TORCH_DIST
    except ReadError:
        raise
    except InputError:
        return False  # a file of the same name from another program


def torch_dist_sidecars(source: Source) -> tuple[Sidecar, ...]:
    """Return the files of a `torch_dist` checkpoint that are copied with its tensors even without a config."""
    return tuple(
        Sidecar(name, source.size(name)) for name in (COMMON_FILE, BACKEND_FILE) if source.listing().is_file(name)
    )


def names_without_backend_file(source: Source, sidecars: Iterable[Sidecar]) -> list[str]:
    """Return the names of the sidecars for an output in another format.

    `metadata.json` of a `torch_dist` checkpoint is left out, because it would misdescribe the output as `torch_dist`.
    """
    dropped = {BACKEND_FILE} if is_torch_dist(source) else set()
    return [sidecar.name for sidecar in sidecars if sidecar.name not in dropped]
