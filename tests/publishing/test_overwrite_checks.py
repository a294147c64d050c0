"""`--overwrite` replaces checkpoints and nothing else: whatever foreign thing lies in DST, it stays, and so does the
source, wherever its links lead."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ckptx
from ckptx.errors import CkptxError, InputError, OutputError
from ckptx.publishing import output_checks, staging
from ckptx.publishing.overwrite_checks import is_known_name
from ckptx.storage.directory_handle import refuse_conflicting_names, split_name
from ckptx.untrusted.printable import one_line
from tests.support.checkpoint_writers import llama, names_in, tree_bytes, write_dcp, write_hf
from tests.untrusted.test_file_names import can_all_be_files

TENSORS = llama(layers=1)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power here, and waiting for the disk would be most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("in") / "hf", TENSORS, shards=2)


def ours(root: Path, kind: str) -> Path:
    """A checkpoint of some kind, by itself or by ckptx."""
    if kind == "hf":
        return write_hf(root, TENSORS, shards=2)
    if kind == "dcp":
        return write_dcp(root, TENSORS)
    source = write_hf(root.parent / f"{root.name}-source", TENSORS)
    if kind == "converted":
        ckptx.convert("hf2dcp", source, root)
    else:
        ckptx.reshard(source, root, tp=2, to="safetensors")
    shutil.rmtree(source)
    return root


KINDS = ("hf", "dcp", "converted", "resharded")
PEOPLE = (
    "thesis.tex", ".git/config", "train.py", "notes.md", "results.json", "data.npz", "runs/events.out.tfevents.1",
    ".env", ".ssh/id_ed25519", "wandb/run-1/logs/debug.log", "src/model.py", "Makefile", "dataset.pkl", "photo.jpg",
    "sub/config.json", "venv/bin/python", ".bashrc", "photos/model.safetensors", "model/notes.md", "optim/train.py",
    ".cache/pip/x",
    "config.json.bak", "model.safetensors.orig", "my_config.json", "LICENSED/code.c",
)  # fmt: skip
TRAINERS = (
    "trainer_state.json", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_3.pth",
    "README.md", "LICENSE", ".gitattributes", "tokenizer.json", "tokenizer.model", "vocab.txt", "chat_template.jinja",
    "generation_config.json", "preprocessor_config.json", "modeling_x.py", ".hf_metadata/config.json", "latest",
    "common.pt", "metadata.json", "model.gguf", "pytorch_model.bin",
    ".cache/huggingface/download/x.safetensors.metadata",
)  # fmt: skip


def refused(hf: Path, dst: Path, **options: Any) -> str:
    """What a conversion over `dst` is refused with; everything around must stay as it is."""
    before = tree_bytes(dst) if dst.is_dir() else None
    links = {path: os.readlink(path) for path in dst.parent.rglob("*") if path.is_symlink()}
    beside = names_in(dst.parent)
    with pytest.raises(CkptxError) as found:
        ckptx.convert("hf2dcp", hf, dst, **{"overwrite": True, **options})
    assert found.value.exit_code == 5
    assert "\n" not in str(found.value)
    assert (tree_bytes(dst) if dst.is_dir() else None) == before
    assert names_in(dst.parent) == beside
    assert {path: os.readlink(path) for path in dst.parent.rglob("*") if path.is_symlink()} == links
    return str(found.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PEOPLE)
def test_what_people_keep_beside_a_checkpoint_stays(hf: Path, tmp_path: Path, kind: str, name: str) -> None:
    dst = ours(tmp_path / "out", kind)
    (dst / name).parent.mkdir(parents=True, exist_ok=True)
    (dst / name).write_bytes(b"mine")
    assert name in refused(hf, dst)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_and_what_trainers_keep_is_replaced(hf: Path, tmp_path: Path, kind: str) -> None:
    dst = ours(tmp_path / "out", kind)
    for name in TRAINERS:
        if not (dst / name).exists() and name != "pytorch_model.bin":
            (dst / name).parent.mkdir(parents=True, exist_ok=True)
            (dst / name).write_bytes(b"{}")
    ckptx.convert("hf2dcp", hf, dst, overwrite=True)
    assert names_in(dst) == [".metadata", "__0_0.distcp", "ckptx.json", "config.json"]
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_note_lists_the_files_that_are_lost(hf: Path, tmp_path: Path, kind: str, dry_run: bool) -> None:
    dst = ours(tmp_path / "out", kind)
    for name in ("README.md", "LICENSE", "trainer_state.json"):
        (dst / name).write_text("mine")
    report = ckptx.convert("hf2dcp", hf, dst, overwrite=True, dry_run=dry_run)
    verb = "would remove" if dry_run else "removed"
    listed = f"{dst}: --overwrite {verb} 3 files of the old directory: LICENSE, README.md, trainer_state.json"
    assert [note for note in report.notes if "--overwrite" in note] == [listed]
    assert (dst / "README.md").exists() == dry_run


def test_a_note_lists_an_edited_file_that_is_replaced(hf: Path, tmp_path: Path) -> None:
    source = shutil.copytree(hf, tmp_path / "source")
    (source / "README.md").write_text("published")
    ckptx.convert("hf2dcp", source, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("mine")
    report = ckptx.convert("hf2dcp", source, tmp_path / "out", overwrite=True)
    assert any(note.endswith("--overwrite removed 1 file of the old directory: README.md") for note in report.notes)


@pytest.mark.parametrize("kind", KINDS)
def test_no_note_lists_weights_and_files_of_ckptx(hf: Path, tmp_path: Path, kind: str) -> None:
    dst = ours(tmp_path / "out", kind)
    report = ckptx.convert("hf2dcp", hf, dst, overwrite=True)
    again = ckptx.convert("hf2dcp", hf, dst, overwrite=True)
    (dst / "README.md").write_text("mine")
    resumed = ckptx.convert("hf2dcp", hf, dst, resume=True)
    assert not any("--overwrite" in note for each in (report, again, resumed) for note in each.notes)
    assert (dst / "README.md").exists()


component = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
known_parts = st.sampled_from(
    [part for name in (*PEOPLE, *TRAINERS, "model-00001-of-00002.safetensors") for part in name.split("/")]
)
paths = st.lists(component | known_parts, min_size=1, max_size=3).map("/".join)


@given(st.sampled_from(KINDS), st.lists(paths, min_size=1, max_size=5, unique=True))
@settings(max_examples=80, deadline=None)
def test_any_foreign_name_is_kept_and_up_to_three_are_said(hf: Path, kind: str, names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        dst = ours(Path(directory) / "out", kind)
        injected = []
        for name in names:
            try:
                split_name(name)
                if not (dst / name).exists():
                    (dst / name).parent.mkdir(parents=True, exist_ok=True)
                    (dst / name).write_bytes(b"mine")
                    injected.append("/".join(split_name(name)))
            except (OSError, CkptxError):
                continue  # no name of a file, or below a file
        foreign = sorted(name for name in injected if not is_known_name(name))
        assume(foreign)
        said = refused(hf, dst)
        assert sum(one_line(name) in said for name in foreign[:3]) == min(3, len(foreign))
        if len(foreign) > 3:
            assert f"and {len(foreign) - 3} more" in said


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link to a directory": lambda path: path.symlink_to("/etc"),
    "link under a foreign name": lambda path: path.symlink_to("/etc/hostname"),
}


@pytest.mark.parametrize("special", SPECIAL)
def test_what_is_no_file_is_foreign(hf: Path, tmp_path: Path, special: str) -> None:
    dst = ours(tmp_path / "out", "hf")
    SPECIAL[special](dst / "odd")
    with pytest.raises(OutputError, match="odd"):
        ckptx.convert("hf2dcp", hf, dst, overwrite=True)
    assert os.path.lexists(dst / "odd")


@pytest.mark.parametrize(
    "contents", ["thesis", "weights that do not open", "index alone", "sidecars alone", "foreign manifest"]
)
def test_a_directory_that_is_no_checkpoint_is_refused(hf: Path, tmp_path: Path, contents: str) -> None:
    dst = tmp_path / "out"
    dst.mkdir()
    name, data = {
        "thesis": ("thesis.tex", b"mine"),
        "weights that do not open": ("model.safetensors", b"no header"),
        "index alone": ("model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}'),
        "sidecars alone": ("config.json", b"{}"),
        "foreign manifest": ("ckptx.json", b'{"name": "somebody else\'s"}'),
    }[contents]
    (dst / name).write_bytes(data)
    refused(hf, dst)


@pytest.mark.parametrize("through", ["link", "link to a link", "dots"])
def test_links_to_a_directory_of_somebody_are_looked_through(hf: Path, tmp_path: Path, through: str) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id").write_bytes(b"mine")
    (tmp_path / "one").symlink_to("home")
    (tmp_path / "two").symlink_to("one")
    dst = {"link": tmp_path / "one", "link to a link": tmp_path / "two", "dots": tmp_path / "x" / ".." / "home"}[
        through
    ]
    if through == "dots":
        (tmp_path / "x").mkdir()
    with pytest.raises(OutputError, match=re.escape(".ssh/id")):
        ckptx.convert("hf2dcp", hf, dst, overwrite=True)
    assert (home / ".ssh" / "id").read_bytes() == b"mine"


def test_what_ckptx_carried_may_go_unless_it_was_edited(tmp_path: Path) -> None:
    """A repository may hold any file; one that ckptx wrote is known by its digest."""
    source = write_hf(tmp_path / "in" / "hf", TENSORS)
    (source / "figure.png").write_bytes(b"figure")
    dst = tmp_path / "out"
    ckptx.convert("hf2dcp", source, dst)
    assert (dst / "figure.png").exists()
    ckptx.convert("hf2dcp", source, dst, overwrite=True)
    (dst / "figure.png").write_bytes(b"edited")
    assert "figure.png" in refused(source, dst)


@pytest.mark.parametrize("exchange", ["renameat2", "without renameat2"])
def test_a_file_that_comes_while_the_directory_is_replaced_stays(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str
) -> None:
    """After the last look, at the very moment of the swap."""
    dst = ours(tmp_path / "out", "hf")
    real_swap, real_rename = staging._exchange_names, os.rename

    def swap(*names: Any) -> bool:
        (dst / "thesis.tex").write_bytes(b"mine")
        return real_swap(*names) if exchange == "renameat2" else False

    monkeypatch.setattr(staging, "_exchange_names", swap)
    before = tree_bytes(dst)
    with pytest.raises(OutputError, match=r"thesis\.tex changed while it was being replaced"):
        ckptx.convert("hf2dcp", hf, dst, overwrite=True)
    assert os.rename is real_rename
    assert tree_bytes(dst) == {**before, "thesis.tex": b"mine"}
    assert names_in(tmp_path) == ["out"]


def hub_cache(root: Path, source: Path) -> tuple[Path, Path]:
    """Snapshot and blobs as the Hub's client keeps them."""
    blobs, snapshot = root / "models--org--name" / "blobs", root / "models--org--name" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(source.iterdir())):
        shutil.copy(path, blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot, blobs


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "where", ["blobs", "blobs/new", ".", "snapshots", "snapshots/abc", "snapshots/new", "refs/x", ".."]
)
def test_a_cache_is_never_an_output_of_its_own_snapshot(hf: Path, tmp_path: Path, where: str, overwrite: bool) -> None:
    snapshot, blobs = hub_cache(tmp_path / "hub", hf)
    before = {path: path.read_bytes() for path in blobs.iterdir()}
    with pytest.raises(OutputError):
        ckptx.convert("hf2dcp", snapshot, blobs.parent / where, overwrite=overwrite)
    assert {path: path.read_bytes() for path in blobs.iterdir()} == before


