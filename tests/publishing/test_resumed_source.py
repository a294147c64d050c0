"""A source that is rewritten before `--resume`, or during one run: never a copy of two states."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptx
from ckptx.errors import CkptxError, InputError
from ckptx.publishing import publish as publish_module
from ckptx.publishing import source_contents
from ckptx.storage import files as files_module
from ckptx.storage import open_file
from tests.support.checkpoint_writers import LLAMA, Value, flip, llama, names_in, tree_bytes, write_dcp, write_hf

CONFIG = LLAMA | {"hidden_size": 32, "intermediate_size": 24, "vocab_size": 16, "num_hidden_layers": 2,
                  "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}  # fmt: skip
TENSORS = llama(hidden=32, dtype="F32")
OTHER: dict[str, Value] = {name: (d, s, bytes(reversed(data))) for name, (d, s, data) in TENSORS.items()}
OTHER = {name: (d, s, bytes(byte & 0x3F for byte in data)) for name, (d, s, data) in OTHER.items()}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# ------------------------------------------------------------------------------------------------- sources

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FILES = {
    "hf": (*SHARDS, "model.safetensors.index.json"),
    "dcp": ("__0_0.distcp", "__1_0.distcp", ".metadata"),
    "sharded": ("shard-00001-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors"),
}
BESIDE = ("config.json", "tokenizer.json")
# What is made of which source: source, command, options.
MAKES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dcp of hf": ("hf", "hf2dcp", {}),
    "cut dcp of hf": ("hf", "hf2dcp", {"tp": 2}),
    "torchtitan of hf": ("hf", "hf2dcp", {"names": "torchtitan"}),
    "cast dcp of hf": ("hf", "hf2dcp", {"dtype": "bf16"}),
    "shards of hf": ("hf", "reshard", {"tp": 2, "to": "safetensors"}),
    "hf of dcp": ("dcp", "dcp2hf", {}),
    "dcp of dcp": ("dcp", "reshard", {"tp": 2}),
    "hf of sharded": ("sharded", "dcp2hf", {}),
}


def write(root: Path, kind: str, tensors: dict[str, Value], config: dict[str, Any] = CONFIG) -> Path:
    if kind == "hf":
        write_hf(root, tensors, shards=2, config=config)
    elif kind == "dcp":
        write_dcp(root, tensors, files=2, config=config)
    else:
        plain = write_hf(root.parent / f"{root.name}-plain", tensors, config=config)
        ckptx.reshard(plain, root, tp=2, to="safetensors")
        (root / "ckptx.json").unlink()
    (root / "tokenizer.json").write_bytes(b'{"a": 1000000}')
    return root


def make(what: str, source: Path, dst: Path, **more: Any) -> Any:
    _, command, options = MAKES[what]
    if command == "reshard":
        return ckptx.reshard(source, dst, workers=1, **options, **more)
    return ckptx.convert(command, source, dst, workers=1, **options, **more)


# ------------------------------------------------------------------------------------------------- rewriting

HOW: dict[str, Callable[[Path, bytes], None]] = {}


def _how(function: Callable[[Path, bytes], None]) -> Callable[[Path, bytes], None]:
    HOW[function.__name__[1:].replace("_", " ")] = function
    return function


def _keeping_times(path: Path, change: Callable[[], object]) -> None:
    found = path.stat()
    change()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@_how
def _rewritten_in_place_with_its_time(path: Path, data: bytes) -> None:
    """As `rsync --inplace --times` does, or `touch -r` afterwards."""

    def rewrite() -> None:
        with path.open("r+b") as file:
            file.write(data)
            file.truncate()

    _keeping_times(path, rewrite)


@_how
def _one_byte_flipped_in_place_with_its_time(path: Path, data: bytes) -> None:
    _keeping_times(path, lambda: flip(path, -3, 0x04))


@_how
def _replaced_by_a_file_of_the_same_time(path: Path, data: bytes) -> None:
    found = path.stat()
    path.with_name("new").write_bytes(data)
    os.utime(path.with_name("new"), ns=(found.st_atime_ns, found.st_mtime_ns))
    os.replace(path.with_name("new"), path)


@_how
def _rewritten(path: Path, data: bytes) -> None:
    path.write_bytes(data)


@_how
def _another_mode(path: Path, data: bytes) -> None:
    path.chmod(0o640)


@_how
def _a_hard_link(path: Path, data: bytes) -> None:
    os.link(path, path.parent.parent / f"linked-{path.name}")


@_how
def _another_time(path: Path, data: bytes) -> None:
    os.utime(path, ns=(1, 1))


HARMLESS = ("another mode", "a hard link")


def other_bytes(source: Path, other: Path, name: str) -> bytes:
    """What a file is rewritten with: that of the other checkpoint, or a text of the same length that says more."""
    if name == "config.json":
        config = json.loads((source / name).read_text()) | {"num_attention_heads": 2, "num_key_value_heads": 2}
        return (json.dumps(config | {"head_dim": 16}, indent=2) + "\n").encode()
    if name == "tokenizer.json":
        return b'{"b": 2000000}'
    return (other / name).read_bytes()


def interrupted(after: int, run: Callable[[], object]) -> None:
    """Runs until `after` writes are done, then as Ctrl-C would."""
    left, real = [after], open_file.write_at

    def failing(descriptor: int, data: memoryview | bytes, offset: int, path: Path) -> None:
        left[0] -= path.parent.name == "tree"
        if left[0] < 0:
            raise KeyboardInterrupt
        real(descriptor, data, offset, path)

    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(open_file, "write_at", failing)
        run()


CASES = [
    (what, name, how, after)
    for what, (kind, _, _) in MAKES.items()
    for name, how, after in product((*FILES[kind], *BESIDE), HOW, (0, 1, 2, 3, 5, 1000))
]


def small_buffers(patch: pytest.MonkeyPatch) -> None:
    """Files are written in pieces of 4 KiB and journaled after each, so that there is something to take over."""
    from ckptx.transfer import step_range_copier

    patch.setattr(step_range_copier, "_MIN_BUFFER_NBYTES", 4 << 10)
    patch.setattr(step_range_copier, "BUFFER_NBYTES", 8 << 10)


@pytest.mark.sampled(60)
@pytest.mark.parametrize(("what", "name", "how", "after"), CASES)
def test_a_resumed_run_makes_what_a_fresh_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, name: str, how: str, after: int
) -> None:
    small_buffers(monkeypatch)
    kind = MAKES[what][0]
    source = write(tmp_path / "in" / "source", kind, TENSORS)
    other = write(tmp_path / "in" / "other", kind, OTHER)
    interrupted(after, lambda: make(what, source, tmp_path / "out" / "made"))
    HOW[how](source / name, other_bytes(source, other, name))
    refused = None
    try:
        make(what, source, tmp_path / "out" / "made", resume=True)
    except CkptxError as error:
        refused = error
    try:
        make(what, source, tmp_path / "fresh")
    except InputError:  # the present source is damaged, and no run may take it for a whole one
        assert refused is not None
        return
    if refused is None:
        assert tree_bytes(tmp_path / "out" / "made") == tree_bytes(tmp_path / "fresh")
    else:  # the output of the first run was complete, and is not replaced by another one unasked
        assert after == 1000 and refused.exit_code == 5 and how not in HARMLESS, refused


@pytest.mark.parametrize("what", MAKES)
@pytest.mark.parametrize("how", HARMLESS)
def test_what_is_as_it_was_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, how: str) -> None:
    small_buffers(monkeypatch)
    source = write(tmp_path / "in" / "source", MAKES[what][0], TENSORS)
    interrupted(4, lambda: make(what, source, tmp_path / "out"))
    for name in FILES[MAKES[what][0]]:
        HOW[how](source / name, b"")
    report = make(what, source, tmp_path / "out", resume=True)
    fresh = make(what, source, tmp_path / "fresh")
    assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "fresh")
    assert report.bytes_written < fresh.bytes_written, "nothing was taken over"


def test_the_cases_would_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected defect: what is taken over is believed without a look at the source."""
    from ckptx.transfer import step_range_copier

    small_buffers(monkeypatch)

    class Believed(step_range_copier.DigestSink):
        @property
        def digest(self) -> Any:
            return type(
                "Any",
                (),
                {"leaves": _EqualToAll(), "leaf_remaining": self._tree.leaf_remaining, "update": self._tree.update},
            )()

        @digest.setter
        def digest(self, tree: Any) -> None:
            self._tree = tree

    class _EqualToAll(list[bytes]):
        def __ne__(self, other: object) -> bool:
            return False

    monkeypatch.setattr(step_range_copier, "DigestSink", Believed)
    source = write(tmp_path / "in" / "source", "hf", TENSORS)
    other = write(tmp_path / "in" / "other", "hf", OTHER)
    interrupted(5, lambda: make("dcp of hf", source, tmp_path / "out"))
    for name in SHARDS:
        HOW["rewritten in place with its time"](source / name, (other / name).read_bytes())
    make("dcp of hf", source, tmp_path / "out", resume=True)
    make("dcp of hf", source, tmp_path / "fresh")
    assert tree_bytes(tmp_path / "out") != tree_bytes(tmp_path / "fresh"), "the fault was not injected"


