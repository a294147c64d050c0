"""Changes of one or more adapters to a model: layers that are added to weights, and tensors that replace others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import permutations, product
from typing import Any

from ckptx.adapters.adapter import Adapter, ExpertSlice, LoraLayer, ParameterFactors
from ckptx.adapters.merged_weights import AdapterFiles, Addition, MergedWeight, ReplacedTensor, ThreadCache
from ckptx.adapters.weight_names import WeightNames
from ckptx.catalog.entry import TensorEntry
from ckptx.errors import InputError, UnsupportedError

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class Changes:
    """Changes to the tensors of a model, by name in `WeightNames.tensors`.

    Attributes:
        additions: Name of a weight -> layers that are added to it.
        bias_additions: Name of a bias -> layers whose `bias` is added to it.
        replaced: Name of a tensor -> tensor of an adapter that replaces it, and the files of the adapter.
    """

    def __init__(self, weights: WeightNames) -> None:
        """Start without changes; `weights` has the tensors of the model."""
        self._weights = weights
        self.additions: dict[str, list[Addition]] = {}
        self.bias_additions: dict[str, list[Addition]] = {}
        self.replaced: dict[str, tuple[TensorEntry, AdapterFiles]] = {}

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors that change."""
        return list(dict.fromkeys((*self.additions, *self.bias_additions, *self.replaced)))

    def add(self, adapter: Adapter, files: AdapterFiles, factor: float) -> None:
        """Add the changes of one adapter.

        Args:
            adapter: The adapter.
            files: Its files.
            factor: Factor of its layers, in addition to their scaling.

        Raises:
            InputError: It does not fit the model.
            UnsupportedError: A weight is quantized or stored in another form, or the adapter cannot be combined with
                the ones before.
        """
        location = str(adapter.catalog.location)
        if factor != 1 and adapter.replaced:
            raise UnsupportedError(
                f'{location}: a factor of {factor:g} applies to B * A only, and the adapter also replaces "'
                f'{next(iter(adapter.replaced))}" (modules_to_save or biases); merge it with a factor of 1'
            )
        for layer in adapter.layers.values():
            self._add_layer(adapter, layer, files, factor)
        for module in adapter.parameters:
            self._add_parameters(adapter, module, files, factor)
        for model_name, entry in adapter.replaced.items():
            name = self._weights.find(model_name, location)
            weight = self._weights.tensors[name]
            if weight.shape != entry.shape:
                raise InputError(
                    f'{location}: tensor "{entry.name}" has shape {list(entry.shape)}, but "{weight.name}" in '
                    f"{self._weights.view.catalog.location} has {list(weight.shape)}; pass the model that the adapter "
                    "was trained on (a vocabulary that grew in training is not supported)"
                )
            self._check_dtype(weight, location)
            if name in self.replaced:
                raise UnsupportedError(
                    f'{location}: replaces "{model_name}", which another adapter replaces as well; merge one of them'
                )
            self.replaced[name] = entry, files
        self._check_combinations(location)

    def _add_layer(self, adapter: Adapter, layer: LoraLayer, files: AdapterFiles, factor: float) -> None:
        location = str(adapter.catalog.location)
        name = self._weights.find(f"{layer.module}.weight", location)
        weight = self._weights.tensors[name]
        self._check_dtype(weight, location)
        is_transposed = self._weights.is_transposed(
            layer, weight, location, fan_in_fan_out=adapter.config.fan_in_fan_out
        )
        addition = Addition(layer, files, factor, is_transposed)
        self.additions.setdefault(name, []).append(addition)
        if layer.bias is None:
            return
        bias_name = self._weights.find(f"{layer.module}.bias", location)
        bias = self._weights.tensors[bias_name]
        self._check_dtype(bias, location)
        if bias.shape != (layer.bias.numel,):
            raise InputError(
                f'{location}: tensor "{layer.bias.name}" has shape {list(layer.bias.shape)}, but "{bias.name}" in '
                f"{self._weights.view.catalog.location} has {list(bias.shape)}; pass the model that the adapter was "
                "trained on"
            )
        self.bias_additions.setdefault(bias_name, []).append(addition)

    def _add_parameters(self, adapter: Adapter, module: str, files: AdapterFiles, factor: float) -> None:
        """Add the changes to parameters of a module that hold all experts of a layer.

        The file does not record which pair of A and B belongs to which parameter, nor the orientation; both are taken
        from the shapes, if these allow one assignment only.
        """
        location, pairs = str(adapter.catalog.location), adapter.parameters[module]
        names = dict.fromkeys(f"{module}.{target.rpartition('.')[2]}" for target in adapter.targets_of(module))
        if len(names) < len(pairs):
            raise InputError(
                f'{location}: module "{module}" has {len(pairs)} pairs of A and B, but target_parameters names '
                f"{len(names)} of its parameters; pass the config that the adapter was trained with"
            )
        shapes = {name: shape for name in names if (shape := self._weights.parameter_shape(name)) is not None}
        assignments = []
        for chosen in permutations(shapes, len(pairs)):
            fits = [
                _orientations(pair, shapes[name], adapter.config.layer_rank(name))
                for pair, name in zip(pairs, chosen, strict=True)
            ]
            assignments += [tuple(zip(chosen, each, strict=True)) for each in product(*fits)]
        if not assignments:
            found = ", ".join(f"A {list(pair.a.shape)} and B {list(pair.b.shape)}" for pair in pairs)
            wanted = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or ", ".join(names)
            raise InputError(
                f'{location}: module "{module}": {found} fit none of its parameters in '
                f"{self._weights.view.catalog.location} ({wanted}); pass the model and the config that the adapter was "
                "trained with"
            )
        if len(assignments) > 1:
            raise UnsupportedError(
                f'{location}: module "{module}": the shapes of A and B fit several parameters or orientations of '
                f"{', '.join(shapes)}, and the file does not record which; merge it with PEFT"
            )
        for pair, (name, is_transposed) in zip(pairs, assignments[0], strict=True):
            self._add_experts(adapter, pair, name, files, factor, is_transposed=is_transposed)

    def _add_experts(
        self,
        adapter: Adapter,
        pair: ParameterFactors,
        name: str,
        files: AdapterFiles,
        factor: float,
        *,
        is_transposed: bool,
    ) -> None:
        """Add the change of one parameter to each stored tensor that it is made of."""
        location, config = str(adapter.catalog.location), adapter.config
        rank = config.layer_rank(name)
        experts = pair.a.shape[0] // rank
        for stored, region in self._weights.find_parts(name, location).items():
            self._check_dtype(self._weights.tensors[stored], location)
            expert = ExpertSlice(experts, *region.offsets)
            layer = LoraLayer(name, pair.a, pair.b, False, None, None, rank, config.scaling(name), expert)
            self.additions.setdefault(stored, []).append(Addition(layer, files, factor, is_transposed))

    def _check_dtype(self, weight: TensorEntry, location: str) -> None:
        """Refuse a weight that is quantized or has integers.

        Raises:
            UnsupportedError: It is.
        """
        if weight.dtype.name not in _FLOATS:
            raise UnsupportedError(
                f'{location}: changes "{weight.name}", which is stored as {weight.dtype.name} in '
                f"{self._weights.view.catalog.location}; an adapter is added to weights in floating point, pass "
                "--dequantize if the model is quantized"
            )

    def _check_combinations(self, location: str) -> None:
        """Refuse changes of one weight that cannot be combined.

        Raises:
            UnsupportedError: A weight is replaced and has layers, or has several layers, one of them of DoRA.
        """
        for name, additions in self.additions.items():
            if len(additions) > 1 and any(each.layer.magnitude is not None for each in additions):
                raise UnsupportedError(
                    f'{location}: "{name}" has an adapter with DoRA and a second one, and DoRA normalizes their sum; '
                    "merge the first, then the second"
                )
        for name, (_, files) in self.replaced.items():
            others = (*self.additions.get(name, ()), *self.bias_additions.get(name, ()))
            if any(each.files is not files for each in others):
                raise UnsupportedError(
                    f'{location}: "{name}" is replaced by one adapter and changed by another; merge the first, then '
                    "the second"
                )

    def files_of(self, names: Iterable[str]) -> set[AdapterFiles]:
        """Return the files of the adapters that change any of these tensors."""
        files: set[AdapterFiles] = set()
        for name in names:
            files |= {each.files for each in (*self.additions.get(name, ()), *self.bias_additions.get(name, ()))}
            files |= {self.replaced[name][1]} if name in self.replaced else set()
        return files

    def share(self, name: str, other: str) -> None:
        """Change `other`, the second name of a tied weight, in the same way as `name`."""
        maps: tuple[dict[str, Any], ...] = (self.additions, self.bias_additions, self.replaced)
        for changes in maps:
            changes.pop(other, None)
            if name in changes:
                changes[other] = changes[name]

    def computed(self, tensors: Mapping[str, TensorEntry]) -> dict[str, MergedWeight | ReplacedTensor]:
        """Return the computed file of each tensor that changes, by its name.

        Args:
            tensors: Tensors of the model by name; every chunk is located.
        """
        cache = ThreadCache()
        computed: dict[str, MergedWeight | ReplacedTensor] = {}
        for name, additions in self.additions.items():
            computed[name] = MergedWeight(tensors[name], additions, cache, replacement=self.replaced.get(name))
        for name, additions in self.bias_additions.items():
            computed[name] = MergedWeight(
                tensors[name], additions, cache, adds_biases=True, replacement=self.replaced.get(name)
            )
        for name, (entry, files) in self.replaced.items():
            if name not in computed:
                computed[name] = ReplacedTensor(tensors[name], entry, files)
        return computed


def _orientations(pair: ParameterFactors, shape: tuple[int, ...], rank: int) -> list[bool]:
    """Return the orientations in which A and B fit a parameter: False for [experts, out, in], True if transposed."""
    if len(shape) != 3:
        return []
    experts, first, second = shape
    if pair.a.shape[0] != experts * rank or pair.b.shape[1] != experts * rank:
        return []
    factors = pair.b.shape[0], pair.a.shape[1]
    return [*([False] if factors == (first, second) else []), *([True] if factors == (second, first) else [])]
