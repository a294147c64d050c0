"""Source files that are replaced or rewritten at any moment, and ranks that see different sources: never a copy of two
states, never a success."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptx
from ckptx.conversion.steps import open_source
from ckptx.errors import CkptxError, InputError, OutputError, SpaceError
from ckptx.formats.dcp import reader as dcp
from ckptx.formats.hf import reader as huggingface
from ckptx.formats.registry import open_checkpoint
from ckptx.publishing import publish as publish_module
from ckptx.publishing.source_state import describe_source, is_same_source
from ckptx.publishing.staging import Staging
from ckptx.storage.files import FilePool
from tests.support.checkpoint_writers import LLAMA, Value, llama, names_in, write_dcp, write_hf
from tests.support.ranks import finish, start

TENSORS = llama(layers=1, hidden=32)
OTHER: dict[str, Value] = {name: (dtype, shape, bytes(len(data))) for name, (dtype, shape, data) in TENSORS.items()}
TIME = 10**18


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power here, and waiting for the disk would be most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def written(root: Path, kind: str, tensors: dict[str, Value] = TENSORS) -> Path:
    """A source with a sidecar, all files of one time."""
    write_hf(root, tensors, shards=2) if kind == "hf" else write_dcp(root, tensors, config=LLAMA)
    (root / "tokenizer.json").write_bytes(b"{}")
    for path in root.iterdir():
        os.utime(path, ns=(TIME, TIME))
    return root


FILES = {
    "hf": ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"),
    "dcp": ("__0_0.distcp", ".metadata"),
}
BESIDE = ("config.json", "tokenizer.json")
CASES = [(kind, name) for kind, names in FILES.items() for name in (*names, *BESIDE)]

HOW: dict[str, Callable[[Path, Path], None]] = {}


def _how(function: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    HOW[function.__name__[1:].replace("_", " ")] = function
    return function


@_how
def _replaced_by_one_of_equal_size_and_time(path: Path, other: Path) -> None:
    shutil.copy2(other, path.with_name("new"))
    os.replace(path.with_name("new"), path)


@_how
def _rewritten_in_place(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


@_how
def _grown(path: Path, other: Path) -> None:
    with path.open("ab") as file:
        file.write(b" ")


@_how
def _removed(path: Path, other: Path) -> None:
    path.unlink()


@_how
def _replaced_by_a_pipe(path: Path, other: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _at(moment: str, patch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Has `change` happen at a moment of the next conversion."""

    def after(module: Any, name: str) -> None:
        real = getattr(module, name)

        def called(*arguments: Any, **named: Any) -> Any:
            result = real(*arguments, **named)
            change()
            return result

        patch.setattr(module, name, called)

    if moment == "while it is opened":
        after(huggingface, "read_header")
        after(dcp, "parse_own_metadata")
    elif moment == "between header and copy":
        after(open_source, "open_checkpoint")
    else:
        after(publish_module, "execute")


