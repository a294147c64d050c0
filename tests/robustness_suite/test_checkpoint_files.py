"""Files of any kind below a checkpoint: a byte that differs is found, whatever the name, the depth and the size."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import socket
import tarfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptx.robustness_suite.file_noise import noisy_files, not_compared_file_notes, step_count_settings
from ckptx.robustness_suite.oracles import compare
from ckptx.robustness_suite.stored_items import files_not_compared, is_file_digest, read_items

ENDINGS = (
    "", ".txt", ".yaml", ".csv", ".jsonl", ".json", ".log", ".md", ".msgpack", ".dat", ".bin", ".tar", ".zip", ".npz",
    ".npy", ".h5", ".distcp", ".gz", ".p",
)  # fmt: skip
STEMS = ("state", "sampler_config", ".state", "rng_state_0", "model", "über")
FOLDERS = ("", "a/", "a/b/c/", "a/b/c/d/e/f/", ".hidden/")
SIZES = (1, 100, (1 << 20) + 1, (16 << 20) + 1)
CONTENTS: dict[str, Callable[[int], bytes]] = {
    "ascii": lambda size: b"x" * size,
    "no utf-8": lambda size: b"\xff" * size,
    "utf-16": lambda size: ("\ufeff" + "y" * (size // 2)).encode("utf-16-le"),
    "zeros": bytes,
    "like json": lambda size: b'{"x": "' + b"a" * size + b'"}',
    "like json, no utf-8": lambda size: b'{"x": "' + b"\xfe" * size + b'"}',
    "like a pickle": lambda size: b"\x80\x04" + b"N" * size,
}


def checkpoint(root: Path, files: dict[str, bytes]) -> Path:
    """A checkpoint with a file that has a step, and others."""
    for name, data in {"first/a.json": b'{"step": 1}', **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def differ(first: Path, second: Path) -> list[str]:
    """The names of the items that differ."""
    return [each.item for row in compare([read_items(first)], [read_items(second)]) for each in row.differences]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_byte_that_differs_is_found(ending: str, folder: str, tmp_path: Path) -> None:
    """Each of 42 kinds of contents, of which each byte that is tried is changed."""
    for at, (stem, content, size) in enumerate(itertools.product(STEMS, CONTENTS, SIZES[:1] if folder else SIZES[:2])):
        data = CONTENTS[content](size)
        name = f"{folder}{stem}{ending}"
        first = checkpoint(tmp_path / f"{at}-a", {name: data})
        assert differ(first, checkpoint(tmp_path / f"{at}-b", {name: data})) == []
        for place in {0, len(data) // 2, len(data) - 1}:
            changed = bytearray(data)
            changed[place] ^= 1
            other = checkpoint(tmp_path / f"{at}-{place}", {name: bytes(changed)})
            assert differ(first, other), (name, content, place)
        longer = checkpoint(tmp_path / f"{at}-longer", {name: data + b"\0"})
        assert differ(first, longer), (name, content)
        assert differ(first, checkpoint(tmp_path / f"{at}-without", {})), name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("content", CONTENTS)
def test_a_large_file_takes_little_memory(content: str, size: int, tmp_path: Path) -> None:
    data = bytearray(CONTENTS[content](size))
    first = checkpoint(tmp_path / "a", {"state.dat": data})
    data[-1] ^= 1
    second = checkpoint(tmp_path / "b", {"state.dat": data})
    del data
    tracemalloc.start()
    try:
        assert differ(first, second) == ["state.dat"]
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


# -------------------------------------------------------------------------------------------------------------- arrays

ARRAYS: dict[str, Any] = {
    "int": np.arange(6).reshape(2, 3), "float": np.linspace(0, 1, 7), "half": np.ones(3, "<f2"), "0-d": np.array(3.5),
    "empty": np.zeros((0, 4)), "bool": np.array([True, False]), "text": np.array(["a", "bc"]),
    "bytes": np.array([b"a"]), "parts": np.array([(1, 2.0)], [("a", "<i4"), ("b", "<f8")]),
    "complex": np.array([1 + 2j]), "big": np.arange(300_000),
    "date": np.array(["2020-01-01"], "M8[D]"), "objects": np.array([{"a": 1}, None, "x"], object),
    "cube": np.arange(24.0).reshape(2, 3, 4),
}  # fmt: skip
SAVERS: dict[str, Callable[[Any, Any], Any]] = {
    ".npy": lambda file, array: np.save(file, array),
    ".npz": lambda file, array: np.savez(file, x=array, y=np.ones(2)),
    ".npz compressed": lambda file, array: np.savez_compressed(file, x=array, y=np.ones(2)),
}


def other_than(array: Any) -> Any:
    """An array whose last element differs."""
    other = array.copy()
    if array.size:
        last = other.reshape(-1)[-1:]
        if array.dtype == object:
            last[0] = "y"
        else:
            raw = last.view("u1")
            raw[-1] ^= 1
        return other
    return array.reshape(array.shape[::-1])


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("saver", SAVERS)
def test_arrays_are_compared_by_their_values(saver: str, array: str, tmp_path: Path) -> None:
    given = ARRAYS[array]
    ways = [given, given.copy(), np.asfortranarray(given) if given.ndim else given, other_than(given)]
    for at, value in enumerate(ways):
        stream = io.BytesIO()
        SAVERS[saver](stream, value)
        checkpoint(tmp_path / str(at), {f"deep/er/state{saver.split()[0]}": stream.getvalue()})
    assert differ(tmp_path / "0", tmp_path / "1") == []
    if given.dtype != object:
        assert differ(tmp_path / "0", tmp_path / "2") == []
    assert differ(tmp_path / "0", tmp_path / "3")


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (1 << 60,)}",
        b"{'descr': __import__('os').system('touch mark'), 'fortran_order': False, 'shape': ()}",
        b"{" * 20_000,
        b"\xff" * 100,
        b"",
    ],
)
def test_a_hostile_array_is_compared_by_its_bytes(header: bytes, tmp_path: Path) -> None:
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"12345678"
    first = checkpoint(tmp_path / "a", {"x.npy": data})
    assert differ(first, checkpoint(tmp_path / "b", {"x.npy": data})) == []
    assert differ(first, checkpoint(tmp_path / "c", {"x.npy": data[:-1] + b"9"})) == ["x"]
    assert not (tmp_path / "mark").exists() and not Path("mark").exists()


# ------------------------------------------------------------------------------------------------------------ archives


def zipped(files: dict[str, bytes], year: int, compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip whose members have a time."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0)), data, compression)
    return stream.getvalue()


def tarred(files: dict[str, bytes], year: int, compression: int = 0) -> bytes:
    """A tar whose members have a time."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), year
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


