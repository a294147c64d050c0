"""The variables of a launcher, read and written."""

from __future__ import annotations

import pytest

from ckptx.processes.rendezvous import (
    is_first_rank,
    is_launched,
    launched_world_size,
    rank_variables,
    remove_launcher_variables,
)


@pytest.mark.parametrize(("rank", "is_first"), [(0, True), (2, False)])
def test_a_rank_finds_what_it_was_told(rank: int, is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rank_variables(rank, 3).items():
        monkeypatch.setenv(name, value)
    assert (is_launched(), is_first_rank(), launched_world_size()) == (True, is_first, 3)


def test_a_process_on_its_own_is_the_first_and_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in rank_variables(0, 1):
        monkeypatch.delenv(name, raising=False)
    assert (is_launched(), is_first_rank(), launched_world_size()) == (False, True, None)


def test_what_is_no_rank_is_told_nothing_of_ranks() -> None:
    launcher = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0"}
    launcher["CKPTX_LAUNCHED"] = "1"  # of `ckptx.processes.launch`
    others = {"MASTER_KEY": "stays", "RANKING": "stays", "OMP_NUM_THREADS": "1"}
    assert remove_launcher_variables({**rank_variables(1, 2), **launcher, **others}) == others
