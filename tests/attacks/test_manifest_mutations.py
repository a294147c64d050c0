"""A manifest that anybody may have written: whatever it says, weights stay what they are, and files where they are.

A checkpoint of each kind, its manifest changed in one place or in several: what comes out at exit 0 is read by another
library and must be what the checkpoint held; everything else ends as bad input, in one line.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from safetensors import deserialize

import ckptx
from ckptx.errors import exit_code_of
from tests.support.checkpoint_writers import INDEX, SINGLE, tree_bytes

FIXTURES = Path(__file__).parents[2] / "fixtures" / "manifests"
KINDS = ["untied/dcp", "untied/cut", "untied/sharded", "tied/dcp", "tied/sharded", "source_only/dcp", "experts/sharded"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
Json = Any
At = tuple[str | int, ...]

# Values for any place: types, sizes, names that lead elsewhere, and what breaks parsers.
VALUES: list[Json] = [
    None, True, False, -1, 0, 1, 2, 1 << 31, 1 << 63, 10**80, 0.5, "", "0" * 32, "F32", "x", "../../home/canary",
    "/dev/full", "config.json", "ckptx.json", ".metadata", "tokenizer.json", "../x.safetensors", "a\0b", "\n",
    "\x1b[2J", "\u202e", "x" * 5000, [], {}, [[]], [0], [1 << 62, 4], {"name": "x"}, [[[[[[[[[[]]]]]]]]]],
    {"bytes": 1, "digest": "0" * 32}, "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors",
]  # fmt: skip


def read_as_loaders_do(root: Path) -> Tensors:
    """The tensors of an HF directory by the safetensors library: the single file if there is one, else by the index."""
    owners = None
    if (root / SINGLE).exists():
        names = [SINGLE]
    elif indexes := list(root.glob("*.safetensors.index.json")):
        (index,) = indexes
        owners = json.loads(index.read_text())["weight_map"]
        names = sorted(set(owners.values()))
    else:
        (single,) = root.glob("*.safetensors")
        names = [single.name]
    found: Tensors = {}
    for file in names:
        for name, row in deserialize((root / file).read_bytes()):
            assert owners is None or owners[name] == file, name
            assert name not in found
            found[name] = row["dtype"], tuple(row["shape"]), bytes(row["data"])
    assert owners is None or owners.keys() == found.keys()
    return found


def as_model(tensors: Tensors, root: Path) -> Tensors:
    """With the head of a model whose config ties it, which a checkpoint may leave out."""
    config = json.loads((root / "config.json").read_text())
    if config["tie_word_embeddings"] is True and HEAD not in tensors:
        return {**tensors, HEAD: tensors[EMBEDDING]}
    return tensors


def places(value: Json, at: At = ()) -> Iterator[At]:
    if at:
        yield at
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*at, key))


def holder_of(manifest: Json, at: At) -> Json:
    for key in at[:-1]:
        manifest = manifest[key]
    return manifest


def _replace(manifest: Json, random: Random, at: At) -> None:
    holder_of(manifest, at)[at[-1]] = random.choice(VALUES)


def _delete(manifest: Json, random: Random, at: At) -> None:
    del holder_of(manifest, at)[at[-1]]


def _copy_from_elsewhere(manifest: Json, random: Random, at: At) -> None:
    other = random.choice(list(places(manifest)))
    holder_of(manifest, at)[at[-1]] = copy.deepcopy(holder_of(manifest, other)[other[-1]])


def _rename(manifest: Json, random: Random, at: At) -> None:
    holder = holder_of(manifest, at)
    if isinstance(holder, dict):
        name = random.choice([str(at[-1]) + "x", random.choice(list(holder)), "../x", "/x", "", "a/b", "\n", "x" * 300])
        value = holder.pop(at[-1])
        holder[name] = value


def _nudge(manifest: Json, random: Random, at: At) -> None:
    holder = holder_of(manifest, at)
    value = holder[at[-1]]
    if type(value) is int:
        holder[at[-1]] = value + random.choice([-1, 1, 8, 1 << 20])
    elif isinstance(value, str) and value:
        spot = random.randrange(len(value))
        holder[at[-1]] = value[:spot] + random.choice(["", "0", "/", "..", '"', " ", "é"]) + value[spot + 1 :]
    elif isinstance(value, list):
        random.shuffle(value)


def _swap_siblings(manifest: Json, random: Random, at: At) -> None:
    holder = holder_of(manifest, at)
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    other = random.choice(keys)
    holder[at[-1]], holder[other] = holder[other], holder[at[-1]]


def _nest(manifest: Json, random: Random, at: At) -> None:
    holder = holder_of(manifest, at)
    for _ in range(random.choice([1, 40, 70, 600])):
        holder[at[-1]] = [holder[at[-1]]] if random.random() < 0.5 else {"a": holder[at[-1]]}


ANYWHERE: list[Callable[[Json, Random, At], None]] = [
    _replace, _delete, _copy_from_elsewhere, _rename, _nudge, _swap_siblings, _nest,
]  # fmt: skip


def _lie_about_a_tie(manifest: Json, random: Random) -> None:
    a, b = random.choices(list(manifest["tensors"]), k=2)
    manifest["tensors"][a]["tied_to"] = b
    if random.random() < 0.7:
        manifest["origin"]["tensors"].pop(a, None)
    if random.random() < 0.5:
        manifest["tensors"][a]["digest"] = manifest["tensors"][b]["digest"]


def _forget_a_tensor(manifest: Json, random: Random) -> None:
    tensors = manifest["origin"]["tensors"]
    tensors.pop(random.choice(list(tensors)))


def _forget_tied_names(manifest: Json, random: Random) -> None:
    for name, row in manifest["tensors"].items():
        if "tied_to" in row:
            manifest["origin"]["tensors"].pop(random.choice([name, row["tied_to"]]), None)


def _move_a_tensor(manifest: Json, random: Random) -> None:
    tensors = manifest["origin"]["tensors"]
    tensors[random.choice(list(tensors))] = random.randrange(len(manifest["origin"]["files"]))


def _shuffle_tensors(manifest: Json, random: Random) -> None:
    rows = list(manifest["origin"]["tensors"].items())
    random.shuffle(rows)
    manifest["origin"]["tensors"] = dict(rows)


def _name_a_file(manifest: Json, random: Random) -> None:
    names = [value for value in VALUES if isinstance(value, str)] + [
        "a/b.safetensors",
        "b.safetensors",
        "A.safetensors",
    ]
    random.choice(manifest["origin"]["files"])["name"] = random.choice(names)


def _name_the_index(manifest: Json, random: Random) -> None:
    names = [value for value in VALUES if isinstance(value, str)] + ["x.safetensors.index.json", "a/" + INDEX]
    manifest["origin"]["index"] = random.choice([None, {"name": random.choice(names), "metadata": {}}])


def _header_as_text(manifest: Json, random: Random) -> None:
    """A header of the attacker's own: that of the original file, spoiled."""
    file = random.choice(manifest["origin"]["files"])
    originals = tree_bytes(FIXTURES / manifest["case"] / "hf")
    data = originals[file["name"]]
    rows = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    file.pop("metadata", None)
    a, b = random.choices([name for name in rows if name != "__metadata__"], k=2)
    how = random.randrange(8)
    if how == 0:
        rows[a], rows[b] = rows[b], rows[a]
    elif how == 1:
        rows[a]["dtype"] = random.choice(["F16", "I16", "F32", "U8", "X"])
    elif how == 2:
        rows[a]["shape"] = rows[a]["shape"][::-1]
    elif how == 3:
        rows[a]["data_offsets"] = rows[b]["data_offsets"]
    elif how == 4:
        rows[a + "x"] = rows.pop(a)
    elif how == 5:
        rows["__metadata__"] = random.choice([1, {"a": 1}, {"format": "np"}, None, {"DCP_SHARDING_INFO": "{}"}])
    elif how == 6:
        info = {
            name: {"saved_offsets": [8] * len(row["shape"])} for name, row in rows.items() if name != "__metadata__"
        }
        rows["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0"}
    text = json.dumps(rows)
    file["header"] = text if how != 7 else text[:-1] + f', "{a}": {json.dumps(rows[b])}}}'


