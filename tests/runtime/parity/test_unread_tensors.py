"""What `verify --run` says of stored tensors that no part of the model reads: every kind, on either side or both."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import ckptx
from ckptx.architecture.extra_tensors import EXTRA_TENSOR_KINDS
from ckptx.report.documents.verify_run import RunReport
from tests.support.checkpoint_writers import LLAMA, Value, llama, value, write_dcp, write_hf
from tests.support.extra_tensors import EXAMPLES
from tests.support.slow import slow_but

CONFIG = {
    **LLAMA, "vocab_size": 16, "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
SIDES = ("reference", "checkpoint", "both")
REASONS = {row.name: row.reason for row in EXTRA_TENSOR_KINDS}
KINDS = list(EXAMPLES)
CASES = slow_but(list(itertools.product(KINDS, SIDES)), [(kind, "checkpoint") for kind in KINDS[:4]])
STRANGE = ("model.layers.0.self_attn.q_norm.weight", "vision_tower.blocks.0.weight", "v_head.weight")


def run(tmp_path: Path, extra: dict[str, Value], side: str) -> RunReport:
    """`verify --run` of a Llama against itself, with extra tensors on one side or on both."""
    places = [
        write_hf(tmp_path / each, {**llama(), **(extra if side in (each, "both") else {})}, config=CONFIG)
        for each in SIDES[:2]
    ]
    return ckptx.verify(*places, run=True, backward=False)


def sides_of(side: str) -> list[str]:
    return ["reference", "checkpoint"] if side == "both" else [side]


@pytest.mark.parametrize(("kind", "side"), CASES)
def test_what_may_be_there_is_a_note_that_names_it_with_its_reason(tmp_path: Path, kind: str, side: str) -> None:
    extra = {name: value("BF16", *shape) for name, shape in EXAMPLES[kind]}
    report = run(tmp_path, extra, side)
    assert (report.exit, list(report.differing)) == (0, [])
    assert {row["name"] for row in report.unread_tensors} == set(extra)
    for row in report.unread_tensors:
        assert (row["reason"], row["is_expected"]) == (REASONS[kind], True)
        assert row["stored_in"] == sides_of(side)
    (note,) = (each for each in report.notes if REASONS[kind] in each)
    assert note.startswith(f"the {' and the '.join(sides_of(side))} hold") and next(iter(extra)) in note


@pytest.mark.parametrize(
    ("name", "side"),
    slow_but(list(itertools.product(STRANGE, SIDES)), [*itertools.product(STRANGE[:1], SIDES), (STRANGE[1], "both")]),
)
def test_a_tensor_of_another_model_is_a_difference_unless_the_reference_has_it(
    tmp_path: Path, name: str, side: str
) -> None:
    report = run(tmp_path, {name: value("BF16", 4)}, side)
    assert [row["name"] for row in report.differing] == ([name] if side == "checkpoint" else [])
    (row,) = report.unread_tensors
    assert (row["name"], row["is_expected"], row["stored_in"]) == (name, False, sides_of(side))
    if side != "checkpoint":
        assert any(name in each and "were not compared" in each for each in report.notes)


@pytest.mark.parametrize("dtype", ["F32", pytest.param("F16", marks=pytest.mark.slow), "BF16"])
def test_stored_dtypes_are_counted_and_are_no_difference(tmp_path: Path, dtype: str) -> None:
    """Values that every dtype has, so that nothing but the dtype differs."""
    ones = {name: one(shape, "BF16") for name, (_, shape, _) in llama().items()}
    others = {name: one(shape, dtype) for name, (_, shape, _) in llama().items()}
    places = [write_hf(tmp_path / str(at), each, config=CONFIG) for at, each in enumerate((ones, others))]
    report = ckptx.verify(*places, run=True, backward=False)
    assert (report.exit, list(report.differing)) == (0, [])
    found = {row["against"]: (row["stored"], row["expected"], row["tensors"]) for row in report.dtype_differences}
    expected = (dtype, "BF16", len(ones))
    assert found == ({} if dtype == "BF16" else {"reference": expected, "config": expected})
    notes = [each for each in report.notes if f"stored as {dtype}" in each]
    assert len(notes) == len(found)


def test_a_tied_name_that_only_the_checkpoint_has_is_among_the_stored_dtypes(tmp_path: Path) -> None:
    tied = {**CONFIG, "tie_word_embeddings": True}
    ones, others = (
        {name: one(shape, dtype) for name, (_, shape, _) in llama(head=False).items()} for dtype in ("BF16", "F32")
    )
    aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    a = write_hf(tmp_path / "a", ones, config=tied)
    b = write_dcp(tmp_path / "b", others, aliases=aliases, config=tied)
    report = ckptx.verify(a, b, run=True, backward=False)
    assert {row["against"]: row["tensors"] for row in report.dtype_differences} == dict.fromkeys(
        ("reference", "config"), len({*ones, *aliases})
    )


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("titan_side", ["reference", "checkpoint"])
def test_stored_dtypes_are_compared_under_common_names(tmp_path: Path, titan_side: str, is_tied: bool) -> None:
    config = {**CONFIG, "tie_word_embeddings": is_tied}
    ones = {name: one(shape, "BF16") for name, (_, shape, _) in llama(head=not is_tied).items()}
    hf = write_hf(tmp_path / "hf", ones, config=config)
    ckptx.convert("hf2dcp", hf, tmp_path / "titan", names="torchtitan", dtype="fp32", tied="drop")
    sides = (tmp_path / "titan", hf) if titan_side == "reference" else (hf, tmp_path / "titan")
    report = ckptx.verify(*sides, run=True, backward=False)
    assert report.exit == 0
    expected = ("F32", "BF16") if titan_side == "checkpoint" else ("BF16", "F32")
    (row,) = (each for each in report.dtype_differences if each["against"] == "reference")
    assert (row["stored"], row["expected"], row["tensors"]) == (*expected, len(ones))
    assert any(note.startswith(f"{len(ones)} tensors of the checkpoint are stored as") for note in report.notes)


def one(shape: tuple[int, ...], dtype: str) -> Value:
    """A tensor of ones."""
    data = {"F32": b"\x00\x00\x80\x3f", "F16": b"\x00\x3c", "BF16": b"\x80\x3f"}[dtype]
    count = 1
    for size in shape:
        count *= size
    return dtype, shape, data * count
