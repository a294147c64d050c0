"""Assemble tensors from blocks in several files, for formats without an index that lists the blocks.

A block that is in more than one file is a chunk of its tensor in the first of them, and a replica in the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import CoverageFault, Region, Shape, find_coverage_fault
from ckptx.errors import InputError
from ckptx.untrusted.hash_keys import HashFlood, UniqueTuples, identity_key, salted_key


class RegionCache:
    """Cache of one object per distinct region: regions repeat, and the functions below compare them by identity."""

    def __init__(self) -> None:
        self._regions: UniqueTuples[Region] = UniqueTuples()

    def get(self, region: Region) -> Region | None:
        """Return the stored region that equals this one, or None."""
        return self._regions.get(region)

    def keep(self, region: Region, name: str, where: str) -> Region:
        """Store and return a region for which `get` returned None.

        Args:
            region: The region; its offsets and sizes were checked to be non-negative integers.
            name: The tensor, for error messages.
            where: The file, for error messages.

        Raises:
            InputError: Too many regions share a hash, which happens only if the file was made so.
        """
        try:
            return self._regions.add(region)
        except HashFlood as error:
            raise InputError(
                f'{where}: tensor "{name}" has one of {error}; the file is damaged, copy it again'
            ) from None


class CoverageCheck:
    """Checks that chunks tile their tensor; each distinct sharding is checked only once."""

    def __init__(self) -> None:
        self._covered: set[tuple[bytes, Shape]] = set()

    def fault(self, shape: Shape, chunks: Iterable[Chunk]) -> CoverageFault | None:
        """Return the first reason why chunks do not tile a shape, or None; their regions come from one cache."""
        regions = [chunk.region for chunk in chunks]
        key = identity_key(regions), shape
        if key in self._covered:
            return None
        fault = find_coverage_fault(shape, regions)
        if fault is None:
            self._covered.add(key)
        return fault


def split_replicas(blocks: Iterable[Chunk]) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """Return the first block of each region, and the remaining ones; the regions come from one cache."""
    first: dict[tuple[int, Region], Chunk] = {}
    replicas = []
    for block in blocks:
        if first.setdefault(salted_key(block.region), block) is not block:
            replicas.append(block)
    return tuple(first.values()), tuple(replicas)


def replica_pairs(catalog: Catalog) -> Iterator[tuple[TensorEntry, Chunk, Chunk]]:
    """Iterate over replicas, each with its tensor and the chunk of the same region; readers compare both."""
    for entry in catalog.tensors.values():
        if entry.replicas:
            chunks = {salted_key(chunk.region): chunk for chunk in entry.chunks}
            for replica in entry.replicas:
                yield entry, chunks[salted_key(replica.region)], replica
