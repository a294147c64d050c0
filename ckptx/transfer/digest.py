"""Checksums of the bytes on their way: CRC-32 for torch archives, and the layout-independent tree digest.

The digest of a tensor is xxh3-128 over the xxh3-128 of each 16 MiB block of its row-major bytes, and the digest of a
file is the same tree over the bytes of the file. Blocks are independent, so that workers can share a tensor, and the
digest of a tensor does not depend on the format or on how it is cut.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

try:  # ten times faster than zlib, same polynomial
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["LEAF", "TreeDigest", "crc32", "digest_bytes", "leaf_digest", "tree_digest"]

LEAF = 16 << 20

leaf_digest = xxhash.xxh3_128_digest


def tree_digest(leaves: Iterable[bytes]) -> bytes:
    """The digest from the digests of the blocks, in order."""
    return leaf_digest(b"".join(leaves))


def digest_bytes(data: bytes) -> str:
    """The digest of bytes in memory, in hex."""
    return tree_digest(leaf_digest(data[at : at + LEAF]) for at in range(0, len(data), LEAF)).hex()


class TreeDigest:
    """Digests a stream. `room` says how many bytes fit before the next block begins; never update across it."""

    __slots__ = ("_hasher", "leaves", "room")

    def __init__(self) -> None:
        self.leaves: list[bytes] = []
        self.room = LEAF
        self._hasher: xxhash.xxh3_128 | None = None

    def update(self, view: memoryview, last: bool = False) -> None:
        """Adds `view`, at most `room` bytes; `last` says that the stream ends with it."""
        room = self.room - len(view)
        if self._hasher is None and (last or not room):
            self.leaves.append(leaf_digest(view))  # a block in one piece needs no hasher
            self.room = LEAF
            return
        if self._hasher is None:
            self._hasher = xxhash.xxh3_128()
        self._hasher.update(view)
        if last or not room:
            self.leaves.append(self._hasher.digest())
            self._hasher = None
            room = LEAF
        self.room = room

    def digest(self) -> bytes:
        """The digest of all blocks finished so far."""
        return tree_digest(self.leaves)
