"""Situations in layouts: plans that shard nothing or the wrong way, and configs whose numbers of heads are wrong."""

from __future__ import annotations

import json
from typing import Any

from tests.situations.box import Box, situation
from tests.support.checkpoint_writers import LLAMA, llama, value, write_hf

AREA = "layout"
NOTHING = r"shards 0 tensors and replicates .* 100% of the parameter bytes: no TP rule matches"
ALIGNED = r"not aligned: --tp \d+ splits heads, key/value groups or fused parts"
PHI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 16,
    "tie_word_embeddings": False,
}  # fmt: skip
QKV, GATE_UP = "model.layers.*.self_attn.qkv_proj", "model.layers.*.mlp.gate_up_proj"


def phi(box: Box, **config: Any) -> Any:
    """A Phi-3 of one layer, whose projections are fused."""
    at = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (16, 32), "model.norm.weight": (32,), "lm_head.weight": (16, 32),
        f"{at}self_attn.qkv_proj.weight": (64, 32), f"{at}self_attn.o_proj.weight": (32, 32),
        f"{at}mlp.gate_up_proj.weight": (96, 32), f"{at}mlp.down_proj.weight": (32, 48),
        f"{at}input_layernorm.weight": (32,), f"{at}post_attention_layernorm.weight": (32,),
    }  # fmt: skip
    tensors = {name: value("BF16", *shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    return write_hf(box.root / "hf", tensors, config=PHI | config)


def mamba2(box: Box) -> Any:
    """A Mamba-2, which a built-in rule keeps whole."""
    config = {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 16, "num_hidden_layers": 1,
        "vocab_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 2, "state_size": 4, "expand": 2, "conv_kernel": 4,
        "tie_word_embeddings": False,
    }  # fmt: skip
    at = "backbone.layers.0."
    shapes = {
        "backbone.embeddings.weight": (8, 16), "backbone.norm_f.weight": (16,), "lm_head.weight": (8, 16),
        f"{at}norm.weight": (16,), f"{at}mixer.in_proj.weight": (84, 16), f"{at}mixer.conv1d.weight": (48, 1, 4),
        f"{at}mixer.conv1d.bias": (48,), f"{at}mixer.A_log": (4,), f"{at}mixer.D": (4,), f"{at}mixer.dt_bias": (4,),
        f"{at}mixer.norm.weight": (32,), f"{at}mixer.out_proj.weight": (16, 32),
    }  # fmt: skip
    return write_hf(box.root / "hf", {name: value("BF16", *shape) for name, shape in shapes.items()}, config=config)


def plan(box: Box, rules: Any) -> Any:
    """A file for `--tp-plan`."""
    file = box.root / "plan.json"
    file.write_text(rules if isinstance(rules, str) else json.dumps(rules))
    return file


for _tp in (2, 3, 4, 8):

    @situation(
        AREA, f"reshard --tp {_tp} of a class that a rule replicates", 0, r"replicates .* of the parameter bytes"
    )
    def _(box: Box, tp: int = _tp) -> Any:
        return ("reshard", mamba2(box), box.dst, "--tp", str(tp))

    @situation(
        AREA, f"reshard --tp {_tp} of fused projections that the model's plan shards in plain chunks", 0, ALIGNED
    )
    def _(box: Box, tp: int = _tp) -> Any:
        return ("reshard", phi(box), box.dst, "--tp", str(tp))


_REPLICATED = dict.fromkeys(
    ["model.embed_tokens", "lm_head", QKV, GATE_UP, "model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"],
    "replicate",
)


@situation(AREA, "a plan that replicates everything", 0, NOTHING)
def _(box: Box) -> Any:
    return ("reshard", phi(box), box.dst, "--tp", "2", "--tp-plan", plan(box, _REPLICATED))


@situation(
    AREA, "a plan that replicates everything, into a DCP", 0, r"every TP rank has to load the replicated tensors"
)
def _(box: Box) -> Any:
    return ("reshard", phi(box), box.dst, "--tp", "2", "--to", "dcp", "--tp-plan", plan(box, _REPLICATED))


@situation(AREA, "a plan that shards only the embedding", 0, r"leave its layers replicated|match few")
def _(box: Box) -> Any:
    rules = _REPLICATED | {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise"}
    return ("reshard", phi(box), box.dst, "--tp", "2", "--tp-plan", plan(box, rules))


@situation(AREA, "convert to-dcp --tp 2 with a plan that replicates everything", 0, NOTHING)
def _(box: Box) -> Any:
    return ("convert", "to-dcp", phi(box), box.dst, "--tp", "2", "--tp-plan", plan(box, _REPLICATED))


for _style in ("colwise", "colwise_gather_output", "packed_colwise", "packed_rowwise"):

    @situation(AREA, f"a plan that shards [q|k|v] {_style}", 0, ALIGNED)
    def _(box: Box, style: str = _style) -> Any:
        return ("reshard", phi(box), box.dst, "--tp", "2", "--tp-plan", plan(box, {QKV: style, GATE_UP: "colwise"}))


@situation(AREA, "a plan that shards [gate|up] as what it is, and queries whole", 0, r"^(?!.*not aligned).*$")
def _(box: Box) -> Any:
    rules = {QKV: "replicate", GATE_UP: "packed_colwise"}
    return ("-q", "reshard", phi(box), box.dst, "--tp", "2", "--tp-plan", plan(box, rules))


for _name, _config in {
    "no heads": {"num_attention_heads": 0},
    "-4 heads": {"num_attention_heads": -4},
    "10^30 heads": {"num_attention_heads": 10**30},
    "key heads that are null": {"num_key_value_heads": None},
    "a head size of 0": {"head_dim": 0},
    "heads that are a list": {"num_attention_heads": [4]},
    "heads that are a word": {"num_attention_heads": "four"},
    "heads that do not add up to the tensor": {"num_attention_heads": 5},
}.items():

    @situation(AREA, f"fused projections, and the config has {_name}", (0, 3), r"not aligned|config\.json|its config")
    def _(box: Box, config: dict[str, Any] = _config) -> Any:
        return ("reshard", phi(box, **config), box.dst, "--tp", "2", "--allow-config-mismatch")


@situation(AREA, "more TP ranks than key heads", 0, r"not aligned: --tp 8 .* 8 tensors")
def _(box: Box) -> Any:
    sizes = {
        "hidden_size": 8, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "vocab_size": 16,
    }  # fmt: skip
    return ("reshard", write_hf(box.root / "hf", llama(), config=LLAMA | sizes), box.dst, "--tp", "8")


@situation(
    AREA, "as many TP ranks as a mesh may have, of a model that stays whole", (0, 2), r"replicates|ranks, allowed"
)
def _(box: Box) -> Any:
    return ("reshard", mamba2(box), box.dst, "--tp", "65536", "--to", "dcp", "--dry-run")


@situation(AREA, "a plan with a style that no one knows", 2, r"unknown style .*diagonal")
def _(box: Box) -> Any:
    return ("reshard", phi(box), box.dst, "--tp", "2", "--tp-plan", plan(box, {QKV: "diagonal"}))


@situation(AREA, "a plan whose patterns match nothing", 2, r"matches no tensor")
def _(box: Box) -> Any:
    return ("reshard", phi(box), box.dst, "--tp", "2", "--tp-plan", plan(box, {"model.layers.*.q": "colwise"}))


@situation(
    AREA, "a complete output is resumed: the summary says that nothing was written", 0, r"wrote nothing, the output"
)
def _(box: Box) -> Any:
    from tests.situations.box import Try

    words = ("reshard", phi(box), box.dst, "--tp", "2")
    return Try(words, shell='"$@" -q && "$@" --resume')


@situation(AREA, "one tensor of two checkpoints has the same name and another shape", 1, r"1 of 1 tensor differs")
def _(box: Box) -> Any:
    a = write_hf(box.root / "a", {"w": value("F32", 2)}, config=None)
    return ("verify", a, write_hf(box.root / "b", {"w": value("F32", 3)}, config=None))
