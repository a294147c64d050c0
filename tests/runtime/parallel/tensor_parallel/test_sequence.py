"""Layers that compute on slices of the sequence compute what they compute on the whole of it, and hold less."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ckptx.runtime.parallel.activation_checkpointing.wrap import checkpoint_activations
from ckptx.runtime.parallel.tensor_parallel import sequence
from ckptx.runtime.parallel.tensor_parallel.apply import apply_tensor_parallel
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks, gather
from ckptx.runtime.parallel.tensor_parallel.forward_traits import find_forward_traits
from ckptx.runtime.parallel.tensor_parallel.plans import find_plan
from ckptx.runtime.parallel.tensor_parallel.sequence import SequenceSharding, shard_sequence
from tests.support import models
from tests.support import tensor_parallel as worker
from tests.support.activation_checkpointing import LiveBytes
from tests.support.corrections import forward_rows
from tests.support.models import EVERY
from tests.support.pool import GlooPool
from tests.support.slow import slow_but
from tests.support.transformers_version import INSTALLED, IS_TABLES_VERSION

# Sums of float32 in another order: 24 bits give 6e-8 for one, and a gradient is behind some hundred of them.
CLOSE = 1e-5

LISTED = (
    "llama-tied", "llama-untied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3-vlm", "gemma4",
    "gemma4-moe", "gemma4-ple", "gemma4-shared-kv", "gemma4-vlm", "phi3", "qwen3-moe", "mixtral",
)  # fmt: skip
OTHERS = (
    "llama-biased", "deepseek-v3", "granite", "olmo2", "cohere", "glm4", "starcoder2", "qwen2-moe", "glm4-moe",
    "gpt-oss",
)  # fmt: skip
FAST = ("llama-tied", "gemma4-moe", "phi3", "qwen3-moe")
NO_SEQUENCE = {"Qwen3VLForConditionalGeneration"}

sequence_parallel = partial(worker.compare_with_unsharded, sequence_parallel=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", slow_but((*LISTED, *OTHERS), FAST))
def test_logits_loss_and_gradients_are_those_of_the_uncut_model(pool: GlooPool, name: str) -> None:
    for found in pool.run(sequence_parallel, 2, name):
        assert found.worst < CLOSE, found
        assert found.loss_by_model is None or found.loss_by_model < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in (*LISTED, *OTHERS) if name != "gemma3"])  # it has two key heads
def test_four_ranks(pool: GlooPool, name: str) -> None:
    for found in pool.run(partial(sequence_parallel, kv_heads=4), 4, name):
        assert found.worst < CLOSE, found


def test_every_class_that_may_is_tested() -> None:
    tested = set()
    for name in (*LISTED, *OTHERS):
        with torch.device("meta"):
            tested.add(type(EVERY[name].model()).__name__)
    on_sequence = {name for name, rows in forward_rows().items() if any(row.sequence for row in rows)}
    assert tested == on_sequence
    assert forward_rows().keys() - on_sequence == NO_SEQUENCE


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "mode"),
    [("gemma2", "full"), ("qwen3-moe", "selective"), ("gemma4-moe", "submodule"), ("gemma4-ple", "full")],
)
def test_recomputed_activations_go_through_the_same_collectives(pool: GlooPool, name: str, mode: str) -> None:
    for found in pool.run(partial(sequence_parallel, checkpointing=mode), 2, name):
        assert found.worst < CLOSE, found


def test_gradients_add_up_over_microbatches(pool: GlooPool) -> None:
    for found in pool.run(partial(sequence_parallel, microbatches=3), 2, "gemma3"):
        assert found.worst < CLOSE, found


@pytest.mark.parametrize("name", slow_but(("qwen3-moe", "mixtral"), ("qwen3-moe",)))
def test_routers_are_balanced_over_the_whole_sequence(pool: GlooPool, name: str) -> None:
    for found in pool.run(partial(sequence_parallel, with_routers=True), 2, name):
        assert found.worst < CLOSE, found


@pytest.mark.parametrize("name", slow_but(("gemma4-moe", "gpt-oss"), ("gemma4-moe",)))
def test_fsdp_goes_around_it(pool: GlooPool, name: str) -> None:
    for logits, gradients in pool.run(worker.compare_with_fsdp, 4, name, True):
        assert logits < CLOSE
        assert gradients < CLOSE


@pytest.mark.parametrize(
    ("name", "user", "gathered"),
    [
        ("gemma2", {"model.layers.*.mlp.down_proj": "replicate"}, ("model.layers.0.mlp", "model.layers.1.mlp")),
        ("llama-tied", {"model.layers.0.self_attn.o_proj": "colwise"}, ("model.layers.0.self_attn",)),
        ("qwen3-moe", {"model.layers.1.mlp.gate": "colwise"}, ("model.layers.1.mlp",)),
        ("gemma4-moe", {"model.layers.*.experts.down_proj": "replicate"},
         ("model.layers.0.experts", "model.layers.1.experts")),
    ],
)  # fmt: skip
def test_what_is_gathered_is_right_on_the_whole_sequence(
    pool: GlooPool, name: str, user: dict[str, str], gathered: tuple[str, ...]
) -> None:
    for found in pool.run(partial(sequence_parallel, user=user), 2, name):
        assert found.worst < CLOSE, found
        assert found.gathered == gathered


# Injected defects


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("gemma2", "model.layers.0.post_attention_layernorm.weight"),
        ("gemma4-moe", "model.layers.0.router.proj.weight"),
        ("gemma4-ple", "model.layers.1.per_layer_projection.weight"),
        ("gpt-oss", "model.layers.1.input_layernorm.weight"),
    ],
)
def test_a_forgotten_sum_of_gradients_is_seen(pool: GlooPool, name: str, sign: str) -> None:
    found = pool.run(partial(sequence_parallel, defect="sum_slice_gradients"), 2, name)[0]
    assert found.logits < CLOSE
    assert found.gradients[sign] > 100 * CLOSE


@pytest.mark.parametrize("name", ["llama-tied", "gemma4-moe"])
def test_a_passage_that_is_taken_for_another_is_seen(pool: GlooPool, name: str) -> None:
    """What every rank has whole would be summed over ranks in the backward pass."""
    found = pool.run(with_wrong_passages, 2, name)[0]
    assert found.logits < CLOSE
    assert max(found.gradients.values()) > 100 * CLOSE


def with_wrong_passages(rank: int, world_size: int, name: str) -> worker.Outcome:
    def gather_whole(x: torch.Tensor, dim: int, total: int, ranks: TpRanks) -> torch.Tensor:
        return gather(x, dim, total, ranks)

    with mock.patch.object(sequence, "gather_partial", gather_whole):
        return worker.compare_with_unsharded(rank, world_size, name, sequence_parallel=True)


# What is where


def cut_of(name: str, gathered: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> SequenceSharding:
    """Where the sequence of a model is cut if all its projections are sharded but those in `whole`."""
    with torch.device("meta"):
        model = EVERY[name].model()
    plan = find_plan(model, worker.config_of(model), None, True)
    modules = dict(model.named_modules())
    is_sharded = {
        path for path in modules if plan.runs_on_shards(f"{path}.weight") or plan.runs_on_shards(f"{path}.gate_up_proj")
    }
    return shard_sequence(modules, plan, is_sharded - set(whole), gathered)


def passages(cut: SequenceSharding) -> dict[str, bool]:
    """In the first layer, by name, whether it gives a summand."""
    return {
        each.path.removeprefix("model.layers.0."): each.has_partial_output
        for each in cut.full_modules
        if ".0." in each.path
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-tied", {"self_attn": True, "mlp": True}),
        ("qwen3", {"self_attn": True, "mlp": True}),  # norms of queries stand between projections
        ("phi3", {"self_attn": True, "mlp": True}),
        ("qwen3-moe", {"self_attn": True, "mlp": False}),
        ("gemma4-moe", {"self_attn": True, "mlp": True, "experts": True}),
        ("deepseek-v3", {"self_attn": False, "mlp": True}),
    ],
)
def test_the_sum_and_the_cut_are_one_where_projections_are_all_there_is(name: str, expected: dict[str, bool]) -> None:
    assert passages(cut_of(name)) == expected


def test_what_is_gathered_or_whole_gives_no_summand() -> None:
    assert passages(cut_of("llama-tied", gathered=("model.layers.0.mlp",))) == {"self_attn": True, "mlp": False}
    inside = "model.layers.0.self_attn.k_proj"
    assert passages(cut_of("llama-tied", gathered=(inside,))) == {"self_attn": False, "mlp": True}
    assert passages(cut_of("llama-tied", whole=(inside,))) == {"self_attn": False, "mlp": True}
    assert not passages(cut_of("gemma4-moe", gathered=("model.layers.0.experts",)))["experts"]


def test_all_that_has_parameters_and_is_in_no_passage_sees_slices() -> None:
    cut = cut_of("gemma4-moe")
    assert {path.removeprefix("model.layers.0.") for path in cut.sliced_modules if ".0." in path} == {
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
        "router", "router.proj", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
        "pre_feedforward_layernorm_2",
    }  # fmt: skip


@pytest.mark.parametrize("container", ["list", "dict"])
def test_a_stage_that_owns_some_layers_cuts_from_its_first_to_its_last(pool: GlooPool, container: str) -> None:
    for difference, layers in pool.run(stage, 2, container):
        assert difference < CLOSE
        assert layers == ("model.layers.1", "model.layers.2")


class Skip(nn.Module):
    """Stands in for a layer of another stage."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class Digits(nn.ModuleDict):
    """A dict of layers that is walked as a list."""

    def __getitem__(self, key: Any) -> Any:
        return list(self.values()) if isinstance(key, slice) else super().__getitem__(key)


