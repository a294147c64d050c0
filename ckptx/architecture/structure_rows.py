"""A ``Structure`` as JSON, and back.

What lies below the base model of a class is the same for all classes around that base model, so it is written once,
without the base model's prefix, in a line of its own:

    {"structure":"LlamaForCausalLM","plan":{"colwise":"layers.*.mlp.{gate_proj,up_proj}"},...}

and a class adds what is its own, the head above all. Renames are written by what differs in front of a common ending:

    ["language_model.model","model.language_model","embed_tokens.weight,norm.weight"]
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptx.architecture.patterns import pack, unpack
from ckptx.architecture.structure import Change, Heads, StackRule, Structure

Values = dict[str, Any]


def encode_structure(known: Structure, lead: str, lines: dict[str, str], owner: str) -> Values:
    """The part of a class; the shared part goes to `lines`.

    Args:
        known: What to write.
        lead: The base model's prefix with its dot, empty when the class is a base model itself.
        lines: Shared part as text -> the class it is named after; gains an entry if there is none yet.
        owner: The class.
    """
    shared = dataclasses.replace(
        known,
        head="",
        embedding=known.embedding if known.embedding.startswith(lead) else "",
        plan={key: style for key, style in known.plan.items() if key.startswith(lead)},
        stacks=tuple(_shared_stack(stack, lead) for stack in known.stacks if stack.path.startswith(lead)),
        heads={key: pairs for key, pairs in known.heads.items() if key.startswith(lead)},
        transposed=frozenset(each for each in known.transposed if each.startswith(lead)),
        changes=frozenset(each for each in known.changes if _is_below(each, lead)),
        variants=frozenset(each for each in known.variants if _is_below(each, lead)),
    )
    own = Structure(
        head=known.head,
        embedding="" if known.embedding.startswith(lead) else known.embedding,
        plan={key: style for key, style in known.plan.items() if not key.startswith(lead)},
        stacks=tuple(stack for stack in known.stacks if not stack.path.startswith(lead)),
        heads={key: pairs for key, pairs in known.heads.items() if not key.startswith(lead)},
        transposed=known.transposed - shared.transposed,
        changes=known.changes - shared.changes,
        variants=known.variants - shared.variants,
    )
    values = _written(own, "")
    ends = [_own_ends(stack, lead) for stack in known.stacks if stack.path.startswith(lead)]
    values |= {"ends": ends} if any(part for end in ends for part in end) else {}
    text = json.dumps(_written(shared, lead), separators=(",", ":"), ensure_ascii=True)
    return ({"from": lines.setdefault(text, owner)} if text != "{}" else {}) | values


def decode_structure(values: Mapping[str, Any], shared: Mapping[str, Any], lead: str) -> Structure:
    """The structure of a class line and its shared line, the reverse of `encode_structure`."""
    base, own = _read(shared, lead), _read(values, "")
    stacks = list(base.stacks)
    for at, (before, after) in enumerate(values.get("ends", ())):
        stack = stacks[at]
        stacks[at] = stack._replace(before=stack.before + tuple(before), after=stack.after + tuple(after))
    return dataclasses.replace(
        base,
        head=own.head,
        embedding=own.embedding or base.embedding,
        plan={**own.plan, **base.plan},
        stacks=(*stacks, *own.stacks),
        heads={**own.heads, **base.heads},
        transposed=base.transposed | own.transposed,
        changes=base.changes | own.changes,
        variants=base.variants | own.variants,
    )


def _shared_stack(stack: StackRule, lead: str) -> StackRule:
    before, after = (tuple(each for each in ends if each.startswith(lead)) for ends in (stack.before, stack.after))
    return StackRule(stack.path, stack.length, before, after)


def _own_ends(stack: StackRule, lead: str) -> tuple[list[str], list[str]]:
    before, after = ([each for each in ends if not each.startswith(lead)] for ends in (stack.before, stack.after))
    return before, after


def _is_below(change: Change, lead: str) -> bool:
    return all(name.startswith(lead) for name in (*change.sources, *change.targets))


def _written(known: Structure, lead: str) -> Values:
    """Every field that says something; names without `lead`."""
    styles: dict[str, list[str]] = {}
    for key, style in known.plan.items():
        styles.setdefault(style, []).append(key.removeprefix(lead))
    heads: dict[Heads, list[str]] = {}
    for key, pairs in known.heads.items():
        heads.setdefault(pairs, []).append(key.removeprefix(lead))
    values = {
        "text": known.text,
        "type": known.text_type,
        "head": known.head,
        "embedding": known.embedding.removeprefix(lead),
        "plan": {style: pack(keys) for style, keys in sorted(styles.items())},
        "stacks": [_stack_values(stack, lead) for stack in known.stacks],
        "heads": sorted([list(pairs), pack(keys)] for pairs, keys in heads.items()),
        "transposed": pack(each.removeprefix(lead) for each in known.transposed),
        "renames": _renames(known.changes, lead),
        "changes": _fusions(known.changes, lead),
        "other_renames": _renames(known.variants, lead),
        "other_changes": _fusions(known.variants, lead),
        "defaults": dict(sorted(known.defaults.items())),
        "aliases": dict(sorted(known.aliases.items())),
    }
    return {key: value for key, value in values.items() if value}


def _stack_values(stack: StackRule, lead: str) -> list[Any]:
    ends = ([each.removeprefix(lead) for each in names] for names in (stack.before, stack.after))
    return [stack.path.removeprefix(lead), stack.length, *ends]


def _read(values: Mapping[str, Any], lead: str) -> Structure:
    stacks = tuple(
        StackRule(lead + path, length, tuple(lead + each for each in before), tuple(lead + each for each in after))
        for path, length, before, after in values.get("stacks", ())
    )
    return Structure(
        text=values.get("text", ""),
        text_type=values.get("type", ""),
        head=values.get("head", ""),
        embedding=lead + values["embedding"] if "embedding" in values else "",
        plan={lead + key: style for style, keys in values.get("plan", {}).items() for key in unpack(keys)},
        stacks=stacks,
        heads={
            lead + key: tuple((count, size) for count, size in pairs)
            for pairs, keys in values.get("heads", ())
            for key in unpack(keys)
        },
        transposed=frozenset(lead + each for each in unpack(values.get("transposed", ""))),
        changes=frozenset(_read_changes(values.get("renames", ()), values.get("changes", ()), lead)),
        variants=frozenset(_read_changes(values.get("other_renames", ()), values.get("other_changes", ()), lead)),
        defaults=values.get("defaults", {}),
        aliases=values.get("aliases", {}),
    )


def _renames(changes: Iterable[Change], lead: str) -> list[list[str]]:
    pairs = ((each.sources[0], each.targets[0]) for each in changes if not each.ops)
    return _grouped((source.removeprefix(lead), target.removeprefix(lead)) for source, target in pairs)


def _fusions(changes: Iterable[Change], lead: str) -> list[list[list[str]]]:
    return [
        [*([name.removeprefix(lead) for name in names] for names in (each.sources, each.targets)), list(each.ops)]
        for each in sorted(each for each in changes if each.ops)
    ]


def _read_changes(renames: Iterable[Any], fusions: Iterable[Any], lead: str) -> Iterator[Change]:
    for sources, targets, ops in fusions:
        yield Change(tuple(lead + each for each in sources), tuple(lead + each for each in targets), tuple(ops))
    for source, target, endings in renames:
        for ending in unpack(endings) if endings else ("",):
            yield Change((lead + _joined(source, ending),), (lead + _joined(target, ending),))


def _grouped(renames: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Pairs of names as [front of the source, front of the target, endings they share]."""
    endings: dict[tuple[str, str], list[str]] = {}
    for source, target in renames:
        old, new = source.split("."), target.split(".")
        ending: list[str] = []
        while old and new and old[-1] == new[-1]:
            ending.insert(0, old.pop())
            new.pop()
        endings.setdefault((".".join(old), ".".join(new)), []).append(".".join(ending))
    return [
        [source, target, pack(each for each in shared if each)] for (source, target), shared in sorted(endings.items())
    ]


def _joined(front: str, ending: str) -> str:
    return f"{front}.{ending}" if front and ending else front or ending
