"""The tie table, row by row, from HF to DCP and from a stock DCP to HF; `from_pretrained` says whether it is right."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import save_file

import ckptx
from ckptx.errors import InputError, UsageError
from ckptx.report.documents.conversion import ConversionReport
from tests.support.models import (
    RECIPES,
    Inputs,
    Recipe,
    assert_same_outputs,
    encoder_decoder_tokens,
    load,
    outputs,
    read_hf,
    write,
)
from tests.support.torch_dcp import load as stock_load
from tests.support.torch_dcp import metadata, raw


class Family(NamedTuple):
    """A class whose head may be tied: the names on disk and the keys of config.json that say so."""

    recipe: Recipe
    target: str
    source: str
    flags: tuple[tuple[str, ...], ...]


LLAMA = Family(RECIPES["llama-tied"], "lm_head.weight", "model.embed_tokens.weight", (("tie_word_embeddings",),))
GEMMA3 = Family(
    RECIPES["gemma3-vlm"],
    "language_model.lm_head.weight",
    "language_model.model.embed_tokens.weight",
    (("tie_word_embeddings",), ("text_config", "tie_word_embeddings")),
)
EVERY_FAMILY = pytest.mark.parametrize("family", [LLAMA, GEMMA3], ids=["llama", "gemma3-vlm"])
FAMILIES = pytest.mark.parametrize(
    "family", [LLAMA, pytest.param(GEMMA3, marks=pytest.mark.slow)], ids=["llama", "gemma3-vlm"]
)
DECLARED = pytest.mark.parametrize("disk", ["source", "target", "equal"])
ONE_ONLY = pytest.mark.parametrize("disk", ["source", "target"])
BOTH = pytest.mark.parametrize("disk", ["equal", "different"])


def arrange(family: Family, path: Path, disk: str, declared: bool = True) -> Path:
    """An HF checkpoint in one file with one row of the table: which names are on disk, and what the config says."""
    write(dataclasses.replace(family.recipe, shard="5GB"), path)
    tensors = read_hf(path)
    if disk in ("target", "equal", "different"):
        embedding = tensors[family.source]
        tensors[family.target] = (embedding.flip(0) if disk == "different" else embedding).clone()
    if disk in ("target", "neither"):
        del tensors[family.source]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = read_config(path)
    for keys in family.flags:
        place = config
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = declared
    (path / "config.json").write_text(json.dumps(config))
    return path


def read_config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def stock_dcp(hf: Path, path: Path) -> Path:
    """What a trainer that starts from `hf` may save: the same names, by stock torch, and the config beside them."""
    dcp.save(dict(read_hf(hf)), storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    shutil.copy(hf / "config.json", path)
    return path


def places(path: Path) -> dict[str, tuple[str, int]]:
    storage = dcp.FileSystemReader(path).read_metadata().storage_data
    return {index.fqn: (info.relative_path, info.offset) for index, info in storage.items()}


def logits(path: Path, family: Family) -> list[torch.Tensor]:
    return outputs(load(path), family.recipe.inputs())


def tied_logits(family: Family, tmp_path: Path) -> list[torch.Tensor]:
    """What the model computes whose head is its embedding."""
    return logits(arrange(family, tmp_path / "tied", "source"), family)


def case_of(report: ConversionReport, family: Family) -> tuple[str, str]:
    rows = [row for row in report.ties if (row["name"], row["tied_to"]) == (family.target, family.source)]
    assert len(rows) == 1
    return rows[0]["stored"], rows[0]["action"]


_CASES = {"source": "tied-to-only", "target": "name-only", "equal": "equal", "different": "different"}


@EVERY_FAMILY
@DECLARED
def test_declared_pair_is_stored_once_in_dcp_under_both_names(family: Family, disk: str, tmp_path: Path) -> None:
    hf = arrange(family, tmp_path / "hf", disk)
    report = ckptx.convert("hf2dcp", hf, tmp_path / "dcp")
    assert case_of(report, family) == (_CASES[disk], "alias")
    stored = "target" if disk == "target" else "source"
    names = {"target": family.target, "source": family.source}
    alias = names["source" if stored == "target" else "target"]
    assert report.aliases == {alias: names[stored]}
    where = places(tmp_path / "dcp")
    assert where[family.target] == where[family.source]
    loaded = stock_load(tmp_path / "dcp")
    expected = read_hf(hf)[names[stored]]
    assert raw(loaded[family.target]) == raw(loaded[family.source]) == raw(expected)


@pytest.mark.sampled(5)
@FAMILIES
@DECLARED
def test_declared_pair_of_a_stock_dcp_is_stored_under_the_source_name(
    family: Family, disk: str, tmp_path: Path
) -> None:
    hf = arrange(family, tmp_path / "hf", disk)
    report = ckptx.convert("dcp2hf", stock_dcp(hf, tmp_path / "dcp"), tmp_path / "out")
    assert case_of(report, family) == (_CASES[disk], "single")
    assert report.config_edits == []
    found = read_hf(tmp_path / "out")
    assert family.source in found
    assert family.target not in found
    expected = tied_logits(family, tmp_path)
    assert_same_outputs(logits(tmp_path / "out", family), expected)
    assert_same_outputs(logits(hf, family), expected)


@FAMILIES
def test_declared_pair_with_different_bytes_stays_two_tensors_in_dcp(family: Family, tmp_path: Path) -> None:
    hf = arrange(family, tmp_path / "hf", "different")
    report = ckptx.convert("hf2dcp", hf, tmp_path / "dcp")
    assert case_of(report, family) == ("different", "keep-both")
    assert report.aliases == {}
    assert any(family.target in warning and family.source in warning for warning in report.notes), report.notes
    loaded, expected = stock_load(tmp_path / "dcp"), read_hf(hf)
    assert raw(loaded[family.target]) == raw(expected[family.target])
    assert raw(loaded[family.source]) == raw(expected[family.source])


@EVERY_FAMILY
def test_declared_pair_with_different_bytes_is_untied_in_the_config(family: Family, tmp_path: Path) -> None:
    hf = arrange(family, tmp_path / "hf", "different")
    report = ckptx.convert("dcp2hf", stock_dcp(hf, tmp_path / "dcp"), tmp_path / "out")
    assert case_of(report, family) == ("different", "keep-both")
    assert any(family.target in warning and family.source in warning for warning in report.notes), report.notes
    assert {family.target, family.source} < set(read_hf(tmp_path / "out"))
    edits = {edit["key"]: (edit["before"], edit["after"]) for edit in report.config_edits}
    assert edits == {".".join(keys): (True, False) for keys in family.flags}
    before, after = read_config(hf), read_config(tmp_path / "out")
    for keys in family.flags:
        for config, flag in ((before, True), (after, False)):
            place = config
            for key in keys[:-1]:
                place = place[key]
            assert place.pop(keys[-1]) is flag
    assert after == before
    assert_same_outputs(logits(tmp_path / "out", family), logits(hf, family))


@FAMILIES
@pytest.mark.parametrize("how", ["shape", "dtype"])
def test_declared_pair_with_other_shape_or_dtype_stays_two_tensors(family: Family, how: str, tmp_path: Path) -> None:
    hf = arrange(family, tmp_path / "hf", "different")
    tensors = read_hf(hf)
    head = tensors[family.target]
    tensors[family.target] = head.float() if how == "dtype" else head[:-1].contiguous()
    save_file(tensors, hf / "model.safetensors", {"format": "pt"})
    other_size = how == "shape"  # which is not that of the config either
    report = ckptx.convert("hf2dcp", hf, tmp_path / "dcp", allow_config_mismatch=other_size)
    assert case_of(report, family) == ("mismatched", "keep-both")
    assert any(family.target in warning and family.source in warning for warning in report.notes), report.notes
    assert raw(stock_load(tmp_path / "dcp")[family.target]) == raw(tensors[family.target])
    report = ckptx.convert(
        "dcp2hf", stock_dcp(hf, tmp_path / "stock"), tmp_path / "out", allow_config_mismatch=other_size
    )
    assert case_of(report, family) == ("mismatched", "keep-both")
    assert {edit["key"] for edit in report.config_edits} == {".".join(keys) for keys in family.flags}
    assert raw(read_hf(tmp_path / "out")[family.target]) == raw(tensors[family.target])


@FAMILIES
@BOTH
def test_undeclared_pair_is_two_plain_tensors(family: Family, disk: str, tmp_path: Path) -> None:
    hf = arrange(family, tmp_path / "hf", disk, declared=False)
    there = ckptx.convert("hf2dcp", hf, tmp_path / "dcp")
    back = ckptx.convert("dcp2hf", stock_dcp(hf, tmp_path / "stock"), tmp_path / "out")
    for report in (there, back):
        assert case_of(report, family) == ("undeclared", "keep-both")
        assert report.aliases == {}
        assert report.config_edits == []
    where = places(tmp_path / "dcp")
    assert where[family.target] != where[family.source]
    assert {family.target, family.source} < set(read_hf(tmp_path / "out"))
    assert_same_outputs(logits(tmp_path / "out", family), logits(hf, family))


@FAMILIES
@ONE_ONLY
def test_one_name_of_an_undeclared_pair_is_refused(family: Family, disk: str, tmp_path: Path) -> None:
    hf = arrange(family, tmp_path / "hf", disk, declared=False)
    stock = stock_dcp(hf, tmp_path / "stock")
    missing = family.target if disk == "source" else family.source
    for direction, src in (("hf2dcp", hf), ("dcp2hf", stock)):
        with pytest.raises(InputError, match="--tie-missing") as refusal:
            ckptx.convert(direction, src, tmp_path / "out")
        assert missing in str(refusal.value)
        assert not (tmp_path / "out").exists()


@EVERY_FAMILY
@ONE_ONLY
def test_tie_missing_gives_both_names_and_a_checkpoint_that_loads(family: Family, disk: str, tmp_path: Path) -> None:
    """No loader ties an undeclared pair, so the HF output holds both names."""
    hf = arrange(family, tmp_path / "hf", disk, declared=False)
    ckptx.convert("hf2dcp", hf, tmp_path / "dcp", tie_missing=True)
    where = places(tmp_path / "dcp")
    assert where[family.target] == where[family.source]
    (tmp_path / "dcp" / "ckptx.json").unlink()
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out")
    ckptx.convert("dcp2hf", stock_dcp(hf, tmp_path / "stock"), tmp_path / "direct", tie_missing=True)
    expected = tied_logits(family, tmp_path)
    for out in (tmp_path / "out", tmp_path / "direct"):
        found = read_hf(out)
        assert raw(found[family.target]) == raw(found[family.source])
        assert_same_outputs(logits(out, family), expected)


@FAMILIES
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
@pytest.mark.parametrize("tie_missing", [False, True], ids=["", "tie-missing"])
def test_neither_name_is_refused(family: Family, declared: bool, tie_missing: bool, tmp_path: Path) -> None:
    hf = arrange(family, tmp_path / "hf", "neither", declared)
    stock = stock_dcp(hf, tmp_path / "stock")
    for direction, src in (("hf2dcp", hf), ("dcp2hf", stock)):
        with pytest.raises(InputError, match="neither") as refusal:
            ckptx.convert(direction, src, tmp_path / "out", tie_missing=tie_missing)
        assert family.target in str(refusal.value)
        assert family.source in str(refusal.value)
        assert not (tmp_path / "out").exists()


def test_t5_with_a_head_of_its_own_keeps_its_flag(tmp_path: Path) -> None:
    """T5 computes with the flag: it scales what the decoder gives by it."""
    recipe = RECIPES["t5-v1.1"]
    write(recipe, tmp_path / "hf")
    there = ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    assert any("lm_head.weight" in warning and "shared.weight" in warning for warning in there.notes)
    stock = stock_dcp(tmp_path / "hf", tmp_path / "stock")
    report = ckptx.convert("dcp2hf", stock, tmp_path / "out")
    assert report.config_edits == []
    assert any("tie_word_embeddings is unchanged" in warning for warning in report.notes)
    assert read_config(tmp_path / "out") == read_config(tmp_path / "hf")
    family = Family(recipe, "lm_head.weight", "shared.weight", ())
    assert case_of(report, family) == ("different", "keep-both")
    assert_same_outputs(logits(tmp_path / "out", family), logits(tmp_path / "hf", family))


@pytest.mark.parametrize("kept", ["shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"])
def test_any_one_of_the_four_names_of_t5_stands_for_all(kept: str, tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPES["t5"], shard="5GB")
    write(recipe, tmp_path / "hf")
    expected = outputs(load(tmp_path / "hf"), encoder_decoder_tokens())
    tensors = read_hf(tmp_path / "hf")
    embedding = tensors.pop("shared.weight")
    save_file({**tensors, f"{kept}.weight": embedding}, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    four = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"]
    loaded = stock_load(tmp_path / "dcp", four)
    assert {raw(tensor) for tensor in loaded.values()} == {raw(embedding)}
    assert len({places(tmp_path / "dcp")[name] for name in four}) == 1
    ckptx.convert("dcp2hf", stock_dcp(tmp_path / "hf", tmp_path / "stock"), tmp_path / "out")
    assert set(read_hf(tmp_path / "out")) & set(four) == {"shared.weight"}
    assert_same_outputs(outputs(load(tmp_path / "out"), encoder_decoder_tokens()), expected)


def _llama_model() -> Any:
    model = RECIPES["llama-tied"].model()
    return transformers.LlamaModel(model.config)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [(_llama_model, RECIPES["llama-tied"].inputs), (RECIPES["bert-base"].model, RECIPES["bert-base"].inputs)],
    ids=["LlamaModel", "BertModel"],
)
def test_base_model_class_needs_no_head(make: Callable[[], Any], inputs: Callable[[], Inputs], tmp_path: Path) -> None:
    write(Recipe(make, inputs), tmp_path / "hf")
    report = ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    assert report.aliases == {}
    assert set(metadata(tmp_path / "dcp")) == set(read_hf(tmp_path / "hf"))
    ckptx.convert("dcp2hf", stock_dcp(tmp_path / "hf", tmp_path / "stock"), tmp_path / "out")
    assert_same_outputs(outputs(load(tmp_path / "out"), inputs()), outputs(load(tmp_path / "hf"), inputs()))


def test_base_model_names_under_a_class_with_a_head_are_kept(tmp_path: Path) -> None:
    """Untied `LlamaForCausalLM` in the config, and files of a `LlamaModel`: nothing is invented, nothing refused."""
    write(Recipe(_llama_model, RECIPES["llama-tied"].inputs), tmp_path / "hf")
    config = read_config(tmp_path / "hf") | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    report = ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    assert report.ties[0]["stored"] == "base-model"
    assert set(metadata(tmp_path / "dcp")) == set(read_hf(tmp_path / "hf"))


# --tied


@FAMILIES
@DECLARED
def test_tied_copy_writes_every_name_its_own_bytes(family: Family, disk: str, tmp_path: Path) -> None:
    hf = arrange(family, tmp_path / "hf", disk)
    report = ckptx.convert("hf2dcp", hf, tmp_path / "dcp", tied="copy")
    assert report.aliases == {}
    where = places(tmp_path / "dcp")
    assert where[family.target] != where[family.source]
    loaded = stock_load(tmp_path / "dcp")
    assert raw(loaded[family.target]) == raw(loaded[family.source])
    ckptx.convert("dcp2hf", stock_dcp(hf, tmp_path / "stock"), tmp_path / "out", tied="copy")
    found = read_hf(tmp_path / "out")
    assert raw(found[family.target]) == raw(found[family.source]) == raw(loaded[family.source])
    assert_same_outputs(logits(tmp_path / "out", family), tied_logits(family, tmp_path))


@pytest.mark.sampled(4)
@FAMILIES
@DECLARED
def test_tied_drop_leaves_targets_out(family: Family, disk: str, tmp_path: Path) -> None:
    hf = arrange(family, tmp_path / "hf", disk)
    ckptx.convert("hf2dcp", hf, tmp_path / "dcp", tied="drop")
    names = metadata(tmp_path / "dcp")
    assert family.source in names
    assert family.target not in names
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "back")
    ckptx.convert("dcp2hf", stock_dcp(hf, tmp_path / "stock"), tmp_path / "out", tied="drop")
    expected = tied_logits(family, tmp_path)
    for out in ("back", "out"):
        found = read_hf(tmp_path / out)
        assert family.source in found
        assert family.target not in found
        assert_same_outputs(logits(tmp_path / out, family), expected)


@FAMILIES
@DECLARED
def test_tied_alias_shares_bytes(family: Family, disk: str, tmp_path: Path) -> None:
    hf = arrange(family, tmp_path / "hf", disk)
    ckptx.convert("hf2dcp", hf, tmp_path / "dcp", tied="alias")
    where = places(tmp_path / "dcp")
    assert where[family.target] == where[family.source]


def test_tied_alias_is_refused_where_names_cannot_share_bytes(tmp_path: Path) -> None:
    stock = stock_dcp(arrange(LLAMA, tmp_path / "hf", "equal"), tmp_path / "dcp")
    with pytest.raises(UsageError, match="--tied alias"):
        ckptx.convert("dcp2hf", stock, tmp_path / "out", tied="alias")


@FAMILIES
def test_tied_drop_refuses_different_bytes(family: Family, tmp_path: Path) -> None:
    hf = arrange(family, tmp_path / "hf", "different")
    stock = stock_dcp(hf, tmp_path / "stock")
    for direction, src in (("hf2dcp", hf), ("dcp2hf", stock)):
        with pytest.raises(InputError, match="differ"):
            ckptx.convert(direction, src, tmp_path / "out", tied="drop")
        assert not (tmp_path / "out").exists()


@FAMILIES
@BOTH
def test_the_original_files_come_back_with_the_manifest(family: Family, disk: str, tmp_path: Path) -> None:
    for declared in (True, False):
        hf = arrange(family, tmp_path / f"hf-{declared}", disk, declared)
        ckptx.convert("hf2dcp", hf, tmp_path / f"dcp-{declared}")
        report = ckptx.convert("dcp2hf", tmp_path / f"dcp-{declared}", tmp_path / f"out-{declared}")
        assert report.config_edits == []
        for name in ("model.safetensors", "config.json"):
            assert (tmp_path / f"out-{declared}" / name).read_bytes() == (hf / name).read_bytes()
