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

from benchmarks.injected.defect import InjectionTarget, RuntimeInjection
from benchmarks.injected.inject import (
    Forward,
    change_arguments,
    change_input,
    change_output,
    find_module,
    find_modules,
    find_norms,
    scale_gradient,
    wrap_forward,
)
from ckptx.runtime.parallel.shards import to_local_shard
from ckptx.runtime.parallel.tensor_parallel import styles
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks, copy_to_ranks, gather_partial, sum_over_ranks
from ckptx.runtime.parallel.tensor_parallel.styles import swap_parameters

_ATTENTION, _HEAD = "layers.3.self_attn", "lm_head"


def _next_rank_shard(x: torch.Tensor, dim: int, ranks: TpRanks) -> torch.Tensor:
    """Return the shard of the next rank; all shards have the same size."""
    width = x.shape[dim]
    whole = gather_partial(x, dim, width * ranks.size, ranks)
    return whole.narrow(dim, width * ((ranks.rank + 1) % ranks.size), width)


def _change_local_shard(x: DTensor, change: Any) -> DTensor:
    """Return a DTensor with a changed local shard."""
    local = change(x.to_local())
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def _is_last(target: InjectionTarget) -> bool:
    return target.ranks.rank == target.ranks.size - 1


# ----------------------------------------------------------------------------------------------------- head and loss


def exchange_logit_shards(target: InjectionTarget) -> None:
    """Exchange the logits of the ranks; all shards of the vocabulary have the same size."""
    module = find_module(target, _HEAD)
    change_output(
        module, lambda found: _change_local_shard(found, lambda x: _next_rank_shard(x, x.dim() - 1, target.ranks))
    )


def scale_logit_gradient(target: InjectionTarget) -> None:
    """Multiply the gradient of the logits by the number of ranks."""
    module = find_module(target, _HEAD)
    change_output(module, lambda found: _change_local_shard(found, lambda x: scale_gradient(x, target.ranks.size)))


def skip_head_gradient_all_reduce(target: InjectionTarget) -> None:
    """Omit the all-reduce of the gradient of the hidden states at the head."""
    module = find_module(target, _HEAD)
    del module.forward
    styles.install_colwise(module, target.ranks, output="dtensor", is_sequence_parallel=True)


def detach_tied_head(target: InjectionTarget) -> None:
    """Detach the tied weight in the head, so that the embedding does not get the gradient of the head."""
    _change_parameter(find_module(target, _HEAD), "weight", lambda weight: weight.detach())


def drop_logit_softcap_on_last_rank(target: InjectionTarget) -> None:
    """Omit the soft cap of the logits on the last rank."""
    if _is_last(target):
        target.model.config.final_logit_softcapping = None


def _change_parameter(module: nn.Module, name: str, change: Any) -> None:
    """Change the value of a parameter during the forward pass of its module."""

    def make(stock: Forward) -> Forward:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            with swap_parameters([(module, name, change(module._parameters[name]))]):
                return stock(*args, **kwargs)

        return replaced

    wrap_forward(module, make)


# ---------------------------------------------------------------------------------------------------------- attention


def drop_causal_mask(target: InjectionTarget) -> None:
    """Drop the causal mask in one layer."""
    module = find_module(target, _ATTENTION)
    module.is_causal = False
    change_arguments(module, attention_mask=lambda mask: None)


def drop_sliding_window(target: InjectionTarget) -> None:
    """Drop the sliding-window mask in all layers."""
    for module in find_modules(target, "self_attn"):
        change_arguments(module, attention_mask=lambda mask: None)


def widen_sliding_window(target: InjectionTarget) -> None:
    """Make the sliding window of one layer one token longer."""

    def longer(mask: torch.Tensor) -> torch.Tensor:
        assert mask.dtype is torch.bool
        return mask | functions.pad(mask[..., 1:], (0, 1))

    change_arguments(find_module(target, _ATTENTION), attention_mask=longer)


def scale_scores_by_local_width(target: InjectionTarget) -> None:
    """Scale the attention scores by the local instead of the full width."""
    for module in find_modules(target, "self_attn"):
        module.scaling *= target.ranks.size**0.5


def drop_score_softcap_on_last_rank(target: InjectionTarget) -> None:
    """Omit the soft cap of the attention scores on the last rank."""
    for module in find_modules(target, "self_attn") if _is_last(target) else ():
        module.attn_logit_softcapping = None


def reverse_heads_on_last_rank(target: InjectionTarget) -> None:
    """Reverse the order of heads at the input of one output projection on the last rank."""
    if _is_last(target):
        change_input(
            find_module(target, f"{_ATTENTION}.o_proj"), lambda x: x.unflatten(-1, (-1, 16)).flip(-2).flatten(-2)
        )


