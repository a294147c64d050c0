"""Several ranks that write one output: they begin only if they agree, and each must find its files as it wrote them."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptx.errors import CkptxError, InputError, InternalError, OutputError, PeerFailure
from ckptx.formats.registry import open_checkpoint
from ckptx.processes.peers import PeerProcesses
from ckptx.publishing.publish import Job, _assign_groups, publish
from ckptx.publishing.source_state import is_same_source
from ckptx.publishing.staging import staging_paths
from ckptx.transfer.executor import CopyResult
from tests.storage.test_outputs_in_memory import job_of
from tests.support.checkpoint_writers import flip, llama, names_in, tree_bytes, write_hf

TIME = 1_700_000_000 * 10**9


class Messages:
    """Fake communication of ranks: the messages that they have sent, and the first failure."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.sent: dict[tuple[int, str], Any] = {}
        self.failed: int | None = None


class Peers(PeerProcesses):
    """The connection of one rank, which is a thread of this process."""

    def __init__(self, rank: int, messages: Messages) -> None:
        self.rank, self.world_size, self._messages = rank, 2, messages

    def send(self, topic: str, value: Any) -> None:
        with self._messages.condition:
            self._messages.sent[self.rank, topic] = value
            self._messages.condition.notify_all()

    def receive(self, rank: int, topic: str) -> Any:
        with self._messages.condition:
            while (rank, topic) not in self._messages.sent:
                if self._messages.failed is not None:
                    raise PeerFailure(f"rank {self._messages.failed} failed", 3)
                assert self._messages.condition.wait(20), f"rank {rank} did not send {topic}"
            return self._messages.sent[rank, topic]

    def check(self) -> None:
        pass

    def wait_for_store(self) -> None:
        pass

    @contextmanager
    def shared_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with self._messages.condition:
                if self._messages.failed is None:
                    self._messages.failed = self.rank
                self._messages.condition.notify_all()
            raise


def write(source: Path, target: Path, change: Callable[[Job], Job] = lambda job: job, **settings: Any) -> Any:
    checkpoint = open_checkpoint(source)
    job = change(job_of(checkpoint, target, lambda tree, result: None)[0])
    settings = {"overwrite": False, "resume": False, **settings}
    with checkpoint.source.open(checkpoint.identities) as files:
        return publish(job, target, files, workers=1, max_memory=1 << 24, on_progress=lambda nbytes: None, **settings)


def run_ranks(sources: list[Path], target: Path, changes: list[Callable[[Job], Job]]) -> list[CopyResult | CkptxError]:
    """Write with both ranks in threads, and return the result or the error of each."""
    return run_in_threads(Peers, lambda peers: write(sources[peers.rank], target, changes[peers.rank], processes=peers))