@pytest.mark.parametrize("linked", ["weights", "config", "all"])
@pytest.mark.parametrize("as_base", [False, True])
def test_a_source_whose_files_are_links_into_the_target_is_kept(tmp_path: Path, linked: str, as_base: bool) -> None:
    """The target is a checkpoint with nothing foreign in it; only where the links lead tells."""
    dst, source = write_hf(tmp_path / "out", TENSORS), tmp_path / "source"
    source.mkdir()
    for path in dst.iterdir():
        if linked == "all" or (path.suffix == ".safetensors") == (linked == "weights"):
            (source / path.name).symlink_to(path)
        else:
            shutil.copy(path, source)
    before = tree_bytes(dst)
    with pytest.raises(OutputError, match="overlaps the input"):
        if as_base:
            dcp = write_dcp(tmp_path / "dcp", TENSORS)
            ckptx.convert("dcp2hf", dcp, dst, base=str(source), overwrite=True)
        else:
            ckptx.convert("hf2dcp", source, dst, overwrite=True)
    assert tree_bytes(dst) == before


@pytest.mark.parametrize("where", ["out", "out/base", "."])
def test_a_base_in_or_around_the_target_is_kept(tmp_path: Path, where: str) -> None:
    dcp = write_dcp(tmp_path / "in" / "dcp", TENSORS)
    base = write_hf(tmp_path / "x" / where, TENSORS)
    before = tree_bytes(base)
    with pytest.raises(OutputError):
        ckptx.convert("dcp2hf", dcp, tmp_path / "x" / "out", base=str(base), overwrite=True)
    assert {name: data for name, data in tree_bytes(base).items() if name in before} == before


