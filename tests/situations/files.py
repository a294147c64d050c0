"""Situations in headers, indexes, pickles and archives."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from typing import Any

from tests.situations.box import Box, situation
from tests.situations.paths import hf2dcp
from tests.support.checkpoint_writers import (
    INDEX,
    SINGLE,
    archive,
    framed,
    header,
    llama,
    safetensors_bytes,
    value,
    write_dcp,
    write_safetensors,
)

ROW = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}


def alone(box: Box, data: bytes) -> tuple[Any, ...]:
    """A safetensors file without a config."""
    path = box.root / "hf" / SINGLE
    path.parent.mkdir()
    path.write_bytes(data)
    return hf2dcp(box, path.parent)


def _text(row: dict[str, Any], name: str = "w", body: bytes = b"x") -> bytes:
    return framed(json.dumps({name: row}), body)


_HEADERS: dict[str, tuple[tuple[int, ...], bytes]] = {
    "an empty file": ((3,), b""),
    "seven bytes": ((3,), b"\0" * 7),
    "a header of length 0": ((3,), b"\0" * 8),
    "a header of length 2^63": ((3,), struct.pack("<Q", 1 << 63) + b"{}"),
    "a header of 100,000,001 bytes": ((3,), struct.pack("<Q", 100_000_001) + b"{" + b" " * 64),
    "a header in UTF-16": ((3,), framed(json.dumps({"w": ROW}).encode("utf-16"), b"x")),
    "a header after a byte order mark": ((3,), framed(b"\xef\xbb\xbf" + json.dumps({"w": ROW}).encode(), b"x")),
    "a header followed by another": ((3,), framed(json.dumps({"w": ROW}) * 2, b"x")),
    "a header that is a list": ((3,), framed("[]")),
    "a header nested 100,000 deep": ((3,), framed('{"w":' + "[" * 100_000 + "]" * 100_000 + "}", b"x")),
    "NaN in a shape": ((3,), framed('{"w":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"x")),
    "1e0 in a shape": ((3,), framed('{"w":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}}', b"x")),
    "true in a shape": ((3,), _text({**ROW, "shape": [True]})),
    "a negative shape": ((3,), _text({**ROW, "shape": [-1, -1]})),
    "a shape that is a string": ((3,), _text({**ROW, "shape": "1"})),
    "a number of 5,000 digits in a shape": ((3,), framed(
        '{"w":{"dtype":"U8","shape":[' + "9" * 5000 + '],"data_offsets":[0,1]}}', b"x")),
    "a shape of 0 x 2^64": ((3, 4), _text({"dtype": "U8", "shape": [0, 1 << 64], "data_offsets": [0, 0]}, body=b"")),
    "a shape of 2^32 x 2^32": ((3,), _text({**ROW, "shape": [1 << 32, 1 << 32]})),
    "a shape of 1,000 dimensions": ((3, 4), _text({**ROW, "shape": [1] * 1000})),
    "offsets the wrong way round": ((3,), _text({**ROW, "data_offsets": [1, 0]})),
    "offsets beyond 2^64": ((3,), _text({**ROW, "data_offsets": [1 << 64, (1 << 64) + 1]})),
    "three offsets": ((3,), _text({**ROW, "data_offsets": [0, 1, 1]})),
    "a gap between two tensors": ((3,), framed(
        json.dumps({"a": ROW, "b": {**ROW, "data_offsets": [2, 3]}}), b"xyz")),
    "bytes after the last tensor": ((3,), _text(ROW, body=b"xyz")),
    "two tensors over the same bytes": ((3,), framed(json.dumps({"a": ROW, "b": ROW}), b"x")),
    "a dtype in lower case": ((3, 4), _text({**ROW, "dtype": "u8"})),
    "a dtype that is a number": ((3, 4), _text({**ROW, "dtype": 8})),
    "a row that is null": ((3,), framed('{"w":null}', b"x")),
    "a row with a key too many": ((0, 3), _text({**ROW, "stride": [1]})),
    "metadata with a number": ((3,), framed(json.dumps({"__metadata__": {"a": 1}, "w": ROW}), b"x")),
    "metadata that is a list": ((3,), framed(json.dumps({"__metadata__": ["a"], "w": ROW}), b"x")),
    "a tensor without a name": ((0, 3), _text(ROW, "")),
    "a name with a NUL": ((0, 3), _text(ROW, "a\0b")),
    "a name that climbs": ((0, 3), _text(ROW, "../../../../canary.txt")),
    "a name of 70,000 characters": ((0, 3), _text(ROW, "n" * 70_000)),
    "a name with escape sequences and bidirectional marks": ((0, 3), _text(ROW, "\x1b[2J\x07\u202e\u2066\r\nx")),
    "a name with half a surrogate pair": ((0, 3), framed(b'{"\\ud800":' + json.dumps(ROW).encode() + b"}", b"x")),
    "names that differ only in case": ((0,), framed(
        json.dumps({"w": ROW, "W": {**ROW, "data_offsets": [1, 2]}}), b"xy")),
    "a tensor of no elements": ((0,), framed(
        json.dumps({"w": {"dtype": "F32", "shape": [0, 7], "data_offsets": [0, 0]}, "v": ROW}), b"x")),
    "a scalar": ((0,), _text({**ROW, "shape": []})),
    "header entries in the reverse order of their data": ((0,), framed(
        json.dumps({"b": {**ROW, "data_offsets": [1, 2]}, "a": ROW}), b"xy")),
    "only metadata": ((3,), framed(json.dumps({"__metadata__": {"format": "pt"}}))),
}  # fmt: skip

for _name, (_exits, _data) in _HEADERS.items():

    @situation("safetensors", _name, _exits)
    def _(box: Box, data: bytes = _data) -> Any:
        return alone(box, data)


_INDEXES: dict[str, tuple[tuple[int, ...], Any]] = {
    "is a list": ((3,), lambda index: []),
    "has no weight_map": ((3,), lambda index: {"metadata": {}}),
    "has an empty weight_map": ((3,), lambda index: {**index, "weight_map": {}}),
    "has a weight_map that is a list": ((3,), lambda index: {**index, "weight_map": list(index["weight_map"])}),
    "maps to numbers": ((3,), lambda index: {**index, "weight_map": dict.fromkeys(index["weight_map"], 1)}),
    "maps to null": ((3,), lambda index: {**index, "weight_map": dict.fromkeys(index["weight_map"])}),
    "has a total_size of -1": ((0, 3), lambda index: {**index, "metadata": {"total_size": -1}}),
    "has a total_size of 10^400": ((0, 3), lambda index: {**index, "metadata": {"total_size": 10**400}}),
    "has metadata that is a string": ((0, 3), lambda index: {**index, "metadata": "x"}),
    "has a key with a surrogate": ((0, 3), lambda index: {**index, "\ud800": 1}),
}
for _name, (_exits, _change) in _INDEXES.items():

    @situation("index", f"the index {_name}", _exits)
    def _(box: Box, change: Any = _change) -> Any:
        source = box.hf(shards=2)
        index = json.loads((source / INDEX).read_text())
        (source / INDEX).write_text(json.dumps(change(index)))
        return hf2dcp(box, source)


class _Runs:
    """Runs a command when it is unpickled by a reader that lets it."""

    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch owned",)


class _Evaluates:
    def __reduce__(self) -> Any:
        return eval, ("open('owned', 'w')",)


_PICKLES: dict[str, tuple[tuple[int, ...], bytes]] = {
    "nothing": ((3,), b""),
    "a command": ((3, 4), pickle.dumps(_Runs())),
    "an expression": ((3, 4), pickle.dumps(_Evaluates(), protocol=4)),
    "an extension code": ((3, 4), b"\x80\x02\x82\x01."),
    "a persistent id": ((3, 4), b"\x80\x02\x8c\x01aQ."),
    "an out-of-band buffer": ((3, 4), b"\x80\x05\x97."),
    "an unknown protocol": ((3, 4), b"\x80\x09N."),
    "ten million empty lists": ((3, 4), b"\x80\x02(" + b"]" * 10_000_000 + b"l."),
    "lists nested a million deep": ((3, 4), b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b"."),
    "a memo index of 2^31": ((3, 4), b"\x80\x02Nr\xff\xff\xff\x7f."),
    "a string that claims 4 GiB": ((3, 4), b"\x80\x02X\xff\xff\xff\xff."),
    "a number of a million bytes": ((3, 4), b"\x80\x02\x8b" + struct.pack("<i", 10**6) + b"\x7f" * 10**6 + b"."),
    "an attribute reached through dots": ((3, 4), b"\x80\x04\x8c\x05torch\x8c\x0bos.path.foo\x93."),
    "a class of another package": ((3, 4), b"cnumpy\nload\n."),
    "gzip": ((3, 4), b"\x1f\x8b\x08\0" + b"\0" * 40),
    "zeros": ((3, 4), bytes(4096)),
}  # fmt: skip
for _name, (_exits, _data) in _PICKLES.items():

    @situation("pickle", f".metadata holds {_name}", _exits)
    def _(box: Box, data: bytes = _data) -> Any:
        (box.dcp() / ".metadata").write_bytes(data)
        return ("convert", "to-hf", box.root / "dcp", box.dst)

    @situation("pickle", f"pytorch_model.bin holds {_name}", _exits)
    def _(box: Box, data: bytes = _data) -> Any:
        path = box.root / "bin" / "pytorch_model.bin"
        path.parent.mkdir()
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as file:
            file.writestr("archive/data.pkl", data)
            file.writestr("archive/version", "3\n")
        path.write_bytes(packed.getvalue())
        return hf2dcp(box, path.parent)


def _repacked(data: bytes, compression: int = zipfile.ZIP_STORED, **records: bytes | None) -> bytes:
    """An archive with some records replaced, or removed with None."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(packed, "w", compression) as new:
        for info in old.infolist():
            key = info.filename.split("/", 1)[1].replace("/", "_").replace(".", "_")
            record = records.get(key, old.read(info))
            if record is not None:
                new.writestr(info.filename, record)
    return packed.getvalue()


