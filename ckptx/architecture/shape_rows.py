"""Read the shapes of a model file: JSON becomes `ShapeRules`.

The tensors in the base model of a class are written once for all classes around that base model, without its prefix:

    shapes          LlamaForCausalLM -> {"body": "LlamaModel", "body_below": "model", "shapes": {...}, ...}
    shape_bodies    LlamaModel -> {"shapes": {"layers.*.mlp.up_proj.weight": "intermediate_size, hidden_size"}, ...}

A shape is written as its sizes separated by commas, with `?` for an unknown one; several shapes are separated by bars.
Patterns with a shape are required unless they are in `optional`; `without_shape` are required as well. `switches` has
the values of keys that add or remove patterns, `others` the patterns of the measured config without a shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ckptx.architecture.shape_rules import Condition, ShapeRules, Switch, plain


def decode_shapes(class_name: str, sections: Mapping[str, Mapping[str, Any]]) -> ShapeRules | None:
    """Return the rules of a class; None if there are none.

    Args:
        class_name: Name of the class.
        sections: Sections of the file of the class.
    """
    values = sections["shapes"].get(class_name)
    if values is None:
        return None
    lead = f"{values['body_below']}." if "body_below" in values else ""
    below, own = _read(sections["shape_bodies"][values["body"]], lead), _read(values, "")
    conditions, switches = dict(below.conditions), dict(below.switches)
    for condition, names in own.conditions.items():
        conditions[condition] = conditions.get(condition, frozenset()) | names
    for switch, names in own.switches.items():
        switches[switch] = switches.get(switch, frozenset()) | names
    return ShapeRules(
        shapes={**below.shapes, **own.shapes},
        counts={**below.counts, **own.counts},
        required=below.required | own.required,
        conditions=conditions,
        models={**below.models, **own.models},
        defaults={**below.defaults, **own.defaults},
        aliases={**below.aliases, **own.aliases},
        switches=switches,
        others=below.others | own.others,
    )


def _read(values: Mapping[str, Any], lead: str) -> ShapeRules:
    def names(of: Mapping[str, Any], key: str = "names") -> frozenset[str]:
        return frozenset([lead + each for each in of.get(key, ())])

    shapes = {lead + name: _shapes(text) for name, text in values.get("shapes", {}).items()}
    return ShapeRules(
        shapes=shapes,
        counts={lead + path: text for path, text in values.get("counts", {}).items()},
        required=frozenset(shapes) - names(values, "optional") | names(values, "without_shape"),
        conditions={
            Condition(each["key"], each["kind"], tuple(map(plain, each.get("values", ())))): names(each)
            for each in values.get("conditions", ())
        },
        models=values.get("models", {}),
        defaults=values.get("defaults", {}),
        aliases=values.get("aliases", {}),
        switches={
            Switch(each["key"], each["effect"], plain(each["value"]), _companions(each)): names(each)
            for each in values.get("switches", ())
        },
        others=names(values, "others"),
    )


def _companions(row: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((key, plain(value)) for key, value in row.get("beside", {}).items())


@lru_cache
def _shapes(text: str) -> tuple[tuple[str, ...], ...]:
    """Return the shapes of a tensor: sizes as expressions, "" for an unknown size."""
    return tuple(
        tuple("" if size == "?" else size for size in shape.split(", ")) if shape else () for shape in text.split(" | ")
    )
