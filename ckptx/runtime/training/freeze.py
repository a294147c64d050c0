"""Freeze parts of a model: its token embeddings, its towers, or its language model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from ckptx.errors import UnsupportedError
from ckptx.runtime.model.layers import canonical_name, find_submodule, layer_groups

_TOWERS = ("vision", "audio")


def freeze(model: nn.Module, parts: Sequence[str]) -> frozenset[str]:
    """Exclude parameters from training, in place.

    Args:
        model: Whole model, before it is parallelized.
        parts: "embeddings": every token embedding, and a head tied to one. "vision", "audio": a tower, which is the
            outermost module that contains layers of this group and none of other groups (`LAYER_GROUPS`). A projector
            to the language model is frozen if it is in that module (`visual.merger` of Qwen2-VL), and trained if it is
            outside (LLaVA). "language": the layers, embeddings and head of the language model.

    Returns:
        Canonical names of the frozen parameters; all names of a tied one.

    Raises:
        UnsupportedError: The model lacks a part, or no parameter would be trained.
    """
    roots = {part: _find_roots(model, part) for part in parts}
    for part, root_names in roots.items():
        if not root_names:
            raise UnsupportedError(f"{type(model).__name__}: has no {part} to freeze; leave {part} out of model.freeze")
    frozen_ids = {
        id(parameter)
        for root_names in roots.values()
        for root in root_names
        for parameter in (find_submodule(model, root) or model).parameters()
    }
    for parameter in model.parameters():
        if id(parameter) in frozen_ids:
            parameter.requires_grad_(False)
    if not any(each.requires_grad for each in model.parameters()):
        raise UnsupportedError(
            f"{type(model).__name__}: no parameter is trained if {', '.join(parts)} are frozen; freeze less"
        )
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(canonical_name(name) for name, each in named if id(each) in frozen_ids)


def _find_roots(model: nn.Module, part: str) -> list[str]:
    """Return the names of the modules that make up a part; "" is the whole model. Empty if the model lacks the part."""
    groups = {group: [layer.name for layer in layers] for group, layers in layer_groups(model).items()}
    if part in _TOWERS:
        others = [name for group, names in groups.items() if group != part for name in names]
        return _find_outermost(groups[part], others)
    towers = [name for group in _TOWERS for name in groups[group]]
    embeddings = _find_token_embeddings(model, _find_outermost(towers, groups["language"]))
    if part == "embeddings":
        return embeddings
    head = model.get_output_embeddings()
    heads = [name for name, module in model.named_modules() if module is head] if head is not None else []
    return [*_find_outermost(groups["language"], towers), *embeddings, *heads]


def _find_outermost(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Return, without duplicates, the outermost module around each name that contains none of the others.

    "" is the whole model.
    """
    outermost: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts) + 1))
        candidates = (each for each in prefixes if not any(_is_inside(other, each) for other in others))
        outermost[next(candidates)] = None
    return list(outermost)


def _find_token_embeddings(model: nn.Module, towers: Collection[str]) -> list[str]:
    """Return the names of the token embeddings outside of towers.

    These are the input embedding of the model, and every `nn.Embedding` with the same number of entries.
    """
    input_embeddings = model.get_input_embeddings()
    names = []
    for name, module in model.named_modules():
        is_token_embedding = module is input_embeddings or (
            isinstance(module, nn.Embedding) and _has_same_vocabulary_size(module, input_embeddings)
        )
        if is_token_embedding and not any(_is_inside(name, tower) for tower in towers):
            names.append(name)
    return names


def _has_same_vocabulary_size(module: nn.Embedding, input_embeddings: nn.Module | None) -> bool:
    """Return True if an embedding has as many entries as the vocabulary, unlike position embeddings."""
    return isinstance(input_embeddings, nn.Embedding) and module.num_embeddings == input_embeddings.num_embeddings


def _is_inside(name: str, module: str) -> bool:
    """Return True if `name` is `module` or below it; "" is the whole model."""
    return not module or name == module or name.startswith(f"{module}.")
