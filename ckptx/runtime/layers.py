"""Finds the layers of a model: each one by itself, never the list that holds them.

Who wraps, shards or compiles layer by layer asks here. A list taken for a layer has no attention and no MLP, so that
nothing would be wrapped and nobody would notice before memory runs out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from ckptx.architecture.table import find_row
from ckptx.errors import UnsupportedError
from ckptx.runtime.layer_paths import registered_paths

GROUPS = ("language", "vision", "audio")

# Components of an FQN that a wrapper adds: activation checkpointing, torch.compile of a whole module.
_WRAPPER_PARTS = ("_checkpoint_wrapped_module", "_orig_mod")
_GROUP_OF_INPUT = {"pixel_values": "vision", "input_values": "audio", "input_features": "audio"}


class Layer(NamedTuple):
    """One layer.

    Attributes:
        name: Its FQN as the state dict spells it, without wrappers: "model.layers.7".
        module: What runs there: the layer, or the wrapper around it.
    """

    name: str
    module: nn.Module


class Container(NamedTuple):
    """A list of layers: a ModuleList, or the ModuleDict with indices for keys that a split leaves of one."""

    name: str
    module: nn.Module


def canonical_name(fqn: str) -> str:
    """The FQN without the components that wrappers add, as `state_dict` spells it.

    `named_parameters` and `named_modules` show the wrappers; whoever groups parameters by name, or looks one up in a
    checkpoint, asks with this name.
    """
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPER_PARTS)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of all wrappers."""
    inner = next((module._modules[part] for part in _WRAPPER_PARTS if part in module._modules), None)
    return module if inner is None else unwrapped(inner)


def submodule(model: nn.Module, name: str) -> nn.Module | None:
    """The module of a canonical name, None when there is none.

    Only registered children count: a property that shows one of them under a second name would have it wrapped twice.
    """
    module: nn.Module | None = model
    for part in filter(None, name.split(".")):
        module = unwrapped(module)._modules.get(part) if module is not None else None
    return module


def is_container(module: nn.Module | None) -> bool:
    """Whether a module is a list of modules and not one itself.

    A ModuleDict counts when every key is an index; one with names for keys, as a registry of adapters, does not.
    """
    if isinstance(module, nn.ModuleDict):
        return all(key.isdecimal() for key in module)
    return isinstance(module, nn.ModuleList)


def is_stub(module: nn.Module | None) -> bool:
    """Whether a module stands in for a layer of another pipeline stage."""
    if module is None:
        return True
    ours = isinstance(module, nn.Identity) or type(module).__module__.startswith("ckptx.")
    return ours and next(module.parameters(), None) is None


def layer_groups(model: nn.Module) -> dict[str, list[Layer]]:
    """The layers of a model by group, in the order they are stored.

    The lists are found, in this order: by the registry of multimodal classes; by the table of architectures, for any
    class of transformers; by looking for the list that holds most of the parameters. Both stacks of an
    encoder-decoder are "language". Layers of other pipeline stages are left out.

    Args:
        model: Also one that is wrapped, sharded or a pipeline stage.

    Returns:
        All of `GROUPS`, those without layers empty.

    Raises:
        UnsupportedError: The class is registered and its decoder is at none of the places where it should be, or no
            list of layers is found.
    """
    return {group: [layer for each in found for layer in _layers(each)] for group, found in containers(model).items()}


def is_stage(model: nn.Module) -> bool:
    """Whether a pipeline split took layers away, so that it is no mistake when there is none."""
    found = [each.module for group in containers(model).values() for each in group]
    return any(isinstance(each, nn.ModuleDict) or any(map(is_stub, _items(each))) for each in found)


def containers(model: nn.Module) -> dict[str, list[Container]]:
    """The lists of layers by group; see `layer_groups`.

    Raises:
        UnsupportedError: As there.
    """
    groups: dict[str, list[Container]] = {group: [] for group in GROUPS}
    root = unwrapped(model)
    paths = registered_paths(root)
    if paths is None:
        groups[_group_of(root)] = _by_table(root) or _by_scan(root)
        return groups
    for group, alternatives in paths._asdict().items():
        groups[group] = _first(root, alternatives)
    if not groups["language"]:
        raise UnsupportedError(
            f"{type(root).__name__}: found no list of layers, needed one at {' or '.join(paths.language)}; this "
            "transformers release keeps them elsewhere, use one that ckptx knows"
        )
    return groups


def _first(root: nn.Module, alternatives: tuple[str, ...]) -> list[Container]:
    """The first of several places where there is a list."""
    for name in alternatives:
        found = submodule(root, name)
        if found is not None and is_container(unwrapped(found)):
            return [Container(name, unwrapped(found))]
    return []


def _by_table(root: nn.Module) -> list[Container]:
    """The stacks that the table of architectures names, empty unless every one of them is there."""
    nested = getattr(getattr(root, "config", None), "text_config", None)
    config: dict[str, Any] = {"text_config": {"model_type": getattr(nested, "model_type", None)}} if nested else {}
    for cls in type(root).__mro__:
        row = find_row(cls.__name__) if cls.__module__.startswith("transformers.models.") else None
        known = row.architecture_for(config) if row is not None else None
        if known is None or not known.structure.stacks:
            continue
        found = [each for stack in known.structure.stacks for each in _first(root, (stack.path,))]
        return found if len(found) == len(known.structure.stacks) else []
    return []


def _by_scan(root: nn.Module) -> list[Container]:
    """The list with the most parameters.

    Not the longest: a list of experts may be longer than the list of layers that it is in. Lists inside of a list are
    not looked at.
    """
    found = [each for each in _outermost(root, "") if all(is_stub(item) or _is_block(item) for item in _leaves(each))]
    if not found:
        raise UnsupportedError(
            f"{type(root).__name__}: found no list of layers, needed a ModuleList or a ModuleDict with indices for "
            "keys; such a model can only be used whole, without pipeline stages and activation checkpointing"
        )
    return [
        max(found, key=lambda each: (sum(map(nn.Parameter.numel, each.module.parameters())), len(_items(each.module))))
    ]


def _outermost(module: nn.Module, name: str) -> Iterator[Container]:
    for key, child in module._modules.items():
        if child is None:
            continue
        inner, path = unwrapped(child), f"{name}.{key}" if name else key
        if is_container(inner):
            if len(inner._modules):
                yield Container(path, inner)
        else:
            yield from _outermost(inner, path)


def _is_block(module: nn.Module | None) -> bool:
    """Whether a module is made of others, as a layer is and a projection is not."""
    return module is not None and bool(unwrapped(module)._modules)


def _layers(container: Container) -> Iterator[Layer]:
    """The layers in a list and in the lists inside of it."""
    for key, item in container.module._modules.items():
        name = f"{container.name}.{key}"
        if item is None or is_stub(item):
            continue
        if is_container(unwrapped(item)):
            yield from _layers(Container(name, unwrapped(item)))
        else:
            yield Layer(name, item)


def _leaves(container: Container) -> list[nn.Module]:
    return [layer.module for layer in _layers(container)]


def _items(container: nn.Module) -> list[nn.Module | None]:
    return list(container._modules.values())


def _group_of(root: nn.Module) -> str:
    """The group of a class that has only one: a tower by itself is known by what it takes."""
    config = getattr(root, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return "language"
    return _GROUP_OF_INPUT.get(str(getattr(root, "main_input_name", "")), "language")
