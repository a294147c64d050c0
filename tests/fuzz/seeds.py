"""Small checkpoints of every kind, as files in memory: what the fuzzer starts from."""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from math import prod
from pathlib import Path

import ckptx
from ckptx.catalog.region import Region
from tests.support.checkpoint_writers import LLAMA, Value, llama, tree_bytes, value, write_dcp, write_hf
from tests.support.forged_fsdp import Archive, dtensor, mesh, shard

Files = dict[str, bytes]

CONFIG = {
    **LLAMA,
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 16,
}


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16", "vocab_size": 16,
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4,
    "num_experts": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "tie_word_embeddings": False,
}  # fmt: skip


def experts() -> dict[str, Value]:
    """The tensors of a Qwen3-MoE with every expert apart, as it is published."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (16, 8), "lm_head.weight": (16, 8)}
    shapes["model.norm.weight"] = (8,)
    for at in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{at}.{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"}
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (4,) for name in "qk"}
        shapes[f"{at}.mlp.gate.weight"] = (2, 8)
        for expert in range(2):
            shapes |= {f"{at}.mlp.experts.{expert}.{name}_proj.weight": (12, 8) for name in ("gate", "up")}
            shapes[f"{at}.mlp.experts.{expert}.down_proj.weight"] = (8, 12)
    return {name: value("BF16", *shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def seeds() -> dict[str, Files]:
    """The files of each kind of checkpoint, of one small Llama and one small mixture of experts."""
    tensors = llama()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        single = write_hf(root / "single", tensors, config=CONFIG)
        indexed = write_hf(root / "indexed", tensors, shards=2, config=CONFIG)
        halves = [Region((0, 0), (8, 8)), Region((8, 0), (8, 8))]
        dcp = write_dcp(
            root / "dcp", tensors, cuts={"lm_head.weight": halves}, files=2, objects=["step"], config=CONFIG
        )
        ckptx.convert("hf2dcp", indexed, root / "written")
        ckptx.reshard(single, root / "cut", tp=2, pp=2, dp_shard=2, to="dcp")
        ckptx.reshard(single, root / "sharded", tp=2, pp=2, to="safetensors")
        moe = write_hf(root / "experts", experts(), config=EXPERTS)
        ckptx.reshard(moe, root / "experts-cut", tp=2, to="dcp")
        (root / "bin").mkdir()
        (root / "bin" / "config.json").write_bytes((single / "config.json").read_bytes())
        (root / "bin" / "pytorch_model.bin").write_bytes(torch_file(tensors))
        fsdp_files(root / "fsdp", tensors)
        found = {path.name: tree_bytes(path) for path in (single, indexed, dcp, *map(root.joinpath, _OURS))}
    found["legacy"] = {
        **found["bin"],
        "pytorch_model.bin": b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.",
    }
    return found


_OURS = ("written", "cut", "sharded", "bin", "experts", "experts-cut", "fsdp")
_STORAGES = {"BF16": "BFloat16Storage", "F32": "FloatStorage"}


def torch_file(tensors: dict[str, Value]) -> bytes:
    """A `pytorch_model.bin`, as `torch.save` of a dict of tensors writes one."""
    pickled, stream = b"\x80\x02}(", io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for key, (name, (dtype, shape, data)) in enumerate(tensors.items()):
            count = len(data) // (2 if dtype == "BF16" else 4)
            pickled += text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage")
            pickled += b"ctorch\n" + _STORAGES[dtype].encode() + b"\n" + text(str(key)) + text("cpu")
            strides = (shape[1], 1) if len(shape) == 2 else (1,)
            pickled += number(count) + b"tQK\0" + sizes(shape) + sizes(strides)
            pickled += b"\x89ccollections\nOrderedDict\n)RtR"
            archive.writestr(zipfile.ZipInfo(f"archive/data/{key}"), data)
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), pickled + b"u.")
        archive.writestr(zipfile.ZipInfo("archive/byteorder"), "little")
        archive.writestr(zipfile.ZipInfo("archive/version"), "3\n")
    return stream.getvalue()


def fsdp_files(root: Path, tensors: dict[str, Value]) -> None:
    """Write the files of two FSDP ranks: DTensors with rows on each, and a norm as a plain tensor on both."""
    (root / "huggingface").mkdir(parents=True)
    (root / "huggingface" / "config.json").write_text(json.dumps(CONFIG))
    (root / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 2}))
    for rank in range(2):
        archive, state = Archive(), {}
        where = mesh((2,), (rank,), rank)
        for name, (dtype, shape, data) in tensors.items():
            kind, wide = _STORAGES[dtype], 2 if dtype == "BF16" else 4
            if name == "model.norm.weight":
                state[name] = archive.stored(kind, shape, data)
                continue
            step = -(-shape[0] // 2)
            rows = min((rank + 1) * step, shape[0]) - rank * step
            row = prod(shape[1:]) * wide
            part = data[rank * step * row : (rank * step + rows) * row]
            local = archive.stored(kind, (rows, *shape[1:]), part)
            state[name] = dtensor(shape, local, where, (shard(0),), "bfloat16" if dtype == "BF16" else "float32")
        (root / f"model_world_size_2_rank_{rank}.pt").write_bytes(archive.contents(state))


def text(value: str) -> bytes:
    """The opcode of a text."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def number(value: int) -> bytes:
    """The opcode of a number of at most 31 bits."""
    return b"J" + value.to_bytes(4, "little", signed=True)


def sizes(shape: tuple[int, ...]) -> bytes:
    """The opcodes of a tuple of numbers."""
    return b"(" + b"".join(map(number, shape)) + b"t"
