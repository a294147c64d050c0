"""Sequence parallelism: modules that run on a slice of the sequence, and modules that get the full sequence.

    layer          [B, S / tp, H]  norms, residuals, routers: each rank has a slice; gradients of parameters are summed
    full sequence  [B, S, H]       attention, MLP: slices are gathered before the module, and its output is split again

TP in a full-sequence module is correct if all ranks have equal inputs and outputs: then the output is split. If a
rank's output is a summand instead, sum and split are one collective, and so are their counterparts in the backward pass
(Megatron-LM, arXiv 2205.05198). The parameters of the module decide between the two.

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
from ckptx.layout.styles import STYLES, StyleKind
from ckptx.runtime.parallel.tensor_parallel import styles
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks, all_gather, gather, gather_partial, split
from ckptx.runtime.parallel.tensor_parallel.plans import TpPlan
from ckptx.runtime.parallel.tensor_parallel.styles import EXPERT_STYLES

_TOKENS, _SEQUENCE = 0, 1  # dims of [B * S, H] and of [B, S, H]


class FullSequenceModule(NamedTuple):
    """A module that gets the full sequence.

    Attributes:
        path: Path of the module.
        dim: Sequence dim of its inputs and outputs.
        has_partial_output: True if each rank's output is a summand, and its gradients are partial.
    """

    path: str
    dim: int
    has_partial_output: bool


@dataclass(frozen=True, slots=True)
class SequenceSharding:
    """The modules that run on slices of the sequence, and those that get it whole.

    Attributes:
        layers: Paths of the layers, from the first on this stage to the last; empty if the sequence is not sharded.
        full_modules: Modules in the layers that get the full sequence.
        sliced_modules: Paths of the layers and of modules in them that get a slice and have parameters of their own.
        sliced_arguments: Names of the arguments of a layer, other than the hidden states, that have a sequence dim.
    """

    layers: tuple[str, ...] = ()
    full_modules: tuple[FullSequenceModule, ...] = ()
    sliced_modules: tuple[str, ...] = ()
    sliced_arguments: tuple[str, ...] = ()

    def has_partial_output(self, path: str) -> bool:
        """Return True if a module is, or is inside, a full-sequence module whose outputs are summed over ranks."""
        return any(each.has_partial_output and is_inside(path, each.path) for each in self.full_modules)


def is_inside(path: str, outer: str) -> bool:
    """Return True if a module is `outer` itself, or inside it."""
    return path == outer or path.startswith(f"{outer}.")


def shard_sequence(
    modules: Mapping[str, nn.Module], plan: TpPlan, sharded_modules: Collection[str], gathered_modules: Collection[str]
) -> SequenceSharding:
    """Return the sharding of the sequence in a model.

    Args:
        modules: All modules of the model, or of a pipeline stage, by path.
        plan: Plan of the model; without `sequence`, nothing is sharded.
        sharded_modules: Paths of modules with sharded parameters.
        gathered_modules: Paths of modules whose parameters are gathered around their forward pass.

    Raises:
        UnsupportedError: A layer does not match the modules that `plan.sequence` names, so it is unknown which of its
            modules may get a slice.
    """
    if plan.sequence is None:
        return SequenceSharding()
    layers = [
        path
        for path, module in modules.items()
        if path.rpartition(".")[0] == plan.sequence.layers and next(module.parameters(), None) is not None
    ]
    full_modules = [
        each
        for layer in layers
        for each in _find_full_sequence_modules(modules, layer, plan, sharded_modules, gathered_modules)
    ]
    full_module_paths = [each.path for each in full_modules]
    sliced_modules = [path for layer in layers for path in _find_sliced_modules(modules, layer, full_module_paths)]
    for path in sliced_modules:
        if path in sharded_modules or not _is_tokenwise(modules[path], path, layers, plan.sequence.tokenwise):
            description = "sharded by the plan" if path in sharded_modules else f"a {type(modules[path]).__name__}"
            raise UnsupportedError(
                f"{plan.class_name}: sequence parallel: {path} is {description}, must be replicated and known to "
                "compute each token independently; run it without sequence parallelism"
            )
    return SequenceSharding(tuple(layers), tuple(full_modules), tuple(sliced_modules), plan.sequence.arguments)


def install_gradient_sums(modules: Mapping[str, nn.Module], sharding: SequenceSharding, ranks: TpRanks) -> None:
    """Sum over TP ranks the gradients of whole parameters in modules that get slices of the sequence."""
    for path in sharding.sliced_modules:
        sum_slice_gradients(modules[path], ranks)


def install_sequence_parallel(modules: Mapping[str, nn.Module], sharding: SequenceSharding, ranks: TpRanks) -> None:
    """Install the sharding of the sequence, after all other styles, which get the full sequence."""
    for each in sharding.full_modules:
        gather_around(modules[each.path], each.dim, each.has_partial_output, ranks)
    for path in sharding.layers:
        module = modules[path]
        if path == sharding.layers[0]:
            split_at_first_layer(module, ranks)
        if path == sharding.layers[-1]:
            gather_at_last_layer(module, ranks)
        if sharding.sliced_arguments:
            slice_arguments(module, sharding.sliced_arguments, path == sharding.layers[0], ranks)


def sum_slice_gradients(module: nn.Module, ranks: TpRanks) -> None:
    """Sum over TP ranks the gradients of a module with whole parameters that gets a slice of the sequence."""
    styles.sum_partial_gradients(module, ranks)


def gather_around(module: nn.Module, dim: int, has_partial_output: bool, ranks: TpRanks) -> None:
    """Gather the sequence before a module that requires all of it, and split its output.

    Args:
        module: Takes hidden states as its first argument, or as `hidden_states`; returns them, alone or first in a
            tuple.
        dim: 1 for [B, S, H]; 0 for [B * S, H], where all inputs are gathered. The tokens are then in another order, to
            which the experts of a mixture are insensitive.
        has_partial_output: See `FullSequenceModule`; the styles in the module scatter their sum, so that a bias is
            added to the slice.
        ranks: TP ranks.
    """
    original_forward = module.forward

    def gather_input(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        total = value.shape[dim] * ranks.size
        if not value.is_floating_point():
            return all_gather(value, dim, total, ranks)
        if has_partial_output:
            return gather_partial(value, dim, total, ranks).contiguous()
        # contiguous, as modules take views of it, and no view itself, as some add noise to it in place (Mixtral)
        return gather(value, dim, total, ranks).clone(memory_format=torch.contiguous_format)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if dim == _TOKENS:
            args, kwargs = tuple(map(gather_input, args)), {key: gather_input(each) for key, each in kwargs.items()}
        elif args:
            args = (gather_input(args[0]), *args[1:])
        else:
            kwargs["hidden_states"] = gather_input(kwargs["hidden_states"])
        output = original_forward(*args, **kwargs)
        return output if has_partial_output else _map_hidden_states(output, lambda x: split(x, dim, ranks))

    module.forward = forward


def split_at_first_layer(layer: nn.Module, ranks: TpRanks) -> None:
    """Make the first layer take its slice of the sequence, [B, S / tp, H].

    The length must be divisible by the number of ranks: then the length of a slice gives that of the sequence, and
    nothing about a batch is stored until its backward pass.
    """
    original_forward = layer.forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        length = hidden_states.shape[_SEQUENCE]
        if length % ranks.size:
            raise UsageError(
                f"sequence parallel: sequence length {length} must be a multiple of tp={ranks.size}; pad the batch"
            )
        return original_forward(split(hidden_states, _SEQUENCE, ranks), *args, **kwargs)

    layer.forward = forward


def gather_at_last_layer(layer: nn.Module, ranks: TpRanks) -> None:
    """Make the last layer return the full sequence."""
    original_forward = layer.forward

    def gather_output(x: torch.Tensor) -> torch.Tensor:
        return gather(x, _SEQUENCE, x.shape[_SEQUENCE] * ranks.size, ranks).contiguous()

    def forward(*args: Any, **kwargs: Any) -> Any:
        return _map_hidden_states(original_forward(*args, **kwargs), gather_output)

    layer.forward = forward


def slice_arguments(layer: nn.Module, names: tuple[str, ...], has_full_hidden_states: bool, ranks: TpRanks) -> None:
    """Make a layer take its slice of arguments with the full sequence, [B, S, ...].

    Args:
        layer: Layer that takes the hidden states first.
        names: Names of the arguments, whose values may be None.
        has_full_hidden_states: True if the layer gets the full hidden states, as the first layer does; False if it gets
            a slice of them.
        ranks: TP ranks.
    """
    original_forward = layer.forward
    argument_names = list(inspect.signature(type(layer).forward).parameters)[2:]  # after self and the hidden states

    def slice_argument(value: Any, hidden_states: torch.Tensor) -> Any:
        if value is None:
            return None
        length = hidden_states.shape[_SEQUENCE] * (1 if has_full_hidden_states else ranks.size)
        if value.shape[_SEQUENCE] != length or length % ranks.size:
            raise UsageError(
                f"sequence parallel: {' or '.join(names)} has {value.shape[_SEQUENCE]} tokens, expected {length}, a "
                f"multiple of tp={ranks.size}; pad the batch, and keep the logits of all tokens"
            )
        return split(value, _SEQUENCE, ranks)

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sliced_args = [
            slice_argument(each, hidden_states) if name in names else each
            for name, each in zip(argument_names, args, strict=False)
        ]
        sliced_kwargs = {
            key: slice_argument(each, hidden_states) if key in names else each for key, each in kwargs.items()
        }
        return original_forward(hidden_states, *sliced_args, **sliced_kwargs)

    layer.forward = forward


def _map_hidden_states(output: Any, transform: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the output of a module with its hidden states changed."""
    return (transform(output[0]), *output[1:]) if isinstance(output, tuple) else transform(output)


