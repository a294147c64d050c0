"""Calls of the Python functions with missing, additional or wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest

import ckptx
from ckptx.errors import ArgumentTypeError, CkptxError

FUNCTIONS = ("inspect", "convert", "reshard", "diff", "verify", "forecast", "robustness")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_missing_additional_and_duplicate_arguments_are_errors_of_ckptx(name: str) -> None:
    function = getattr(ckptx, name)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(("a",) * 9, {}), (("a",), {"path": "b", "no_option": 1})]
    if name != "forecast":  # takes a recipe in place of its argument
        calls.append(((), {}))
    for args, kwargs in calls:
        with pytest.raises(ArgumentTypeError) as error:
            function(*args, **kwargs)
        assert isinstance(error.value, CkptxError) and isinstance(error.value, TypeError) and error.value.exit_code == 2


@pytest.mark.parametrize("path", [None, 5, b"hf", ["hf"], object()])
def test_open_checkpoint_of_no_path(path: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"path: .* must be a string or a path"):
        ckptx.open_checkpoint(path)