def _encrypted(data: bytes) -> bytes:
    """Sets the flag in every header of a record, of its own and in the directory."""
    changed = bytearray(data)
    for mark, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = data.find(mark)
        while at >= 0:
            changed[at + flags] |= 1
            at = data.find(mark, at + 1)
    return bytes(changed)


_ARCHIVES: dict[str, tuple[tuple[int, ...], Any]] = {
    "deflated": ((3, 4), lambda data: _repacked(data, zipfile.ZIP_DEFLATED)),
    "big-endian": ((3, 4), lambda data: _repacked(data, byteorder=b"big")),
    "without its payload": ((3, 4), lambda data: _repacked(data, data_0=None)),
    "with a shorter payload": ((3, 4), lambda data: _repacked(data, data_0=b"1234")),
    "without its pickle": ((3, 4), lambda data: _repacked(data, data_pkl=None)),
    "with a command as pickle": ((3, 4), lambda data: _repacked(data, data_pkl=pickle.dumps(_Runs()))),
    "with another's first half": ((3, 4), lambda data: archive(value("F32", 64, 8))[:400] + data[400:]),
    "encrypted by its flags": ((3, 4), _encrypted),
    "of zeros": ((3, 4), lambda data: bytes(len(data))),
    "with its last byte changed": ((0, 3), lambda data: data[:-1] + b"\1"),
}  # fmt: skip
for _name, (_exits, _spoil) in _ARCHIVES.items():

    @situation("archive", f"a payload {_name}", _exits)
    def _(box: Box, spoil: Any = _spoil) -> Any:
        tensor = value("F32", 4, 4)
        write_dcp(box.root / "dcp", {"w": tensor}, payloads={"w": spoil(archive(tensor))})
        return ("convert", "to-hf", box.root / "dcp", box.dst, "--base", "none")


