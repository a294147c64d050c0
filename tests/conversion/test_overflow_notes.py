"""Numbers that `--dtype` makes infinite are refused or reported, and numbers that it makes zero are reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckptx
from ckptx.errors import InputError
from ckptx.report.report import Log
from tests.conversion.steps import CONFIG
from tests.support.checkpoint_writers import Value, array, llama, names_in, write_hf

LARGE, SMALL = 1e6, 1e-12  # out of range for fp16
NAMES = list(llama(layers=3))


def values(number: float, tensors: int, elements: int = 1) -> dict[str, Value]:
    """Return a Llama of ones in which the first elements of the first tensors are another number."""
    found = {}
    for index, (name, (_, shape, _)) in enumerate(llama(layers=3).items()):
        data = np.ones(shape, np.float32)
        data.reshape(-1)[: elements if index < tensors else 0] = number
        found[name] = array(data)
    return found


def source(root: Path, tensors: dict[str, Value]) -> Path:
    return write_hf(root, tensors, config={**CONFIG, "num_hidden_layers": 3})


@pytest.mark.parametrize(
    ("tensors", "elements", "refusal", "more"),
    [
        (1, 1, f'1 number in 1 tensor ("{NAMES[0]}") is too large', None),
        (1, 2, f'2 numbers in 1 tensor ("{NAMES[0]}") are too large', None),
        (20, 1, f'20 numbers in 20 tensors ("{min(NAMES[:20])}", ...) are too large', None),
        (21, 1, f'21 numbers in 21 tensors ("{min(NAMES[:21])}", ...) are too large', "and 1 more tensor with too"),
        (30, 2, f'60 numbers in 30 tensors ("{min(NAMES)}", ...) are too large', "and 10 more tensors with too"),
    ],
)
def test_an_overflow_is_refused_and_the_first_tensors_are_listed(
    tmp_path: Path, tensors: int, elements: int, refusal: str, more: str | None
) -> None:
    log = Log()
    with pytest.raises(InputError, match=r"^--dtype fp16: ") as caught:
        ckptx.convert(
            "to-hf",
            source(tmp_path / "hf", values(LARGE, tensors, elements)),
            tmp_path / "out",
            dtype="fp16",
            log=log,
        )
    assert refusal in str(caught.value) and caught.value.exit_code == 3
    assert names_in(tmp_path) == ["hf"]
    listed = [note for note in log.notes if note.endswith("too large")]
    assert len(listed) == min(tensors, 20) and len({*listed}) == len(listed)
    count = f"{elements} number" + ("s" if elements > 1 else "")
    assert {*listed} <= {f'"{name}": {count} too large' for name in NAMES[:tensors]}
    assert [note for note in log.notes if "too large numbers" in note] == ([f"{more} large numbers"] if more else [])


@pytest.mark.parametrize("tensors", [0, 1, 30])
@pytest.mark.parametrize("kind", ["overflows", "underflows"])
def test_an_allowed_overflow_and_an_underflow_are_counted(tmp_path: Path, kind: str, tensors: int) -> None:
    number, options = (LARGE, {"allow_overflow": True}) if kind == "overflows" else (SMALL, {})
    hf = source(tmp_path / "hf", values(number, tensors, 3))
    report = ckptx.convert("to-hf", hf, tmp_path / "out", dtype="fp16", **options)
    found = load_file(tmp_path / "out" / "model.safetensors")
    lost = {name: int((~torch.isfinite(each) | (each == 0)).sum()) for name, each in found.items()}
    assert sum(lost.values()) == 3 * tensors
    rows = getattr(report, kind) or []
    assert {row["name"]: row["count"] for row in rows} == {name: count for name, count in lost.items() if count}
    assert getattr(report, "underflows" if kind == "overflows" else "overflows") is None
    assert (getattr(report, kind) is None) == (tensors == 0)
    notes = [note for note in report.notes if "became" in note]
    end = {"overflows": "infinite (--allow-overflow)", "underflows": "zero: too small for the target dtype"}[kind]
    first = f'"{min(NAMES[:tensors])}"{", ..." if tensors > 1 else ""}' if tensors else ""
    names = f"{tensors} tensor{'s' if tensors > 1 else ''} ({first})"
    assert notes == ([f"{3 * tensors} numbers in {names} became {end}"] if tensors else [])
