"""Recognize a Megatron `torch_dist` checkpoint: a DCP with two additional files.

    metadata.json   the format of the checkpoint: {"sharded_backend": "torch_dist", ...}
    common.pt       a pickle of the state that is equal on every rank: arguments, iteration, optimizer state

Its tensors are read like those of any DCP, under Megatron's own names, which `ckptx.model_view.megatron_names` maps to
those of the Hub if there is a config. Without one, `common.pt` is copied; it is never parsed.

A training run is a directory of such checkpoints. A text file in it names the one to load: an iteration, or `release`
for weights without training state.

    latest_checkpointed_iteration.txt   release
    release/                            .metadata, *.distcp, metadata.json, common.pt
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from ckptx.catalog.entry import Sidecar
from ckptx.errors import InputError, ReadError
from ckptx.formats.hf.reader import read_json_object
from ckptx.formats.torch_archive.object_archive import PlainValue, object_archive
from ckptx.storage.interface import Source

BACKEND_FILE = "metadata.json"
COMMON_FILE = "common.pt"
NAMES_NOTE = "Megatron torch_dist: tensors have Megatron's own names and layout"
RELEASE = "release"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
_TORCH_DIST = "torch_dist"
_CHECKPOINT_VERSION = 3.0  # version with the current order of rows in linear_qkv


def is_torch_dist(source: Source) -> bool:
    """Return True if `metadata.json` identifies the directory as a `torch_dist` checkpoint."""
    if not source.listing().is_file(BACKEND_FILE):
        return False
    try:
        return read_json_object(source, BACKEND_FILE).get("sharded_backend") == _TORCH_DIST
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
    """Return the sidecars for an output in another format, which `metadata.json` would misdescribe as `torch_dist`."""
    dropped = {BACKEND_FILE} if is_torch_dist(source) else set()
    return [sidecar.name for sidecar in sidecars if sidecar.name not in dropped]


def backend_bytes() -> bytes:
    """Return the bytes of `metadata.json`."""
    return json.dumps(
        {
            "sharded_backend": _TORCH_DIST,
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
    ).encode()


def common_bytes(*, has_stacked_layers: bool) -> bytes:
    """Return the bytes of a `common.pt` for weights alone, which names no class.

    Megatron passes `content_metadata` to the model when it asks for the names of tensors, so that it finds stacked or
    separate layers as they are stored.

    Args:
        has_stacked_layers: True if one tensor holds all layers.
    """
    common: PlainValue = {
        "checkpoint_version": _CHECKPOINT_VERSION,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": not has_stacked_layers},
    }
    return object_archive(common)
