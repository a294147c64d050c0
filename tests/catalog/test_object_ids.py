"""A freed object's id goes to the next object, unless `ObjectIds` was asked for it."""

from __future__ import annotations

import gc
import weakref

from ckptx.catalog.object_ids import ObjectIds


class Key:
    """Something whose memory the next one of its kind gets."""


def test_an_id_of_a_freed_object_is_given_again() -> None:
    """Else the next test would prove nothing."""
    assert len({id(Key()) for _ in range(100)}) < 100


def test_an_id_that_was_asked_for_stays_that_of_its_object() -> None:
    ids = ObjectIds()
    assert len({ids(Key()) for _ in range(100)}) == 100


def test_one_object_has_one_id_and_equal_ones_have_several() -> None:
    ids, first, second = ObjectIds(), [1], [1]
    assert ids(first) == ids(first) == id(first) and ids(first) != ids(second)


def test_objects_are_let_go_with_it() -> None:
    ids, key = ObjectIds(), Key()
    gone = weakref.ref(key)
    ids(key)
    del key
    assert gone() is not None
    del ids
    gc.collect()
    assert gone() is None
