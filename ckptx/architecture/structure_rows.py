"""Read the structures of a model file: JSON becomes a `Structure`.

The structure in the base model of a class is the same for all classes around that base model, so it is written once,
without the base model's prefix, and a class adds its own parts, above all the head:

    structures                       LlamaForCausalLM -> {"plan": {"layers.*.mlp.up_proj": "colwise", ...}, ...}
    classes, LlamaForCausalLM        "structure": {"body": "LlamaForCausalLM", "head": "lm_head", ...}

A rename is a pair of names, on disk and in the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptx.architecture.structure import LoadConversion, StackRule, Structure


def decode_structure(own: Mapping[str, Any], shared: Mapping[str, Any], lead: str) -> Structure:
    """Return the structure of a class.

    Args:
        own: Structure that the class adds.
        shared: Structure of its base model.
        lead: Prefix of the base model with its dot; "" if the class is a base model itself.
    """
    base, above = _read(shared, lead), _read(own, "")
    stacks = list(base.stacks)
    for at, ends in enumerate(own.get("ends", ())):
        stack = stacks[at]
        stacks[at] = stack._replace(
            before=stack.before + tuple(ends["before"]), after=stack.after + tuple(ends["after"])
        )
    return dataclasses.replace(
        base,
        head=above.head,
        embedding=above.embedding or base.embedding,
        plan={**above.plan, **base.plan},
        stacks=(*stacks, *above.stacks),
        heads={**above.heads, **base.heads},
        transposed=base.transposed | above.transposed,
        changes=base.changes | above.changes,
        variants=base.variants | above.variants,
    )


def _read(values: Mapping[str, Any], lead: str) -> Structure:
    def names(key: str, of: Mapping[str, Any] = values) -> tuple[str, ...]:
        return tuple(lead + each for each in of.get(key, ()))

    def changes(renames: Iterable[Any], others: Iterable[Mapping[str, Any]]) -> Iterator[LoadConversion]:
        for source, target in renames:
            yield LoadConversion((lead + source,), (lead + target,))
        for each in others:
            yield LoadConversion(names("sources", each), names("targets", each), tuple(each["ops"]))

    return Structure(
        text=values.get("text", ""),
        text_type=values.get("text_type", ""),
        head=values.get("head", ""),
        embedding=lead + values["embedding"] if "embedding" in values else "",
        plan={lead + pattern: style for pattern, style in values.get("plan", {}).items()},
        stacks=tuple(
            StackRule(lead + each["path"], each["length"], names("before", each), names("after", each))
            for each in values.get("stacks", ())
        ),
        heads={
            lead + pattern: tuple((count, size) for count, size in pairs)
            for pattern, pairs in values.get("heads", {}).items()
        },
        transposed=frozenset(names("transposed")),
        changes=frozenset(changes(values.get("renames", ()), values.get("changes", ()))),
        variants=frozenset(changes(values.get("other_renames", ()), values.get("other_changes", ()))),
        defaults=values.get("defaults", {}),
        aliases=values.get("aliases", {}),
    )
