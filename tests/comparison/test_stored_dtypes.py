"""Dtypes in which tensors are stored: every pair of them is counted, against the reference and against the config."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptx
from ckptx.architecture.class_table import lookup
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import full_region
from ckptx.comparison.stored_dtypes import describe_dtype_differences, find_dtype_differences
from tests.support.checkpoint_writers import LLAMA, llama, write_hf

FLOATS = ("F64", "F32", "F16", "BF16")
STORED = (*FLOATS, "F8_E4M3", "I8", "U8")
TORCH = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
WORD = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
NAMES = sorted(llama())
CLASS = lookup("LlamaForCausalLM")


def entries(dtypes: dict[str, str]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(name, DTYPES_BY_NAME[dtype], (2, 2), (Chunk(full_region((2, 2)), name, 0, 8),))
        for name, dtype in sorted(dtypes.items())
    }


@given(
    reference=st.fixed_dictionaries({name: st.sampled_from(STORED) for name in NAMES}),
    checkpoint=st.fixed_dictionaries({name: st.sampled_from(STORED) for name in NAMES}),
    declared=st.sampled_from([None, *FLOATS]),
    key=st.sampled_from(["dtype", "torch_dtype"]),
)
@settings(deadline=None)
def test_every_tensor_is_counted_once_against_each(
    reference: dict[str, str], checkpoint: dict[str, str], declared: str | None, key: str
) -> None:
    config: dict[str, Any] = {} if declared is None else {key: TORCH[declared]}
    rows = find_dtype_differences(entries(reference), entries(checkpoint), config, CLASS)
    expected = {
        ("reference", checkpoint[name], reference[name]): [
            each for each in NAMES if (checkpoint[each], reference[each]) == (checkpoint[name], reference[name])
        ]
        for name in NAMES
        if checkpoint[name] != reference[name]
    }
    for stored in FLOATS:
        names = [name for name in NAMES if checkpoint[name] == stored]
        if declared is not None and stored != declared and names:
            expected["config", stored, declared] = names
    found = {(row["against"], row["stored"], row["expected"]): (row["tensors"], row["names"]) for row in rows}
    assert found == {pair: (len(names), names[:3]) for pair, names in expected.items()}
    assert len(list(describe_dtype_differences(rows, "float32"))) == len(rows)


def test_what_the_class_keeps_in_float32_is_no_difference_from_the_config() -> None:
    known = lookup("T5ForConditionalGeneration")
    assert known is not None
    names = {"encoder.block.0.layer.1.DenseReluDense.wo.weight": "F32", "shared.weight": "F32"}
    (row,) = find_dtype_differences({}, entries(names), {"dtype": "float16"}, known)
    assert row["names"] == ["shared.weight"]


def test_tensors_that_the_class_does_not_have_are_left_out() -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": "F32"}
    assert find_dtype_differences({}, entries(extra), {"dtype": "bfloat16"}, CLASS) == []


@pytest.mark.parametrize(("ours", "theirs"), itertools.permutations(("F32", "F16", "BF16"), 2))
def test_verify_says_which_cast_makes_two_dtypes_comparable(tmp_path: Path, ours: str, theirs: str) -> None:
    a = write_hf(tmp_path / "a", llama(dtype=ours), config=LLAMA)
    b = write_hf(tmp_path / "b", llama(dtype=theirs), config=LLAMA)
    report = ckptx.verify(a, b)
    assert report.exit == 1
    (note,) = (each for each in report.notes if each.startswith("dtype: "))
    assert f"{len(NAMES)} tensors with a dtype other than in the reference" in note and "contents not compared" in note
    assert f"pass --dtype {WORD[theirs]} to cast the reference first" in note
    again = ckptx.verify(a, b, dtype=WORD[theirs])
    assert not any(each.startswith("dtype: ") for each in again.notes)
    assert {row["what"] for row in again.differing} == {"content"}


def test_verify_names_no_cast_where_none_helps(tmp_path: Path) -> None:
    a, b = llama(), llama(dtype="F32") | {"model.norm.weight": llama(dtype="F16")["model.norm.weight"]}
    report = ckptx.verify(write_hf(tmp_path / "a", a), write_hf(tmp_path / "b", b))
    (note,) = (each for each in report.notes if each.startswith("dtype: "))
    assert note.endswith("no single --dtype makes them comparable")


@pytest.mark.parametrize("against", ["reference", "config"])
@pytest.mark.parametrize(
    ("names", "subject"), [(["x"], "1 tensor of the checkpoint is"), (["x", "y"], "2 tensors of the checkpoint are")]
)
def test_the_line_of_a_difference_agrees_with_its_number(against: str, names: list[str], subject: str) -> None:
    row = {"against": against, "stored": "F32", "expected": "BF16", "tensors": len(names), "names": names}
    (line,) = describe_dtype_differences([row], "bfloat16")
    assert line.startswith(f"{subject} stored as F32") and '"x"' in line
