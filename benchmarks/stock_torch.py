"""Convert between HF and DCP with stock torch: python stock_torch.py hf2dcp|dcp2hf SRC DST."""

from __future__ import annotations

import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def main(direction: str, src: str, dst: str) -> None:
    """Load every tensor of SRC, then save it to DST, in one process without a process group."""
    reader = HuggingFaceStorageReader(src) if direction == "hf2dcp" else FileSystemReader(src)
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    writer = FileSystemWriter(dst) if direction == "hf2dcp" else HuggingFaceStorageWriter(dst)
    dcp.save(state, storage_writer=writer, no_dist=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