@pytest.mark.sampled(30)
@pytest.mark.parametrize("after", [1, 3, 5, 1000])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", *SHARDS])
def test_a_base_that_changed_between_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str, after: int
) -> None:
    small_buffers(monkeypatch)
    source = write_dcp(tmp_path / "in" / "source", TENSORS, files=2)
    base = write(tmp_path / "in" / "base", "hf", TENSORS)
    other = write(tmp_path / "in" / "other", "hf", OTHER)
    run = {"base": str(base), "names": "model", "dtype": "base"}
    interrupted(after, lambda: make("hf of dcp", source, tmp_path / "out", **run))
    HOW[how](base / name, other_bytes(base, other, name))
    try:
        make("hf of dcp", source, tmp_path / "out", resume=True, **run)
    except CkptxError as error:
        if error.exit_code == 3:
            with pytest.raises(InputError):
                make("hf of dcp", source, tmp_path / "fresh", **run)
        assert error.exit_code == 3 or (after == 1000 and how not in HARMLESS)
        return
    make("hf of dcp", source, tmp_path / "fresh", **run)
    assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "fresh")


OPTIONS: list[dict[str, Any]] = [
    {}, {"dtype": "bf16"}, {"dtype": "fp16"}, {"names": "torchtitan"}, {"names": "model"}, {"prefix": "model."},
    {"tp": 2}, {"tp": 2, "pp": 2}, {"files": 2}, {"tied": "copy"},
]  # fmt: skip