@pytest.mark.parametrize("ending", ["", ".zip", ".tar", ".dat", ".bin"])
@pytest.mark.parametrize("make", [zipped, tarred])
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_are_compared_by_their_members(ending: str, make: Any, compression: int, tmp_path: Path) -> None:
    if make is zipped and ending in (".bin", ".tar"):
        pytest.skip("a zip with such a name is one of torch.save")
    files = {"a/x": b"1" * 100, "b": b"", "c": b"\xff"}
    first = checkpoint(tmp_path / "a", {f"state{ending}": make(files, 2000, compression)})
    assert differ(first, checkpoint(tmp_path / "b", {f"state{ending}": make(files, 2001, compression)})) == []
    for at, changed in enumerate(({**files, "c": b"\xfe"}, {**files, "d": b""}, {"b": b"", "c": b"\xff"})):
        assert differ(first, checkpoint(tmp_path / f"c{at}", {f"state{ending}": make(changed, 2000, compression)}))


def test_a_zip_whose_members_lie_over_each_other_is_compared_by_its_bytes(tmp_path: Path) -> None:
    data = bytearray(zipped({str(at): bytes(1 << 20) for at in range(9)}, 2000))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        first = archive.infolist()[0]
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("0", bytes(1 << 24), zipfile.ZIP_DEFLATED)
        archive.filelist += [archive.filelist[0]] * 200
    assert first.compress_size
    began = time.process_time()
    checkpoint(tmp_path / "a", {"state.zip": stream.getvalue()})
    assert is_file_digest(read_items(tmp_path / "a")["other", "state"])
    assert time.process_time() - began < 5


