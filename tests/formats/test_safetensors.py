"""The header of a safetensors file: one test for each refusal, goldens of the library, and noise."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.hf.safetensors import MAX_HEADER, Header, format_header_text, frame_header, pad_header, parse_header
from tests.support.checkpoint_writers import BITS, Value, framed, header, safetensors_bytes, value

TENSORS: dict[str, Value] = {"a": value("BF16", 2, 3), "b.weight": value("F32", 4), "c": value("I64", 2, 0)}
BODY = b"".join(data for _, _, data in TENSORS.values())


def parse(data: bytes) -> Header:
    def read(offset: int, nbytes: int) -> bytes:
        assert offset + nbytes <= len(data), "a read past the end of the file"
        return data[offset : offset + nbytes]

    return parse_header(read, len(data), "x.safetensors")


def spoiled(**changes: Any) -> bytes:
    """A file whose tensor "a" says something else; a value of None leaves the key out."""
    rows = header(TENSORS)
    rows["a"] = {key: value for key, value in (rows["a"] | changes).items() if value is not None}
    return framed(rows, BODY)


def test_what_a_file_holds() -> None:
    parsed = parse(safetensors_bytes(TENSORS, {"format": "pt"}))
    start = 8 + len(parsed.text.encode())
    assert [(t.name, t.dtype.name, t.shape, t.begin - start, t.end - start) for t in parsed.tensors] == [
        ("a", "BF16", (2, 3), 0, 12),
        ("b.weight", "F32", (4,), 12, 28),
        ("c", "I64", (2, 0), 28, 28),
    ]
    assert parsed.metadata == {"format": "pt"}
    assert parsed.text.endswith("}") or parsed.text.endswith(" ")


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    rows = header(TENSORS)
    reordered = {name: rows[name] for name in ("c", "b.weight", "a")}
    assert [tensor.name for tensor in parse(framed(reordered, BODY)).tensors] == ["a", "b.weight", "c"]


def test_a_file_without_tensors() -> None:
    assert parse(framed("{}      ")).tensors == []


def test_names_in_any_script() -> None:
    named = {"größe.重み": value("F32", 2), 'quote"d \\ \n': value("F32", 2)}
    assert [tensor.name for tensor in parse(safetensors_bytes(named)).tensors] == list(named)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(b"", "has 0 bytes, a safetensors file has at least 10", id="empty"),
        pytest.param(
            b"\x02\0\0\0\0\0\0\0{", "has 9 bytes, a safetensors file has at least 10", id="shorter than the shortest"
        ),
        pytest.param(safetensors_bytes(TENSORS)[:40], "header ends at byte .*truncated", id="cut inside the header"),
        pytest.param(safetensors_bytes(TENSORS)[:-1], '"b.weight" ends at byte .*truncated', id="one byte short"),
        pytest.param(safetensors_bytes(TENSORS) + b"\0", "tensors end at byte", id="one byte too many"),
        pytest.param((MAX_HEADER + 1).to_bytes(8, "little") + b"{}", "header length", id="header too long"),
        pytest.param(b"\xff" * 20, "header length", id="a length of all ones"),
        pytest.param(b"PK\3\4" + bytes(40), "not a safetensors file", id="a zip"),
        pytest.param(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-lfs pointer", id="git-lfs"
        ),
        pytest.param(framed("[]"), "not a JSON object", id="a list"),
        pytest.param(framed(" {}"), "not a JSON object", id="blanks first"),
        pytest.param(framed("null    "), "not a JSON object", id="null"),
        pytest.param(framed('{"a"'), "not JSON", id="half an object"),
        pytest.param(framed("{} x"), "not JSON", id="something after it"),
        pytest.param(framed(b'{"\xff": 1}'), "not JSON", id="not UTF-8"),
        pytest.param(framed("[" * 100_000), "not JSON|not a JSON object|nested deeper", id="deep as a well"),
        pytest.param(framed({"a": 1}), "lacks one of", id="a number for a tensor"),
        pytest.param(framed({"a": None}), "lacks one of", id="null for a tensor"),
        pytest.param(framed({"a": []}), "lacks one of", id="a list for a tensor"),
        pytest.param(spoiled(dtype=None), 'tensor "a" lacks one of', id="no dtype"),
        pytest.param(spoiled(shape=None), 'tensor "a" lacks one of', id="no shape"),
        pytest.param(spoiled(data_offsets=None), 'tensor "a" lacks one of', id="no offsets"),
        pytest.param(spoiled(data_offsets=[0]), 'tensor "a" lacks one of', id="one offset"),
        pytest.param(spoiled(data_offsets=[0, 12, 12]), 'tensor "a" lacks one of', id="three offsets"),
        pytest.param(spoiled(shape=[-2, -3]), 'tensor "a" has shape', id="negative dims"),
        pytest.param(spoiled(shape=[2.0, 3]), 'tensor "a" has shape', id="a dim with a point"),
        pytest.param(spoiled(shape=[True, 6]), 'tensor "a" has shape', id="a dim that is true"),
        pytest.param(spoiled(shape=["2", 3]), 'tensor "a" has shape', id="a dim that is text"),
        pytest.param(spoiled(shape=6), "has shape 6, not a list", id="a number for a shape"),
        pytest.param(spoiled(shape=[2, 4]), "has 12 bytes, but shape .* require 16", id="too many elements"),
        pytest.param(spoiled(shape=[2**40, 2**40]), "elements; the file is corrupt", id="elements beyond counting"),
        pytest.param(spoiled(dtype="F32"), "has 12 bytes, but shape .* require 24", id="another dtype"),
        pytest.param(spoiled(data_offsets=[12, 0]), "data_offsets", id="ends before it begins"),
        pytest.param(spoiled(data_offsets=[-12, 0]), "data_offsets", id="begins before the data"),
        pytest.param(spoiled(data_offsets=[0.0, 12.0]), "data_offsets", id="offsets with points"),
        pytest.param(spoiled(data_offsets=[False, 12]), "data_offsets", id="an offset that is false"),
        pytest.param(spoiled(data_offsets=[4, 16]), "overlaps|gap", id="overlaps the next"),
        pytest.param(spoiled(data_offsets=[16, 28]), "overlaps|gap", id="two at one place"),
        pytest.param(spoiled(dtype="F4", shape=[3]), "whole bytes", id="half a byte"),
    ],
)
def test_a_spoiled_file_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(InputError, match=r"^x\.safetensors: ") as refusal:
        parse(data)
    assert refusal.match(said)
    assert "\n" not in str(refusal.value)


def test_a_gap_before_a_tensor() -> None:
    rows = header({"a": value("F32", 1), "b": value("F32", 1)})
    rows["b"]["data_offsets"] = [8, 12]
    with pytest.raises(InputError, match=r'tensor "b" begins at byte \d+, expected \d+; it leaves a gap'):
        parse(framed(rows, bytes(12)))


def test_a_gap_before_the_first_tensor() -> None:
    rows = header({"a": value("F32", 1)})
    rows["a"]["data_offsets"] = [4, 8]
    with pytest.raises(InputError, match="leaves a gap"):
        parse(framed(rows, bytes(8)))


def test_an_overlap() -> None:
    rows = header({"a": value("F32", 2), "b": value("F32", 2)})
    rows["b"]["data_offsets"] = [4, 12]
    with pytest.raises(InputError, match=r'tensor "b" .* overlaps the tensor before it'):
        parse(framed(rows, bytes(12)))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"a":%s,"a":%s}', id="a tensor twice"),
        pytest.param('{"a":%s,"\\u0061":%s}', id="a tensor twice, once escaped"),
        pytest.param('{"__metadata__":{},"__metadata__":{},"a":%s}', id="metadata twice"),
    ],
)
def test_a_key_that_appears_twice(text: str) -> None:
    row = '{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'
    with pytest.raises(InputError, match=r'key "\w+" appears twice'):
        parse(framed(text.replace("%s", row), bytes(2)))


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
def test_a_key_of_a_tensor_that_appears_twice(key: str) -> None:
    second = {"dtype": '"I8"', "shape": "[1,2]", "data_offsets": "[0,2]"}[key]
    text = '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"' + key + '":' + second + "}}"
    with pytest.raises(InputError, match=f'key "{key}" appears twice'):
        parse(framed(text, bytes(2)))


def test_a_swallowed_key_is_found_among_names_that_look_like_keys() -> None:
    """Counting `"dtype"` alone would be fooled by a tensor of that name."""
    row = '"dtype":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    assert parse(framed("{" + row + "}", bytes(1))).tensors[0].name == "dtype"
    with pytest.raises(InputError, match="appears twice"):
        parse(framed("{" + row + "," + row + "}", bytes(1)))
    short = '"b":{"shape":[1],"data_offsets":[0,1]}'
    with pytest.raises(CkptxError):
        parse(framed("{" + ",".join((row, short, short)) + "}", bytes(1)))


@pytest.mark.parametrize("dtype", ["F128", "BF8", "bf16", "", "C128", "C32"])
def test_an_unknown_dtype_is_not_supported(dtype: str) -> None:
    with pytest.raises(UnsupportedError, match='tensor "a" has dtype'):
        parse(spoiled(dtype=dtype))


@pytest.mark.parametrize("dtype", [3, None, [], {}])
def test_a_dtype_that_is_no_text(dtype: object) -> None:
    rows = header(TENSORS)
    rows["a"]["dtype"] = dtype
    with pytest.raises(CkptxError, match='tensor "a"'):
        parse(framed(rows, BODY))


@pytest.mark.parametrize("metadata", [{"a": 1}, {"a": None}, [], "text", {"a": {"b": "c"}}, {"a": ["b"]}, 1, False])
def test_metadata_is_a_map_of_strings(metadata: object) -> None:
    with pytest.raises(InputError, match="__metadata__ is not a map of strings"):
        parse(framed(header(TENSORS) | {"__metadata__": metadata}, BODY))


@pytest.mark.parametrize("name", ["F64", "F32", "F16", "I64", "I32", "I16", "I8", "U8", "BOOL", "U64", "U32", "U16"])
def test_headers_are_those_of_the_library(name: str) -> None:
    dtype = {"F": "<f", "I": "<i", "U": "<u"}.get(name[0], "?") + (str(BITS[name] // 8) if name != "BOOL" else "")
    shapes = {"b": (3, 5), "a": (2,), "ü": (), "z": (0, 4)}
    arrays = {tensor: np.ones(shape, dtype) for tensor, shape in shapes.items()}
    golden = safetensors.numpy.save(arrays, {"format": "np", "ключ": "値"})
    parsed = parse(golden)
    start = 8 + int.from_bytes(golden[:8], "little")
    rows = [(t.name, t.dtype, t.shape, t.begin - start, t.end - start) for t in parsed.tensors]
    for metadata in (parsed.metadata, dict(reversed(parsed.metadata.items()))):
        text = format_header_text(rows, metadata)
        if pad_header(text) == parsed.text:
            break
    else:
        pytest.fail(f"{text!r} is not {parsed.text!r}")
    assert frame_header(pad_header(text)) == golden[:start]
    assert start % 8 == 0


def test_a_header_without_metadata_is_that_of_the_library() -> None:
    golden = safetensors.numpy.save({"x": np.arange(3, dtype=np.float32)})
    rows = [("x", DTYPES_BY_NAME["F32"], (3,), 0, 12)]
    assert frame_header(pad_header(format_header_text(rows, {}))) == golden[:-12]


def view(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What the library says."""
    return {
        name: (info["dtype"], tuple(info["shape"]), bytes(info["data"]))
        for name, info in safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    }


