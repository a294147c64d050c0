"""Fields of a report about the run: bytes, peak memory, resumed and replaced outputs, and dry runs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

import ckptx
from ckptx.conversion.steps.open_source import open_source
from ckptx.errors import InputError, OutputError, ReportTargetError, SpaceError, UnsupportedError
from ckptx.options.conversion import ToHfOptions
from ckptx.report.documents.conversion import ConversionReport
from tests.conversion.steps import CONFIG, TIED
from tests.support.checkpoint_writers import INDEX, llama, names_in, tree_bytes, value, write_dcp, write_hf

COMMANDS = ["to-hf", "to-dcp", "to-megatron", "dcp", "safetensors"]
TENSOR_BYTES = sum(len(data) for _, _, data in llama().values())


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "in" / "hf", llama(), config=CONFIG)


def run(command: str, source: Path, out: Path, **options: Any) -> ConversionReport:
    if command.startswith("to-"):
        return ckptx.convert(command, source, out, **options)
    return ckptx.reshard(source, out, to=command, tp=2, **options)


def size_of(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


# Dry runs


@pytest.mark.parametrize("command", COMMANDS)
def test_a_dry_run_reports_the_files_that_the_run_writes(hf: Path, tmp_path: Path, command: str) -> None:
    planned = run(command, hf, tmp_path / "out", dry_run=True, max_memory="64MiB")
    assert names_in(tmp_path) == ["in"] and planned.dry_run and planned.exit == 0
    assert planned.buffer_bytes == 64 << 20
    assert planned.free_space is not None and planned.free_space > planned.output_bytes
    report = run(command, hf, tmp_path / "out")
    written = {str(path.relative_to(tmp_path / "out")): path for path in (tmp_path / "out").rglob("*")}
    sizes = {name: path.stat().st_size for name, path in written.items() if path.is_file()}
    assert {row["name"]: row["bytes"] for row in planned.files or ()} == sizes
    blocks = {row["name"]: row["tensors"] for row in planned.files or ()}
    assert {name for name, count in blocks.items() if count} == {
        name for name in sizes if name.endswith((".safetensors", ".distcp"))
    }
    assert sum(blocks.values()) >= (len(llama()) if command != "to-megatron" else 1)
    assert planned.bytes_read == report.bytes_read == TENSOR_BYTES
    assert planned.output_bytes == planned.bytes_written == report.output_bytes == size_of(tmp_path / "out")
    assert report.bytes_written == report.output_bytes
    assert report.dry_run is None and report.files is None and report.free_space is None
    assert planned.ledger == report.ledger and planned.parameters == report.parameters


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_dry_run_fails_without_enough_space(
    hf: Path, tmp_path: Path, missing: int, resume: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is replaced by one with just enough space, or with one byte less."""
    needed = run("to-hf", hf, tmp_path / "out", dry_run=True).output_bytes
    usage = shutil.disk_usage(tmp_path)._replace(free=needed - missing)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    report = run("to-hf", hf, tmp_path / "out", dry_run=True, resume=resume)
    assert report.exit == (SpaceError.exit_code if missing and not resume else 0)
    assert report.free_space == needed - missing
    notes = [note for note in report.notes if note.endswith(f"free at {tmp_path / 'out'}")]
    assert bool(notes) == bool(missing)


