"""Chunks in columns are the chunks that they would be one by one."""

from __future__ import annotations

from array import array

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import ArchiveChunks, Block, Chunk, ShardedChunks, TensorEntry
from ckptx.catalog.region import Region

TOP, BOTTOM = Region((0, 0), (2, 3)), Region((2, 0), (1, 3))
COLUMNS = ArchiveChunks((TOP, BOTTOM), ("b", "a"), (64, 0), (90, 70))
CHUNKS = Chunk(TOP, "b", 64, 90, is_archive=True), Chunk(BOTTOM, "a", 0, 70, is_archive=True)


def test_chunks_are_made_when_asked_for() -> None:
    assert len(COLUMNS) == 2
    assert tuple(COLUMNS) == CHUNKS
    assert (COLUMNS[0], COLUMNS[-1], COLUMNS[1:]) == (CHUNKS[0], CHUNKS[1], CHUNKS[1:])


def test_in_the_order_in_which_they_lie_on_disk() -> None:
    assert tuple(COLUMNS.sorted_by_position()) == CHUNKS[::-1]
    one_file = COLUMNS.with_files(("a", "a"))
    assert [chunk.offset for chunk in one_file.sorted_by_position()] == [0, 64]


def test_in_files_of_other_names() -> None:
    moved = COLUMNS.with_files(("model/b", "model/a"))
    assert tuple(moved) == tuple(chunk._replace(file=f"model/{chunk.file}") for chunk in CHUNKS)


def test_equal_where_the_chunks_are() -> None:
    same = ArchiveChunks([TOP, BOTTOM], ["b", "a"], array("q", [64, 0]), [90, 70])
    assert same == COLUMNS and hash(COLUMNS) == hash(same)
    assert COLUMNS.sorted_by_position() != COLUMNS
    assert ArchiveChunks((TOP, BOTTOM), ("b", "a"), (64, 1), (90, 70)) != COLUMNS


def test_the_place_of_a_tensor_is_that_of_its_first_chunk() -> None:
    cut = ShardedChunks((Block(0, TOP), Block(1, BOTTOM)), ("b", "a"), array("q", [64, 0]), (90, 70))
    for chunks in (COLUMNS, CHUNKS, cut):
        assert TensorEntry("w", DTYPES_BY_NAME["F32"], (3, 3), chunks).position == ("b", 64)
