"""Small models in place of large ones: the same layers, that share the same things and run the same code."""

from __future__ import annotations

import copy
import functools
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckptx.errors import UnsupportedError
from ckptx.runtime.model import tiny_model as tiny
from ckptx.runtime.model.build import build_on_meta
from ckptx.runtime.model.shrink_config import ShrinkPolicy, find_token_ids, iter_configs, shrink_config
from ckptx.runtime.model.tiny_model import tiny_config, tiny_model
from tests.support.large_configs import LARGE, large
from tests.support.models import EVERY
from tests.support.slow import slow_but

FAST = [name for name in list(LARGE)[:10] if name not in ("zamba2-7b", "qwen3-235b-a22b")]  # they take longest
NAMES = slow_but(LARGE, FAST)

# Types of layers, windows, multipliers, ...: what decides which way a forward takes, and has nothing of a width.
DECIDING = (
    "num_hidden_layers", "encoder_layers", "decoder_layers", "n_layer", "num_layers", "depth", "layer_types",
    "layers_block_type", "mlp_layer_types", "sliding_window", "final_logit_softcapping", "query_pre_attn_scalar",
    "residual_multiplier", "embedding_multiplier", "num_kv_shared_layers", "cross_attention_layers",
    "deepstack_visual_indexes", "fullatt_block_indexes", "no_rope_layers", "moe_layers", "first_k_dense_replace",
    "num_experts_per_tok", "top_k_experts", "n_group", "topk_group", "num_mem_blocks", "hybrid_layer_ids",
    "activation_sparsity_pattern", "attn_layer_indices", "tie_word_embeddings", "max_position_embeddings",
    "intermediate_layers_indices", "image_token_id", "image_token_index", "eos_token_id",
)  # fmt: skip


def values_of(config: Any) -> dict[str, Any]:
    """What a config says, with the path of each key."""

    def walk(values: dict[str, Any], path: str) -> dict[str, Any]:
        found = {}
        for key, value in values.items():
            is_config = isinstance(value, transformers.PreTrainedConfig)
            found |= walk(vars(value), f"{path}{key}.") if is_config else {path + key: value}
        return found

    return walk(vars(config), "")


def layers_of(model: nn.Module) -> dict[str, list[str]]:
    """List of modules -> the classes in it, but for lists of experts."""
    return {
        name: [type(each).__name__ for each in module]
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.ModuleList) and "experts" not in name
    }


def shared_of(model: nn.Module) -> dict[str, str]:
    """Name of a parameter -> the name under which it came first."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(each), name) for name, each in model.named_parameters(remove_duplicate=False)}


def text_for(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.arange(5, 29).reshape(2, 12)
    other = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    if model.main_input_name == "input_features":
        shape = (2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=torch.Generator().manual_seed(0)), **other}
    return {"input_ids": ids, **other}


@pytest.mark.parametrize("name", NAMES)
def test_a_small_model_has_the_layers_of_the_large_one_and_runs(name: str) -> None:
    config, cls = large(name)
    before = copy.deepcopy(values_of(config))
    began = time.perf_counter()
    model = tiny_model(config, cls)
    assert time.perf_counter() - began < 60  # a few seconds on a machine that does nothing else
    assert values_of(config) == before
    reference = build_on_meta(cls, copy.deepcopy(config), torch.float32, "sdpa")
    assert layers_of(model) == layers_of(reference)
    assert layers_of(model)
    assert shared_of(model) == shared_of(reference)
    assert 4 * sum(each.numel() for each in model.parameters()) <= 256 * 2**20
    old, new = values_of(config), values_of(model.config)
    for key in old:
        if key.rpartition(".")[2] in DECIDING:
            assert new[key] == old[key], key
        if key.rpartition(".")[2] == "use_cache":
            assert new[key] is False
    assert not model.training
    began = time.perf_counter()
    with torch.no_grad():
        logits = model(**text_for(model)).logits
    assert time.perf_counter() - began < 30
    assert logits.shape[0] == 2
    assert torch.isfinite(logits).all()
    assert logits.std() > 0


class Pretended(TorchDispatchMode):
    """Values where there are none: a model on the meta device runs wherever its code asks what a tensor holds."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype is torch.bool or 1
        if func is torch.ops.aten._grouped_mm.default:  # on meta it takes bfloat16 alone
            return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return args[0].new_empty((1, args[0].dim()), dtype=torch.long)
        return func(*args, **(kwargs or {}))


