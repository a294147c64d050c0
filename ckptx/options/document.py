"""Options as a JSON document, for a rank that another process starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from ckptx.errors import InternalError
from ckptx.options.option import Options, settings_of

T = TypeVar("T", bound=Options)


def to_json(options: Options) -> str:
    """Return the options that are set as JSON; hooks are left out, because a function or a log cannot be JSON."""
    values = {setting.name: value for setting, value in options.values()}
    return json.dumps({"command": options.command, "options": values}, default=_to_plain)


def from_json(text: str, table: type[T]) -> T:
    """Return the options in a document of `to_json`.

    Raises:
        InternalError: The document is for another command, or has an unknown option.
    """
    document = json.loads(text)
    unknown = sorted(document["options"].keys() - settings_of(table).keys())
    if document["command"] != table.command or unknown:
        raise InternalError(
            f"document of options of {document['command']} (unknown: {unknown or 'none'}); those of {table.command} "
            "are required"
        )
    return table(**document["options"])


def _to_plain(value: object) -> str | Sequence[object]:
    if isinstance(value, Path):
        return str(value)
    raise InternalError(f"{value!r} cannot be written to JSON")
