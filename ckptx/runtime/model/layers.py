"""Finds the layers of a model: the modules in its layer lists, never a list itself.

Code that wraps, shards or compiles per layer uses this. A list mistaken for a layer has no attention and no MLP, so
nothing would be wrapped, unnoticed until memory runs out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from ckptx.architecture.class_table import find_class_record
from ckptx.architecture.correction_types import LayersCorrection, filter_by_class
from ckptx.architecture.corrections import corrections_of_class
from ckptx.errors import UnsupportedError

# Groups of layer lists, by what the layers process. A text decoder is "language", and so are both stacks of an
# encoder-decoder.
LAYER_GROUPS = ("language", "vision", "audio")

# Components that wrappers add to an FQN: activation checkpointing, torch.compile of a whole module.
_WRAPPER_PARTS = ("_checkpoint_wrapped_module", "_orig_mod")

# The group of a list of layers, by the words in its name. The innermost word counts: "audio_tower.text_model.layers".
_GROUP_OF_WORD = {
    **dict.fromkeys(("text", "language", "lm", "dit"), "language"),
    **dict.fromkeys(("vision", "visual", "image", "images", "video", "vit", "pixel"), "vision"),
    **dict.fromkeys(("audio", "speech", "acoustic", "acoustics", "codec", "token2wav", "code2wav"), "audio"),
}
# If the name of a list has none of these words, its group follows from the arguments of the model's forward.
_GROUP_OF_INPUT = {
    "input_ids": "language",
    **dict.fromkeys(("pixel_values", "pixel_values_videos"), "vision"),
    **dict.fromkeys(("input_values", "input_features"), "audio"),
}


class Layer(NamedTuple):
    """One layer of a model.

    Attributes:
        name: FQN as in the state dict, without wrappers: "model.layers.7".
        module: The layer, or the wrapper around it.
    """

    name: str
    module: nn.Module


class LayerList(NamedTuple):
    """A list of layers.

    Attributes:
        name: FQN as in the state dict, without wrappers: "model.layers".
        module: A ModuleList, or the ModuleDict with indices as keys that remains after a split; without wrappers.
    """

    name: str
    module: nn.Module


def canonical_name(fqn: str) -> str:
    """Return an FQN without the components that wrappers add: the canonical name, as `state_dict` spells it.

    `named_parameters` and `named_modules` include the wrappers; code that groups parameters by name, or looks one up in
    a checkpoint, uses this name.
    """
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPER_PARTS)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers."""
    inner = next((module._modules[part] for part in _WRAPPER_PARTS if part in module._modules), None)
    return module if inner is None else unwrap(inner)


