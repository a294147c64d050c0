"""Source files whose change time alone differs after the copy: their contents decide whether the copy is published."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptx.errors import InputError
from ckptx.formats.registry import open_checkpoint
from ckptx.publishing.publish import Job, publish
from ckptx.publishing.source_contents import require_unchanged
from ckptx.publishing.source_state import collect_identities, describe_source, is_same_source
from ckptx.storage.interface import StoredFile
from ckptx.transfer.executor import CopyResult
from tests.storage.test_outputs_in_memory import job_of
from tests.support.checkpoint_writers import INDEX, LLAMA, llama, names_in, tree_bytes, write_dcp, write_hf

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def rewrite(path: Path, data: bytes) -> None:
    """Rewrite a file in place and set its modification time back, so that only its change time differs."""
    before = path.stat()
    assert len(data) == before.st_size
    with path.open("r+b") as file:
        file.write(data)
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of the file system ticks every few ms
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def changed(path: Path) -> str:
    return f"{path}: changed while it was being read; wait for its writer, then run again"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = write_hf(tmp_path / "in" / "hf", llama(), shards=2)
    (root / "tokenizer.json").write_bytes(b'{"a": 1}')
    return root


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "dcp"


def write(source: Path, target: Path, *others: Path, **callbacks: Any) -> CopyResult | None:
    """Publish a DCP of a source; callbacks replace those of the job."""
    checkpoint = open_checkpoint(source)
    other_checkpoints = [open_checkpoint(other) for other in others]
    job: Job = replace(job_of(checkpoint, target, lambda tree, result: None)[0], **callbacks)
    for other in other_checkpoints:
        job.sidecars |= {each.name: StoredFile(other.source, each.name) for each in other.sidecars}
    with checkpoint.source.open(checkpoint.identities) as files:
        return publish(
            job, target, files, workers=1, max_memory=1 << 24, overwrite=False, resume=False,
            on_progress=lambda nbytes: None, other_sources=other_checkpoints,
        )  # fmt: skip


def _same(data: bytes) -> bytes:
    return data


def _other_last_byte(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def _other_name(data: bytes) -> bytes:
    return data.replace(b"q_proj", b"r_proj", 1)


def _no_header(data: bytes) -> bytes:
    return b"\xff" * 16 + data[16:]


def _other_config(data: bytes) -> bytes:
    return data.replace(b"false", b"true ", 1)


def _other_layout(data: bytes) -> bytes:
    return data.replace(b"{\n", b"{ ", 1)


def _other_text(data: bytes) -> bytes:
    return data.replace(b"1", b"2")


def _broken(data: bytes) -> bytes:
    return b"?" + data[1:]


CHANGES: list[tuple[str, Callable[[bytes], bytes], bool]] = [  # name, change, True if the run continues
    *((name, _same, True) for name in (*SHARDS, INDEX, "config.json", "tokenizer.json")),
    *((name, _other_last_byte, False) for name in SHARDS),
    *((name, _other_name, False) for name in SHARDS),
    *((name, _no_header, False) for name in SHARDS),
    (INDEX, _broken, False),
    ("config.json", _other_config, False),
    ("config.json", _broken, False),
    ("config.json", _other_layout, True),
    ("tokenizer.json", _other_text, True),
]


@pytest.mark.parametrize(("name", "change", "is_accepted"), CHANGES)
def test_a_file_that_was_rewritten_after_the_copy(
    source: Path, target: Path, tmp_path: Path, name: str, change: Callable[[bytes], bytes], is_accepted: bool
) -> None:
    """Weights must be as they were copied, and the config must be equal; sidecars are copied afterwards."""
    path = source / name
    data = path.read_bytes()
    assert change is _same or change(data) != data
    if is_accepted:
        write(source, target, validate_result=lambda result: rewrite(path, change(data)))
        write(source, tmp_path / "fresh")
        assert tree_bytes(target) == tree_bytes(tmp_path / "fresh")
        assert names_in(target.parent) == ["dcp"]
        return
    with pytest.raises(InputError) as refused:
        write(source, target, validate_result=lambda result: rewrite(path, change(data)))
    if (name, change) != ("config.json", _broken):
        assert str(refused.value) == changed(path)
    assert str(path) in str(refused.value)
    assert names_in(target.parent) == []


@pytest.mark.parametrize("are_unchanged", [False, True])
def test_a_source_whose_decisions_differ_is_refused(source: Path, target: Path, are_unchanged: bool) -> None:
    """They are read again only if a file was touched."""
    path, calls = source / SHARDS[1], []

    def decide() -> bool:
        calls.append(None)
        return are_unchanged

    write(source, target.with_name("first"), are_source_decisions_unchanged=decide)
    assert not calls
    callbacks: dict[str, Any] = {
        "are_source_decisions_unchanged": decide,
        "validate_result": lambda result: rewrite(path, path.read_bytes()),
    }
    if are_unchanged:
        write(source, target, **callbacks)
    else:
        with pytest.raises(InputError) as refused:
            write(source, target, **callbacks)
        assert str(refused.value) == changed(path)
    assert len(calls) == 1
    assert names_in(target.parent) == (["dcp", "first"] if are_unchanged else ["first"])


@pytest.mark.parametrize("name", [*SHARDS, "tokenizer.json"])
def test_a_file_that_is_rewritten_again_while_it_is_checked_is_refused(source: Path, target: Path, name: str) -> None:
    path = source / SHARDS[0]

    def rewrite_again() -> bool:
        rewrite(source / name, (source / name).read_bytes())
        return True

    with pytest.raises(InputError) as refused:
        write(
            source, target, are_source_decisions_unchanged=rewrite_again,
            validate_result=lambda result: rewrite(path, path.read_bytes()),
        )  # fmt: skip
    assert str(refused.value) == changed(path)
    assert names_in(target.parent) == []


@pytest.mark.parametrize("touched_before", [False, True])
def test_a_sidecar_that_is_rewritten_before_it_is_copied_is_refused(
    source: Path, target: Path, touched_before: bool
) -> None:
    """Even if an earlier change was accepted."""
    path = source / "tokenizer.json"

    def touch(result: CopyResult) -> None:
        if touched_before:
            rewrite(path, path.read_bytes())

    with pytest.raises(InputError) as refused:
        write(
            source, target, validate_result=touch,
            check_staged_files=lambda tree, result: rewrite(path, path.read_bytes()),
        )  # fmt: skip
    assert str(refused.value) == changed(path)
    assert names_in(target.parent) == []


@pytest.mark.parametrize(
    ("name", "change", "is_accepted"),
    [
        ("config.json", _same, True),
        ("config.json", _other_layout, True),
        ("config.json", _other_config, False),
        ("tokenizer.json", _other_text, True),
        ("model.safetensors", _same, False),
    ],
)
def test_a_rewritten_file_of_another_checkpoint(
    tmp_path: Path, target: Path, name: str, change: Callable[[bytes], bytes], is_accepted: bool
) -> None:
    """A conversion uses only the config and the sidecar files of a base."""
    source = write_hf(tmp_path / "in" / "hf", llama(), config=None)
    base = write_hf(tmp_path / "in" / "base", llama())
    (base / "tokenizer.json").write_bytes(b'{"a": 1}')
    path, data = base / name, (base / name).read_bytes()
    if is_accepted:
        write(source, target, base, validate_result=lambda result: rewrite(path, change(data)))
        assert (target / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
        assert (target / "config.json").read_bytes() == (base / "config.json").read_bytes()
        return
    with pytest.raises(InputError) as refused:
        write(source, target, base, validate_result=lambda result: rewrite(path, change(data)))
    assert str(refused.value) == changed(path)
    assert names_in(target.parent) == []


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_tensors_of_touched_files_with_a_digest_are_compared(tmp_path: Path, target: Path, kind: str) -> None:
    """Another rank copied the other tensors, and compares them."""
    root = tmp_path / "in"
    write_hf(root, llama(), shards=2) if kind == "hf" else write_dcp(root, llama(), files=2, config=LLAMA)
    result = write(root, target)
    assert result is not None
    checkpoint = open_checkpoint(root)
    job = job_of(checkpoint, target, lambda tree, result: None)[0]
    path = min(path for path in root.iterdir() if path.suffix in (".safetensors", ".distcp"))
    identities = collect_identities(checkpoint)
    rewrite(path, path.read_bytes())
    touched = {
        name for name, entry in checkpoint.tensors.items() if path.name in {chunk.file for chunk in _chunks(entry)}
    }
    right, wrong = result.digests, dict.fromkeys(result.digests, "0" * 32)
    assert 0 < len(touched) < len(right)

    def check(digests: dict[str, str]) -> None:
        with checkpoint.source.open(checkpoint.identities) as files:
            require_unchanged(identities, job.plan, digests, files, checkpoint, lambda: True, 1 << 24)

    for digests in (wrong, *({**right, name: wrong[name]} for name in touched), {min(touched): wrong[min(touched)]}):
        with pytest.raises(InputError) as refused:
            check(digests)
        assert str(refused.value) == changed(path)
        assert identities.find_touched()
    check({name: (right if name in touched else wrong)[name] for name in right})
    assert not identities.find_touched(), "the current identity was not recorded"
    rewrite(path, path.read_bytes())
    check({name: wrong[name] for name in right if name not in touched})
    assert not identities.find_touched(), "the current identity was not recorded"


def _chunks(entry: Any) -> Any:
    return getattr(entry.chunks, "archives", entry.chunks)


@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 1 << 20])
@pytest.mark.parametrize("as_file", [False, True])
def test_blocks_make_up_the_contents(source: Path, size: int, as_file: bool) -> None:
    checkpoint = open_checkpoint(source)
    data = StoredFile(checkpoint.source, "tokenizer.json") if as_file else b'{"a": 1}'
    blocks = list(collect_identities(checkpoint).iterate_blocks(data, size))
    assert b"".join(blocks) == b'{"a": 1}'
    assert [len(block) for block in blocks] == [min(size, 8 - offset) for offset in range(0, 8, size)]


def test_a_file_without_a_recorded_identity_is_not_checked(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    identities = collect_identities(checkpoint)
    (source / "notes.md").write_text("new")
    assert list(identities.iterate_blocks(StoredFile(checkpoint.source, "notes.md"), 2)) == [b"ne", b"w"]
    (source / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError) as refused:
        list(identities.iterate_blocks(StoredFile(checkpoint.source, "tokenizer.json"), 2))
    assert str(refused.value) == changed(source / "tokenizer.json")


def test_a_removed_file_is_named(source: Path) -> None:
    identities = collect_identities(open_checkpoint(source))
    (source / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json: no such file"):
        identities.find_touched()


# ------------------------------------------------------------------------------------------------- ranks


def described(root: Path, *values: str) -> dict[str, str]:
    source = open_checkpoint(root)
    with source.source.open(source.identities) as files:
        return describe_source(source, files, *values)


def copy_with_times(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
        os.utime(target / path.name, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    return target


@pytest.mark.parametrize("is_mount_known", [False, True])
def test_copies_are_the_same_source_unless_the_mounts_are_known_to_be_the_same(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mount_known: bool
) -> None:
    other = copy_with_times(source, tmp_path / "other")
    real = Path.read_text

    def read_text(path: Path, *arguments: Any, **named: Any) -> str:
        if path.name == "boot_id":
            raise FileNotFoundError(2, "No such file or directory")
        return real(path, *arguments, **named)

    if not is_mount_known:
        monkeypatch.setattr(Path, "read_text", read_text)
    here, there = described(source), described(other)
    assert bool(here["mount"]) is is_mount_known and here["mount"] == there["mount"]
    assert here["digest"] == there["digest"] and here["inodes"] != there["inodes"]
    assert is_same_source(here, there) is not is_mount_known
    assert is_same_source(here, described(source))


def test_the_mount_is_that_of_this_boot_and_this_process(source: Path) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert described(source)["mount"] == f"{boot} {os.stat('/proc/self/ns/mnt').st_ino}"


@pytest.mark.parametrize("at", [0, 0.25, 0.5, 0.75, 1])
def test_samples_are_spread_over_each_file(tmp_path: Path, at: float) -> None:
    """If two files differ in a block of 1/8 of their bytes, a sample of the block differs."""
    tensors = llama(layers=1, hidden=64, vocab=512, inner=256)
    source = write_hf(tmp_path / "here", tensors, shards=2)
    other = copy_with_times(source, tmp_path / "there")
    path = other / SHARDS[1]
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    length = (len(data) - begin) // 8
    first = begin + int(at * (len(data) - begin - length))
    data[first : first + length] = bytes(byte ^ 1 for byte in data[first : first + length])
    rewrite(path, bytes(data))
    assert described(source)["digest"] != described(other)["digest"]


@pytest.mark.parametrize("values", [(), ("a",), ("a", "b"), ("ab",), ("b", "a"), ("\ud800",)])
def test_values_of_a_run_are_part_of_the_description(source: Path, values: tuple[str, ...]) -> None:
    digest = described(source, *values)["digest"]
    assert digest == described(source, *values)["digest"]
    for others in ((), ("a",), ("a", "b"), ("ab",), ("b", "a"), ("\ud800",), ("\ud801",)):
        assert (described(source, *others)["digest"] == digest) is (others == values)