def lines_run(config: Any, cls: Any) -> Counter[tuple[str, int]]:
    """How often each line of transformers' models, masks and positions runs when a model reads a text.

    Without storage, so that the large model runs as well as the small one. Which of its kernels attention takes is left
    out: it is decided inside of a layer, by how wide heads are.
    """
    model = build_on_meta(cls, copy.deepcopy(config), torch.float32, "sdpa")
    batch = {key: value.to("meta") for key, value in text_for(model).items()}
    root = str(Path(transformers.__file__).parent)
    found: Counter[tuple[str, int]] = Counter()

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            found[frame.f_code.co_filename, frame.f_lineno] += 1
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        return line if file.startswith((f"{root}/models", f"{root}/masking", f"{root}/modeling_rope")) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        with torch.no_grad(), Pretended():
            model(**batch)
    finally:
        sys.settrace(before)
    return found


@functools.cache
def lines_run_small(name: str) -> tuple[Any, Counter[tuple[str, int]]]:
    """The small config in place of a large one, and its lines; both are only read."""
    config, cls = large(name)
    small = tiny_config(tiny._without_cache(config), cls)
    return small, lines_run(small, cls)


@pytest.mark.parametrize("name", slow_but(LARGE, ["t5-11b"]))
def test_a_small_model_runs_the_same_lines(name: str) -> None:
    config, cls = large(name)
    expected = lines_run(tiny._without_cache(config), cls)
    assert sum(expected.values()) > 1000
    assert lines_run_small(name)[1] == expected


@pytest.mark.parametrize(
    "changes", [{"final_logit_softcapping": None}, pytest.param({"num_kv_shared_layers": 10}, marks=pytest.mark.slow)]
)
def test_other_lines_are_told_apart(changes: dict[str, Any]) -> None:
    _, cls = large("gemma-4-e2b")
    small, expected = lines_run_small("gemma-4-e2b")
    other = copy.deepcopy(small)
    vars(other).update(changes)
    assert lines_run(other, cls) != expected


@pytest.mark.parametrize("name", ["t5-11b", "gpt-oss-120b", pytest.param("qwen2.5-vl-72b", marks=pytest.mark.slow)])
def test_every_tensor_is_random(name: str) -> None:
    """None of one value throughout, as norms and biases start; the same values each time."""
    config, cls = large(name)
    model, again = tiny_model(config, cls), tiny_model(config, cls)
    tensors = model.state_dict()
    assert all(each.is_cpu and each.dtype is torch.float32 for each in tensors.values() if each.is_floating_point())
    constant = [name for name, each in tensors.items() if each.numel() > 1 and each.min() == each.max()]
    assert constant == []
    assert all(torch.equal(each, tensors[name]) for name, each in again.state_dict().items())


def test_buffers_are_those_of_the_class() -> None:
    config, cls = large("llama-3-70b")
    model = tiny_model(config, cls)
    with torch.random.fork_rng():
        plain = cls(copy.deepcopy(model.config))
    assert dict(model.named_buffers())
    assert all(torch.equal(each, plain.get_buffer(name)) for name, each in model.named_buffers())


def test_what_is_drawn_elsewhere_is_left_alone() -> None:
    config, cls = large("phi-3-mini-128k")
    state = torch.random.get_rng_state()
    tiny_model(config, cls)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("name", EVERY)
