"""Per-rank FSDP files as torch's own FSDP1 and FSDP2 write them: every tensor is the one of the full state dict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptx
from ckptx.errors import UnsupportedError
from ckptx.formats.registry import open_checkpoint
from tests.support.fsdp_writers import save_pretrained_model, save_uneven_model
from tests.support.models import EVERY, assert_same_outputs, load, outputs, write
from tests.support.pool import GlooPool
from tests.support.slow import slow_but
from tests.support.torch_dcp import load as stock_load

CASES = [
    *((kind, ranks) for kind in ("fsdp2", "fsdp1", "sharded1") for ranks in (1, 2, 4)),
    *((kind, ranks) for kind in ("hsdp2", "hsdp1", "fsdp2+tp") for ranks in (2, 4)),
    ("fsdp2", 8),
    ("fsdp2+tp", 8),
]


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype is tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("kind", "ranks"), CASES, ids=[f"{kind}-{ranks}" for kind, ranks in CASES])
def test_every_tensor_equals_the_full_state_dict(
    kind: str, ranks: int, tied: bool, pool: GlooPool, tmp_path: Path
) -> None:
    full = pool.run(save_uneven_model, ranks, kind, tied, tmp_path / "actor")[0]
    report = ckptx.convert("to-dcp", tmp_path / "actor", tmp_path / "dcp", base="none")
    assert equal(stock_load(tmp_path / "dcp"), full)
    assert report.ledger["source"] == len(full) == report.ledger["written"] + report.ledger["tied"]
    assert any(f"optimizer state not converted: {ranks} optim_world_size_*" in note for note in report.notes)
    ckptx.convert("to-hf", tmp_path / "actor", tmp_path / "hf", base="none")
    assert equal(load_file(tmp_path / "hf" / "model.safetensors"), full)
    assert ckptx.verify(tmp_path / "actor", tmp_path / "dcp").exit == 0
    assert ckptx.verify(tmp_path / "actor", tmp_path / "hf").exit == 0


def test_shards_and_replicas_are_those_of_the_ranks(pool: GlooPool, tmp_path: Path) -> None:
    pool.run(save_uneven_model, 4, "hsdp2", True, tmp_path)
    catalog = open_checkpoint(tmp_path)
    embed = catalog.tensors["embed.weight"]
    assert [(chunk.region.offsets[0], chunk.region.sizes[0], chunk.file[-9:]) for chunk in embed.chunks] == [
        (0, 7, "rank_0.pt"), (7, 6, "rank_1.pt"),
    ]  # fmt: skip
    assert [chunk.file[-9:] for chunk in embed.replicas] == ["rank_2.pt", "rank_3.pt"]
    assert catalog.tensors["head.weight"].chunks == embed.chunks  # tied: the same storage
    pool.run(save_uneven_model, 4, "fsdp2", True, tmp_path / "uneven")
    one = open_checkpoint(tmp_path / "uneven").tensors["norm.weight"]  # 6 rows: rank 3 has none
    assert [chunk.region.sizes[0] for chunk in one.chunks] == [2, 2, 2]


def test_flat_parameters_are_refused(pool: GlooPool, tmp_path: Path) -> None:
    pool.run(save_uneven_model, 2, "local1", True, tmp_path / "actor")
    with pytest.raises(UnsupportedError, match="is a flat parameter of FSDP1") as refused:
        ckptx.convert("to-hf", tmp_path / "actor", tmp_path / "out", base="none")
    assert "SHARDED_STATE_DICT" in str(refused.value)


MODELS = ("llama-tied", "llama-both-different", "qwen3-moe", "gemma2")


@pytest.mark.parametrize("recipe", slow_but(MODELS, MODELS[:2]))
@pytest.mark.parametrize("kind", slow_but(("fsdp2", "hsdp2", "fsdp1", "sharded1"), ("fsdp2", "fsdp1")))
def test_an_actor_becomes_the_model_that_transformers_loads(
    recipe: str, kind: str, pool: GlooPool, tmp_path: Path
) -> None:
    """Config and other files come from `huggingface/`; the dtype is that of the tensors, not that of the config."""
    hf, actor, out = tmp_path / "hf", tmp_path / "global_step_10" / "actor", tmp_path / "out"
    write(replace(EVERY[recipe], dtype=torch.bfloat16), hf)
    pool.run(save_pretrained_model, 2, kind, hf, actor)
    report = ckptx.convert("to-hf", tmp_path / "global_step_10", out)
    assert report.ledger["source"] == report.ledger["written"] + report.ledger["tied"] + report.ledger["dropped"]
    model = load(out)
    assert model.dtype is torch.float32
    expected = outputs(load(hf, torch.float32), EVERY[recipe].inputs())
    assert_same_outputs(outputs(model, EVERY[recipe].inputs()), expected)
    sharded = ckptx.reshard(actor, tmp_path / "sharded", tp=2)
    assert sharded.exit == 0
    assert ckptx.verify(actor, tmp_path / "sharded").exit == 0
    assert ckptx.verify(out, actor).exit == 0
