"""Several processes that write one output, with torchrun and without: the same bytes, or the same failure."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.support.checkpoint_writers import LLAMA, llama, names_in, write_dcp, write_hf
from tests.support.models import EVERY, write
from tests.support.ranks import finish, start, start_alone

CONFIG = {**LLAMA, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 8, "vocab_size": 16}
STAGING = ".cut.ckptx-partial"

KILLED = """
import os, signal, sys, time
import ckptx.publishing.publish
from ckptx.cli.main import run
def killed(*arguments, **named):
    time.sleep(0.7)  # the others have come
    os.kill(os.getpid(), signal.SIGKILL)
ckptx.publishing.publish.execute = killed
run()
"""


DAMAGED = """
import ckptx.publishing.publish
from ckptx.cli.main import main
from ckptx.errors import InputError
def damaged(*arguments, **named):
    raise InputError("a.safetensors: is damaged; restore it")
ckptx.publishing.publish.execute = damaged
main()
"""
SLOW = """
import time
import ckptx.publishing.publish
from ckptx.cli.main import main
def slow(plan, files, tree, journal, *, on_progress, **named):
    for at in range(1000):
        for place in (tree, journal):
            place.write(f"late-{at}", [b"late"])
        if at % 50 == 49:
            on_progress(at)
        time.sleep(0.01)
ckptx.publishing.publish.execute = slow
main()
"""


def assert_said_once(found: list[tuple[int, str]]) -> None:
    """The rank that fails says why, rank 0 that another one did, and nobody else anything."""
    assert found[0][1].startswith("error: ")
    assert sum(said.count("\n") for _, said in found) == (1 if not found[0][1].startswith("error: rank ") else 2)


def bytes_in(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(root.iterdir())}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "in" / "hf", llama(), shards=2, config=CONFIG)


@pytest.fixture
def alone(hf: Path, tmp_path: Path) -> dict[str, bytes]:
    """What one process writes."""
    assert finish([start_alone([hf, tmp_path / "in" / "alone", "--tp", 2, "--pp", 2])])[0][0] == 0
    return bytes_in(tmp_path / "in" / "alone")


def place(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "cut"


@pytest.mark.parametrize(
    ("size", "to"),
    [(2, "dcp"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "safetensors"), (4, "dcp")))],
)
def test_several_processes_write_what_one_writes(hf: Path, tmp_path: Path, size: int, to: str) -> None:
    dst, options = place(tmp_path), ["--to", to, "--tp", 2, "--pp", 2]
    assert finish([start_alone([hf, tmp_path / "in" / "alone", *options])])[0] == (0, "")
    assert finish(start(*[[hf, dst, *options]] * size, forks=False)) == [(0, "")] * size
    assert bytes_in(dst) == bytes_in(tmp_path / "in" / "alone")
    assert names_in(dst.parent) == ["cut"]


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_other_options_on_a_rank_fail_all(hf: Path, tmp_path: Path, failing: int) -> None:
    dst = place(tmp_path)
    for code, said in finish(start(*([hf, dst, "--tp", 4 if rank == failing else 2] for rank in range(2)))):
        assert code == 3
        assert "the checkpoint or the options of rank 1 differ from those of rank 0" in said
    assert names_in(dst.parent) == []


@pytest.mark.parametrize("user", ["rank 0", "another program"])
def test_a_port_that_is_in_use_is_named(hf: Path, tmp_path: Path, user: str) -> None:
    """Another process with RANK 0 or any program has the port: that is reported, not that DST is locked."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
        if user == "rank 0":
            listener.close()
            store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=5), False)
        else:
            listener.listen()
            store = None
        ((code, said),) = finish(start([hf, tmp_path / "cut", "--tp", 2], world_size=2, port=port))
        del store
    assert code == 7 and names_in(tmp_path) == ["in"]
    assert said.startswith(f"error: rank 0: port {port} (MASTER_PORT) is in use: another process with RANK 0 has ")
    assert said.count("\n") == 1 and "give each process a RANK of its own" in said


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_source_that_one_rank_does_not_see_fails_all(hf: Path, tmp_path: Path, failing: int) -> None:
    dst = place(tmp_path)
    sources = [tmp_path / "gone" if rank == failing else hf for rank in range(2)]
    found = finish(start(*([source, dst, "--tp", 2] for source in sources)))
    assert [code for code, _ in found] == [3, 3]
    assert f"{tmp_path / 'gone'}: no such file or directory" in found[failing][1]
    assert_said_once(found)
    assert names_in(dst.parent) == []


def test_bytes_that_one_rank_finds_damaged_fail_all(tmp_path: Path) -> None:
    """Each rank writes files of its own, so that one alone meets the block."""
    tensors = llama()
    source = write_dcp(tmp_path / "in" / "dcp", tensors, config=CONFIG)
    path = source / "__0_0.distcp"
    data = path.read_bytes()
    wanted = tensors["model.layers.1.mlp.up_proj.weight"][2]
    assert data.count(wanted) == 1
    path.write_bytes(data.replace(wanted, bytes([wanted[0] ^ 1]) + wanted[1:]))
    dst = place(tmp_path)
    found = finish(start(*[[source, dst, "--pp", 2]] * 2))
    assert [code for code, _ in found] == [3, 3]
    assert "model.layers.1.mlp.up_proj.weight" in found[0][1]
    assert_said_once(found)
    assert names_in(dst.parent) == []