def stage(rank: int, world_size: int, container: str) -> tuple[float, tuple[str, ...]]:
    """Layers 1 and 2 of four with per-layer inputs: the worst difference, and where the sequence is cut."""
    model = worker.build_tiny_model("gemma4-shared-kv")
    layers = list(model.model.layers)
    if container == "list":
        model.model.layers = nn.ModuleList([Skip(), layers[1], layers[2], Skip()])
    else:
        model.model.layers = Digits({"1": layers[1], "2": layers[2]})
    model.config.layer_types = ["full_attention"] * 4
    for layer in layers:  # keys and values are shared with a layer that is here
        layer.self_attn.layer_type = "full_attention"
        layer.self_attn.is_sliding, layer.self_attn.sliding_window = False, None
    model.model.unique_layer_types = {"full_attention"}
    layers[1].self_attn.store_full_length_kv = True
    cut = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    plan = find_plan(cut, worker.config_of(model), None, True)
    modules = dict(cut.named_modules())
    layout = apply_tensor_parallel(cut, mesh, plan)
    inputs = worker.pad_inputs(EVERY["gemma4-shared-kv"].inputs(), world_size)
    for each in (model, cut):
        worker.compute(each, inputs)[1].backward()
    differences = worker.gradient_differences(model, cut, layout, TpRanks.from_mesh(mesh))
    return max(differences.values()), shard_sequence(modules, plan, (), ()).layers


