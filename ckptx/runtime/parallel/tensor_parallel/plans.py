"""Which tensor parallel plan a model gets: one lookup, with the same rules that cut files.

Order of trust: the user's plan; overrides and optimized plans; the model's own plan; replicate. A rule says two things:
how a tensor is cut, and how the forward pass runs on the pieces. The first is followed always, so that a rank holds
what `ckptx reshard` writes for it. The second only where the plan was made for running (the model's own plan, or one
verified here): elsewhere the tensors of a module are gathered around its forward pass, which is right for every model.

    model.layers.*.self_attn.q_proj   colwise   model plan -> runs on shards
    transformer.h.*.attn.c_attn       colwise   override   -> sharded, gathered around transformer.h.*.attn
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from ckptx.architecture.correction_rows import Sequence
from ckptx.architecture.find import find_architecture
from ckptx.architecture.plans import layer_overrides
from ckptx.architecture.spec import Architecture
from ckptx.errors import UnsupportedError, UsageError
from ckptx.layout.styles import STYLES, Kind
from ckptx.layout.tensor_parallel_plan import Rule, TensorParallelPlan
from ckptx.runtime.parallel.tensor_parallel.forward_traits import (
    ForwardTraits,
    forward_traits_of,
    is_stock,
    qualified_name,
)

GATHERING = ("colwise_gather_output", "colwise_rep")  # styles that need no whole heads
SPLITTING = ("rowwise_split_input", "rowwise_rep")  # and these none
# A number of heads counts only where this flag of the same config is true.
_ONLY_WITH = {"num_global_key_value_heads": "attention_k_eq_v"}


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model is cut, and how it runs.

    Attributes:
        class_name: Of the model, for messages.
        cuts: What `ckptx.layout.tensor_parallel_plan.decide` follows.
        origins: Pattern -> who decided it, for patterns of this model.
        runs: Patterns whose tensors the forward pass uses as shards; all others are gathered.
        sharded_head: The module whose output stays sharded over the vocabulary, empty for none.
        reads_weight: Module -> another module whose weight its forward reads.
        sequence: Where norms and residuals run on slices of the sequence; None for nowhere.
    """

    class_name: str
    cuts: TensorParallelPlan
    origins: Mapping[str, str]
    runs: frozenset[str]
    sharded_head: str = ""
    reads_weight: Mapping[str, str] = field(default_factory=dict)
    sequence: Sequence | None = None

    def rule_of(self, path: str) -> tuple[str, Rule] | None:
        """The pattern and rule for a parameter, or for a module whose own name matches."""
        return self.cuts.rule_for(path)

    def style_of(self, module: str) -> str:
        """The style of the module itself, "replicate" when no rule names it."""
        found = self.cuts.rule_for(f"{module}._")
        return found[1].style if found else "replicate"

    def runs_on_shards(self, parameter: str) -> bool:
        """Whether the forward pass uses a parameter as it is cut."""
        found = self.cuts.rule_for(parameter)
        return found is not None and found[0] in self.runs


def find_plan(
    model: nn.Module,
    config: Mapping[str, Any],
    user: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
    names: Iterable[str] | None = None,
) -> Plan:
    """The plan of a model.

    Args:
        model: Of any device; a pipeline stage is fine.
        config: The contents of its `config.json`.
        user: Pattern -> style, on top of everything else.
        sequence_parallel: Run norms and residuals on slices of the sequence.
        names: Of all parameters of the whole model, where `model` is but a stage of it.

    Raises:
        UsageError: The user's plan matches no parameter, or has an unknown style.
        UnsupportedError: The model's plan does, or sequence parallel is not verified for the class.
    """
    known = list(names) if names is not None else [name for name, _ in model.named_parameters(remove_duplicate=False)]
    row = forward_traits_of(model)
    base = _base_plan(model, config, known)
    running = _running(base, row) if is_stock(model) or base.decided_by == "class" else frozenset[str]()
    cuts = base.plan
    if row.styles:
        rules = {pattern: Rule(style, "optimized plan", row.reason) for pattern, style in row.styles.items()}
        cuts, running = TensorParallelPlan(rules, cuts), running | rules.keys()
    if user is not None:
        cuts = TensorParallelPlan.from_user(user, "tensor parallel plan", fallback=cuts)
        if user and len(cuts.unmatched(known)) == len(cuts.rules):
            raise UsageError(
                f"tensor parallel plan: none of its {len(user)} patterns matches a parameter of "
                f"{type(model).__name__}, needed names such as {known[0] if known else 'none'}; correct the patterns"
            )
        agreeing = {pattern for pattern, style in user.items() if _agrees(base.plan, pattern, style, running)}
        running = (running - user.keys()) | agreeing
    if sequence_parallel and row.sequence is None:
        raise UnsupportedError(
            f"{qualified_name(type(model))}: sequence parallel is not verified for this class; "
            "run it without sequence parallel"
        )
    return Plan(
        type(model).__name__,
        cuts,
        _origins(cuts, known, row),
        running,
        row.head if _is_own_head(cuts, row.head) else "",
        row.reads_weight if _says(model, row.reads_when) else {},
        row.sequence if sequence_parallel else None,
    )


