"""Checksums of copied bytes: CRC-32 for torch archives, and the layout-independent tree digest.

The digest of a tensor is xxh3-128 over the xxh3-128 of each 16 MiB leaf of its row-major bytes, and the digest of a
file is the same tree over the bytes of the file. Leaves are independent, so that workers can share a tensor, and the
digest of a tensor does not depend on the format or on its shards.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from ckptx.storage.interface import OutputFile

try:  # ten times faster than zlib, same polynomial
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = [
    "LEAF_NBYTES",
    "TreeDigest",
    "BlockHasher",
    "crc32",
    "bytes_digest_hex",
    "file_digest",
    "block_hash",
    "join_crc32",
    "leaf_digest",
    "tree_digest",
]

LEAF_NBYTES = 16 << 20

leaf_digest = xxhash.xxh3_128_digest
block_hash = xxhash.xxh3_64_digest
BlockHasher = xxhash.xxh3_64  # hashes a block while it is written; a resumed run keeps blocks with equal hashes

_POLYNOMIAL = 0xEDB88320  # polynomial of CRC-32, lowest bit first


def tree_digest(leaves: Iterable[bytes]) -> bytes:
    """Return the tree digest from the digests of all leaves, in order."""
    return leaf_digest(b"".join(leaves))


def bytes_digest_hex(data: bytes) -> str:
    """Return the tree digest of bytes in memory, in hex."""
    return tree_digest(leaf_digest(data[at : at + LEAF_NBYTES]) for at in range(0, len(data), LEAF_NBYTES)).hex()


def file_digest(file: OutputFile) -> bytes:
    """Return the tree digest of an open file, read from beginning to end."""
    return tree_digest(map(leaf_digest, file.blocks(LEAF_NBYTES)))


def join_crc32(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of two concatenated byte strings from the CRC-32 of each; the second has `nbytes` bytes.

    Appending a zero bit multiplies a CRC by x modulo the polynomial, so `first` is multiplied by x^(8 nbytes).
    """
    power, factor, bits = 1 << 31, 1 << 30, 8 * nbytes  # the polynomials 1 and x
    while bits:
        if bits & 1:
            power = _multiply(power, factor)
        factor = _multiply(factor, factor)
        bits >>= 1
    return _multiply(power, first) ^ second


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2) modulo that of CRC-32; bit 31 is the coefficient of 1."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


class TreeDigest:
    """Tree digest of a stream.

    Attributes:
        leaves: Digest of each complete leaf, in order.
        leaf_remaining: Number of bytes up to the end of the current leaf, which no update may cross.
    """

    __slots__ = ("_hasher", "leaf_remaining", "leaves")

    def __init__(self) -> None:
        self.leaves: list[bytes] = []
        self.leaf_remaining = LEAF_NBYTES
        self._hasher: xxhash.xxh3_128 | None = None

    def update(self, view: memoryview, is_last: bool = False) -> None:
        """Add `view`, at most `leaf_remaining` bytes; `is_last` is True for the end of the stream."""
        remaining = self.leaf_remaining - len(view)
        if self._hasher is None and (is_last or not remaining):
            self.leaves.append(leaf_digest(view))  # a leaf in one update needs no hasher
            self.leaf_remaining = LEAF_NBYTES
            return
        if self._hasher is None:
            self._hasher = xxhash.xxh3_128()
        self._hasher.update(view)
        if is_last or not remaining:
            self.leaves.append(self._hasher.digest())
            self._hasher = None
            remaining = LEAF_NBYTES
        self.leaf_remaining = remaining

    def digest(self) -> bytes:
        """Return the tree digest of all complete leaves."""
        return tree_digest(self.leaves)