@pytest.mark.sampled(40)
@pytest.mark.parametrize("after", [1, 4, 1000])
@pytest.mark.parametrize(("first", "second"), list(product(range(len(OPTIONS)), repeat=2)))
def test_options_that_changed_between_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, second: int, after: int
) -> None:
    small_buffers(monkeypatch)
    source = write(tmp_path / "source", "hf", {name: (d, s, bytes(len(b))) for name, (d, s, b) in TENSORS.items()})
    interrupted(after, lambda: ckptx.convert("hf2dcp", source, tmp_path / "out", workers=1, **OPTIONS[first]))
    try:
        ckptx.convert("hf2dcp", source, tmp_path / "out", resume=True, **OPTIONS[second])
    except CkptxError as error:
        assert after == 1000 and error.exit_code == 5 and first != second
        return
    ckptx.convert("hf2dcp", source, tmp_path / "fresh", **OPTIONS[second])
    assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "fresh")


# ------------------------------------------------------------------------------------------------- one run


@pytest.mark.sampled(40)
@pytest.mark.parametrize("moment", ["opened", "first write", "copied"])
@pytest.mark.parametrize(
    ("what", "name", "how"),
    [(what, name, how) for what, (kind, _, _) in MAKES.items() for name in (*FILES[kind], *BESIDE) for how in HOW],
)
def test_a_change_during_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, name: str, how: str, moment: str
) -> None:
    """A run is refused, or its output is what a fresh one makes of the present source; a mode is no reason."""
    kind = MAKES[what][0]
    source = write(tmp_path / "in" / "source", kind, TENSORS)
    other = write(tmp_path / "in" / "other", kind, OTHER)
    data, left = other_bytes(source, other, name), [1]

    def change() -> None:
        if left:
            left.clear()
            time.sleep(0.01)  # a change time of its own, where the clock of the file system ticks every few ms
            HOW[how](source / name, data)

    def before(module: Any, function: str) -> None:
        real = getattr(module, function)

        def called(*arguments: Any, **named: Any) -> Any:
            change()
            return real(*arguments, **named)

        monkeypatch.setattr(module, function, called)

    if moment == "opened":
        before(publish_module, "collect_identities")
    elif moment == "first write":
        before(open_file, "write_at")
    else:
        before(publish_module, "require_unchanged")
    try:
        make(what, source, tmp_path / "out" / "made")
    except CkptxError as error:
        assert error.exit_code == 3 and "\n" not in str(error)
        assert how not in HARMLESS, error
        assert names_in(tmp_path / "out") == []
        return
    finally:
        monkeypatch.undo()
    assert not left
    make(what, source, tmp_path / "fresh")
    assert tree_bytes(tmp_path / "out" / "made") == tree_bytes(tmp_path / "fresh")