@situation("archive", "a flipped bit in every .distcp byte of a tensor, hidden by no CRC", 3, "CRC")
def _(box: Box) -> Any:
    source = box.dcp()
    path = source / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    at = data.index(llama()["model.norm.weight"][2])
    data[at] ^= 1
    path.write_bytes(bytes(data))
    return ("convert", "to-hf", source, box.dst)


@situation("archive", "two DCPs mixed: .metadata of one, files of the other", 3)
def _(box: Box) -> Any:
    one = box.dcp("one", files=2)
    two = write_dcp(box.root / "two", llama(layers=3), files=2)
    (one / "__1_0.distcp").write_bytes((two / "__1_0.distcp").read_bytes())
    return ("convert", "to-hf", one, box.dst)


@situation("safetensors", "weights of one model next to a config of nothing", (0, 3))
def _(box: Box) -> Any:
    path = box.root / "hf"
    write_safetensors(path / SINGLE, llama())
    (path / "config.json").write_text("{}")
    return hf2dcp(box, path)


@situation("safetensors", "a file that grew by the bytes of another", 3)
def _(box: Box) -> Any:
    source = box.hf()
    with (source / SINGLE).open("ab") as file:
        file.write(safetensors_bytes({"w": value("U8", 9)}))
    return hf2dcp(box, source)


@situation("safetensors", "a header that names each tensor twice in two spellings of one name", (0, 3))
def _(box: Box) -> Any:
    rows = header({"caf\u00e9": value("U8", 1), "cafe\u0301": value("U8", 1)})
    return alone(box, framed(rows, b"xy"))
