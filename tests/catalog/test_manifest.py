"""`ckptx.json`: what goes in comes out, line by line; what is no manifest is refused, by the field that is wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.manifest import FileRecord, Manifest, TensorRecord, encode_manifest
from ckptx.catalog.manifest_parser import parse_manifest, read_manifest
from ckptx.errors import CkptxError, InputError, UnsupportedError
from tests.support.checkpoint_writers import manifest

FIXTURES = Path(__file__).parents[2] / "fixtures" / "manifests"
MANIFEST = manifest("dcp", {"__0_0.distcp": 70}, {'a "quoted" ü': ("BF16", (2, 3)), "b": ("F32", ())})
WRITTEN = ["untied/dcp", "tied/cut", "experts/sharded"]


def written(case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / case / "ckptx.json").read_text())
    return found


def parse(found: Any) -> Manifest:
    return parse_manifest(json.dumps(found).encode(), "x/ckptx.json")


def refused(found: Any) -> str:
    with pytest.raises(InputError, match=r"^x/ckptx\.json: not a valid manifest \(.*no loader needs it$") as error:
        parse(found)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_it_reads_back_as_it_was() -> None:
    assert json.loads(encode_manifest(MANIFEST)) == MANIFEST
    found = parse_manifest(encode_manifest(MANIFEST), "x")
    assert (found.path, found.format, found.original) == ("x", "dcp", None)
    assert found.files == {"__0_0.distcp": FileRecord(70, "0" * 32)}
    assert found.tensors["b"] == TensorRecord(DTYPES_BY_NAME["F32"], (), "0" * 32, 0, None, None, None)


@pytest.mark.parametrize("case", WRITTEN)
def test_what_it_remembers_is_written_again_as_it_was(case: str) -> None:
    found = written(case)
    original = parse(found).original
    assert original is not None
    assert list(original.to_json()) == list(found["origin"])
    assert original.to_json() == found["origin"]
    assert list(original.tensors) == list(found["origin"]["tensors"])


@pytest.mark.parametrize("name", ["a},", '},"', "}", '"', "\\", '},\n"', ":{", ",", "\u2028", '"},"', "{}"])
def test_names_that_look_like_json(name: str) -> None:
    row = {"dtype": "F32", "shape": [1], "digest": "0" * 32, "file": 0}
    tied = row | {"tied_to": name}
    found = MANIFEST | {"tensors": {name: row, "b": tied, name + name: tied}}
    assert json.loads(encode_manifest(found)) == found
    assert parse_manifest(encode_manifest(found), "x").tensors["b"].tied_to == name
    strange = found | {"files": {name: {"bytes": 1}, "b": {"bytes": 1}}}
    assert json.loads(encode_manifest(strange)) == strange


def test_there_is_one_line_for_each_tensor() -> None:
    lines = encode_manifest(MANIFEST).decode().splitlines()
    assert f'  "b":{{"dtype":"F32","shape":[],"digest":"{"0" * 32}","file":0}}' in lines
    assert encode_manifest(MANIFEST).isascii()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{", b"{}", b'{"ckptx": 1}', b"\x00", b"1", b"\xff", b'{"ckptx": true}', b'{"ckptx": "1"}',
        b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b'{"ckptx": 1, "ckptx": 1}', b'{"ckptx": 1e400}', b"NaN",
    ],
)  # fmt: skip
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(InputError, match=r"^x/ckptx\.json: not a valid manifest"):
        parse_manifest(data, "x/ckptx.json")


def test_a_newer_manifest_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="version is 2"):
        parse(MANIFEST | {"ckptx": 2})


def test_a_manifest_that_would_not_fit_into_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="values, the limit"):
        parse_manifest(b"[" + b"[]," * (9 << 20) + b"]", "x")
    with (tmp_path / "ckptx.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match=r"ckptx\.json: .* the limit is"):
        read_manifest(tmp_path / "ckptx.json")


Path_ = tuple[str | int, ...]


def places(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """The path of every value; of long lists and objects, of their first and last few."""
    if at:
        yield at
    if isinstance(value, (dict, list)):
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys if len(keys) < 12 else [*keys[:3], *keys[-2:]]:
            yield from places(value[key], (*at, key))


def spoiled(found: dict[str, Any], at: Path_, *put: Any) -> dict[str, Any]:
    """The manifest with the value at a place replaced, or taken away."""
    result = copy.deepcopy(found)
    place: Any = result
    for key in at[:-1]:
        place = place[key]
    if put:
        place[at[-1]] = put[0]
    else:
        del place[at[-1]]
    return result


VALUES = [
    None, True, -1, 0, 1, 1 << 63, 10**400, 0.5, float("nan"), "", "x", "../x", "/etc/passwd", "a\0b", "\ud800",
    [], [[]], [-1], [1 << 62, 1 << 62], {}, {"": None}, {"name": 1}, "0" * 32,
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "step"),
    [(WRITTEN[-1], 7), *(pytest.param(case, 1, marks=pytest.mark.slow) for case in WRITTEN)],
)
def test_a_field_of_any_other_type_or_value_is_read_or_refused_by_its_name(case: str, step: int) -> None:
    found = written(case)
    kinds = set()
    for at in list(places(found))[::step]:
        for put in ((), *((value,) for value in VALUES)):
            try:
                parse(spoiled(found, at, *put))
                kinds.add(at[0])
            except CkptxError as error:
                assert error.exit_code in (3, 4)
                assert str(error).startswith("x/ckptx.json: ")
                assert "\n" not in str(error)
                said = str(at[0]), "tensors[", "the text: "  # or what refers to it, or nothing can be read
                assert any(each in str(error) for each in said) or error.exit_code == 4, (at, put)
    assert kinds  # some fields may hold something else


FREE = {"tied_to", "model"}  # may be absent


@pytest.mark.parametrize("case", WRITTEN)
def test_every_key_is_needed(case: str) -> None:
    found = written(case)
    for at in places(found):
        fixed = {"origin": 2, "layout": 2, "cuts": 3, "files": 3, "sidecars": 3, "tensors": 3}.get(str(at[0]), 1)
        named = len(at) == fixed or (at[:2] in (("origin", "files"), ("origin", "index")) and isinstance(at[-1], str))
        if not named or at[-1] in FREE or "metadata" in at[:-1]:
            continue
        assert str(at[-1]) in refused(spoiled(found, at)) or len(at) > 1, at


@pytest.mark.parametrize(
    ("at", "put"),
    [
        (("origin", "files", 0, "name"), "../x.safetensors"),
        (("origin", "files", 0, "name"), "/x.safetensors"),
        (("origin", "files", 0, "name"), "a/../x.safetensors"),
        (("origin", "files", 0, "name"), "./x.safetensors"),
        (("origin", "files", 0, "name"), "a//x.safetensors"),
        (("origin", "files", 0, "name"), "a\\x.safetensors"),
        (("origin", "files", 0, "name"), "x\n.safetensors"),
        (("origin", "files", 0, "name"), "x\x1b[2J.safetensors"),
        (("origin", "files", 0, "name"), "x\0.safetensors"),
        (("origin", "files", 0, "name"), ".a.ckptx-partial/x.safetensors"),
        (("origin", "files", 0, "name"), "config.json"),
        (("origin", "files", 0, "name"), "ckptx.json"),
        (("origin", "files", 0, "name"), ".metadata"),
        (("origin", "files", 0, "name"), "model.safetensors"),  # loaders would take it alone
        (("origin", "files", 0, "name"), "adapter_model.safetensors"),
        (("origin", "files", 0, "name"), "model-00002-of-00002.safetensors"),
        (("origin", "files", 0, "name"), "model-00002-of-00002.safetensors/x.safetensors"),
        (("origin", "files", 0, "name"), "x" * 300 + ".safetensors"),
        (("origin", "files", 0, "name"), "x/" * 3000 + "x.safetensors"),
        (("origin", "files", 0, "header"), "{}"),
        (("origin", "index"), None),
        (("origin", "index", "name"), "config.json"),
        (("origin", "index", "name"), "sub/model.safetensors.index.json"),
        (("origin", "index", "name"), "model-00001-of-00002.safetensors"),
        (("origin", "tensors", "lm_head.weight"), 2),
        (("origin", "tensors", "lm_head.weight"), -1),
        (("origin", "format"), "gguf"),
        (("files", "../x"), {"bytes": 1, "digest": "0" * 32}),
        (("files", "__0_0.distcp", "bytes"), -1),
        (("files", "__0_0.distcp", "digest"), "0" * 31),
        (("sidecars", "/x"), {"bytes": 1, "digest": "0" * 32}),
        (("sidecars", "__0_0.distcp"), {"bytes": 1, "digest": "0" * 32}),
        (("tensors", "lm_head.weight", "dtype"), "F7"),
        (("tensors", "lm_head.weight", "shape"), [1 << 40, 1 << 30]),
        (("tensors", "lm_head.weight", "shape"), [1] * 65),
        (("tensors", "lm_head.weight", "shape"), [True]),
        (("tensors", "lm_head.weight", "file"), 9),
        (("tensors", "lm_head.weight", "cut"), 0),
        (("tensors", "lm_head.weight", "tied_to"), "lm_head.weight"),
        (("tensors", "lm_head.weight", "tied_to"), "nobody"),
        (("tensors", "lm_head.weight", "tied_to"), "model.norm.weight"),
        (("layout", "tp"), 0),
        (("layout", "rank_order"), "tp,dp,pp"),
    ],
)
def test_what_contradicts_itself_or_leads_out_is_refused(at: Path_, put: Any) -> None:
    assert str(at[0]) in refused(spoiled(written("untied/dcp"), at, put))


def test_a_cut_lies_inside_of_its_tensor() -> None:
    found = written("tied/cut")
    for key, put in (("offsets", [[999, 0], [0, 0]]), ("sizes", [[8], [8]]), ("files", [99, 0]), ("replicas", [7])):
        assert "cut" in refused(spoiled(found, ("cuts", 0, key), put))
