"""Evaluate a structure under a ``config.json``: plan, stacks (lists of layers), and conversions with numbers.

Precedence for a plan: corrections, then the model's own plan, then rules for the embedding and the output head;
unmatched tensors are replicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptx.architecture.correction_types import PlanCorrection, expand_braces
from ckptx.architecture.corrections import absent_corrections, plan_corrections
from ckptx.architecture.expressions import Scope, evaluate, try_evaluate
from ckptx.architecture.fused import compositions_of
from ckptx.architecture.structure import (
    Heads,
    LoadConversion,
    StackRule,
    Structure,
    in_sub_config,
    matches_parameter,
    split_op,
)
from ckptx.errors import InputError
from ckptx.layout.stages import Stack
from ckptx.layout.tensor_parallel_plan import Rule, TensorParallelPlan
from ckptx.mapping.names import pattern_of
from ckptx.mapping.ops import Conversion, Op
from ckptx.untrusted.limits import MAX_LAYERS

_VOCABULARY_REASON = "vocabulary rows"


def plan_of(
    structure: Structure,
    model_type: str,
    config: Mapping[str, Any],
    names: frozenset[str],
    version: str,
    *,
    is_in_table: bool = True,
) -> TensorParallelPlan:
    """Return the plan of a class: its corrections, its own plan, and rules for an embedding and a head without one.

    Args:
        structure: Structure of the class.
        model_type: Model type of its config.
        config: Contents of `config.json`.
        names: Patterns of its tensors.
        version: Version of transformers that was introspected.
        is_in_table: See `Architecture.is_in_table`; fused projections are known only if it is True.

    Raises:
        InputError: A number that a rule reads is a string or a fraction in the config.
    """
    scope = _structure_scope(structure, config)
    scopes = _layer_scopes(structure, scope)
    model_rules = {
        pattern: Rule(
            style,
            f"model plan (transformers {version})",
            heads=_evaluate_heads(structure.attention_heads.get(pattern, ()), scopes),
            transposed=pattern in structure.transposed,
        )
        for pattern, style in structure.plan.items()
    }
    compositions = compositions_of(structure, scopes, is_in_table=is_in_table)
    plan = TensorParallelPlan(model_rules, compositions=compositions)
    overrides = dict(_correction_rules(structure, model_type, scopes))
    vocabulary_modules = ((structure.embedding, "embedding_rowwise"), (structure.output_head, "colwise_gather_output"))
    for path, style in vocabulary_modules:
        if (
            path
            and structure.stacks
            and matches_parameter(path, names)
            and path not in overrides
            and path not in model_rules
        ):
            overrides[path] = Rule(style, "override", _VOCABULARY_REASON)
    return TensorParallelPlan(overrides, plan, compositions) if overrides else plan


def stacks_of(structure: Structure, config: Mapping[str, Any]) -> tuple[Stack, ...]:
    """Return the lists of layers in the order they run.

    Raises:
        InputError: `config.json` does not give a number of layers, or it is not between 0 and `MAX_LAYERS`.
    """
    scope = _structure_scope(structure, config)
    return tuple(Stack(stack.path, _layer_count(stack, scope), stack.before, stack.after) for stack in structure.stacks)


def _layer_count(stack: StackRule, scope: Scope) -> int:
    count = evaluate(stack.length, scope)
    if not 0 <= count <= MAX_LAYERS:
        raise InputError(f"config.json: {stack.length} is {count} and must be between 0 and {MAX_LAYERS:,}; correct it")
    return count


def conversions_of(structure: Structure, config: Mapping[str, Any]) -> tuple[Conversion, ...]:
    """Return the conversions of every naming, that of `save_pretrained` first.

    A name of the model that is written unchanged, and has another naming that loads, is mapped to itself.

    Raises:
        InputError: The config lacks a number that an operation needs.
    """
    scope = _structure_scope(structure, config)
    saved_targets = {target for change in structure.conversions for target in change.targets}
    unchanged = sorted({target for change in structure.other_conversions for target in change.targets} - saved_targets)
    changes = (
        *sorted(structure.conversions),
        *(LoadConversion((name,), (name,)) for name in unchanged),
        *sorted(structure.other_conversions),
    )
    return tuple(
        Conversion(change.sources, change.targets, tuple(_parse_op(op, scope) for op in change.ops))
        for change in changes
    )


def is_unused(structure: Structure, model_type: str, name: str, config: Mapping[str, Any]) -> bool:
    """Return True if the model does not use a tensor, although its pattern is one of the class.

    Args:
        structure: Structure of the class.
        model_type: Model type of the class.
        name: Model name of the tensor.
        config: Contents of `config.json`.

    Raises:
        InputError: The config lacks a number that decides it.
    """
    corrections = absent_corrections(structure.text_type, model_type)
    if not corrections:
        return False
    pattern = pattern_of(name)
    for stack in structure.stacks:
        prefix = stack.path + "."
        for absent in corrections if name.startswith(prefix) else ():
            index = name.removeprefix(prefix).split(".")[0]
            modules = expand_braces(absent.patterns.replace("@layers", stack.path))
            if index.isdecimal() and any(matches_parameter(module, (pattern,)) for module in modules):
                return int(index) >= evaluate(
                    in_sub_config(absent.first_layer, structure.text_config_path), _structure_scope(structure, config)
                )
    return False


def _correction_rules(structure: Structure, model_type: str, scopes: Sequence[Scope]) -> Iterator[tuple[str, Rule]]:
    """Yield the patterns of the corrections that apply under a config, each with its rule.

    Args:
        structure: Structure of the class.
        model_type: Model type of the class.
        scopes: Result of `_layer_scopes`; the first, of the whole config, decides whether a correction applies.
    """
    scope = scopes[0]
    for correction in plan_corrections(structure.text_type, model_type):
        if not try_evaluate(in_sub_config(correction.when, structure.text_config_path), scope):
            continue
        groups = [try_evaluate(in_sub_config(each, structure.text_config_path), scope) for each in correction.groups]
        if None in groups:
            continue
        pairs = tuple(
            (in_sub_config(count, structure.text_config_path), in_sub_config(size, structure.text_config_path))
            for count, size in correction.heads
        )
        rule_heads = _evaluate_heads(pairs, scopes)
        for pattern in _correction_patterns(correction, structure):
            yield (
                pattern,
                Rule(
                    correction.style,
                    "override",
                    correction.reason,
                    tuple(each for each in groups if each is not None),
                    rule_heads,
                    pattern in structure.transposed,
                ),
            )


def _correction_patterns(correction: PlanCorrection, structure: Structure) -> Iterator[str]:
    """Yield the patterns of a correction for every list of layers, with its path in place of `@layers`."""
    for stack in structure.stacks:
        container = stack.path.rpartition(".")[0]
        text = correction.patterns.replace("@layers", stack.path)
        yield from expand_braces(text.replace("@around.", f"{container}." if container else ""))


def _evaluate_heads(heads: Heads, scopes: Sequence[Scope]) -> tuple[tuple[int, int], ...]:
    """Return the numbers (count, size) of the candidates under every scope, without those that a config lacks."""
    found = ((try_evaluate(count, scope), try_evaluate(size, scope)) for scope in scopes for count, size in heads)
    return tuple(dict.fromkeys((count, size) for count, size in found if count and size))


def _layer_scopes(structure: Structure, scope: Scope) -> list[Scope]:
    """Return the scope of a config, and one for each set of numbers in `per_layer_config`."""
    path = (*scope.root, *filter(None, structure.text_config_path.split(".")))
    node: Any = scope.config
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return [scope, *(scope._replace(config=_with_numbers(scope.config, path, each)) for each in layer_overrides(node))]


def layer_overrides(text: Any) -> list[dict[str, int]]:
    """Return the distinct sets of integers with which single layers override the config of a text model.

    transformers 5.23 and later write them: ``{"per_layer_config": {"5": {"head_dim": 512}}}`` gives
    ``[{"head_dim": 512}]``. Empty without overrides, and if `text`, the config of the text model, is no mapping.
    """
    layers = text.get("per_layer_config") if isinstance(text, Mapping) else None
    kinds: dict[tuple[tuple[str, int], ...], None] = {}
    for layer in layers.values() if isinstance(layers, Mapping) else ():
        numbers = layer.items() if isinstance(layer, Mapping) else ()
        kinds[tuple(sorted((key, number) for key, number in numbers if type(number) is int))] = None
    return [dict(kind) for kind in kinds if kind]


def _with_numbers(config: Mapping[str, Any], path: Sequence[str], numbers: Mapping[str, int]) -> dict[str, Any]:
    """Return a config with other numbers in the part at `path`."""
    if not path:
        return {**config, **numbers}
    return {**config, path[0]: _with_numbers(config[path[0]], path[1:], numbers)}


def _parse_op(text: str, scope: Scope) -> Op:
    """Parse an operation in the form of `split_op`, and evaluate its expressions."""
    (kind, *numbers), expressions = split_op(text)
    if kind.startswith("unsupported:"):
        return Op(kind)
    values = [int(number) for number in numbers]
    arguments = tuple(evaluate(each, scope) for each in expressions)
    if kind == "transpose":
        return Op(kind, values[0], values[1], (1, *arguments) if values[2] else ())
    if kind == "interleave":
        return Op(kind, values[0], args=(1,) if values[1] else ())
    if kind == "permute_rope":
        return Op(kind, 0, args=(*arguments, *values))
    return Op(kind, values[0], args=arguments)


def _structure_scope(structure: Structure, config: Mapping[str, Any]) -> Scope:
    return Scope(config, structure.defaults, structure.aliases, structure.root)
