"""Find layers of a model that repeat, and how many of them can be left out of a forecast.

Layers are compared as built: their modules, tensors and plain attributes, and the per-layer values of the config. A
sequence of layers with a periodic pattern (one kind, or five with a window and one without) can be shortened by whole
periods. What is left out is extrapolated, and the extrapolation validated: see `extrapolation`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from ckptx.runtime.model.layers import LayerList, find_layer_lists

_MAX_PERIOD = 12  # maximum period, in layers
_MIN_REMAINING = 3  # minimum number of layers that stay: FSDP2 gathers the next layer while one computes
ABSENT = "absent"  # value of a layer that is not in a mapping by number of the layer
_LAYER_INDEX_KEYS = re.compile(r"layer|block|ind(ex|ic)|idx")  # names of config keys with numbers of layers
_PLAIN_TYPES = (bool, int, float, str, type(None))
_INDEX_ATTRIBUTES = ("idx", "index", "layer_id", "layer_number", "layer_nr")  # attributes with the number of a layer


@dataclass(frozen=True, slots=True)
class RepeatedLayers:
    """Layers of which some periods can be left out.

    Attributes:
        path: Path of their list, such as "model.layers".
        first: Number of the first layer that can be left out, from 0.
        period: Layers per period.
        max_periods: Number of periods that can be left out.
    """

    path: str
    first: int
    period: int
    max_periods: int

    @property
    def stop(self) -> int:
        """Number of the first layer after those that can be left out."""
        return self.first + self.period * self.max_periods

    def removed_layers(self, extra_periods: int) -> range:
        """Return the numbers of the layers to leave out if the last `extra_periods` of the removable periods stay."""
        return range(self.first, self.stop - self.period * extra_periods)


def describe_layers(model: nn.Module, config_names: Mapping[str, str]) -> dict[str, list[Hashable]]:
    """Return path of a list of layers -> description of each of its layers.

    Two layers with equal descriptions run the same computation, as far as their structure shows. A list is left out if
    one of its layers has a parameter with several names in the model.

    Args:
        model: Whole model, before it is parallelized.
        config_names: Path of a list -> the nested config with its length, as named by `iter_config_dicts`. Without an
            entry, descriptions have no values of the config.
    """
    configs_by_name = dict(iter_config_dicts(model.config.to_dict()))
    use_counts = Counter(id(tensor) for tensor in _tensors(model))
    descriptions: dict[str, list[Hashable]] = {}
    for container in iter_layer_lists(model):
        layers = list(container.module.children())
        if any(use_counts[id(tensor)] > 1 for layer in layers for tensor in _tensors(layer)):
            continue
        by_key = list(
            collect_per_layer_values(
                configs_by_name.get(config_names.get(container.name, ""), {}), len(layers)
            ).values()
        )
        descriptions[container.name] = [
            (_describe_layer(layer), *(repr(each[number]) for each in by_key)) for number, layer in enumerate(layers)
        ]
    return descriptions


def iter_layer_lists(model: nn.Module) -> Iterator[LayerList]:
    """Yield every list of layers of a model."""
    return chain.from_iterable(find_layer_lists(model).values())


def iter_config_dicts(config: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (dotted name, contents) of a config.json, whose name is `name` or "", and of its nested configs."""
    yield name, config  # type: ignore[misc]  # a dict, as JSON has it
    for key, value in config.items():
        if isinstance(value, dict) and "model_type" in value:
            yield from iter_config_dicts(value, f"{name}.{key}" if name else key)


