"""`inspect`: what headers alone tell."""

from __future__ import annotations

from pathlib import Path

import ckptx
from tests.writers import LLAMA, llama, write_dcp, write_hf


def test_a_tied_head_counts_once_in_every_format(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", llama(head=False), config=LLAMA | {"tie_word_embeddings": True})
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    there, here = ckptx.inspect(tmp_path / "hf"), ckptx.inspect(tmp_path / "dcp")
    assert here.tensors == there.tensors + 1
    assert here.details["shared"] == [["model.embed_tokens.weight", "lm_head.weight"]]
    for key in ("parameters", "bytes"):
        assert here.details[key] == there.details[key]
    groups = {row["pattern"]: row for row in here.details["groups"]}
    assert (groups["lm_head.weight"]["tensors"], groups["lm_head.weight"]["bytes"]) == (1, 0)
    assert sum(row["bytes"] for row in here.details["groups"]) == here.details["bytes"]


def test_what_is_not_the_model_is_told_apart(tmp_path: Path) -> None:
    model = {f"model.{name}": value for name, value in llama().items()}
    moments = {f"optimizer.state.{name}.exp_avg": value for name, value in llama().items()}
    step = {"train_state.step": llama()["model.norm.weight"]}
    write_dcp(tmp_path / "dcp", model | moments | step, config=LLAMA)
    details = ckptx.inspect(tmp_path / "dcp").details
    assert details["prefix"] == "model."
    assert details["optimizer"]["tensors"] == len(moments)
    assert details["other"] == ["train_state.step"]
    assert details["unknown"] == []


def test_a_glob_lists_what_matches(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", llama(), shards=2)
    listed = ckptx.inspect(tmp_path / "hf", match="*norm*").details["listed"]
    assert {row["name"] for row in listed} == {name for name in llama() if "norm" in name}
    row = next(row for row in listed if row["name"] == "model.norm.weight")
    assert (row["dtype"], row["shape"], row["bytes"], row["chunks"]) == ("BF16", [8], 16, 1)
