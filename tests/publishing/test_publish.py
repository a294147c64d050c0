"""Whole conversions and the directories around them: what is published, refused, resumed, or left behind."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckptx
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.region import Region
from ckptx.errors import InputError, OutputError, SpaceError, UnsupportedError
from ckptx.formats.hf.reader import refuse_adapters
from ckptx.formats.torch_archive.archive import archive_frame, archive_length
from ckptx.report.documents.conversion import ConversionReport
from ckptx.storage import files as storage
from tests.support.checkpoint_writers import (
    LLAMA,
    Value,
    flip,
    llama,
    names_in,
    tree_bytes,
    tree_digest,
    value,
    write_dcp,
    write_hf,
)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "in" / "hf", llama(hidden=32), shards=2)


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "dcp"


def convert(hf: Path, dst: Path, **options: Any) -> ConversionReport:
    return ckptx.convert("hf2dcp", hf, dst, **options)


def test_only_the_target_remains(hf: Path, dst: Path) -> None:
    report = convert(hf, dst)
    assert names_in(dst.parent) == ["dcp"]
    assert names_in(dst) == [".metadata", "__0_0.distcp", "ckptx.json", "config.json"]
    assert report.bytes_written == sum(map(len, tree_bytes(dst).values()))
    assert (dst / "config.json").read_bytes() == (hf / "config.json").read_bytes()


def test_equal_inputs_give_equal_directories(hf: Path, dst: Path, tmp_path: Path) -> None:
    """Whatever the workers, the time, and where the source lies."""
    convert(hf, dst, workers=1)
    elsewhere = shutil.copytree(hf, tmp_path / "elsewhere", copy_function=shutil.copy)
    for workers in (2, 5):
        convert(elsewhere, tmp_path / f"again{workers}", workers=workers)
        assert tree_bytes(tmp_path / f"again{workers}") == tree_bytes(dst)


def test_there_and_back_again(hf: Path, dst: Path, tmp_path: Path) -> None:
    convert(hf, dst)
    ckptx.convert("dcp2hf", dst, tmp_path / "back")
    back = tree_bytes(tmp_path / "back")
    del back["ckptx.json"]
    assert back == tree_bytes(hf)


def is_a_name(text: str) -> bool:
    """False for what a header means otherwise, and for what is refused: adapters, "*" in the place of an index."""
    with suppress(UnsupportedError):
        refuse_adapters([text], Path())
        return text != "__metadata__" and "*" not in text.split(".")
    return False


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(is_a_name)
tensors = st.builds(
    lambda dtype, shape, seed: value(dtype, *shape, seed=seed),
    st.sampled_from(["F32", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "U32"]),
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 9),
)
many = settings(max_examples=40, deadline=None)


@given(st.dictionaries(names, tensors, min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 3))
@many
def test_any_names_dtypes_and_shapes_come_back(
    tmp_path: Path, source: dict[str, Value], shards: int, files: int
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as directory:
        root = Path(directory)
        write_hf(root / "hf", source, shards=min(shards, len(source)), config={"model_type": "unknown"})
        convert(root / "hf", root / "dcp", files=files)
        ckptx.convert("dcp2hf", root / "dcp", root / "back")
        back = tree_bytes(root / "back")
        del back["ckptx.json"]
        assert back == tree_bytes(root / "hf")
        assert ckptx.verify(root / "hf", root / "dcp").exit == 0


@given(st.data())
@many
def test_any_cut_of_a_tensor_comes_together(tmp_path: Path, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    spans = []
    for size in shape:
        edges = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))})
        spans.append([(a, b - a) for a, b in pairwise(edges)])
    regions = [Region(tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in product(*spans)]
    whole = {"w": value("BF16", *shape), "v": value("F32", 3)}
    with tempfile.TemporaryDirectory(dir=tmp_path) as directory:
        root = Path(directory)
        write_dcp(root / "dcp", whole, cuts={"w": data.draw(st.permutations(regions))}, files=2)
        ckptx.convert("dcp2hf", root / "dcp", root / "hf", base="none")
        write_hf(root / "expected", dict(sorted(whole.items(), key=lambda item: item[0])), config=None)
        assert ckptx.verify(root / "expected", root / "hf").exit == 0
        assert ckptx.verify(root / "expected", root / "dcp").exit == 0


@pytest.mark.parametrize(
    "names",
    [["optimizer.w", "model.w"], ["step", "w"], ["module.w", "x"], ["module.w", "w"], ["module"], ["state.optim.w"]],
)
def test_hf_names_that_look_like_training_state_come_back(tmp_path: Path, names: list[str]) -> None:
    """The manifest says that they came from HF: all of them are the model."""
    write_hf(tmp_path / "hf", {name: value("F32", 2, seed=i) for i, name in enumerate(names)}, config={"x": 1})
    convert(tmp_path / "hf", tmp_path / "dcp")
    report = ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "back")
    assert report.dropped == []
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        tmp_path / "hf" / "model.safetensors"
    ).read_bytes()


def test_wrappers_of_a_training_run_go_unless_two_names_would_become_one(tmp_path: Path) -> None:
    tensors = {"_orig_mod.w": value("F32", 2), "module.v": value("F32", 2)}
    write_dcp(tmp_path / "dcp", tensors, config={"x": 1})
    report = ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "hf")
    assert set(ckptx.open_checkpoint(tmp_path / "hf").tensors) == {"w", "v"}
    assert any('wrapper "_orig_mod."' in warning for warning in report.notes)
    write_dcp(tmp_path / "two", tensors | {"w": value("F32", 3)}, config={"x": 1})
    with pytest.raises(InputError, match=r'"w" and "_orig_mod\.w" are one parameter under two names'):
        ckptx.convert("dcp2hf", tmp_path / "two", tmp_path / "both")


@pytest.mark.parametrize("shape", [(8,), (700_000,)])
def test_archives_without_a_checksum_are_counted(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """torch can be told to record none; small and large tensors go different ways."""
    dtype, tensor = DTYPES_BY_NAME["F32"], value("F32", *shape)
    payload = archive_frame(dtype, shape).head + tensor[2] + archive_frame(dtype, shape).build_tail(0)
    write_dcp(tmp_path / "dcp", {"w": tensor, "v": value("F32", 2)}, payloads={"w": payload})
    report = ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "hf", base="none")
    assert "1 archive record without a CRC-32: their bytes could not be checked" in report.notes


@pytest.mark.parametrize("shape", [(8,), (700_000,)])
def test_a_wrong_checksum_is_found_in_small_and_large_tensors(tmp_path: Path, shape: tuple[int, ...]) -> None:
    dtype, tensor = DTYPES_BY_NAME["F32"], value("F32", *shape)
    payload = archive_frame(dtype, shape).head + tensor[2] + archive_frame(dtype, shape).build_tail(12345)
    write_dcp(tmp_path / "in", {"w": tensor, "v": value("F32", 2)}, payloads={"w": payload})
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match='tensor "w": CRC-32'):
        ckptx.convert("dcp2hf", tmp_path / "in", tmp_path / "out" / "hf", base="none")
    assert names_in(tmp_path / "out") == []


@pytest.mark.parametrize("side", [8, 900])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_archive_of_the_right_length_may_hold_a_transposed_tensor(tmp_path: Path, side: int, workers: int) -> None:
    """Its strides take as many bytes as those of a row-major one."""
    tensor = torch.arange(side * side, dtype=torch.float32).reshape(side, side)
    stream = io.BytesIO()
    torch.save(tensor.t(), stream)
    held = ("F32", (side, side), tensor.t().contiguous().numpy().tobytes())
    write_dcp(tmp_path / "dcp", {"v": value("F32", 2), "w": held}, payloads={"w": stream.getvalue()})
    assert len(stream.getvalue()) == archive_length(DTYPES_BY_NAME["F32"], (side, side))
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "hf", base="none", workers=workers)
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["w"], tensor.t())


@pytest.mark.parametrize("side", [8, 900])
@pytest.mark.parametrize("at", [3, 80])
def test_a_damaged_head_is_found_where_it_is_read(tmp_path: Path, side: int, at: int) -> None:
    write_dcp(tmp_path / "in", {"v": value("F32", 2), "w": value("F32", side, side)})
    flip(tmp_path / "in" / "__0_0.distcp", archive_length(DTYPES_BY_NAME["F32"], (2,)) + at, 0xFF)
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match='tensor "w"'):
        ckptx.convert("dcp2hf", tmp_path / "in", tmp_path / "out" / "hf", base="none")
    with pytest.raises(InputError, match='tensor "w"'):
        ckptx.convert("dcp2hf", tmp_path / "in", tmp_path / "out" / "hf", base="none", dry_run=True)
    assert names_in(tmp_path / "out") == []


def test_an_existing_directory_is_refused_then_overwritten(hf: Path, dst: Path) -> None:
    before = tree_bytes(write_hf(dst, llama()))
    with pytest.raises(OutputError, match="--overwrite"):
        convert(hf, dst)
    assert tree_bytes(dst) == before
    convert(hf, dst, overwrite=True)
    assert names_in(dst) == [".metadata", "__0_0.distcp", "ckptx.json", "config.json"]
    assert names_in(dst.parent) == ["dcp"]


def test_overwrite_keeps_the_old_one_when_the_run_fails(hf: Path, dst: Path) -> None:
    before = tree_bytes(write_hf(dst, llama()))

    def fail(done: int, total: int) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        convert(hf, dst, overwrite=True, on_progress=fail)
    assert tree_bytes(dst) == before
    assert names_in(dst.parent) == ["dcp"]


@pytest.mark.parametrize("where", ["inside", "same", "around"])
def test_source_and_target_must_not_contain_each_other(hf: Path, where: str) -> None:
    before = tree_bytes(hf.parent)
    target = {"inside": hf / "dcp", "same": hf, "around": hf.parent}[where]
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="overlaps the input"):
            convert(hf, target, overwrite=overwrite)
    assert tree_bytes(hf.parent) == before


def test_an_empty_path_is_not_the_current_directory(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hf.parent)
    with pytest.raises(OutputError, match=r'^"": the path is empty; choose a DST$'):
        ckptx.convert("to-dcp", hf, "")


def test_a_target_created_meanwhile_is_left_alone(hf: Path, dst: Path) -> None:
    def create(done: int, total: int) -> None:
        dst.mkdir(exist_ok=True)
        (dst / "theirs").write_bytes(b"theirs")

    with pytest.raises(OutputError, match="created by another process during the run"):
        convert(hf, dst, on_progress=create)
    assert tree_bytes(dst) == {"theirs": b"theirs"}
    assert names_in(dst.parent) == ["dcp"]


@pytest.mark.parametrize("how", ["rewritten", "grown", "replaced", "removed"])
def test_a_source_that_changes_while_it_is_read_is_refused(hf: Path, dst: Path, how: str) -> None:
    shard = hf / "model-00002-of-00002.safetensors"

    def change(done: int, total: int) -> None:
        if how == "rewritten":
            os.utime(shard, ns=(1, 1))
        elif how == "grown":
            with shard.open("ab") as file:
                file.write(b"\0")
        elif how == "replaced":
            (hf / "new").write_bytes(shard.read_bytes())
            (hf / "new").rename(shard)
        else:
            shard.unlink(missing_ok=True)

    with pytest.raises(InputError, match=r"changed while it was being read|no such file"):
        convert(hf, dst, on_progress=change)
    assert names_in(dst.parent) == []


def interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_run_is_resumed(hf: Path, dst: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert(hf, dst, on_progress=interrupt)
    assert names_in(dst.parent) == [".dcp.ckptx-partial"]
    report = convert(hf, dst, resume=True)
    assert not [note for note in report.notes if "--resume" in note]
    assert report.bytes_written < sum(len(data) for _, _, data in llama(hidden=32).values())
    convert(hf, tmp_path / "undisturbed")
    assert tree_digest(dst) == tree_digest(tmp_path / "undisturbed")
    assert names_in(dst.parent) == ["dcp"]


@pytest.mark.parametrize("change", ["source", "dtype", "files"])
def test_a_resumed_run_that_makes_something_else_starts_afresh(
    hf: Path, dst: Path, tmp_path: Path, change: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert(hf, dst, on_progress=interrupt)
    options: dict[str, Any] = {}
    if change == "source":
        write_hf(hf, {name: (d, s, bytes(len(b))) for name, (d, s, b) in llama(hidden=32).items()}, shards=2)
    elif change == "dtype":
        options["dtype"] = "fp16"
    else:
        options["files"] = 2
    notes = convert(hf, dst, resume=True, **options).notes
    reason = {
        "source": "the source has changed since",
        "dtype": "it had another value of --dtype",
        "files": "it was to write other tensors or files: the options, the config or the version of ckptx differ",
    }[change]
    assert f"--resume: discarded the output of an interrupted run, because {reason}" in notes
    convert(hf, tmp_path / "undisturbed", **options)
    assert tree_digest(dst) == tree_digest(tmp_path / "undisturbed")


def test_resuming_what_is_complete_does_nothing(hf: Path, dst: Path) -> None:
    convert(hf, dst)
    before = tree_bytes(dst)
    report = convert(hf, dst, resume=True)
    assert any("already complete" in warning for warning in report.notes)
    assert (report.bytes_read, report.bytes_written) == (0, 0)
    assert tree_bytes(dst) == before
    assert names_in(dst.parent) == ["dcp"]


def test_resuming_over_another_dtype_of_equal_size_is_refused(hf: Path, dst: Path, tmp_path: Path) -> None:
    """One tensor more or less in the header makes no difference to its padded length."""
    convert(hf, dst)
    ckptx.convert("dcp2hf", dst, tmp_path / "back", dtype="bf16", max_shard_size="1GB")
    sizes = {name: len(data) for name, data in tree_bytes(tmp_path / "back").items()}
    (tmp_path / "back" / "ckptx.json").write_text(
        (tmp_path / "back" / "ckptx.json").read_text().replace('"dtype":"BF16"', '"dtype":"F16"', 1)
    )
    with pytest.raises(OutputError, match="exists and is not empty"):
        ckptx.convert("dcp2hf", dst, tmp_path / "back", dtype="bf16", max_shard_size="1GB", resume=True)
    assert sizes["model.safetensors"] == (tmp_path / "back" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("what", ["dtype", "names"])
def test_resuming_over_something_else_is_refused(hf: Path, dst: Path, what: str) -> None:
    """Equal sizes are not enough: bf16 and fp16 take the same room."""
    options: dict[str, Any] = {"dtype": "fp16"} if what == "dtype" else {"prefix": "x."}
    convert(hf, dst)
    before = tree_bytes(dst)
    with pytest.raises(OutputError, match="exists and is not empty"):
        convert(hf, dst, resume=True, **options)
    assert tree_bytes(dst) == before
    assert names_in(dst.parent) == ["dcp"]


def test_resuming_over_a_stranger_is_refused(hf: Path, dst: Path) -> None:
    dst.mkdir()
    (dst / "mine").write_bytes(b"mine")
    with pytest.raises(OutputError, match="--overwrite"):
        convert(hf, dst, resume=True)
    assert tree_bytes(dst) == {"mine": b"mine"}
    assert names_in(dst.parent) == ["dcp"]


def test_a_dry_run_writes_nothing(hf: Path, dst: Path) -> None:
    report = convert(hf, dst, dry_run=True)
    assert names_in(dst.parent) == []
    assert report.dry_run is True
    done = convert(hf, dst)
    assert (report.bytes_written, report.tensors) == (done.bytes_written, done.tensors)


def usage(free: int) -> Any:
    """What `shutil.disk_usage` says of a nearly full disk."""
    return shutil._ntuple_diskusage(10**12, 10**12 - free, free)  # type: ignore[attr-defined]


def test_too_little_space_is_said_before_a_byte_is_written(
    hf: Path, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free=1000))
    with pytest.raises(SpaceError, match="has 1000 B free"):
        convert(hf, dst)
    assert names_in(dst.parent) == []


def test_a_dry_run_with_too_little_space_ends_as_the_conversion_would(
    hf: Path, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free=1000))
    report = convert(hf, dst, dry_run=True)
    assert (report.exit, report.ok, report.error) == (SpaceError.exit_code, False, None)
    assert report.output_bytes > 1000 == report.free_space
    assert any("not enough space" in warning for warning in report.notes)
    assert "NOT ENOUGH SPACE: " in report.summary() and "1000 B free" in report.summary()
    resumed = convert(hf, dst, dry_run=True, resume=True)
    assert resumed.exit == 0, "a part of the output may be there already"


@pytest.mark.parametrize("part", [".distcp", "journal/", ".metadata", "ckptx.json", "config.json"])
def test_a_write_verb_that_finds_the_disk_full(hf: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Wherever the disk runs full: exit 6, and nothing is left."""
    real = os.pwrite

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        if part in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(storage.os, "pwrite", full)
    with pytest.raises(SpaceError, match="No space left"):
        convert(hf, dst)
    assert names_in(dst.parent) == []


