"""Ranks that live for several tasks: what they answer, how they end, what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptx.errors import InternalError, PeerFailure, UnsupportedError
from ckptx.robustness_suite.ranks import Ranks


def added(place: Any, number: int) -> tuple[int, float, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(number + place.rank))
    dist.all_reduce(total)
    return place.rank, total.item(), os.getpid()


def refused(place: Any) -> None:
    import torch
    import torch.distributed as dist

    if place.rank == 1:
        raise UnsupportedError("injected: cannot")
    dist.all_reduce(torch.zeros(1))


def broken(place: Any) -> None:
    raise KeyError("injected")


def killed(place: Any) -> None:
    import torch
    import torch.distributed as dist

    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def with_thread(place: Any, seconds: float) -> None:
    """Leaves a thread behind that lives for so long."""
    threading.Thread(target=time.sleep, args=(seconds,), daemon=True).start()


_KEPT: list[Any] = []


def kept(place: Any) -> None:
    import torch

    _KEPT.append(torch.nn.Linear(100, 100))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(device="cpu") as found:
        yield found


def test_ranks_answer_in_one_world_after_the_other(ranks: Ranks) -> None:
    before = ranks.run(added, 1, world_size=2)
    after = ranks.run(added, 5, world_size=2)
    assert {rank: each.value[:2] for rank, each in before.items()} == {0: (0, 3.0), 1: (1, 3.0)}
    assert {rank: each.value[1] for rank, each in after.items()} == {0: 11.0, 1: 11.0}
    assert {each.value[2] for each in before.values()} == {each.value[2] for each in after.values()}
    assert ranks.run(added, 7, world_size=1)[0].value[1] == 7.0, "as many of them as a task needs"


def test_a_world_that_is_over_leaves_no_thread(ranks: Ranks) -> None:
    first, second = (ranks.run(added, 1, world_size=2) for _ in range(2))
    assert {each.memory for each in first.values()} == {each.memory for each in second.values()}


def test_a_thread_that_ends_a_moment_later_is_not_left_and_one_that_stays_is(ranks: Ranks) -> None:
    before = ranks.run(added, 1, world_size=2)[0].memory
    assert before is not None
    assert ranks.run(with_thread, 0.2, world_size=1)[0].memory == before
    stays = ranks.run(with_thread, 3.0, world_size=1)[0].memory
    assert stays is not None
    assert stays.threads == before.threads + 1


def test_what_a_task_keeps_is_measured(ranks: Ranks) -> None:
    before = ranks.run(added, 1, world_size=1)[0].memory
    after = ranks.run(kept, world_size=1)[0].memory
    assert before is not None and after is not None
    assert after.tensor_bytes - before.tensor_bytes == 100 * 101 * 4
    assert after.parameters - before.parameters == 2


def test_an_error_comes_as_it_was_raised_and_from_who_raised_it(ranks: Ranks) -> None:
    with pytest.raises(UnsupportedError, match=r"^injected: cannot$"):
        ranks.run(refused, world_size=2)
    with pytest.raises(InternalError, match="KeyError: 'injected'; please report this"):
        ranks.run(broken, world_size=2)
    assert ranks.run(added, 1, world_size=2)[1].value[1] == 3.0, "others take their place"


def test_a_rank_that_is_killed_is_named(ranks: Ranks) -> None:
    with pytest.raises(PeerFailure, match="rank 1: ended by signal 9") as said:
        ranks.run(killed, world_size=2)
    assert said.value.exit_code == 7
    answers = ranks.run(killed, world_size=2, may_die=True)
    assert {rank: each.end_signal for rank, each in answers.items()} == {0: None, 1: 9}
    assert ranks.run(added, 1, world_size=2)[0].value[1] == 3.0


def test_the_script_that_started_them_is_not_run_again(ranks: Ranks) -> None:
    main = sys.modules["__main__"]
    ranks.run(added, 1, world_size=1)
    assert sys.modules["__main__"] is main


def test_ctrl_c_is_for_the_process_above_them(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import os, signal, threading\n"
        "from ckptx.robustness_suite.ranks import Ranks\n"
        "if __name__ == '__main__':\n"
        "    threading.Timer(1.5, os.killpg, (0, signal.SIGINT)).start()\n"  # while the nursery imports torch
        "    with Ranks(device='cpu') as ranks:\n"
        "        ranks.run('gathered', 1, world_size=2)\n"
        "        threading.Event().wait(30)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=60, start_new_session=True
    )
    assert done.returncode == -signal.SIGINT
    assert done.stderr.count("Traceback") == 1 and done.stderr.endswith("KeyboardInterrupt\n")


@pytest.mark.parametrize(
    ("said", "raised"),
    [
        ("Gloo connectFullMesh failed with pair.cc: Connection closed by peer [127.0.0.1]:1", PeerFailure),
        ("some other fault", RuntimeError),
    ],
)
def test_who_fails_before_all_have_met_is_not_blamed_on_who_waits(
    said: str, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the rank that failed first is reported, not the errors that follow from it; see `_first_error`."""
    import torch.distributed as dist

    from ckptx.runtime.parallel.distributed import process_group

    def meet(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(dist, "init_process_group", meet)
    expected = "exited before all ranks had joined" if raised is PeerFailure else said
    with pytest.raises(raised, match=expected) as caught, process_group("cpu"):
        pass
    if isinstance(caught.value, PeerFailure):
        assert caught.value.exit_code == 7