def _metadata_of_shards(manifest: Json, random: Random) -> None:
    for file in manifest["origin"]["files"]:
        if "metadata" in file:
            file["metadata"] = {"DCP_SHARDING_INFO": random.choice(["{}", "[]", "{", '{"x": {"saved_offsets": [1]}}'])}


def _remove_digests(manifest: Json, random: Random) -> None:
    for row in [*manifest["tensors"].values(), *manifest["files"].values()]:
        if random.random() < 0.5:
            row.pop("digest", None)


def _forge_digests(manifest: Json, random: Random) -> None:
    rows = list(manifest["tensors"].values())
    for row in rows:
        if random.random() < 0.2:
            row["digest"] = random.choice(rows)["digest"]


def _grow_shapes(manifest: Json, random: Random) -> None:
    row = random.choice(list(manifest["tensors"].values()))
    row["shape"] = random.choice([[], [0], [1 << 62], [1 << 40, 1 << 40], [0, 1 << 64], [1] * 100, row["shape"][::-1]])


WHOLE: list[Callable[[Json, Random], None]] = [
    _lie_about_a_tie, _forget_a_tensor, _forget_tied_names, _move_a_tensor, _shuffle_tensors, _name_a_file,
    _name_the_index, _header_as_text, _metadata_of_shards, _remove_digests, _forge_digests, _grow_shapes,
]  # fmt: skip


