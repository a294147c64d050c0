"""More defects of the parallel model: order of ranks and heads, masks, positions, dtypes, gradients.

Each function injects one, or returns a function that does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functions
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from benchmarks.planted.defect import Built, InRuntime
from benchmarks.planted.planting import (
    Forward,
    around,
    entering,
    given,
    leaving,
    module_of,
    modules_of,
    norms_of,
    with_gradient,
)
from ckptx.runtime.parallel.shards import to_local_shard
from ckptx.runtime.parallel.tensor_parallel import styles
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks, copy_to_ranks, gather_partial, sum_over_ranks
from ckptx.runtime.parallel.tensor_parallel.styles import swap_parameters

_ATTENTION, _HEAD = "layers.3.self_attn", "lm_head"


def _of_other_rank(x: torch.Tensor, dim: int, ranks: TpRanks) -> torch.Tensor:
    """Return the shard of the next rank; all shards have the same size."""
    width = x.shape[dim]
    whole = gather_partial(x, dim, width * ranks.size, ranks)
    return whole.narrow(dim, width * ((ranks.rank + 1) % ranks.size), width)


def _local(x: DTensor, change: Any) -> DTensor:
    """Return a DTensor with a changed local shard."""
    local = change(x.to_local())
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def _is_last(built: Built) -> bool:
    return built.ranks.rank == built.ranks.size - 1


# ----------------------------------------------------------------------------------------------------- head and loss


def head_in_order_of_other_ranks(built: Built) -> None:
    """Exchange the logits of the ranks; all shards of the vocabulary have the same size."""
    module = module_of(built, _HEAD)
    leaving(module, lambda found: _local(found, lambda x: _of_other_rank(x, x.dim() - 1, built.ranks)))


def loss_scaled(built: Built) -> None:
    """Multiply the gradient of the logits by the number of ranks."""
    module = module_of(built, _HEAD)
    leaving(module, lambda found: _local(found, lambda x: with_gradient(x, built.ranks.size)))


def head_gradient_not_summed(built: Built) -> None:
    """Omit the all-reduce of the gradient of the hidden states at the head."""
    module = module_of(built, _HEAD)
    del module.forward
    styles.colwise(module, built.ranks, output="dtensor", is_sequence_parallel=True)


def head_without_its_part_of_a_tie(built: Built) -> None:
    """Detach the tied weight in the head, so that the embedding does not get the gradient of the head."""
    _with_parameter(module_of(built, _HEAD), "weight", lambda weight: weight.detach())


def final_cap_on_one_rank(built: Built) -> None:
    """Omit the soft cap of the logits on the last rank."""
    if _is_last(built):
        built.model.config.final_logit_softcapping = None


def _with_parameter(module: nn.Module, name: str, change: Any) -> None:
    """Change the value of a parameter during the forward pass of its module."""

    def make(stock: Forward) -> Forward:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            with swap_parameters([(module, name, change(module._parameters[name]))]):
                return stock(*args, **kwargs)

        return replaced

    around(module, make)


# ---------------------------------------------------------------------------------------------------------- attention


def causal_mask_missing(built: Built) -> None:
    """Drop the causal mask in one layer."""
    module = module_of(built, _ATTENTION)
    module.is_causal = False
    given(module, attention_mask=lambda mask: None)


def window_ignored(built: Built) -> None:
    """Drop the sliding-window mask in all layers."""
    for module in modules_of(built, "self_attn"):
        given(module, attention_mask=lambda mask: None)


def window_one_longer(built: Built) -> None:
    """Make the sliding window of one layer one token longer."""

    def longer(mask: torch.Tensor) -> torch.Tensor:
        assert mask.dtype is torch.bool
        return mask | functions.pad(mask[..., 1:], (0, 1))

    given(module_of(built, _ATTENTION), attention_mask=longer)


def scaling_of_local_heads(built: Built) -> None:
    """Scale the attention scores by the local instead of the full width."""
    for module in modules_of(built, "self_attn"):
        module.scaling *= built.ranks.size**0.5


def cap_of_scores_on_one_rank(built: Built) -> None:
    """Omit the soft cap of the attention scores on the last rank."""
    for module in modules_of(built, "self_attn") if _is_last(built) else ():
        module.attn_logit_softcapping = None


def heads_reversed_on_one_rank(built: Built) -> None:
    """Reverse the order of heads at the input of one output projection on the last rank."""
    if _is_last(built):
        entering(module_of(built, f"{_ATTENTION}.o_proj"), lambda x: x.unflatten(-1, (-1, 16)).flip(-2).flatten(-2))


def values_of_the_other_rank(built: Built) -> None:
    """Exchange the values of the ranks in one layer."""
    module = module_of(built, f"{_ATTENTION}.v_proj")
    leaving(module, lambda found: _of_other_rank(found, found.dim() - 1, built.ranks))


def queries_normalized_as_keys(built: Built) -> None:
    """Normalize queries with the norm of the keys in one layer."""
    attention = module_of(built, _ATTENTION)
    attention.q_norm.compare_forward = attention.k_norm.compare_forward


def _exchanged_inside(first: nn.Module, owner: nn.Module, name: str, change: Any) -> None:
    """Change a parameter of `owner` when `first` is called, after it was gathered."""

    def make(stock: Forward) -> Forward:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            owner._parameters[name] = change(owner._parameters[name])
            return stock(*args, **kwargs)

        return replaced

    around(first, make)


def sinks_of_the_other_rank(built: Built) -> None:
    """Exchange the attention sinks of the ranks in one layer."""
    attention = module_of(built, _ATTENTION)
    _exchanged_inside(attention.q_proj, attention, "sinks", lambda sinks: sinks.roll(len(sinks) // 2))


def skip_of_the_other_rank(built: Built) -> None:
    """Exchange the D parameters of the ranks in one mixer."""
    mixer = module_of(built, "layers.3.mixer")
    _exchanged_inside(mixer.in_proj, mixer, "D", lambda skip: skip.roll(len(skip) // 2))


def slopes_of_the_other_rank(built: Built) -> None:
    """Exchange the ALiBi slopes of the ranks."""
    owner: Any = module_of(built, "transformer")
    heads = owner.num_heads
    for block in owner.h:  # alibi is (batch * heads, 1, length)
        given(block, alibi=lambda found: found.unflatten(0, (-1, heads)).roll(heads // 2, 1).flatten(0, 1))


def rope_of_the_window(built: Built) -> None:
    """Use the rotary embedding of sliding-window layers in all layers."""
    module = module_of(built, "rotary_emb")

    def make(stock: Forward) -> Forward:
        return lambda x, position_ids, layer_type: stock(x, position_ids, "sliding_attention")

    around(module, make)


def keys_of_another_kind_of_layer(built: Built) -> None:
    """Share keys and values of sliding-window layers with a layer that has full attention."""
    module: Any = module_of(built, "layers.7.self_attn")
    module.layer_type = "sliding_attention"


# -------------------------------------------------------------------------------------------- positions, dtypes, noise


def positions_later_on_one_rank(built: Built) -> None:
    """Start the positions at 1 on the last rank."""
    module: Any = module_of(built, "embed_positions")
    module.offset += _is_last(built)


def rotary_table_in_bfloat16(built: Built) -> None:
    """Round the rotary embedding to bfloat16 on the last rank."""

    def make(stock: Forward) -> Forward:
        return lambda *args, **kwargs: tuple(each.bfloat16().float() for each in stock(*args, **kwargs))

    if _is_last(built):
        around(module_of(built, "rotary_emb"), make)


def in_bfloat16(end: str) -> InRuntime:
    """Round input and output of a module to bfloat16."""

    def plant(built: Built) -> None:
        module = module_of(built, end)
        entering(module, lambda x: x.bfloat16().float())
        leaving(module, lambda x: x.bfloat16().float())

    return plant


def parameter_in_bfloat16(end: str, name: str) -> InRuntime:
    """Round a parameter to bfloat16 during the forward pass of its module."""
    return lambda built: _with_parameter(module_of(built, end), name, lambda value: value.bfloat16().float())


def dropout_left_on(built: Built) -> None:
    """Apply dropout to the output of one projection."""
    leaving(module_of(built, f"{_ATTENTION}.o_proj"), lambda x: functions.dropout(x, 0.1, training=True))


def residual_twice(built: Built) -> None:
    """Add the residual of one layer on every rank."""

    def make(stock: Forward) -> Forward:
        return lambda x, *args, **kwargs: stock(x, *args, **kwargs) + x

    around(module_of(built, "layers.3"), make)


def final_norm_skipped_on_one_rank(built: Built) -> None:
    """Skip the final norm on the last rank."""
    if _is_last(built):
        around(module_of(built, "model.norm"), lambda stock: lambda x: x)


# ------------------------------------------------------------------------------------------------------------- experts


def _experts(built: Built, compute: Any) -> None:
    """Replace the forward pass of the fused experts of one layer.

    Args:
        built: The parallel model.
        compute: Replacement; it gets the forward pass with the local shards, and its arguments.
    """
    module = module_of(built, "layers.3.mlp.experts")

    def replaced(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        own = [
            (module, name, to_local_shard(tensor)) for name, tensor in module._parameters.items() if tensor is not None
        ]
        with swap_parameters(own):
            return compute(lambda *args: type(module).forward(module, *args), hidden, index, weights)

    module.forward = replaced


def experts_not_summed(built: Built) -> None:
    """Omit the all-reduce of the output of the experts."""
    _experts(built, lambda stock, *given: stock(*given))


def router_gradient_not_summed(built: Built) -> None:
    """Omit the all-reduce of the gradient of the routing weights."""
    _experts(
        built,
        lambda stock, hidden, index, weights: sum_over_ranks(
            stock(copy_to_ranks(hidden, built.ranks), index, weights), built.ranks
        ),
    )


def experts_down_of_the_other_rank(built: Built) -> None:
    """Exchange the down-projection shards of the ranks in the experts of one layer."""
    module = module_of(built, "layers.3.mlp.experts")
    _with_parameter(module, "down_proj", lambda down: _of_other_rank(to_local_shard(down), 2, built.ranks))


def next_expert_on_one_rank(built: Built) -> None:
    """Route tokens to the next expert on the last rank."""
    module: Any = module_of(built, "layers.3.mlp.experts")

    def make(stock: Forward) -> Forward:
        return lambda hidden, index, weights: stock(hidden, (index + 1) % module.num_experts, weights)

    if _is_last(built):
        around(module, make)


# -------------------------------------------------------------------------------------------------------------- images


def deepstack_reversed(built: Built) -> None:
    """Reverse the order of the deepstack embeddings."""
    given(module_of(built, "language_model"), deepstack_visual_embeds=lambda found: found[::-1])


def image_reversed(built: Built) -> None:
    """Reverse the order of the image tokens."""
    leaving(module_of(built, "multi_modal_projector"), lambda found: found.flip(-2))


def tower_summed(end: str) -> InRuntime:
    """All-reduce the replicated output of a vision module."""
    return lambda built: leaving(module_of(built, end), lambda found: sum_over_ranks(found, built.ranks))


def tower_without_gradient(end: str) -> InRuntime:
    """Detach the output of a vision module, as if it was frozen."""
    return lambda built: leaving(module_of(built, end), lambda found: found.detach())


# ----------------------------------------------------------------------------------------------------------- gradients


def norms_on_their_part_of_the_sequence(built: Built) -> None:
    """Train the norms of each rank on its part of the sequence, without an all-reduce of the gradients."""
    for module in norms_of(built, None):

        def make(stock: Forward, module: nn.Module = module) -> Forward:
            def replaced(x: torch.Tensor) -> torch.Tensor:
                own = torch.arange(x.shape[1]).chunk(built.ranks.size)[built.ranks.rank]
                is_own = torch.zeros(x.shape[1], 1, dtype=torch.bool).index_fill(0, own, True)
                with swap_parameters([(module, "weight", module._parameters["weight"].detach())]):
                    elsewhere = stock(x)
                return torch.where(is_own, stock(x), elsewhere)

            return replaced

        around(module, make)


def embedding_not_trained_on_one_rank(built: Built) -> None:
    """Detach the embedding on the last rank."""
    if _is_last(built):
        _with_parameter(module_of(built, "embed_tokens"), "weight", lambda weight: weight.detach())


def latent_rope_gradient_not_summed(built: Built) -> None:
    """Omit the all-reduce of the gradient of the rotary part of the latent projection."""
    for module in modules_of(built, "kv_a_proj_with_mqa"):
        del module.forward


def recomputed_otherwise(built: Built) -> None:
    """Change the output of a projection when it is recomputed in the backward pass."""
    calls = 0

    def change(found: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return found * (1.0 if calls % 2 else 1.1)

    leaving(module_of(built, f"{_ATTENTION}.o_proj"), change)


def fsdp_sums(built: Built) -> None:
    """Make FSDP2 sum the gradients of the ranks instead of averaging them."""
    for module in built.model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums
            module.set_gradient_divide_factor(1.0)


def fsdp_layer_not_reduced(built: Built) -> None:
    """Turn off gradient reduction of one layer in FSDP2."""
    module: Any = module_of(built, "layers.3")
    module.set_requires_gradient_sync(False)