def check_heads(config: Mapping[str, Any], tp: int, architecture: Architecture) -> None:
    """Refuses a number of TP ranks that does not divide the heads of attention, before anything is built.

    Only heads that the forward pass sees sharded count: a projection whose output is gathered may be cut anywhere.

    Raises:
        UnsupportedError: A number of heads does not divide by `tp`.
    """
    plan = architecture.tensor_parallel_plan(config)
    text = _text_config(config, architecture)
    for pattern in plan.patterns():
        found = plan.rule_for(pattern)
        if found is None or tp == 1 or not _needs_heads(plan, found[0], found[1]):
            continue
        for count, _ in found[1].heads:
            key = _field_of(text, count)
            flag = _ONLY_WITH.get(key)
            if count % tp and (flag is None or text.get(flag)):
                raise UnsupportedError(
                    f"{architecture.class_name}: {key} is {count}, needed a multiple of tp={tp} for {pattern}; "
                    f"choose a tp that divides {count}"
                )


class _BasePlan(NamedTuple):
    """The plan below the user's; `decided_by` is "table" or "class"."""

    plan: TensorParallelPlan
    decided_by: str


def _base_plan(model: nn.Module, config: Mapping[str, Any], names: list[str]) -> _BasePlan:
    """Overrides and the model's own plan, from the table, else from the class itself.

    Raises:
        UnsupportedError: The class has a plan that matches nothing, or a style that nobody knows.
    """
    architecture = find_architecture(config)
    if architecture is not None:
        plan = architecture.tensor_parallel_plan(config)
        if plan.patterns() and len(_unmatched(plan, names)) < len(plan.patterns()):
            return _BasePlan(plan, "table")
    stated = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    decided_by = f"plan of {type(model).__name__}"
    plan = TensorParallelPlan({pattern: Rule(style, decided_by) for pattern, style in stated.items()})
    if stated and len(plan.unmatched(names)) == len(stated):
        raise UnsupportedError(
            f"{qualified_name(type(model))}: none of the {len(stated)} patterns of its tensor parallel plan matches a "
            "parameter; give a plan of your own"
        )
    return _BasePlan(plan, "class")


def _running(base: _BasePlan, row: ForwardTraits) -> frozenset[str]:
    """Patterns of rules that were made for running."""
    found = set()
    for pattern in base.plan.patterns():
        hit = base.plan.rule_for(pattern)
        if hit is None or hit[0] != pattern:
            continue
        if _is_made_for_running(base.plan, pattern, hit[1]) or pattern in row.runs:
            found.add(pattern)
    return frozenset(found)


def _is_made_for_running(plan: TensorParallelPlan, pattern: str, rule: Rule) -> bool:
    """True for the model's own plan, for an override that repeats it, and for embeddings and output heads."""
    if rule.decided_by != "override":
        return True
    own = plan.fallback.rules.get(pattern) if plan.fallback is not None else None
    is_vocabulary = rule.style in ("embedding_rowwise", *GATHERING)  # either of them gives its module's whole output
    return (own is not None and own.style == rule.style) or is_vocabulary


def _agrees(plan: TensorParallelPlan, pattern: str, style: str, running: frozenset[str]) -> bool:
    """Whether a plan says the same of a pattern, and was made for running there."""
    found = plan.rule_for(pattern) or plan.rule_for(f"{pattern}._")
    return found is not None and found[1].style == style and found[0] in running


def _needs_heads(plan: TensorParallelPlan, pattern: str, rule: Rule) -> bool:
    kind = STYLES[rule.style]
    is_sharded = kind in (Kind.COLWISE, Kind.ROWWISE) and rule.style not in (*GATHERING, *SPLITTING)
    return bool(rule.heads) and is_sharded and _is_made_for_running(plan, pattern, rule)


def _text_config(config: Mapping[str, Any], architecture: Architecture) -> Mapping[str, Any]:
    """The config of the layers."""
    structure = architecture.structure
    found: Any = config
    for key in (*structure.root, *filter(None, structure.text.split("."))):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else config


def _field_of(config: Mapping[str, Any], count: int) -> str:
    """The key of a config that says a number of heads; the most special one of several that say the same."""
    values = [*config.items(), *(item for layer in layer_overrides(config) for item in layer.items())]
    fields = [key for key, value in values if key.endswith(("heads", "n_head")) and value == count]
    return max(fields, key=lambda key: len(key), default="the number of attention heads")


def _says(model: nn.Module, key: str) -> bool:
    """Whether the config of the text model has this key, and not zero."""
    config: Any = getattr(model, "config", None)
    return bool(key) and config is not None and bool(getattr(config.get_text_config(), key, None))


def _is_own_head(plan: TensorParallelPlan, head: str) -> bool:
    """Whether the plan cuts the head by its rows and gathers its output: a user may want it otherwise."""
    found = plan.rule_for(f"{head}.weight") if head else None
    return found is not None and found[1].style in GATHERING


def _origins(plan: TensorParallelPlan, names: list[str], row: ForwardTraits) -> dict[str, str]:
    """Who decided, by pattern, in the order of the parameters."""
    found: dict[str, str] = {}
    for name in names:
        hit = plan.rule_for(name)
        if hit is not None:
            found[hit[0]] = "optimized plan" if hit[0] in (row.head, *row.runs) else hit[1].decided_by
    return found


def _unmatched(plan: TensorParallelPlan, names: list[str]) -> list[str]:
    below = _unmatched(plan.fallback, names) if plan.fallback is not None else []
    return [*plan.unmatched(names), *below]
