"""Checkpoints of other frameworks are named, wherever they lie, and give way to weights that are read."""

from __future__ import annotations

import io
import string
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckptx.errors import UnsupportedError
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.sharded.file_names import shard_name
from ckptx.formats.unsupported import UNSUPPORTED_KINDS, UnsupportedKind, is_unsupported_weights, kind_of_name
from tests.formats.cut_writer import write_shard
from tests.support.checkpoint_writers import llama, value, write_dcp, write_hf
from tests.support.memory_storage import MemoryPath

# What each framework writes, as its own documentation and code call it: files, and what the refusal must say.
WRITTEN = {
    "torch, use_collectives=False": (["__0.metadata", "__0_0.distcp", "__1.metadata"], "saved without collectives"),
    "torch, _experimental": (["checkpoint_0.pt", "checkpoint_1.pt"], "_experimental"),
    "DeepSpeed pipeline": (
        ["layer_00-model_00-model_states.pt", "mp_rank_00_model_states.pt"],
        "a DeepSpeed checkpoint of pipeline stages",
    ),
    "DeepSpeed experts": (
        ["layer_0_expert_3_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt"],
        "a DeepSpeed checkpoint of a mixture of experts",
    ),
    "DeepSpeed universal": (
        ["latest_universal", "global_step5_universal/zero/w/fp32.pt"],
        "a DeepSpeed universal checkpoint",
    ),
    "DeepSpeed universal, one parameter": (["fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"], "DeepSpeed universal"),
    "verl, saved without its model": (
        ["optim_world_size_8_rank_0.pt", "fsdp_config.json", "huggingface/config.json"],
        "the optimizer or trainer state of FSDP ranks",
    ),
    "verl, trainer state alone": (["extra_state_world_size_1_rank_0.pt"], "the optimizer or trainer state of FSDP"),
    "accelerate, LOCAL_STATE_DICT": (["pytorch_model_fsdp_rank0.bin", "optimizer_rank0.bin"], "state dict of one rank"),
    "Composer": (["ep1-ba10-rank0.pt"], "state dict of one rank"),
    "OLMo": (["rank0.pt", "rank1.pt"], "state dict of one rank"),
    "Megatron": (["mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"], "Megatron checkpoint in the leg"),
    "Megatron, one rank": (["model_optim_rng.pt", "distrib_optim.pt"], "Megatron checkpoint in the legacy format"),
    "Megatron, its top directory": (
        ["latest_checkpointed_iteration.txt", "iter_0000010/mp_rank_00_000/model_optim_rng.pt"],
        "Megatron checkpoint in the legacy format",
    ),
    "Megatron in zarr": (["metadata.json", "decoder.final_layernorm.weight/.zarray"], "zarr"),
    "NeMo": (["llama.nemo"], "NeMo archive"),
    "vLLM": (["model-rank-0-part-0.safetensors", "config.json"], "sharded_state of vLLM"),
    "vLLM with stages": (["model-pp-1-tp-0-part-0.safetensors"], "sharded_state of vLLM"),
    "NxD": (["tp0_sharded_checkpoint.safetensors", "tp1_sharded_checkpoint.safetensors"], "sharded for the ranks"),
    "TensorRT-LLM": (["rank0.safetensors", "config.json"], "sharded for the ranks"),
    "DeepSeek": (["model0-mp8.safetensors"], "sharded for the ranks"),
    "Meta": (["consolidated.00.pth", "consolidated.01.pth", "params.json"], "Meta's own layout"),
    "orbax": (["_CHECKPOINT_METADATA", "default/_METADATA", "default/manifest.ocdbt"], "orbax"),
    "orbax, its arrays": (["_METADATA", "_sharding", "manifest.ocdbt", "d/0abc"], "orbax"),
    "TensorFlow": (["bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001", "checkpoint"], "TensorFlow"),
    "TensorFlow, saved model": (["saved_model.pb", "variables/variables.index"], "TensorFlow"),
    "transformers, TensorFlow": (["tf_model.h5", "config.json"], "HDF5"),
    "Keras": (["model.keras"], "HDF5"),
    "transformers, Flax": (["flax_model.msgpack", "config.json"], "Flax"),
    "ONNX": (["model.onnx", "model.onnx_data"], "ONNX"),
    "GGUF": (["model-q4_k_m.gguf"], "GGUF"),
    "OpenVINO": (["openvino_model.xml", "openvino_model.bin"], "compiled for one engine"),
    "MLX": (["weights.npz"], "NumPy"),
    "PEFT, an interrupted save": (["adapter_config.json"], "an adapter"),
    "Lightning": (["epoch=1-step=10.ckpt"], "whole trainer"),
}

READ_OR_WRITTEN = (
    ".metadata", "__0_0.distcp", "model.safetensors", "model-00001-of-00002.safetensors", shard_name(1, 1, 1),
    "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model_fsdp.bin",
    "pytorch_model.bin.index.json", "diffusion_pytorch_model.safetensors", "consolidated.safetensors", "config.json",
    "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "modeling_x.py", "ckptx.json",
    "common.pt", "metadata.json", "LICENSE", "README.md", "generation_config.json", "model.pt", "model.pth",
)  # fmt: skip

_LETTERS = string.ascii_letters + string.digits + "._-"


