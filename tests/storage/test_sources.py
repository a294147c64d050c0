"""Every storage keeps the contract of `ckptx.storage.interface`: the same cases on a local disk and in memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptx.errors import CkptxError, InputError, OutputError, SpaceError, UnsupportedError
from ckptx.formats.registry import open_checkpoint
from ckptx.model_view.parameter_count import count_parameters
from ckptx.model_view.view import read_valid_manifest, view_model
from ckptx.publishing.source_state import collect_identities
from ckptx.storage.directory_handle import DirectoryHandle
from ckptx.storage.interface import OutputTree, Source, StoredFile, local_path, relative_name
from ckptx.storage.listing import EntryKind
from ckptx.storage.local import LocalSource
from tests.support.checkpoint_writers import LLAMA, llama, write_dcp, write_hf
from tests.support.memory_storage import MemoryPath, MemoryTree, Store

FILES = {"config.json": b"{}", "model/.metadata": b"meta", "model/a.distcp": bytes(range(256)), "empty": b""}


class Place:
    """A directory of a storage, how to write it and how to look at it."""

    def __init__(self, root: Any, source: Callable[[Any], Source]) -> None:
        self.root, self._source = root, source

    @property
    def source(self) -> Source:
        return self._source(self.root)

    def write(self, name: str, data: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    place = Place(tmp_path / "here", LocalSource) if request.param == "local" else Place(MemoryPath("/here"), _fresh)
    for name, data in FILES.items():
        place.write(name, data)
    place.root.parent.joinpath("beside").mkdir() if request.param == "local" else (place.root.parent / "beside").mkdir()
    return place


def _fresh(path: MemoryPath) -> MemoryPath:
    return path.without_cache()


def test_a_location_joins_prints_and_compares(place: Place) -> None:
    source = place.source
    location = source.location
    assert location == place.root and (location / "model").parent == location and (location / "model").name == "model"
    assert str(location / "model" / "a.distcp") == f"{location}/model/a.distcp"
    assert {location: 1}[place.source.location] == 1
    assert source.with_location(location / "model").location == location / "model"
    assert relative_name(location, location / "model" / "a.distcp") == "model/a.distcp"
    assert relative_name(location, location) == "" and relative_name(location / "model", location) is None
    assert relative_name(location / "model", location / "model.json") is None


def test_kinds(place: Place) -> None:
    location = place.source.location
    kinds = [place.source.with_location(each).read_kind() for each in (location, location / "empty", location / "none")]
    assert kinds == [EntryKind.DIRECTORY, EntryKind.FILE, None]
    assert place.source.with_location(location / "empty" / "below").read_kind() is None


def test_a_listing_has_names_and_kinds_sorted(place: Place) -> None:
    listing = place.source.listing()
    assert list(listing) == list(listing.names) == ["config.json", "empty", "model"] and len(listing) == 3
    assert (listing.files(), listing.directories()) == (["config.json", "empty"], ["model"])
    assert listing.is_file("model/.metadata") and listing.has("model/.metadata") and listing.has("model")
    assert not listing.is_file("model") and listing.is_directory("model") and not listing.is_link("model")
    for name in ("none", "none/.metadata", "model/none", "config.json/x", ""):
        assert not listing.has(name) and listing.kind(name) is None, name
    assert list(listing.subdirectory("model")) == [".metadata", "a.distcp"]


@pytest.mark.parametrize("name", ["none", "config.json", "model/none"])
def test_what_is_no_directory_is_not_listed(place: Place, name: str) -> None:
    with pytest.raises(InputError, match=name):
        place.source.with_location(place.source.location / name).listing()
    with pytest.raises(InputError):
        place.source.listing().subdirectory(name)


def test_a_listing_remembers_and_a_fresh_source_looks_again(place: Place) -> None:
    source = place.source
    assert "late" not in source.listing()
    source.with_location(source.location / "model").listing()
    place.write("late", b"")
    place.write("model/late", b"")
    assert "late" not in source.listing() and not source.listing().has("model/late")
    assert "late" in source.without_cache().listing() and source.without_cache().listing().has("model/late")
    assert source.without_cache().location == source.location


def test_more_names_than_any_checkpoint_has_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ckptx.storage.local", "tests.support.memory_storage"):
        monkeypatch.setattr(f"{module}.MAX_LISTED_NAMES", 3)
    assert len(place.source.listing()) == 3
    place.write("one more", b"")
    with pytest.raises(InputError, match="contains more than 3 files, the limit"):
        place.source.listing()


def test_reads_by_position(place: Place) -> None:
    with place.source.open() as files:
        assert files.root == place.source.location
        assert files.size("model/a.distcp") == 256 and files.size("empty") == 0
        assert files.read("model/a.distcp", 10, 3) == bytes([10, 11, 12])
        assert files.read_up_to("model/a.distcp", 250, 100) == bytes(range(250, 256))
        assert files.read_up_to("model/a.distcp", 300, 5) == files.read("empty", 0, 0) == b""
        files.hint_reads([("model/a.distcp", 0, 4), ("empty", 0, 0)])
        first, second = bytearray(4), bytearray(300)
        assert files.read_into("model/a.distcp", 2, [first, memoryview(second)]) == 254
        assert bytes(first) == bytes([2, 3, 4, 5]) and bytes(second[:250]) == bytes(range(6, 256))
        assert files.read_into("model/a.distcp", 256, [first]) == 0


def test_a_short_file_is_named_with_both_positions(place: Place) -> None:
    with (
        place.source.open() as files,
        pytest.raises(InputError, match="ends at byte 256, expected at least 260; the file"),
    ):
        files.read("model/a.distcp", 200, 60)


@pytest.mark.parametrize("name", ["none", "model/none"])
def test_a_missing_file(place: Place, name: str) -> None:
    source = place.source
    with source.open() as files:
        reads = (
            files.size,
            files.identity,
            lambda name: files.read(name, 0, 1),
            lambda name: source.read_head(name, 1),
        )
        for read in (*reads, source.size, lambda name: source.read_small(name, 9)):
            with pytest.raises(InputError, match=f"{name}: no such file; the checkpoint is incomplete"):
                read(name)
    assert source.read_identities([name, "empty"]).keys() == {"empty"}


def test_a_directory_is_no_file(place: Place) -> None:
    source = place.source
    with source.open() as files:
        for read in (files.size, lambda name: source.read_head(name, 1), lambda name: source.read_small(name, 9)):
            with pytest.raises(InputError, match="model: expected a regular file, found a directory"):
                read("model")
    assert source.read_identities(["model"]) == {}


@pytest.mark.parametrize("name", ["../beside", "/etc/passwd", "model/../../x"])
def test_names_that_lead_out(place: Place, name: str) -> None:
    with place.source.open() as files, pytest.raises(InputError, match="leads out of the checkpoint directory"):
        files.size(name)


def test_small_files_are_read_whole(place: Place) -> None:
    source = place.source
    assert source.read_small("model/a.distcp", 256) == bytes(range(256)) and source.read_small("empty", 0) == b""
    assert source.read_head("model/a.distcp", 3) == bytes(range(3)) and source.read_head("config.json", 99) == b"{}"
    assert source.size("model/a.distcp") == StoredFile(source, "model/a.distcp").size == 256
    source.refuse_large("model/a.distcp", 256)
    for refuse in (source.refuse_large, source.read_small):
        with pytest.raises(InputError, match="has 256 bytes, the limit is 255; restore the file from a copy"):
            refuse("model/a.distcp", 255)


def test_an_identity_tells_states_apart(place: Place) -> None:
    source, name = place.source, "model/a.distcp"
    before = source.read_identities([name, "empty"])
    with source.open(before) as files:
        assert files.identity(name) == before[name] == place.source.read_identities([name])[name]
        assert before[name].nbytes == 256 and before[name].has_same_contents(files.identity(name))
    assert before[name] != before["empty"] and not before[name].has_same_contents(before["empty"])
    place.write(name, bytes(255))
    after = source.read_identities([name])[name]
    assert after != before[name] and not after.has_same_contents(before[name]) and after.version != before[name].version
    with source.open(before) as files, pytest.raises(InputError, match="changed while it was being read"):
        files.read(name, 0, 1)
    with source.open(before) as files:
        assert files.size("empty") == 0


def test_the_other_spellings_of_a_place_lead_to_it(place: Place) -> None:
    source = place.source
    for location in source.absolute_locations():
        assert source.with_location(location).listing().names == source.listing().names
    assert source.absolute_locations("model/a.distcp")[-1] == source.absolute_locations()[-1] / "model" / "a.distcp"


def test_only_a_local_location_has_a_path(tmp_path: Path) -> None:
    assert local_path(tmp_path) is tmp_path
    with pytest.raises(UnsupportedError, match="memory:/x: not on a local disk; copy it to one and pass that path"):
        local_path(MemoryPath("/x"))


def test_a_source_goes_to_another_process(tmp_path: Path) -> None:
    source = LocalSource(tmp_path)
    source.listing()
    (tmp_path / "late").touch()
    for copied in (pickle.loads(pickle.dumps(source)), copy.deepcopy(source)):
        assert copied.location == tmp_path and "late" in copied.listing()


def test_a_run_is_resumed_though_the_disk_of_its_source_was_mounted_again(tmp_path: Path) -> None:
    """The number of a device may be another one then; that of another file never is the same."""
    source = open_checkpoint(write_hf(tmp_path / "hf", llama()))
    states = collect_identities(source).describe_tensor_files()
    (name,) = source.files
    identity = source.identities[name]
    for changed, is_same in (
        ({"device": 1}, True),
        ({"inode": 1}, False),
        ({"mtime_ns": 1}, False),
        ({"nbytes": 1}, False),
    ):
        source.identities[name] = identity._replace(**changed)
        assert (collect_identities(source).describe_tensor_files() == states) == is_same


def test_listings_that_are_many_are_not_all_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a search does not grow with the tree that is searched."""
    monkeypatch.setattr("ckptx.storage.local.MAX_CACHED_NAMES", 25)
    for number in range(10):
        for file in range(10):
            (tmp_path / f"{number}").mkdir(exist_ok=True)
            (tmp_path / f"{number}" / f"{file}").touch()
    source = LocalSource(tmp_path)
    for name in source.listing().directories():
        assert len(source.with_location(tmp_path / name).listing()) == 10
    assert source._listings._name_count <= 25 and len(source._listings._listings) <= 3


