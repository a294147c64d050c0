"""Every field of a good manifest, changed one at a time: what is published is right, and what is ignored is said once.

After each change a conversion ends in one of four ways, and a test of each names the way it went:

* with the original files, as if nothing had been changed (the field decides nothing);
* with the same tensors in files that are called or ordered as the changed manifest says;
* as without a manifest, and with exactly one note about it;
* with a refusal, in one line that names the manifest, or as without a manifest.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ckptx
from ckptx.catalog.manifest_parser import parse_manifest
from ckptx.errors import CkptxError, InputError, exit_code_of
from tests.attacks.test_manifest_mutations import FIXTURES, At, Json, Tensors, as_model, holder_of, read_as_loaders_do
from tests.support.checkpoint_writers import tree_bytes

KINDS = ["untied/cut", "tied/dcp", "experts/sharded", "source_only/dcp"]
VALUES: list[Json] = [None, True, -1, 3, 1 << 70, "x", "0" * 32, [], {"x": 1}]
ROWS = 1
"""How many rows of tensors, files and cuts are changed: the first ones; the others are alike."""


class Ended(NamedTuple):
    """How a conversion ended: what it published, or None; its warnings, or the one refusal."""

    tree: dict[str, bytes] | None
    tensors: Tensors
    said: tuple[str, ...]

    @property
    def of_manifest(self) -> list[str]:
        return [each for each in self.said if "ckptx.json" in each]


def places(value: Json, at: At = ()) -> Iterator[At]:
    """The path of every field; of many rows the first ones."""
    if at:
        yield at
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys[:ROWS] if at and (len(keys) > 4 or isinstance(value, list)) else keys:
            yield from places(value[key], (*at, key))


def changed(manifest: Json, at: At) -> Iterator[tuple[str, str]]:
    """Each change of one field, in words, and the text of the manifest then."""
    for value in VALUES:
        new = copy.deepcopy(manifest)
        holder_of(new, at)[at[-1]] = value
        if new != manifest:
            yield f"is {value!r}", json.dumps(new)
    new = copy.deepcopy(manifest)
    del holder_of(new, at)[at[-1]]
    yield "is missing", json.dumps(new)
    new = copy.deepcopy(manifest)
    holder = holder_of(new, at)
    value = holder[at[-1]]
    if type(value) is int:
        for other in (value + 1, value - 1, value * 2 + 8):
            holder[at[-1]] = other
            yield f"is {other}", json.dumps(new)
    elif isinstance(value, list) and len(value) > 1:
        holder[at[-1]] = value[::-1]
        yield "is reversed", json.dumps(new)
        holder[at[-1]] = [*value, value[-1]]
        yield "has its last value twice", json.dumps(new)
    elif isinstance(value, dict) and value:
        holder[at[-1]] = {f"{name}x": each for name, each in value.items()}
        yield "has other keys", json.dumps(new)
    if isinstance(holder, dict):
        holder[at[-1]] = "<<twice>>"
        twice = f"{json.dumps(value)}, {json.dumps(at[-1])}: {json.dumps(value)}"
        yield "is there twice", json.dumps(new).replace('"<<twice>>"', twice)


def converted(source: Path, out: Path) -> Ended:
    shutil.rmtree(out, ignore_errors=True)
    try:
        report = ckptx.convert("dcp2hf", source, out)
    except CkptxError as error:
        assert exit_code_of(error) in (3, 4)
        assert not out.exists() and "\n" not in str(error)
        return Ended(None, {}, (str(error),))
    return Ended(tree_bytes(out), read_as_loaders_do(out), tuple(report.notes))


class Case:
    """One fixture of a checkpoint that ckptx wrote, and how it converts with and without its manifest."""

    def __init__(self, kind: str, root: Path) -> None:
        self.source, self.out = root / "source", root / "out"
        shutil.copytree(FIXTURES / kind, self.source)
        self.path = self.source / "ckptx.json"
        self.manifest = json.loads(self.path.read_text())
        self.original = FIXTURES / kind.split("/")[0] / "hf"
        self.wanted = as_model(read_as_loaders_do(self.original), self.original) if _has_config(self.original) else (
            read_as_loaders_do(self.original)
        )  # fmt: skip
        self.good = converted(self.source, self.out)
        self.path.unlink()
        self.bare = converted(self.source, self.out)
        assert self.good.tree is not None and not self.good.of_manifest

    def judge(self, text: str) -> str:
        """The way a conversion with this manifest ended."""
        self.path.write_text(text)
        ended = converted(self.source, self.out)
        assert len(set(ended.said)) == len(ended.said)
        if ended.tree is None:
            assert len(ended.of_manifest) == 1 or ended.said == self.bare.said
            return "refused"
        found = as_model(ended.tensors, self.out) if _has_config(self.out) else ended.tensors
        assert found == self.wanted
        if ended.of_manifest:
            assert len(ended.of_manifest) == 1
            assert ended.tree == self.bare.tree
            assert [each for each in ended.said if each not in ended.of_manifest] == list(self.bare.said)
            return "ignored"
        return "as before" if ended.tree == self.good.tree else "as it says"


def _has_config(root: Path) -> bool:
    return (root / "config.json").exists()


def cases() -> Iterator[Any]:
    for kind in KINDS:
        manifest = json.loads((FIXTURES / kind / "ckptx.json").read_text())
        for at in places(manifest):
            yield pytest.param(kind, at, id=f"{kind} {'.'.join(map(str, at))[:60]}")


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("kind", "at"), cases())
def test_each_field(kind: str, at: At, tmp_path: Path) -> None:
    case = Case(kind, tmp_path)
    ways: dict[str, list[str]] = {}
    for words, text in changed(case.manifest, at):
        ways.setdefault(case.judge(text), []).append(words)
    assert sum(map(len, ways.values())) >= len(VALUES)
    assert "refused" in ways or "ignored" in ways or at[0] in ("tool", "origin"), ways


BLOCKS = ("files", "offsets", "sizes")
CONTRADICTIONS: dict[str, Callable[[Json], None]] = {
    "a file smaller than its tensors": lambda m: m["files"][next(iter(m["files"]))].update(bytes=1),
    "more stages than layout.pp": lambda m: m["layout"].update(pp=1),
    "no stages for layout.pp": lambda m: m["layout"].update(stages=[]),
    "a stage that ends before it begins": lambda m: m["layout"]["stages"][0].insert(0, ["model.layers", 2, 1]),
    "a tie of other bytes": lambda m: m["tensors"]["lm_head.weight"].update(tied_to="model.embed_tokens.weight"),
    "a tie to itself": lambda m: m["tensors"]["lm_head.weight"].update(tied_to="lm_head.weight"),
    "a gap in a cut": lambda m: [m["cuts"][0][key].pop() for key in BLOCKS],
    "blocks of a cut twice": lambda m: [m["cuts"][0][key].append(m["cuts"][0][key][0]) for key in BLOCKS],
    "a replica of no block": lambda m: m["cuts"][0].update(replicas=[0]),
    "a cut of another shape": lambda m: m["tensors"]["lm_head.weight"].update(cut=2),
}  # fmt: skip


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_ignored_in_one_line(words: str, tmp_path: Path) -> None:
    case = Case("untied/cut", tmp_path)
    CONTRADICTIONS[words](case.manifest)
    text = json.dumps(case.manifest)
    with pytest.raises(InputError):
        parse_manifest(text.encode(), "ckptx.json")
    assert case.judge(text) == "ignored"
    for report in (
        ckptx.reshard(case.source, tmp_path / "again", tp=2),
        ckptx.inspect(case.source, ranks=True),
    ):
        assert sum("ckptx.json" in each for each in report.notes) == 1
    assert ckptx.verify(case.original, tmp_path / "again").exit == 0


def _link(path: Path, to: str) -> None:
    path.symlink_to(to)


def _sparse(path: Path, nbytes: int) -> None:
    path.touch()
    os.truncate(path, nbytes)


NO_FILES: dict[str, Callable[[Path], Any]] = {
    "/dev/zero": lambda path: _link(path, "/dev/zero"),
    "/dev/null": lambda path: _link(path, "/dev/null"),
    "/dev/stdin": lambda path: _link(path, "/dev/stdin"),
    "/dev/full": lambda path: _link(path, "/dev/full"),
    "a fifo": os.mkfifo,
    "a directory": lambda path: path.mkdir(),
    "a link to a directory": lambda path: _link(path, "."),
    "a link to nothing": lambda path: _link(path, "nowhere"),
    "a link to itself": lambda path: _link(path, "ckptx.json"),
    "10 GiB of nothing": lambda path: _sparse(path, 10 << 30),
    "one byte too large": lambda path: _sparse(path, (256 << 20) + 1),
    "a link below a file": lambda path: _link(path, "config.json/x"),
    "a link with a name that is too long": lambda path: _link(path, "x" * 300),
}
TEXTS = {
    "nothing": b"", "no JSON": b"{", "no UTF-8": b"\xff\xfe", "a list": b"[]", "a number": b"1", "null": b"null",
    "somebody's": b'{"a": 1}', "a newer version": b'{"ckptx": 2}', "a version that is none": b'{"ckptx": "1"}',
    "deep": b"[" * 100_000, "zeros": bytes(1 << 16), "a key twice": b'{"ckptx": 1, "ckptx": 1}', "cut short": None,
    "a pointer of git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}  # fmt: skip
COMMANDS: dict[str, Callable[[Path, Path, Path], Any]] = {
    "dcp2hf": lambda source, original, out: ckptx.convert("dcp2hf", source, out),
    "reshard": lambda source, original, out: ckptx.reshard(source, out, tp=2, to="dcp"),
    "inspect": lambda source, original, out: ckptx.inspect(source),
    "inspect --ranks": lambda source, original, out: ckptx.inspect(source, ranks=True),
    "diff": lambda source, original, out: ckptx.diff(original, source),
    "verify": lambda source, original, out: ckptx.verify(original, source),
}
READERS = ("dcp2hf", "reshard", "inspect --ranks")
"""Commands that read what a manifest says; the others only look at what kind of file it is."""


@pytest.mark.sampled(25)
@pytest.mark.parametrize("kind", ["untied/dcp", "untied/cut", "untied/sharded", "untied/hf"])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("what", [*NO_FILES, *TEXTS])
def test_a_manifest_that_is_none_is_said_once_and_never_in_the_way(
    kind: str, command: str, what: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / kind, source)
    path = source / "ckptx.json"
    whole = (FIXTURES / "untied/dcp/ckptx.json").read_bytes()
    path.unlink(missing_ok=True)
    if what in NO_FILES:
        NO_FILES[what](path)
    else:
        path.write_bytes(TEXTS[what] if TEXTS[what] is not None else whole[: len(whole) // 2])
    if kind == "untied/hf" and command == "dcp2hf":
        command = "reshard"
    report = COMMANDS[command](source, FIXTURES / "untied" / "hf", tmp_path / "out")
    assert report.exit == 0
    said = [each for each in report.notes if "ckptx.json" in each]
    is_read = kind != "untied/hf" and (command in READERS or kind == "untied/sharded")
    assert len(said) == (1 if what in NO_FILES or is_read else 0), report.notes
    assert all("ignored" in each and "\n" not in each for each in said)
    if (tmp_path / "out").exists():
        assert ckptx.verify(FIXTURES / "untied" / "hf", tmp_path / "out").exit == 0