def names_of(kind: UnsupportedKind) -> st.SearchStrategy[str]:
    """Names that the pattern of a kind allows, as a file system allows them, and that no row before it claims."""
    names = st.from_regex(kind.names, fullmatch=True, alphabet=_LETTERS)
    return names.filter(lambda name: name not in (".", "..") and len(name) < 100 and kind_of_name(name) is kind)


KINDS = st.sampled_from(UNSUPPORTED_KINDS).flatmap(lambda kind: st.tuples(st.just(kind), names_of(kind)))


def lay(root: MemoryPath, *names: str) -> None:
    """Files of these names, and what a directory by itself would hold."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"not looked at")


def refusal(path: MemoryPath) -> str:
    with pytest.raises(UnsupportedError) as refused:
        open_checkpoint(path)
    said = str(refused.value)
    assert refused.value.exit_code == 4
    assert "\n" not in said and said.startswith(str(path)) and "; " in said
    return said


@pytest.mark.parametrize("writer", WRITTEN)
def test_what_others_write_is_named(place: MemoryPath, writer: str) -> None:
    names, said = WRITTEN[writer]
    lay(place / "run" / "step-1", *names)
    for path in (place / "run" / "step-1", place / "run"):
        assert said in refusal(path)


@pytest.mark.parametrize("writer", WRITTEN)
def test_each_file_that_says_so_is_refused_by_itself(place: MemoryPath, writer: str) -> None:
    names, _ = WRITTEN[writer]
    lay(place, *names)
    known = [name for name in names if kind_of_name(Path(name).name) is not None]
    assert known
    for name in known:
        kind = kind_of_name(Path(name).name)
        assert kind is not None
        assert kind.description in refusal(place / name)


@settings(max_examples=200, deadline=None)
@given(KINDS, st.integers(0, 2), st.sampled_from(["", "README.md", "config.json", "latest"]))
def test_any_name_of_a_kind_names_it_at_any_depth(drawn: tuple[UnsupportedKind, str], depth: int, beside: str) -> None:
    kind, name = drawn
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        lay(root.joinpath(*["below"] * depth), name, *([beside] if beside else []))
        said = refusal(root)
        assert said.count(kind.description) == 1 and said.endswith(kind.next_step) and name in said


def _hf(root: MemoryPath) -> None:
    write_hf(root, llama())


def _hf_in_shards(root: MemoryPath) -> None:
    write_hf(root, llama(), shards=2)


def _dcp(root: MemoryPath) -> None:
    write_dcp(root, llama())


def _sharded(root: MemoryPath) -> None:
    write_shard(root, 1, {"w": (value("F32", 2, 2), (0, 0))})


@settings(max_examples=150, deadline=None)
@given(KINDS, st.sampled_from([_hf, _hf_in_shards, _dcp, _sharded]))
def test_real_weights_win_over_what_lies_beside_them(
    drawn: tuple[UnsupportedKind, str], write: Callable[[MemoryPath], None]
) -> None:
    _, name = drawn
    assume(not (write is _sharded and name.endswith(".safetensors")))  # refused: stock readers would take it in
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write(root)
        (root / "config.json").write_text("{}")
        alone = open_checkpoint(root)
        lay(root, name)
        beside = open_checkpoint(root)
        assert (beside.format, beside.tensors) == (alone.format, alone.tensors)
        left_behind = {sidecar.name for sidecar in beside.sidecars} == {sidecar.name for sidecar in alone.sidecars}
        # Without its weights, an adapter's config would keep transformers from loading the directory.
        assert left_behind == (is_unsupported_weights(name) or name == "adapter_config.json")
        assert not left_behind or any(name in note for note in beside.notes)


@pytest.mark.parametrize("name", READ_OR_WRITTEN)
def test_what_is_read_or_carried_is_no_foreign_kind(name: str) -> None:
    assert kind_of_name(name) is None


def test_a_lone_file_that_may_be_whole_is_opened(place: MemoryPath) -> None:
    torch = pytest.importorskip("torch")
    for name, other in (("checkpoint_0.pt", "checkpoint_1.pt"), ("consolidated.00.pth", "consolidated.01.pth")):
        root = place / name
        root.mkdir()
        torch.save({"w": torch.ones(2)}, file := io.BytesIO())
        (root / name).write_bytes(file.getvalue())
        assert list(open_checkpoint(root / name).tensors) == ["w"]
        assert "pass the file" in refusal(root)
        lay(root, other)
        refusal(root / name)


def test_the_whole_state_dict_of_fsdp_is_read(place: MemoryPath) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2)}, file := io.BytesIO())
    (place / "pytorch_model_fsdp.bin").write_bytes(file.getvalue())
    lay(place, "optimizer.bin", "random_states_0.pkl")
    catalog = open_checkpoint(place)
    assert (catalog.format, list(catalog.tensors)) == ("bin", ["w"])
    assert {name for note in catalog.notes for name in ("optimizer.bin", "random_states_0.pkl") if name in note}


def test_a_real_save_without_collectives(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint

    root = tmp_path / "run" / "step-1"
    checkpoint.save({"w": torch.ones(2)}, checkpoint_id=root, no_dist=True, use_collectives=False)
    for path in (root, root.parent, next(root.glob("__*.metadata"))):
        assert "saved without collectives" in refusal(path)
