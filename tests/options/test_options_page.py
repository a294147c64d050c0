"""docs/options.md has every option of every command, with its default and its meaning."""

from __future__ import annotations

import pytest

from ckptx.options.commands import COMMANDS
from tests.support.import_tool import tool

build = tool("build_options_page")


def test_the_tables_are_those_of_the_commands() -> None:
    text = build.PATH.read_text(encoding="utf-8")
    assert build.page(text) == text, "run tools/build_options_page.py"


@pytest.mark.parametrize("words", COMMANDS)
def test_every_option_is_there(words: str) -> None:
    text = build.PATH.read_text(encoding="utf-8").partition(f"### {words}\n")[2].partition("\n### ")[0]
    for setting, _ in build.options_of(COMMANDS[words]):
        assert f"`{setting.flag}`" in text


def test_a_hidden_option_is_not_there() -> None:
    text = build.PATH.read_text(encoding="utf-8")
    assert "### convert to-hf\n" in text
    section = text.partition("### convert to-hf\n")[2].partition("\n### ")[0]
    assert "--optimizer" not in section
