"""Options as they are given, parsed once for the command line and the Python API."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptx.errors import UsageError
from ckptx.options import ConvertArguments, ConvertOptions, default_workers, parse_size


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


def test_what_the_functions_take_is_what_the_options_are() -> None:
    assert set(ConvertArguments.__annotations__) == set(ConvertOptions.__dataclass_fields__) - {"max_shard_size_given"}


@pytest.mark.slow
def test_a_type_checker_knows_the_arguments(tmp_path: Path) -> None:
    """A misspelled name, a word that is none, a value of another type: each is found before anything runs."""
    lines = [
        'ckptx.convert("hf2dcp", "a", "b", dtype="bf16", workers=2, max_shard_size="5GB", base=None)',
        'ckptx.reshard("a", Path("b"), tp=4, pp=2, to="dcp", tp_plan=Path("plan.json"))',
        'ckptx.convert("hf2dcp", "a", "b", dtyp="bf16")',
        'ckptx.convert("hf2dcp", "a", "b", dtype="int4")',
        'ckptx.reshard("a", "b", tp="4")',
        'ckptx.verify("a", Path("b"), dtype="bf16").parameters',
        'ckptx.verify("a", "b", run=True, tp=2, compute_dtype="fp32", cache_dir="c").max_abs',
        'ckptx.verify("a", "b", tp=2)',
        'ckptx.verify("a", "b", run=True, compute_dtype="int8")',
        'ckptx.verify("a", "b", run=True).parameters',
    ]
    (tmp_path / "use.py").write_text("\n".join(["from pathlib import Path", "import ckptx", *lines]) + "\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            "pyproject.toml",
            "--cache-dir",
            tmp_path / "cache",
            tmp_path / "use.py",
        ],
        capture_output=True,
        text=True,
    )
    found = [line.split(":")[1] for line in done.stdout.splitlines() if "error" in line and "use.py" in line]
    assert found == ["5", "6", "7", "10", "11", "12"], done.stdout + done.stderr
