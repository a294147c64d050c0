"""Decode the structures in a model file: JSON becomes a `Structure`.

The structure in the base model of a class is the same for all classes around that base model, so it is written once,
without the base model's prefix, and a class adds its own parts, above all the head:

    structures                       LlamaForCausalLM -> {"plan": {"layers.*.mlp.up_proj": "colwise", ...}, ...}
    classes, LlamaForCausalLM        "structure": {"body": "LlamaForCausalLM", "head": "lm_head", ...}

A rename is a pair of patterns, on disk and in the model. `ends` has the modules before and after each list of layers
that the class adds to those of the base model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptx.architecture.structure import LoadConversion, StackRule, Structure


def decode_structure(own: Mapping[str, Any], shared: Mapping[str, Any], prefix: str) -> Structure:
    """Return the structure of a class.

    Args:
        own: JSON of the structure that the class adds.
        shared: JSON of the structure of its base model; empty if there is none.
        prefix: Prefix of the base model with its dot; "" if the class is a base model itself.
    """
    base, additions = _read_structure(shared, prefix), _read_structure(own, "")
    stacks = list(base.stacks)
    for index, ends in enumerate(own.get("ends", ())):
        stack = stacks[index]
        stacks[index] = stack._replace(
            before=stack.before + tuple(ends["before"]), after=stack.after + tuple(ends["after"])
        )
    return dataclasses.replace(
        base,
        output_head=additions.output_head,
        embedding=additions.embedding or base.embedding,
        plan={**additions.plan, **base.plan},
        stacks=(*stacks, *additions.stacks),
        attention_heads={**additions.attention_heads, **base.attention_heads},
        transposed=base.transposed | additions.transposed,
        conversions=base.conversions | additions.conversions,
        other_conversions=base.other_conversions | additions.other_conversions,
    )


def _read_structure(values: Mapping[str, Any], prefix: str) -> Structure:
    """Return the structure in an entry of `structures`, or in that of a class, with the prefix before each pattern."""

    def names(key: str, section: Mapping[str, Any] = values) -> tuple[str, ...]:
        return tuple(prefix + each for each in section.get(key, ()))

    def conversions(renames: Iterable[Any], others: Iterable[Mapping[str, Any]]) -> Iterator[LoadConversion]:
        for source, target in renames:
            yield LoadConversion((prefix + source,), (prefix + target,))
        for each in others:
            yield LoadConversion(names("sources", each), names("targets", each), tuple(each["ops"]))

    return Structure(
        text_config_path=values.get("text", ""),
        text_type=values.get("text_type", ""),
        output_head=values.get("head", ""),
        embedding=prefix + values["embedding"] if "embedding" in values else "",
        plan={prefix + pattern: style for pattern, style in values.get("plan", {}).items()},
        stacks=tuple(
            StackRule(prefix + each["path"], each["length"], names("before", each), names("after", each))
            for each in values.get("stacks", ())
        ),
        attention_heads={
            prefix + pattern: tuple((count, size) for count, size in pairs)
            for pattern, pairs in values.get("heads", {}).items()
        },
        transposed=frozenset(names("transposed")),
        conversions=frozenset(conversions(values.get("renames", ()), values.get("changes", ()))),
        other_conversions=frozenset(conversions(values.get("other_renames", ()), values.get("other_changes", ()))),
        defaults=values.get("defaults", {}),
        aliases=values.get("aliases", {}),
    )