def test_a_model_that_is_small_already_stays_as_it_is(name: str) -> None:
    with torch.random.fork_rng():
        model = EVERY[name].model()
    found = tiny_config(model.config, type(model))
    assert found is not model.config
    old, new = values_of(model.config), values_of(found)
    changed = {key for key in old if new[key] != old[key]}
    assert {key.rpartition(".")[2] for key in changed} <= {"use_cache", "_attn_implementation_internal"}
    assert not any(vars(part).get("use_cache") for part in iter_configs(found))


def test_attention_is_sdpa_whatever_the_config_says() -> None:
    config, cls = large("llama-3-70b")
    config._attn_implementation = "eager"
    assert tiny_model(config, cls).config._attn_implementation == "sdpa"
    assert config._attn_implementation == "eager"


# ------------------------------------------------------------------------------------------------ what hangs together


def test_kinds_of_attention_stay() -> None:
    """As many key and value heads as heads, fewer, or one."""
    for kv, kind in ((64, "all"), (8, "some"), (1, "one")):
        config = transformers.LlamaConfig(hidden_size=8192, num_attention_heads=64, num_key_value_heads=kv)
        new = shrink_config(config, ShrinkPolicy())
        found = "one" if new.num_key_value_heads == 1 else "all"
        found = "some" if 1 < new.num_key_value_heads < new.num_attention_heads else found
        assert found == kind
        assert new.head_dim * new.num_attention_heads == new.hidden_size


def test_heads_that_are_no_power_of_two_stay_so() -> None:
    """ALiBi takes another way for them."""
    new = shrink_config(large("bloom-176b")[0], ShrinkPolicy())
    assert new.n_head & (new.n_head - 1)
    assert not shrink_config(transformers.BloomConfig(n_head=64, hidden_size=8192), ShrinkPolicy()).n_head % 4


def test_rotary_frequencies_fit_the_heads() -> None:
    new = shrink_config(large("qwen2.5-vl-72b")[0], ShrinkPolicy()).text_config
    assert sum(new.rope_parameters["mrope_section"]) == new.hidden_size // new.num_attention_heads // 2 == 8
    new = shrink_config(large("phi-3-mini-128k")[0], ShrinkPolicy())
    half = new.hidden_size // new.num_attention_heads // 2
    assert len(new.rope_parameters["short_factor"]) == len(new.rope_parameters["long_factor"]) == half < 48


def test_a_tower_fits_what_reads_it() -> None:
    new = shrink_config(large("qwen3-vl-32b")[0], ShrinkPolicy())
    assert new.vision_config.out_hidden_size == new.text_config.hidden_size < 5120
    assert new.vision_config.hidden_size != new.text_config.hidden_size
    new = shrink_config(large("llama-3.2-90b-vision")[0], ShrinkPolicy()).vision_config
    assert new.vision_output_dim == 6 * new.hidden_size


def test_heads_of_state_spaces_fill_the_expanded_stream() -> None:
    new = shrink_config(large("mamba2-8b")[0], ShrinkPolicy())
    assert new.expand * new.hidden_size == new.num_heads * new.head_dim
    assert not new.num_heads % new.n_groups
    assert new.n_groups > 1
    new = shrink_config(large("falcon-h1-34b")[0], ShrinkPolicy())
    assert new.mamba_d_ssm == new.mamba_n_heads * new.mamba_d_head


def test_enough_experts_stay_to_choose_from() -> None:
    new = shrink_config(large("deepseek-v3")[0], ShrinkPolicy())
    assert new.n_routed_experts == 16
    assert new.n_routed_experts // new.n_group * new.topk_group >= new.num_experts_per_tok
    assert new.qk_head_dim == new.qk_nope_head_dim + new.qk_rope_head_dim
    assert shrink_config(large("gpt-oss-120b")[0], ShrinkPolicy()).num_local_experts == 8


def test_layers_that_differ_still_differ() -> None:
    config = large("gemma-4-31b")[0]
    new = shrink_config(config, ShrinkPolicy())
    ratios = {config.per_layer_config[at].head_dim / new.per_layer_config[at].head_dim for at in (0, 5)}
    assert len(ratios) == 1
    assert min(ratios) > 1
    assert new.per_layer_config[0].head_dim != new.per_layer_config[5].head_dim
    assert new.per_layer_config[0].num_key_value_heads != new.per_layer_config[5].num_key_value_heads


