"""What names may do to a terminal or a page: nothing."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.cli import main as main_module
from ckptx.untrusted.printable import escape_lines, escape_strings, one_line
from tests.support.checkpoint_writers import framed, llama, value, write_hf

ACTIVE = [
    *map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)),
    *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A)),
    "\u200e", "\u200f", "\u061c", "\u2028", "\u2029", "\u200b", "\u200d", "\ufeff", "\ud800", "\udfff", "\U000e0041",
]  # fmt: skip


def is_active(character: str) -> bool:
    """By the categories of Unicode: control, format, half a pair, separators of lines and paragraphs."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _HARMLESS


# Marks that belong to numbers and syllables of scripts: they have a shape and stay in place.
_HARMLESS = [chr(code) for code in (*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD)] + [
    chr(code) for code in (*range(0x13430, 0x13440), *range(0x1BCA0, 0x1BCA4), *range(0x1D173, 0x1D17B))
]


@pytest.mark.parametrize("code", [0, 0x10000])
def test_no_active_character_of_unicode_gets_through(code: int) -> None:
    planes = [chr(each) for each in range(code, code + 0x10000 if code == 0 else 0x110000)]
    through = [hex(ord(each)) for each in planes if is_active(each) and one_line(each) == each]
    assert through == []
    assert all(one_line(each) == each for each in "abc äöü 模型 \U0001f600 .*[]{}")


@given(st.text(max_size=50), st.lists(st.sampled_from(ACTIVE), max_size=5))
@settings(max_examples=200, deadline=None)
def test_lines_are_clean_and_one(text: str, extra: list[str]) -> None:
    said = one_line(text + "".join(extra))
    assert not any(map(is_active, said))
    said.encode("utf-8")
    assert not any(map(is_active, escape_lines(text).replace("\n", "")))


def test_long_lines_are_cut_in_the_middle() -> None:
    said = one_line("a" * 10_000 + "b")
    assert len(said) < 5000 and "6,001 characters omitted" in said and said.endswith("b")
    assert one_line("a" * 10_000, max_length=0) == "a" * 10_000


def test_a_report_is_cleaned_through_and_through() -> None:
    spoiled = {"a\n": ["\x1b[2J", ("\u202e", 3)], "b": {"c": None}}
    assert escape_strings(spoiled) == {"a\\n": ["\\x1b[2J", ("\\u202e", 3)], "b": {"c": None}}


@given(st.lists(st.sampled_from(["a\n", "a\\n", "a\\n (2)", "\x07", "\\x07", "\\x07 (2)", "b"]), unique=True))
def test_names_that_become_equal_stay_apart_and_escaped(names: list[str]) -> None:
    found = escape_strings({name: [name] for name in names})
    assert [item for (item,) in found.values()] == [one_line(name) for name in names]
    assert not any(is_active(character) for key in found for character in key)


NAMES = [
    "w\x1b[31mred",
    "w\r\nerror: no",
    "w\u202edna",
    "w\u2066x\u2069",
    "w\x9b2J",
    "w\u2028x",
    "w\x00",
    "w\x07",
    "</script><!--",
]
# Each is a way of a name to the terminal: arguments, and what the header says of the tensor.
WAYS = {
    "listed": (["inspect", "--tensors"], {}),
    "grouped": (["inspect"], {}),
    "refused": (["inspect"], {"shape": [7]}),
    "of a dtype": (["inspect"], {"dtype": "F\x1b[31m"}),
    "ranks": (["inspect", "--ranks"], {}),
    "differs": (["diff"], {}),
    "verified": (["verify"], {}),
    "converted": (["convert", "hf2dcp"], {}),
    "quiet": (["-q", "verify"], {}),
    "with a traceback": (["-v", "inspect"], {"shape": [7]}),
}


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("way", WAYS)
def test_no_way_lets_a_name_act(
    way: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words, spoil = WAYS[way]
    hf = write_hf(tmp_path / "hf", llama())
    root = write_hf(tmp_path / "spoiled", llama())
    rows = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **spoil}}
    (root / "model.safetensors").write_bytes(framed(rows, bytes(4)))
    paths = {"diff": [root, hf], "verify": [root, hf], "-q": [root, hf], "convert": [root, tmp_path / "out"]}
    for extra in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["ckptx", *words, *map(str, paths.get(words[0], [root])), *extra])
        with pytest.raises(SystemExit) as left:
            main_module.main()
        out, err = capfd.readouterr()
        assert left.value.code in (0, 1, 3, 4, 5), err
        assert not re.search("\r|[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", out + err), (out, err)
        assert not any(line.startswith("error: no") for line in err.splitlines())
        if extra:
            document = json.loads(out)
            assert out.isascii()
            if way == "listed":
                assert [row["name"] for row in document["selected_tensors"]] == [name]  # documents keep the names
        elif way == "refused":
            assert len(err.splitlines()) == 1


def test_a_page_shows_names_and_does_nothing_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = write_hf(tmp_path / "hf", {name: value("F32", 2, 2) for name in NAMES})
    monkeypatch.setattr("sys.argv", ["ckptx", "inspect", str(root), "--html", str(tmp_path / "page.html")])
    with pytest.raises(SystemExit):
        main_module.main()
    page = (tmp_path / "page.html").read_bytes().decode("utf-8")
    assert not any(is_active(each) for each in page if each != "\n")
    assert page.lower().count("</script") == 2 and "<!--" not in page
