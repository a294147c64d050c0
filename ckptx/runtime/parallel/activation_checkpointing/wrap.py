"""Activation checkpointing: what a layer keeps from its forward pass, and what it computes a second time.

    none        everything is kept
    submodule   attention, MLP and norms are checkpointed one by one: their inputs are kept; a layer that has nothing
                of the kind is checkpointed whole
    selective   attention and every other matrix product are kept (see `selective`)
    full        the input of the layer is kept

torch's NO_REENTRANT wrapper does it, in the place of the layer: a reentrant one would run the hooks of FSDP2 twice.
Random numbers are replayed, so dropout is the same in both passes.

Which kernel runs an attention is not replayed. It is the same in both passes because nothing here chooses one for the
forward pass alone; who wraps `sdpa_kernel` around a forward must wrap the backward too, and torch raises
CheckpointError if the kernels keep different things.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from torch import nn

from ckptx.architecture.corrections import corrections_of
from ckptx.errors import UnsupportedError, UsageError
from ckptx.runtime.model.layers import (
    GROUPS,
    Layer,
    canonical_name,
    is_container,
    is_stage,
    layer_groups,
    submodule,
    unwrapped,
)
from ckptx.runtime.parallel.activation_checkpointing.selective import context_maker
from ckptx.runtime.torch_private import CheckpointImpl, CheckpointWrapper, checkpoint_wrapper, use_first_compiled_graph

__all__ = [
    "MODES",
    "SCOPES",
    "KVSharingFallback",
    "canonical_name",
    "checkpoint_activations",
    "configs_as_given",
    "shares_kv",
]

Mode = Literal["none", "full", "submodule", "selective"]
Scope = Literal["all", "language", "vision", "audio"]
MODES = ("none", "full", "submodule", "selective")
SCOPES = ("all", *GROUPS)

Wrap = Callable[[nn.Module], nn.Module]

_CACHING = "_ckptx_configs_that_cache"  # attribute of the model; no attribute of a config, for it would be saved

# What classes of transformers call the parts of a layer. A layer with cross-attention has two of the first kind. Names
# that one model type alone has are among its corrections.
_ATTENTION = frozenset({
    "self_attn", "attention", "attn", "self_attention", "linear_attn", "encoder_attn", "cross_attn", "crossattention",
    "SelfAttention", "EncDecAttention", "mamba", "mixer", "conv", "short_conv",
})  # fmt: skip
_MLP = frozenset({
    "mlp", "feed_forward", "ffn", "moe", "block_sparse_moe", "shared_mlp", "DenseReluDense",
    "intermediate",
})  # fmt: skip
_NORM = frozenset({
    "input_layernorm", "pre_attention_layernorm", "attention_norm", "self_attn_layer_norm", "layer_norm1", "norm1",
    "ln_1", "norm", "layer_norm", "operator_norm", "encoder_attn_layer_norm", "ln_cross_attn",
    "pre_feedforward_layernorm", "post_attention_layernorm", "ffn_norm", "final_layer_norm",
    "layer_norm2", "norm2", "ln_2", "pre_ff_layernorm",
})  # fmt: skip


class KVSharingFallback(UserWarning):
    """Layers reuse keys and values of others, so that their attention is not checkpointed as was asked."""


class _PartNames(NamedTuple):
    """What the parts of a layer are called in a model."""

    attention: frozenset[str]
    others: frozenset[str]


class _ChildModule(NamedTuple):
    """A child of a module, under its registered name."""

    parent: nn.Module
    name: str
    module: nn.Module


def checkpoint_activations(model: nn.Module, mode: str, scope: str = "all", *, compile: bool = False) -> int:
    """Wraps the layers of a model, in place. Comes after TP, before compile and FSDP2.

    Parameters keep their names in the state dict; elsewhere `canonical_name` gives them. A layer without a trainable
    parameter stays as it is. `use_cache` becomes false in every config: a layer that ran twice would append its keys
    and values twice; `configs_as_given` undoes it for whoever saves them. Models whose layers share keys and values
    need the cache; their attention is not checkpointed, and `full` and `selective` become `submodule` there, with a
    `KVSharingFallback` warning.

    Args:
        model: A transformers model, or a pipeline stage of one.
        mode: One of `MODES`.
        scope: One of `SCOPES`: the group of layers.
        compile: Whether the wrapped layers will be compiled. Compile the wrapper, not what is in it.

    Returns:
        The number of layers that are checkpointed, those that already were included.

    Raises:
        UsageError: An unknown mode or scope, or transformers' own gradient checkpointing is on too.
        UnsupportedError: Not one layer would be checkpointed, and the model is not a pipeline stage.
    """
    _check(model, mode, scope)
    if mode == "none":
        return 0
    has_shared = shares_kv(model)
    if not has_shared:
        _stop_caching(model)
    elif mode != "submodule" and scope in ("all", "language"):
        warnings.warn(
            f"{_class_name(model)}: its layers share keys and values, so mode {mode} checkpoints their MLP and norms "
            "alone; all of their attention is kept",
            KVSharingFallback,
            stacklevel=2,
        )
    if compile and mode == "selective":
        use_first_compiled_graph()
    whole, names = _wrap_whole(mode), _part_names(model)
    count = 0
    for group, layers in layer_groups(model).items():
        if scope not in ("all", group):
            continue
        shares = has_shared and group == "language"
        for layer in filter(_is_trainable, layers):
            if mode == "submodule" or shares:
                done = _checkpoint_parts(layer.module, names.others if shares else names.others | names.attention)
                count += done or (not shares and _checkpoint_layer(model, layer, whole))
            else:
                count += _checkpoint_layer(model, layer, whole)
    if not count and not is_stage(model):
        raise UnsupportedError(
            f"{_class_name(model)}: mode {mode} with scope {scope} checkpoints 0 layers, needed one; the class has no "
            "such layers or none with a trainable parameter: choose another scope or mode none"
        )
    return count


def shares_kv(model: nn.Module) -> bool:
    """Whether layers of the model reuse keys and values that another one computed (Gemma 3n, small Gemma 4)."""
    return any(map(_shares, _configs(model)))


def _shares(config: Any) -> bool:
    if (getattr(config, "num_kv_shared_layers", 0) or 0) > 0:
        return True
    # what layers ask in newer releases; Mistral Large 4 has it alone
    return any(getattr(config, "kv_sharing_modes", None) or ())


def _check(model: nn.Module, mode: str, scope: str) -> None:
    for value, allowed, what in ((mode, MODES, "mode"), (scope, SCOPES, "scope")):
        if value not in allowed:
            raise UsageError(f'activation checkpointing {what} "{value}": needed one of {", ".join(allowed)}')
    if mode != "none" and any(module.__dict__.get("gradient_checkpointing") for module in model.modules()):
        raise UsageError(
            f"{_class_name(model)}: gradient checkpointing of transformers is on, needed one kind alone; call "
            "gradient_checkpointing_disable() first"
        )


def _wrap_whole(mode: str) -> Wrap:
    """How a whole layer is wrapped in a mode."""
    if mode == "selective":
        make = context_maker()
        return lambda module: _wrapped(module, context_fn=make)
    return _wrapped


class _PartWrapper(CheckpointWrapper):  # type: ignore[misc]  # torch says Any
    """A wrapper that `isinstance` takes for what is in it, too: Ernie 4.5 VL asks its MLP whether it has experts.

    Not for a whole layer: FSDP2 gives that another class.
    """

    @property  # type: ignore[misc]  # torch has an attribute there
    def __class__(self) -> type:
        return type(self.__dict__.get("_modules", {}).get("_checkpoint_wrapped_module", self))


def _wrapped_part(module: nn.Module) -> nn.Module:
    wrapper: nn.Module = _PartWrapper(module, CheckpointImpl.NO_REENTRANT, preserve_rng_state=True)
    return wrapper


def _wrapped(module: nn.Module, **settings: Any) -> nn.Module:
    wrapper: nn.Module = checkpoint_wrapper(
        module, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=True, **settings
    )
    return wrapper


def _checkpoint_layer(model: nn.Module, layer: Layer, wrap: Wrap) -> bool:
    """Puts a wrapper in the place of a layer; False for a list, which is none."""
    if is_container(unwrapped(layer.module)):
        return False
    if not isinstance(layer.module, CheckpointWrapper):
        path, _, key = layer.name.rpartition(".")
        parent = submodule(model, path)
        assert parent is not None, layer.name
        unwrapped(parent).register_module(key, wrap(layer.module))
    return True


def _part_names(model: nn.Module) -> _PartNames:
    """The usual names, and those that model types in the model have for themselves."""
    types = {str(getattr(config, "model_type", "")) for config in _configs(model)}
    rows = [row for each in types for row in corrections_of(each).layer_parts]
    return _PartNames(
        _ATTENTION.union(*(row.attention for row in rows)),
        (_MLP | _NORM).union(*(row.mlp for row in rows), *(row.norms for row in rows)),
    )


def _checkpoint_parts(layer: nn.Module, wanted: Collection[str]) -> bool:
    """Puts wrappers around the parts of a layer with these names; False when it has none."""
    parts = [part for part in _parts(unwrapped(layer)) if part.name in wanted]
    for part in parts:
        if not isinstance(part.module, CheckpointWrapper):
            part.parent.register_module(part.name, _wrapped_part(part.module))
    return bool(parts)


def _parts(layer: nn.Module) -> Iterator[_ChildModule]:
    """The registered children of a layer.

    T5 has a list of sublayers in each layer; their children are taken then. A property that shows a child under a
    second name is not asked: a wrapper there would be a second parameter name.
    """
    for name, child in layer._modules.items():
        if child is None:
            continue
        if is_container(child):
            for item in child._modules.values():
                if item is not None:
                    yield from _parts(item)
        else:
            yield _ChildModule(layer, name, child)


def _is_trainable(layer: Layer) -> bool:
    return any(parameter.requires_grad for parameter in layer.module.parameters())


def _stop_caching(model: nn.Module) -> None:
    caching = [config for config in _configs(model) if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    model.__dict__[_CACHING] = [*model.__dict__.get(_CACHING, ()), *caching]


@contextmanager
def configs_as_given(model: nn.Module) -> Iterator[None]:
    """Within it, the configs of a model are as they were before `checkpoint_activations`: how a model is trained is no
    part of what is saved."""
    caching = [config for config in unwrapped(model).__dict__.get(_CACHING, ()) if config.use_cache is False]
    for config in caching:
        config.use_cache = True
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = False


def _configs(model: nn.Module) -> list[Any]:
    """Every config in the model: that of each module, since encoder-decoders copy theirs, and those nested in it."""
    found: dict[int, Any] = {}
    waiting = [config for module in model.modules() if (config := module.__dict__.get("config")) is not None]
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            waiting += [nested for key in getattr(config, "sub_configs", ()) if (nested := getattr(config, key, None))]
    return list(found.values())


def _class_name(model: nn.Module) -> str:
    return type(unwrapped(model)).__name__
