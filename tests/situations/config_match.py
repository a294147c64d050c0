"""Situations of tensors that the class in config.json does not have, and of some that may be there all the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.situations.box import Box, situation
from tests.support.checkpoint_writers import LLAMA, Value, llama, value, write_dcp, write_hf

_CONFIG = {
    **LLAMA, "vocab_size": 16, "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
_LAYERS = ("model.layers.0", "model.layers.1")


def _in_layers(*names: str, shape: tuple[int, ...] = (8,)) -> dict[str, Value]:
    return {f"{layer}.{name}": value("BF16", *shape) for layer in _LAYERS for name in names}


def _dcp2hf(box: Box, tensors: Mapping[str, Value], config: Mapping[str, Any]) -> Any:
    """A step of a trainer, and the model that somebody takes for the one that was trained."""
    base = write_hf(box.root / "base", llama(), config=config)
    return ("convert", "to-hf", write_dcp(box.root / "step", tensors, config=None), box.dst, "--base", base)


def _reshard(box: Box, tensors: Mapping[str, Value], config: Mapping[str, Any]) -> Any:
    base = write_hf(box.root / "base", llama(), config=config)
    return ("reshard", write_dcp(box.root / "step", tensors, config=None), box.dst, "--tp", "2", "--base", base)


def _hf2dcp(box: Box, tensors: Mapping[str, Value], config: Mapping[str, Any]) -> Any:
    return ("convert", "to-dcp", write_hf(box.root / "hf", tensors, config=config), box.dst)


_COMMANDS: dict[str, Callable[[Box, Mapping[str, Value], Mapping[str, Any]], Any]] = {
    "convert to-hf": _dcp2hf,
    "reshard": _reshard,
    "convert to-dcp": _hf2dcp,
}
_NO_TENSOR = r"is in {}, where LlamaForCausalLM has no such tensor.*--allow-config-mismatch"
_MODULE = r"model\.layers\.\*"
# Name -> tensors beside those of a Llama, changes of its config, and what the error must say.
_OTHER_MODELS: dict[str, tuple[dict[str, Value], dict[str, Any], str]] = {
    "a Llama with query and key norms, as in Qwen3": (
        _in_layers("self_attn.q_norm.weight", "self_attn.k_norm.weight", shape=(4,)), {},
        _NO_TENSOR.format(rf"{_MODULE}\.self_attn"),
    ),
    "a Llama with norms around the MLP, as in Gemma 2": (
        _in_layers("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"), {},
        _NO_TENSOR.format(_MODULE),
    ),
    "a Llama with attention biases that the config disables": (
        _in_layers("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        {"attention_bias": False}, r"q_proj\.bias.*it depends on attention_bias",
    ),
    "a Llama without attention biases, although the config enables them": (
        {}, {"attention_bias": True}, r"k_proj\.bias.*because of attention_bias in config\.json, found no such tensor",
    ),
    "a Llama with a shared expert, as in Qwen2-MoE": (
        _in_layers("mlp.shared_expert.up_proj.weight", shape=(24, 8)), {}, _NO_TENSOR.format(rf"{_MODULE}\.mlp"),
    ),
    "a Llama with a router and experts, as in Mixtral": (
        _in_layers("block_sparse_moe.gate.weight", "block_sparse_moe.experts.0.w1.weight", shape=(4, 8)), {},
        _NO_TENSOR.format(_MODULE),
    ),
    "a Llama with attention sinks, as in gpt-oss": (
        _in_layers("self_attn.sinks", shape=(2,)), {}, _NO_TENSOR.format(rf"{_MODULE}\.self_attn"),
    ),
    "a Llama with biases in its norms, as in StarCoder2": (
        {**_in_layers("input_layernorm.bias"), "model.norm.bias": value("BF16", 8)}, {},
        _NO_TENSOR.format(rf"{_MODULE}\.input_layernorm"),
    ),
    "a Llama with a bias in the output head, as in Phi": (
        {"lm_head.bias": value("BF16", 16)}, {}, _NO_TENSOR.format("lm_head"),
    ),
    "a Llama with a tensor of a layer after the last": (
        {"model.layers.7.input_layernorm.weight": value("BF16", 8)}, {},
        r"index below 2 in model\.layers.*found layer 7",
    ),
    "a Llama with an unknown tensor of a layer after the last": (
        {"model.layers.2.strange.weight": value("BF16", 8)}, {}, r"index below 2 in model\.layers.*found layer 2",
    ),
    "a Llama with a misspelled name of a weight": (
        {f"{_LAYERS[0]}.mlp.up_proj.wieght": value("BF16", 24, 8)}, {}, _NO_TENSOR.format(rf"{_MODULE}\.mlp\.up_proj"),
    ),
}  # fmt: skip
for _name, (_more, _changes, _said) in _OTHER_MODELS.items():
    for _command, _lay in _COMMANDS.items():

        @situation("config match", f"{_command}: {_name}", 3, _said)
        def _(box: Box, more: Any = _more, changes: Any = _changes, lay: Any = _lay) -> Any:
            return lay(box, {**llama(), **more}, {**_CONFIG, **changes})


for _command, _lay in _COMMANDS.items():

    @situation(
        "config match", f"{_command}: a layer index with a leading zero", 3, r"model\.layers\.01\..*no such tensor"
    )
    def _(box: Box, lay: Any = _lay) -> Any:
        return lay(box, {name.replace("layers.1.", "layers.01."): each for name, each in llama().items()}, _CONFIG)

    @situation("config match", f"{_command}: both layer 1 and layer 01", 3, r"model\.layers\.01\..*no such tensor")
    def _(box: Box, lay: Any = _lay) -> Any:
        again = {name.replace("layers.1.", "layers.01."): each for name, each in llama().items()}
        return lay(box, {**llama(), **again}, _CONFIG)

    @situation(
        "config match", f"{_command}: a classifier, and a config with a tied head", 3, r'"score\.weight" is stored'
    )
    def _(box: Box, lay: Any = _lay) -> Any:
        tied = {**_CONFIG, "tie_word_embeddings": True}
        return lay(box, {**llama(head=False), "score.weight": value("BF16", 2, 8)}, tied)


# What may be there: it passes, and verify finds it in the output again.
_PASSING: dict[str, tuple[dict[str, Value], str]] = {
    "a Llama with rotary buffers": (_in_layers("self_attn.rotary_emb.inv_freq", shape=(2,)), ""),
    "a Llama with causal masks": (_in_layers("self_attn.bias", shape=(1, 1, 4, 4)), ""),
    "a Llama with multi-token prediction layers": (
        {"mtp.fc.weight": value("BF16", 8, 8)}, r"mtp\.fc\.weight.*for speculative decoding",
    ),
    "a Llama with a multi-token prediction layer after the last layer": (
        {f"model.layers.2.{name}": value("BF16", 8) for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight")}, "",
    ),
    "a Llama with state of Transformer Engine": (
        _in_layers("self_attn.q_proj._extra_state", shape=(1,)), "Transformer Engine",
    ),
    "a Llama with scales of a quantized KV cache": (_in_layers("self_attn.k_scale", shape=()), "quantized KV cache"),
    "a Llama with a vision tower": (
        {"vision_tower.blocks.0.weight": value("BF16", 2, 2)}, r"vision_tower.*outside the modules of the class",
    ),
    "a Llama with a classifier head next to the output head": (
        {"score.weight": value("BF16", 2, 8)}, r"score\.weight.*another class of this model type",
    ),
}  # fmt: skip
for _name, (_more, _said) in _PASSING.items():
    for _command, _lay in _COMMANDS.items():

        @situation("config match", f"{_command}: {_name}, allowed", 0, _said)
        def _(box: Box, more: Any = _more, lay: Any = _lay) -> Any:
            return lay(box, {**llama(), **more}, _CONFIG)


for _command, _exits in (("inspect", 0), ("diff", 0), ("verify", 0)):

    @situation("config match", f"{_command} reports a tensor of another model", _exits, r"q_norm.*no such tensor")
    def _(box: Box, command: str = _command) -> Any:
        tensors = {**llama(), **_in_layers("self_attn.q_norm.weight", shape=(4,))}
        place = write_hf(box.root / "hf", tensors, config=_CONFIG)
        return (command, place) if command == "inspect" else (command, place, place)


@situation(
    "config match",
    "--allow-config-mismatch accepts a tensor of another model with a note",
    0,
    r"q_norm.*no such tensor",
)
def _(box: Box) -> Any:
    return (
        *_dcp2hf(box, {**llama(), **_in_layers("self_attn.q_norm.weight", shape=(4,))}, _CONFIG),
        "--allow-config-mismatch",
    )
