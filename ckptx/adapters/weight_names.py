"""Names under which an adapter may know the tensors of a model, and the weight that each of its layers changes.

An adapter has the names of the modules of the class in transformers. A checkpoint may have others: those of the files
on the Hub, with or without the name of the base model in front.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ckptx.adapters.adapter import LoraLayer
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Region, full_region
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.mapping.names import pattern_of
from ckptx.model_view.view import ModelView, rules_of
from ckptx.wording import first_of


@dataclass(frozen=True)
class WeightNames:
    """Names of the tensors of a model.

    Attributes:
        view: Model.
        tensors: Tensor by name in the view, and under second names of tied weights that the checkpoint does not store.
        names: Name in the class, or on the Hub -> name in `tensors`, for tensors with the same elements in both.
        shapes: Name in the class -> shape of the tensor.
        parts: Name in the class of a tensor that the checkpoint stores in another form -> the names in `tensors` that
            it is made of.
    """

    view: ModelView
    tensors: Mapping[str, TensorEntry]
    names: Mapping[str, str]
    parts: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, view: ModelView, tensors: Mapping[str, TensorEntry]) -> WeightNames:
        """Find the names of `tensors`, see the attributes."""
        names = {name: name for name in tensors}
        parts: dict[str, tuple[str, ...]] = {}
        shapes = {name: entry.shape for name, entry in tensors.items()}
        rules = rules_of(view)
        if rules is not None:
            try:
                renamed = rules.to_model(tensors)
            except CkptxError:  # tensors are missing, or have no model names: their own names remain
                return cls(view, tensors, names, parts, shapes)
            shapes |= {name: entry.shape for name, entry in renamed.tensors.items()}
            for name, sources in renamed.sources.items():
                entry, source = renamed.tensors[name], tensors[sources[0]]
                if len(sources) == 1 and entry.shape == source.shape and entry.chunks == source.chunks:
                    names.setdefault(name, sources[0])
                else:
                    parts[name] = sources
        return cls(view, tensors, names, parts, shapes)

    def find(self, name: str, adapter: str) -> str:
        """Return the name in `tensors` of a tensor that an adapter names.

        Args:
            name: Name in the adapter, without "base_model.model.".
            adapter: Location of the adapter, for error messages.

        Raises:
            InputError: The model has no such tensor.
            UnsupportedError: The checkpoint stores it in another form.
        """
        spellings = self._spellings(name)
        for spelling in spellings:
            if spelling in self.names:
                return self.names[spelling]
        location = self.view.catalog.location
        for spelling in spellings:
            if spelling in self.parts:
                raise UnsupportedError(
                    f'{adapter}: changes "{name}", which {location} stores in another form '
                    f"({first_of(self.parts[spelling])}); merge the adapter with PEFT"
                )
        raise InputError(
            f'{adapter}: changes "{name}", which {location} does not have; pass the model that the adapter was '
            "trained on"
        )

    def parameter_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a parameter in the class, given its name there; None if it is not known."""
        return next((self.shapes[each] for each in self._spellings(name) if each in self.shapes), None)

    def find_parts(self, name: str, adapter: str) -> dict[str, Region]:
        """Return the stored tensors that a parameter of the class is made of, and their regions in it.

        Args:
            name: Name of the parameter in the class.
            adapter: Location of the adapter, for error messages.

        Raises:
            UnsupportedError: A stored tensor is transposed, or not whole, in the parameter.
        """
        for spelling in self._spellings(name):
            if spelling in self.names:
                stored = self.names[spelling]
                return {stored: full_region(self.tensors[stored].shape)}
        (spelling,) = (each for each in self._spellings(name) if each in self.parts)
        regions: dict[str, Region] = {}
        for chunk in self._marked_tensors[spelling].chunks:
            entry = self.tensors[chunk.file]
            is_whole = chunk.region.numel == entry.numel and chunk.file not in regions
            if not is_whole or chunk.region.sizes[-2:] != entry.shape[-2:] or not _is_row_major(chunk):
                raise UnsupportedError(
                    f'{adapter}: changes "{name}", which {self.view.catalog.location} stores transposed or divided in '
                    f'"{chunk.file}"; merge the adapter with PEFT'
                )
            regions[chunk.file] = chunk.region
        return regions

    @cached_property
    def _marked_tensors(self) -> Mapping[str, TensorEntry]:
        """The parameters of the class, each chunk in a file with the name of the stored tensor that it is from."""
        rules = rules_of(self.view)
        assert rules is not None  # else no parameter has parts
        marked = {
            stored: entry._replace(chunks=(Chunk(full_region(entry.shape), stored, 0, entry.nbytes),), replicas=())
            for stored, entry in self.tensors.items()
        }
        return rules.to_model(marked).tensors

    def _spellings(self, name: str) -> list[str]:
        """Return a name as it is, and with the name of the base model added or removed."""
        architecture = self.view.disk_architecture
        prefix = f"{architecture.base_prefix}." if architecture is not None and architecture.base_prefix else ""
        if not prefix:
            return [name]
        return [name, name.removeprefix(prefix) if name.startswith(prefix) else prefix + name]

    def is_transposed(self, layer: LoraLayer, weight: TensorEntry, adapter: str, *, fan_in_fan_out: bool) -> bool:
        """Return True if the weight of a layer is stored as [in, out], the transpose of `B A`.

        The shapes decide, and for a square weight the class; if the class is unknown, `fan_in_fan_out`.

        Args:
            layer: Layer of the adapter.
            weight: Its weight in the model.
            adapter: Location of the adapter, for error messages.
            fan_in_fan_out: Value in the config of the adapter.

        Raises:
            InputError: The shapes do not fit.
        """
        plain_shape = (layer.b.shape[0], *layer.a.shape[1:])
        transposed_shape = plain_shape[::-1]
        is_plain = weight.shape == plain_shape and not layer.is_embedding
        is_transposed = weight.shape == transposed_shape and len(weight.shape) == 2
        if not is_plain and not is_transposed:
            required = transposed_shape if layer.is_embedding else plain_shape
            raise InputError(
                f'{adapter}: module "{layer.module}" is for a weight of shape {list(required)}, but "{weight.name}" in '
                f"{self.view.catalog.location} has {list(weight.shape)}; pass the model that the adapter was trained on"
            )
        if not (is_plain and is_transposed):
            return is_transposed
        architecture = self.view.disk_architecture
        if architecture is None or architecture.is_unknown_class:
            return fan_in_fan_out
        patterns = {pattern_of(spelling) for spelling in self._spellings(layer.module)}
        return not patterns.isdisjoint(architecture.structure.transposed)


def _is_row_major(chunk: Chunk) -> bool:
    """Return True if the elements of a chunk are in the order of its region, dims of size 1 aside."""
    if chunk.strides is None:
        return True
    expected = 1
    for size, stride in zip(reversed(chunk.region.sizes), reversed(chunk.strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