def _find_sliced_modules(modules: Mapping[str, nn.Module], layer: str, full_modules: Collection[str]) -> Iterable[str]:
    """Yield the layer and modules in it that have parameters of their own, outside of full-sequence modules."""
    full_modules = [path for path in full_modules if is_inside(path, layer)]
    for path, module in modules.items():
        has_parameters = any(each is not None for each in module._parameters.values())
        if has_parameters and is_inside(path, layer) and not any(is_inside(path, each) for each in full_modules):
            yield path


def _is_tokenwise(module: nn.Module, path: str, layers: Iterable[str], names: Iterable[str]) -> bool:
    """Return True if a module is known to compute each token independently: a norm, or one of `names` in a layer."""
    is_known = any(is_inside(path, f"{layer}.{name}") for layer in layers for name in names)
    return is_known or "Norm" in type(module).__name__


def _find_full_sequence_modules(
    modules: Mapping[str, nn.Module],
    layer: str,
    plan: TpPlan,
    sharded_modules: Collection[str],
    gathered_modules: Collection[str],
) -> Iterable[FullSequenceModule]:
    """Yield the modules of one layer around which the sequence is gathered and split.

    Raises:
        UnsupportedError: The layer has a custom forward, or lacks a module that `plan.sequence` requires.
    """
    assert plan.sequence is not None
    forward = type(modules[layer]).forward
    missing = [name for name in plan.sequence.whole if f"{layer}.{name}" not in modules]
    if missing or not str(forward.__module__).startswith("transformers."):
        raise UnsupportedError(
            f"{plan.class_name}: sequence parallel: {layer} is a {type(modules[layer]).__name__} "
            f"{'without ' + missing[0] if missing else 'with a custom forward'}, expected the layer of transformers; "
            "run it without sequence parallelism"
        )
    for name in plan.sequence.whole:
        path = f"{layer}.{name}"
        yield FullSequenceModule(
            path, _SEQUENCE, _has_partial_output(modules, path, plan, sharded_modules, gathered_modules)
        )
    for name in plan.sequence.experts:
        path = f"{layer}.{name}"
        if path in modules:
            yield FullSequenceModule(path, _TOKENS, _are_experts_sharded(path, plan, sharded_modules, gathered_modules))