@pytest.mark.parametrize("moment", ["while it is opened", "between header and copy", "after the copy"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, how: str, moment: str
) -> None:
    source = written(tmp_path / "in" / "source", kind)
    other = written(tmp_path / "in" / "other", kind, OTHER)
    direction = "hf2dcp" if kind == "hf" else "dcp2hf"
    ckptx.convert(direction, source, tmp_path / "in" / "undisturbed")
    if name in FILES[kind][-1:] or name in BESIDE:
        (other / name).write_bytes((source / name).read_bytes()[:-1] + b" ")
        os.utime(other / name, ns=(TIME, TIME))
    left = [lambda: HOW[how](source / name, other / name)]
    _at(moment, monkeypatch, lambda: left.pop()() if left else None)
    (tmp_path / "out").mkdir()
    try:
        ckptx.convert(direction, source, tmp_path / "out" / "made")
    except CkptxError as error:
        assert error.exit_code == 3
        assert "\n" not in str(error)
        assert names_in(tmp_path / "out") == []
    else:  # one whole state, that which was there before it was opened any further
        assert moment == "while it is opened"
        assert ckptx.verify(source, tmp_path / "out" / "made").exit == 0


@pytest.mark.parametrize("kind", FILES)
def test_every_file_that_is_read_or_carried_is_recorded(tmp_path: Path, kind: str) -> None:
    source = written(tmp_path / "source", kind)
    assert set(open_checkpoint(source).identities) == set(names_in(source))


def test_a_base_that_changes_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = written(tmp_path / "in" / "base", "hf")
    source = write_dcp(tmp_path / "in" / "dcp", TENSORS)
    for name in BESIDE:
        with monkeypatch.context() as patch:
            _at("after the copy", patch, lambda name=name: (base / name).write_text("{ }"))  # type: ignore[misc]
            with pytest.raises(InputError, match="changed while it was being read"):
                ckptx.convert("dcp2hf", source, tmp_path / "out", base=str(base))
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", FILES)
def test_a_source_replaced_before_a_resumed_run_is_copied_from_its_begin(tmp_path: Path, kind: str) -> None:
    """Files of equal names, sizes and times."""
    source = written(tmp_path / "in" / "source", kind)
    direction = "hf2dcp" if kind == "hf" else "dcp2hf"

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckptx.convert(direction, source, tmp_path / "out", on_progress=interrupt)
    other = written(tmp_path / "in" / "other", kind, OTHER)
    for name in FILES[kind]:
        os.replace(other / name, source / name)
    ckptx.convert(direction, source, tmp_path / "out", resume=True)
    assert ckptx.verify(source, tmp_path / "out").exit == 0


# ------------------------------------------------------------------------------------------------- ranks


def seen(root: Path, *more: str) -> dict[str, str]:
    """What a rank on another machine says of a source."""
    source = open_checkpoint(root)
    with FilePool(source.root, source.identities) as files:
        return {**describe_source(source, files, *more), "mount": ""}


@pytest.mark.parametrize("kind", FILES)
def test_ranks_with_copies_of_one_source_agree(tmp_path: Path, kind: str) -> None:
    here, there = written(tmp_path / "here", kind), written(tmp_path / "there", kind)
    assert is_same_source(seen(here, "plan"), seen(there, "plan"))
    assert not is_same_source(seen(here, "plan"), seen(there, "another plan"))


@given(
    st.sampled_from(list(FILES)),
    st.sampled_from(list(TENSORS)),
    st.sampled_from(["bytes", "names", "config"]),
    st.data(),
)
@settings(max_examples=40, deadline=None)
def test_ranks_with_sources_of_equal_size_and_time_disagree(
    tmp_path_factory: pytest.TempPathFactory, kind: str, name: str, what: str, data: st.DataObject
) -> None:
    tmp_path = tmp_path_factory.mktemp("ranks")
    tensors = dict(TENSORS)
    if what == "bytes":
        dtype, shape, _ = tensors[name]
        tensors[name] = dtype, shape, OTHER[name][2]
    elif what == "names":
        same = [other for other, value in TENSORS.items() if value[:2] == TENSORS[name][:2]]
        twin = data.draw(st.sampled_from(same))
        tensors[name], tensors[twin] = tensors[twin], tensors[name]
    here, there = written(tmp_path / "here", kind), written(tmp_path / "there", kind, tensors)
    if what == "config":
        config = (there / "config.json").read_text()
        (there / "config.json").write_text(config.replace("false", "true "))
        os.utime(there / "config.json", ns=(TIME, TIME))
    same = tensors == TENSORS and what != "config"
    assert is_same_source(seen(here), seen(there)) == same
    sizes = [{path.name: path.stat().st_size for path in root.iterdir()} for root in (here, there)]
    assert sizes[0] == sizes[1]


def test_ranks_on_one_machine_see_the_very_same_files(tmp_path: Path) -> None:
    """Copies that are equal as far as anybody looks are different files, and may differ where nobody looked."""
    said = []
    for name in ("here", "there"):
        source = open_checkpoint(written(tmp_path / name, "hf"))
        with FilePool(source.root) as files:
            said.append(describe_source(source, files))
    assert said[0]["digest"] == said[1]["digest"] and said[0]["mount"]
    assert not is_same_source(*said) and is_same_source(said[0], said[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", [0, 1])
def test_processes_with_different_sources_end_with_one_code(tmp_path: Path, first: int) -> None:
    sources = [written(tmp_path / "in" / "a", "hf"), written(tmp_path / "in" / "b", "hf", OTHER)]
    (tmp_path / "out").mkdir()
    found = finish(start(*([sources[rank ^ first], tmp_path / "out/cut", "--tp", 2] for rank in range(2))))
    assert [code for code, _ in found] == [3, 3]
    assert all("the checkpoint or the options of rank 1 differ" in said for _, said in found)
    assert names_in(tmp_path / "out") == []


REPLACED = """
import os, sys
import ckptx.publishing.publish
from ckptx.cli.main import main
execute = ckptx.publishing.publish.execute
def tampered(plan, files, tree, journal, **named):
    outcome = execute(plan, files, tree, journal, **named)
    name = sorted(outcome.file_digests)[0]
    path = tree.path / name
    data = path.read_bytes()
    if sys.argv[-1] == "--resume":
        path.unlink()
    else:
        (tree.path.parent.parent / "new").write_bytes(data)
        os.replace(tree.path.parent.parent / "new", path)
    return outcome
ckptx.publishing.publish.execute = tampered
main()
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", [[], ["--resume"]], ids=["replaced", "removed"])
def test_a_file_of_any_rank_that_is_replaced_ends_all(tmp_path: Path, rank: int, how: list[str]) -> None:
    source = written(tmp_path / "in" / "a", "hf", llama())
    (tmp_path / "out").mkdir()
    arguments = [source, tmp_path / "out/cut", "--tp", 2, "--pp", 2, "--to", "dcp", *how]
    found = finish(start(arguments, arguments, codes={rank: REPLACED}))
    assert [code for code, _ in found] == [5, 5], found
    assert names_in(tmp_path / "out") == []


# ------------------------------------------------------------------------------------------------- locks

NO_LOCKS = ("ENOLCK", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EINVAL")
NO_FILE = ("EIO", "EBADF")


def without_flock(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def flock(descriptor: int, operation: int) -> None:
        number = getattr(errno, name)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("name", NO_LOCKS)
def test_a_file_system_without_locks_is_written_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = written(tmp_path / "in" / "source", "hf")
    ckptx.convert("hf2dcp", source, tmp_path / "in" / "locked")
    without_flock(monkeypatch, name)
    report = ckptx.convert("hf2dcp", source, tmp_path / "out" / "made")
    (note,) = [note for note in report.notes if "lock" in note]
    assert note == (
        f"{tmp_path / 'out'}: the file system has no locks; a concurrent run that writes made would not be detected"
    )
    assert names_in(tmp_path / "out") == ["made"]
    for path in (tmp_path / "in" / "locked").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / "made" / path.name).read_bytes()


@pytest.mark.parametrize("name", NO_FILE)
def test_a_lock_that_cannot_be_tried_is_an_error_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = written(tmp_path / "in" / "source", "hf")
    (tmp_path / "out").mkdir()
    without_flock(monkeypatch, name)
    with pytest.raises(OutputError, match="cannot be locked") as refused:
        ckptx.convert("hf2dcp", source, tmp_path / "out" / "made")
    assert "\n" not in str(refused.value)
    assert names_in(tmp_path / "out") == []


@pytest.mark.parametrize("who", ["first", "last"])
def test_without_locks_only_the_run_that_came_last_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Whichever of two comes to its end first; the one whose place was taken over says so and leaves all alone."""
    without_flock(monkeypatch, "ENOSYS")
    first, last = Staging(tmp_path / "out"), None
    first.begin(b"plan", resume=False)
    first.output.write("a", [b"first"])
    last = Staging(tmp_path / "out")
    last.begin(b"plan", resume=False)
    last.output.write("a", [b"last"])
    if who == "last":
        last.publish()
    with pytest.raises(OutputError, match="another ckptx is writing it, too"), first:
        first.publish()
    if who == "first":
        last.publish()
    assert names_in(tmp_path) == ["out"]
    assert (tmp_path / "out" / "a").read_bytes() == b"last"


def test_a_place_without_locks_that_cannot_be_signed_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_flock(monkeypatch, "ENOSYS")

    def full(file: object, data: bytes, offset: int) -> None:
        raise SpaceError("lock: no space left")

    monkeypatch.setattr("ckptx.publishing.staging.OpenFile.write", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SpaceError):
        Staging(tmp_path / "out")
    assert len(os.listdir("/proc/self/fd")) == before
    assert names_in(tmp_path) == []
