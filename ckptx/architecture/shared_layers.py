"""Layers that share a module: only the first few layers of each kind in a config have modules of their own.

The tied names then follow from the config alone, without building a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptx.architecture.architecture import TieFlag, TiePair

_MAX_LAYERS = 1 << 12  # maximum number of layers in a list


@dataclass(frozen=True, slots=True)
class SharedLayers:
    """Rule by which the layers of one kind share modules: the i-th of them (from 0) uses those of number i % period.

    Attributes:
        paths: Paths of the list of layers, in model names first, then in other namings that load.
        kinds_key: Config key that lists the kind of every layer.
        kind: Kind of the layers that share modules, such as "hybrid".
        count_key: Config key with the number of all layers.
        period_key: Config key with the period, the number of layers of this kind that have modules of their own; empty
            if the period is 1.
        default_period: Period if the config omits the key.
        names: Name of a tensor below a layer -> config key that enables the tensor, empty if all models have it. In a
            module that has a copy of the tensor for each layer that shares it, a `*` in the name stands for the
            position of that layer among the layers of this kind.
        flag: Rule for when they are tied.
    """

    paths: tuple[str, ...]
    kinds_key: str
    kind: str
    count_key: str
    period_key: str
    default_period: int
    names: Mapping[str, str]
    flag: TieFlag

    def covers(self, config: Mapping[str, Any]) -> bool:
        """Return True if a ``config.json`` has every key that the ties follow from, with values of expected types."""
        kinds = config.get(self.kinds_key)
        if not isinstance(kinds, list) or not all(isinstance(each, str) for each in kinds):
            return False
        switches = (config.get(key, False) for key in self.names.values() if key)
        period = self._period(config)
        return (
            len(kinds) == config.get(self.count_key)
            and len(kinds) <= _MAX_LAYERS
            and "layer_types" not in {*config} - {self.kinds_key}
            and isinstance(period, int)
            and not isinstance(period, bool)
            and period >= 1
            and all(isinstance(each, bool) for each in switches)
        )

    def ties(self, config: Mapping[str, Any]) -> tuple[TiePair, ...]:
        """Return all tied pairs under a config for which `covers` returns True."""
        layers = [index for index, kind in enumerate(config[self.kinds_key]) if kind == self.kind]
        period = self._period(config)
        pairs = []
        for position, layer in list(enumerate(layers))[period:]:
            source_layer = layers[position % period]
            for name in self._shared_names(config, range(position % period, len(layers), period)):
                namings = tuple((f"{path}.{layer}.{name}", f"{path}.{source_layer}.{name}") for path in self.paths)
                pairs.append(TiePair(namings, self.flag, is_primary=False))
        return tuple(pairs)

    def _period(self, config: Mapping[str, Any]) -> Any:
        return config.get(self.period_key, self.default_period) if self.period_key else 1

    def _shared_names(self, config: Mapping[str, Any], positions: range) -> list[str]:
        """Return the names below a layer of the tensors that the layers at these positions share.

        Positions are those among the layers of this kind, from 0.
        """
        enabled_names = [name for name, switch in self.names.items() if not switch or config.get(switch, False)]
        return [
            each
            for name in sorted(enabled_names)
            for each in ([name.replace("*", str(position)) for position in positions] if "*" in name else [name])
        ]


def decode_shared(values: Mapping[str, Any]) -> SharedLayers:
    """Return the rule from the entry `shared_layers` of a class in a model file."""
    flag = TieFlag(tuple(tuple(key.split(".")) for key in values["flag_keys"]), values["flag_truth"])
    return SharedLayers(
        paths=tuple(values["paths"]),
        kinds_key=values["kinds"],
        kind=values["kind"],
        count_key=values["count"],
        period_key=values["period"],
        default_period=values["default"],
        names=values["names"],
        flag=flag,
    )
