"""`diff`: rows for generated pairs of checkpoints, tied names, common names of different formats, borrowed configs."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptx
from ckptx.errors import InputError
from tests.support.checkpoint_writers import LLAMA, llama, value, write_dcp, write_hf, write_safetensors

Headers = dict[str, tuple[str, tuple[int, ...]]]
TIED = {**LLAMA, "tie_word_embeddings": True}
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"

HEADERS = st.dictionaries(
    st.sampled_from(["a", "b.weight", "c", "d.bias"]),
    st.tuples(
        st.sampled_from(["F32", "F16", "BF16", "I64"]),
        st.lists(st.integers(1, 3), max_size=2).map(tuple),
    ),
    min_size=1,
)


def written(path: Path, headers: Headers) -> Path:
    return write_safetensors(path, {name: value(dtype, *shape) for name, (dtype, shape) in headers.items()})


def described(headers: Headers, name: str) -> str | None:
    return f"{headers[name][0]} {list(headers[name][1])}" if name in headers else None


@settings(deadline=None, max_examples=60)
@given(HEADERS, HEADERS)
def test_every_difference_is_a_row(tmp_path_factory: pytest.TempPathFactory, first: Headers, second: Headers) -> None:
    root = tmp_path_factory.mktemp("pair")
    report = ckptx.diff(written(root / "a.safetensors", first), written(root / "b.safetensors", second))
    expected = []
    for name in {**first, **second}:
        if first.get(name) != second.get(name):
            kind = "dtype"
            if name not in first or name not in second:
                kind = "missing"
            elif first[name][1] != second[name][1]:
                kind = "shape"
            expected.append({"name": name, "what": kind, "a": described(first, name), "b": described(second, name)})
    assert sorted(report.differing, key=lambda row: row["name"]) == sorted(expected, key=lambda row: row["name"])
    assert report.exit == (1 if expected else 0)
    assert report.command == "diff" and report.tensors == len(first)
    assert report.compared == len(first.keys() & second.keys())
    assert report.total == len(first.keys() | second.keys())
    assert report.dtypes == {
        "before": Counter(dtype for dtype, _ in first.values()),
        "after": Counter(dtype for dtype, _ in second.values()),
    }
    parameters = sum(prod(shape) for _, shape in first.values())
    matrices = Counter(header for header in first.values() if len(header[1]) == 2)
    may_be_tied = max(matrices.values(), default=0) > 1  # all contents are equal, and there is no config
    assert report.parameters == parameters or (may_be_tied and report.parameters < parameters)
    assert report.tied_tensors == []


@pytest.mark.parametrize("swapped", [False, True])
def test_a_tied_name_of_one_side_is_no_difference(tmp_path: Path, swapped: bool) -> None:
    equal = {**llama(), HEAD: llama()[EMBED]}
    both = write_hf(tmp_path / "both", equal, config=TIED), write_hf(tmp_path / "one", llama(head=False), config=TIED)
    report = ckptx.diff(*both[:: -1 if swapped else 1])
    assert report.exit == 0 and report.differing == []
    assert report.tied_tensors == [{"name": HEAD, "tied_to": EMBED, "only_in": str(both[0])}]
    assert report.compared == report.total == 21


@pytest.mark.parametrize("form", ["hf", "dcp"])
@pytest.mark.parametrize("config", [TIED, LLAMA])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_head_of_its_own_differs_from_a_tied_one(
    tmp_path: Path, swapped: bool, config: dict[str, Any], form: str
) -> None:
    """The head has other values than the embedding, even if the config declares them tied."""
    write = write_hf if form == "hf" else write_dcp
    both = (
        write(tmp_path / "untied", llama(), config=config),
        write_hf(tmp_path / "tied", llama(head=False), config=TIED),
    )
    report = ckptx.diff(*both[:: -1 if swapped else 1])
    values = ["a separate tensor", f"tied to {EMBED}"][:: -1 if swapped else 1]
    assert report.differing == [{"name": HEAD, "what": "tie", "a": values[0], "b": values[1]}]
    assert (report.exit, report.tied_tensors, report.total) == (1, [], 21)
    text = report.summary()
    assert f"{HEAD}: tie: {values[0]} in A, {values[1]} in B" in text and "DIFFERENT: 1 of 21 tensors" in text
    assert ckptx.verify(*both[:: -1 if swapped else 1]).exit == 1


def test_a_missing_name_that_is_not_tied_is_a_difference(tmp_path: Path) -> None:
    report = ckptx.diff(write_hf(tmp_path / "a", llama()), write_hf(tmp_path / "b", llama(head=False)))
    assert report.differing == [{"name": HEAD, "what": "missing", "a": "BF16 [16, 8]", "b": None}]
    assert (report.exit, report.compared, report.total, report.tied_tensors) == (1, 20, 21, [])


@pytest.mark.parametrize("swapped", [False, True])
def test_names_that_share_bytes_are_tied_without_a_config(tmp_path: Path, swapped: bool) -> None:
    one = llama(head=False)
    shared = write_dcp(tmp_path / "dcp", one, aliases={HEAD: EMBED})
    plain = write_safetensors(tmp_path / "plain/model.safetensors", one)
    report = ckptx.diff(*(plain, shared)[:: -1 if swapped else 1])
    assert report.exit == 0
    assert report.tied_tensors == [{"name": HEAD, "tied_to": EMBED, "only_in": str(shared)}]


def test_equal_bytes_of_empty_tensors_tie_nothing(tmp_path: Path) -> None:
    first = written(tmp_path / "a.safetensors", {"x": ("F32", (0, 2)), "y": ("F32", (0, 2))})
    second = written(tmp_path / "b.safetensors", {"x": ("F32", (0, 2))})
    report = ckptx.diff(first, second)
    assert [row["name"] for row in report.differing] == ["y"] and report.tied_tensors == []


# ------------------------------------------------------------------------------------------------- names of two forms

EXPERTS, HIDDEN, INNER = 2, 4, 6
MIXTRAL: dict[str, Any] = {
    **LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": EXPERTS,
    "hidden_size": HIDDEN, "intermediate_size": INNER,
}  # fmt: skip
SEPARATE = {
    f"model.layers.0.block_sparse_moe.experts.{expert}.w{number}.weight": value("BF16", *shape)
    for expert in range(EXPERTS)
    for number, shape in enumerate([(INNER, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)], 1)
}
GATE = "model.layers.0.block_sparse_moe.gate.weight"
GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize("config_of_second", [MIXTRAL, None])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_separate_and_fused_experts_have_common_names(
    tmp_path: Path, config_of_second: dict[str, Any] | None, swapped: bool, dtype: str
) -> None:
    fused = {
        GATE_UP: value("BF16", EXPERTS, 2 * INNER, HIDDEN),
        DOWN: value(dtype, EXPERTS, HIDDEN, INNER),
    }
    pair = (
        write_hf(tmp_path / "separate", SEPARATE, config=MIXTRAL),
        write_hf(tmp_path / "fused", fused, config=config_of_second),
    )
    report = ckptx.diff(*pair[:: -1 if swapped else 1])
    assert (report.compared, report.total, report.tensors) == (2, 2, 2 if swapped else 6)
    found = ["BF16 [2, 4, 6]", f"{dtype} [2, 4, 6]"][:: -1 if swapped else 1]
    rows = [] if dtype == "BF16" else [{"name": DOWN, "what": "dtype", "a": found[0], "b": found[1]}]
    assert report.differing == rows and report.exit == len(rows)


def test_names_stay_if_renaming_matches_no_more_of_them(tmp_path: Path) -> None:
    first = write_hf(tmp_path / "a", {GATE: value("BF16", 2, 4)}, config=MIXTRAL)
    second = write_hf(tmp_path / "b", {"other.weight": value("BF16", 2)}, config=None)
    report = ckptx.diff(first, second)
    assert {row["name"] for row in report.differing} == {GATE, "other.weight"}
    assert report.compared == 0


@pytest.mark.parametrize("swapped", [False, True])
def test_names_of_torchtitan_are_those_of_the_published_model(tmp_path: Path, swapped: bool) -> None:
    config = {**LLAMA, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 8, "vocab_size": 16}
    config |= {"intermediate_size": 24, "num_key_value_heads": 4}
    hf = write_hf(tmp_path / "hf", llama(), config=config)
    ckptx.convert("hf2dcp", hf, tmp_path / "titan", names="torchtitan")
    pair = (hf, tmp_path / "titan")[:: -1 if swapped else 1]
    for report in (ckptx.diff(*pair), ckptx.verify(*pair)):
        assert (report.exit, report.compared, report.total, report.notes) == (0, 21, 21, [])


T5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}
SHARED, DECODER = "shared.weight", "decoder.embed_tokens.weight"


@pytest.mark.parametrize(
    ("names", "others", "partner"),
    [
        ({HEAD, SHARED, DECODER}, {SHARED, DECODER}, SHARED),  # the name that the config ties it to
        ({HEAD, DECODER}, {DECODER}, DECODER),  # another name of the same group
        ({SHARED, DECODER}, {DECODER}, DECODER),  # of the source itself
    ],
)
def test_the_source_of_a_tie_comes_before_other_names(
    tmp_path: Path, names: set[str], others: set[str], partner: str
) -> None:
    first, second = (
        write_hf(tmp_path / stem, {name: value("F32", 4, 2) for name in sorted(found)}, config=T5)
        for stem, found in (("a", names), ("b", others))
    )
    (extra,) = names - others
    for pair in ((first, second), (second, first)):
        assert ckptx.diff(*pair).tied_tensors == [{"name": extra, "tied_to": partner, "only_in": str(first)}]


@pytest.mark.parametrize("config", [{}, {"hidden_size": 8}, {"architectures": ["LlamaForCausalLM"]}, None])
def test_a_config_that_says_little_ties_nothing(tmp_path: Path, config: dict[str, Any] | None) -> None:
    first = write_hf(tmp_path / "a", llama(), config=config)
    second = write_hf(tmp_path / "b", llama(head=False), config=config)
    assert [row["name"] for row in ckptx.diff(first, second).differing] == [HEAD]


# ------------------------------------------------------------------------------------------------------------- configs


@pytest.mark.parametrize("swapped", [False, True])
def test_a_checkpoint_without_a_config_uses_that_of_the_other(tmp_path: Path, swapped: bool) -> None:
    own = write_hf(tmp_path / "own", llama())
    plain = write_dcp(tmp_path / "plain", llama())
    report = ckptx.diff(*(own, plain)[:: -1 if swapped else 1])
    assert report.exit == 0
    assert report.notes == [f"{plain}: no config.json; using that of {own}"]


def test_two_configs_or_none_need_no_note(tmp_path: Path) -> None:
    own = [write_hf(tmp_path / f"own{number}", llama()) for number in (1, 2)]
    plain = [write_dcp(tmp_path / f"plain{number}", llama()) for number in (1, 2)]
    for pair in (own, plain):
        report = ckptx.diff(*pair)
        assert (report.exit, report.notes, report.compared) == (0, [], 21)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_prefix_is_removed_from_a_dcp(tmp_path: Path, swapped: bool) -> None:
    own = write_hf(tmp_path / "own", llama())
    dcp = write_dcp(tmp_path / "dcp", {f"student.{name}": tensor for name, tensor in llama().items()}, config=LLAMA)
    pair = (own, dcp)[:: -1 if swapped else 1]
    report = ckptx.diff(*pair, source_prefix="student.")
    assert (report.exit, report.compared) == (0, 21)
    with pytest.raises(InputError) as refusal:
        ckptx.diff(*pair, source_prefix="teacher.")
    assert "teacher." in str(refusal.value)
    with pytest.raises(InputError, match="neither"):
        ckptx.diff(own, own, source_prefix="student.")


def test_one_tensor_under_two_names_is_noted(tmp_path: Path) -> None:
    """The router of a layer, under its name on the Hub and in the model."""
    twice = {GATE: value("BF16", 2, 4), GATE.replace("block_sparse_moe", "mlp"): value("BF16", 2, 4)}
    path = write_hf(tmp_path / "twice", twice, config=MIXTRAL)
    assert any("stored under two names" in note for note in ckptx.diff(path, path).notes)
    assert not any("two names" in note for note in ckptx.diff(*[write_hf(tmp_path / "a", llama())] * 2).notes)