# ------------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("below", ["", "sub"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_mount_point_is_recognised_before_the_copy(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str, overwrite: bool
) -> None:
    dst = tmp_path / "o u t"
    (dst / "sub").mkdir(parents=True)
    if not below:
        (dst / "sub").rmdir()
    mounts = tmp_path / "mountinfo"
    place = str(dst / below).replace(" ", r"\040")
    mounts.write_text(f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n36 1 8:1 / {place} rw,relatime - ext4 /dev/sda1 rw\n")
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: real(mounts if str(path) == "/proc/self/mountinfo" else path))
    monkeypatch.setattr(ckptx.publishing.publish, "execute", lambda *_, **__: pytest.fail("copied"), raising=False)
    if below and not overwrite:
        with pytest.raises(OutputError, match="not empty"):
            ckptx.convert("hf2dcp", hf, dst)
        return
    with pytest.raises(OutputError, match="mount point"):
        ckptx.convert("hf2dcp", hf, dst, overwrite=overwrite)


@pytest.mark.parametrize("here", [".", "below/it"])
@pytest.mark.parametrize("filled", [False, True])
def test_the_current_directory_is_not_replaced_under_whoever_is_in_it(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, filled: bool
) -> None:
    dst = tmp_path / "out"
    (dst / here).mkdir(parents=True)
    monkeypatch.chdir(dst / here)
    if filled:
        write_hf(dst, TENSORS)
    with pytest.raises(OutputError):
        ckptx.convert("hf2dcp", hf, dst, overwrite=True)
    assert Path.cwd() == dst / here