def test_a_vocabulary_is_cut_behind_the_tokens_that_are_named() -> None:
    config = transformers.LlamaConfig(vocab_size=100_000, eos_token_id=[7, 900], bos_token_id=1)
    assert find_token_ids(config) == {1, 7, 900}
    new = shrink_config(config, ShrinkPolicy(shorten_vocabulary=True))
    assert 900 < new.vocab_size < 1100
    assert shrink_config(config, ShrinkPolicy()).vocab_size == 100_000


# -------------------------------------------------------------------------------------------------------- refusals


def test_a_config_that_cannot_be_is_refused_by_name() -> None:
    config = transformers.LlamaConfig(hidden_size=4096, num_attention_heads=32)
    config.__dict__["hidden_act"] = "no such activation"
    with pytest.raises(UnsupportedError, match=r"^LlamaForCausalLM: .*no such activation"):
        tiny_config(config, transformers.LlamaForCausalLM)


def test_a_model_that_does_not_read_is_refused_by_name() -> None:
    config = transformers.ViTConfig(num_hidden_layers=48)
    with pytest.raises(
        UnsupportedError,
        match=r"^ViTModel: its input is pixel_values; --pp and recipes with shrunk: true require a text model",
    ):
        tiny_config(config, transformers.ViTModel)


def injected(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Makes what is narrowed wrong in some keys."""

    def narrow_wrongly(config: Any, how: ShrinkPolicy) -> Any:
        found = shrink_config(config, how)
        found.__dict__.update(changes)
        return found

    monkeypatch.setattr(tiny, "shrink_config", narrow_wrongly)


PLANTED = {
    "a layer less": ({"num_hidden_layers": 3}, r"lacks model\.layers\.3 \(class LlamaDecoderLayer\)"),
    "another bias": (
        {"attention_bias": True},
        r"has in addition model\.layers\.0\.self_attn\.k_proj\.bias \(separate\)",
    ),
    "tied": ({"tie_word_embeddings": True}, r"lacks lm_head\.weight \(separate\)"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "Error: "),
    "too wide": ({"intermediate_size": 200_000}, r"it has \d+ MiB of parameters, limit 256 MiB"),
}


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_tie_in_one_model_only_is_named_with_both_names(is_tied: bool) -> None:
    config = transformers.LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    large, small = (
        tiny._build_structure(
            transformers.LlamaConfig(**(config.to_dict() | {"tie_word_embeddings": tied})),
            transformers.LlamaForCausalLM,
        )
        for tied in (is_tied, not is_tied)
    )
    kind = "tied to model.embed_tokens.weight" if is_tied else "separate"
    assert tiny._find_difference(large, small, 1 << 30) == f"it lacks lm_head.weight ({kind})"


@pytest.mark.parametrize("defect", PLANTED)
def test_a_config_of_other_layers_is_not_taken(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, message = PLANTED[defect]
    injected(monkeypatch, **changes)
    config, cls = large("llama-3-70b")
    config.num_hidden_layers = 4  # as wide, and built in no time
    with pytest.raises(
        UnsupportedError, match=rf"^LlamaForCausalLM: cannot build a small model .*first attempt .*{message}"
    ):
        tiny_config(config, cls)


def test_a_less_narrow_one_is_taken_where_the_first_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[ShrinkPolicy] = []

    def narrow_wrongly(config: Any, how: ShrinkPolicy) -> Any:
        tried.append(how)
        found = shrink_config(config, how)
        if len(tried) < 3:
            found.num_hidden_layers = 1
        return found

    monkeypatch.setattr(tiny, "shrink_config", narrow_wrongly)
    config = transformers.LlamaConfig(hidden_size=4096, num_hidden_layers=4, num_attention_heads=32)
    found = tiny_config(config, transformers.LlamaForCausalLM)
    assert found.head_dim == 128
    assert len(tried) == 3
