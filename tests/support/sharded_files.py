"""Read sharded checkpoints with torch and safetensors: the region of each tensor in each file."""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.support import models
from tests.support.models import Recipe, build, load, read_file
from tests.support.torch_dcp import raw

Shape = tuple[int, ...]


class StoredRegion(NamedTuple):
    """A region of a tensor in a file.

    Attributes:
        file: Name of the file.
        offsets: First index of the region in each dimension.
        sizes: Number of indices in each dimension.
    """

    file: str
    offsets: Shape
    sizes: Shape

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + n) for at, n in zip(self.offsets, self.sizes, strict=True))


Blocks = dict[str, list[StoredRegion]]


def read_dcp_regions(root: Path) -> Blocks:
    """Read the regions in `.metadata` with torch."""
    read = dcp.FileSystemReader(root).read_metadata()
    entries, held = read.state_dict_metadata, defaultdict(list)
    for index, info in read.storage_data.items():
        entry = entries[index.fqn]
        if isinstance(entry, TensorStorageMetadata):
            sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
            held[index.fqn].append(StoredRegion(info.relative_path, tuple(index.offset), tuple(sizes)))
    return dict(held)


def read_shard_regions(root: Path) -> Blocks:
    """Read the regions in the headers of sharded safetensors."""
    held = defaultdict(list)
    for file in sorted(root.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            info = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for name in opened.keys():  # noqa: SIM118 (a file cannot be iterated over)
                sizes = tuple(opened.get_slice(name).get_shape())
                held[name].append(StoredRegion(file.name, tuple(info[name]["saved_offsets"]), sizes))
    return dict(held)


def rank_of(file: str) -> int:
    """Return the rank that wrote a file, from its name in either format."""
    found = re.fullmatch(r"__(\d+)_\d+\.distcp|shard-(\d+)-model-\d+-of-\d+\.safetensors", file)
    assert found, file
    return int(found[1]) if found[1] else int(found[2]) - 1


def coverage_fault(shape: Shape, held: Iterable[StoredRegion], copies: int = 1) -> str | None:
    """Return the error in the regions of a tensor; None if all elements occur once, or all `copies` times."""
    times = np.zeros(shape, int)
    for rectangle in held:
        if any(at + n > size for at, n, size in zip(rectangle.offsets, rectangle.sizes, shape, strict=True)):
            return f"{rectangle} is outside {shape}"
        times[rectangle.slices] += 1
    if not times.size or (times.min() == times.max() and times.min() in (1, copies)):
        return None
    return f"elements occur {times.min()} to {times.max()} times"


def first_wrong_region(
    root: Path, held: Mapping[str, list[StoredRegion]], expected: Mapping[str, torch.Tensor]
) -> str | None:
    """Return the first region in sharded safetensors that differs from the tensor, replicas included."""
    opened = {file.name: read_file(file) for file in root.glob("*.safetensors")}
    for name, rectangles in held.items():
        for rectangle in rectangles:
            if raw(opened[rectangle.file][name]) != raw(expected[name][rectangle.slices]):
                return f"{name} {rectangle}"
    return None


# Lists of layers that pipeline stages split, in the order of execution [default: `_DECODER`].
_DECODER = re.compile(r"(?:^|\.)(?:layers|h|block)\.(\d+)\.")
_ENCODER_DECODER = re.compile(r"(?:^|\.)(encoder|decoder)\.(?:layers|block)\.(\d+)\.")
_ENCODER = re.compile(r"(?:^|\.)encoder\.layer\.(\d+)\.")
_TOWER = re.compile(r"vision|visual|audio")


def layer_of(name: str, encoder_layers: int) -> int | None:
    """Return the index of the layer of a tensor, counted over encoder and decoder; None outside layers.

    Args:
        name: Name of a tensor, on disk or in the model.
        encoder_layers: Number of encoder layers; 0 for a model without a separate encoder.
    """
    if _TOWER.search(name):
        return None
    both = _ENCODER_DECODER.search(name)
    if both:
        return int(both[2]) + (encoder_layers if both[1] == "decoder" else 0)
    found = _ENCODER.search(name) or _DECODER.search(name)
    return int(found[1]) if found else None


def with_layers(name: str, layers: int) -> Recipe:
    """Return a recipe with more layers in its language model."""
    recipe = models.EVERY[name]

    def make() -> Any:
        model = recipe.model()
        config = copy.deepcopy(model.config)
        text = config.get_text_config()
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = (text.layer_types * layers)[:layers]
        return type(model)(config)

    return replace(recipe, model=make)


def state_of(recipe: Recipe, hf: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the model in the saved dtype, by its names in the model; tied tensors have all names."""
    model = load(hf) if recipe.add else build(recipe)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
