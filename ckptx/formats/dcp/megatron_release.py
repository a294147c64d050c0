"""Build the contents of the files that Megatron adds to a DCP, for weights without training state.

A training run is a directory of checkpoints. A text file in it names the one to load: an iteration, or `release` for
weights alone.

    latest_checkpointed_iteration.txt   release
    release/                            .metadata, *.distcp, metadata.json, common.pt
"""

from __future__ import annotations

import json

from ckptx.formats.dcp.megatron import TORCH_DIST
from ckptx.formats.torch_archive.object_archive import PlainValue, object_archive

RELEASE = "release"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
_CHECKPOINT_VERSION = 3.0  # version with the current order of rows in linear_qkv


def backend_bytes() -> bytes:
    """Return the bytes of `metadata.json`."""
    return json.dumps(
        {
            "sharded_backend": TORCH_DIST,
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
    ).encode()


def common_bytes(*, has_stacked_layers: bool) -> bytes:
    """Return the bytes of a `common.pt` for weights without training state.

    It has plain values only, such as numbers and dicts, so that `torch.load` reads it with `weights_only=True`.

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
