"""Expected shapes of a model's tensors under its config: from the table, else from a model on the meta device."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.class_table import shape_rules
from ckptx.architecture.expressions import Scope, keys_of
from ckptx.architecture.shape_rules import ExpectedShapes
from ckptx.catalog.region import Shape
from ckptx.mapping.names import pattern_of
from ckptx.mapping.ops import Conversion
from ckptx.mapping.rules import ShapeLookup


def expected_shapes(architecture: Architecture, config: Mapping[str, Any]) -> ExpectedShapes | None:
    """Return names and shapes of a model; None if the table does not have them for its class under this config.

    Args:
        architecture: Architecture of the class, under disk names.
        config: Contents of `config.json`.

    Raises:
        InputError: A value in the config is a string or a fraction, or a number of modules is out of range.
    """
    if architecture.known_from != "table":
        return None
    rules = shape_rules(architecture.class_name)
    if rules is None:
        return None
    return rules.evaluate(config, architecture.structure.root, architecture.name_patterns)


def states_layer_count(architecture: Architecture, config: Mapping[str, Any]) -> bool:
    """Return True if the config itself states a number of layers; False if there are only defaults of its class."""
    structure = architecture.structure
    scope = Scope(config, {}, structure.aliases, structure.root)
    return any(scope.value(key) is not None for stack in structure.stacks for key in keys_of(stack.length))


def shape_lookup(architecture: Architecture, config: Mapping[str, Any]) -> ShapeLookup:
    """Return a function from the name of a model tensor to its shape; None for an unknown shape.

    Shapes that the table lacks come from a model on the meta device, but only those that a conversion needs, because
    that requires importing torch and transformers; all other shapes that the table lacks are unknown. If the class
    cannot be built, the function raises what the class raises.

    Args:
        architecture: Architecture of the class, under disk names.
        config: Contents of `config.json`.

    Raises:
        InputError: See `Architecture.conversions`.
    """
    ambiguous_patterns = _ambiguous_patterns(architecture.conversions(config))

    @functools.cache
    def table_shapes() -> ExpectedShapes | None:
        return expected_shapes(architecture, config)

    @functools.cache
    def built_shapes() -> dict[str, Shape]:
        from ckptx.architecture.introspection.meta_model import build_on_meta, find_class

        cls: Any = find_class(architecture.class_name)
        if cls is None:
            return {}
        model = build_on_meta(cls, cls.config_class.from_dict(dict(config)))
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    @functools.cache
    def table_shape(pattern: str) -> Shape | None:
        known = table_shapes()
        shapes = known.shapes.get(pattern, ()) if known is not None else ()
        if len(shapes) != 1:
            return None
        sizes = tuple(size for size in shapes[0] if size is not None)
        return sizes if len(sizes) == len(shapes[0]) else None

    def shape_of(name: str) -> Shape | None:
        pattern = pattern_of(name)
        shape = table_shape(pattern)
        return built_shapes().get(name) if shape is None and pattern in ambiguous_patterns else shape

    return shape_of


def _ambiguous_patterns(conversions: Collection[Conversion]) -> frozenset[str]:
    """Return the patterns of model tensors that a conversion cannot produce without knowing their shapes.

    They may be stored transposed, which names alone do not show, or result from a split into parts of unknown size.
    """
    return frozenset(
        pattern_of(target)
        for conversion in conversions
        if any((op.kind == "transpose" and op.args) or (op.kind == "split" and not op.args) for op in conversion.ops)
        for target in conversion.targets
    )