@pytest.mark.parametrize("name", ["state", "state.dat", "deep/down/in/state.pt", "x.npz", ".state"])
def test_what_torch_saved_is_read_under_any_name(name: str, tmp_path: Path) -> None:
    for at, value in enumerate((1.0, 1.0, 2.0)):
        stream = io.BytesIO()
        torch.save({"optimizer": {"state": {0: {"exp_avg": torch.full((3,), value)}}}}, stream)
        checkpoint(tmp_path / str(at), {name: stream.getvalue()})
    assert differ(tmp_path / "0", tmp_path / "1") == []
    (found,) = differ(tmp_path / "0", tmp_path / "2")
    assert found.endswith("optimizer.state.0.exp_avg")


# ---------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a.b": 1}, {"a": {"b": 1}}),
        ({"": {"x": 1}}, {"x": 1}),
        ({"a": {}}, {"a": []}),
        ({"a": [1]}, {"a": "[1]"}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": True}, {"a": 1}),
        ({"a": None}, {"a": "None"}),
        ({"a": 0.0}, {"a": -0.0}),
        ({"a": [{"x": 1}]}, {"a": [{"x": 2}]}),
        ({"a": "x" * 200}, {"a": "x" * 199 + "y"}),
        ({"a": [0] * 100}, {"a": repr([0] * 100)}),
    ],
)
def test_values_of_json_that_differ(first: Any, second: Any, tmp_path: Path) -> None:
    for name, value in (("a", first), ("b", second), ("c", first)):
        checkpoint(tmp_path / name, {"deep/er/still/x_config.json": json.dumps(value).encode()})
    assert differ(tmp_path / "a", tmp_path / "b") and not differ(tmp_path / "a", tmp_path / "c")


def test_the_order_of_keys_and_the_folder_of_the_run_do_not_matter_in_json(tmp_path: Path) -> None:
    for name, keys in (("a", "xy"), ("b", "yx")):
        run = tmp_path / name
        value = [dict.fromkeys(keys, f"{run}/log")]
        checkpoint(run, {"x.json": json.dumps({"list": value, "path": f"{run}/out"}).encode()})
    assert read_items(tmp_path / "a", tmp_path / "a") == read_items(tmp_path / "b", tmp_path / "b")
    assert differ(tmp_path / "a", tmp_path / "b") == ["list", "path"]


# ----------------------------------------------------------------------------------------------- what has no contents


def test_what_has_no_contents_counts(tmp_path: Path) -> None:
    def empty(root: Path) -> None:
        (root / "empty").mkdir()

    def pipe(root: Path) -> None:
        os.mkfifo(root / "pipe")

    def dangling(root: Path) -> None:
        (root / "link").symlink_to("nowhere")

    def dangling_elsewhere(root: Path) -> None:
        (root / "link").symlink_to("elsewhere")

    def circle(root: Path) -> None:
        (root / "loop").symlink_to(".")

    def linked(root: Path) -> None:
        (root / "file").symlink_to("first/a.json")

    def bound(root: Path) -> None:
        where = os.getcwd()
        os.chdir(root)  # the path of a socket is short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind("socket")
        finally:
            os.chdir(where)

    kinds = (empty, pipe, dangling, dangling_elsewhere, circle, linked, bound)
    found = []
    for at, kind in enumerate((None, *kinds, *kinds)):
        root = checkpoint(tmp_path / str(at), {})
        if kind is not None:
            kind(root)
        found.append(read_items(root))
    assert all(found[at] == found[at + len(kinds)] for at in range(1, len(kinds) + 1))
    assert len({frozenset(each.items()) for each in found}) == len(kinds) + 1


