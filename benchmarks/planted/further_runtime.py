"""More that can be wrong in the parallel model: orders of ranks and heads, masks, positions, dtypes, gradients.

Each function plants, or gives one that does.
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
    """The slice of the next rank, of slices of one size."""
    width = x.shape[dim]
    whole = gather_partial(x, dim, width * ranks.size, ranks)
    return whole.narrow(dim, width * ((ranks.rank + 1) % ranks.size), width)


def _local(x: DTensor, change: Any) -> DTensor:
    """The same DTensor with this rank's slice changed."""
    local = change(x.to_local())
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def _is_last(built: Built) -> bool:
    return built.ranks.rank == built.ranks.size - 1


# ----------------------------------------------------------------------------------------------------- head and loss


def head_in_order_of_other_ranks(built: Built) -> None:
    """The logits of the ranks are put together in the opposite order; each rank has as many words."""
    module = module_of(built, _HEAD)
    leaving(module, lambda found: _local(found, lambda x: _of_other_rank(x, x.dim() - 1, built.ranks)))


def loss_scaled(built: Built) -> None:
    """The gradient of the loss is that of all ranks, summed."""
    module = module_of(built, _HEAD)
    leaving(module, lambda found: _local(found, lambda x: with_gradient(x, built.ranks.size)))


def head_gradient_not_summed(built: Built) -> None:
    """Hidden states get the gradient of this rank's words alone."""
    module = module_of(built, _HEAD)
    del module.forward
    styles.colwise(module, built.ranks, output="dtensor", is_sequence_parallel=True)


def head_without_its_part_of_a_tie(built: Built) -> None:
    """The embedding is trained on what looks it up, and not on the head that is tied to it."""
    _with_parameter(module_of(built, _HEAD), "weight", lambda weight: weight.detach())


def final_cap_on_one_rank(built: Built) -> None:
    """The last rank gives its logits as they are."""
    if _is_last(built):
        built.model.config.final_logit_softcapping = None


def _with_parameter(module: nn.Module, name: str, change: Any) -> None:
    """The module computes with another value of its parameter."""

    def make(stock: Forward) -> Forward:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            with swap_parameters([(module, name, change(module._parameters[name]))]):
                return stock(*args, **kwargs)

        return replaced

    around(module, make)


# ---------------------------------------------------------------------------------------------------------- attention


def causal_mask_missing(built: Built) -> None:
    """In one layer every token sees those after it."""
    module = module_of(built, _ATTENTION)
    module.is_causal = False
    given(module, attention_mask=lambda mask: None)


def window_ignored(built: Built) -> None:
    """Every layer sees all that came before."""
    for module in modules_of(built, "self_attn"):
        given(module, attention_mask=lambda mask: None)


def window_one_longer(built: Built) -> None:
    """In one layer a token sees one token more."""

    def longer(mask: torch.Tensor) -> torch.Tensor:
        assert mask.dtype is torch.bool
        return mask | functions.pad(mask[..., 1:], (0, 1))

    given(module_of(built, _ATTENTION), attention_mask=longer)


def scaling_of_local_heads(built: Built) -> None:
    """Scores are divided by the root of what this rank has of the width."""
    for module in modules_of(built, "self_attn"):
        module.scaling *= built.ranks.size**0.5


def cap_of_scores_on_one_rank(built: Built) -> None:
    """The heads of the last rank go without."""
    for module in modules_of(built, "self_attn") if _is_last(built) else ():
        module.attn_logit_softcapping = None


def heads_reversed_on_one_rank(built: Built) -> None:
    """What one layer of the last rank attended to reaches the projection in the opposite order of heads."""
    if _is_last(built):
        entering(module_of(built, f"{_ATTENTION}.o_proj"), lambda x: x.unflatten(-1, (-1, 16)).flip(-2).flatten(-2))


def values_of_the_other_rank(built: Built) -> None:
    """In one layer the ranks have each other's values."""
    module = module_of(built, f"{_ATTENTION}.v_proj")
    leaving(module, lambda found: _of_other_rank(found, found.dim() - 1, built.ranks))


