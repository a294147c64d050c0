"""Which layers of a model are alike, and how many of them can be left out so that the rest says what all would take.

Layers are compared as they are built: their modules, tensors and plain attributes, and what lists of the config say of
each. A row of layers in which the same pattern comes again and again (one kind, or five with a window and one without)
is as good with fewer of its periods. What is found here is tried before it is believed: see `extrapolation`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from ckptx.runtime.model.layers import Container, containers

_LONGEST = 12  # layers of a pattern
_LEAST = 3  # layers that are left of a row: FSDP2 gathers the next one while one computes
ABSENT = "absent"  # of a layer that a table says nothing of
_LAYERS = re.compile(r"layer|block|ind(ex|ic)|idx")  # in names of config keys that have numbers of layers
_PLAIN = (bool, int, float, str, type(None))
_NUMBERS = ("idx", "index", "layer_id", "layer_number", "layer_nr")  # attributes that say which layer one is


@dataclass(frozen=True, slots=True)
class RepeatedLayers:
    """Layers of which some periods can be left out.

    Attributes:
        path: Of their list: "model.layers".
        at: The first that can be left out.
        period: How many go together.
        most: How many periods can be left out; at least one more than are tried.
    """

    path: str
    at: int
    period: int
    most: int

    @property
    def stop(self) -> int:
        """The first layer behind those that can be left out."""
        return self.at + self.period * self.most

    def left_out(self, extra: int) -> range:
        """The layers that are left out where `extra` periods more than necessary stay."""
        return range(self.at, self.stop - self.period * extra)


def layer_kinds(model: nn.Module, homes: Mapping[str, str]) -> dict[str, list[Hashable]]:
    """What each layer of a model is, by list; lists of layers that share a parameter are left out.

    Two layers for which this gives the same value compute in the same way, as far as can be seen.

    Args:
        model: Whole, before anything was made parallel.
        homes: Of each list, the nested config that says how long it is, as `config_parts` names it.
    """
    nested = dict(config_parts(model.config.to_dict()))
    owners = Counter(id(tensor) for tensor in _tensors(model))
    found: dict[str, list[Hashable]] = {}
    for container in lists_of_layers(model):
        layers = list(container.module.children())
        if any(owners[id(tensor)] > 1 for layer in layers for tensor in _tensors(layer)):
            continue
        said = list(by_layer(nested.get(homes.get(container.name, ""), {}), len(layers)).values())
        found[container.name] = [
            (_kind(layer), *(repr(each[number]) for each in said)) for number, layer in enumerate(layers)
        ]
    return found


def lists_of_layers(model: nn.Module) -> Iterator[Container]:
    """Every list of layers of a model."""
    return chain.from_iterable(containers(model).values())


def config_parts(config: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The contents of a config.json and of the configs nested in it, each with its dotted name; the whole has none."""
    yield name, config  # type: ignore[misc]  # a dict, as JSON has it
    for key, value in config.items():
        if isinstance(value, dict) and "model_type" in value:
            yield from config_parts(value, f"{name}.{key}" if name else key)


def by_layer(part: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    """What a config says of each of so many layers, by its key.

    It may be a list as long as that of the layers, a table by the number of a layer, or a list of such numbers.
    """
    found: dict[str, list[Any]] = {}
    for key, value in sorted(part.items()):
        if isinstance(value, (list, tuple)) and len(value) == count:
            found[key] = list(value)
        elif isinstance(value, dict) and value and all(_is_of_layer(*each, count) for each in value.items()):
            table = {int(number): each for number, each in value.items()}
            found[key] = [table.get(number, ABSENT) for number in range(count)]
        elif isinstance(value, (list, tuple)) and value and _LAYERS.search(key) and _are_layers(value, count):
            found[key] = [number in value for number in range(count)]
    return found


def as_before(value: Any, said: Sequence[Any], count: int) -> Any:
    """What `by_layer` found, of fewer layers, in the form that it had.

    Args:
        value: What was in the config.
        said: Of each layer that is left.
        count: Of layers that there were.
    """
    if isinstance(value, dict):
        return {number: each for number, each in enumerate(said) if each is not ABSENT}
    return list(said) if len(value) == count else [number for number, is_in in enumerate(said) if is_in]


def repeat_in(path: str, kinds: Sequence[Hashable], first: int, stop: int, runs: int) -> RepeatedLayers | None:
    """The layers from `first` to `stop` of a list that can be left out; None where that would save nothing.

    Args:
        path: Of the list.
        kinds: Of all its layers.
        first: As above.
        stop: As above.
        runs: How many models with fewer layers will run.
    """
    found, saved = None, 0
    for period in range(1, min(_LONGEST, (stop - first) // runs) + 1):
        begin = end = first
        for number in range(first, stop - period + 1):
            is_same = number < stop - period and kinds[number] == kinds[number + period]
            if is_same:
                end = number + 1
                continue
            alike = end + period - begin if end > begin else 0
            stay = alike % period + max(2 * period, _LEAST)
            most = (alike - stay) // period
            each = stop - first - most * period  # layers of the smallest model
            if most >= runs and stop - first - runs * (each + period) > saved:
                saved = stop - first - runs * (each + period)
                found = RepeatedLayers(path, begin + -(-stay // 2), period, most)
            begin = end = number + 1
    return found


def _tensors(module: nn.Module) -> Iterator[Any]:
    for _, each in module.named_modules(remove_duplicate=False):
        yield from (tensor for tensor in each._parameters.values() if tensor is not None)


def _are_layers(numbers: Sequence[Any], count: int) -> bool:
    return all(type(each) is int and 0 <= each < count for each in numbers) and list(numbers) == sorted(set(numbers))


def _is_of_layer(key: Any, said: Any, count: int) -> bool:
    is_number = isinstance(key, int) or (isinstance(key, str) and key.isdecimal())
    return isinstance(said, dict) and is_number and 0 <= int(key) < count


def _kind(layer: nn.Module) -> Hashable:
    return tuple(
        (name, type(module).__qualname__, *_attributes(vars(module)), *_shapes(module._parameters, module._buffers))
        for name, module in layer.named_modules(remove_duplicate=False)
    )


def _attributes(values: Mapping[str, Any]) -> Iterator[Hashable]:
    for name, value in sorted(values.items()):
        if isinstance(value, _PLAIN) and not name.startswith("_") and not any(each in name for each in _NUMBERS):
            yield name, type(value).__name__, value


def _shapes(*tensors: Mapping[str, Any]) -> Iterator[Hashable]:
    pairs: Iterable[tuple[str, Any]] = (pair for each in tensors for pair in each.items())
    for name, tensor in pairs:
        if tensor is not None:
            yield name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad
