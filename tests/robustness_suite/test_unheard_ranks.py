"""A rank that nobody waits for any more, because another has ended, ends without a word."""

from __future__ import annotations

import multiprocessing
from unittest import mock

from ckptx.robustness_suite import ranks
from tests.support.pool import GlooPool


def unheard(rank: int, world_size: int) -> None:
    """In a process of its own: a rank silences libraries for good."""
    here, there = multiprocessing.Pipe()
    here.send_bytes(b"a task")
    here.close()
    with mock.patch.object(ranks, "_run_task", lambda said, rank, settings: b"an answer"):
        ranks._run_rank(there, rank, ranks.RankSettings("cpu", "gloo", None, None, "", False))


def test_its_answer_is_dropped(pool: GlooPool) -> None:
    assert pool.run(unheard, 1) == [None]
