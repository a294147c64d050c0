"""Write the data about model classes as the JSON documents that `ckptx.architecture.model_files` reads.

    encode_rows      ClassRecord    -> the sections "classes", "bodies" and "structures"
    encode_shapes    ShapeRules  -> the sections "shapes" and "shape_bodies"
    encode_model     sections    -> the document of a model type, one key per line
    encode_index     classes     -> classes.json

Classes with the same base model (LlamaModel, LlamaForCausalLM, ...) share most of their data. What is below the base
model is written once, as a body or a structure without the prefix of the base model ("model."), and named after the
first of the classes that have it. The same contents give the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ckptx.architecture.architecture import TiePair
from ckptx.architecture.class_decoding import ClassRecord
from ckptx.architecture.model_files import FACT_SECTIONS, SCHEMA, Sections
from ckptx.architecture.shape_rules import ShapeRules
from ckptx.architecture.shared_layers import SharedLayers
from ckptx.architecture.structure import LoadConversion, StackRule, Structure

Values = dict[str, Any]

_MAX_LINE_LENGTH = 120


# ------------------------------------------------------------------------------------------------------------ documents


def encode_index(classes: Mapping[str, str], transformers_version: str) -> str:
    """Return the index of all classes.

    Args:
        classes: Class -> model type.
        transformers_version: Version of transformers that the classes come from.
    """
    document = {"schema": SCHEMA, "transformers": transformers_version, "classes": dict(sorted(classes.items()))}
    return _format_json(document, 0, 0) + "\n"


def encode_model(source: Mapping[str, Any], sections: Sections) -> str:
    """Return the document of one model type.

    Args:
        source: The directories of transformers with the code of the model, and the digest of this code.
        sections: Section -> name -> entry.
    """
    document = {"source": source, **{name: dict(sorted(sections[name].items())) for name in FACT_SECTIONS}}
    return _format_json(document, 0, 0) + "\n"


def _format_json(value: Any, indent: int, used: int) -> str:
    """Return JSON with one key per line; a list that does not fit in its line has one item per line.

    Args:
        value: Value to encode.
        indent: Number of spaces at the start of its line.
        used: Number of characters between these spaces and the value.
    """
    pad = "\n" + " " * (indent + 1)
    if isinstance(value, Mapping) and value:
        lines = (f"{json.dumps(key)}: {_format_json(each, indent + 1, len(key) + 4)}" for key, each in value.items())
        return "{" + ",".join(pad + line for line in lines) + "\n" + " " * indent + "}"
    text = json.dumps(value)
    if (
        isinstance(value, list | tuple)
        and value
        and (indent + used + len(text) > _MAX_LINE_LENGTH or _has_objects(value))
    ):
        return "[" + ",".join(pad + _format_json(each, indent + 1, 0) for each in value) + "\n" + " " * indent + "]"
    return text


def _has_objects(values: Iterable[Any]) -> bool:
    return any(isinstance(each, Mapping) for each in values)


# -------------------------------------------------------------------------------------------------------------- classes


def encode_rows(rows: Iterable[ClassRecord]) -> dict[str, dict[str, Any]]:
    """Return the sections of the classes of one model type."""
    ordered = sorted(rows, key=lambda row: row.class_name)
    bodies: dict[tuple[str, ...], str] = {}  # name patterns -> the first class that has them
    structures: dict[str, str] = {}  # shared part of a structure, as JSON -> the first class that has it
    return {
        "classes": {row.class_name: _encode_row(row, bodies, structures) for row in ordered},
        "bodies": {owner: list(names) for names, owner in bodies.items()},
        "structures": {owner: json.loads(text) for text, owner in structures.items()},
    }


def _encode_row(row: ClassRecord, bodies: dict[tuple[str, ...], str], structures: dict[str, str]) -> Values:
    """Return the entry of a class; new shared parts are added to `bodies` and `structures`."""
    architecture = row.architecture
    if architecture is None:
        return {"introspect": row.introspection_reason}
    prefix = f"{architecture.base_prefix}." if architecture.base_prefix else ""
    names_below = {name for name in architecture.name_patterns if prefix and name.startswith(prefix)}
    prefix = prefix if names_below else ""
    body = tuple(sorted(name.removeprefix(prefix) for name in names_below or architecture.name_patterns))
    values = {
        "base_prefix": architecture.base_prefix,
        "ties_flag_editable": architecture.ties_flag_editable,
        "has_output_embeddings": architecture.has_output_embeddings,
        "body": bodies.setdefault(body, row.class_name),
        "body_below": prefix.removesuffix("."),
        "names": sorted(architecture.name_patterns - names_below) if names_below else [],
        "ties": [_encode_tie(pair) for pair in architecture.ties],
        "keep_in_fp32": list(architecture.keep_in_fp32),
        "keep_in_fp32_strict": list(architecture.keep_in_fp32_strict),
        "ignored": list(architecture.ignored),
        "shared_layers": _encode_shared_layers(row.shared_layers) if row.shared_layers else {},
        "sub_models": {key: list(types) for key, types in row.sub_models.items()},
        "structure": encode_structure(architecture.structure, prefix, structures, row.class_name),
        "structures_by_text_model": {
            text_type: encode_structure(each, prefix, structures, f"{row.class_name}/{text_type}")
            for text_type, each in sorted(row.structures.items())
        },
    }
    required_keys = ("base_prefix", "ties_flag_editable", "has_output_embeddings", "body")
    return {key: value for key, value in values.items() if value or key in required_keys}


def _encode_tie(pair: TiePair) -> Values:
    values = {
        "namings": [list(naming) for naming in pair.namings],
        "flag_keys": [".".join(path) for path in pair.flag.paths],
        "flag_truth": pair.flag.truth,
    }
    return values if pair.is_primary else {**values, "is_primary": False}


def _encode_shared_layers(shared: SharedLayers) -> Values:
    return {
        "paths": list(shared.paths),
        "kinds": shared.kinds_key,
        "kind": shared.kind,
        "count": shared.count_key,
        "period": shared.period_key,
        "default": shared.default_period,
        "names": dict(sorted(shared.names.items())),
        "flag_keys": [".".join(path) for path in shared.flag.paths],
        "flag_truth": shared.flag.truth,
    }


# ----------------------------------------------------------------------------------------------------------- structures


def encode_structure(structure: Structure, prefix: str, shared_parts: dict[str, str], owner: str) -> Values:
    """Return the part of a structure that only this class has; the shared part goes to `shared_parts`.

    Args:
        structure: The structure of the class.
        prefix: Prefix of the base model with its dot; empty if the class is a base model.
        shared_parts: Shared part as JSON -> class that it is named after; an entry is added if there is none.
        owner: Name under which the shared part is added: the class, or CLASS/TEXT_MODEL_TYPE.
    """
    shared = dataclasses.replace(
        structure,
        output_head="",
        embedding=structure.embedding if structure.embedding.startswith(prefix) else "",
        plan={key: style for key, style in structure.plan.items() if key.startswith(prefix)},
        stacks=tuple(_shared_stack(stack, prefix) for stack in structure.stacks if stack.path.startswith(prefix)),
        attention_heads={key: pairs for key, pairs in structure.attention_heads.items() if key.startswith(prefix)},
        transposed=frozenset(each for each in structure.transposed if each.startswith(prefix)),
        conversions=frozenset(each for each in structure.conversions if _is_below(each, prefix)),
        other_conversions=frozenset(each for each in structure.other_conversions if _is_below(each, prefix)),
    )
    own = Structure(
        output_head=structure.output_head,
        embedding="" if structure.embedding.startswith(prefix) else structure.embedding,
        plan={key: style for key, style in structure.plan.items() if not key.startswith(prefix)},
        stacks=tuple(stack for stack in structure.stacks if not stack.path.startswith(prefix)),
        attention_heads={key: pairs for key, pairs in structure.attention_heads.items() if not key.startswith(prefix)},
        transposed=structure.transposed - shared.transposed,
        conversions=structure.conversions - shared.conversions,
        other_conversions=structure.other_conversions - shared.other_conversions,
    )
    values = _structure_values(own, "")
    ends = [_own_ends(stack, prefix) for stack in structure.stacks if stack.path.startswith(prefix)]
    values |= {"ends": ends} if any(part for end in ends for part in end.values()) else {}
    shared_json = json.dumps(_structure_values(shared, prefix))
    return ({"body": shared_parts.setdefault(shared_json, owner)} if shared_json != "{}" else {}) | values


def _shared_stack(stack: StackRule, prefix: str) -> StackRule:
    """Return a stack of layers with only those modules before and after it that are below the base model."""
    before, after = (tuple(each for each in ends if each.startswith(prefix)) for ends in (stack.before, stack.after))
    return StackRule(stack.path, stack.length, before, after)


def _own_ends(stack: StackRule, prefix: str) -> dict[str, list[str]]:
    """Return the modules before and after a stack that are not below the base model."""
    ends = {"before": stack.before, "after": stack.after}
    return {key: [each for each in names if not each.startswith(prefix)] for key, names in ends.items()}


def _is_below(conversion: LoadConversion, prefix: str) -> bool:
    return all(name.startswith(prefix) for name in (*conversion.sources, *conversion.targets))


def _structure_values(structure: Structure, prefix: str) -> Values:
    """Return the fields that are not empty, with `prefix` removed from names."""
    values = {
        "text": structure.text_config_path,
        "text_type": structure.text_type,
        "head": structure.output_head,
        "embedding": structure.embedding.removeprefix(prefix),
        "plan": {key.removeprefix(prefix): style for key, style in sorted(structure.plan.items())},
        "stacks": [_stack_values(stack, prefix) for stack in structure.stacks],
        "heads": {
            key.removeprefix(prefix): [list(pair) for pair in pairs]
            for key, pairs in sorted(structure.attention_heads.items())
        },
        "transposed": sorted(each.removeprefix(prefix) for each in structure.transposed),
        "renames": _renames(structure.conversions, prefix),
        "changes": _changes(structure.conversions, prefix),
        "other_renames": _renames(structure.other_conversions, prefix),
        "other_changes": _changes(structure.other_conversions, prefix),
        "defaults": dict(sorted(structure.defaults.items())),
        "aliases": dict(sorted(structure.aliases.items())),
    }
    return {key: value for key, value in values.items() if value}


def _stack_values(stack: StackRule, prefix: str) -> Values:
    ends = {"before": stack.before, "after": stack.after}
    return {
        "path": stack.path.removeprefix(prefix),
        "length": stack.length,
        **{key: [each.removeprefix(prefix) for each in names] for key, names in ends.items() if names},
    }


def _renames(conversions: Iterable[LoadConversion], prefix: str) -> list[list[str]]:
    return sorted(
        [each.sources[0].removeprefix(prefix), each.targets[0].removeprefix(prefix)]
        for each in conversions
        if not each.ops
    )


def _changes(conversions: Iterable[LoadConversion], prefix: str) -> list[Values]:
    return [
        {
            "sources": [name.removeprefix(prefix) for name in each.sources],
            "targets": [name.removeprefix(prefix) for name in each.targets],
            "ops": list(each.ops),
        }
        for each in sorted(each for each in conversions if each.ops)
    ]


# --------------------------------------------------------------------------------------------------------------- shapes


def encode_shapes(rules: Mapping[str, tuple[str, ShapeRules]]) -> dict[str, dict[str, Any]]:
    """Return the sections of shapes of one model type.

    Args:
        rules: Class -> prefix of its base model, and its shape rules.
    """
    bodies: dict[str, str] = {}
    shapes = {}
    for name, (base_prefix, class_rules) in sorted(rules.items()):
        prefix = (
            f"{base_prefix}."
            if base_prefix and any(each.startswith(f"{base_prefix}.") for each in class_rules.shapes)
            else ""
        )
        owner = bodies.setdefault(json.dumps(_shape_values(class_rules, prefix, True)), name)
        own = _shape_values(class_rules, prefix, False) if prefix else {}
        shapes[name] = {"body": owner, **({"body_below": base_prefix} if prefix else {}), **own}
    return {"shapes": shapes, "shape_bodies": {owner: json.loads(shared_json) for shared_json, owner in bodies.items()}}


def _shape_values(rules: ShapeRules, prefix: str, is_below: bool) -> Values:
    """Return one part of the rules of a class.

    Args:
        rules: The rules.
        prefix: Prefix of the base model with its dot; empty if the rules have none.
        is_below: Return the rules of names with this prefix, without it, and defaults, aliases and model types of
            sub-configs; otherwise the rules of other names.
    """

    def select(names: Iterable[str]) -> list[str]:
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix) is is_below)

    def select_items(values: Mapping[str, str]) -> dict[str, str]:
        return {name: values[prefix + name if is_below else name] for name in select(values)}

    values: Values = {
        "shapes": select_items({name: _shape_text(shapes) for name, shapes in rules.shapes.items()}),
        "optional": select(set(rules.shapes) - rules.required),
        "without_shape": select(rules.required - set(rules.shapes)),
        "counts": select_items(rules.counts),
        "conditions": [
            {
                "key": condition.key,
                "kind": condition.kind,
                **({"values": list(condition.values)} if condition.values else {}),
                "names": select(names),
            }
            for condition, names in sorted(rules.conditions.items(), key=str)
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
            for switch, names in sorted(rules.switches.items(), key=str)
            if select(names)
        ],
        "others": select(rules.other_patterns),
    }
    if is_below:
        values |= {"models": dict(rules.models), "defaults": dict(rules.defaults), "aliases": dict(rules.aliases)}
    return {key: value for key, value in values.items() if value}


def _shape_text(shapes: tuple[tuple[str, ...], ...]) -> str:
    return " | ".join(", ".join(size or "?" for size in shape) for shape in shapes)
