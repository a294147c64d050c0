"""`ckptx.verify`: which of the two comparisons is made, with which options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.api import verify_run as running
from ckptx.comparison import contents as bits
from ckptx.errors import InputError, UsageError
from ckptx.options.verify import VerifyOptions, VerifyRunOptions
from tests.support.checkpoint_writers import llama, write_hf


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of each comparison that was made."""
    found: list[Any] = []
    monkeypatch.setattr(bits, "verify_bytes", found.append)
    monkeypatch.setattr(running, "verify_models", found.append)
    return found


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return tmp_path / "a", tmp_path / "b"


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (False, {"dtype": "bf16", "workers": 2, "max_memory": 9 << 20}),
        (True, {"tp": 2, "backward": False, "tp_plan": "x"}),
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_options_reach_the_one_that_has_them(
    made: list[Any], pair: tuple[Path, Path], kind: Any, run: bool, options: dict[str, Any]
) -> None:
    other = {"dtype": None, "tp": None} | options  # None is not given
    ckptx.verify(kind(pair[0]), kind(pair[1]), run=run, **other)
    paths = kind(pair[0]), kind(pair[1])
    assert made == [VerifyRunOptions(*paths, run=True, **options) if run else VerifyOptions(*paths, **options)]


@pytest.mark.parametrize(
    ("run", "options", "said"),
    [
        (False, {"tp": 1}, ("--tp", "--run")),
        (False, {"backward": False}, ("--backward", "--run")),
        (False, {"compile": True}, ("--compile", "--run")),
        (True, {"dtype": "bf16"}, ("--dtype", "--compute-dtype")),
        (True, {"workers": 2}, ("--workers", "--run")),
        (False, {"pp": 2}, ("--pp", "--run")),
        (True, {"optimizer": "keep"}, ("--optimizer",)),
        (False, {"nonsense": 0}, ("--nonsense",)),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    made: list[Any], pair: tuple[Path, Path], run: bool, options: dict[str, Any], said: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as error:
        ckptx.verify(*pair, run=run, **options)
    assert all(word in str(error.value) for word in said)
    assert made == []


@pytest.mark.parametrize("run", [False, True])
def test_what_is_not_there_is_refused_by_its_name(pair: tuple[Path, Path], run: bool) -> None:
    write_hf(pair[0], llama())
    for paths in ((pair[0] / "gone", pair[1]), (pair[0], pair[1] / "gone")):
        with pytest.raises(InputError, match="gone"):
            ckptx.verify(*paths, run=run)
