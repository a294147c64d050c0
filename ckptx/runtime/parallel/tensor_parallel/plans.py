"""Selects the tensor parallel plan of a model, with the same rules that shard files.

Precedence: the user's plan; overrides and optimized plans (see `forward_traits`); the model's own plan; replicate. A
rule decides how a tensor is sharded, and how the forward pass runs on the shards. The first is always followed, so that
a rank holds the shards that `ckptx reshard` writes for it. The second is followed only if the plan was made for running
(the model's own plan, or an optimized plan): otherwise the tensors of a module are gathered around its forward pass,
which is correct for every model.

    model.layers.*.self_attn.q_proj   colwise   model plan -> runs on shards
    transformer.h.*.attn.c_attn       colwise   override   -> sharded, gathered around transformer.h.*.attn
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from ckptx.architecture.correction_types import SequenceParallelModules
from ckptx.architecture.lookup import find_architecture
from ckptx.architecture.run_support import GATHER_STYLES, is_valid_for_forward
from ckptx.errors import UnsupportedError, UsageError
from ckptx.layout.tensor_parallel_plan import Rule, TensorParallelPlan
from ckptx.runtime.parallel.tensor_parallel.forward_traits import (
    ForwardTraits,
    find_forward_traits,
    has_stock_forward,
    qualified_name,
)


@dataclass(frozen=True, slots=True)
class TpPlan:
    """The sharding of a model's parameters, and the ways its forward pass runs on them.

    Attributes:
        class_name: Class name of the model, for messages.
        sharding: Rules for `ckptx.layout.tensor_parallel_plan.decide_placement`.
        origins: Pattern -> origin of the decision (`Rule.decided_by`, or "optimized plan"), for patterns whose rule
            decides a parameter of this model.
        runnable_patterns: Patterns whose tensors the forward pass uses as shards; all others are gathered.
        sharded_head: Name of the module whose output stays sharded over the vocabulary; empty for none.
        reads_weight: Name of a module -> name of another module whose weight its forward reads.
        sequence: Modules for sequence parallelism; None without it.
    """

    class_name: str
    sharding: TensorParallelPlan
    origins: Mapping[str, str]
    runnable_patterns: frozenset[str]
    sharded_head: str = ""
    reads_weight: Mapping[str, str] = field(default_factory=dict)
    sequence: SequenceParallelModules | None = None

    def rule_of(self, path: str) -> tuple[str, Rule] | None:
        """Return the pattern and rule for a parameter, or for a module by its own name; None if no rule matches."""
        return self.sharding.find_rule(path)

    def style_of(self, module: str) -> str:
        """Return the style of the module itself; "replicate" if no rule matches it."""
        match = self.sharding.find_rule(f"{module}._")  # only a rule of the module matches this parameter name
        return match[1].style if match else "replicate"

    def runs_on_shards(self, parameter: str) -> bool:
        """Return True if the forward pass uses a parameter as shards."""
        match = self.sharding.find_rule(parameter)
        return match is not None and match[0] in self.runnable_patterns


def find_plan(
    model: nn.Module,
    config: Mapping[str, Any],
    user_plan: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
    names: Iterable[str] | None = None,
) -> TpPlan:
    """Return the plan of a model.

    Args:
        model: Model on any device; a pipeline stage is fine.
        config: Contents of its `config.json`.
        user_plan: User's plan, pattern -> style, which takes precedence over everything else.
        sequence_parallel: Run norms and residuals on slices of the sequence.
        names: Names of all parameters of the whole model, if `model` is a stage of it; None means those of `model`.

    Raises:
        UsageError: No pattern of the user's plan matches a parameter, one would shard a module that has no
            weight, or the plan has an unknown style.
        UnsupportedError: No pattern of the model's own plan matches a parameter, or it has an unknown style, or
            sequence parallelism is not verified for the class.
    """
    parameter_names = (
        list(names) if names is not None else [name for name, _ in model.named_parameters(remove_duplicate=False)]
    )
    traits = find_forward_traits(model)
    base_plan = _find_base_plan(model, config, parameter_names)
    runnable_patterns = (
        _find_runnable_patterns(base_plan, traits)
        if has_stock_forward(model) or base_plan.source == "class"
        else frozenset[str]()
    )
    sharding = base_plan.plan
    if traits.styles:
        rules = {pattern: Rule(style, "optimized plan", traits.reason) for pattern, style in traits.styles.items()}
        sharding, runnable_patterns = TensorParallelPlan(rules, sharding), runnable_patterns | rules.keys()
    if user_plan is not None:
        sharding = TensorParallelPlan.from_user(user_plan, "tensor parallel plan", fallback=sharding)
        if user_plan and len(sharding.find_unmatched_patterns(parameter_names)) == len(sharding.rules):
            raise UsageError(
                f"tensor parallel plan: none of its {len(user_plan)} patterns matches a parameter of "
                f"{type(model).__name__}, such as {parameter_names[0] if parameter_names else 'none'}; correct the "
                "patterns"
            )
        sharding.refuse_modules_without_weight(parameter_names, "tensor parallel plan")
        confirmed_patterns = {
            pattern
            for pattern, style in user_plan.items()
            if _is_confirmed(base_plan.plan, pattern, style, runnable_patterns)
        }
        runnable_patterns = (runnable_patterns - user_plan.keys()) | confirmed_patterns
    if sequence_parallel and traits.sequence is None:
        raise UnsupportedError(
            f"{qualified_name(type(model))}: sequence parallel is not verified for this class; "
            "run it without sequence parallelism"
        )
    return TpPlan(
        type(model).__name__,
        sharding,
        _find_origins(sharding, parameter_names, traits),
        runnable_patterns,
        traits.sharded_head if _is_output_head_sharded(sharding, traits.sharded_head) else "",
        traits.reads_weight if _is_key_set(model, traits.reads_weight_key) else {},
        traits.sequence if sequence_parallel else None,
    )


class _BasePlan(NamedTuple):
    """The plan without the user's.

    Attributes:
        plan: Overrides and the model's own plan.
        source: "table" (of architectures), or "class" for the plan of the model's class, even if it has none.
    """

    plan: TensorParallelPlan
    source: str


def _find_base_plan(model: nn.Module, config: Mapping[str, Any], names: list[str]) -> _BasePlan:
    """Return overrides and the model's own plan, from the table of architectures, else from the class itself.

    Raises:
        UnsupportedError: No pattern of the plan of the class matches a parameter, or it has an unknown style.
    """
    architecture = find_architecture(config)
    if architecture is not None:
        plan = architecture.tensor_parallel_plan(config)
        if plan.patterns() and len(_unmatched_patterns(plan, names)) < len(plan.patterns()):
            return _BasePlan(plan, "table")
    class_plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    decided_by = f"plan of {type(model).__name__}"
    plan = TensorParallelPlan({pattern: Rule(style, decided_by) for pattern, style in class_plan.items()})
    if class_plan and len(plan.find_unmatched_patterns(names)) == len(class_plan):
        raise UnsupportedError(
            f"{qualified_name(type(model))}: none of the {len(class_plan)} patterns of its tensor parallel plan "
            "matches a parameter; pass your own plan"
        )
    return _BasePlan(plan, "class")


def _find_runnable_patterns(base_plan: _BasePlan, traits: ForwardTraits) -> frozenset[str]:
    """Return the patterns for whose tensors the forward pass is known to be correct on shards."""
    patterns = set()
    for pattern in base_plan.plan.patterns():
        match = base_plan.plan.find_rule(pattern)
        if match is None or match[0] != pattern:
            continue
        if is_valid_for_forward(base_plan.plan, pattern, match[1]) or pattern in traits.runnable_patterns:
            patterns.add(pattern)
    return frozenset(patterns)


def _is_confirmed(plan: TensorParallelPlan, pattern: str, style: str, runnable_patterns: frozenset[str]) -> bool:
    """Return True if a base plan gives a pattern of the user the same style, by a pattern that is runnable."""
    match = plan.find_rule(pattern) or plan.find_rule(f"{pattern}._")
    return match is not None and match[1].style == style and match[0] in runnable_patterns


def _is_key_set(model: nn.Module, key: str) -> bool:
    """Return True if the config of the text model has this key with a nonzero value."""
    config: Any = getattr(model, "config", None)
    return bool(key) and config is not None and bool(getattr(config.get_text_config(), key, None))


def _is_output_head_sharded(plan: TensorParallelPlan, head: str) -> bool:
    """Return True if the plan has a style for the head that shards its rows and gathers its output.

    A plan of the user may have another style. False for an empty `head`.
    """
    match = plan.find_rule(f"{head}.weight") if head else None
    return match is not None and match[1].style in GATHER_STYLES


def _find_origins(plan: TensorParallelPlan, names: list[str], traits: ForwardTraits) -> dict[str, str]:
    """Return the origin of each decision by pattern, in the order of the parameters."""
    origins: dict[str, str] = {}
    for name in names:
        match = plan.find_rule(name)
        if match is not None:
            origins[match[0]] = (
                "optimized plan"
                if match[0] in (traits.sharded_head, *traits.runnable_patterns)
                else match[1].decided_by
            )
    return origins


def _unmatched_patterns(plan: TensorParallelPlan, names: list[str]) -> list[str]:
    """Return the patterns of a plan and of its fallbacks that match no name."""
    fallback_patterns = _unmatched_patterns(plan.fallback, names) if plan.fallback is not None else []
    return [*plan.find_unmatched_patterns(names), *fallback_patterns]