def check_against_the_library(data: bytes) -> bool:
    """Either a refusal, or what the library sees; True when it was accepted."""
    try:
        parsed = parse(data)
    except CkptxError as refusal:
        assert "\n" not in str(refusal)
        return False
    ours = {t.name: (t.dtype.name, t.shape, data[t.begin : t.end]) for t in parsed.tensors}
    assert ours == view(data)
    return True


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_noise_is_refused(data: bytes) -> None:
    check_against_the_library(data)
    check_against_the_library(framed(data, bytes(8)))


VALID = safetensors_bytes(TENSORS, {"format": "pt"})


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_a_header_with_a_few_bytes_changed_is_refused_or_still_right(data: st.DataObject) -> None:
    spoiled = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(VALID) - len(BODY) - 1))
        how = data.draw(st.sampled_from(["flip", "set", "cut", "insert"]))
        if how == "flip":
            spoiled[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "set":
            spoiled[at] = data.draw(st.sampled_from(b'{}[],:"0123456789-.e \\untrueAFB'))
        elif how == "cut":
            del spoiled[at : at + data.draw(st.integers(1, 4))]
        else:
            spoiled[at:at] = data.draw(st.sampled_from([b" ", b"0", b"1", b'"', b"\\u0061", b"\n"]))
    check_against_the_library(bytes(spoiled))


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**64) | st.floats(allow_nan=True) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@given(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "extra"]), json_values)
@example("shape", [2, 3])
@example("data_offsets", [0, 12])
@settings(max_examples=200, deadline=None)
def test_any_json_in_any_place_is_refused_or_still_right(key: str, anything: Any) -> None:
    rows = header(TENSORS)
    if key == "__metadata__":
        rows[key] = anything
    else:
        rows["a"][key] = anything
    text = json.dumps(rows, ensure_ascii=True)
    data = framed(text, BODY)
    if key == "extra":
        parse(data)  # the library ignores what it does not know; so do we
    else:
        check_against_the_library(data)


def test_the_comparison_with_the_library_would_notice() -> None:
    """An injected defect: a header that both read, and a view that differs."""
    assert check_against_the_library(VALID)
    other = safetensors_bytes(TENSORS | {"a": value("BF16", 3, 2, seed=9)}, {"format": "pt"})
    assert view(other) != view(VALID)
