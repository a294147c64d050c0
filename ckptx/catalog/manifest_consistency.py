"""Find contradictions in a manifest: tensors, files, ties, shardings and the layout must agree."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from typing import NamedTuple

from ckptx.catalog.manifest import Manifest, ShardingRecord
from ckptx.catalog.region import Region, Shape, coverage_fault
from ckptx.untrusted.numbers import salted


class Contradiction(NamedTuple):
    """Two fields of a manifest that cannot both be true.

    Attributes:
        field: Path of one of the fields.
        found: Value of that field.
        required: Value that the other field requires.
    """

    field: str
    found: str
    required: str


def contradiction_in(manifest: Manifest) -> Contradiction | None:
    """Return the first contradiction, or None.

    Args:
        manifest: A parsed manifest, of which every field alone is valid.
    """
    return _in_layout(manifest) or _in_ties(manifest) or _in_cuts(manifest) or _in_files(manifest)


def _field(rows: str, name: str, key: str) -> str:
    return f"{rows}[{json.dumps(name):.200}].{key}"


def _in_layout(manifest: Manifest) -> Contradiction | None:
    stages, pp = manifest.layout.stages, manifest.layout.pp
    if stages is not None and len(stages) != pp:
        return Contradiction("layout.stages", f"{len(stages)} stages", f"{pp}, the value of layout.pp")
    for stage in stages or ():
        for path, first, stop in stage:
            if first > stop:
                return Contradiction("layout.stages", json.dumps([path, first, stop]), "a first layer before the last")
    return None


def _in_ties(manifest: Manifest) -> Contradiction | None:
    rows = manifest.tensors
    for name, row in rows.items():
        if row.tied_to is not None and rows[row.tied_to].digest != row.digest:
            return Contradiction(
                f"tensors[{json.dumps(name):.200}].tied_to", row.tied_to, "a tensor with the same digest"
            )
    return None


def _in_cuts(manifest: Manifest) -> Contradiction | None:
    """Check that the blocks of a tensor tile its shape, and that replicas equal one of them."""
    checked: set[tuple[int, tuple[int, Shape]]] = set()
    for name, row in manifest.tensors.items():
        if row.cut is None or (row.cut, salted(row.shape)) in checked:
            continue
        checked.add((row.cut, salted(row.shape)))
        cut = manifest.cuts[row.cut]
        kept = _kept(cut)
        fault = coverage_fault(row.shape, kept)
        known = {salted(region) for region in kept}
        if fault is not None or any(salted(cut.regions[index]) not in known for index in cut.replicas):
            found = "a replica of no block" if fault is None else f"a {fault.kind}"
            return Contradiction(_field("tensors", name, "cut"), found, f"blocks that tile {list(row.shape)}")
    return None


def _kept(cut: ShardingRecord) -> list[Region]:
    replicas = set(cut.replicas)
    return [region for index, region in enumerate(cut.regions) if index not in replicas]


def _in_files(manifest: Manifest) -> Contradiction | None:
    """Check that a file is at least as large as its tensors; tied names may share bytes and are not counted."""
    names, sizes = list(manifest.files), Counter[int]()
    in_cuts: Counter[tuple[int, int]] = Counter()
    for row in manifest.tensors.values():
        if row.tied_to is not None:
            continue
        if row.file is not None:
            sizes[row.file] += prod(row.shape) * row.dtype.bits // 8
        elif row.cut is not None:
            in_cuts[row.cut, row.dtype.bits] += 1
    for (number, bits), tensors in in_cuts.items():
        cut = manifest.cuts[number]
        for file, region in zip(cut.files, cut.regions, strict=True):
            sizes[file] += tensors * (region.numel * bits // 8)
    for file, nbytes in sizes.items():
        recorded = manifest.files[names[file]].nbytes
        if recorded < nbytes:
            return Contradiction(
                _field("files", names[file], "bytes"), str(recorded), f"the {nbytes} bytes of its tensors"
            )
    return None
