"""Edits to config.json for loaders of safetensors, which take dtypes, quantization and ties from it."""

from __future__ import annotations

from typing import Any

from ckptx.architecture.tied import untying_edits
from ckptx.conversion.outputs.output_format import ConfigEdits, float_edits
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.conversion.steps.dtypes import CastTensors, config_dtype_edits
from ckptx.conversion.steps.naming import NamedTarget
from ckptx.conversion.steps.source_model import Ties
from ckptx.model_view.view import ModelView


def safetensors_edits(
    view: ModelView, named_target: NamedTarget, cast: CastTensors, base: BaseCheckpoint, ties: Ties, dtype: str
) -> ConfigEdits:
    """Return the edits to dtypes, quantization and ties for an output in safetensors."""
    floats = float_edits(view, cast, base, config_dtype_edits(view, cast, base, named_target.naming, dtype))
    untied = _untie_edits(view, base.config, ties)
    return ConfigEdits((*floats.changes, *untied.changes), (*floats.notes, *untied.notes))


def _untie_edits(view: ModelView, config: dict[str, Any] | None, ties: Ties) -> ConfigEdits:
    """Return the edits that stop the config from declaring different tensors as tied."""
    if view.architecture is None or config is None:
        return ConfigEdits()
    edits = untying_edits(view.architecture, config, ties.decisions)
    changes = []
    for path, after in edits.values.items():
        node: Any = config
        for key in path[:-1]:
            node = node.get(key, {})
        changes.append({"key": ".".join(path), "before": node.get(path[-1]), "after": after})
    return ConfigEdits(tuple(changes), (edits.note,) if edits.note else ())