def mutated(kind: str, random: Random) -> tuple[list[str], Json]:
    """A valid manifest, changed once or several times; which changes, for the one who reads a failure."""
    manifest = json.loads((FIXTURES / kind / "ckptx.json").read_text())
    manifest["case"] = kind.split("/")[0]
    done = []
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        try:
            if random.random() < 0.5:
                change = random.choice(WHOLE)
                change(manifest, random)
                done.append(change.__name__)
            else:
                anywhere = random.choice(ANYWHERE)
                top = random.choice(["origin", "origin", "tensors", "cuts", "files", "layout", "format", "sidecars"])
                below = [at for at in places(manifest) if at[0] == top]
                at = random.choice(below)
                anywhere(manifest, random, at)
                done.append(f"{anywhere.__name__} {at}")
        except (KeyError, TypeError, AttributeError, IndexError, ValueError):
            pass  # what it would have changed is no longer as it was
    manifest.pop("case", None)
    return done, manifest


class Sandbox:
    """A checkpoint with a changed manifest, an empty place for the output, and files that nobody may touch."""

    def __init__(self, root: Path, kind: str, manifest: Json) -> None:
        shutil.rmtree(root, ignore_errors=True)
        (root / "home").mkdir(parents=True)
        (root / "home" / "canary").write_text("mine\n")
        self.root, self.source = root, root / "deep" / "source"
        shutil.copytree(FIXTURES / kind, self.source)
        (self.source / "ckptx.json").write_text(json.dumps(manifest))
        self.original = FIXTURES / kind.split("/")[0] / "hf"
        self.wanted = as_model(read_as_loaders_do(self.original), self.original)
        self.before = tree_bytes(root)

    def run(self, command: Callable[[Path], Any]) -> Path | None:
        """What the command wrote, or None when it refused; everything around it is as it was."""
        out = self.root / "deep" / "out"
        shutil.rmtree(out, ignore_errors=True)
        try:
            exit = command(out).exit
        except BaseException as error:  # whatever it is, it is judged below
            if not isinstance(error, Exception):
                raise
            note(f"refused: {error}")
            assert exit_code_of(error) in (3, 4), repr(error)
            assert str(error).isprintable(), repr(str(error))
            assert len(str(error)) < 2000
            assert not out.exists()
            exit = None
        around = {name: data for name, data in tree_bytes(self.root).items() if not name.startswith("deep/out/")}
        assert around == self.before
        assert exit in (0, None)
        return None if exit is None else out

    def check(self) -> None:
        """Every command that looks at a manifest."""
        back = self.run(lambda out: ckptx.convert("dcp2hf", self.source, out))
        if back is not None:
            assert as_model(read_as_loaders_do(back), back) == self.wanted
        for to in ("dcp", "safetensors"):
            cut = self.run(lambda out, to=to: ckptx.reshard(self.source, out, tp=2, to=to))
            if cut is not None:
                chained = cut.rename(self.root / "deep" / "cut")
                assert ckptx.verify(self.original, chained).exit == 0
                self.source, source = chained, self.source
                self.before, before = tree_bytes(self.root), self.before
                again = self.run(lambda out: ckptx.convert("dcp2hf", self.source, out))
                if again is not None:
                    assert as_model(read_as_loaders_do(again), again) == self.wanted
                    shutil.rmtree(again)
                self.source, self.before = source, before
                shutil.rmtree(chained)
        self.run(lambda out: ckptx.verify(self.original, self.source))
        self.run(lambda out: ckptx.inspect(self.source, ranks=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_manifests_as_they_were_written(kind: str, tmp_path: Path) -> None:
    """What the mutations start from goes through, so that a refusal is that of a mutation."""
    sandbox = Sandbox(tmp_path / "box", kind, json.loads((FIXTURES / kind / "ckptx.json").read_text()))
    back = sandbox.run(lambda out: ckptx.convert("dcp2hf", sandbox.source, out))
    assert back is not None
    assert read_as_loaders_do(back) == read_as_loaders_do(sandbox.original)
    sandbox.check()


def attack(kind: str, random: Random, root: Path) -> None:
    done, manifest = mutated(kind, random)
    note(f"{kind}: {done}")
    Sandbox(root, kind, manifest).check()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(kind=st.sampled_from(KINDS), random=st.randoms(use_true_random=True))
def test_a_changed_manifest_changes_no_weight_and_no_other_file(kind: str, random: Random, tmp_path: Path) -> None:
    attack(kind, random, tmp_path / "box")


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(kind=st.sampled_from(KINDS), random=st.randoms(use_true_random=True))
def test_many_changed_manifests(kind: str, random: Random, tmp_path: Path) -> None:
    attack(kind, random, tmp_path / "box")