_FULL = """
import sys
from ckptx.publishing import staging
from ckptx.cli.main import main
if sys.argv.pop(1) == "late":  # somebody else takes the space that was free a moment ago
    staging.free_space = lambda path: 1 << 40
main()
"""


def _may_mount() -> bool:
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("when", ["at once", "late"])
@pytest.mark.parametrize("disk", ["a full tmpfs" if _may_mount() else "no disk, mounting is not allowed here"])
def test_a_disk_runs_full(tmp_path: Path, disk: str, when: str) -> None:
    hf = write_hf(tmp_path / "hf", llama(layers=4, hidden=128, vocab=512, inner=512))
    assert len((hf / "model.safetensors").read_bytes()) > 2 << 20
    disk_root = tmp_path / "disk"
    disk_root.mkdir()
    convert = [sys.executable, "-c", _FULL, when, "convert", "hf2dcp", str(hf), str(disk_root / "dcp")]
    if disk == "a full tmpfs":
        mount = f"mount -t tmpfs -o size=1m tmpfs '{disk_root}'"
        script = f"{mount} && \"$@\"; code=$?; ls -A '{disk_root}'; exit $code"
        done = subprocess.run(["unshare", "-rm", "sh", "-c", script, "sh", *convert], capture_output=True, text=True)
        assert done.returncode == 6, done.stderr
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert ("No space left" if when == "late" else "free some space") in done.stderr
    else:
        convert[2] = _FULL.replace("main()", "staging.free_space = lambda path: 0\nmain()")
        assert subprocess.run(convert, capture_output=True).returncode == 6
        assert names_in(disk_root) == []


def test_sidecars_travel_and_foreign_weights_stay(hf: Path, dst: Path) -> None:
    for name, data in {
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ x }}",
        "modeling_x.py": b"raise SystemExit",
        "sub/vocab.txt": b"a\n",
        "onnx/model.onnx": b"onnx",
        "onnx/config.json": b"{}",
        "tf_model.h5": b"h5",
    }.items():
        (hf / name).parent.mkdir(exist_ok=True)
        (hf / name).write_bytes(data)
    report = convert(hf, dst)
    carried = {name for name in tree_bytes(dst) if not name.endswith((".distcp", ".metadata", "ckptx.json"))}
    assert carried == {"config.json", "tokenizer.json", "chat_template.jinja", "modeling_x.py", "sub/vocab.txt"}
    assert any("tf_model.h5" in warning for warning in report.notes)
    assert LLAMA["model_type"] in (dst / "config.json").read_text()
