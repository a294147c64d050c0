"""The tree digest: its definition in five lines, and streams cut anyhow."""

from __future__ import annotations

import zlib

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.transfer import digest as digest_module
from ckptx.transfer.digest import LEAF_NBYTES, TreeDigest, bytes_digest_hex, crc32


def defined(data: bytes, leaf: int = 16 * 1024 * 1024) -> str:
    """xxh3-128 over the xxh3-128 of each 16 MiB block."""
    outer = xxhash.xxh3_128()
    for at in range(0, len(data), leaf):
        outer.update(xxhash.xxh3_128(data[at : at + leaf]).digest())
    return outer.hexdigest()


@pytest.mark.parametrize("nbytes", [0, 1, LEAF_NBYTES - 1, LEAF_NBYTES, LEAF_NBYTES + 1])
def test_the_definition(nbytes: int) -> None:
    data = bytes(range(256)) * (nbytes // 256 + 1)
    assert bytes_digest_hex(data[:nbytes]) == defined(data[:nbytes])


def test_nothing_has_the_digest_of_no_blocks() -> None:
    assert TreeDigest().digest().hex() == defined(b"") == "99aa06d3014798d86001c324468d497f"


@given(st.binary(max_size=200), st.data())
@settings(deadline=None)
def test_a_stream_cut_anyhow(data: bytes, draw: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest_module, "LEAF_NBYTES", 16)
        digest, left = TreeDigest(), memoryview(data)
        while left:
            size = draw.draw(st.integers(1, min(len(left), digest.leaf_remaining)))
            digest.update(left[:size], is_last=size == len(left))
            left = left[size:]
        assert digest.digest().hex() == defined(data, 16)


@given(st.binary(max_size=300), st.integers(0, 300))
@settings(deadline=None)
def test_crc32_goes_on_where_it_stopped(data: bytes, at: int) -> None:
    assert crc32(data[at:], crc32(data[:at], 0)) == zlib.crc32(data)
