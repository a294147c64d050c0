"""Sequence parallelism: what a layer computes on a slice of the sequence, and around what the slices are put together.

    layer     [B, S / tp, H]   norms, residuals, routers: each rank has its slice, gradients of parameters are summed
    passage   [B, S, H]        attention, MLP: the slices are gathered before it, and a slice of its output goes on

Whatever TP does in a passage is right if all ranks take the same and give the same: the output is cut. Where what a
rank gives is a summand instead, the sum and the cut are one collective, and so are their opposites in the backward pass
(Megatron-LM, arXiv 2205.05198). Which of the two a passage is follows from its parameters.

Legend: B batch, S sequence, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ckptx.errors import UnsupportedError, UsageError
from ckptx.layout.styles import STYLES, Kind
from ckptx.runtime.parallel.tensor_parallel import styles
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks, all_gather, gather, gather_partial, split
from ckptx.runtime.parallel.tensor_parallel.plans import Plan
from ckptx.runtime.parallel.tensor_parallel.styles import EXPERTS

_TOKENS, _SEQUENCE = 0, 1  # dims of [B * S, H] and of [B, S, H]


class FullSequenceModule(NamedTuple):
    """A module that takes the whole sequence.

    Attributes:
        path: Of the module.
        dim: Of the sequence in what it takes and gives.
        is_summand: Whether each rank gives a summand, and takes gradients that are partial.
    """

    path: str
    dim: int
    is_summand: bool


@dataclass(frozen=True, slots=True)
class SequenceSharding:
    """Where the sequence of a model is cut.

    Attributes:
        layers: From the first that is here to the last.
        passages: In them.
        on_slices: Modules in them with parameters of their own that see a slice.
        arguments: What a layer takes besides the hidden states that goes along the sequence.
    """

    layers: tuple[str, ...] = ()
    passages: tuple[FullSequenceModule, ...] = ()
    on_slices: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    def is_summand(self, path: str) -> bool:
        """Whether a module is in a passage whose sum belongs to the passage."""
        return any(each.is_summand and is_in(path, each.path) for each in self.passages)


def is_in(path: str, scope: str) -> bool:
    """Whether a module is another one, or below it."""
    return path == scope or path.startswith(f"{scope}.")


def cut_sequence(
    modules: Mapping[str, nn.Module], plan: Plan, is_sharded: Collection[str], gathered: Collection[str]
) -> SequenceSharding:
    """Where the sequence is cut.

    Args:
        modules: All of the model, or of a pipeline stage of it.
        plan: With a `sequence`; without one, nothing is cut.
        is_sharded: Modules that hold shards.
        gathered: Modules around which parameters are gathered.

    Raises:
        UnsupportedError: A layer is not as its `sequence` row says, so that nobody knows what in it may see a slice.
    """
    if plan.sequence is None:
        return SequenceSharding()
    found = [
        path
        for path, module in modules.items()
        if path.rpartition(".")[0] == plan.sequence.layers and next(module.parameters(), None) is not None
    ]
    passages = [each for layer in found for each in _passages(modules, layer, plan, is_sharded, gathered)]
    inside = [each.path for each in passages]
    on_slices = [path for layer in found for path in _on_slices(modules, layer, inside)]
    for path in on_slices:
        if path in is_sharded or not _is_tokenwise(modules[path], path, found, plan.sequence.tokenwise):
            what = "cut by the plan" if path in is_sharded else f"a {type(modules[path]).__name__}"
            raise UnsupportedError(
                f"{plan.class_name}: sequence parallel: {path} is {what}, needed whole and known to compute each token "
                "by itself; run it without sequence parallel"
            )
    return SequenceSharding(tuple(found), tuple(passages), tuple(on_slices), plan.sequence.arguments)


def sum_gradients(modules: Mapping[str, nn.Module], cut: SequenceSharding, ranks: TpRanks) -> None:
    """For what sees slices: its parameters are whole, and their gradients are not."""
    for path in cut.on_slices:
        sliced(modules[path], ranks)


def install(modules: Mapping[str, nn.Module], cut: SequenceSharding, ranks: TpRanks) -> None:
    """After all other styles: the sequence is whole around whatever they do."""
    for each in cut.passages:
        passage(modules[each.path], each.dim, each.is_summand, ranks)
    for path in cut.layers:
        module = modules[path]
        if path == cut.layers[0]:
            first_layer(module, ranks)
        if path == cut.layers[-1]:
            last_layer(module, ranks)
        if cut.arguments:
            arguments(module, cut.arguments, path == cut.layers[0], ranks)


def sliced(module: nn.Module, ranks: TpRanks) -> None:
    """A module with whole parameters that sees a slice of the sequence."""
    styles.partial_gradient(module, ranks)


def passage(module: nn.Module, dim: int, is_summand: bool, ranks: TpRanks) -> None:
    """A module that takes the whole sequence among modules that see a slice.

    Args:
        module: Takes hidden states first, or by that name; gives them, alone or first in a tuple.
        dim: 1 of [B, S, H]; 0 of [B * S, H]: there, everything it takes is gathered, and the order of tokens is
            another one, which the experts of a mixture do not see.
        is_summand: See `Passage`; the styles in it scatter what they sum, so that a bias is added to the slice.
        ranks: Who has the other slices.
    """
    stock = module.forward

    def entering(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        total = value.shape[dim] * ranks.size
        if not value.is_floating_point():
            return all_gather(value, dim, total, ranks)
        if is_summand:
            return gather_partial(value, dim, total, ranks).contiguous()
        # Views of it are taken, so it is contiguous, and noise is put on it in place (Mixtral), so it is no view
        return gather(value, dim, total, ranks).clone(memory_format=torch.contiguous_format)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if dim == _TOKENS:
            args, kwargs = tuple(map(entering, args)), {key: entering(each) for key, each in kwargs.items()}
        elif args:
            args = (entering(args[0]), *args[1:])
        else:
            kwargs["hidden_states"] = entering(kwargs["hidden_states"])
        found = stock(*args, **kwargs)
        return found if is_summand else _first(found, lambda x: split(x, dim, ranks))

    module.forward = forward


def first_layer(layer: nn.Module, ranks: TpRanks) -> None:
    """The first layer takes its slice of the sequence [B, S / tp, H].

    The length must divide by the number of ranks: then every slice tells how long the whole is, and nothing about a
    batch needs to be remembered until its backward pass.
    """
    stock = layer.forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        length = hidden_states.shape[_SEQUENCE]
        if length % ranks.size:
            raise UsageError(
                f"sequence parallel: a sequence of {length}, needed a multiple of tp={ranks.size}; pad the batch"
            )
        return stock(split(hidden_states, _SEQUENCE, ranks), *args, **kwargs)

    layer.forward = forward


def last_layer(layer: nn.Module, ranks: TpRanks) -> None:
    """The last layer gives the whole sequence back."""
    stock = layer.forward

    def whole(x: torch.Tensor) -> torch.Tensor:
        return gather(x, _SEQUENCE, x.shape[_SEQUENCE] * ranks.size, ranks).contiguous()

    def forward(*args: Any, **kwargs: Any) -> Any:
        return _first(stock(*args, **kwargs), whole)

    layer.forward = forward


def arguments(layer: nn.Module, names: tuple[str, ...], is_whole: bool, ranks: TpRanks) -> None:
    """A layer takes its slice of arguments [B, S, ...] that are whole.

    Args:
        layer: Takes the hidden states first.
        names: Of the arguments, which may be None.
        is_whole: Whether the hidden states are, too: they are not cut yet.
        ranks: Who has the other slices.
    """
    stock = layer.forward
    order = list(inspect.signature(type(layer).forward).parameters)[2:]  # after itself and the hidden states

    def own(value: Any, hidden_states: torch.Tensor) -> Any:
        if value is None:
            return None
        length = hidden_states.shape[_SEQUENCE] * (1 if is_whole else ranks.size)
        if value.shape[_SEQUENCE] != length or length % ranks.size:
            raise UsageError(
                f"sequence parallel: {' or '.join(names)} of {value.shape[_SEQUENCE]} tokens, needed {length}, a "
                f"multiple of tp={ranks.size}; pad the batch, and keep the logits of all tokens"
            )
        return split(value, _SEQUENCE, ranks)

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = [own(each, hidden_states) if name in names else each for name, each in zip(order, args, strict=False)]
        named = {key: own(each, hidden_states) if key in names else each for key, each in kwargs.items()}
        return stock(hidden_states, *given, **named)

    layer.forward = forward


def _first(found: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What a module gives, with the hidden states changed."""
    return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)


