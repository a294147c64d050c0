"""Find layers of a model that repeat, and how many of them can be left out without losing information.

Layers are compared as built: their modules, tensors and plain attributes, and the per-layer lists of the config. A
sequence of layers with a periodic pattern (one kind, or five with a window and one without) can be shortened by whole
periods. The result is validated before use: see `extrapolation`.
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

_LONGEST = 12  # maximum period, in layers
_LEAST = 3  # minimum number of layers that stay: FSDP2 gathers the next layer while one computes
ABSENT = "absent"  # value of a layer that a table does not mention
_LAYERS = re.compile(r"layer|block|ind(ex|ic)|idx")  # names of config keys with numbers of layers
_PLAIN = (bool, int, float, str, type(None))
_NUMBERS = ("idx", "index", "layer_id", "layer_number", "layer_nr")  # attributes with the number of a layer


@dataclass(frozen=True, slots=True)
class RepeatedLayers:
    """Layers of which some periods can be left out.

    Attributes:
        path: Path of their list, such as "model.layers".
        at: First layer that can be left out.
        period: Layers per period.
        most: Number of periods that can be left out.
    """

    path: str
    at: int
    period: int
    most: int

    @property
    def stop(self) -> int:
        """First layer after those that can be left out."""
        return self.at + self.period * self.most

    def left_out(self, extra: int) -> range:
        """Return the layers to leave out if `extra` of the removable periods stay."""
        return range(self.at, self.stop - self.period * extra)


def layer_kinds(model: nn.Module, homes: Mapping[str, str]) -> dict[str, list[Hashable]]:
    """Return a description of each layer, by list; lists of layers that share a parameter are omitted.

    Two layers with equal descriptions run the same computation, as far as their structure shows.

    Args:
        model: Whole model, before it is parallelized.
        homes: For each list, the nested config with its length, as named by `config_parts`.
    """
    nested = dict(config_parts(model.config.to_dict()))
    owners = Counter(id(tensor) for tensor in _tensors(model))
    found: dict[str, list[Hashable]] = {}
    for container in lists_of_layers(model):
        layers = list(container.module.children())
        if any(owners[id(tensor)] > 1 for layer in layers for tensor in _tensors(layer)):
            continue
        by_key = list(by_layer(nested.get(homes.get(container.name, ""), {}), len(layers)).values())
        found[container.name] = [
            (_kind(layer), *(repr(each[number]) for each in by_key)) for number, layer in enumerate(layers)
        ]
    return found


def lists_of_layers(model: nn.Module) -> Iterator[Container]:
    """Yield every list of layers of a model."""
    return chain.from_iterable(containers(model).values())


def config_parts(config: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the contents of a config.json and its nested configs, with their dotted names; the whole has none."""
    yield name, config  # type: ignore[misc]  # a dict, as JSON has it
    for key, value in config.items():
        if isinstance(value, dict) and "model_type" in value:
            yield from config_parts(value, f"{name}.{key}" if name else key)


def by_layer(part: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    """Return the per-layer values of a config, by key.

    The value may be a list of one value per layer, a table by number of the layer, or a list of such numbers.
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


def as_before(value: Any, values: Sequence[Any], count: int) -> Any:
    """Convert per-layer values of fewer layers back to the form that they have in the config.

    Args:
        value: Original value of the config.
        values: Values of the layers that remain.
        count: Original number of layers.
    """
    if isinstance(value, dict):
        return {number: each for number, each in enumerate(values) if each is not ABSENT}
    return list(values) if len(value) == count else [number for number, is_in in enumerate(values) if is_in]


def repeat_in(path: str, kinds: Sequence[Hashable], first: int, stop: int, runs: int) -> RepeatedLayers | None:
    """Return the removable layers from `first` to `stop` of a list, or None if that would save nothing.

    Args:
        path: Path of the list.
        kinds: Descriptions of all its layers.
        first: First layer of the range.
        stop: End of the range, exclusive.
        runs: Number of models with fewer layers that will run.
    """
    found, saved = None, 0
    for period in range(1, min(_LONGEST, (stop - first) // runs) + 1):
        begin = end = first
        for number in range(first, stop - period + 1):
            is_same = number < stop - period and kinds[number] == kinds[number + period]
            if is_same:
                end = number + 1
                continue
            length = end + period - begin if end > begin else 0
            stay = length % period + max(2 * period, _LEAST)
            most = (length - stay) // period
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


def _is_of_layer(key: Any, value: Any, count: int) -> bool:
    is_number = isinstance(key, int) or (isinstance(key, str) and key.isdecimal())
    return isinstance(value, dict) and is_number and 0 <= int(key) < count


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
