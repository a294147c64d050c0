"""torchtitan's names: what a rewritten catalog reads, against the permutation on whole tensors, and attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from ckptx.architecture.trainer_naming import torchtitan
from ckptx.catalog.entry import Block
from ckptx.catalog.region import Shape
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.dcp import layout as dcp_layout
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.torch_archive import archive as torch_zip
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement, blocks_of_stage
from ckptx.mapping.pull_back import PullBack
from ckptx.mapping.rules import TrainerRules
from ckptx.storage.directory_handle import DirectoryHandle
from ckptx.storage.files import FilePool
from ckptx.transfer.executor import execute
from ckptx.transfer.planner import plan_copy
from tests.support import torch_dcp
from tests.support.models import EVERY, build, read_hf
from tests.support.stored_tensors import assert_reads, bits, read

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 32


def rules_of(model: Any) -> TrainerRules:
    return TrainerRules(torchtitan.conversions(type(model).__name__, model.config.to_dict()))


def saved(name: str, path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    model = build(EVERY[name])
    model.save_pretrained(path)
    return model, read_hf(path)


def in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from halves to neighbouring pairs."""
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def in_torchtitan(disk: dict[str, torch.Tensor], rotated: bool) -> dict[str, torch.Tensor]:
    """The names, written down once more and one by one."""
    layers = {
        "self_attn.v_proj": "attention.qkv_linear.wv", "self_attn.o_proj": "attention.wo",
        "self_attn.q_proj": "attention.qkv_linear.wq", "self_attn.k_proj": "attention.qkv_linear.wk",
        "self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm",
        "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "moe.router.gate",
    }  # fmt: skip
    experts = {"gate_proj": "w1_EFD", "up_proj": "w3_EFD", "down_proj": "w2_EDF"}
    result = {}
    for name, tensor in disk.items():
        parts = name.split(".")
        if ".experts." in name:
            layer, leaf = parts[2], parts[6]
            new = f"layers.{layer}.moe.routed_experts.inner_experts.{experts[leaf]}"
            stem = f"model.layers.{layer}.mlp.experts"
            count = sum(each.startswith(f"{stem}.") and each.endswith(f".{leaf}.weight") for each in disk)
            result[new] = torch.stack([disk[f"{stem}.{e}.{leaf}.weight"] for e in range(count)])
        elif parts[1] == "layers":
            if rotated and parts[4] in ("q_proj", "k_proj"):
                tensor = in_pairs(tensor, HEADS if parts[4] == "q_proj" else KV_HEADS)
            result[f"layers.{parts[2]}.{layers['.'.join(parts[3:-1])]}.weight"] = tensor
        else:
            other = {"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight"}
            result[other.get(name, name)] = tensor
    return result


@pytest.mark.parametrize(("name", "rotated"), [("llama-untied", True), ("qwen3", False), ("qwen3-moe", False)])
def test_a_hub_checkpoint_in_torchtitans_names_and_back(name: str, rotated: bool, tmp_path: Path) -> None:
    model, disk = saved(name, tmp_path)
    rules = rules_of(model)
    ours = rules.to_trainer(open_checkpoint(tmp_path).tensors)
    assert not ours.unknown
    assert_reads(tmp_path, ours.tensors, in_torchtitan(disk, rotated))
    back = rules.from_trainer(ours.tensors)
    assert not back.unknown
    assert_reads(tmp_path, back.tensors, disk)


def test_names_of_earlier_torchtitan_are_read_and_not_written(tmp_path: Path) -> None:
    model, disk = saved("llama-untied", tmp_path)
    rules = rules_of(model)
    current = rules.to_trainer(open_checkpoint(tmp_path).tensors).tensors
    earlier = {
        "output.weight" if name == "lm_head.weight" else name.replace("qkv_linear.", ""): entry
        for name, entry in current.items()
    }
    renamed = rules.from_trainer(earlier)
    assert not renamed.unknown
    assert_reads(tmp_path, renamed.tensors, disk)
    assert set(rules.to_trainer(renamed.tensors).tensors) == set(current)
    assert set(rules.to_trainer(renamed.tensors, trainer_names=earlier).tensors) == set(earlier)


