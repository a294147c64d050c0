"""Checkpointed layers compute the same bits, keep less, and are as many as there are layers."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor import DTensor

from ckptx.errors import UnsupportedError, UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.model.layers import Layer, layer_groups
from ckptx.runtime.parallel.activation_checkpointing import wrap as activation_checkpointing
from ckptx.runtime.parallel.activation_checkpointing.wrap import (
    MODES,
    KVSharingFallback,
    canonical_name,
    checkpoint_activations,
    shares_kv,
    use_cache_restored,
)
from ckptx.runtime.parallel.distributed import mesh_of
from ckptx.runtime.parallel.parallelize import parallelize
from ckptx.runtime.parallel.tensor_parallel.plans import find_plan
from tests.support.activation_checkpointing import (
    Gradients,
    OperationCounter,
    assert_equal_results,
    build_checkpointed,
    train,
    wrapped_names,
)
from tests.support.models import EVERY, build, tokens
from tests.support.slow import slow_but

WRAPPING = [mode for mode in MODES if mode != "none"]
LLAMA = "llama-fp32"
SHARED = "gemma4-shared-kv"
SHARING = (SHARED, "gemma3n")
# Fused projections, Conv1D with dropout, soft caps, latent attention, experts three ways, a scan, two stacks, towers,
# sinks, linear attention.
DIFFERENT = [
    "phi3", "gpt2", "gemma2", "deepseek-v3", "mixtral", "qwen3-moe", "gpt-oss", "mamba", "t5", "qwen2.5-vl", "llava",
    "falcon", "qwen3-next",
]  # fmt: skip
FEW = [LLAMA, "t5", "gemma3-vlm", SHARED]  # a list, two of them, nested ones, a fallback


@pytest.mark.sampled(3)
@pytest.mark.parametrize("microbatches", slow_but([1, 3], [3]))
@pytest.mark.parametrize("name", DIFFERENT)
def test_losses_and_gradients_are_equal_to_the_bit(name: str, microbatches: int) -> None:
    recipe = EVERY[name]
    plain = build(recipe).train()
    plain.config.use_cache = False
    wanted = train(plain, recipe, microbatches)
    for mode in WRAPPING:
        assert_equal_results(train(build_checkpointed(name, mode), recipe, microbatches), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("mode", WRAPPING)
@pytest.mark.parametrize("name", sorted(EVERY.keys() - {"whisper"}))  # its inputs do not have its dtype
def test_every_model_computes_the_same_bits(name: str, mode: str) -> None:
    plain = build(EVERY[name]).train()
    assert_equal_results(train(build_checkpointed(name, mode), EVERY[name]), train(plain, EVERY[name]))


def test_a_comparison_of_bits_notices_one() -> None:
    losses, gradients = train(build(EVERY[LLAMA]).train(), EVERY[LLAMA])
    other = {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}
    other["model.norm.weight"][3] += 2**-20
    with pytest.raises(AssertionError, match=r"model\.norm\.weight"):
        assert_equal_results((losses, other), (losses, gradients))


@pytest.mark.parametrize("name", slow_but(EVERY, FEW))
def test_as_many_layers_are_wrapped_as_there_are(name: str) -> None:
    for mode in ("full", "submodule"):
        for split in (False, True):
            model = build(EVERY[name])
            layers = [layer.name for group in layer_groups(model).values() for layer in group]
            if split:
                into_dicts(model, layers)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", KVSharingFallback)
                assert checkpoint_activations(model, mode) == len(layers)
            if mode == "full" and name not in SHARING:
                assert sorted(wrapped_names(model)) == sorted(layers)
            else:
                assert {owner(part, layers) for part in wrapped_names(model)} == set(layers)


def into_dicts(model: nn.Module, layers: list[str]) -> None:
    """Puts a ModuleDict with indices for keys in the place of each list of layers."""
    for path in {layer.rpartition(".")[0] for layer in layers}:
        parent, _, key = path.rpartition(".")
        held = model.get_submodule(path)
        model.get_submodule(parent).register_module(key, nn.ModuleDict({str(i): each for i, each in enumerate(held)}))


def owner(part: str, layers: list[str]) -> str:
    (found,) = [layer for layer in layers if part.startswith(f"{layer}.")]
    return found


def test_router_logits_leave_a_checkpointed_layer() -> None:
    def run(mode: str) -> tuple[list[float], Gradients]:
        model = build_checkpointed("mixtral", mode)
        loss = model(**tokens(), labels=tokens()["input_ids"], output_router_logits=True).loss
        loss.backward()
        return [loss.item()], {canonical_name(name): each.grad for name, each in model.named_parameters()}

    wanted = run("none")
    for mode in WRAPPING:
        assert_equal_results(run(mode), wanted)


# What is wrapped


def test_submodule_wraps_attention_mlp_and_norms_and_nothing_else() -> None:
    parts = {name.rpartition(".")[2] for name in wrapped_names(build_checkpointed("gemma2", "submodule"))}
    assert parts == {
        "self_attn", "mlp", "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm"
    }  # fmt: skip


def test_sublayers_of_t5_are_found_in_their_list() -> None:
    names = wrapped_names(build_checkpointed("t5", "submodule"))
    assert [name for name in names if name.startswith("decoder.block.1")] == [
        "decoder.block.1.layer.0.SelfAttention", "decoder.block.1.layer.0.layer_norm",
        "decoder.block.1.layer.1.EncDecAttention", "decoder.block.1.layer.1.layer_norm",
        "decoder.block.1.layer.2.DenseReluDense", "decoder.block.1.layer.2.layer_norm",
    ]  # fmt: skip


@pytest.mark.parametrize("mode", WRAPPING)
@pytest.mark.parametrize("name", [LLAMA, "t5", "qwen2.5-vl"])
def test_names_stay_as_they_were(name: str, mode: str) -> None:
    plain, model = build(EVERY[name]), build_checkpointed(name, mode)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [canonical_name(each) for each, _ in model.named_parameters()] == [
        each for each, _ in plain.named_parameters()
    ]
    assert [each for each, _ in model.named_parameters()] != [each for each, _ in plain.named_parameters()]
    zeros = {key: torch.zeros_like(value) for key, value in plain.state_dict().items()}
    model.load_state_dict(zeros)
    assert not any(parameter.any() for parameter in model.parameters())


@pytest.mark.parametrize("mode", WRAPPING)
def test_a_second_call_adds_no_second_wrapper(mode: str) -> None:
    model = build_checkpointed(LLAMA, mode)
    before = wrapped_names(model)
    assert checkpoint_activations(model, mode) == 2
    assert wrapped_names(model) == before


def test_none_changes_nothing() -> None:
    model = build(EVERY[LLAMA])
    assert checkpoint_activations(model, "none") == 0
    assert wrapped_names(model) == [] and model.config.use_cache is True


def test_a_property_does_not_make_a_second_wrapper() -> None:
    class Aliased(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
        @property
        def feed_forward(self) -> nn.Module:
            return self.mlp

    model = build(EVERY[LLAMA])
    for layer in model.model.layers:
        layer.__class__ = Aliased
    checkpoint_activations(model, "submodule")
    assert list(model.state_dict()) == list(build(EVERY[LLAMA]).state_dict())
    assert [name for name in wrapped_names(model) if name.endswith("feed_forward")] == []


def test_a_wrapped_part_is_taken_for_what_is_in_it() -> None:
    model = build_checkpointed(LLAMA, "submodule")
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp, CheckpointWrapper) and isinstance(mlp, transformers.models.llama.modeling_llama.LlamaMLP)
    assert not isinstance(mlp, nn.Linear)
    assert isinstance(copy.deepcopy(mlp), CheckpointWrapper)


def test_a_layer_without_known_parts_is_checkpointed_whole_in_submodule_mode() -> None:
    model = build(EVERY[LLAMA])
    model.model.layers[1] = nn.Sequential(nn.Linear(32, 32))
    assert checkpoint_activations(model, "submodule") == 2
    assert "model.layers.1" in wrapped_names(model) and "model.layers.0" not in wrapped_names(model)


@pytest.mark.parametrize(
    ("scope", "prefixes"),
    [
        ("language", {"model.language_model"}),
        ("vision", {"model.vision_tower"}),
        ("all", {"model.language_model", "model.vision_tower"}),
    ],
)
def test_a_scope_wraps_its_group_alone(scope: str, prefixes: set[str]) -> None:
    model = build_checkpointed("gemma3-vlm", "full", scope)
    assert {".".join(name.split(".")[:2]) for name in wrapped_names(model)} == prefixes


def test_frozen_layers_stay_as_they_are() -> None:
    model = build(EVERY["gemma3-vlm"])
    model.model.vision_tower.requires_grad_(False)
    model.model.language_model.layers[0].requires_grad_(False)
    assert checkpoint_activations(model, "full") == 1
    assert wrapped_names(model) == ["model.language_model.layers.1"]
    model.model.vision_tower.requires_grad_(False)
    with pytest.raises(UnsupportedError, match="Gemma3ForConditionalGeneration: mode full with scope vision"):
        checkpoint_activations(model, "full", "vision")


@pytest.mark.parametrize("mode", WRAPPING)
def test_a_scope_without_layers_is_refused(mode: str) -> None:
    with pytest.raises(
        UnsupportedError, match=f"^LlamaForCausalLM: mode {mode} with scope audio would checkpoint no layer"
    ):
        checkpoint_activations(build(EVERY[LLAMA]), mode, "audio")


@pytest.mark.parametrize("mode", WRAPPING)
def test_a_list_taken_for_a_layer_is_noticed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole_lists(model: Any) -> dict[str, list[Layer]]:
        return {"language": [Layer("model.language_model.layers", model.model.language_model.layers)]}

    monkeypatch.setattr(activation_checkpointing, "layer_groups", whole_lists)
    model = build(EVERY["gemma3-vlm"])
    with pytest.raises(UnsupportedError, match="would checkpoint no layer"):
        checkpoint_activations(model, mode)
    assert wrapped_names(model) == []


@pytest.mark.parametrize(("mode", "scope"), [("half", "all"), ("full", "multimodal"), ("Full", "all")])
def test_an_unknown_mode_or_scope_is_refused(mode: str, scope: str) -> None:
    with pytest.raises(UsageError, match=r"activation checkpointing: unknown (mode|scope) .*; choose one of"):
        checkpoint_activations(build(EVERY[LLAMA]), mode, scope)


def test_two_kinds_of_checkpointing_are_refused() -> None:
    model = build(EVERY[LLAMA])
    model.gradient_checkpointing_enable()
    with pytest.raises(UsageError, match="gradient_checkpointing_disable"):
        checkpoint_activations(model, "full")
    model.gradient_checkpointing_disable()
    assert checkpoint_activations(model, "full") == 2


def test_a_stage_may_own_no_layer() -> None:
    model = build(EVERY[LLAMA])
    model.model.layers = nn.ModuleDict()
    assert checkpoint_activations(model, "full") == 0


# The cache


@pytest.mark.parametrize("name", ["t5", "gemma3-vlm", LLAMA])
def test_no_config_keeps_a_cache(name: str) -> None:
    model = build_checkpointed(name, "full")
    configs = [each.config for each in model.modules() if hasattr(each, "config")]
    configs += [each.text_config for each in configs if hasattr(each, "text_config")]
    assert len({id(config) for config in configs}) > (name != LLAMA)
    assert [config for config in configs if getattr(config, "use_cache", False)] == []


@pytest.mark.parametrize("name", ["t5", "gemma3-vlm", LLAMA])
def test_configs_are_saved_as_they_were_given(name: str) -> None:
    given = build(EVERY[name]).config.to_dict()
    model = build(EVERY[name])
    for _ in range(2):
        checkpoint_activations(model, "full")
        assert model.config.to_dict() != given
        with use_cache_restored(model):
            assert model.config.to_dict() == given
        assert not model.config.get_text_config().use_cache


def test_a_cache_that_was_off_stays_off() -> None:
    model = build(EVERY[LLAMA])
    model.config.use_cache = False
    checkpoint_activations(model, "full")
    with use_cache_restored(model):
        assert model.config.use_cache is False


@pytest.mark.parametrize("modes", [[None, "store", "reuse"], [None, "store", "reuse_but_indexer"]])
def test_layers_that_say_themselves_whom_they_share_with_are_believed(modes: list[str | None]) -> None:
    model = build(EVERY[LLAMA])
    assert not shares_kv(model)
    model.config.kv_sharing_modes = modes  # as the config of Mistral Large 4 works them out
    assert shares_kv(model)
    model.config.kv_sharing_modes = [None, None]
    assert not shares_kv(model)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", WRAPPING)
@pytest.mark.parametrize(("name", "layers"), [(SHARED, 4), ("gemma3n", 6)])
def test_shared_keys_and_values_keep_their_attention_and_their_cache(name: str, layers: int, mode: str) -> None:
    model = build(EVERY[name]).train()
    assert shares_kv(model) and not shares_kv(build(EVERY["gemma4"]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert checkpoint_activations(model, mode) == layers
    assert [warning.category for warning in caught] == ([] if mode == "submodule" else [KVSharingFallback])
    assert model.config.use_cache is True
    parts = {name.rpartition(".")[2] for name in wrapped_names(model)}
    assert "mlp" in parts and "input_layernorm" in parts and "self_attn" not in parts
    assert_equal_results(train(model, EVERY[name], 3), train(build(EVERY[name]).train(), EVERY[name], 3))


# Over ranks


def sharded_run(rank: int, world_size: int, mode: str) -> tuple[list[float], dict[str, Any]]:
    """Two microbatches of this rank through FSDP2, each layer a unit; gradients whole, as numpy."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    assert dist.get_world_size() == world_size
    model = build_checkpointed("mixtral", mode).float()
    model.config.use_cache = False
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in layer_groups(model)["language"]:
        fully_shard(layer.module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses, gradients = train(model, EVERY["mixtral"], 2)
    return losses, {name: each.full_tensor().numpy() for name, each in gradients.items() if each is not None}


def parallel_run(rank: int, world_size: int, mode: str) -> tuple[list[float], dict[str, Any]]:
    """The same under TP: the attention of a small Llama cut over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = build(EVERY[LLAMA]).train()
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    for layer in layer_groups(model)["language"]:
        parallelize_module(layer.module, init_device_mesh("cpu", (world_size,)), plan)
    checkpoint_activations(model, mode)
    model.config.use_cache = False
    losses, gradients = train(model, EVERY[LLAMA], 2)
    whole = {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).numpy()
        for name, each in gradients.items()
        if each is not None
    }
    return losses, whole


def cut_run(rank: int, world_size: int, name: str, mode: str) -> tuple[int, dict[str, Any]]:
    """How many sums over the ranks a backward pass under our own TP has, and the local gradients, as numpy."""
    model = build(replace(EVERY[name], dtype=torch.float32)).train()
    model.config.use_cache = False
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    mesh = mesh_of(ParallelDims(tp=world_size), "cpu")
    parallelize(model, mesh, find_plan(model, config, None), activation_checkpointing=mode)
    logits = model(**EVERY[name].inputs()).logits
    loss = (logits.to_local() if isinstance(logits, DTensor) else logits).square().mean()
    with OperationCounter() as counting:
        loss.backward()
    sums = sum(count for op, count in counting.ops.items() if "functional.all_reduce" in str(op))
    named = ((canonical_name(key), each.grad) for key, each in model.named_parameters())
    return sums, {key: getattr(grad, "_local_tensor", grad).numpy() for key, grad in named if grad is not None}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gemma3", "mixtral", "qwen3-vl", "deepseek-v3"])
def test_selective_mode_sums_over_the_ranks_once(pool: Any, name: str) -> None:
    """What came over the network is kept; computed again it would cost as much as what it saves."""
    none, selective, full = (pool.run(cut_run, 2, name, mode) for mode in ("none", "selective", "full"))
    for rank in range(2):
        assert selective[rank][0] == none[rank][0] < full[rank][0]
        for found in (selective[rank][1], full[rank][1]):
            assert found.keys() == none[rank][1].keys() != set()
            assert [key for key, each in found.items() if each.tobytes() != none[rank][1][key].tobytes()] == []


def assert_same_on_every_rank(found: list[Any], wanted: list[Any]) -> None:
    for (losses, gradients), (wanted_losses, wanted_gradients) in zip(found, wanted, strict=True):
        assert losses == wanted_losses
        assert gradients.keys() == wanted_gradients.keys()
        assert any(each.any() for each in wanted_gradients.values())
        assert [name for name, each in wanted_gradients.items() if gradients[name].tobytes() != each.tobytes()] == []


def test_sharded_layers_compute_the_same_bits(pool: Any) -> None:
    assert_same_on_every_rank(pool.run(sharded_run, 2, "selective"), pool.run(sharded_run, 2, "none"))


@pytest.mark.slow
@pytest.mark.parametrize("run", [sharded_run, parallel_run])
def test_layers_cut_over_ranks_compute_the_same_bits_in_every_mode(pool: Any, run: Any) -> None:
    wanted = pool.run(run, 2, "none")
    for mode in WRAPPING:
        assert_same_on_every_rank(pool.run(run, 2, mode), wanted)
