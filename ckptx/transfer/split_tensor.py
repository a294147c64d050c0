"""What workers that write one large tensor together tell each other; the last of them puts the pieces together."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from ckptx.catalog.entry import Record
from ckptx.transfer.digest import join_crc32


class ChecksumPart(NamedTuple):
    """The CRC-32 of `nbytes` bytes that begin at `begin` of something."""

    begin: int
    nbytes: int
    crc: int


class RecordPart(NamedTuple):
    """A part of a checksummed record of the source."""

    file: str
    record: Record
    part: ChecksumPart


class SplitTensor:
    """Collects, for one tensor: the digests of its blocks, and CRC-32s of parts of target blocks and source records."""

    def __init__(self, shares: int) -> None:
        self._left = shares
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
        """Adds what one share found out; True for the last one."""
        with self._lock:
            self.leaves.update(leaves)
            for block, part in blocks:
                self.blocks.setdefault(block, []).append(part)
            for file, record, part in records:
                self.records.setdefault((file, record), []).append(part)
            self._left -= 1
            return not self._left


def joined(parts: Iterable[ChecksumPart]) -> ChecksumPart:
    """Parts that follow each other as one; a gap ends it, as a share that an earlier run wrote leaves one."""
    begin = end = crc = 0
    for part in sorted(parts):
        if part.begin != end:
            break
        crc = join_crc32(crc, part.crc, part.nbytes)
        end += part.nbytes
    return ChecksumPart(begin, end, crc)