@given(st.integers(0, 3), st.integers(8, 4000), st.sampled_from(SHARDS))
@settings(max_examples=25, deadline=None)
def test_a_file_system_whose_change_time_says_nothing(
    tmp_path_factory: pytest.TempPathFactory, after: int, at: int, name: str
) -> None:
    """Between two runs the contents decide alone: size, times and inode are all what they were."""
    tmp_path = tmp_path_factory.mktemp("lying")
    source = write(tmp_path / "source", "hf", TENSORS)
    with pytest.MonkeyPatch.context() as patch:
        small_buffers(patch)
        real = files_module.LocalFileIdentity.from_stat.__func__  # type: ignore[attr-defined]
        patch.setattr(
            files_module.LocalFileIdentity,
            "from_stat",
            classmethod(lambda cls, found: real(cls, found)._replace(ctime_ns=0)),
        )
        interrupted(after, lambda: make("dcp of hf", source, tmp_path / "out"))
        _keeping_times(source / name, lambda: flip(source / name, -at, 0x02))
        make("dcp of hf", source, tmp_path / "out", resume=True)
        make("dcp of hf", source, tmp_path / "fresh")
    assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "fresh")


def test_nothing_is_read_twice_where_nobody_touched_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "source", "hf", TENSORS)
    monkeypatch.setattr(source_contents, "open_checkpoint", lambda path: pytest.fail("opened once more"))
    monkeypatch.setattr(source_contents, "digest_tensor", lambda *given: pytest.fail("read once more"))
    make("dcp of hf", source, tmp_path / "out")
    shutil.rmtree(tmp_path / "out")


def _dcp_with_recorded_dtypes(root: Path) -> tuple[Path, str, str]:
    """A DCP of NeMo AutoModel, the file with the dtypes of its model, and what that may be rewritten with."""
    write_dcp(root, TENSORS, files=2)
    metadata = root / ".hf_metadata"
    metadata.mkdir()
    (metadata / "config.json").write_text(json.dumps(CONFIG))
    name = ".hf_metadata/fqn_to_dtype_mapping.json"
    (root / name).write_text(json.dumps(dict.fromkeys(TENSORS, "BF16")))
    return root, name, json.dumps(dict.fromkeys(TENSORS, "F16"))


def _dcp_with_a_manifest(root: Path) -> tuple[Path, str, str]:
    """A DCP that ckptx wrote, its manifest, and the same with other names of the original files."""
    ckptx.convert("hf2dcp", write(root.with_name("hf"), "hf", TENSORS), root)
    text = (root / "ckptx.json").read_text()
    return root, "ckptx.json", text.replace("-of-00002", "-of-00003").replace("model-00002-", "model-00003-")


@pytest.mark.parametrize("how", ["rewritten in place with its time", *HARMLESS])
@pytest.mark.parametrize("prepare", [_dcp_with_recorded_dtypes, _dcp_with_a_manifest])
def test_a_file_that_decides_what_is_written_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Path], tuple[Path, str, str]], how: str
) -> None:
    """Neither file is copied, so that only its digest tells whether the source still has the contents that were used.

    A change of the mode or of the links alone is no reason to refuse it.
    """
    (tmp_path / "in").mkdir()
    source, name, text = prepare(tmp_path / "in" / "source")
    data = text.encode().ljust((source / name).stat().st_size)
    options = {"dtype": "base"} if "dtype" in name else {}
    ckptx.convert("dcp2hf", source, tmp_path / "fresh", **options)
    real = publish_module.execute

    def executed(*arguments: Any, **named: Any) -> Any:
        result = real(*arguments, **named)
        time.sleep(0.01)  # a change time of its own, see above
        HOW[how](source / name, data)
        return result

    monkeypatch.setattr(publish_module, "execute", executed)
    if how not in HARMLESS:
        with pytest.raises(InputError, match=f"{Path(name).name}: changed while it was being read"):
            ckptx.convert("dcp2hf", source, tmp_path / "out" / "made", **options)
        assert names_in(tmp_path / "out") == []
        return
    ckptx.convert("dcp2hf", source, tmp_path / "out" / "made", **options)
    assert tree_bytes(tmp_path / "out" / "made") == tree_bytes(tmp_path / "fresh")