def _has_partial_output(
    modules: Mapping[str, nn.Module],
    path: str,
    plan: TpPlan,
    sharded_modules: Collection[str],
    gathered_modules: Collection[str],
) -> bool:
    """Return True if the output is a sum over ranks: only sharded projections use the hidden states.

    Parameters with one dim, such as those of a query norm, are between projections, and are ignored. A router or a
    latent projection is a replicated matrix, whose input and output are whole: with one of them the result is False.
    """
    if any(is_inside(each, path) or is_inside(path, each) for each in gathered_modules):
        return False
    kinds = set()
    for inner, module in modules.items():
        if is_inside(inner, path) and any(each is not None and each.dim() > 1 for each in module._parameters.values()):
            if not isinstance(module, nn.Linear) or inner not in sharded_modules:
                return False
            kinds.add(STYLES[plan.style_of(inner)])
    return kinds == {StyleKind.COLWISE, StyleKind.ROWWISE}


def _are_experts_sharded(
    path: str, plan: TpPlan, sharded_modules: Collection[str], gathered_modules: Collection[str]
) -> bool:
    is_gathered = any(is_inside(each, path) or is_inside(path, each) for each in gathered_modules)
    return plan.style_of(path) in EXPERT_STYLES and path in sharded_modules and not is_gathered
