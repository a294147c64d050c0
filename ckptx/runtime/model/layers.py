"""Finds the layers of a model: each one by itself, never the list that holds them.

Who wraps, shards or compiles layer by layer asks here. A list taken for a layer has no attention and no MLP, so that
nothing would be wrapped and nobody would notice before memory runs out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from ckptx.architecture.correction_rows import LayersRow, of_class
from ckptx.architecture.corrections import corrections_of_class
from ckptx.architecture.table import find_row
from ckptx.errors import UnsupportedError

GROUPS = ("language", "vision", "audio")

# Components of an FQN that a wrapper adds: activation checkpointing, torch.compile of a whole module.
_WRAPPER_PARTS = ("_checkpoint_wrapped_module", "_orig_mod")

# What a list of layers is for, by the words in its name. The innermost word counts: "audio_tower.text_model.layers".
_GROUP_OF_WORD = {
    **dict.fromkeys(("text", "language", "lm", "dit"), "language"),
    **dict.fromkeys(("vision", "visual", "image", "images", "video", "vit", "pixel"), "vision"),
    **dict.fromkeys(("audio", "speech", "acoustic", "acoustics", "codec", "token2wav", "code2wav"), "audio"),
}
# And, where names say nothing, by what the model is given.
_GROUP_OF_INPUT = {
    "input_ids": "language",
    **dict.fromkeys(("pixel_values", "pixel_values_videos"), "vision"),
    **dict.fromkeys(("input_values", "input_features"), "audio"),
}


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


def registered_paths(model: nn.Module) -> LayersRow | None:
    """The row of a model's class, or of the nearest class that it was derived from (as FSDP2 derives one).

    A text-only class has none, its stacks are in the table of architectures. That table knows the decoder of a
    multimodal class too, but no tower, for only a decoder is split over pipeline stages. A row also makes it an error
    when a decoder is not where it should be.
    """
    for cls in type(model).__mro__:
        rows = of_class(corrections_of_class(cls.__qualname__, cls.__module__).layers, cls.__qualname__)
        if rows:
            return rows[0]
    return None


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


def has_stubs(model: nn.Module) -> bool:
    """Whether something in a model stands in for a part of another pipeline stage."""
    return any(is_stub(module) and not isinstance(module, nn.Identity) for module in model.modules())


def layer_groups(model: nn.Module) -> dict[str, list[Layer]]:
    """The layers of a model by group, in the order they are stored; see `containers`.

    Args:
        model: Also one that is wrapped, sharded or a pipeline stage.

    Returns:
        All of `GROUPS`, those without layers empty. Layers of other pipeline stages are left out.

    Raises:
        UnsupportedError: The class has a row and its decoder is at none of the places where that says it is, or no
            list of layers is found.
    """
    return {group: [layer for each in found for layer in _layers(each)] for group, found in containers(model).items()}


def is_stage(model: nn.Module) -> bool:
    """Whether a pipeline split took layers away, so that it is no mistake when there is none."""
    groups = containers(model)
    lists = groups["language"] or [*groups["vision"], *groups["audio"]]
    found = [each.module for each in lists]
    return any(isinstance(each, nn.ModuleDict) or any(map(is_stub, _items(each))) for each in found)


def containers(model: nn.Module) -> dict[str, list[Container]]:
    """The lists of layers by group.

    Where the class has a row among the corrections or is in the table of architectures, these say where its decoder
    is, and the row its towers. Every other list is found by its form (`_is_layer`): second stacks of a tower,
    Q-Formers, depth decoders, towers of classes that no row names. Without a row, the largest is the decoder.

    Both stacks of an encoder-decoder are "language". A list that is in no tower belongs to the decoder if it lies
    beside it, else to what the model takes besides text, as a Q-Former does.

    Raises:
        UnsupportedError: As for `layer_groups`.
    """
    root = unwrapped(model)
    groups = _registered(root)
    if not groups["language"]:
        is_pair = bool(getattr(getattr(root, "config", None), "is_encoder_decoder", False))
        for each in _by_table(root):
            groups["language" if is_pair else _group_of_main(root, each.name)].append(each)
    known = [each for found in groups.values() for each in found]
    others = [each for each in _by_form(root) if not any(_overlap(each.name, other.name) for other in known)]
    if not known:
        main = _largest([each for each in others if _group_of_words(each.name) in (None, "language")] or others, root)
        groups[_group_of_main(root, main.name)].append(main)
        others = [each for each in others if each is not main]
    decoders = {_parent(each.name) for each in groups["language"]}
    for each in others:
        groups[_group_of_list(root, each.name, decoders)].append(each)
    return groups


def _registered(root: nn.Module) -> dict[str, list[Container]]:
    """What the row of the class names; all groups are empty for a class that has none."""
    groups: dict[str, list[Container]] = {group: [] for group in GROUPS}
    paths = registered_paths(root)
    if paths is None:
        return groups
    for group in GROUPS:
        groups[group] = _first(root, getattr(paths, group))
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


def _by_form(root: nn.Module) -> list[Container]:
    """The lists of modules with parts of which one at least is a layer; lists inside of a list are not looked at."""
    found = ((each, [layer.module for layer in _layers(each)]) for each in _outermost(root, ""))
    return [each for each, items in found if any(map(_is_layer, items)) and all(map(_is_block, items))]


def _is_layer(module: nn.Module) -> bool:
    """Whether transformers itself would checkpoint a module, or it has attention in it.

    Not every tower is of the first kind (Mllama's is not), and what is of neither is small or made of convolutions:
    mergers of features, codecs, necks of detectors.
    """
    inner = unwrapped(module)
    if any(each.__name__ == "GradientCheckpointingLayer" for each in type(inner).__mro__):
        return True
    return any("attention" in type(each).__name__.lower() for each in inner.modules() if each is not inner)


def _largest(found: list[Container], root: nn.Module) -> Container:
    """The list with the most parameters: one of those found, or if there are none, of all whose items have parts.

    Not the longest: a list of experts may be longer than the list of layers that it is in.
    """
    found = found or [
        each for each in _outermost(root, "") if all(is_stub(item) or _is_block(item) for item in _leaves(each))
    ]
    if not found:
        raise UnsupportedError(
            f"{type(root).__name__}: found no list of layers, needed a ModuleList or a ModuleDict with indices for "
            "keys; such a model can only be used whole, without pipeline stages and activation checkpointing"
        )
    return max(
        found, key=lambda each: (sum(map(nn.Parameter.numel, each.module.parameters())), len(_items(each.module)))
    )


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


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _overlap(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")


def _group_of_main(root: nn.Module, name: str) -> str:
    """The group of the list that a class is about: a tower by itself is known by what it takes."""
    inputs = _inputs(root)
    return _group_of_words(name) or ("language" if "language" in inputs else next(iter(inputs), "language"))


def _group_of_list(root: nn.Module, name: str, decoders: Iterable[str]) -> str:
    """The group of any other list."""
    named = _group_of_words(name)
    if named is not None or _parent(name) in decoders:
        return named or "language"
    senses = [each for each in _inputs(root) if each != "language"]
    return senses[0] if len(senses) == 1 else "language"


def _group_of_words(name: str) -> str | None:
    parts = (part.lower().split("_") for part in reversed(name.split(".")))
    return next((_GROUP_OF_WORD[word] for words in parts for word in words if word in _GROUP_OF_WORD), None)


def _inputs(root: nn.Module) -> list[str]:
    """The groups that a model has inputs for, by the arguments of its class's forward."""
    given = inspect.signature(type(root).forward).parameters
    return list(dict.fromkeys(group for name, group in _GROUP_OF_INPUT.items() if name in given))
