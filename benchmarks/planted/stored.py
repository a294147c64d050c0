"""What can be wrong in a checkpoint: changes of its tensors, named by how their names end, and of its config.

A shape in a comment is that of the tensor; `H` heads, `D` features of a head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.planted.defect import InStored
from benchmarks.planted.models import Config, Tensors

Change = Callable[[torch.Tensor], torch.Tensor]


def named(tensors: Tensors, end: str) -> list[str]:
    """Names that end like this; `end` is a regular expression.

    Raises:
        KeyError: There is none, so that no defect is planted nowhere.
    """
    found = [name for name in tensors if re.search(f"{end}$", name)]
    if not found:
        raise KeyError(end)
    return found


def changed(end: str, change: Change) -> InStored:
    """Every tensor whose name ends like this becomes something else of the same shape."""

    def plant(tensors: Tensors, config: Config) -> None:
        for name in named(tensors, end):
            before = tensors[name]
            tensors[name] = change(before).reshape(before.shape).clone()

    return plant


def scaled(end: str, factor: float) -> InStored:
    """Times a factor."""
    return changed(end, lambda tensor: tensor * factor)


def zeroed(end: str) -> InStored:
    """All zeros."""
    return changed(end, torch.zeros_like)


def element_scaled(end: str, factor: float) -> InStored:
    """The largest element times a factor."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.clone()
        found.view(-1)[found.abs().argmax()] *= factor
        return found

    return changed(end, change)


def exchanged(a: str, b: str) -> InStored:
    """Two groups of tensors take each other's place; a group is all tensors with a part of their name."""

    def plant(tensors: Tensors, config: Config) -> None:
        names = [name for name in tensors if a in name]
        if not names:
            raise KeyError(a)
        for name in names:
            other = name.replace(a, b)
            tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()

    return plant


def setting(key: str, value: Any) -> InStored:
    """A key of the config, dotted where it is in a part of it."""

    def plant(tensors: Tensors, config: Config) -> None:
        *path, last = key.split(".")
        for part in path:
            config = config[part]
        config[last] = value

    return plant


def together(*plants: InStored) -> InStored:
    """One after the other."""

    def plant(tensors: Tensors, config: Config) -> None:
        for each in plants:
            each(tensors, config)

    return plant


# ------------------------------------------------------------------------------------------------- changes of a tensor


def rows_exchanged(a: int, b: int, width: int = 1) -> Change:
    """Blocks of rows, such as heads, take each other's place."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        blocks = list(tensor.split(width))
        blocks[a], blocks[b] = blocks[b], blocks[a]
        return torch.cat(blocks)

    return change


def parts(sizes: Sequence[int], order: Sequence[int]) -> Change:
    """Rows lie in parts of these sizes, and the parts in another order."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        split = tensor.split(list(sizes))
        return torch.cat([split[index] for index in order])

    return change


def regrouped(sizes: Sequence[int], order: Sequence[int]) -> Change:
    """Rows seen as a block of several dims, whose dims are put into another order.

    Example:
        [q|k|v] of each head, (H * 3 * D, ..), becomes [q of all heads|k|v]: `regrouped((H, 3, D), (1, 0, 2))`.
    """

    def change(tensor: torch.Tensor) -> torch.Tensor:
        rest = range(len(sizes), len(sizes) + tensor.dim() - 1)
        return tensor.reshape(*sizes, *tensor.shape[1:]).permute(*order, *rest)

    return change


def of_each(groups: int, change: Change) -> Change:
    """The same change inside of each of so many groups of rows."""
    return lambda tensor: torch.cat([change(group) for group in tensor.chunk(groups)])


def by_part(groups: int, sizes: Sequence[int]) -> Change:
    """Rows lie in groups of parts; they become parts of groups: all first parts, then all second ones."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        split = [group.split(list(sizes)) for group in tensor.chunk(groups)]
        return torch.cat([group[part] for part in range(len(sizes)) for group in split])

    return change


def of_columns(change: Change) -> Change:
    """The same change of columns."""
    return lambda tensor: change(tensor.t()).reshape(tensor.t().shape).t()


def flipped(dim: int) -> Change:
    """In the opposite order along a dim."""
    return lambda tensor: tensor.flip(dim)


def rolled(by: int) -> Change:
    """Every row so many places further."""
    return lambda tensor: tensor.roll(by, 0)


def read_as(*order: int) -> Change:
    """Written with its dims in another order, and read as if they were not."""
    return lambda tensor: tensor.permute(*order).contiguous()


def rounded(dtype: torch.dtype) -> Change:
    """To a dtype and back."""
    return lambda tensor: tensor.to(dtype).to(tensor.dtype)


def to_int8(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to 255 steps in each row."""
    step = tensor.abs().amax(1, keepdim=True) / 127
    return (tensor / step).round() * step


def rows_set(begin: int, end: int | None, change: Change) -> Change:
    """Some rows."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.clone()
        found[begin:end] = change(found[begin:end])
        return found

    return changed


# ------------------------------------------------------------------------------------------------ whole models at once


def layers_in_order_of_text(tensors: Tensors, config: Config) -> None:
    """0, 1, 10, 11, 2, ..: layers as a listing of a directory has them."""
    count = config["num_hidden_layers"]
    order = sorted(range(count), key=str)
    before = dict(tensors)
    for name in named(tensors, r"\.layers\.\d+\..*"):
        at = int(name.split(".layers.")[1].split(".")[0])
        tensors[name] = before[name.replace(f".layers.{at}.", f".layers.{order[at]}.")]


def head_of_its_own(change: Change) -> InStored:
    """A tied model whose output head is stored beside its embedding, with other values."""

    def plant(tensors: Tensors, config: Config) -> None:
        tensors["lm_head.weight"] = change(tensors["model.embed_tokens.weight"]).clone()

    return plant


def head_is_the_embedding(tensors: Tensors, config: Config) -> None:
    """An untied model whose output head is a copy of its embedding."""
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def head_dropped(tensors: Tensors, config: Config) -> None:
    """An untied model stored as a tied one."""
    del tensors["lm_head.weight"]
    config["tie_word_embeddings"] = True
