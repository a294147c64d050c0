"""Defects of a checkpoint: changes of tensors, selected by the end of their names, and of its config.

In shapes, `H` is the number of heads and `D` the number of features of a head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.injected.defect import CheckpointInjection
from benchmarks.injected.models import Config, Tensors

Change = Callable[[torch.Tensor], torch.Tensor]


def matching_names(tensors: Tensors, end: str) -> list[str]:
    """Return the names whose end matches the regular expression `end`.

    Raises:
        KeyError: If there is none.
    """
    found = [name for name in tensors if re.search(f"{end}$", name)]
    if not found:
        raise KeyError(end)
    return found


def transform(end: str, change: Change) -> CheckpointInjection:
    """Change every tensor whose name ends with the regular expression `end`; the shape remains the same."""

    def inject(tensors: Tensors, config: Config) -> None:
        for name in matching_names(tensors, end):
            before = tensors[name]
            tensors[name] = change(before).reshape(before.shape).clone()

    return inject


def scale(end: str, factor: float) -> CheckpointInjection:
    """Multiply tensors by a factor."""
    return transform(end, lambda tensor: tensor * factor)


def zero(end: str) -> CheckpointInjection:
    """Set tensors to zero."""
    return transform(end, torch.zeros_like)


def scale_element(end: str, factor: float) -> CheckpointInjection:
    """Multiply the element with the largest magnitude by a factor."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.clone()
        found.view(-1)[found.abs().argmax()] *= factor
        return found

    return transform(end, change)


def exchange(a: str, b: str) -> CheckpointInjection:
    """Exchange each tensor whose name contains `a` with the one that has `b` in its place."""

    def inject(tensors: Tensors, config: Config) -> None:
        names = [name for name in tensors if a in name]
        if not names:
            raise KeyError(a)
        for name in names:
            other = name.replace(a, b)
            tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()

    return inject


def set_config(key: str, value: Any) -> CheckpointInjection:
    """Set a key of the config; dots separate nested keys."""

    def inject(tensors: Tensors, config: Config) -> None:
        *path, last = key.split(".")
        for part in path:
            config = config[part]
        config[last] = value

    return inject


def combine(*injections: CheckpointInjection) -> CheckpointInjection:
    """Inject several defects in order."""

    def inject(tensors: Tensors, config: Config) -> None:
        for each in injections:
            each(tensors, config)

    return inject


# ------------------------------------------------------------------------------------------------- changes of a tensor


def exchange_rows(a: int, b: int, width: int = 1) -> Change:
    """Exchange two blocks of `width` rows, such as heads."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        blocks = list(tensor.split(width))
        blocks[a], blocks[b] = blocks[b], blocks[a]
        return torch.cat(blocks)

    return change


def reorder_parts(sizes: Sequence[int], order: Sequence[int]) -> Change:
    """Split rows into parts with the given sizes, and reorder the parts."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        split = tensor.split(list(sizes))
        return torch.cat([split[index] for index in order])

    return change


def permute_rows(sizes: Sequence[int], order: Sequence[int]) -> Change:
    """View the rows as a block with several dimensions, and permute these dimensions.

    Example:
        `permute_rows((H, 3, D), (1, 0, 2))` changes [q|k|v] of each head, (H * 3 * D, ..), to [q of all heads|k|v].
    """

    def change(tensor: torch.Tensor) -> torch.Tensor:
        rest = range(len(sizes), len(sizes) + tensor.dim() - 1)
        return tensor.reshape(*sizes, *tensor.shape[1:]).permute(*order, *rest)

    return change


def map_groups(groups: int, change: Change) -> Change:
    """Apply a change to each of `groups` groups of rows."""
    return lambda tensor: torch.cat([change(group) for group in tensor.chunk(groups)])


def group_by_part(groups: int, sizes: Sequence[int]) -> Change:
    """Reorder rows from groups of parts to parts of groups: all first parts, then all second parts, and so on."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        split = [group.split(list(sizes)) for group in tensor.chunk(groups)]
        return torch.cat([group[part] for part in range(len(sizes)) for group in split])

    return change


def map_columns(change: Change) -> Change:
    """Apply a change to columns instead of rows."""
    return lambda tensor: change(tensor.t()).reshape(tensor.t().shape).t()


def flip(dim: int) -> Change:
    """Reverse the order along a dimension."""
    return lambda tensor: tensor.flip(dim)


def roll(by: int) -> Change:
    """Shift the rows by `by` positions, cyclically."""
    return lambda tensor: tensor.roll(by, 0)


def misread_order(*order: int) -> Change:
    """Permute the dimensions, and read the result with the original shape."""
    return lambda tensor: tensor.permute(*order).contiguous()


def round_to(dtype: torch.dtype) -> Change:
    """Round to a dtype and back."""
    return lambda tensor: tensor.to(dtype).to(tensor.dtype)


def round_to_int8(tensor: torch.Tensor) -> torch.Tensor:
    """Round each row to 255 levels."""
    step = tensor.abs().amax(1, keepdim=True) / 127
    return (tensor / step).round() * step


def transform_rows(begin: int, end: int | None, change: Change) -> Change:
    """Change the rows from `begin` to `end` (exclusive; None for all rows from `begin` on)."""

    def change_part(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.clone()
        found[begin:end] = change(found[begin:end])
        return found

    return change_part


# ------------------------------------------------------------------------------------------------ whole models at once


def sort_layers_as_strings(tensors: Tensors, config: Config) -> None:
    """Order layers as strings: 0, 1, 10, 11, 2, and so on."""
    count = config["num_hidden_layers"]
    order = sorted(range(count), key=str)
    before = dict(tensors)
    for name in matching_names(tensors, r"\.layers\.\d+\..*"):
        layer = int(name.split(".layers.")[1].split(".")[0])
        tensors[name] = before[name.replace(f".layers.{layer}.", f".layers.{order[layer]}.")]


def untie_head(change: Change) -> CheckpointInjection:
    """Store a separate output head with different values in a tied model."""

    def inject(tensors: Tensors, config: Config) -> None:
        tensors["lm_head.weight"] = change(tensors["model.embed_tokens.weight"]).clone()

    return inject


def copy_embedding_to_head(tensors: Tensors, config: Config) -> None:
    """Replace the output head of an untied model by a copy of its embedding."""
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def drop_head(tensors: Tensors, config: Config) -> None:
    """Store an untied model as a tied one, without its output head."""
    del tensors["lm_head.weight"]
    config["tie_word_embeddings"] = True
