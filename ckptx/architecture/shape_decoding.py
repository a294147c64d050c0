"""Decode the shapes in a model file: JSON becomes `ShapeRules`.

The tensors in the base model of a class are written once for all classes around that base model, without its prefix:

    shapes          LlamaForCausalLM -> {"body": "LlamaModel", "body_below": "model", "shapes": {...}, ...}
    shape_bodies    LlamaModel -> {"shapes": {"layers.*.mlp.up_proj.weight": "intermediate_size, hidden_size"}, ...}

A shape is written as its sizes separated by commas, with `?` for an unknown one; several shapes are separated by bars.
Patterns with a shape are required unless they are in `optional`; `without_shape` lists required patterns whose shape is
unknown. `switches` has the values of keys that add or remove patterns (`beside` are its `companions`), and `others` the
patterns of the recorded config that are neither required nor have a shape. `ShapeRules` describes the other keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ckptx.architecture.shape_rules import Condition, ShapeRules, Switch, as_hashable


def decode_shapes(class_name: str, sections: Mapping[str, Mapping[str, Any]]) -> ShapeRules | None:
    """Return the rules of a class; None if there are none.

    Args:
        class_name: Name of the class.
        sections: Sections of the model file with the class, see `model_files`.
    """
    values = sections["shapes"].get(class_name)
    if values is None:
        return None
    prefix = f"{values['body_below']}." if "body_below" in values else ""
    base_rules, own_rules = _read_rules(sections["shape_bodies"][values["body"]], prefix), _read_rules(values, "")
    conditions, switches = dict(base_rules.conditions), dict(base_rules.switches)
    for condition, names in own_rules.conditions.items():
        conditions[condition] = conditions.get(condition, frozenset()) | names
    for switch, names in own_rules.switches.items():
        switches[switch] = switches.get(switch, frozenset()) | names
    return ShapeRules(
        shapes={**base_rules.shapes, **own_rules.shapes},
        counts={**base_rules.counts, **own_rules.counts},
        required=base_rules.required | own_rules.required,
        conditions=conditions,
        models={**base_rules.models, **own_rules.models},
        defaults={**base_rules.defaults, **own_rules.defaults},
        aliases={**base_rules.aliases, **own_rules.aliases},
        switches=switches,
        other_patterns=base_rules.other_patterns | own_rules.other_patterns,
    )


def _read_rules(values: Mapping[str, Any], prefix: str) -> ShapeRules:
    """Return the rules in an entry of `shapes` or `shape_bodies`, with the prefix before each pattern."""

    def names(section: Mapping[str, Any], key: str = "names") -> frozenset[str]:
        return frozenset([prefix + each for each in section.get(key, ())])

    shapes = {prefix + name: _parse_shapes(text) for name, text in values.get("shapes", {}).items()}
    return ShapeRules(
        shapes=shapes,
        counts={prefix + path: text for path, text in values.get("counts", {}).items()},
        required=frozenset(shapes) - names(values, "optional") | names(values, "without_shape"),
        conditions={
            Condition(each["key"], each["kind"], tuple(map(as_hashable, each.get("values", ())))): names(each)
            for each in values.get("conditions", ())
        },
        models=values.get("models", {}),
        defaults=values.get("defaults", {}),
        aliases=values.get("aliases", {}),
        switches={
            Switch(each["key"], each["effect"], as_hashable(each["value"]), _read_companions(each)): names(each)
            for each in values.get("switches", ())
        },
        other_patterns=names(values, "others"),
    )


def _read_companions(switch: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((key, as_hashable(value)) for key, value in switch.get("beside", {}).items())


@lru_cache
def _parse_shapes(text: str) -> tuple[tuple[str, ...], ...]:
    """Return the shapes of a tensor, with an expression for each size, "" for an unknown one; () for a scalar."""
    return tuple(
        tuple("" if size == "?" else size for size in shape.split(", ")) if shape else () for shape in text.split(" | ")
    )
