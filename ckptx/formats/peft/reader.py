"""Open the weights of a PEFT adapter; names and shapes are those of the file."""

from __future__ import annotations

from dataclasses import replace

from ckptx.catalog.catalog import Catalog
from ckptx.errors import UnsupportedError
from ckptx.formats.hf.reader import open_huggingface
from ckptx.storage.interface import Source


def open_peft(source: Source, weights: str) -> Catalog:
    """Open the weights of an adapter.

    Args:
        source: Directory of the adapter.
        weights: Name of the weight file.

    Raises:
        InputError: The file is corrupt.
        UnsupportedError: Its header records that it has only shards of tensors.
    """
    if weights.endswith(".bin"):
        from ckptx.formats.hf.torch_bin import open_bin

        catalog = open_bin(source, [weights])
    else:
        opened = open_huggingface(source, weights)
        if opened is None:
            raise UnsupportedError(
                f"{source.location / weights}: holds shards of the adapter's tensors, and ckptx reads adapters with "
                "whole tensors; save it with PEFT's save_pretrained"
            )
        catalog = opened
    return replace(catalog, format="peft", verbatim={})
