"""Put tensors together out of blocks that several files hold, where nothing but the files says which blocks there are.

A block that more than one file holds is a chunk of its tensor where it comes first, and a replica elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import CoverageFault, Region, Shape, coverage_fault
from ckptx.errors import InputError
from ckptx.untrusted.numbers import SharedHash, UniqueTuples, identity, salted


class Regions:
    """Keeps one object for equal regions, as those of a checkpoint repeat; the functions below compare the objects."""

    def __init__(self) -> None:
        self._known: UniqueTuples[Region] = UniqueTuples()

    def get(self, region: Region) -> Region | None:
        """Return the region that is kept for an equal one, or None."""
        return self._known.get(region)

    def keep(self, region: Region, name: str, where: str) -> Region:
        """Keep a region that `get` did not find.

        Args:
            region: The region; its numbers are known to be counts.
            name: The tensor, for error messages.
            where: The file, for error messages.

        Raises:
            InputError: Numbers were chosen so that many regions share a hash.
        """
        try:
            return self._known.keep(region)
        except SharedHash as error:
            raise InputError(f'{where}: tensor "{name}" has one of {error}; the file is damaged') from None


class CoverageCheck:
    """Proves that chunks tile their tensor; tensors that are sharded equally are looked at once."""

    def __init__(self) -> None:
        self._covered: set[tuple[bytes, Shape]] = set()

    def fault(self, shape: Shape, chunks: Iterable[Chunk]) -> CoverageFault | None:
        """Return the first reason why chunks do not tile a shape; their regions are those of one `Regions`."""
        regions = [chunk.region for chunk in chunks]
        key = identity(regions), shape
        if key in self._covered:
            return None
        fault = coverage_fault(shape, regions)
        if fault is None:
            self._covered.add(key)
        return fault


def split_replicas(blocks: Iterable[Chunk]) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """Return the first block of each region, and the others; the regions are those of one `Regions`."""
    first: dict[tuple[int, Region], Chunk] = {}
    replicas = []
    for block in blocks:
        if first.setdefault(salted(block.region), block) is not block:
            replicas.append(block)
    return tuple(first.values()), tuple(replicas)


def replica_pairs(catalog: Catalog) -> Iterator[tuple[TensorEntry, Chunk, Chunk]]:
    """Iterate over replicas, each with its tensor and the chunk that holds the same elements; readers compare both."""
    for entry in catalog.tensors.values():
        if entry.replicas:
            held = {salted(chunk.region): chunk for chunk in entry.chunks}
            for replica in entry.replicas:
                yield entry, held[salted(replica.region)], replica