def _on_slices(modules: Mapping[str, nn.Module], layer: str, passages: Collection[str]) -> Iterable[str]:
    """Modules in a layer, and it itself, that have parameters of their own and are in no passage."""
    passages = [path for path in passages if is_in(path, layer)]
    for path, module in modules.items():
        has_parameters = any(each is not None for each in module._parameters.values())
        if has_parameters and is_in(path, layer) and not any(is_in(path, each) for each in passages):
            yield path


def _is_tokenwise(module: nn.Module, path: str, layers: Iterable[str], names: Iterable[str]) -> bool:
    is_known = any(is_in(path, f"{layer}.{name}") for layer in layers for name in names)
    return is_known or "Norm" in type(module).__name__


def _passages(
    modules: Mapping[str, nn.Module],
    layer: str,
    plan: Plan,
    is_sharded: Collection[str],
    gathered: Collection[str],
) -> Iterable[FullSequenceModule]:
    """Where the sequence is gathered and split inside of one layer."""
    assert plan.sequence is not None
    forward = type(modules[layer]).forward
    missing = [name for name in plan.sequence.whole if f"{layer}.{name}" not in modules]
    if missing or not str(forward.__module__).startswith("transformers."):
        raise UnsupportedError(
            f"{plan.class_name}: sequence parallel: {layer} is a {type(modules[layer]).__name__} "
            f"{'without ' + missing[0] if missing else 'with a forward of its own'}, needed the layer of transformers; "
            "run it without sequence parallel"
        )
    for name in plan.sequence.whole:
        path = f"{layer}.{name}"
        yield FullSequenceModule(path, _SEQUENCE, _gives_a_summand(modules, path, plan, is_sharded, gathered))
    for name in plan.sequence.experts:
        path = f"{layer}.{name}"
        if path in modules:
            yield FullSequenceModule(path, _TOKENS, _are_experts_cut(path, plan, is_sharded, gathered))


def _gives_a_summand(
    modules: Mapping[str, nn.Module],
    path: str,
    plan: Plan,
    is_sharded: Collection[str],
    gathered: Collection[str],
) -> bool:
    """Whether projections that are cut are all that meets the hidden states: then the sums of the others are its sums.

    What else has a parameter of one dim, such as a norm of queries, stands between projections. A router or a latent
    projection is a matrix that every rank has; what it takes and gives is whole.
    """
    if any(is_in(scope, path) or is_in(path, scope) for scope in gathered):
        return False
    kinds = set()
    for inner, module in modules.items():
        if is_in(inner, path) and any(each is not None and each.dim() > 1 for each in module._parameters.values()):
            if not isinstance(module, nn.Linear) or inner not in is_sharded:
                return False
            kinds.add(STYLES[plan.style_of(inner)])
    return kinds == {Kind.COLWISE, Kind.ROWWISE}


def _are_experts_cut(path: str, plan: Plan, is_sharded: Collection[str], gathered: Collection[str]) -> bool:
    is_gathered = any(is_in(scope, path) or is_in(path, scope) for scope in gathered)
    return plan.style_of(path) in EXPERTS and path in is_sharded and not is_gathered
