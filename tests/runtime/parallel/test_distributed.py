"""Ranks tell a peer that failed, or was killed, from an error of their own."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptx.errors import EnvironmentProblem
from ckptx.runtime.parallel.distributed import (
    _is_connection_lost,
    count_local_ranks,
    process_group,
    select_device,
    unused_gpus_note,
)
from tests.support.forked_programs import ForkedProgram
from tests.support.ranks import free_port

# Rank 1 ends while rank 0 waits for it; rank 0 prints what it met.
_RANK = """
import json, os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
from ckptx.errors import PeerFailure
from ckptx.runtime.parallel import distributed

how, waits = sys.argv[1:]
distributed._REPORT_TIMEOUT = timedelta(seconds=0.5)
with distributed.process_group("cpu") as process:
    rows = torch.ones(4)
    dist.all_reduce(rows)
    try:
        with distributed.report_failure_to_peers():
            if process.rank == 1:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("no such tensor")
            if waits == "all_reduce":
                dist.all_reduce(rows)
            elif waits == "recv":
                dist.recv(rows, src=1)
            elif waits == "all_gather_object":
                dist.all_gather_object([None, None], 0)
            else:
                try:
                    dist.recv(rows, src=1)
                except RuntimeError as error:
                    raise RuntimeError("failed to run forward") from error
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error), distributed._is_connection_lost(error)]), flush=True)
        os._exit(0)
"""


def what_rank_0_met(how: str, waits: str) -> Any:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        ForkedProgram(_RANK, ["rank", how, waits], {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in (0, 1)
    ]
    stdout, stderr = ranks[0].communicate(120)
    ranks[1].communicate(120)
    assert stdout, stderr
    return json.loads(stdout)


@pytest.mark.parametrize("waits", ["all_reduce", "recv", "all_gather_object", "stage"])
def test_a_killed_peer_is_told_from_an_error(waits: str) -> None:
    name, said, is_lost = what_rank_0_met("killed", waits)
    assert name == "RuntimeError" and is_lost, said


@pytest.mark.parametrize("waits", ["recv", "stage"])
def test_the_words_of_a_peer_that_failed_are_repeated(waits: str) -> None:
    name, said, _ = what_rank_0_met("failed", waits)
    assert (name, said) == ("PeerFailure", "rank 1: no such tensor")


def test_a_store_without_an_answer_is_a_lost_peer() -> None:
    with pytest.raises(dist.DistStoreError) as error:
        dist.HashStore().wait(["never"], timedelta(milliseconds=10))
    assert _is_connection_lost(error.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Connection of layers 1 and 2: shapes cannot be multiplied (4x3 and 2x4)"),
        RuntimeError("Timed out: NCCL is a word of this message, too"),
        ConnectionError("huggingface.co: Connection refused"),
        ValueError("/gloo/transport/"),
    ],
    ids=["connection", "words", "download", "class"],
)
def test_an_error_of_the_model_is_no_lost_peer(error: Exception) -> None:
    assert not _is_connection_lost(error)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_nccl_on_a_cpu_is_refused_with_and_without_a_gpu(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    message = "--backend nccl: requires a CUDA device, but the device of this run is cpu; use gloo"
    with pytest.raises(EnvironmentProblem, match=f"^{message}$"), process_group("cpu", "nccl"):
        pytest.fail("the group was created")


# Requested device, number of GPUs, ranks of the machine, and the device of the last of them; None for an error.
DEVICES = [
    ("auto", 0, 1, "cpu"),
    ("auto", 1, 1, "cuda:0"),
    ("auto", 1, 2, "cpu"),
    ("auto", 2, 2, "cuda:1"),
    ("auto", 8, 2, "cuda:1"),
    ("cpu", 8, 2, "cpu"),
    ("cuda", 2, 2, "cuda:1"),
    ("cuda", 1, 2, None),
    ("cuda", 0, 1, None),
]


@pytest.mark.parametrize(("requested", "gpus", "ranks", "expected"), DEVICES)
def test_auto_takes_gpus_only_if_each_rank_has_one(
    monkeypatch: pytest.MonkeyPatch, requested: str, gpus: int, ranks: int, expected: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if expected is None:
        with pytest.raises(EnvironmentProblem, match=f"requires {ranks} CUDA devices?, this machine has {gpus}"):
            select_device(requested, ranks - 1, ranks)
        return
    device = select_device(requested, ranks - 1, ranks)
    assert str(device) == expected
    note = unused_gpus_note(requested, device, ranks)
    assert (note is not None) == (requested == "auto" and 0 < gpus < ranks)
    if note is not None:
        assert note == "--device auto: 2 ranks run on the CPU, because this machine has only 1 GPU"


@pytest.mark.parametrize(
    ("variables", "expected"), [({}, 1), ({"WORLD_SIZE": "4"}, 4), ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 8)]
)
def test_ranks_of_this_machine_are_those_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: int
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert count_local_ranks() == expected