# Refusals


def refusal(rank: int, world_size: int, name: str, what: str, settings: dict[str, Any]) -> str:
    """What is said of a model, or of its inputs."""
    model = worker.build_tiny_model(name)
    layer = model.model.layers[0]
    user = None
    if what == "layer":
        layer.__class__ = type("Mine", (type(layer),), {"forward": lambda self, *args, **kwargs: args[0]})
    elif what == "attention":
        layer.attention = layer._modules.pop("self_attn")
    elif what == "module":
        layer.conv = nn.Conv1d(8, 8, 3)
    elif what == "plan":
        user = {"model.layers.*.per_layer_projection": "colwise_gather_output"}
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    try:
        apply_tensor_parallel(model, mesh, find_plan(model, worker.config_of(model), user, True))
        model(torch.arange(7 if what == "length" else 8)[None], **settings)
    except Exception as error:  # the caller looks at what it is
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("name", "what", "settings", "said"),
    [
        ("llama-tied", "length", {}, "UsageError: sequence parallel: sequence length 7 must be a multiple of tp=2; p"),
        ("gemma4-ple", "length", {}, "UsageError: sequence parallel: per_layer_input has 7 tokens, expected 7, a mu"),
        pytest.param(
            "gemma4-shared-kv", "", {"logits_to_keep": 1},
            "UsageError: sequence parallel: per_layer_input has 1 tokens, expected 2, a multiple of tp=2; pad the batc",
            marks=pytest.mark.skipif(not IS_TABLES_VERSION, reason=f"{INSTALLED} gives each layer the whole sequence"),
        ),
        (
            "llama-tied", "layer", {},
            "UnsupportedError: LlamaForCausalLM: sequence parallel: model.layers.0 is a Mine with a custom forward",
        ),
        (
            "qwen3", "attention", {},
            "UnsupportedError: Qwen3ForCausalLM: sequence parallel: model.layers.0 is a Qwen3DecoderLayer without self",
        ),
        (
            "gemma2", "module", {},
            "UnsupportedError: Gemma2ForCausalLM: sequence parallel: model.layers.0.conv is a Conv1d, must be",
        ),
        (
            "gemma4-ple", "plan", {},
            "UnsupportedError: Gemma4ForCausalLM: sequence parallel: model.layers.0.per_layer_projection is sharded",
        ),
    ],
)  # fmt: skip
def test_what_would_be_wrong_is_refused(
    pool: GlooPool, name: str, what: str, settings: dict[str, Any], said: str
) -> None:
    for found in pool.run(refusal, 2, name, what, settings):
        assert found.startswith(said), found