def test_what_the_kernel_lists_is_parsed(tmp_path: Path) -> None:
    assert Path("/proc") in output_checks._mount_points()
    with pytest.raises(OutputError, match="mount point"):
        output_checks.refuse_existing(Path("/proc"), overwrite=True)


# ------------------------------------------------------------------------------------------------- names


@given(st.lists(st.sampled_from(["", ".", "..", "a", "b", "~", "a b", "...", "\0", "\ud800", "\\", "c:"]), max_size=4))
@settings(max_examples=400, deadline=None)
def test_names_of_output_files_never_lead_out(parts: list[str]) -> None:
    name = "/".join(parts)
    root = Path("/place/of/it")
    try:
        found = split_name(name)
    except CkptxError as error:
        assert error.exit_code == 3
        str(error).encode()
        return
    assert found and not {"", ".", ".."} & set(found)
    assert root in Path(os.path.normpath(root.joinpath(*found))).parents


@given(st.lists(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3).map("/".join), max_size=6))
@settings(max_examples=300, deadline=None)
def test_names_clash_exactly_when_they_cannot_all_be_files(names: list[str]) -> None:
    possible = can_all_be_files(names)
    try:
        refuse_conflicting_names(names)
        assert possible
    except CkptxError:
        assert not possible


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("", "it is empty"),
        ("a/", "it has an empty component"),
        ("a\0b", "it contains control characters"),
        ("\ud800", "it is not Unicode"),
        ("../a", "it leads out of the directory"),
        ("/a", "it is not a relative path"),
    ],
)
def test_a_name_that_is_no_file_name_is_refused_with_the_reason(name: str, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        refuse_conflicting_names(["ok", name])
    with pytest.raises(InputError, match=r"leads out of|not a valid name" if name else "not a valid name"):
        split_name(name)