def test_a_dry_run_notes_an_output_that_exists_and_a_run_refuses_it(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("")
    report = run("to-hf", hf, tmp_path / "out", dry_run=True)
    (note,) = [note for note in report.notes if note.startswith("a conversion would fail: ")]
    with pytest.raises(OutputError) as caught:
        run("to-hf", hf, tmp_path / "out")
    assert note == f"a conversion would fail: {caught.value}"
    assert run("to-hf", hf, tmp_path / "new", dry_run=True).notes == [
        each for each in report.notes if each != note and "mine.txt" not in each
    ]


# Outputs that exist


@pytest.mark.parametrize("command", COMMANDS)
def test_a_complete_output_is_not_written_again(hf: Path, tmp_path: Path, command: str) -> None:
    first = run(command, hf, tmp_path / "out")
    before = tree_bytes(tmp_path / "out")
    again = run(command, hf, tmp_path / "out", resume=True)
    assert (again.bytes_read, again.bytes_written) == (0, 0)
    assert again.output_bytes == first.output_bytes == size_of(tmp_path / "out")
    note = f"{tmp_path / 'out'} is already complete; nothing to resume"
    assert note in again.notes and note not in first.notes
    assert tree_bytes(tmp_path / "out") == before


def interrupt(done: int, total: int) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_with_other_options_discards_an_interrupted_output(hf: Path, tmp_path: Path, command: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(command, hf, tmp_path / "out", on_progress=interrupt)
    report = run(command, hf, tmp_path / "out", dtype="fp32", resume=True)
    reason = "it had another value of --dtype"
    assert f"--resume: discarded the output of an interrupted run, because {reason}" in report.notes
    assert report.bytes_written == report.output_bytes == size_of(tmp_path / "out")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupted_run_is_resumed_without_a_note(hf: Path, tmp_path: Path, command: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(command, hf, tmp_path / "out", on_progress=interrupt)
    report = run(command, hf, tmp_path / "out", resume=True)
    assert not any("--resume" in note for note in report.notes)
    assert report.output_bytes == size_of(tmp_path / "out") >= report.bytes_written


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("names", [[], ["README.md"], ["LICENSE", "README.md"]], ids=len)
@pytest.mark.parametrize("command", COMMANDS)
def test_files_of_the_user_that_are_lost_are_listed(
    hf: Path, tmp_path: Path, command: str, names: list[str], dry_run: bool
) -> None:
    out = tmp_path / "out"
    run(command, hf, out)
    for name in names:
        (out / name).write_text("mine")
    report = run(command, hf, out, overwrite=True, dry_run=dry_run)
    verb = "would remove" if dry_run else "removed"
    number = f"{len(names)} file{'s' if len(names) > 1 else ''}"
    expected = [f"{out}: --overwrite {verb} {number} of the old directory: {', '.join(names)}"] if names else []
    assert [note for note in report.notes if "--overwrite" in note] == expected
    assert all((out / name).exists() == dry_run for name in names)


def test_nothing_is_lost_if_the_output_is_complete(hf: Path, tmp_path: Path) -> None:
    run("to-hf", hf, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("mine")
    report = run("to-hf", hf, tmp_path / "out", overwrite=True, resume=True)
    is_kept = (tmp_path / "out" / "README.md").exists()
    assert any("--overwrite" in note for note in report.notes) == (not is_kept)
    assert any("is already complete" in note for note in report.notes) == is_kept


# The run itself


def test_the_peak_memory_is_that_of_the_process(hf: Path, tmp_path: Path) -> None:
    report = run("to-hf", hf, tmp_path / "out")
    assert report.peak_rss is not None
    assert report.peak_rss >= TENSOR_BYTES
    assert report.to_dict()["peak_rss"] == report.peak_rss


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_file_system_without_locks_is_noted(
    hf: Path, tmp_path: Path, has_locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", flock)
    notes = run("to-hf", hf, tmp_path / "out").notes
    note = f"{tmp_path}: the file system has no locks; a concurrent run that writes out would not be detected"
    assert (note in notes) == (not has_locks)


@pytest.mark.parametrize("change", ["bytes", "size", None])
def test_a_source_that_changes_after_it_was_opened_is_refused(hf: Path, tmp_path: Path, change: str | None) -> None:
    """Its files are identified when they are opened: another file under the same name is not read."""
    options = ToHfOptions("to-hf", str(hf), str(tmp_path / "out"))
    with open_source(hf, tmp_path / "out", options) as ready:
        file = hf / "model.safetensors"
        data = file.read_bytes()
        if change is not None:
            file.unlink()
            file.write_bytes(data[:-1] + b"\x00" if change == "bytes" else data + b"\x00")
        if change is None:
            assert ready.files.read(file.name, 0, 8) == data[:8]
            return
        with pytest.raises(InputError, match=r"model\.safetensors"):
            ready.files.read(file.name, 0, 8)


# What is refused before anything is read


def test_an_empty_target_is_refused(hf: Path) -> None:
    with pytest.raises(OutputError) as caught:
        run("to-hf", hf, "")  # type: ignore[arg-type]
    assert str(caught.value) == '"": the path is empty; choose a DST'


def test_a_report_in_the_place_of_the_output_is_refused(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(ReportTargetError) as caught:
        run("to-hf", hf, tmp_path / "out", report_file=tmp_path / "out")
    assert str(caught.value) == f"{tmp_path / 'out'}: is the report and DST; choose another report file"
    with pytest.raises(OutputError, match="its directory does not exist"):
        run("to-hf", hf, tmp_path / "out", report_file=tmp_path / "none" / "report.json")
    run("to-hf", hf, tmp_path / "out", report_file=tmp_path / "report.json")
    assert names_in(tmp_path) == ["in", "out"]  # the caller writes the report


@pytest.mark.parametrize("has_index", [True, False])
def test_one_of_several_files_is_refused_without_an_index(tmp_path: Path, has_index: bool) -> None:
    hf = write_hf(tmp_path / "hf", llama(), shards=4, config=CONFIG)
    file = hf / "model-00001-of-00004.safetensors"
    for number in range(2, 5):
        (hf / f"model-{number:05d}-of-00004.safetensors").unlink()
    index = json.loads((hf / INDEX).read_text())
    names = [name for name, each in index["weight_map"].items() if each == file.name]
    if has_index:
        (hf / INDEX).write_text(json.dumps({**index, "weight_map": dict.fromkeys(names, file.name)}))
    else:
        (hf / INDEX).unlink()
        with pytest.raises(UnsupportedError) as caught:
            run("to-dcp", file, tmp_path / "out")
        assert str(caught.value) == (
            f"{file}: is one of 4 files of a checkpoint; pass the directory with all of them and their index, or "
            "--allow-config-mismatch to convert this file only"
        )
    report = run("to-dcp", hf if has_index else file, tmp_path / "out", allow_config_mismatch=True)
    assert report.tensors == len(names)


# Training state that is dropped


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("to-hf", "is not converted to HF"),
        ("to-megatron", "is not converted to Megatron"),
        ("safetensors", "cannot be stored in safetensors"),
        ("to-dcp", "dropped because of --optimizer drop"),
        ("dcp", "dropped because of --optimizer drop"),
    ],
)
def test_dropped_state_is_counted_by_tensors_objects_and_bytes(tmp_path: Path, command: str, reason: str) -> None:
    moments = {f"optimizer.state.{name}.exp_avg": value("F32", *each[1]) for name, each in llama().items()}
    objects = ["optimizer.param_groups", "scheduler"]
    source = write_dcp(tmp_path / "dcp", {**llama(), **moments, "epoch": value("I64", 3)}, objects=objects, config=TIED)
    options = {"optimizer": "drop"} if command in ("to-dcp", "dcp") else {}
    report = run(command, source, tmp_path / "out", **options)
    nbytes = sum(len(data) for _, _, data in moments.values())
    assert report.dropped_optimizer == {"tensors": len(moments), "bytes": nbytes}
    assert report.objects == {"count": 2, "bytes": 2 * len(b"\x80\x02N.")}
    assert {row["name"]: row["reason"] for row in report.dropped} == {
        **dict.fromkeys(moments, f"optimizer state {reason}"), "epoch": f"training state {reason}",
    }  # fmt: skip
    assert report.ledger["dropped"] == len(moments) + 1


@pytest.mark.parametrize("command", ["to-hf", "to-megatron", "safetensors"])
def test_a_source_of_training_state_alone_is_refused(tmp_path: Path, command: str) -> None:
    source = write_dcp(tmp_path / "dcp", {"optimizer.state.w.exp_avg": value("F32", 2)}, config=CONFIG)
    with pytest.raises(InputError) as caught:
        run(command, source, tmp_path / "out", allow_config_mismatch=True)
    assert str(caught.value) == f"{source}: contains no model tensors; list its names with `ckptx inspect --tensors`"


@pytest.mark.parametrize("command", ["to-dcp", "dcp"])
def test_a_dcp_of_training_state_alone_becomes_a_dcp(tmp_path: Path, command: str) -> None:
    source = write_dcp(tmp_path / "dcp", {"optimizer.state.w.exp_avg": value("F32", 2)}, config=CONFIG)
    report = run(command, source, tmp_path / "out", allow_config_mismatch=True)
    assert report.tensors == 1 and report.ledger["written"] == 1