def test_a_million_files_below_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing is asked for one directory at a time, and not at all for what a name above decides."""
    root = MemoryPath("/here").without_cache()
    for name in ("model/.metadata", "cache/deep/er/x", "optim/y"):
        (root / name).write_bytes(b"")
    assert root.listing().is_file("model/.metadata") and root.listing().has("cache")
    assert not root.listing().has("logs/x")
    assert [str(path) for path in root.store.listed] == ["/here", "/here/model"]


@pytest.mark.parametrize("written", ["hf", "dcp"])
def test_a_checkpoint_in_memory_is_seen_as_a_model(written: str) -> None:
    """Whatever looks at headers alone asks for no path of a local disk."""
    place = MemoryPath("/run")
    write = write_hf if written == "hf" else write_dcp
    write(place, llama(), config=LLAMA)
    view = view_model(open_checkpoint(place))
    assert count_parameters(view).count == 1960 and not view.notes
    assert read_valid_manifest(view.catalog, []) is None


# ------------------------------------------------------------------------------------------------------------- outputs


@pytest.fixture(params=["local", "memory"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> OutputTree:
    return DirectoryHandle.open_path(tmp_path) if request.param == "local" else MemoryTree(MemoryPath("/out"))


def test_a_file_is_written_and_read_by_position(tree: OutputTree) -> None:
    file = tree.open_output("model/a.distcp", 12)
    file.write(b"world", 7)
    file.write(memoryview(b"hello, "), 0)
    buffer = bytearray(20)
    assert (file.size, file.read(5, 7), file.read(99, 7), file.read(5, 12)) == (12, b"world", b"world", b"")
    assert file.read_into(memoryview(buffer), 2) == 10 and bytes(buffer[:10]) == b"llo, world"
    file.truncate(5)
    assert (file.size, file.read(99, 0)) == (5, b"hello")
    file.truncate(9)
    assert file.size == 5


def test_a_file_that_is_there_is_kept_only_when_asked_for(tree: OutputTree) -> None:
    tree.open_output("a", 8).write(b"12345678", 0)
    with pytest.raises(OutputError, match="cannot be opened: File exists"):
        tree.open_output("a", 8)
    assert tree.open_output("a", 5, keep=True).read(99, 0) == b"12345"
    note = tree.open_output("note", None, keep=True)
    note.write(b"x", 0)
    note.close()


@pytest.mark.parametrize("name", ["../a", "/a"])
def test_an_output_does_not_lead_out(tree: OutputTree, name: str) -> None:
    with pytest.raises(CkptxError, match="leads out of"):
        tree.open_output(name, 1)


def test_a_full_storage_in_memory() -> None:
    tree = MemoryTree(MemoryPath("/out", Store(room=3)))
    file = tree.open_output("a", 8)
    file.write(b"123", 0)
    with pytest.raises(SpaceError, match="memory:/out/a: No space left"):
        file.write(b"4", 3)
