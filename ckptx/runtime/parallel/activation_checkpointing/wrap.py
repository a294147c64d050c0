"""Activation checkpointing: saves part of the activations of a layer, and recomputes the rest in the backward pass.

    none        all activations are saved
    submodule   attention, MLP and norms are checkpointed separately, and their inputs saved; a layer without such
                submodules is checkpointed as a whole
    selective   attention and every second matrix product are saved (see `selective`)
    full        the input of the layer is saved

torch's NO_REENTRANT wrapper replaces each layer: a reentrant one would run the hooks of FSDP2 twice. The RNG state is
restored, so dropout is the same in both passes.

The choice of an attention kernel is not restored. It is the same in both passes because nothing here chooses one for
the forward pass alone; code that wraps `sdpa_kernel` around a forward must wrap the backward too, and torch raises
CheckpointError if the kernels save different tensors.
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
    LAYER_GROUPS,
    Layer,
    canonical_name,
    find_submodule,
    is_layer_list,
    is_stage,
    layer_groups,
    unwrap,
)
from ckptx.runtime.parallel.activation_checkpointing.selective import make_context_factory
from ckptx.runtime.torch_private import CheckpointImpl, CheckpointWrapper, checkpoint_wrapper, use_first_compiled_graph

__all__ = [
    "MODES",
    "SCOPES",
    "KVSharingFallback",
    "canonical_name",
    "checkpoint_activations",
    "use_cache_restored",
    "shares_kv",
]

Mode = Literal["none", "full", "submodule", "selective"]
Scope = Literal["all", "language", "vision", "audio"]
MODES = ("none", "full", "submodule", "selective")
SCOPES = ("all", *LAYER_GROUPS)

Wrap = Callable[[nn.Module], nn.Module]

_CACHING_CONFIGS = "_ckptx_configs_that_cache"  # attribute of the model; an attribute of a config would be saved

# Names of submodules in the layers of transformers. A layer with cross-attention has two attention modules. Names that
# only one model type uses are in its corrections.
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
    """Warning: layers reuse keys and values of other layers, so their attention is not checkpointed as requested."""


class _SubmoduleNames(NamedTuple):
    """Names of submodules in the layers of a model.

    Attributes:
        attention: Names of attention modules.
        mlp_and_norms: Names of MLPs and norms.
    """

    attention: frozenset[str]
    mlp_and_norms: frozenset[str]


class _ChildModule(NamedTuple):
    """A child of a module.

    Attributes:
        parent: Module that registers the child.
        name: Name of the child in the parent.
        module: The child.
    """

    parent: nn.Module
    name: str
    module: nn.Module


def checkpoint_activations(model: nn.Module, mode: str, scope: str = "all", *, compile: bool = False) -> int:
    """Wrap the layers of a model, in place.

    Call it after TP, and before compile and FSDP2. Parameters keep their names in the state dict; `named_parameters()`
    of the model shows wrapped names, which `canonical_name` maps back. A layer without trainable parameters is left
    unchanged.

    `use_cache` becomes false in every config, as a layer that ran twice would append its keys and values twice;
    `use_cache_restored` restores it for saving. Models whose layers share keys and values need the cache; their
    attention is not checkpointed, and `full` and `selective` become `submodule` there, with a `KVSharingFallback`
    warning.

    Args:
        model: A transformers model, or a pipeline stage of one.
        mode: One of `MODES`.
        scope: One of `SCOPES`: the layers to checkpoint, those of the language model, of the vision or audio towers, or
            all.
        compile: True if the layers will be compiled. In mode selective, compile the wrapper, not the module in it.

    Returns:
        The number of checkpointed layers, including those that were checkpointed before; 0 in mode none.

    Raises:
        UsageError: The mode or scope is unknown, or gradient checkpointing of transformers is enabled as well.
        UnsupportedError: No layer would be checkpointed, and the model is not a pipeline stage.
    """
    _check_arguments(model, mode, scope)
    if mode == "none":
        return 0
    model_shares_kv = shares_kv(model)
    if not model_shares_kv:
        _disable_cache(model)
    elif mode != "submodule" and scope in ("all", "language"):
        warnings.warn(
            f"{_class_name(model)}: layers share keys and values, so mode {mode} checkpoints only their MLP and norms; "
            "all attention activations are saved",
            KVSharingFallback,
            stacklevel=2,
        )
    if compile and mode == "selective":
        use_first_compiled_graph()
    wrap_layer, names = _make_layer_wrapper(mode), _submodule_names(model)
    count = 0
    for group, layers in layer_groups(model).items():
        if scope not in ("all", group):
            continue
        group_shares_kv = model_shares_kv and group == "language"
        for layer in filter(_is_trainable, layers):
            if mode == "submodule" or group_shares_kv:
                has_submodules = _checkpoint_submodules(
                    layer.module, names.mlp_and_norms if group_shares_kv else names.mlp_and_norms | names.attention
                )
                count += has_submodules or (not group_shares_kv and _checkpoint_layer(model, layer, wrap_layer))
            else:
                count += _checkpoint_layer(model, layer, wrap_layer)
    if not count and not is_stage(model):
        raise UnsupportedError(
            f"{_class_name(model)}: mode {mode} with scope {scope} would checkpoint no layer, as the class has none or "
            "none with trainable parameters; choose another scope, or mode none"
        )
    return count


def shares_kv(model: nn.Module) -> bool:
    """Return True if layers reuse keys and values that another layer computed (Gemma 3n, small Gemma 4)."""
    return any(map(_config_shares_kv, _find_configs(model)))


def _config_shares_kv(config: Any) -> bool:
    """Return True if a config sets one of the keys by which layers share keys and values."""
    if (getattr(config, "num_kv_shared_layers", 0) or 0) > 0:
        return True
    # newer releases read this key; Mistral Large 4 has only this one
    return any(getattr(config, "kv_sharing_modes", None) or ())


def _check_arguments(model: nn.Module, mode: str, scope: str) -> None:
    for value, allowed, argument in ((mode, MODES, "mode"), (scope, SCOPES, "scope")):
        if value not in allowed:
            raise UsageError(
                f'activation checkpointing: unknown {argument} "{value}"; choose one of {", ".join(allowed)}'
            )
    if mode != "none" and any(module.__dict__.get("gradient_checkpointing") for module in model.modules()):
        raise UsageError(
            f"{_class_name(model)}: gradient checkpointing of transformers is enabled as well; call "
            "gradient_checkpointing_disable() first"
        )


def _make_layer_wrapper(mode: str) -> Wrap:
    """Return the function that wraps a whole layer in a mode."""
    if mode == "selective":
        make_contexts = make_context_factory()
        return lambda module: _wrap_module(module, context_fn=make_contexts)
    return _wrap_module


class _SubmoduleWrapper(CheckpointWrapper):  # type: ignore[misc]  # torch says Any
    """A wrapper that is also an instance of the wrapped class, because Ernie 4.5 VL checks the class of its MLP.

    Not for a whole layer, whose class FSDP2 changes.
    """

    @property  # type: ignore[misc]  # torch has an attribute there
    def __class__(self) -> type:
        return type(self.__dict__.get("_modules", {}).get("_checkpoint_wrapped_module", self))


def _wrap_submodule(module: nn.Module) -> nn.Module:
    wrapper: nn.Module = _SubmoduleWrapper(module, CheckpointImpl.NO_REENTRANT, preserve_rng_state=True)
    return wrapper


def _wrap_module(module: nn.Module, **settings: Any) -> nn.Module:
    wrapper: nn.Module = checkpoint_wrapper(
        module, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=True, **settings
    )
    return wrapper


def _checkpoint_layer(model: nn.Module, layer: Layer, wrap: Wrap) -> bool:
    """Wrap a layer in place unless it is wrapped, and return True; a list of sublayers (T5) is not wrapped: False."""
    if is_layer_list(unwrap(layer.module)):
        return False
    if not isinstance(layer.module, CheckpointWrapper):
        path, _, key = layer.name.rpartition(".")
        parent = find_submodule(model, path)
        assert parent is not None, layer.name
        unwrap(parent).register_module(key, wrap(layer.module))
    return True


def _submodule_names(model: nn.Module) -> _SubmoduleNames:
    """Return the usual names of submodules, and those in the corrections of the model types in the configs."""
    types = {str(getattr(config, "model_type", "")) for config in _find_configs(model)}
    rows = [row for each in types for row in corrections_of(each).layer_parts]
    return _SubmoduleNames(
        _ATTENTION.union(*(row.attention for row in rows)),
        (_MLP | _NORM).union(*(row.mlp for row in rows), *(row.norms for row in rows)),
    )


def _checkpoint_submodules(layer: nn.Module, names: Collection[str]) -> bool:
    """Wrap the submodules of a layer with these names unless they are wrapped; return False if the layer has none."""
    children = [child for child in _iter_children(unwrap(layer)) if child.name in names]
    for child in children:
        if not isinstance(child.module, CheckpointWrapper):
            child.parent.register_module(child.name, _wrap_submodule(child.module))
    return bool(children)


def _iter_children(layer: nn.Module) -> Iterator[_ChildModule]:
    """Yield the registered children of a layer.

    T5 has a list of sublayers in each layer, whose children are yielded. A property that returns a child under a second
    name is not followed: a wrapper there would give its parameters second names.
    """
    for name, child in layer._modules.items():
        if child is None:
            continue
        if is_layer_list(child):
            for item in child._modules.values():
                if item is not None:
                    yield from _iter_children(item)
        else:
            yield _ChildModule(layer, name, child)


def _is_trainable(layer: Layer) -> bool:
    return any(parameter.requires_grad for parameter in layer.module.parameters())


def _disable_cache(model: nn.Module) -> None:
    caching_configs = [config for config in _find_configs(model) if getattr(config, "use_cache", False)]
    for config in caching_configs:
        config.use_cache = False
    model.__dict__[_CACHING_CONFIGS] = [*model.__dict__.get(_CACHING_CONFIGS, ()), *caching_configs]


@contextmanager
def use_cache_restored(model: nn.Module) -> Iterator[None]:
    """Restore `use_cache` in the configs within the block, as before `checkpoint_activations`."""
    caching_configs = [
        config for config in unwrap(model).__dict__.get(_CACHING_CONFIGS, ()) if config.use_cache is False
    ]
    for config in caching_configs:
        config.use_cache = True
    try:
        yield
    finally:
        for config in caching_configs:
            config.use_cache = False


def _find_configs(model: nn.Module) -> list[Any]:
    """Return every config in the model once: those of all modules (encoder-decoders copy theirs), and sub-configs."""
    configs_by_id: dict[int, Any] = {}
    pending = [config for module in model.modules() if (config := module.__dict__.get("config")) is not None]
    while pending:
        config = pending.pop()
        if id(config) not in configs_by_id:
            configs_by_id[id(config)] = config
            pending += [nested for key in getattr(config, "sub_configs", ()) if (nested := getattr(config, key, None))]
    return list(configs_by_id.values())


def _class_name(model: nn.Module) -> str:
    return type(unwrap(model)).__name__
