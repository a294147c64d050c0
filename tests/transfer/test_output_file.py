"""Files that several passes write, in any order and with seeks: the digest is that of the bytes that lie there."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.storage.open_file import OpenFile
from ckptx.transfer import digest
from ckptx.transfer.digest import TreeDigest, bytes_digest_hex
from ckptx.transfer.output_file import FileDigests, FileWriter

LEAF, BUFFER = 64, 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "LEAF_NBYTES", LEAF)


def opened(root: Path) -> OpenFile:
    return OpenFile(os.open(root / "file", os.O_RDWR | os.O_CREAT | os.O_TRUNC), root / "file")


def write(out: FileWriter, data: bytes) -> None:
    """Through the buffer, as a pass does it."""
    at = 0
    while at < len(data):
        room = out.space(len(data) - at)
        room[:] = data[at : at + len(room)]
        at += len(room)
        out.advance(len(room))


def finished(digests: FileDigests, data: bytes) -> int:
    """Reads back what is missing, as the executor does; the number of bytes that took."""
    read = 0
    for leaf, begin in digests.find_undigested_leaves(len(data)):
        rest = data[begin : (leaf + 1) * LEAF]
        tree = digests.partial_leaves.get(begin) or TreeDigest()
        tree.update(memoryview(rest), is_last=True)
        (digests.leaves[leaf],) = tree.leaves
        read += len(rest)
    return read


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_passes_give_the_digest_of_the_file(tmp_path: Path, data: st.DataObject) -> None:
    """Stretches in any order, each written by a pass of its own or by one that seeks."""
    nbytes = data.draw(st.integers(1, 5 * LEAF))
    bounds = sorted({0, nbytes, *data.draw(st.lists(st.integers(0, nbytes), max_size=12))})
    stretches = data.draw(st.permutations(list(itertools.pairwise(bounds))))
    payload = os.urandom(nbytes)
    digests, passes = FileDigests(), []
    with opened(tmp_path) as file:
        for begin, end in stretches:
            if passes and data.draw(st.booleans()):
                out = passes[-1]
                out.seek(begin)
            else:
                if passes and data.draw(st.booleans()):  # else it goes on at the same time as the next
                    passes[-1].suspend()
                out = FileWriter(file, nbytes, memoryview(bytearray(BUFFER)), digests, lambda _: None, begin)
                passes.append(out)
            middle = data.draw(st.integers(begin, end))  # what lies before it goes through the buffer
            write(out, payload[begin:middle])
            if middle < end:
                out.write_through(memoryview(payload)[middle:end])
            if data.draw(st.booleans()):
                out.flush()
        for out in passes:
            out.suspend()
    assert (tmp_path / "file").read_bytes() == payload
    finished(digests, payload)
    leaves = [digests.leaves[leaf] for leaf in sorted(digests.leaves)]
    assert digest.tree_digest(leaves).hex() == bytes_digest_hex(payload)


def test_a_pass_that_goes_on_where_another_ended_reads_nothing_back(tmp_path: Path) -> None:
    payload, digests = os.urandom(3 * LEAF), FileDigests()
    with opened(tmp_path) as file:
        for begin, end in ((0, 40), (40, 100), (100, 3 * LEAF)):
            out = FileWriter(file, len(payload), memoryview(bytearray(BUFFER)), digests, lambda _: None, begin)
            write(out, payload[begin:end])
            out.suspend()
    assert finished(digests, payload) == 0


def test_of_a_block_whose_begin_came_by_only_the_rest_is_read_back(tmp_path: Path) -> None:
    payload, digests = os.urandom(2 * LEAF), FileDigests()
    with opened(tmp_path) as file:
        later = FileWriter(file, len(payload), memoryview(bytearray(BUFFER)), digests, lambda _: None, 40)
        first = FileWriter(file, len(payload), memoryview(bytearray(BUFFER)), digests, lambda _: None, 0)
        write(later, payload[40:])
        write(first, payload[:40])
        later.suspend()
        first.suspend()
    assert digests.find_undigested_leaves(len(payload)) == [(0, 40)]
    assert finished(digests, payload) == LEAF - 40
