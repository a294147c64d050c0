"""Reads the shape rules of one class out of their generated table, without parsing the rest."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptx.architecture.shape_rows import SCHEMA, decode_shapes
from ckptx.architecture.shape_rules import ShapeRules

PATH = Path(__file__).with_name("shapes.jsonl")


@functools.cache
def shape_rules(class_name: str) -> ShapeRules | None:
    """The rules of a class, None where there are none."""
    values = _line("class", class_name)
    if values is None:
        return None

    def body(name: str) -> Mapping[str, Any]:
        found = _line("body", name)
        assert found is not None, f"shapes.jsonl has no body {name}"
        return found

    return decode_shapes(values, body)


def class_names() -> list[str]:
    """Every class in the table, sorted."""
    lead = b'{"class":"'
    lines = (line for line in _text().split(b"\n") if line.startswith(lead))
    return [line[len(lead) :].split(b'"', 1)[0].decode("ascii") for line in lines]


@functools.cache
def _text() -> bytes:
    text = PATH.read_bytes() if PATH.exists() else b""
    if text:
        first = json.loads(text.split(b"\n", 1)[0])
        assert first["schema"] == SCHEMA, f"shapes.jsonl has schema {first['schema']}, this reader needs {SCHEMA}"
    return text


def _line(key: str, value: str) -> dict[str, Any] | None:
    """The JSON object whose first key has this value; every line starts with its key."""
    text = _text()
    start = text.find(f'\n{{"{key}":{json.dumps(value)},'.encode("ascii")) + 1
    if start == 0:
        return None
    line: dict[str, Any] = json.loads(text[start : text.index(b"\n", start)])
    return line
