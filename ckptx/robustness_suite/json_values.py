"""List the values of a JSON file by path, as strings that are equal only for equal values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptx.catalog.object_ids import ObjectIds
from ckptx.robustness_suite.pickle_normalizer import Dictionary
from ckptx.robustness_suite.pickle_reader import digest_if_long
from ckptx.robustness_suite.value_digests import ValueDigests
from ckptx.untrusted.json_text import parse_json


def values_of_json(
    data: bytes, path: Path, skipped_keys: re.Pattern[str], run_folder: Path | None = None
) -> Iterator[tuple[str, Any, str]]:
    """Yield the values of a JSON file; a list or an empty object is one value.

    Args:
        data: Contents of the file.
        path: Path of the file, for error messages.
        skipped_keys: Pattern of keys whose values are skipped.
        run_folder: Folder whose path is replaced by `{out}` in strings, as it differs between runs; None for none.

    Yields:
        Path of a value, with dots; the value; and the value as a string. An object with a key that contains a dot or is
        empty is yielded, too, with a string that lists these keys, so that {"a.b": 1} differs from {"a": {"b": 1}}.

    Raises:
        InputError: The file is not valid JSON, or nested too deeply.
        UnicodeDecodeError: The file is not UTF-8.
    """
    text = data.decode("utf-8")
    if run_folder is not None:
        text = text.replace(json.dumps(str(run_folder.absolute()))[1:-1], "{out}")
    tree = parse_json(text, path)
    pending: list[tuple[str, Any]] = [("", tree)]  # popped from the end
    while pending:
        name, value = pending.pop()
        children = value.items() if isinstance(value, dict) else ()
        if skipped_keys.fullmatch(name.rpartition(".")[2]):
            continue
        if not children:
            yield name, value, _value_text(value, str(path))
            continue
        unusual_keys = sorted(key for key in value if key == "" or "." in key)
        if unusual_keys:
            yield name, value, f"object with the keys {digest_if_long(repr(unusual_keys))}"
        pending.extend((".".join(filter(None, (name, key))), item) for key, item in sorted(children, reverse=True))


def _value_text(value: Any, subject: str) -> str:
    if type(value) not in (list, dict):
        return digest_if_long(repr(value))
    kind = "list" if type(value) is list else "object"
    return f"{kind} {ValueDigests(subject, _JsonNormalizer().normalize, repr).hex_digest(value)}"


class _JsonNormalizer:
    """Convert JSON objects to `Dictionary`, which `ValueDigests` can digest; each object once."""

    def __init__(self) -> None:
        self._normalized: dict[int, Dictionary] = {}
        self._ids = ObjectIds()

    def normalize(self, value: Any) -> Any:
        if type(value) is not dict:
            return value
        key = self._ids(value)
        if key not in self._normalized:
            self._normalized[key] = Dictionary("object", list(value.items()))
        return self._normalized[key]
