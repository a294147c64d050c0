"""Assemble the tensors of a checkpoint with one file per rank: shards, and replicas that are compared when read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Shape, full_region
from ckptx.errors import InputError
from ckptx.formats.chunk_assembly import CoverageCheck, RegionCache, split_replicas

_COVERAGE_FAULTS = {
    "gap": "no rank has {}",
    "overlap": "shards of several ranks overlap at {}",
    "outside": "the shard {} of a rank is out of bounds",
    "unverifiable": "its shards are split at too many positions to be checked, at {}",
}


class RankTensors:
    """Tensors whose shards were found in the files of several ranks.

    Attributes:
        names: Names of the tensors so far.
    """

    def __init__(self) -> None:
        self._regions = RegionCache()
        self._chunks: dict[str, list[Chunk]] = {}
        # Tensor name -> (dtype, shape, name of the first file that was added with the tensor). The dtype is None until
        # a file with elements of the tensor was added.
        self._seen: dict[str, tuple[DType | None, Shape, str]] = {}

    @property
    def names(self) -> Collection[str]:
        return self._seen.keys()

    def add(self, name: str, dtype: DType | None, shape: Shape, chunks: Iterable[Chunk], file: str, where: str) -> None:
        """Add the shards of a tensor in one file.

        Args:
            name: Name of the tensor.
            dtype: Its dtype; None if the file has no elements of it.
            shape: Shape of the whole tensor.
            chunks: Its shards in the file; dtypes and offsets were checked.
            file: Name of the file.
            where: The tensor in the file, for error messages.

        Raises:
            InputError: Dtype or shape differ from those in an earlier file.
        """
        known_dtype, known_shape, known_file = self._seen.get(name, (None, shape, file))
        if shape != known_shape or (known_dtype is not None and dtype is not None and known_dtype is not dtype):
            one, other = (f"{each} " if dtype and known_dtype else "" for each in (dtype, known_dtype))
            raise InputError(
                f"{where}: {one}{list(shape)}, but {other}{list(known_shape)} in {known_file}; the files are of "
                "different saves, pass those of one"
            )
        self._seen[name] = known_dtype if known_dtype is not None else dtype, shape, known_file
        stored = self._chunks.setdefault(name, [])
        for chunk in chunks:
            region = self._regions.get(chunk.region)
            if region is None:
                region = self._regions.keep(chunk.region, name, where)
            stored.append(chunk._replace(region=region))

    def entries(self, where: str) -> dict[str, TensorEntry]:
        """Return the tensors by name, in the order of file names and of the bytes in each file.

        Args:
            where: The checkpoint, for error messages.

        Raises:
            InputError: The shards of all ranks do not tile a tensor.
        """
        entries = sorted(self._assemble(where), key=lambda entry: entry.chunks[0][1:3])
        return {entry.name: entry for entry in entries}

    def _assemble(self, where: str) -> Iterator[TensorEntry]:
        coverage = CoverageCheck()
        for name, stored_chunks in self._chunks.items():
            dtype, shape, _ = self._seen[name]
            subject = f'{where}: tensor "{name}" of shape {list(shape)}'
            chunks, replicas = split_replicas(each for each in stored_chunks if each.region.numel or 0 in shape)
            fault = coverage.fault(shape, chunks)
            if fault is not None or dtype is None or not chunks:
                problem = (
                    "no rank has elements of it" if fault is None else _COVERAGE_FAULTS[fault.kind].format(fault.region)
                )
                raise InputError(f"{subject}: {problem}; the files are damaged or of different saves, copy them again")
            if 0 in shape:
                chunks, replicas = (chunks[0]._replace(region=full_region(shape)),), ()
            yield TensorEntry(name, dtype, shape, chunks, replicas)
