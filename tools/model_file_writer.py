"""Write the data about model classes as the JSON documents that `ckptx.architecture.model_files` reads.

    encode_rows      ClassRow    -> the sections "classes", "bodies" and "structures"
    encode_shapes    ShapeRules  -> the sections "shapes" and "shape_bodies"
    encode_model     sections    -> the document of a model type, one key per line
    encode_index     classes     -> classes.json

The data below the base model that several classes share is written once, without its prefix, and named after the first
of these classes. The same contents give the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ckptx.architecture.architecture import TiePair
from ckptx.architecture.class_rows import ClassRow
from ckptx.architecture.model_files import SCHEMA, SECTIONS, Sections
from ckptx.architecture.shape_rules import ShapeRules
from ckptx.architecture.shared_layers import SharedLayers
from ckptx.architecture.structure import LoadConversion, StackRule, Structure

Values = dict[str, Any]

_WIDTH = 120


# ------------------------------------------------------------------------------------------------------------ documents


def encode_index(classes: Mapping[str, str], transformers_version: str) -> str:
    """Return the index of all classes.

    Args:
        classes: Class -> model type.
        transformers_version: Version of transformers that the classes come from.
    """
    known = {"schema": SCHEMA, "transformers": transformers_version, "classes": dict(sorted(classes.items()))}
    return _format_json(known, 0, 0) + "\n"


def encode_model(source: Mapping[str, Any], sections: Sections) -> str:
    """Return the document of one model type.

    Args:
        source: The directories and the digest of the code of the model.
        sections: Entries by section and name.
    """
    known = {"source": source, **{name: dict(sorted(sections[name].items())) for name in SECTIONS}}
    return _format_json(known, 0, 0) + "\n"


def _format_json(value: Any, indent: int, used: int) -> str:
    """Return JSON with one key per line; a list that does not fit in its line has one item per line.

    Args:
        value: Value to encode.
        indent: Number of spaces before the line.
        used: Number of characters before the value in its line, without these spaces.
    """
    pad = "\n" + " " * (indent + 1)
    if isinstance(value, Mapping) and value:
        lines = (f"{json.dumps(key)}: {_format_json(each, indent + 1, len(key) + 4)}" for key, each in value.items())
        return "{" + ",".join(pad + line for line in lines) + "\n" + " " * indent + "}"
    text = json.dumps(value)
    if isinstance(value, list | tuple) and value and (indent + used + len(text) > _WIDTH or _has_objects(value)):
        return "[" + ",".join(pad + _format_json(each, indent + 1, 0) for each in value) + "\n" + " " * indent + "]"
    return text


def _has_objects(values: Iterable[Any]) -> bool:
    return any(isinstance(each, Mapping) for each in values)


# -------------------------------------------------------------------------------------------------------------- classes


def encode_rows(rows: Iterable[ClassRow]) -> dict[str, dict[str, Any]]:
    """Return the sections of the classes of one model type."""
    ordered = sorted(rows, key=lambda row: row.class_name)
    bodies: dict[tuple[str, ...], str] = {}  # names -> the first class that has them
    structures: dict[str, str] = {}  # shared part as JSON -> the first class that has it
    return {
        "classes": {row.class_name: _encoded(row, bodies, structures) for row in ordered},
        "bodies": {owner: list(names) for names, owner in bodies.items()},
        "structures": {owner: json.loads(text) for text, owner in structures.items()},
    }


def _encoded(row: ClassRow, bodies: dict[tuple[str, ...], str], structures: dict[str, str]) -> Values:
    known = row.architecture
    if known is None:
        return {"introspect": row.introspection_reason}
    lead = f"{known.base_prefix}." if known.base_prefix else ""
    below = {name for name in known.name_patterns if lead and name.startswith(lead)}
    lead = lead if below else ""
    body = tuple(sorted(name.removeprefix(lead) for name in below or known.name_patterns))
    values = {
        "base_prefix": known.base_prefix,
        "ties_flag_editable": known.ties_flag_editable,
        "has_output_embeddings": known.has_output_embeddings,
        "body": bodies.setdefault(body, row.class_name),
        "body_below": lead.removesuffix("."),
        "names": sorted(known.name_patterns - below) if below else [],
        "ties": [_encoded_tie(pair) for pair in known.ties],
        "keep_in_fp32": list(known.keep_in_fp32),
        "keep_in_fp32_strict": list(known.keep_in_fp32_strict),
        "ignored": list(known.ignored),
        "shared_layers": _encoded_shared(row.shared_layers) if row.shared_layers else {},
        "sub_models": {key: list(types) for key, types in row.sub_models.items()},
        "structure": encode_structure(known.structure, lead, structures, row.class_name),
        "structures_by_text_model": {
            text: encode_structure(each, lead, structures, f"{row.class_name}/{text}")
            for text, each in sorted(row.structures.items())
        },
    }
    always = ("base_prefix", "ties_flag_editable", "has_output_embeddings", "body")
    return {key: value for key, value in values.items() if value or key in always}


def _encoded_tie(pair: TiePair) -> Values:
    values = {
        "namings": [list(naming) for naming in pair.namings],
        "flag_keys": [".".join(path) for path in pair.flag.paths],
        "flag_truth": pair.flag.truth,
    }
    return values if pair.is_primary else {**values, "is_primary": False}


def _encoded_shared(shared: SharedLayers) -> Values:
    return {
        "paths": list(shared.paths),
        "kinds": shared.kinds,
        "kind": shared.kind,
        "count": shared.count,
        "period": shared.period,
        "default": shared.default,
        "names": dict(sorted(shared.names.items())),
        "flag_keys": [".".join(path) for path in shared.flag.paths],
        "flag_truth": shared.flag.truth,
    }


# ----------------------------------------------------------------------------------------------------------- structures


def encode_structure(known: Structure, lead: str, shared_parts: dict[str, str], owner: str) -> Values:
    """Return the part of a structure that only this class has; the shared part goes to `shared_parts`.

    Args:
        known: The structure of the class.
        lead: Prefix of the base model with its dot; empty if the class is a base model.
        shared_parts: Shared part as JSON -> class that it is named after; an entry is added if there is none.
        owner: Name of the class.
    """
    shared = dataclasses.replace(
        known,
        head="",
        embedding=known.embedding if known.embedding.startswith(lead) else "",
        plan={key: style for key, style in known.plan.items() if key.startswith(lead)},
        stacks=tuple(_shared_stack(stack, lead) for stack in known.stacks if stack.path.startswith(lead)),
        heads={key: pairs for key, pairs in known.heads.items() if key.startswith(lead)},
        transposed=frozenset(each for each in known.transposed if each.startswith(lead)),
        conversions=frozenset(each for each in known.conversions if _is_below(each, lead)),
        other_conversions=frozenset(each for each in known.other_conversions if _is_below(each, lead)),
    )
    own = Structure(
        head=known.head,
        embedding="" if known.embedding.startswith(lead) else known.embedding,
        plan={key: style for key, style in known.plan.items() if not key.startswith(lead)},
        stacks=tuple(stack for stack in known.stacks if not stack.path.startswith(lead)),
        heads={key: pairs for key, pairs in known.heads.items() if not key.startswith(lead)},
        transposed=known.transposed - shared.transposed,
        conversions=known.conversions - shared.conversions,
        other_conversions=known.other_conversions - shared.other_conversions,
    )
    values = _structure_values(own, "")
    ends = [_own_ends(stack, lead) for stack in known.stacks if stack.path.startswith(lead)]
    values |= {"ends": ends} if any(part for end in ends for part in end.values()) else {}
    text = json.dumps(_structure_values(shared, lead))
    return ({"body": shared_parts.setdefault(text, owner)} if text != "{}" else {}) | values


def _shared_stack(stack: StackRule, lead: str) -> StackRule:
    before, after = (tuple(each for each in ends if each.startswith(lead)) for ends in (stack.before, stack.after))
    return StackRule(stack.path, stack.length, before, after)


def _own_ends(stack: StackRule, lead: str) -> dict[str, list[str]]:
    ends = {"before": stack.before, "after": stack.after}
    return {key: [each for each in names if not each.startswith(lead)] for key, names in ends.items()}


def _is_below(change: LoadConversion, lead: str) -> bool:
    return all(name.startswith(lead) for name in (*change.sources, *change.targets))


def _structure_values(known: Structure, lead: str) -> Values:
    """Return the fields that are not empty, with `lead` removed from names."""
    values = {
        "text": known.text_config_path,
        "text_type": known.text_type,
        "head": known.head,
        "embedding": known.embedding.removeprefix(lead),
        "plan": {key.removeprefix(lead): style for key, style in sorted(known.plan.items())},
        "stacks": [_stack_values(stack, lead) for stack in known.stacks],
        "heads": {key.removeprefix(lead): [list(pair) for pair in pairs] for key, pairs in sorted(known.heads.items())},
        "transposed": sorted(each.removeprefix(lead) for each in known.transposed),
        "renames": _renames(known.conversions, lead),
        "changes": _changes(known.conversions, lead),
        "other_renames": _renames(known.other_conversions, lead),
        "other_changes": _changes(known.other_conversions, lead),
        "defaults": dict(sorted(known.defaults.items())),
        "aliases": dict(sorted(known.aliases.items())),
    }
    return {key: value for key, value in values.items() if value}


def _stack_values(stack: StackRule, lead: str) -> Values:
    ends = {"before": stack.before, "after": stack.after}
    return {
        "path": stack.path.removeprefix(lead),
        "length": stack.length,
        **{key: [each.removeprefix(lead) for each in names] for key, names in ends.items() if names},
    }


def _renames(changes: Iterable[LoadConversion], lead: str) -> list[list[str]]:
    return sorted(
        [each.sources[0].removeprefix(lead), each.targets[0].removeprefix(lead)] for each in changes if not each.ops
    )


def _changes(changes: Iterable[LoadConversion], lead: str) -> list[Values]:
    return [
        {
            "sources": [name.removeprefix(lead) for name in each.sources],
            "targets": [name.removeprefix(lead) for name in each.targets],
            "ops": list(each.ops),
        }
        for each in sorted(each for each in changes if each.ops)
    ]


# --------------------------------------------------------------------------------------------------------------- shapes


def encode_shapes(rules: Mapping[str, tuple[str, ShapeRules]]) -> dict[str, dict[str, Any]]:
    """Return the sections of shapes of one model type.

    Args:
        rules: Class -> prefix of its base model, and its shape rules.
    """
    bodies: dict[str, str] = {}
    shapes = {}
    for name, (prefix, known) in sorted(rules.items()):
        lead = f"{prefix}." if prefix and any(each.startswith(f"{prefix}.") for each in known.shapes) else ""
        owner = bodies.setdefault(json.dumps(_shape_values(known, lead, True)), name)
        own = _shape_values(known, lead, False) if lead else {}
        shapes[name] = {"body": owner, **({"body_below": prefix} if lead else {}), **own}
    return {"shapes": shapes, "shape_bodies": {owner: json.loads(text) for text, owner in bodies.items()}}


def _shape_values(known: ShapeRules, lead: str, is_below: bool) -> Values:
    """Return the rules below `lead`, with defaults, aliases and model types, or the other rules."""

    def select(names: Iterable[str]) -> list[str]:
        return sorted(name.removeprefix(lead) for name in names if name.startswith(lead) is is_below)

    def select_items(texts: Mapping[str, str]) -> dict[str, str]:
        return {name: texts[lead + name if is_below else name] for name in select(texts)}

    values: Values = {
        "shapes": select_items({name: _shape_text(shapes) for name, shapes in known.shapes.items()}),
        "optional": select(set(known.shapes) - known.required),
        "without_shape": select(known.required - set(known.shapes)),
        "counts": select_items(known.counts),
        "conditions": [
            {
                "key": condition.key,
                "kind": condition.kind,
                **({"values": list(condition.values)} if condition.values else {}),
                "names": select(names),
            }
            for condition, names in sorted(known.conditions.items(), key=str)
            if select(names)
        ],
        "switches": [
            {
                "key": switch.key,
                "effect": switch.effect,
                "value": switch.value,
                **({"beside": dict(switch.companions)} if switch.companions else {}),
                "names": select(names),
            }
            for switch, names in sorted(known.switches.items(), key=str)
            if select(names)
        ],
        "others": select(known.other_patterns),
    }
    if is_below:
        values |= {"models": dict(known.models), "defaults": dict(known.defaults), "aliases": dict(known.aliases)}
    return {key: value for key, value in values.items() if value}


def _shape_text(shapes: tuple[tuple[str, ...], ...]) -> str:
    return " | ".join(", ".join(size or "?" for size in shape) for shape in shapes)