def run_in_threads(make_peers: Callable[[int, Messages], Peers], write_rank: Callable[[Peers], Any]) -> list[Any]:
    """Run two ranks in threads, and return the result or the error of each."""
    messages, results = Messages(), dict[int, Any]()

    def work(rank: int) -> None:
        peers = make_peers(rank, messages)
        try:
            with peers.shared_failure():
                results[rank] = write_rank(peers)
        except CkptxError as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [results[rank] for rank in range(2)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = write_hf(tmp_path / "in" / "hf", llama(), shards=2)
    for path in root.iterdir():
        os.utime(path, ns=(TIME, TIME))
    return root


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "dcp"


def same(job: Job) -> Job:
    return job


def test_ranks_that_agree_write_what_one_process_writes(source: Path, target: Path, tmp_path: Path) -> None:
    found = run_ranks([source, source], target, [same, same])
    assert all(isinstance(each, CopyResult) for each in found), found
    write(source, tmp_path / "alone")
    assert tree_bytes(target) == tree_bytes(tmp_path / "alone")
    assert names_in(target.parent) == ["dcp"]


@pytest.mark.parametrize("difference", ["settings", "plan", "bytes", "config", "same bytes in other files"])
def test_ranks_that_disagree_write_nothing(source: Path, target: Path, tmp_path: Path, difference: str) -> None:
    other, change = source, same
    if difference == "settings":
        change = lambda job: replace(job, settings={"dtype": "fp16"})  # noqa: E731 - one of several changes
    elif difference == "plan":
        change = lambda job: replace(job, plan=replace(job.plan, files=job.plan.files[::-1]))  # noqa: E731 - as above
    else:
        other = shutil.copytree(source, tmp_path / "in" / "other")
        if difference == "bytes":
            flip(other / "model-00001-of-00002.safetensors", -1)
        elif difference == "config":
            text = (other / "config.json").read_text()
            (other / "config.json").write_text(text.replace("false", "true ", 1))
        for path in other.iterdir():
            os.utime(path, ns=(TIME, TIME))
    first, second = run_ranks([source, other], target, [same, change])
    assert isinstance(second, InputError), second
    assert "the checkpoint or the options of rank 1 differ from those of rank 0" in str(second)
    assert isinstance(first, PeerFailure), first
    assert names_in(target.parent) == []


@pytest.mark.parametrize("digests", [("d", "d"), ("d", "e")])
@pytest.mark.parametrize("mounts", list(product(["", "m", "n"], repeat=2)))
@pytest.mark.parametrize("inodes", [("f", "f"), ("f", "g")])
def test_files_are_compared_only_where_ranks_see_the_same_mounts(
    digests: tuple[str, str], mounts: tuple[str, str], inodes: tuple[str, str]
) -> None:
    """Inodes on two machines, or where the machine is unknown, say nothing."""
    one, two = (
        {"digest": digest, "mount": mount, "inodes": inode_digest}
        for digest, mount, inode_digest in zip(digests, mounts, inodes, strict=True)
    )
    are_equal = digests == ("d", "d") and (mounts not in (("m", "m"), ("n", "n")) or inodes == ("f", "f"))
    assert is_same_source(one, two) is is_same_source(two, one) is are_equal


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_each_group_of_files_has_one_rank_and_ranks_have_about_as_much(world_size: int, seed: int) -> None:
    sizes = [(7919 * (index + 3) ** (seed + 1)) % 101 for index in range(3 * seed + 5)]
    plan: Any = SimpleNamespace(
        files=[SimpleNamespace(nbytes=size) for size in sizes],
        file_groups=[
            SimpleNamespace(files=range(begin, min(begin + 2, len(sizes)))) for begin in range(0, len(sizes), 2)
        ],
    )
    groups = [_assign_groups(plan, SimpleNamespace(rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert sorted(index for each in groups for index in each) == list(range(len(plan.file_groups)))
    assert groups == [sorted(each) for each in groups]
    group_sizes = [sum(sizes[file] for file in group.files) for group in plan.file_groups]
    loads = [sum(group_sizes[index] for index in each) for each in groups]
    assert max(loads) - min(loads) <= max(group_sizes)


# Files that another process changes


def _replaced(path: Path) -> None:
    shutil.copy2(path, path.with_name("new"))
    path.with_name("new").rename(path)


def _grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def _linked(path: Path) -> None:
    moved = path.rename(path.parents[3] / "moved")
    path.symlink_to(moved)


def _piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


TOUCHES: dict[str, Callable[[Path], None]] = {
    "removed": Path.unlink, "replaced": _replaced, "grown": _grown, "shortened": lambda path: os.truncate(path, 9),
    "a link": _linked, "a pipe": _piped,
}  # fmt: skip


def first_file(target: Path) -> Path:
    return staging_paths(target)[0] / "__0_0.distcp"


@pytest.mark.parametrize("touch", TOUCHES)
def test_files_that_were_touched_are_not_checked(source: Path, target: Path, touch: str) -> None:
    """The check reads the files; one that was replaced may be a pipe, on which it would wait forever."""
    checked = []

    def changed(job: Job) -> Job:
        return replace(
            job,
            validate_result=lambda result: TOUCHES[touch](first_file(target)),
            check_staged_files=lambda tree, result: checked.append(result),
        )

    with pytest.raises(OutputError, match="another process is using the staging directory"):
        write(source, target, changed)
    assert not checked and names_in(target.parent) == []


@pytest.mark.parametrize("touch", [*TOUCHES, None])
def test_a_fault_that_the_check_finds_is_blamed_on_whoever_touched_the_file(
    source: Path, target: Path, touch: str | None
) -> None:
    def check(tree: Any, result: CopyResult) -> None:
        if touch is not None:
            TOUCHES[touch](first_file(target))
        raise InternalError("found by the check")

    expected = InternalError if touch is None else OutputError
    with pytest.raises(expected, match="found by the check" if touch is None else "another process is using"):
        write(source, target, lambda job: replace(job, check_staged_files=check))
    assert names_in(target.parent) == []