def test_attention_with_complex_rotation_is_that_of_transformers(tmp_path: Path) -> None:
    model, disk = saved("llama-fp32", tmp_path)
    ours = rules_of(model).to_trainer(open_checkpoint(tmp_path).tensors).tensors
    hidden = torch.randn(1, 7, HIDDEN, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(7)[None]
    rotary = LlamaRotaryEmbedding(model.config)
    cos, sin = rotary(hidden, positions)

    def heads(weight: torch.Tensor, count: int) -> torch.Tensor:
        return (hidden @ weight.T).view(1, 7, count, HEAD_DIM).transpose(1, 2)

    q = heads(disk["model.layers.1.self_attn.q_proj.weight"], HEADS)
    k = heads(disk["model.layers.1.self_attn.k_proj.weight"], KV_HEADS)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)

    turn = torch.polar(torch.ones(7, HEAD_DIM // 2), positions[0, :, None] * rotary.inv_freq[None])

    def rotated(x: torch.Tensor) -> torch.Tensor:  # neighbouring elements are one complex number
        return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turn).flatten(-2)

    titan_q = rotated(heads(read(tmp_path, ours["layers.1.attention.qkv_linear.wq.weight"]), HEADS))
    titan_k = rotated(heads(read(tmp_path, ours["layers.1.attention.qkv_linear.wk.weight"]), KV_HEADS))

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ k.repeat_interleave(HEADS // KV_HEADS, 1).transpose(-1, -2)

    # The same products summed in another order, in float32.
    torch.testing.assert_close(scores(titan_q, titan_k), scores(q, k), rtol=1e-5, atol=1e-5)
    plain_k = rotated(heads(disk["model.layers.1.self_attn.k_proj.weight"], KV_HEADS))
    assert not torch.allclose(scores(titan_q, plain_k), scores(q, k), atol=1e-2), "a missing permutation must show"


def test_a_cut_between_heads_is_one_in_torchtitan_too(tmp_path: Path) -> None:
    model, _ = saved("llama-untied", tmp_path)
    rules = rules_of(model)
    titan = {name: entry.shape for name, entry in rules.to_trainer(open_checkpoint(tmp_path).tensors).tensors.items()}

    def rows(name: str, shape: Shape) -> tuple[Block, ...]:
        return blocks_of_stage(shape, Placement(0, (shape[0],)), ParallelDims(tp=2), False)

    pull = PullBack(rules, titan, rows)
    for name, shape in titan.items():
        assert pull.blocks(name) == rows(name, shape)

    def thirds(name: str, shape: Shape) -> tuple[Block, ...]:
        return blocks_of_stage(shape, Placement(0, (shape[0],)), ParallelDims(tp=3), False)

    pull = PullBack(rules, titan, thirds)
    assert pull.blocks("layers.0.attention.qkv_linear.wk.weight") is None  # 2 heads for 3 ranks
    assert pull.blocks("layers.0.attention.wo.weight") is not None


def test_experts_cut_by_rows_are_cut_in_torchtitans_one_tensor(tmp_path: Path) -> None:
    model, _ = saved("qwen3-moe", tmp_path)
    rules = rules_of(model)
    titan = {name: entry.shape for name, entry in rules.to_trainer(open_checkpoint(tmp_path).tensors).tensors.items()}
    pull = PullBack(
        rules, titan, lambda name, shape: blocks_of_stage(shape, Placement(0, (shape[0],)), ParallelDims(tp=2), False)
    )
    found = pull.blocks("layers.0.moe.routed_experts.inner_experts.w1_EFD")
    assert found is not None
    assert [(block.rank_in_stage, block.region.offsets, block.region.sizes) for block in found] == [
        (0, (0, 0, 0), (4, 12, 32)), (1, (0, 12, 0), (4, 12, 32)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("class_name", "config", "error", "message"),
    [
        ("MixtralForCausalLM", {}, UnsupportedError, "MixtralForCausalLM: torchtitan names are known for"),
        ("LlamaForCausalLM", {"attention_bias": True}, UnsupportedError, "attention_bias is true"),
        ("LlamaForCausalLM", {"mlp_bias": True}, UnsupportedError, "mlp_bias is true"),
        ("LlamaForCausalLM", {}, InputError, "num_attention_heads is None"),
    ],
)
def test_what_torchtitan_cannot_hold_is_refused(
    class_name: str, config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        torchtitan.conversions(class_name, config)


def test_heads_of_another_model_are_seen(tmp_path: Path) -> None:
    model, _ = saved("llama-untied", tmp_path)
    config = {**model.config.to_dict(), "num_attention_heads": 5}
    rules = TrainerRules(torchtitan.conversions("LlamaForCausalLM", config))
    with pytest.raises(InputError, match=r"q_proj.weight.*does not split into 5 heads"):
        rules.to_trainer(open_checkpoint(tmp_path).tensors)


def test_a_head_count_that_fits_by_chance_gives_other_bytes(tmp_path: Path) -> None:
    model, disk = saved("llama-untied", tmp_path)
    config = {**model.config.to_dict(), "num_attention_heads": 2}
    ours = TrainerRules(torchtitan.conversions("LlamaForCausalLM", config)).to_trainer(
        open_checkpoint(tmp_path).tensors
    )
    weight = read(tmp_path, ours.tensors["layers.0.attention.qkv_linear.wq.weight"])
    expected = in_torchtitan(disk, rotated=True)["layers.0.attention.qkv_linear.wq.weight"]
    assert not torch.equal(bits(weight), bits(expected))


@pytest.mark.parametrize("workers", [1, 3])
def test_the_executor_writes_rewritten_tensors_as_any_other(workers: int, tmp_path: Path) -> None:
    model, disk = saved("llama-untied", tmp_path / "hub")
    source = open_checkpoint(tmp_path / "hub")
    ours = rules_of(model).to_trainer(source.tensors)
    target = dcp_layout.allocate(tmp_path / "titan", ours.tensors.values(), 3)
    plan = plan_copy(
        replace(source, tensors=ours.tensors), target, {name: name for name in ours.tensors},
        build_frame=torch_zip.archive_frame,
    )  # fmt: skip
    for path in ("titan", "journal"):
        (tmp_path / path).mkdir()
    with (
        FilePool(tmp_path / "hub") as files,
        DirectoryHandle.open_path(tmp_path / "titan") as tree,
        DirectoryHandle.open_path(tmp_path / "journal") as journal,
    ):
        execute(plan, files, tree, journal, workers=workers, max_memory=1 << 20)
    (tmp_path / "titan" / ".metadata").write_bytes(dcp_layout.metadata_bytes(target, {}))
    torch_dcp.assert_same_tensors(torch_dcp.load(tmp_path / "titan"), in_torchtitan(disk, rotated=True))
