"""Generates checkpoints for the benchmarks: true shapes and headers, random bytes, written in constant memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from ckptx.catalog.dtype import BY_NAME
from ckptx.formats.huggingface import index_text
from ckptx.formats.safetensors import frame_header, header_text, padded

_BLOCK = os.urandom(8 << 20)  # repeated with a shift: real enough for checksums, fast enough for gigabytes

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def llama_shapes(layers: int = 20, hidden: int = 2048, inner: int = 5632, kv: int = 512, vocab: int = 32000) -> Shapes:
    """A Llama of 9 tensors a layer; the defaults are 183 tensors and 1.92 GiB in bf16."""
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "self_attn.q_proj.weight", (hidden, hidden)
        yield prefix + "self_attn.k_proj.weight", (kv, hidden)
        yield prefix + "self_attn.v_proj.weight", (kv, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, hidden)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def experts_shapes(layers: int = 48, experts: int = 127, hidden: int = 512, inner: int = 160) -> Shapes:
    """A Qwen3-MoE with an entry for each expert; the defaults are 18,723 tensors and 2.9 GiB in bf16."""
    vocab, head = 32000, 64
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}self_attn.{name}.weight", (hidden, hidden)
        yield prefix + "self_attn.q_norm.weight", (head,)
        yield prefix + "self_attn.k_norm.weight", (head,)
        yield prefix + "mlp.gate.weight", (experts, hidden)
        for expert in range(experts):
            yield f"{prefix}mlp.experts.{expert}.gate_proj.weight", (inner, hidden)
            yield f"{prefix}mlp.experts.{expert}.up_proj.weight", (inner, hidden)
            yield f"{prefix}mlp.experts.{expert}.down_proj.weight", (hidden, inner)
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def write_checkpoint(root: Path, shapes: Shapes, architecture: str, model_type: str, shards: int = 2) -> None:
    """Writes an HF directory of bf16 tensors, cut into shards of about equal size."""
    root.mkdir(parents=True)
    config = {"architectures": [architecture], "model_type": model_type, "tie_word_embeddings": False}
    (root / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    dtype = BY_NAME["BF16"]
    rows = []
    for name, shape in shapes:
        numel = 1
        for size in shape:
            numel *= size
        rows.append((name, shape, 2 * numel))
    total = sum(nbytes for _, _, nbytes in rows)
    weight_map, done, parts = {}, 0, [[] for _ in range(shards)]
    for row in rows:
        parts[min(shards - 1, done * shards // total)].append(row)
        done += row[2]
    for index, part in enumerate(parts):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        at, header = 0, []
        for name, shape, nbytes in part:
            header.append((name, dtype, shape, at, at + nbytes))
            weight_map[name] = file
            at += nbytes
        with (root / file).open("wb") as out:
            out.write(frame_header(padded(header_text(header, {"format": "pt"}))))
            for start in range(0, at, len(_BLOCK)):
                shift = start // len(_BLOCK) * 4099 % len(_BLOCK)
                out.write((_BLOCK[shift:] + _BLOCK[:shift])[: at - start])
    (root / "model.safetensors.index.json").write_text(index_text(weight_map, {"total_size": total}))
