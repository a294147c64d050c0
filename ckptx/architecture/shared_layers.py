"""Layers that share a module: of the layers that a config lists under one word, only the first few have their own.

Which names are tied then follows from the config alone, and no model has to be built to know them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptx.architecture.spec import TieFlag, TiePair

_MOST = 1 << 12  # layers in a list: one that is longer is no list of layers


@dataclass(frozen=True, slots=True)
class SharedLayers:
    """How the layers of one kind take turns with the modules that they share.

    Attributes:
        paths: Of the list of layers, in model names first, then as other namings that load have it.
        kinds: The config key that lists the kind of every layer.
        kind: Of the layers that share.
        count: The config key that lists how many layers there are.
        period: The config key of how many of these layers have modules of their own; empty where one has.
        default: What `period` is where the config leaves it out.
        names: Pattern below a layer -> the config key that switches the tensor on, empty where all models have it. A
            star stands for the places, among the layers of this kind, of those that share the tensor.
        flag: When they are tied.
    """

    paths: tuple[str, ...]
    kinds: str
    kind: str
    count: str
    period: str
    default: int
    names: Mapping[str, str]
    flag: TieFlag

    def covers(self, config: Mapping[str, Any]) -> bool:
        """Whether a ``config.json`` spells out all that the ties follow from, in the form that was measured."""
        kinds = config.get(self.kinds)
        if not isinstance(kinds, list) or not all(isinstance(each, str) for each in kinds):
            return False
        switches = (config.get(key, False) for key in self.names.values() if key)
        period = self._period(config)
        return (
            len(kinds) == config.get(self.count)
            and len(kinds) <= _MOST
            and "layer_types" not in {*config} - {self.kinds}
            and isinstance(period, int)
            and not isinstance(period, bool)
            and period >= 1
            and all(isinstance(each, bool) for each in switches)
        )

    def ties(self, config: Mapping[str, Any]) -> tuple[TiePair, ...]:
        """Every pair under a config that this `covers`."""
        layers = [at for at, kind in enumerate(config[self.kinds]) if kind == self.kind]
        period = self._period(config)
        found = []
        for place, layer in list(enumerate(layers))[period:]:
            owner = layers[place % period]
            for name in self._names_at(config, range(place % period, len(layers), period)):
                namings = tuple((f"{path}.{layer}.{name}", f"{path}.{owner}.{name}") for path in self.paths)
                found.append(TiePair(namings, self.flag, is_primary=False))
        return tuple(found)

    def _period(self, config: Mapping[str, Any]) -> Any:
        return config.get(self.period, self.default) if self.period else 1

    def _names_at(self, config: Mapping[str, Any], places: range) -> list[str]:
        """Names below a layer, of the module that the layers at these places share."""
        there = [name for name, switch in self.names.items() if not switch or config.get(switch, False)]
        return [
            each
            for name in sorted(there)
            for each in ([name.replace("*", str(place)) for place in places] if "*" in name else [name])
        ]


def decode_shared(values: Mapping[str, Any]) -> SharedLayers:
    """Return the shared layers of a class in a model file."""
    flag = TieFlag(tuple(tuple(key.split(".")) for key in values["flag_keys"]), values["flag_truth"])
    facts = {key: values[key] for key in ("kinds", "kind", "count", "period", "default", "names")}
    return SharedLayers(paths=tuple(values["paths"]), flag=flag, **facts)
