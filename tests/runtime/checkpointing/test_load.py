"""What is loaded is, bit for bit, what transformers loads: from any format, whole or in shards, nothing missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptx
from ckptx.catalog.region import Region
from ckptx.errors import InputError, UnsupportedError, UsageError
from ckptx.runtime.checkpointing.load import load, load_from
from ckptx.runtime.checkpointing.load_report import LoadReport
from ckptx.runtime.checkpointing.reading import open_source
from ckptx.runtime.model.build import build_model, materialize
from tests.support import load_ranks
from tests.support.load_ranks import load_with_transformers
from tests.support.models import EVERY, assert_same_outputs, outputs, read_hf, write
from tests.support.pool import GlooPool
from tests.support.slow import slow_but
from tests.support.torch_dcp import assert_same_tensors

# Ties of every kind, fused experts and projections, buffers that are saved, towers, encoder and decoder.
FAST = (
    "llama-tied", "llama-both-different", "gemma3-vlm", "gemma4-moe", "gemma4-shared-kv", "qwen2.5-vl", "phi3", "gpt2",
    "mixtral", "deepseek-v3", "t5-v1.1", "bert-pretraining",
)  # fmt: skip


def written_as(kind: str, hf: Path) -> Path:
    """The checkpoint in another format, beside it."""
    path = hf.parent / kind
    if kind == "whole-dcp":
        ckptx.convert("hf2dcp", hf, path)
    elif kind == "bin":
        path.mkdir()
        (path / "config.json").write_bytes((hf / "config.json").read_bytes())
        torch.save(read_hf(hf), path / "pytorch_model.bin")
    elif kind.startswith("cut"):
        ckptx.reshard(hf, path, to=kind.removeprefix("cut-"), tp=2, pp=2)
    return path


def loaded(path: Path) -> tuple[Any, LoadReport]:
    """The model in a checkpoint, by ckptx alone."""
    with open_source(path) as source:
        model = build_model(path, untied=source.find_untied_names())
        materialize(model)
        return model, load_from(model, source)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", slow_but(EVERY, FAST))
def test_models_are_those_of_transformers(recipe: str, tmp_path: Path) -> None:
    write(EVERY[recipe], tmp_path / "hf")
    expected = load_with_transformers(tmp_path / "hf").eval()
    logits = outputs(expected, EVERY[recipe].inputs())
    for kind in ("hf", "bin", "whole-dcp", "cut-dcp", "cut-safetensors"):
        model, ledger = loaded(written_as(kind, tmp_path / "hf"))
        assert_same_tensors(model.state_dict(), expected.state_dict())
        assert_same_tensors(dict(model.named_buffers()), dict(expected.named_buffers()))
        assert_same_outputs(outputs(model, EVERY[recipe].inputs()), logits)
        assert {*ledger.loaded_tensors, *ledger.tied_names} == set(expected.state_dict()), kind
        assert not ledger.unread_names


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("load") / "hf"
    write(EVERY["llama-tied"], path)
    return path


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    """A checkpoint in one file, to be damaged."""
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    save_file(read_hf(llama), tmp_path / "model.safetensors")
    return tmp_path


def changed(path: Path, **tensors: torch.Tensor | None) -> None:
    """Writes the file anew; a tensor that is None is left out, `__` stands for a dot."""
    new = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    held = {name: tensor for name, tensor in (read_hf(path) | new).items() if tensor is not None}
    save_file(held, path / "model.safetensors")


# ------------------------------------------------------------------------------------ the ledger


def test_the_ledger_names_what_was_read_and_from_what(tmp_path: Path) -> None:
    write(EVERY["mixtral"], tmp_path)
    model, ledger = loaded(tmp_path)
    fused = ledger.loaded_tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert len(fused.stored_names) == 8 and all(".experts." in name for name in fused.stored_names)
    assert fused.nbytes == 2 * model.model.layers[0].mlp.experts.gate_up_proj.numel()
    assert ledger.nbytes == ledger.bytes_read == sum(2 * tensor.numel() for tensor in model.parameters())
    assert "model.rotary_emb.inv_freq" in ledger.initialized_buffers


def test_a_tied_name_is_loaded_through_the_other(llama: Path) -> None:
    _, ledger = loaded(llama)
    assert ledger.tied_names == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_stage_with_the_head_alone_reads_the_embedding(llama: Path) -> None:
    expected = load_with_transformers(llama).lm_head.weight
    model = build_model(llama)
    model.model.embed_tokens = torch.nn.Identity()
    model.model.layers = torch.nn.ModuleDict({"1": model.model.layers[1]})
    materialize(model)
    ledger = load(model, llama)
    assert torch.equal(model.lm_head.weight, expected)
    assert ledger.tied_names == {"lm_head.weight": "model.embed_tokens.weight"}
    assert {name.split(".")[2] for name in ledger.loaded_tensors if ".layers." in name} == {"1"}
    elsewhere = {name for name in read_hf(llama) if ".layers.0." in name}
    assert ledger.unread_names == dict.fromkeys(elsewhere, "no place in this model")


def test_only_the_target_of_a_tie_is_enough(copied: Path) -> None:
    embedding = read_hf(copied)["model.embed_tokens.weight"]
    changed(copied, model__embed_tokens__weight=None, lm_head__weight=embedding)
    model, ledger = loaded(copied)
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert ledger.loaded_tensors["model.embed_tokens.weight"].stored_names == ("lm_head.weight",)


def test_what_is_not_of_the_model_is_left_and_said(copied: Path) -> None:
    changed(copied, foreign__weight=torch.ones(3), model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    _, ledger = loaded(copied)
    assert ledger.unread_names == {
        "foreign.weight": "unknown to the class",
        "model.layers.0.self_attn.rotary_emb.inv_freq": "buffer of rotary embeddings, computed from the config",
    }


def test_the_model_in_a_training_checkpoint_is_found(llama: Path, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    expected = load_with_transformers(llama)
    state = {"model": {f"_orig_mod.{name}": tensor for name, tensor in expected.state_dict().items()},
             "optimizer": {"state": {name: {"exp_avg": torch.ones(3)} for name in ("a", "b")}},
             "lr_scheduler": {"last": torch.ones(1)}}  # fmt: skip
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    model = build_model(llama)
    materialize(model)
    ledger = load(model, tmp_path)  # no config.json next to it: the model's own says what is in it
    assert_same_tensors(model.state_dict(), expected.state_dict())
    assert (
        set(ledger.unread_names.values()) == {"optimizer state", "not part of the model"}
        and len(ledger.unread_names) == 3
    )


def test_names_of_wrappers_in_the_model_do_not_matter(llama: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = build_model(llama)
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    materialize(model)
    ledger = load(model, llama)
    assert "model.layers.0.mlp.up_proj.weight" in ledger.loaded_tensors
    assert_same_tensors(model.state_dict(), load_with_transformers(llama).state_dict())


# ------------------------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_cast_as_torch_casts_them(llama: Path, dtype: torch.dtype) -> None:
    model = build_model(llama, dtype=dtype)
    materialize(model)
    load(model, llama)
    expected = {name: tensor.to(dtype) for name, tensor in load_with_transformers(llama).state_dict().items()}
    assert_same_tensors(model.state_dict(), expected)


def test_nan_is_loaded_as_it_is(copied: Path) -> None:
    bits = torch.tensor([0x7FC1, 0x7F80, -1, 0x0001] * 8, dtype=torch.int16)
    changed(copied, model__norm__weight=bits.view(torch.bfloat16))
    assert torch.equal(loaded(copied)[0].model.norm.weight.view(torch.int16), bits)


def test_fp8_is_not_cast(copied: Path) -> None:
    changed(copied, model__norm__weight=torch.ones(32).to(torch.float8_e4m3fn))
    with pytest.raises(UnsupportedError, match=r'"model\.norm\.weight": is float8_e4m3fn on disk, expected bfloat16'):
        loaded(copied)


# ------------------------------------------------------------------------------------ injected defects


def test_a_missing_tensor_is_named(copied: Path) -> None:
    changed(copied, model__layers__1__mlp__up_proj__weight=None, model__norm__weight=None)
    with pytest.raises(InputError, match=r'"model\.layers\.1\.mlp\.up_proj\.weight", and 1 more: not in the checkp'):
        loaded(copied)


def test_a_missing_buffer_is_named(tmp_path: Path) -> None:
    write(EVERY["deepseek-v3"], tmp_path / "hf")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors = read_hf(tmp_path / "hf")
    del tensors[name]
    (tmp_path / "less").mkdir()
    save_file(tensors, tmp_path / "less" / "model.safetensors")
    (tmp_path / "less" / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    with pytest.raises(InputError, match=r'e_score_correction_bias": not in the checkpoint'):
        loaded(tmp_path / "less")


def test_both_sides_of_a_tie_missing_is_named(copied: Path) -> None:
    changed(copied, model__embed_tokens__weight=None)
    model = build_model(copied)
    materialize(model)
    with pytest.raises(InputError, match=r'"model\.embed_tokens\.weight": not in the checkpoint'):
        load(model, copied)


def test_a_head_that_is_not_tied_may_not_be_missing(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    model = build_model(copied)
    materialize(model)
    with pytest.raises(InputError, match=r'"lm_head\.weight": not in the checkpoint'):
        load(model, copied)


def test_tied_names_that_differ_are_refused_unless_they_are_untied(copied: Path) -> None:
    embedding = read_hf(copied)["model.embed_tokens.weight"]
    other = embedding.clone()
    other[-1, -1] += 1
    changed(copied, lm_head__weight=other)
    model = build_model(copied)
    materialize(model)
    with pytest.raises(InputError, match=r'"model\.embed_tokens\.weight" and "lm_head\.weight": the config ties them'):
        load(model, copied)
    model, ledger = loaded(copied)
    assert torch.equal(model.lm_head.weight, other) and torch.equal(model.model.embed_tokens.weight, embedding)
    assert not ledger.tied_names


def test_a_wrong_shape_is_named(copied: Path) -> None:
    changed(copied, model__norm__weight=torch.ones(33, dtype=torch.bfloat16))
    with pytest.raises(UnsupportedError, match=r'"model\.norm\.weight" has shape \[33\], expected \[32\]'):
        loaded(copied)


def test_a_rank_without_a_part_of_a_tensor_reads_none_of_it(copied: Path) -> None:
    model = build_model(copied)
    materialize(model)
    model.model.norm.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    report = load(model, copied, regions=lambda name: [] if name == "model.norm.weight" else None)
    assert report.loaded_tensors["model.norm.weight"].nbytes == 0


def test_another_number_of_dims_is_named_for_the_rectangles_of_tp(copied: Path) -> None:
    changed(copied, model__norm__weight=torch.ones(32, 1, dtype=torch.bfloat16))
    model = build_model(copied)
    materialize(model)
    regions = {"model.norm.weight": [Region((0,), (32,))]}
    with pytest.raises(UnsupportedError, match=r'"model\.norm\.weight" has shape \[32, 1\], expected \[32\]'):
        load(model, copied, regions=regions.get)


def test_a_swap_of_equal_shapes_is_not_noticed_here(copied: Path) -> None:
    """Only digests, or the logits, can tell; see `verify`."""
    tensors = read_hf(copied)
    swapped = {"model__layers__0__mlp__up_proj__weight": tensors["model.layers.0.mlp.gate_proj.weight"],
               "model__layers__0__mlp__gate_proj__weight": tensors["model.layers.0.mlp.up_proj.weight"]}  # fmt: skip
    logits = outputs(load_with_transformers(copied).eval(), EVERY["llama-tied"].inputs())
    changed(copied, **swapped)
    model, _ = loaded(copied)
    with pytest.raises(AssertionError):
        assert_same_outputs(outputs(model, EVERY["llama-tied"].inputs()), logits)


def test_a_file_cut_short_is_refused(copied: Path) -> None:
    file = copied / "model.safetensors"
    model = build_model(copied)
    materialize(model)
    with open_source(copied) as source:
        os.truncate(file, file.stat().st_size - 100)  # after it was opened: the header alone tells otherwise
        with pytest.raises(InputError, match=r"model\.safetensors: ends at byte"):
            load_from(model, source)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        loaded(copied)


def test_a_flipped_bit_in_an_archive_is_refused(llama: Path, tmp_path: Path) -> None:
    ckptx.convert("hf2dcp", llama, tmp_path / "dcp")
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = data.find(read_hf(llama)["model.norm.weight"].view(torch.uint8).numpy().tobytes())
    data[at + 3] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match="CRC-32"):
        loaded(tmp_path / "dcp")


def test_a_model_without_storage_is_refused(llama: Path) -> None:
    with pytest.raises(UsageError, match="call materialize first"):
        load(build_model(llama), llama)


# ------------------------------------------------------------------------------------ shards


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An untied model of uneven sizes in three formats."""
    hf = tmp_path_factory.mktemp("sources") / "hf"
    write(EVERY["llama-untied"], hf)
    return {kind: written_as(kind, hf) for kind in ("hf", "whole-dcp", "cut-safetensors")}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["hf", "whole-dcp", "cut-safetensors"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_rank_gets_its_shards(pool: GlooPool, sources: dict[str, Path], kind: str, layout: str) -> None:
    for fault, share, read in pool.run(load_ranks.load_sharded, 2, sources["hf"], sources[kind], layout):
        assert fault is None
        if layout == "rows" and kind != "cut-safetensors":
            assert read == share


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["rows", "columns", "packed"])
def test_a_rank_gets_its_shards_of_fsdp_inside_tp(pool: GlooPool, sources: dict[str, Path], layout: str) -> None:
    total = sum(2 * tensor.numel() for tensor in read_hf(sources["hf"]).values())
    answers = pool.run(load_ranks.load_fsdp_in_tp, 4, sources["hf"], sources["hf"], layout)
    assert [fault for fault, _, _ in answers] == [None] * 4
    # norms alone are whole on every TP rank
    assert total <= sum(share for _, share, _ in answers) < 1.05 * total
    if layout != "columns":
        assert all(read == share for _, share, read in answers)