# Memory


LAYERS = 6


def live_bytes(rank: int, world_size: int, sequence_parallel: bool, checkpointing: str) -> int:
    """Bytes that the layers of a model hold between forward and backward."""
    with mock.patch.dict(models._TEXT, num_hidden_layers=LAYERS):
        model = worker.build_tiny_model("llama-fp32")
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    apply_tensor_parallel(model, mesh, find_plan(model, worker.config_of(model), None, sequence_parallel))
    checkpoint_activations(model, checkpointing)
    ids = torch.arange(64).expand(2, -1)
    with LiveBytes() as live:
        held = model.model(input_ids=ids, use_cache=False).last_hidden_state
        found = live.total()
    held.sum().backward()
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_layers_hold_less(pool: GlooPool, checkpointing: str) -> None:
    whole, sliced = (pool.run(live_bytes, 2, is_cut, checkpointing)[0] for is_cut in (False, True))
    # Half of [2, 64, 32] in float32. With checkpoints each layer but the first saves it once, as its input; without, a
    # norm saves its input and what is scaled by its weight. The rest is as it was: what is gathered is saved, too.
    half = 2 * 64 * 32 * 4 // 2
    saved = 4 * half * LAYERS if checkpointing == "none" else half * (LAYERS - 1)
    assert whole - sliced == pytest.approx(saved, rel=0.1)


def test_a_class_without_a_row_is_not_cut() -> None:
    with torch.device("meta"):
        model = EVERY["falcon"].model()
    assert find_forward_traits(model).sequence is None
    assert (
        shard_sequence(dict(model.named_modules()), find_plan(model, worker.config_of(model)), (), ())
        == SequenceSharding()
    )
