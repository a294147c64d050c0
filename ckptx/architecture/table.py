"""Reads one class out of the generated table, without parsing the rest and without importing torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptx.architecture.rows import SCHEMA, Row, decode_row
from ckptx.architecture.spec import Architecture

PATH = Path(__file__).with_name("table.jsonl")


def lookup(class_name: str, model_type: str | None = None) -> Architecture | None:
    """The architecture of a class, if the table alone can give it.

    Args:
        class_name: As in ``architectures`` of ``config.json``.
        model_type: When given, it must be the one of the class: another model may use the same class name.

    Returns:
        None for an unknown class, another model type, or a class that needs its real config.
    """
    row = find_row(class_name, model_type)
    return row.architecture if row and row.shared is None else None


@functools.cache
def find_row(class_name: str, model_type: str | None = None) -> Row | None:
    """The table's row of a class, including rows that only say why the class must be introspected."""
    text = _text()
    values = _line(text, "class", class_name)
    if values is None or (model_type is not None and values["type"] != model_type):
        return None
    body = _line(text, "body", values["body"]) if "body" in values else None

    def structure(name: str) -> Mapping[str, Any]:
        found = _line(text, "structure", name)
        assert found is not None, f"table.jsonl has no structure line {name}"
        return found

    return decode_row(values, body["names"] if body else "", header()["transformers"], structure)


def header() -> Mapping[str, Any]:
    """The first line: schema and the transformers version that was asked."""
    first: dict[str, Any] = json.loads(_text().split(b"\n", 1)[0])
    assert first["schema"] == SCHEMA, f"table.jsonl has schema {first['schema']}, this reader needs {SCHEMA}"
    return first


def class_names() -> list[str]:
    """Every class in the table, sorted."""
    lead = b'{"class":"'
    lines = (line for line in _text().split(b"\n") if line.startswith(lead))
    return [line[len(lead) :].split(b'"', 1)[0].decode("ascii") for line in lines]


def classes_of(model_type: str) -> list[str]:
    """Every class in the table whose own config has this model type, sorted."""
    said = b',"type":' + json.dumps(model_type).encode("ascii") + b","
    lead = b'{"class":"'
    text, found, at = _text(), [], 0
    while (at := text.find(said, at)) >= 0:
        start = text.rfind(b"\n", 0, at) + 1
        name = text[start + len(lead) : at - 1]
        if text.startswith(lead, start) and b'"' not in name:
            found.append(name.decode("ascii"))
        at += len(said)
    return sorted(found)


@functools.cache
def _text() -> bytes:
    return PATH.read_bytes()


def _line(text: bytes, key: str, value: str) -> dict[str, Any] | None:
    """The JSON object whose first key has this value; every line starts with its key."""
    start = text.find(f'\n{{"{key}":{json.dumps(value)},'.encode("ascii")) + 1
    if start == 0:
        return None
    line: dict[str, Any] = json.loads(text[start : text.index(b"\n", start)])
    return line
