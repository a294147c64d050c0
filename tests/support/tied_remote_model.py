"""A model with custom code whose head is tied to the embedding under names that only the code tells.

Its names are not those of any class of transformers: `core.tok`, `core.blocks.*` with a fused qkv and gate_up, and the
head `unembed`.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.checkpoint_writers import Value, value, write_hf

EMBEDDING, HEAD = "core.tok.weight", "unembed.weight"
VOCABULARY, WIDTH, INNER, LAYERS = 16, 8, 12, 4

CODE = """
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class MineConfig(PretrainedConfig):
    model_type = "mine"

    def __init__(self, vocab_size=16, d_model=8, d_ff=12, n_blocks=4, **kwargs):
        self.vocab_size, self.d_model, self.d_ff, self.n_blocks = vocab_size, d_model, d_ff, n_blocks
        self.hidden_size, self.num_hidden_layers = d_model, n_blocks
        super().__init__(**kwargs)


class MineBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.qkv = nn.Linear(c.d_model, 2 * c.d_model, bias=False)
        self.gate_up = nn.Linear(c.d_model, 2 * c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.qkv(x)[..., : x.shape[-1]] + self.down(nn.functional.silu(gate) * up)


class MinePreTrainedModel(PreTrainedModel):
    config_class, base_model_prefix, _no_split_modules = MineConfig, "core", ["MineBlock"]


class MineModel(MinePreTrainedModel):
    def __init__(self, c):
        super().__init__(c)
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(MineBlock(c) for _ in range(c.n_blocks))
        self.post_init()

    def get_input_embeddings(self):
        return self.tok

    def set_input_embeddings(self, value):
        self.tok = value

    def forward(self, input_ids):
        x = self.tok(input_ids)
        for block in self.blocks:
            x = block(x)
        return x


class MineForCausalLM(MinePreTrainedModel):
    _tied_weights_keys = {"unembed.weight": "core.tok.weight"}

    def __init__(self, c):
        super().__init__(c)
        self.core = MineModel(c)
        self.unembed = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.unembed

    def set_output_embeddings(self, value):
        self.unembed = value

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return CausalLMOutputWithPast(logits=self.unembed(self.core(input_ids)))
"""
CONFIG = {
    "architectures": ["MineForCausalLM"], "model_type": "mine", "dtype": "float32", "tie_word_embeddings": True,
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_ff": INNER, "n_blocks": LAYERS,
    "auto_map": {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"},
}  # fmt: skip


def tensors() -> dict[str, Value]:
    """Return the tensors of the model as safetensors hold them, without the tied head."""
    tensors = {EMBEDDING: value("F32", VOCABULARY, WIDTH)}
    for at in range(LAYERS):
        shapes = {"qkv": (2 * WIDTH, WIDTH), "gate_up": (2 * INNER, WIDTH), "down": (WIDTH, INNER)}
        for seed, (name, shape) in enumerate(shapes.items()):
            tensors[f"core.blocks.{at}.{name}.weight"] = value("F32", *shape, seed=1 + 3 * at + seed)
    return tensors


def optimizer_state() -> dict[str, Value]:
    """Return the state of Adam for the parameters of the model, as torch stores it."""
    return {
        f"optimizer.state.{name}.{key}": value("F32", *shape, seed=50 + 2 * at + seed)
        for at, (name, (_, shape, _)) in enumerate(tensors().items())
        for seed, key in enumerate(("exp_avg", "exp_avg_sq"))
    }


def write_code(root: Path) -> Path:
    """Write the config and the code of the model into a directory."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(CONFIG))
    (root / "modeling_mine.py").write_text(CODE)
    return root


def write_model(root: Path) -> Path:
    """Write the checkpoint of the model with its code."""
    write_hf(root, tensors(), config=CONFIG)
    return write_code(root)