def test_a_tied_head_under_fsdp_stays_tied(pool: GlooPool, llama: Path) -> None:
    assert pool.run(load_ranks.load_tied_fsdp, 2, llama) == [None, None]


def test_the_comparison_of_shards_notices_a_shard_of_another_rank(pool: GlooPool, sources: dict[str, Path]) -> None:
    answers = pool.run(load_ranks.load_wrong_shard, 2, sources["hf"])
    assert all(fault is not None and "q_proj" in fault for fault in answers)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gemma4-moe", "mixtral", "gpt2", "deepseek-v3", "qwen2.5-vl", "mamba", "falcon"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_shards_of_other_architectures(pool: GlooPool, tmp_path: Path, recipe: str, layout: str) -> None:
    write(EVERY[recipe], tmp_path / "hf")
    for kind in ("hf", "whole-dcp", "cut-dcp"):
        path = written_as(kind, tmp_path / "hf")
        for answers in (
            pool.run(load_ranks.load_sharded, 2, tmp_path / "hf", path, layout),
            pool.run(load_ranks.load_fsdp_in_tp, 4, tmp_path / "hf", path, layout),
        ):
            assert {fault for fault, _, _ in answers} == {None}, kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hf", "whole-dcp"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_memory_is_that_of_the_shard(tmp_path: Path, kind: str, layout: str) -> None:
    """A process of its own: the peak of this one is that of other tests."""
    load_ranks.write_large(tmp_path / "hf")
    path = written_as(kind, tmp_path / "hf")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "HF_HUB_OFFLINE": "1"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.support.load_ranks",
        str(tmp_path / "hf"),
        str(path),
        layout,
    ]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    growth, share = map(int, answer.stdout.split()[-2:])
    assert 150e6 < share < 170e6
    assert growth < share + 100e6
