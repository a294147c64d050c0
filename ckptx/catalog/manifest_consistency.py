"""Find contradictions in a manifest: tensors, files, ties, shardings and the layout must agree."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from typing import NamedTuple

from ckptx.catalog.manifest import Manifest, ShardingRecord
from ckptx.catalog.region import Region, Shape, find_coverage_fault
from ckptx.untrusted.hash_keys import salted_key

# `CoverageFault.kind` -> value of a `Contradiction`.
_COVERAGE_FAULTS = {
    "gap": "an index of blocks with a gap",
    "overlap": "an index of blocks that overlap",
    "outside": "an index of blocks that are out of bounds",
    "unverifiable": "an index of blocks with too many different boundaries",
}


class Contradiction(NamedTuple):
    """Two fields of a manifest that cannot both be true.

    Attributes:
        field: Path of one of the fields.
        value: Value of that field.
        required: Value that the other field requires.
    """

    field: str
    value: str
    required: str


def find_contradiction(manifest: Manifest) -> Contradiction | None:
    """Return the first contradiction, or None.

    Args:
        manifest: Parsed manifest, in which each field is valid by itself.
    """
    return (
        _find_layout_contradiction(manifest)
        or _find_tie_contradiction(manifest)
        or _find_sharding_contradiction(manifest)
        or _find_file_size_contradiction(manifest)
    )


def field_path(section: str, name: str) -> str:
    """Return the path of the field of a file or tensor, such as `tensors["norm.weight"]`; long names are cut off."""
    return f"{section}[{json.dumps(name):.200}]"


def _find_layout_contradiction(manifest: Manifest) -> Contradiction | None:
    stages, count = manifest.layout.stages, manifest.layout.pp * manifest.layout.virtual_stages
    if stages is not None and len(stages) != count:
        field = "layout.pp" if manifest.layout.virtual_stages == 1 else "layout.pp x layout.virtual_stages"
        return Contradiction("layout.stages", f"{len(stages)} stages", f"{count}, the value of {field}")
    for stage in stages or ():
        for path, first, stop in stage:
            if first > stop:
                return Contradiction(
                    "layout.stages", json.dumps([path, first, stop]), "a first layer that is not after the stop"
                )
    return None


def _find_tie_contradiction(manifest: Manifest) -> Contradiction | None:
    for name, tensor in manifest.tensors.items():
        if tensor.tied_to is not None and manifest.tensors[tensor.tied_to].digest != tensor.digest:
            return Contradiction(
                f"{field_path('tensors', name)}.tied_to", tensor.tied_to, "a tensor with the same digest"
            )
    return None


def _find_sharding_contradiction(manifest: Manifest) -> Contradiction | None:
    """Find a tensor whose blocks without replicas do not tile its shape, or with a replica that repeats no block."""
    checked: set[tuple[int, tuple[int, Shape]]] = set()
    for name, tensor in manifest.tensors.items():
        if tensor.sharding_index is None or (tensor.sharding_index, salted_key(tensor.shape)) in checked:
            continue
        checked.add((tensor.sharding_index, salted_key(tensor.shape)))
        sharding = manifest.shardings[tensor.sharding_index]
        regions = _regions_without_replicas(sharding)
        fault = find_coverage_fault(tensor.shape, regions)
        region_keys = {salted_key(region) for region in regions}
        if fault is not None or any(
            salted_key(sharding.regions[index]) not in region_keys for index in sharding.replicas
        ):
            value = "an index of blocks with a replica of no block" if fault is None else _COVERAGE_FAULTS[fault.kind]
            return Contradiction(
                f"{field_path('tensors', name)}.cut", value, f"the index of blocks that tile {list(tensor.shape)}"
            )
    return None


def _regions_without_replicas(sharding: ShardingRecord) -> list[Region]:
    replicas = set(sharding.replicas)
    return [region for index, region in enumerate(sharding.regions) if index not in replicas]


def _find_file_size_contradiction(manifest: Manifest) -> Contradiction | None:
    """Find a file that is smaller than its tensors; tied names may share bytes and are not counted."""
    names, sizes = list(manifest.files), Counter[int]()
    tensor_counts: Counter[tuple[int, int]] = Counter()
    for tensor in manifest.tensors.values():
        if tensor.tied_to is not None:
            continue
        if tensor.file_index is not None:
            sizes[tensor.file_index] += prod(tensor.shape) * tensor.dtype.bits // 8
        elif tensor.sharding_index is not None:
            tensor_counts[tensor.sharding_index, tensor.dtype.bits] += 1
    for (sharding_index, bits), tensor_count in tensor_counts.items():
        sharding = manifest.shardings[sharding_index]
        for file, region in zip(sharding.files, sharding.regions, strict=True):
            sizes[file] += tensor_count * (region.numel * bits // 8)
    for file, nbytes in sizes.items():
        recorded = manifest.files[names[file]].nbytes
        if recorded < nbytes:
            return Contradiction(
                f"{field_path('files', names[file])}.bytes", str(recorded), f"the {nbytes} bytes of its tensors"
            )
    return None