def exchange_value_shards(target: InjectionTarget) -> None:
    """Exchange the values of the ranks in one layer."""
    module = find_module(target, f"{_ATTENTION}.v_proj")
    change_output(module, lambda found: _next_rank_shard(found, found.dim() - 1, target.ranks))


def normalize_queries_with_key_norm(target: InjectionTarget) -> None:
    """Normalize queries with the norm of the keys in one layer."""
    attention = find_module(target, _ATTENTION)
    attention.q_norm.forward = attention.k_norm.forward


def _replace_parameter(first: nn.Module, owner: nn.Module, name: str, change: Any) -> None:
    """Change a parameter of `owner` when `first` is called, after it was gathered."""

    def make(stock: Forward) -> Forward:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            owner._parameters[name] = change(owner._parameters[name])
            return stock(*args, **kwargs)

        return replaced

    wrap_forward(first, make)


def exchange_sink_shards(target: InjectionTarget) -> None:
    """Exchange the attention sinks of the ranks in one layer."""
    attention = find_module(target, _ATTENTION)
    _replace_parameter(attention.q_proj, attention, "sinks", lambda sinks: sinks.roll(len(sinks) // 2))


def exchange_d_shards(target: InjectionTarget) -> None:
    """Exchange the D parameters of the ranks in one mixer."""
    mixer = find_module(target, "layers.3.mixer")
    _replace_parameter(mixer.in_proj, mixer, "D", lambda skip: skip.roll(len(skip) // 2))


def exchange_alibi_slopes(target: InjectionTarget) -> None:
    """Exchange the ALiBi slopes of the ranks."""
    owner: Any = find_module(target, "transformer")
    heads = owner.num_heads
    for block in owner.h:  # alibi is (batch * heads, 1, length)
        change_arguments(block, alibi=lambda found: found.unflatten(0, (-1, heads)).roll(heads // 2, 1).flatten(0, 1))


def use_window_rope_in_all_layers(target: InjectionTarget) -> None:
    """Use the rotary embedding of sliding-window layers in all layers."""
    module = find_module(target, "rotary_emb")

    def make(stock: Forward) -> Forward:
        return lambda x, position_ids, layer_type: stock(x, position_ids, "sliding_attention")

    wrap_forward(module, make)


def share_keys_of_wrong_layer_type(target: InjectionTarget) -> None:
    """Share keys and values of sliding-window layers with a layer that has full attention."""
    module: Any = find_module(target, "layers.7.self_attn")
    module.layer_type = "sliding_attention"


# -------------------------------------------------------------------------------------------- positions, dtypes, noise


def shift_positions_on_last_rank(target: InjectionTarget) -> None:
    """Start the positions at 1 on the last rank."""
    module: Any = find_module(target, "embed_positions")
    module.offset += _is_last(target)


def round_rope_on_last_rank(target: InjectionTarget) -> None:
    """Round the rotary embedding to bfloat16 on the last rank."""

    def make(stock: Forward) -> Forward:
        return lambda *args, **kwargs: tuple(each.bfloat16().float() for each in stock(*args, **kwargs))

    if _is_last(target):
        wrap_forward(find_module(target, "rotary_emb"), make)


def round_module_to_bfloat16(end: str) -> RuntimeInjection:
    """Round input and output of a module to bfloat16."""

    def inject(target: InjectionTarget) -> None:
        module = find_module(target, end)
        change_input(module, lambda x: x.bfloat16().float())
        change_output(module, lambda x: x.bfloat16().float())

    return inject


def round_parameter_to_bfloat16(end: str, name: str) -> RuntimeInjection:
    """Round a parameter to bfloat16 during the forward pass of its module."""
    return lambda target: _change_parameter(find_module(target, end), name, lambda value: value.bfloat16().float())


def enable_dropout(target: InjectionTarget) -> None:
    """Apply dropout to the output of one projection."""
    change_output(find_module(target, f"{_ATTENTION}.o_proj"), lambda x: functions.dropout(x, 0.1, training=True))


def add_residual_twice(target: InjectionTarget) -> None:
    """Add the residual of one layer on every rank."""

    def make(stock: Forward) -> Forward:
        return lambda x, *args, **kwargs: stock(x, *args, **kwargs) + x

    wrap_forward(find_module(target, "layers.3"), make)


def skip_final_norm_on_last_rank(target: InjectionTarget) -> None:
    """Skip the final norm on the last rank."""
    if _is_last(target):
        wrap_forward(find_module(target, "model.norm"), lambda stock: lambda x: x)


# ------------------------------------------------------------------------------------------------------------- experts


def _experts(target: InjectionTarget, compute: Any) -> None:
    """Replace the forward pass of the fused experts of one layer.

    Args:
        target: The parallel model.
        compute: Replacement; it gets the forward pass with the local shards, and its arguments.
    """
    module = find_module(target, "layers.3.mlp.experts")

    def replaced(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        own = [
            (module, name, to_local_shard(tensor)) for name, tensor in module._parameters.items() if tensor is not None
        ]
        with swap_parameters(own):
            return compute(lambda *args: type(module).forward(module, *args), hidden, index, weights)

    module.forward = replaced


def skip_expert_all_reduce(target: InjectionTarget) -> None:
    """Omit the all-reduce of the output of the experts."""
    _experts(target, lambda stock, *args: stock(*args))


def skip_router_gradient_all_reduce(target: InjectionTarget) -> None:
    """Omit the all-reduce of the gradient of the routing weights."""
    _experts(
        target,
        lambda stock, hidden, index, weights: sum_over_ranks(
            stock(copy_to_ranks(hidden, target.ranks), index, weights), target.ranks
        ),
    )


def exchange_expert_down_shards(target: InjectionTarget) -> None:
    """Exchange the down-projection shards of the ranks in the experts of one layer."""
    module = find_module(target, "layers.3.mlp.experts")
    _change_parameter(module, "down_proj", lambda down: _next_rank_shard(to_local_shard(down), 2, target.ranks))


def route_to_next_expert_on_last_rank(target: InjectionTarget) -> None:
    """Route tokens to the next expert on the last rank."""
    module: Any = find_module(target, "layers.3.mlp.experts")

    def make(stock: Forward) -> Forward:
        return lambda hidden, index, weights: stock(hidden, (index + 1) % module.num_experts, weights)

    if _is_last(target):
        wrap_forward(module, make)


# -------------------------------------------------------------------------------------------------------------- images


def reverse_deepstack(target: InjectionTarget) -> None:
    """Reverse the order of the deepstack embeddings."""
    change_arguments(find_module(target, "language_model"), deepstack_visual_embeds=lambda found: found[::-1])


def reverse_image_tokens(target: InjectionTarget) -> None:
    """Reverse the order of the image tokens."""
    change_output(find_module(target, "multi_modal_projector"), lambda found: found.flip(-2))


def all_reduce_tower_output(end: str) -> RuntimeInjection:
    """All-reduce the replicated output of a vision module."""
    return lambda target: change_output(find_module(target, end), lambda found: sum_over_ranks(found, target.ranks))


def detach_tower_output(end: str) -> RuntimeInjection:
    """Detach the output of a vision module, as if it was frozen."""
    return lambda target: change_output(find_module(target, end), lambda found: found.detach())


# ----------------------------------------------------------------------------------------------------------- gradients


def train_norms_on_local_sequence(target: InjectionTarget) -> None:
    """Train the norms of each rank on its part of the sequence, without an all-reduce of the gradients."""
    for module in find_norms(target, None):

        def make(stock: Forward, module: nn.Module = module) -> Forward:
            def replaced(x: torch.Tensor) -> torch.Tensor:
                own = torch.arange(x.shape[1]).chunk(target.ranks.size)[target.ranks.rank]
                is_own = torch.zeros(x.shape[1], 1, dtype=torch.bool).index_fill(0, own, True)
                with swap_parameters([(module, "weight", module._parameters["weight"].detach())]):
                    frozen = stock(x)
                return torch.where(is_own, stock(x), frozen)

            return replaced

        wrap_forward(module, make)


def detach_embedding_on_last_rank(target: InjectionTarget) -> None:
    """Detach the embedding on the last rank."""
    if _is_last(target):
        _change_parameter(find_module(target, "embed_tokens"), "weight", lambda weight: weight.detach())


def skip_latent_rope_gradient_all_reduce(target: InjectionTarget) -> None:
    """Omit the all-reduce of the gradient of the rotary part of the latent projection."""
    for module in find_modules(target, "kv_a_proj_with_mqa"):
        del module.forward


def change_recomputed_output(target: InjectionTarget) -> None:
    """Change the output of a projection when it is recomputed in the backward pass."""
    calls = 0

    def change(found: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return found * (1.0 if calls % 2 else 1.1)

    change_output(find_module(target, f"{_ATTENTION}.o_proj"), change)


def sum_fsdp_gradients(target: InjectionTarget) -> None:
    """Make FSDP2 sum the gradients of the ranks instead of averaging them."""
    for module in target.model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums
            module.set_gradient_divide_factor(1.0)


def skip_fsdp_layer_reduction(target: InjectionTarget) -> None:
    """Turn off gradient reduction of one layer in FSDP2."""
    module: Any = find_module(target, "layers.3")
    module.set_requires_gradient_sync(False)
