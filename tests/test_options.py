"""Options as they are given, parsed once for the command line and the Python API."""

from __future__ import annotations

from typing import Any

import pytest

from ckptx.errors import UsageError
from ckptx.options import ConvertOptions, default_workers, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9), ("5GiB", 5 << 30), ("256mb", 256 * 10**6), ("1.5 KiB", 1536), ("7", 7), (7, 7), ("7B", 7),
        (" 2 TB ", 2 * 10**12),
    ],
)  # fmt: skip
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text, "--x") == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "5 XB", "GB", "1e9", "0.1", "5GB5", "nan", "x"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match=r"--x: .* is not a size"):
        parse_size(text, "--x")


def test_defaults() -> None:
    options = ConvertOptions.parse("dcp2hf", {})
    assert (options.dtype, options.tied, options.prefix, options.base) == ("auto", "auto", None, None)
    assert (options.max_shard_size, options.max_shard_size_given, options.max_memory) == (5 * 10**9, False, 256 * 10**6)
    assert options.workers == default_workers() >= 1


def test_none_and_auto_are_not_given() -> None:
    assert ConvertOptions.parse("hf2dcp", {"prefix": "auto", "files": None, "base": None}).prefix is None


def test_spellings_of_a_dtype() -> None:
    assert {ConvertOptions.parse("hf2dcp", {"dtype": name}).dtype for name in ("bf16", "bfloat16")} == {"bf16"}


@pytest.mark.parametrize(
    ("direction", "options"),
    [
        ("hf2dcp", {"nonsense": 1}),
        ("hf2dcp", {"base": "x"}),
        ("hf2dcp", {"max_shard_size": "5GB"}),
        ("dcp2hf", {"files": 2}),
        ("dcp2hf", {"tied": "alias"}),
        ("hf2dcp", {"workers": True}),
        ("hf2dcp", {"workers": 1.5}),
        ("hf2dcp", {"files": 0}),
        ("hf2dcp", {"max_memory": "1MB"}),
        ("hf2dcp", {"dtype": "int8"}),
    ],
)
def test_what_is_refused(direction: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ConvertOptions.parse(direction, options)