def find_submodule(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module with a canonical name; None if there is none. "" is the model itself.

    Only registered children count: if a property returned a child under a second name, callers would wrap that child
    twice.
    """
    module: nn.Module | None = model
    for part in filter(None, name.split(".")):
        module = unwrap(module)._modules.get(part) if module is not None else None
    return module


def find_layers_row(model: nn.Module) -> LayersCorrection | None:
    """Return the row of `ckptx.architecture.corrections` with the layer lists of a model's class; None without one.

    The row may belong to the nearest class from which the class is derived (FSDP2 derives one). A text-only class has
    no row; its stacks are in the table of architectures. That table has the decoder of a multimodal class too, but no
    tower, because only a decoder is split over pipeline stages.
    """
    for cls in type(model).__mro__:
        rows = filter_by_class(corrections_of_class(cls.__qualname__, cls.__module__).layers, cls.__qualname__)
        if rows:
            return rows[0]
    return None


def is_layer_list(module: nn.Module | None) -> bool:
    """Return True if a module is a list of modules.

    A ModuleDict counts if every key is an index, or if it is empty; one with names as keys, such as a registry of
    adapters, does not.
    """
    if isinstance(module, nn.ModuleDict):
        return all(key.isdecimal() for key in module)
    return isinstance(module, nn.ModuleList)


def is_stub(module: nn.Module | None) -> bool:
    """Return True if a module is None or may be a placeholder for a layer of another pipeline stage.

    A placeholder is an `nn.Identity`, or a module class of ckptx, without parameters.
    """
    if module is None:
        return True
    is_placeholder = isinstance(module, nn.Identity) or type(module).__module__.startswith("ckptx.")
    return is_placeholder and next(module.parameters(), None) is None


def has_stubs(model: nn.Module) -> bool:
    """Return True if a module of the model is a placeholder for a part of another pipeline stage.

    `nn.Identity` does not count, because models contain it for other reasons, too.
    """
    return any(is_stub(module) and not isinstance(module, nn.Identity) for module in model.modules())


def layer_groups(model: nn.Module) -> dict[str, list[Layer]]:
    """Return the layers of a model by group, in the order in which they are stored; see `find_layer_lists`.

    Args:
        model: Model, which may be wrapped, sharded or a pipeline stage.

    Returns:
        All of `LAYER_GROUPS`, empty for a group without layers. Layers of other pipeline stages are left out.

    Raises:
        UnsupportedError: The decoder is at none of the paths in the row of the class (see `find_layers_row`), or no
            list of layers is found.
    """
    return {
        group: [layer for each in found for layer in _iter_layers(each)]
        for group, found in find_layer_lists(model).items()
    }


def is_stage(model: nn.Module) -> bool:
    """Return True if a pipeline split removed layers, so that a model without layers is valid.

    Only the lists of the decoder are checked; those of the towers only if the model has no decoder.

    Raises:
        UnsupportedError: See `layer_groups`.
    """
    groups = find_layer_lists(model)
    lists = groups["language"] or [*groups["vision"], *groups["audio"]]
    modules = [each.module for each in lists]
    return any(isinstance(each, nn.ModuleDict) or any(map(is_stub, _list_items(each))) for each in modules)


def find_layer_lists(model: nn.Module) -> dict[str, list[LayerList]]:
    """Return the lists of layers by group.

    The decoder is located by the row of the class (see `find_layers_row`), or by its entry in the table of
    architectures; towers are located by the row. Every other list is found by its structure (`_is_layer`): second
    stacks of a tower, Q-Formers, depth decoders, towers of classes without a row. With neither a row nor an entry, the
    list with the most parameters is the decoder.

    Both stacks of an encoder-decoder are "language". Every other list has the group that a word in its name states. If
    there is no such word, it is "language" if its parent module has a list of the decoder, or if the model has inputs
    of no other modality, or of several; else it belongs to that other modality, as a Q-Former does.

    Raises:
        UnsupportedError: See `layer_groups`.
    """
    root = unwrap(model)
    groups = _lists_from_corrections(root)
    if not groups["language"]:
        is_encoder_decoder = bool(getattr(getattr(root, "config", None), "is_encoder_decoder", False))
        for each in _lists_from_table(root):
            groups["language" if is_encoder_decoder else _main_list_group(root, each.name)].append(each)
    known_lists = [each for found in groups.values() for each in found]
    other_lists = [
        each for each in _lists_by_structure(root) if not any(_overlap(each.name, other.name) for other in known_lists)
    ]
    if not known_lists:
        main_list = _largest_list(
            [each for each in other_lists if _group_from_name(each.name) in (None, "language")] or other_lists, root
        )
        groups[_main_list_group(root, main_list.name)].append(main_list)
        other_lists = [each for each in other_lists if each is not main_list]
    decoders = {_parent_path(each.name) for each in groups["language"]}
    for each in other_lists:
        groups[_other_list_group(root, each.name, decoders)].append(each)
    return groups


def _lists_from_corrections(root: nn.Module) -> dict[str, list[LayerList]]:
    """Return the lists in the row of the class, by group; all groups are empty for a class without a row.

    Raises:
        UnsupportedError: No decoder is at the paths in the row.
    """
    groups: dict[str, list[LayerList]] = {group: [] for group in LAYER_GROUPS}
    row = find_layers_row(root)
    if row is None:
        return groups
    for group in LAYER_GROUPS:
        groups[group] = _first_existing_list(root, getattr(row, group))
    if not groups["language"]:
        raise UnsupportedError(
            f"{type(root).__name__}: expected its list of layers at {' or '.join(row.language)}; this "
            "transformers release has it elsewhere, use one that ckptx supports"
        )
    return groups


def _first_existing_list(root: nn.Module, paths: tuple[str, ...]) -> list[LayerList]:
    """Return the list at the first of several paths that has one; empty if none has."""
    for name in paths:
        found = find_submodule(root, name)
        if found is not None and is_layer_list(unwrap(found)):
            return [LayerList(name, unwrap(found))]
    return []


def _lists_from_table(root: nn.Module) -> list[LayerList]:
    """Return the stacks in the table of architectures; empty unless all of them exist."""
    text_config = getattr(getattr(root, "config", None), "text_config", None)
    config: dict[str, Any] = (
        {"text_config": {"model_type": getattr(text_config, "model_type", None)}} if text_config else {}
    )
    for cls in type(root).__mro__:
        row = find_class_record(cls.__name__) if cls.__module__.startswith("transformers.models.") else None
        architecture = row.architecture_for(config) if row is not None else None
        if architecture is None or not architecture.structure.stacks:
            continue
        lists = [each for stack in architecture.structure.stacks for each in _first_existing_list(root, (stack.path,))]
        return lists if len(lists) == len(architecture.structure.stacks) else []
    return []


def _lists_by_structure(root: nn.Module) -> list[LayerList]:
    """Return the outermost lists whose items all have children and of which at least one item is a layer."""
    found = ((each, [layer.module for layer in _iter_layers(each)]) for each in _outermost_lists(root, ""))
    return [each for each, items in found if any(map(_is_layer, items)) and all(map(_is_block, items))]


def _is_layer(module: nn.Module) -> bool:
    """Return True if transformers itself would checkpoint a module, or if it contains attention.

    Layers of some towers, such as Mllama's, contain attention and are no `GradientCheckpointingLayer` of transformers.
    Modules of neither kind are small or made of convolutions: feature mergers, codecs, necks of detectors.
    """
    inner = unwrap(module)
    if any(each.__name__ == "GradientCheckpointingLayer" for each in type(inner).__mro__):
        return True
    return any("attention" in type(each).__name__.lower() for each in inner.modules() if each is not inner)


def _largest_list(lists: list[LayerList], root: nn.Module) -> LayerList:
    """Return the list with the most parameters: one of `lists`, or if that is empty, of all whose items have children.

    The longest would be wrong: a list of experts may be longer than the list of layers that contains it.

    Raises:
        UnsupportedError: The model has no such list.
    """
    lists = lists or [
        each
        for each in _outermost_lists(root, "")
        if all(is_stub(item) or _is_block(item) for item in _layer_modules(each))
    ]
    if not lists:
        raise UnsupportedError(
            f"{type(root).__name__}: cannot find a list of layers, expected a ModuleList or a ModuleDict with indices "
            "as keys; use the model without pipeline stages and activation checkpointing"
        )
    return max(
        lists, key=lambda each: (sum(map(nn.Parameter.numel, each.module.parameters())), len(_list_items(each.module)))
    )


def _outermost_lists(module: nn.Module, name: str) -> Iterator[LayerList]:
    """Yield the lists of modules in a module, without empty ones and lists in other lists; `name` is its name."""
    for key, child in module._modules.items():
        if child is None:
            continue
        inner, path = unwrap(child), f"{name}.{key}" if name else key
        if is_layer_list(inner):
            if len(inner._modules):
                yield LayerList(path, inner)
        else:
            yield from _outermost_lists(inner, path)


def _is_block(module: nn.Module | None) -> bool:
    """Return True if a module has children, as a layer does and a projection does not."""
    return module is not None and bool(unwrap(module)._modules)


def _iter_layers(container: LayerList) -> Iterator[Layer]:
    """Yield the layers in a list and in the lists inside it, without those of other pipeline stages."""
    for key, item in container.module._modules.items():
        name = f"{container.name}.{key}"
        if item is None or is_stub(item):
            continue
        if is_layer_list(unwrap(item)):
            yield from _iter_layers(LayerList(name, unwrap(item)))
        else:
            yield Layer(name, item)


def _layer_modules(container: LayerList) -> list[nn.Module]:
    return [layer.module for layer in _iter_layers(container)]


def _list_items(container: nn.Module) -> list[nn.Module | None]:
    return list(container._modules.values())


def _parent_path(name: str) -> str:
    return name.rpartition(".")[0]


def _overlap(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")


def _main_list_group(root: nn.Module, name: str) -> str:
    """Return the group of the decoder, or of the main list of a model without one.

    It is the group that its name states; else "language" for a model with text inputs; else the group of the model's
    first input, or "language" if no input is known.
    """
    inputs = _input_groups(root)
    return _group_from_name(name) or ("language" if "language" in inputs else next(iter(inputs), "language"))


def _other_list_group(root: nn.Module, name: str, decoders: Iterable[str]) -> str:
    """Return the group of a list that is not the main one; see `find_layer_lists`.

    Args:
        root: Model without wrappers.
        name: Name of the list.
        decoders: Names of the modules that hold the lists of the decoder.
    """
    named_group = _group_from_name(name)
    if named_group is not None or _parent_path(name) in decoders:
        return named_group or "language"
    modalities = [each for each in _input_groups(root) if each != "language"]
    return modalities[0] if len(modalities) == 1 else "language"


def _group_from_name(name: str) -> str | None:
    """Return the group by the words in a name, the innermost component first; None if it has none of them."""
    parts = (part.lower().split("_") for part in reversed(name.split(".")))
    return next((_GROUP_OF_WORD[word] for words in parts for word in words if word in _GROUP_OF_WORD), None)


def _input_groups(root: nn.Module) -> list[str]:
    """Return the groups that a model has inputs for, by the arguments of its class's forward."""
    parameters = inspect.signature(type(root).forward).parameters
    return list(dict.fromkeys(group for name, group in _GROUP_OF_INPUT.items() if name in parameters))
