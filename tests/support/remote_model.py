"""A language model with custom code, as a checkpoint on the Hub has it: `config.json` and `modeling_remote.py`."""

from __future__ import annotations

import json
from pathlib import Path

CODE = """
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class RemoteConfig(PretrainedConfig):
    model_type = "remote"

    def __init__(self, vocab_size=64, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        super().__init__(**kwargs)


class RemoteLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden_states, **kwargs):
        batch, length, width = hidden_states.shape
        normed = self.norm(hidden_states)
        query, key, value = (
            each(normed).view(batch, length, self.heads, -1).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden_states = hidden_states + self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden_states + self.down(nn.functional.gelu(self.up(hidden_states)))


class RemotePreTrainedModel(PreTrainedModel):
    config_class, base_model_prefix, _no_split_modules = RemoteConfig, "model", ["RemoteLayer"]


class RemoteModel(RemotePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([RemoteLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class RemoteForCausalLM(RemotePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = RemoteModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids).last_hidden_state))
"""


def write_remote_model(root: Path) -> Path:
    """Write the config and the code of the model; weights are not written."""
    root.mkdir(parents=True)
    config = {
        "architectures": ["RemoteForCausalLM"], "model_type": "remote", "dtype": "float32",
        "auto_map": {
            "AutoConfig": "modeling_remote.RemoteConfig",
            "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
        },
    }  # fmt: skip
    (root / "config.json").write_text(json.dumps(config))
    (root / "modeling_remote.py").write_text(CODE)
    return root
