"""Shared results of the workers that copy one large tensor; the last worker combines them.

The share of a worker is the part of the tensor in its step range: a range of dim 0.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from ckptx.catalog.entry import Record
from ckptx.transfer.digest import join_crc32


class ChecksumPart(NamedTuple):
    """CRC-32 of `nbytes` bytes from byte `offset` of a block or record on."""

    offset: int
    nbytes: int
    crc: int


class RecordPart(NamedTuple):
    """Part of a checksummed record of the source: file name, the whole record, and the CRC-32 of the part."""

    file: str
    record: Record
    part: ChecksumPart


class SplitTensor:
    """Checksums of one tensor that several workers copy, collected from the share of each.

    Attributes:
        leaves: Index of the leaf in the tensor -> its digest.
        blocks: Index of the target block -> CRC-32 of each part of it.
        records: File and record of the source -> CRC-32 of each part of it.
    """

    def __init__(self, share_count: int) -> None:
        """Expect one call of `add` for each of `share_count` shares."""
        self._remaining_shares = share_count
        self._lock = threading.Lock()
        self.leaves: dict[int, bytes] = {}
        self.blocks: dict[int, list[ChecksumPart]] = {}
        self.records: dict[tuple[str, Record], list[ChecksumPart]] = {}

    def add(
        self,
        leaves: Iterable[tuple[int, bytes]],
        blocks: Iterable[tuple[int, ChecksumPart]],
        records: Iterable[RecordPart],
    ) -> bool:
        """Add the results of one share; return True for the last one."""
        with self._lock:
            self.leaves.update(leaves)
            for block, part in blocks:
                self.blocks.setdefault(block, []).append(part)
            for file, record, part in records:
                self.records.setdefault((file, record), []).append(part)
            self._remaining_shares -= 1
            return not self._remaining_shares


def join_parts(parts: Iterable[ChecksumPart]) -> ChecksumPart:
    """Return the CRC-32 of the contiguous parts from offset 0 up to the first gap, as one part."""
    end = crc = 0
    for part in sorted(parts):
        if part.offset != end:
            break
        crc = join_crc32(crc, part.crc, part.nbytes)
        end += part.nbytes
    return ChecksumPart(0, end, crc)
