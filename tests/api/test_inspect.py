"""`inspect`: what headers alone tell."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest

import ckptx
from ckptx.errors import OutputError
from tests.report.pages import Page, fault_of_page
from tests.support.checkpoint_writers import LLAMA, llama, write_dcp, write_hf


def test_a_tied_head_counts_once_in_every_format(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", llama(head=False), config=LLAMA | {"tie_word_embeddings": True})
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    there, here = ckptx.inspect(tmp_path / "hf"), ckptx.inspect(tmp_path / "dcp")
    assert here.tensors == there.tensors + 1
    assert here.alias_groups == [["model.embed_tokens.weight", "lm_head.weight"]]
    for key in ("parameters", "bytes"):
        assert getattr(here, key) == getattr(there, key)
    groups = {row["pattern"]: row for row in here.groups}
    assert (groups["lm_head.weight"]["tensors"], groups["lm_head.weight"]["bytes"]) == (1, 0)
    assert sum(row["bytes"] for row in here.groups) == here.bytes


@pytest.mark.parametrize("match", ["norm", "model.layers", "*.nothing", ""])
def test_a_glob_that_matches_nothing_is_noted(tmp_path: Path, match: str) -> None:
    write_hf(tmp_path / "hf", llama())
    report = ckptx.inspect(tmp_path / "hf", match=match)
    assert not report.selected_tensors and report.exit == 0
    (note,) = [each for each in report.notes if each.startswith("--match")]
    assert note.startswith(f'--match "{match}": matches none of 21 tensor names, such as "')
    assert not [each for each in ckptx.inspect(tmp_path / "hf", match="*norm*").notes if "--match" in each]


def test_what_is_not_the_model_is_told_apart(tmp_path: Path) -> None:
    model = {f"model.{name}": value for name, value in llama().items()}
    moments = {f"optimizer.state.{name}.exp_avg": value for name, value in llama().items()}
    step = {"train_state.step": llama()["model.norm.weight"]}
    write_dcp(tmp_path / "dcp", model | moments | step, config=LLAMA)
    report = ckptx.inspect(tmp_path / "dcp")
    assert report.prefix == "model."
    assert report.optimizer["tensors"] == len(moments)
    assert report.other_tensors == ["train_state.step"]
    assert not report.unknown_tensors


def test_a_glob_lists_what_matches(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", llama(), shards=2)
    listed = ckptx.inspect(tmp_path / "hf", match="*norm*").selected_tensors
    assert {row["name"] for row in listed} == {name for name in llama() if "norm" in name}
    row = next(row for row in listed if row["name"] == "model.norm.weight")
    assert (row["dtype"], row["shape"], row["bytes"], row["chunks"]) == ("BF16", [8], 16, 1)


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """A Llama of two layers for tp 2 x pp 2 x dp_shard 2."""
    write_hf(tmp_path / "hf", llama(), config=LLAMA | {"num_hidden_layers": 2, "num_attention_heads": 2})
    ckptx.reshard(tmp_path / "hf", tmp_path / "cut", tp=2, pp=2, dp_shard=2, to="dcp")
    return tmp_path / "cut"


def test_ranks_say_what_reshard_said(cut: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    for path, said in (
        (cut, ckptx.reshard(tmp_path / "hf", cut, tp=2, pp=2, dp_shard=2, to="dcp", overwrite=True)),
        (shards, ckptx.reshard(tmp_path / "hf", shards, tp=2, pp=2, dp_shard=2, to="safetensors")),
    ):
        report = ckptx.inspect(path, ranks=True)
        keys = ("rank", "stage", "dp", "tp", "files")
        assert [[row[k] for k in keys] for row in report.ranks] == [[row[k] for k in keys] for row in said.ranks]
        assert report.by_rank.layout["stages"] == [[("model.layers", 0, 1)], [("model.layers", 1, 2)]]
        assert {tuple(row["layers"]) for row in report.ranks[4:]} == {(("model.layers", 1, 2),)}


def test_optimizer_state_adds_no_layers(tmp_path: Path) -> None:
    weights = llama()
    state = {f"optimizer.state.{name}.exp_avg": each for name, each in weights.items()}
    write_dcp(tmp_path / "step", weights | state)
    report = ckptx.inspect(tmp_path / "step", ranks=True)
    (row,) = report.by_rank.by_file or report.ranks
    assert {path for path, *_ in row["layers"]} == {"model.layers"}
    assert row["tensors"] == 2 * len(weights)


def test_bytes_of_ranks_are_those_stock_torch_reads(cut: Path) -> None:
    from tests.support.sharded_files import rank_of, read_dcp_regions

    expected: dict[int, int] = {}
    for held in read_dcp_regions(cut).values():
        for block in held:
            rank = rank_of(block.file)
            expected[rank] = expected.get(rank, 0) + 2 * prod(block.sizes)
    assert {row["rank"]: row["bytes"] for row in ckptx.inspect(cut, ranks=True).ranks} == expected


def test_a_glob_narrows_ranks(cut: Path) -> None:
    report = ckptx.inspect(cut, ranks=True, match="model.norm.weight")
    assert [(row["rank"], row["bytes"]) for row in report.ranks if row["tensors"]] == [(4, 8), (6, 8)]
    assert report.selected_tensors is None and "selected_tensors" not in report.to_dict()
    assert ckptx.inspect(cut, ranks=True, tensors=True, match="*norm*").to_dict()["selected_tensors"]


@pytest.mark.parametrize("spoil", ["gone", "damaged", "of other files"])
def test_without_a_manifest_ranks_come_from_file_names(cut: Path, spoil: str) -> None:
    manifest = cut / "ckptx.json"
    if spoil == "gone":
        manifest.unlink()
    elif spoil == "damaged":
        manifest.write_text("{")
    else:
        manifest.write_text(re.sub(r'("__0_0.distcp":\{"bytes":)\d+', r"\g<1>1", manifest.read_text()))
    report = ckptx.inspect(cut, ranks=True)
    assert report.by_rank.layout is None
    assert [(row["stage"], row["dp"], row["tp"]) for row in report.ranks] == [
        (i, None, None) for i in (0,) * 4 + (1,) * 4
    ]
    assert any("ckptx.json" in warning for warning in report.notes) == (spoil != "gone")


def test_what_is_not_cut_is_told_by_file(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", llama(), shards=2)
    report = ckptx.inspect(tmp_path / "hf", ranks=True)
    assert report.ranks == [] and report.by_rank.sharded_tensors == 0
    assert [row["file"] for row in report.by_rank.by_file] == sorted(report.files)
    assert sum(row["bytes"] for row in report.by_rank.by_file) == report.bytes


def test_a_page_is_written_over_what_was_there(cut: Path, tmp_path: Path) -> None:
    page = tmp_path / "layout.html"
    ckptx.inspect(cut, html=page, match="*head*")
    before = page.read_text()
    report = ckptx.inspect(cut, html=page)
    assert page.read_text() != before
    assert fault_of_page(page.read_text()) is None
    assert report.html == str(page) and report.ranks == []
    assert len(Page(page.read_text()).all("a", "cell")) == 8
    ckptx.inspect(cut, html=page, match="*norm*")
    assert "This page shows 5 of" in page.read_text()


def test_a_page_that_cannot_be_written_is_an_error_of_the_output(cut: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"no/layout.html: its directory does not exist"):
        ckptx.inspect(cut, html=tmp_path / "no" / "layout.html")


def test_the_path_of_a_report_is_the_one_that_was_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = write_hf(tmp_path / "hf", llama())
    (file,) = hf.glob("*.safetensors")
    for path in (hf, file):
        assert ckptx.inspect(path).path == str(path)
    monkeypatch.chdir(hf)
    assert ckptx.inspect(file.name).path == file.name