def test_a_folder_behind_a_link_is_looked_through(tmp_path: Path) -> None:
    for name, data in (("a", b"1"), ("b", b"2")):
        checkpoint(tmp_path / "elsewhere" / name, {"x": data})
        checkpoint(tmp_path / name, {})
        (tmp_path / name / "link").symlink_to(tmp_path / "elsewhere" / name)
    assert differ(tmp_path / "a", tmp_path / "b") == ["link/x"]


def test_names_that_are_no_utf_8(tmp_path: Path) -> None:
    for name, data in ((b"a", b"1"), (b"b", b"2")):
        checkpoint(tmp_path / name.decode(), {})
        with open(os.fsencode(tmp_path) + b"/" + name + b"/x\xff\n.dat", "wb") as file:
            file.write(data)
    assert differ(tmp_path / "a", tmp_path / "b") == ["x\\xff\n.dat"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("training_args.bin", "settings"),
        ("config.json", "settings"),
        ("deep/er/config.json", "settings"),
        ("generation_config.json", "settings"),
        ("tokenizer.json", "tokenizer"),
        ("tokenizer_config.json", "tokenizer"),
        ("model.safetensors.index.json", "index of files"),
        ("runs/events.out.tfevents.1.host.2.0", "log with times"),
    ],
)
def test_what_is_not_compared_is_listed(name: str, reason: str, tmp_path: Path) -> None:
    root = checkpoint(tmp_path, {name: b"no contents that matter"})
    assert files_not_compared(root) == {reason: [name]}
    assert [*not_compared_file_notes(files_not_compared(root))] == [f"not compared ({reason}): {name}"]
    assert {name for _, name in read_items(root)} == {"step"}


# --------------------------------------------------------------------------------------------------------------- noise


def test_files_that_two_identical_runs_do_not_share_are_noise(tmp_path: Path) -> None:
    same = {"same.txt": b"same", "state": b"kept"}
    for run, changes in (
        ("a", {"log.txt": b"12:00", "log-1200.txt": b"x"}),
        ("rerun", {"log.txt": b"12:01", "log-1201.txt": b"x"}),
        ("right", {"log.txt": b"12:02", "log-1202.txt": b"x"}),
        ("wrong", {"log.txt": b"12:02", "log-1202.txt": b"x", "state": b"lost", "new-7.txt": b""}),
    ):
        checkpoint(tmp_path / run, {**same, **changes})
    first, second, right, wrong = (read_items(tmp_path / each) for each in ("a", "rerun", "right", "wrong"))
    noise = noisy_files(first, second, right)
    assert {name for _, name in noise} == {"log.txt", "log-1200.txt", "log-1201.txt", "log-1202.txt"}
    assert {key for key in {*first, *right} if first.get(key) != right.get(key)} <= noise
    left = {key for key in {*first, *wrong} if first.get(key) != wrong.get(key)} - noisy_files(first, second, wrong)
    assert {name for _, name in left} == {"state", "new-7.txt"}
    assert noisy_files(first, {}, right) == set()


def test_values_are_no_noise(tmp_path: Path) -> None:
    found = []
    for name, value in (("a", 1), ("rerun", 2)):
        stream = io.BytesIO()
        np.save(stream, np.array([value]))
        found.append(read_items(checkpoint(tmp_path / name, {"x.npy": stream.getvalue(), "y.json": b"%d" % value})))
    assert noisy_files(*found, found[0]) == set()


def test_a_number_of_steps_follows_the_command() -> None:
    before = {("other", "config.steps"): "6", ("other", "x"): "6", ("step", "step"): "3", ("rng", "y"): "6"}
    after = {("other", "config.steps"): "3", ("other", "x"): "4", ("step", "step"): "0", ("rng", "y"): "3"}
    assert step_count_settings(before, after, 6, 3) == {("other", "config.steps")}


def test_a_compressed_stream_is_compared_by_its_bytes(tmp_path: Path) -> None:
    for name, data in (("a", b"1"), ("b", b"2")):
        checkpoint(tmp_path / name, {"x.gz": gzip.compress(data * 100, mtime=0)})
    assert differ(tmp_path / "a", tmp_path / "b") == ["x.gz"]