def queries_normalized_as_keys(built: Built) -> None:
    """In one layer the norm of the keys does both."""
    attention = module_of(built, _ATTENTION)
    attention.q_norm.compare_forward = attention.k_norm.compare_forward


def _exchanged_inside(first: nn.Module, owner: nn.Module, name: str, change: Any) -> None:
    """A parameter that is gathered around its owner is another one from the moment that `first` is called."""

    def make(stock: Forward) -> Forward:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            owner._parameters[name] = change(owner._parameters[name])
            return stock(*args, **kwargs)

        return replaced

    around(first, make)


def sinks_of_the_other_rank(built: Built) -> None:
    """In one layer heads have the sinks of those of the other rank."""
    attention = module_of(built, _ATTENTION)
    _exchanged_inside(attention.q_proj, attention, "sinks", lambda sinks: sinks.roll(len(sinks) // 2))


def skip_of_the_other_rank(built: Built) -> None:
    """In one mixer channels have the factors of those of the other rank."""
    mixer = module_of(built, "layers.3.mixer")
    _exchanged_inside(mixer.in_proj, mixer, "D", lambda skip: skip.roll(len(skip) // 2))


def slopes_of_the_other_rank(built: Built) -> None:
    """Heads have the ALiBi slopes of those of the other rank."""
    owner: Any = module_of(built, "transformer")
    heads = owner.num_heads
    for block in owner.h:  # alibi is (batch * heads, 1, length)
        given(block, alibi=lambda found: found.unflatten(0, (-1, heads)).roll(heads // 2, 1).flatten(0, 1))


def rope_of_the_window(built: Built) -> None:
    """Layers that see everything have the rotary table of those that see a window."""
    module = module_of(built, "rotary_emb")

    def make(stock: Forward) -> Forward:
        return lambda x, position_ids, layer_type: stock(x, position_ids, "sliding_attention")

    around(module, make)


def keys_of_another_kind_of_layer(built: Built) -> None:
    """A layer that reuses keys and values takes those of the layers with a window."""
    module: Any = module_of(built, "layers.7.self_attn")
    module.layer_type = "sliding_attention"


# -------------------------------------------------------------------------------------------- positions, dtypes, noise


def positions_later_on_one_rank(built: Built) -> None:
    """The positions of the last rank begin at 1."""
    module: Any = module_of(built, "embed_positions")
    module.offset += _is_last(built)


def rotary_table_in_bfloat16(built: Built) -> None:
    """On the last rank cosines and sines are rounded."""

    def make(stock: Forward) -> Forward:
        return lambda *args, **kwargs: tuple(each.bfloat16().float() for each in stock(*args, **kwargs))

    if _is_last(built):
        around(module_of(built, "rotary_emb"), make)


def in_bfloat16(end: str) -> InRuntime:
    """What a module takes and gives is rounded."""

    def plant(built: Built) -> None:
        module = module_of(built, end)
        entering(module, lambda x: x.bfloat16().float())
        leaving(module, lambda x: x.bfloat16().float())

    return plant


def parameter_in_bfloat16(end: str, name: str) -> InRuntime:
    """A parameter is rounded where it is used."""
    return lambda built: _with_parameter(module_of(built, end), name, lambda value: value.bfloat16().float())


def dropout_left_on(built: Built) -> None:
    """Behind one projection."""
    leaving(module_of(built, f"{_ATTENTION}.o_proj"), lambda x: functions.dropout(x, 0.1, training=True))


def residual_twice(built: Built) -> None:
    """In one layer the residual is in the summand of every rank."""

    def make(stock: Forward) -> Forward:
        return lambda x, *args, **kwargs: stock(x, *args, **kwargs) + x

    around(module_of(built, "layers.3"), make)


def final_norm_skipped_on_one_rank(built: Built) -> None:
    """The last rank gives hidden states to the head as they are."""
    if _is_last(built):
        around(module_of(built, "model.norm"), lambda stock: lambda x: x)


# ------------------------------------------------------------------------------------------------------------- experts


def _experts(built: Built, compute: Any) -> None:
    """In one layer fused experts compute something else; `compute` gets the forward pass on this rank's part."""
    module = module_of(built, "layers.3.mlp.experts")

    def replaced(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        own = [
            (module, name, to_local_shard(tensor)) for name, tensor in module._parameters.items() if tensor is not None
        ]
        with swap_parameters(own):
            return compute(lambda *args: type(module).forward(module, *args), hidden, index, weights)

    module.forward = replaced


def experts_not_summed(built: Built) -> None:
    """Each rank goes on with its part of what the experts give."""
    _experts(built, lambda stock, *given: stock(*given))


def router_gradient_not_summed(built: Built) -> None:
    """Weights of the routing get the gradient of this rank's part of the experts."""
    _experts(
        built,
        lambda stock, hidden, index, weights: sum_over_ranks(
            stock(copy_to_ranks(hidden, built.ranks), index, weights), built.ranks
        ),
    )


def experts_down_of_the_other_rank(built: Built) -> None:
    """In one layer the second matrix of every expert is the slice of the other rank."""
    module = module_of(built, "layers.3.mlp.experts")
    _with_parameter(module, "down_proj", lambda down: _of_other_rank(to_local_shard(down), 2, built.ranks))


def next_expert_on_one_rank(built: Built) -> None:
    """On the last rank tokens go to the expert behind the one they chose."""
    module: Any = module_of(built, "layers.3.mlp.experts")

    def make(stock: Forward) -> Forward:
        return lambda hidden, index, weights: stock(hidden, (index + 1) % module.num_experts, weights)

    if _is_last(built):
        around(module, make)


# -------------------------------------------------------------------------------------------------------------- images


def deepstack_reversed(built: Built) -> None:
    """What the layers of the tower add to those of the text comes in the opposite order."""
    given(module_of(built, "language_model"), deepstack_visual_embeds=lambda found: found[::-1])


def image_reversed(built: Built) -> None:
    """The tokens of an image are put in from its end."""
    leaving(module_of(built, "multi_modal_projector"), lambda found: found.flip(-2))


def tower_summed(end: str) -> InRuntime:
    """What every rank has whole is summed over the ranks."""
    return lambda built: leaving(module_of(built, end), lambda found: sum_over_ranks(found, built.ranks))


def tower_without_gradient(end: str) -> InRuntime:
    """A tower that was frozen by mistake."""
    return lambda built: leaving(module_of(built, end), lambda found: found.detach())


# ----------------------------------------------------------------------------------------------------------- gradients


def norms_on_their_part_of_the_sequence(built: Built) -> None:
    """Each rank trains norms on its part of the sequence, and nothing sums that."""
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
    """The last rank keeps its words as they are."""
    if _is_last(built):
        _with_parameter(module_of(built, "embed_tokens"), "weight", lambda weight: weight.detach())


def latent_rope_gradient_not_summed(built: Built) -> None:
    """The rotary part of the latent projection gets the gradient of this rank's heads."""
    for module in modules_of(built, "kv_a_proj_with_mqa"):
        del module.forward


def recomputed_otherwise(built: Built) -> None:
    """A projection gives something else when it is computed the second time, for the backward pass."""
    calls = 0

    def change(found: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return found * (1.0 if calls % 2 else 1.1)

    leaving(module_of(built, f"{_ATTENTION}.o_proj"), change)


def fsdp_sums(built: Built) -> None:
    """FSDP2 sums the gradients of the ranks, where the mean was wanted."""
    for module in built.model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums
            module.set_gradient_divide_factor(1.0)


def fsdp_layer_not_reduced(built: Built) -> None:
    """The gradients of one layer stay on their rank."""
    module: Any = module_of(built, "layers.3")
    module.set_requires_gradient_sync(False)
