"""Send half of the tokens to experts in turn, so that a short text reaches each expert.

A router sends the tokens of a short text to a few experts. The weights of the other experts would be compared by their
bytes only, and their computation not at all. The first half of the tokens follows the router, so that it is tested,
too. The routing weights stay as they are, and with them the path of their gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ckptx.runtime.model.layers import canonical_name

# Parameters of `forward` with the experts of each token, (tokens, experts per token).
_INDEX_PARAMETERS = ("top_k_index", "router_indices", "selected_experts")
_ROUTER_SUFFIXES = ("Router", "Gating")  # the class name of a router ends with one of these
# Config keys with the number of experts per token.
_TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")


class Routing(NamedTuple):
    """Experts and routers of a model.

    Attributes:
        expert_counts: Canonical name of each module whose `forward` takes the experts of each token -> number of its
            experts.
        score_routers: Canonical name of each router that returns a score per expert, in blocks where no module's
            `forward` takes the chosen experts -> number of scores.
    """

    expert_counts: Mapping[str, int]
    score_routers: Mapping[str, int]

    def min_tokens(self, config: Mapping[str, Any]) -> int:
        """Return the number of tokens that reach every expert if they are sent to experts in turn; 0 without experts.

        It includes one more token than that takes: the last token of a text predicts nothing, and gets no gradient.
        """
        tokens = max([*self.expert_counts.values(), *self.score_routers.values()], default=0)
        experts_per_token = min((number for number in _find_integers(config, _TOP_K_KEYS) if number > 0), default=1)
        if self.expert_counts and not self.score_routers:
            tokens = -(-tokens // experts_per_token)
        return tokens and tokens + 1


def find_routing(model: nn.Module) -> Routing:
    """Find the experts of a model, on any device."""
    experts, scores = {}, {}
    for path, module in model.named_modules():
        name = canonical_name(path)
        if _find_index_parameter(module) is not None:
            count = _count_experts(module)
            if count:
                experts[name] = count
    scopes = {name.rpartition(".")[0] for name in experts}  # blocks whose routing is changed at the experts
    for path, module in model.named_modules():
        name = canonical_name(path)
        if not type(module).__name__.endswith(_ROUTER_SUFFIXES) or name.rpartition(".")[0] in scopes:
            continue
        for each, linear in [(name, module), *((f"{name}.{leaf}", child) for leaf, child in module.named_children())]:
            if isinstance(linear, nn.Linear):
                scores[each] = linear.out_features
    return Routing(experts, scores)


def install_even_routing(model: nn.Module, routing: Routing) -> None:
    """Install hooks by which each call sends the second half of its tokens to all experts in turn."""
    for path, module in model.named_modules():
        name = canonical_name(path)
        if name in routing.expert_counts:
            parameter = _find_index_parameter(module)
            if parameter is not None:
                module.register_forward_pre_hook(
                    _make_turn_hook(parameter, routing.expert_counts[name]), prepend=True, with_kwargs=True
                )
        elif name in routing.score_routers:
            module.register_forward_hook(_roll_scores)


def _find_index_parameter(module: nn.Module) -> tuple[int, str] | None:
    """Return the position (without `self`) and name of the parameter with the chosen experts; None without one."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return next(((position, name) for position, name in enumerate(names) if name in _INDEX_PARAMETERS), None)


def _count_experts(module: nn.Module) -> int:
    """Return the number of experts in a module: the first dim of fused weights (3 dims), or its number of children."""
    fused = next((each for each in module.parameters(recurse=False) if each.dim() == 3), None)
    return int(fused.shape[0]) if fused is not None else len(list(module.children()))


def _make_turn_hook(parameter: tuple[int, str], count: int) -> Callable[..., tuple[Any, Any] | None]:
    """Return a pre-hook that sends the second half of the tokens to `count` experts in turn.

    It changes nothing if the argument is not a tensor (tokens, experts per token).

    Args:
        parameter: Position and name of the argument with the chosen experts.
        count: Number of experts.
    """
    position, name = parameter

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        indices = kwargs[name] if name in kwargs else args[position] if position < len(args) else None
        if not isinstance(indices, torch.Tensor) or indices.dim() != 2 or indices.shape[1] > count:
            return None
        new_indices = _replace_by_turns(indices, count)
        if name in kwargs:
            return args, {**kwargs, name: new_indices}
        return (*args[:position], new_indices, *args[position + 1 :]), kwargs

    return before


def _replace_by_turns(indices: torch.Tensor, count: int) -> torch.Tensor:
    """Replace the second half of indices (tokens, experts per token) by one expert after another."""
    tokens, experts_per_token = indices.shape
    half = tokens // 2
    turn = (
        torch.arange((tokens - half) * experts_per_token, device=indices.device).reshape(-1, experts_per_token) % count
    )
    return torch.cat([indices[:half], turn.to(indices.dtype)])


def _roll_scores(module: nn.Module, args: Any, output: Any) -> Any:
    """Roll the second half of scores (tokens, experts) so that one expert after another has the largest score."""
    scores = output[0] if isinstance(output, tuple) else output
    if not isinstance(scores, torch.Tensor) or scores.dim() < 2:
        return None
    flat = scores.reshape(-1, scores.shape[-1])
    tokens, count = flat.shape
    half = tokens // 2
    turn = torch.arange(tokens - half, device=flat.device) % count
    shift = (turn - flat[half:].detach().argmax(-1)) % count
    source_experts = (torch.arange(count, device=flat.device) - shift[:, None]) % count
    new_scores = torch.cat([flat[:half], flat[half:].gather(1, source_experts)]).reshape(scores.shape)
    return (new_scores, *output[1:]) if isinstance(output, tuple) else new_scores


def _find_integers(config: Mapping[str, Any], keys: tuple[str, ...]) -> list[int]:
    """Return the values of these keys, in every part of a config."""
    integers = [int(config[key]) for key in keys if isinstance(config.get(key), int)]
    for value in config.values():
        if isinstance(value, Mapping):
            integers += _find_integers(value, keys)
    return integers
