"""The list of renamed report fields: its names are fields, and documents are translated through it."""

from __future__ import annotations

import pytest

from ckptx.report.schema import build_schema, report_classes
from tests.support.import_tool import tool

compare_trees = tool("compare_trees")
COMMANDS = compare_trees.RENAMED["commands"]


@pytest.mark.parametrize("command", COMMANDS)
def test_new_names_are_fields_and_old_ones_are_not(command: str) -> None:
    definitions = build_schema()["$defs"]
    fields = {
        name
        for each in report_classes()
        if any(words.split()[0] == command for words in each.commands)
        for name in definitions[each.__name__]["properties"]
    }
    renamed = {old: new for old, new in COMMANDS[command].items() if "." not in old}
    assert renamed and not renamed.keys() & fields and set(renamed.values()) <= fields


def test_an_older_document_is_translated() -> None:
    old = {
        "schema_version": 2, "command": "convert to-dcp", "fit": {"misfits": [], "note": None}, "memory": 1,
        "ranks": [{"memory": 2}],
    }  # fmt: skip
    new = {
        "schema_version": 3, "command": "convert to-dcp", "config_check": {"mismatches": [], "note": None},
        "buffer_bytes": 1, "ranks": [{"memory": 2}],
    }  # fmt: skip
    assert compare_trees.with_new_names(old) == new
    assert compare_trees.with_new_names(new) == new
    assert compare_trees.with_new_names({"exit": 3, "error": "none"}) == {"exit": 3, "error": "none"}
