"""Find contradictions in a manifest: tensors, files, ties, shardings and the layout must agree."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from typing import NamedTuple

from ckptx.catalog.manifest import Manifest, ShardingRecord
from ckptx.catalog.region import Region, Shape, find_coverage_fault
from ckptx.untrusted.hash_keys import salted_key


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
    return _check_layout(manifest) or _check_ties(manifest) or _check_shardings(manifest) or _check_file_sizes(manifest)


def _field_path(rows: str, name: str, key: str) -> str:
    return f"{rows}[{json.dumps(name):.200}].{key}"


def _check_layout(manifest: Manifest) -> Contradiction | None:
    stages, pp = manifest.layout.stages, manifest.layout.pp
    if stages is not None and len(stages) != pp:
        return Contradiction("layout.stages", f"{len(stages)} stages", f"{pp}, the value of layout.pp")
    for stage in stages or ():
        for path, first, stop in stage:
            if first > stop:
                return Contradiction("layout.stages", json.dumps([path, first, stop]), "a first layer before the last")
    return None


def _check_ties(manifest: Manifest) -> Contradiction | None:
    rows = manifest.tensors
    for name, row in rows.items():
        if row.tied_to is not None and rows[row.tied_to].digest != row.digest:
            return Contradiction(
                f"tensors[{json.dumps(name):.200}].tied_to", row.tied_to, "a tensor with the same digest"
            )
    return None


def _check_shardings(manifest: Manifest) -> Contradiction | None:
    """Check that the blocks of a tensor tile its shape, and that replicas equal one of them."""
    checked: set[tuple[int, tuple[int, Shape]]] = set()
    for name, row in manifest.tensors.items():
        if row.sharding_index is None or (row.sharding_index, salted_key(row.shape)) in checked:
            continue
        checked.add((row.sharding_index, salted_key(row.shape)))
        sharding = manifest.shardings[row.sharding_index]
        regions = _regions_without_replicas(sharding)
        fault = find_coverage_fault(row.shape, regions)
        region_keys = {salted_key(region) for region in regions}
        if fault is not None or any(
            salted_key(sharding.regions[index]) not in region_keys for index in sharding.replicas
        ):
            value = "a replica of no block" if fault is None else f"a {fault.kind}"
            return Contradiction(_field_path("tensors", name, "cut"), value, f"blocks that tile {list(row.shape)}")
    return None


def _regions_without_replicas(sharding: ShardingRecord) -> list[Region]:
    replicas = set(sharding.replicas)
    return [region for index, region in enumerate(sharding.regions) if index not in replicas]


def _check_file_sizes(manifest: Manifest) -> Contradiction | None:
    """Check that a file is at least as large as its tensors; tied names may share bytes and are not counted."""
    names, sizes = list(manifest.files), Counter[int]()
    tensor_counts: Counter[tuple[int, int]] = Counter()
    for row in manifest.tensors.values():
        if row.tied_to is not None:
            continue
        if row.file_index is not None:
            sizes[row.file_index] += prod(row.shape) * row.dtype.bits // 8
        elif row.sharding_index is not None:
            tensor_counts[row.sharding_index, row.dtype.bits] += 1
    for (number, bits), tensors in tensor_counts.items():
        sharding = manifest.shardings[number]
        for file, region in zip(sharding.files, sharding.regions, strict=True):
            sizes[file] += tensors * (region.numel * bits // 8)
    for file, nbytes in sizes.items():
        recorded = manifest.files[names[file]].nbytes
        if recorded < nbytes:
            return Contradiction(
                _field_path("files", names[file], "bytes"), str(recorded), f"the {nbytes} bytes of its tensors"
            )
    return None