def test_nothing_is_removed_while_a_rank_still_writes(hf: Path, tmp_path: Path) -> None:
    dst = place(tmp_path)
    arguments: list[object] = [hf, dst, "--tp", 2]
    found = finish(start(arguments, arguments, codes={0: DAMAGED, 1: SLOW}))
    assert found == [(3, "error: a.safetensors: is damaged; restore it\n"), (3, "")]
    assert names_in(dst.parent) == []


@pytest.mark.slow  # 30 s without a sign of life
def test_a_killed_rank_fails_all_and_leaves_nothing(hf: Path, tmp_path: Path) -> None:
    dst = place(tmp_path)
    arguments: list[object] = [hf, dst, "--tp", 2, "--pp", 2]
    found = finish(start(*[arguments] * 3, codes={1: KILLED}))
    assert [code for code, _ in found] == [7, -signal.SIGKILL, 7]
    said = "error: rank 1: ended without a message, or its connection was lost; look at its output\n"
    assert [said for _, said in found] == [said, "", ""]
    assert names_in(dst.parent) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_after_rank_0_was_killed_the_next_run_publishes(
    hf: Path, tmp_path: Path, alone: dict[str, bytes], options: list[object]
) -> None:
    dst = place(tmp_path)
    arguments: list[object] = [hf, dst, "--tp", 2, "--pp", 2]
    found = finish(start(arguments, arguments, codes={0: KILLED}, forks=False))
    assert [code for code, _ in found] == [-signal.SIGKILL, 7]
    assert found[1][1].startswith("error: rank 1: lost the connection to 127.0.0.1:"), found[1][1]
    assert found[1][1].count("\n") == 1
    assert set(names_in(dst.parent)) <= {STAGING}
    assert finish(start(*[[*arguments, *options]] * 2)) == [(0, "")] * 2
    assert bytes_in(dst) == alone
    assert names_in(dst.parent) == ["cut"]


@pytest.mark.slow
def test_a_dry_run_of_several_writes_nothing(hf: Path, tmp_path: Path) -> None:
    dst = place(tmp_path)
    assert finish(start(*[[hf, dst, "--tp", 2, "--dry-run"]] * 2)) == [(0, "")] * 2
    assert names_in(dst.parent) == []


@pytest.mark.slow
def test_only_rank_0_talks(hf: Path, tmp_path: Path) -> None:
    dst = place(tmp_path)
    processes = start(*[[hf, dst, "--tp", 3, "--json"]] * 2)
    said = [process.communicate(timeout=60) for process in processes]
    assert said[0][0].startswith("{") and said[1] == ("", "")


def torchrun(size: int, *arguments: object, module: str = "ckptx") -> subprocess.CompletedProcess[str]:
    # `--`: torchrun looks for options of its own behind the module, too, and --run could be one of two
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "-m", "--", module]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_torchrun_writes_what_one_process_writes(hf: Path, tmp_path: Path, alone: dict[str, bytes], size: int) -> None:
    dst = place(tmp_path)
    done = torchrun(size, "reshard", hf, dst, "--tp", 2, "--pp", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote 21 tensors") == 1
    assert bytes_in(dst) == alone
    assert names_in(dst.parent) == ["cut"]


def test_torchrun_names_a_rank_that_was_killed(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent sends SIGTERM to the others at once; who gets that looks who is gone before it leaves."""
    (tmp_path / "code").mkdir()
    body = KILLED.replace("sleep(0.7)", 'sleep(0.7 if os.environ["RANK"] == "1" else 60)')
    (tmp_path / "code" / "killed.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    dst = place(tmp_path)
    done = torchrun(2, "reshard", hf, dst, "--tp", 2, "--pp", 2, module="killed")
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert ours == ["error: rank 1: ended without a message, or its connection was lost; look at its output"], (
        done.stderr
    )
    assert names_in(dst.parent) == []


@pytest.mark.slow
def test_torchrun_fails_when_a_rank_fails(hf: Path, tmp_path: Path) -> None:
    dst = place(tmp_path)
    (hf / "model-00002-of-00002.safetensors").unlink()
    done = torchrun(2, "reshard", hf, dst, "--tp", 2)
    assert done.returncode != 0
    assert "model-00002-of-00002.safetensors" in done.stderr
    assert names_in(dst.parent) == []


@pytest.mark.slow
def test_torchrun_runs_a_model_on_its_ranks(tmp_path: Path) -> None:
    hf = tmp_path / "model"
    write(EVERY["llama-tied"], hf)
    done = torchrun(2, "verify", hf, hf, "--run", "--tp", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ran on random text inputs in float32, tp 2 x dp_shard 1 (2 ranks)") == 1
    assert done.stdout.count("EQUAL: config, tensor bytes; within tolerance: logits/loss, gradients") == 1
