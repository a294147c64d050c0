"""Shapes as the file of a model type has them: ``ShapeRules`` as JSON, and back.

What lies below the base model of a class is written once for all classes around that base model, without its prefix:

    shapes          LlamaForCausalLM -> {"at":"model","body":"LlamaModel",...}
    shape_bodies    LlamaModel -> {"shapes":{"hidden_size":"layers.*.{...}.weight,norm.weight"},...}

A shape is written as its sizes with commas between them, ``?`` for one that is not known, and several shapes with a
bar. Patterns under a shape are required unless they are among ``optional``. ``switches`` names the values of keys that
add or remove patterns, ``others`` the patterns of the measured config that have no shape.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ckptx.architecture.patterns import pack, unpack
from ckptx.architecture.shape_rules import Condition, ShapeRules, Switch, plain

Values = dict[str, Any]


def encode_shapes(rules: Mapping[str, tuple[str, ShapeRules]]) -> dict[str, dict[str, Any]]:
    """The sections of one model type; the same rules give the same entries.

    Args:
        rules: Per class the prefix of its base model, and its rules.
    """
    bodies: dict[str, str] = {}
    shapes = {}
    for name, (prefix, known) in sorted(rules.items()):
        lead = f"{prefix}." if prefix and any(each.startswith(f"{prefix}.") for each in known.shapes) else ""
        shared = json.dumps(_written(known, lead, True), separators=(",", ":"))
        owner = bodies.setdefault(shared, name)
        own = _written(known, lead, False) if lead else {}
        shapes[name] = {**({"at": prefix} if lead else {}), "body": owner, **own}
    return {"shapes": shapes, "shape_bodies": {owner: json.loads(text) for text, owner in bodies.items()}}


def decode_shapes(class_name: str, sections: Mapping[str, Mapping[str, Any]]) -> ShapeRules | None:
    """The rules of a class; None where there are none.

    Args:
        class_name: Of the class.
        sections: Of the file that holds it.
    """
    values = sections["shapes"].get(class_name)
    if values is None:
        return None
    lead = f"{values['at']}." if "at" in values else ""
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


def _written(known: ShapeRules, lead: str, is_below: bool) -> Values:
    """What lies below `lead`, or what does not; numbers and part names go with the first."""

    def chosen(names: Iterable[str]) -> list[str]:
        return [name.removeprefix(lead) for name in names if name.startswith(lead) is is_below]

    def grouped(texts: Mapping[str, str]) -> dict[str, str]:
        groups: dict[str, list[str]] = {}
        for name in chosen(texts):
            groups.setdefault(texts[lead + name if is_below else name], []).append(name)
        return {text: pack(names) for text, names in sorted(groups.items())}

    conditions = [
        [condition.key, condition.kind, list(condition.values), pack(chosen(names))]
        for condition, names in sorted(known.conditions.items(), key=str)
        if chosen(names)
    ]
    switches = [
        [switch.key, switch.effect, switch.value, pack(chosen(names))]
        for switch, names in sorted(known.switches.items(), key=str)
        if chosen(names)
    ]
    values: Values = {
        "shapes": grouped({name: _shape_text(shapes) for name, shapes in known.shapes.items()}),
        "optional": pack(chosen(set(known.shapes) - known.required)),
        "more": pack(chosen(known.required - set(known.shapes))),
        "counts": grouped(known.counts),
        "when": conditions,
        "switches": switches,
        "others": pack(chosen(known.others)),
    }
    if is_below:
        values |= {"models": dict(known.models), "defaults": dict(known.defaults), "aliases": dict(known.aliases)}
    return {key: value for key, value in values.items() if value}


def _read(values: Mapping[str, Any], lead: str) -> ShapeRules:
    shapes = {lead + name: _shapes(text) for text, names in values.get("shapes", {}).items() for name in unpack(names)}
    optional = {lead + name for name in unpack(values.get("optional", ""))}
    return ShapeRules(
        shapes=shapes,
        counts={lead + path: text for text, paths in values.get("counts", {}).items() for path in unpack(paths)},
        required=frozenset(set(shapes) - optional) | {lead + name for name in unpack(values.get("more", ""))},
        conditions={
            Condition(key, kind, tuple(tuple(each) if isinstance(each, list) else each for each in told)): frozenset(
                lead + name for name in unpack(names)
            )
            for key, kind, told, names in values.get("when", ())
        },
        models=values.get("models", {}),
        defaults=values.get("defaults", {}),
        aliases=values.get("aliases", {}),
        switches={
            Switch(key, effect, plain(value)): frozenset(lead + name for name in unpack(names))
            for key, effect, value, names in values.get("switches", ())
        },
        others=frozenset(lead + name for name in unpack(values.get("others", ""))),
    )


def _shape_text(shapes: tuple[tuple[str, ...], ...]) -> str:
    return "|".join(",".join(text or "?" for text in shape) for shape in shapes)


def _shapes(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(
        tuple("" if size == "?" else size for size in shape.split(",")) if shape else () for shape in text.split("|")
    )