def collect_per_layer_values(config: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    """Return key of a config -> one value per layer, for the keys that have per-layer values.

    The config may have a list of one value per layer, a mapping of numbers of layers to dicts (other layers get
    `ABSENT`), or an ascending list of such numbers (each layer gets True if its number is in the list, else False).

    Args:
        config: Contents of one config, without those of nested configs.
        count: Number of layers.
    """
    values_by_key: dict[str, list[Any]] = {}
    for key, value in sorted(config.items()):
        if isinstance(value, (list, tuple)) and len(value) == count:
            values_by_key[key] = list(value)
        elif isinstance(value, dict) and value and all(_is_layer_entry(*each, count) for each in value.items()):
            table = {int(number): each for number, each in value.items()}
            values_by_key[key] = [table.get(number, ABSENT) for number in range(count)]
        elif (
            isinstance(value, (list, tuple))
            and value
            and _LAYER_INDEX_KEYS.search(key)
            and _are_layer_indices(value, count)
        ):
            values_by_key[key] = [number in value for number in range(count)]
    return values_by_key


def to_config_form(value: Any, values: Sequence[Any], count: int) -> Any:
    """Convert per-layer values of fewer layers back to the form that they have in the config.

    Args:
        value: Original value of the config.
        values: Values of the layers that remain.
        count: Original number of layers.
    """
    if isinstance(value, dict):
        return {number: each for number, each in enumerate(values) if each is not ABSENT}
    return list(values) if len(value) == count else [number for number, is_in in enumerate(values) if is_in]


def find_repeat(
    path: str, descriptions: Sequence[Hashable], first: int, stop: int, model_count: int
) -> RepeatedLayers | None:
    """Return the removable layers from `first` to `stop` of a list, or None if their removal would save nothing.

    The result is for the period with which all models with fewer layers together run the fewest layers.

    Args:
        path: Path of the list.
        descriptions: Descriptions of all its layers.
        first: First layer of the range.
        stop: End of the range, exclusive.
        model_count: Number of models with fewer layers that will run.
    """
    best, saved = None, 0  # saved: layers of the range, minus those that all models with fewer layers run together
    for period in range(1, min(_MAX_PERIOD, (stop - first) // model_count) + 1):
        begin = end = first  # layers from begin to end equal those one period later
        for number in range(first, stop - period + 1):
            is_same = number < stop - period and descriptions[number] == descriptions[number + period]
            if is_same:
                end = number + 1
                continue
            length = end + period - begin if end > begin else 0  # of the periodic sequence that ends here
            remaining = length % period + max(2 * period, _MIN_REMAINING)  # layers of the sequence that always stay
            max_periods = (length - remaining) // period
            smallest = stop - first - max_periods * period  # layers of the smallest model
            if max_periods >= model_count and stop - first - model_count * (smallest + period) > saved:
                saved = stop - first - model_count * (smallest + period)
                # Half of the remaining layers are before the removable ones, rounded up.
                best = RepeatedLayers(path, begin + -(-remaining // 2), period, max_periods)
            begin = end = number + 1
    return best


def _tensors(module: nn.Module) -> Iterator[Any]:
    """Yield every parameter of a module, as often as it has names."""
    for _, each in module.named_modules(remove_duplicate=False):
        yield from (tensor for tensor in each._parameters.values() if tensor is not None)


def _are_layer_indices(numbers: Sequence[Any], count: int) -> bool:
    return all(type(each) is int and 0 <= each < count for each in numbers) and list(numbers) == sorted(set(numbers))


def _is_layer_entry(key: Any, value: Any, count: int) -> bool:
    """Return True if a key is the number of a layer and its value a dict, as in `per_layer_config`."""
    is_number = isinstance(key, int) or (isinstance(key, str) and key.isdecimal())
    return isinstance(value, dict) and is_number and 0 <= int(key) < count


def _describe_layer(layer: nn.Module) -> Hashable:
    """Return names, classes, plain attributes and tensor shapes of the modules in a layer, without its number."""
    return tuple(
        (
            name,
            type(module).__qualname__,
            *_plain_attributes(vars(module)),
            *_tensor_shapes(module._parameters, module._buffers),
        )
        for name, module in layer.named_modules(remove_duplicate=False)
    )


def _plain_attributes(values: Mapping[str, Any]) -> Iterator[Hashable]:
    for name, value in sorted(values.items()):
        if (
            isinstance(value, _PLAIN_TYPES)
            and not name.startswith("_")
            and not any(each in name for each in _INDEX_ATTRIBUTES)
        ):
            yield name, type(value).__name__, value


def _tensor_shapes(*tensors: Mapping[str, Any]) -> Iterator[Hashable]:
    pairs: Iterable[tuple[str, Any]] = (pair for each in tensors for pair in each.items())
    for name, tensor in pairs:
        if tensor is not None:
            yield name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad
