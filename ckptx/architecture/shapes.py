"""Shapes of a model's tensors, for the few that are on disk transposed or not: names alone do not tell which."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ckptx.catalog.region import Shape
from ckptx.errors import missing_package
from ckptx.mapping.rules import ShapeOf


def shapes_of(config: Mapping[str, Any]) -> ShapeOf:
    """Shape of a tensor of the model by its name; None for an unknown class or name.

    They are those of a model without storage. It is built when the first shape is asked for, which costs the import of
    torch: hardly any class has such tensors (the experts of Qwen3-VL-MoE are some).

    Args:
        config: The contents of `config.json`.
    """

    @functools.cache
    def shapes() -> dict[str, Shape]:
        names = config.get("architectures")
        try:
            from ckptx.architecture.meta_model import build, known_class
        except ImportError as error:
            subject = str(names[0]) if isinstance(names, list) and names else "config.json"
            raise missing_package(
                f"{subject}: its shapes tell its tensors apart, so it must be built", error
            ) from error

        cls: Any = known_class(str(names[0])) if isinstance(names, list) and names else None
        if cls is None:
            return {}
        model = build(cls, cls.config_class.from_dict(dict(config)))
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    return lambda name: shapes().get(name)
