"""Tensor parallel plan, pattern -> style, and the placement of each tensor that follows from it.

    {"model.layers.*.self_attn.q_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise"}

The plan that shards modules at run time also shards files. Styles follow transformers
(`distributed/tensor_parallel.py`) except for these tensors, which it does not shard correctly:

* a bias of a packed weight is sharded in the groups of its weight; transformers ignores the packing;
* a bias of fused experts ([E, out], named `*_bias`) is sharded along its last dim or not at all, never by expert;
* a scale is sharded only if the shards of its weight end between blocks;
* a dim of one element is replicated; in transformers only the first rank has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ckptx.catalog.region import Shape
from ckptx.errors import UnsupportedError, UsageError
from ckptx.layout.composition import Compositions, Part, holds_whole_parts
from ckptx.layout.placement import Placement, is_aligned, scale_placement
from ckptx.layout.styles import STYLES, StyleKind
from ckptx.untrusted.limits import INDEX_IN_NAME

USER_PLAN = "user plan"
EXPERT_PARALLEL = "--ep"  # `PlacementDecision.decided_by` of the tensors of experts
_NO_COMPOSITIONS = Compositions()


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of a plan for the tensors of one pattern.

    Attributes:
        style: One of `STYLES`.
        decided_by: Origin of the rule: "user plan", "override" (a rule of ckptx), or "model plan" followed by the
            version of transformers that has the plan.
        reason: Explanation for the report; "" if the origin is enough.
        groups: Widths of the parts that are fused along the sharded dim; empty for a single part.
        heads: Candidates (count, size): the sharded dim holds `count` heads of `size` elements. The first whose product
            equals the dim is used; if none does, shards are not checked against heads.
        transposed: True if the weight is stored [in, out], as in Conv1D.
    """

    style: str
    decided_by: str
    reason: str = ""
    groups: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    """Rules by pattern, in model names.

    A pattern is the name of a parameter or of the module that holds it. A component `*` stands for any index. The style
    of a module applies to its weight and bias; other parameters, such as those of fused experts, need their own rules.

    Attributes:
        rules: Pattern -> rule.
        fallback: Plan for parameters without a rule here, even if its rules are more specific; None for none.
        compositions: Heads and fused parts of the tensors of the model; None to use those of the fallback.

    Raises:
        UnsupportedError: A rule has an unknown style.
    """

    rules: Mapping[str, Rule]
    fallback: TensorParallelPlan | None = None
    compositions: Compositions | None = field(default=None, compare=False)
    _patterns_by_wildcards: Mapping[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_wildcards: dict[str, list[str]] = {}
        for pattern, rule in self.rules.items():
            if rule.style not in STYLES:
                raise UnsupportedError(
                    f'{rule.decided_by}: "{pattern}" has the unknown style "{rule.style}"; override it in your own TP '
                    f"plan with one of {_known_styles()}"
                )
            by_wildcards.setdefault(_replace_indices(pattern), []).append(pattern)
        ordered = {key: tuple(sorted(patterns, key=_specificity_key)) for key, patterns in by_wildcards.items()}
        object.__setattr__(self, "_patterns_by_wildcards", ordered)

    @classmethod
    def from_user(
        cls, plan: object, source: str = "--tp-plan", fallback: TensorParallelPlan | None = None
    ) -> TensorParallelPlan:
        """Create a plan from the mapping of pattern -> style that a user wrote.

        Args:
            plan: Parsed JSON value.
            source: Option or file it comes from, for errors.
            fallback: Plan of the model; None for none.

        Raises:
            UsageError: The value is not such a mapping, a pattern cannot match any name, or a style is unknown.
        """
        if not isinstance(plan, Mapping):
            raise UsageError(
                f"{source}: expected an object of pattern -> style, such as "
                f'{{"model.layers.*.self_attn.q_proj": "colwise"}}, found {type(plan).__name__}'
            )
        for pattern, style in plan.items():
            if not isinstance(pattern, str) or not _is_pattern(pattern):
                raise UsageError(
                    f"{source}: invalid pattern {pattern!r}; use names joined by dots, with `*` for a whole index, "
                    'such as "model.layers.*.self_attn.q_proj"'
                )
            if not isinstance(style, str) or style not in STYLES:
                raise UsageError(f'{source}: unknown style {style!r} for "{pattern}"; use one of {_known_styles()}')
        return cls({pattern: Rule(style, USER_PLAN) for pattern, style in plan.items()}, fallback)

    def find_rule(self, name: str) -> tuple[str, Rule] | None:
        """Return the pattern and the rule for a parameter; None if there is no rule.

        A pattern of the parameter itself takes precedence over one of its module, and concrete indices over `*`.
        """
        pattern = self._find_match(name) or ("." in name and self._find_match(name.rpartition(".")[0]))
        if pattern:
            return pattern, self.rules[pattern]
        return self.fallback.find_rule(name) if self.fallback is not None else None

    def find_rules(self, name: str) -> list[Rule]:
        """Return the rules for a parameter in this plan and in its fallbacks, this plan first."""
        pattern = self._find_match(name) or ("." in name and self._find_match(name.rpartition(".")[0]))
        rules = [self.rules[pattern]] if pattern else []
        return rules + (self.fallback.find_rules(name) if self.fallback is not None else [])

    def resolve_compositions(self) -> Compositions:
        """Return the compositions of this plan, or of the first fallback that has some."""
        if self.compositions is not None:
            return self.compositions
        return self.fallback.resolve_compositions() if self.fallback is not None else _NO_COMPOSITIONS

    def patterns(self) -> list[str]:
        """Return the patterns of this plan, then those of the fallback."""
        return [*self.rules, *(self.fallback.patterns() if self.fallback is not None else ())]

    def find_unmatched_patterns(self, names: Iterable[str]) -> list[str]:
        """Return the patterns of this plan, without its fallback, that match none of `names`, in the order of the plan.

        A pattern matches a name if it equals the name or its module. If its style does not shard, it may also be any
        module around these.
        """
        missing = dict(self.rules)
        for name in names:
            if not missing:
                break
            path = name
            for depth in range(name.count(".") + 1):
                for pattern in self._iterate_matches(path):
                    if depth < 2 or not STYLES[self.rules[pattern].style].is_sharding:
                        missing.pop(pattern, None)
                path = path.rpartition(".")[0]
        return list(missing)

    def refuse_modules_without_weight(self, names: Iterable[str], source: str = "--tp-plan") -> None:
        """Refuse a pattern of this plan that names a module without a weight, such as fused experts, to shard it.

        A style determines the dim and the parts of a single matrix only, and such a module has several: the plans in
        transformers name each of them.

        Args:
            names: Names of all parameters.
            source: Option or file that the plan comes from, for the error.

        Raises:
            UsageError: There is such a pattern.
        """
        leaves_by_module: dict[str, list[str]] = {}
        for name in names:
            module, _, leaf = name.rpartition(".")
            leaves_by_module.setdefault(module, []).append(leaf)
        for module, leaves in leaves_by_module.items():
            pattern = self._find_match(module)
            if pattern is None or "weight" in leaves or not STYLES[self.rules[pattern].style].is_sharding:
                continue
            unnamed = [leaf for leaf in leaves if leaf != "bias" and self._find_match(f"{module}.{leaf}") is None]
            if unnamed:
                raise UsageError(
                    f'{source}: "{pattern}" names a module without a weight, whose parameters are '
                    f"{', '.join(sorted(leaves)[:4])}; use a rule for each parameter to be sharded, such as "
                    f'"{pattern}.{unnamed[0]}": "{self.rules[pattern].style}"'
                )

    def _iterate_matches(self, path: str) -> Iterable[str]:
        """Yield the patterns of exactly this parameter or module, the most concrete first."""
        key = _replace_indices(path)
        return (
            found for found in self._patterns_by_wildcards.get(key, ()) if found == key or _matches_indices(found, path)
        )

    def _find_match(self, path: str) -> str | None:
        return next(iter(self._iterate_matches(path)), None)


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """Decision on the TP placement of one tensor.

    Attributes:
        placement: TP placement; None if the tensor is replicated.
        decided_by: `Rule.decided_by`, "default" if no rule matches, or "--ep" for a tensor of experts.
        reason: Short explanation for the report.
        aligned: True if each rank holds whole heads, or groups, of every part that is fused along the sharded dim,
            so that a TP layer can compute on the shard as stored; True for a tensor that is not sharded. None if it is
            not known whether parts are fused there, because the class is unknown.
        is_expert_parallel: True if expert parallelism distributes the tensor instead of TP. `placement` is then that of
            its experts along dim 0; None for a tensor of a single expert.
    """

    placement: Placement | None
    decided_by: str
    reason: str
    aligned: bool | None
    is_expert_parallel: bool = False

    @property
    def is_distributed(self) -> bool:
        """Return True if no rank holds the whole tensor, or if only one EP rank does."""
        return self.placement is not None or self.is_expert_parallel


def decide_placement(
    plan: TensorParallelPlan,
    name: str,
    shape: Shape,
    tp: int,
    weight: tuple[Shape, Placement | None] | None = None,
) -> PlacementDecision:
    """Decide the TP placement of one tensor of the model.

    Args:
        plan: Tensor parallel plan.
        name: Model name of the tensor.
        shape: Shape of the whole tensor.
        tp: Number of TP ranks.
        weight: Shape and placement of the weight of the same module, for a tensor that may be its scale; None if the
            module has no weight.
    """
    match = plan.find_rule(name)
    leaf = name.rpartition(".")[2]
    decided_by = match[1].decided_by if match else "default"
    is_named = match is not None and match[0].count(".") == name.count(".")
    may_be_scale = not is_named and leaf not in ("weight", "bias")
    if may_be_scale and weight is not None:
        placement, reason = (None, "tp is 1") if tp == 1 else scale_placement(*weight, shape, tp)
        weight_name = name.removesuffix(leaf) + "weight"
        has_whole_heads: bool | None = placement is None
        if placement is not None:
            has_whole_heads = is_aligned(shape, placement, tp) and _has_whole_parts(
                plan, weight_name, weight[0], weight[1], tp
            )
        return PlacementDecision(placement, decided_by, reason, has_whole_heads)
    if match is None:
        return PlacementDecision(None, decided_by, "no rule; replicated", True)
    rule = match[1]
    kind = STYLES[rule.style]
    if tp == 1:
        return PlacementDecision(None, decided_by, "tp is 1", True)
    if kind is StyleKind.EXPERT:
        return PlacementDecision(None, decided_by, "expert parallelism is not TP; replicated", True)
    if may_be_scale and kind.is_sharding:
        return PlacementDecision(None, decided_by, "no weight or bias, and no rule of its own; replicated", True)
    dim = _find_sharded_dim(kind, leaf, len(shape), _is_transposed(plan, name))
    if dim is None:
        return PlacementDecision(None, decided_by, _append_reason(f"{rule.style} keeps it whole", rule), True)
    decision = _shard_along(dim, kind, rule, shape, tp)
    return replace(decision, aligned=_has_whole_parts(plan, name, shape, decision.placement, tp))


def _shard_along(dim: int, kind: StyleKind, rule: Rule, shape: Shape, tp: int) -> PlacementDecision:
    """Return the decision to shard along `dim`, with the groups and head size along it."""
    n = shape[dim]
    if n < 2:
        return PlacementDecision(None, rule.decided_by, f"dim {dim} has size {n}, replicated", True)
    groups: tuple[int, ...] = (n,)
    if rule.groups:
        groups = rule.groups
        if sum(groups) != n:
            reason = f"dim {dim} has size {n}, its groups {'+'.join(map(str, groups))} do not add up; replicated"
            return PlacementDecision(None, rule.decided_by, reason, True)
    elif kind in (StyleKind.PACKED_COLWISE, StyleKind.PACKED_ROWWISE):
        groups = (n - n // 2, n // 2)
    align = next((size for count, size in rule.heads if count * size == n), 1)
    placement = Placement(dim, groups, align)
    fused = f" in groups {'+'.join(map(str, groups))}" if len(groups) > 1 else ""
    reason = _append_reason(f"{rule.style} shards dim {dim}{fused}", rule)
    return PlacementDecision(placement, rule.decided_by, reason, True)


def _is_transposed(plan: TensorParallelPlan, name: str) -> bool:
    """Return True if the weight is stored [in, out], whichever rule shards it."""
    module = _replace_indices(name.rpartition(".")[0])
    return module in plan.resolve_compositions().transposed or any(rule.transposed for rule in plan.find_rules(name))


def _has_whole_parts(
    plan: TensorParallelPlan, name: str, shape: Shape, placement: Placement | None, tp: int
) -> bool | None:
    """Return True if each rank holds whole heads, or groups, of every part along the sharded dim; None if unknown."""
    if placement is None:
        return True
    if not is_aligned(shape, placement, tp):
        return False
    parts = _find_parts(plan, name, shape, placement.dim)
    if parts is None:
        return None if plan.resolve_compositions().is_of_unknown_class else True
    return bool(parts) and holds_whole_parts(shape, placement, parts, tp)


def _find_parts(plan: TensorParallelPlan, name: str, shape: Shape, dim: int) -> tuple[Part, ...] | None:
    """Return the parts that lie along a dim.

    Groups and heads in the rules of the model take precedence, whichever rule shards the tensor; then comes the
    composition of the module. For an unknown class, the style that shards the tensor comes last: a packed style
    declares two parts, and one for an embedding declares one.

    Returns:
        The parts. None if nothing but the rule that shards the tensor is known, so that the parts are unknown; empty
            if there are heads or fused parts whose sizes are unknown.
    """
    leaf, n = name.rpartition(".")[2], shape[dim]
    is_transposed, has_other_dim = _is_transposed(plan, name), False
    for rule in plan.find_rules(name):
        rule_dim = _find_sharded_dim(STYLES[rule.style], leaf, len(shape), is_transposed)
        rule_parts = (
            None if rule.decided_by == USER_PLAN or rule_dim is None else _find_rule_parts(rule, shape[rule_dim])
        )
        if rule_parts is not None and rule_dim == dim:
            return rule_parts
        has_other_dim = has_other_dim or rule_parts is not None
    compositions = plan.resolve_compositions()
    composition = compositions.find(name)
    dims = _feature_dims(composition.side, leaf, len(shape), is_transposed) if composition is not None else ()
    if compositions.is_of_unknown_class and composition is None:
        return _find_declared_parts(plan, name, n)
    if composition is None or has_other_dim or dim not in dims:
        return ((n, 1),) if compositions.is_complete or composition is not None else None
    return composition.parts(n) or ()


def _find_declared_parts(plan: TensorParallelPlan, name: str, n: int) -> tuple[Part, ...] | None:
    """Return the parts of a dim of size `n` that the rule for a tensor declares; None if it may hold any.

    A rule of ckptx for an embedding or head declares that its rows are the vocabulary.
    """
    rule = plan.find_rules(name)[0]
    kind = STYLES[rule.style]
    if kind in (StyleKind.PACKED_COLWISE, StyleKind.PACKED_ROWWISE):
        return ((n - n // 2, 1), (n // 2, 1))
    is_vocabulary = any(each.decided_by == "override" for each in plan.find_rules(name))
    return ((n, 1),) if is_vocabulary or kind in (StyleKind.EMBEDDING_ROWWISE, StyleKind.EMBEDDING_COLWISE) else None


def _find_rule_parts(rule: Rule, n: int) -> tuple[Part, ...] | None:
    """Return the parts that a rule of the model knows of the dim that it shards, of size `n`; None if it knows none."""
    head = next((size for count, size in rule.heads if count * size == n), 1)
    if rule.groups and sum(rule.groups) == n:
        sizes = [head if width % head == 0 else 1 for width in rule.groups]
        return tuple((width // size, size) for width, size in zip(rule.groups, sizes, strict=True))
    if head > 1:
        return ((n // head, head),)
    if STYLES[rule.style] in (StyleKind.PACKED_COLWISE, StyleKind.PACKED_ROWWISE):
        return ((n - n // 2, 1), (n // 2, 1))
    return None


def _feature_dims(side: str, leaf: str, ndim: int, transposed: bool) -> tuple[int, ...]:
    """Return the dim of the output or input features of a tensor; empty if it has none."""
    is_bias = leaf == "bias" or leaf.endswith("_bias")
    if side == "in":
        return () if is_bias else ((ndim - 2,) if transposed and ndim == 2 else (ndim - 1,))
    if leaf == "weight" and ndim > 2:  # a convolution: [channels, .., width]
        return (0,)
    dim = _find_sharded_dim(StyleKind.COLWISE, leaf, ndim, transposed)
    return () if dim is None else (dim,)


def _find_sharded_dim(kind: StyleKind, leaf: str, ndim: int, transposed: bool) -> int | None:
    """Return the dim of a tensor that a style shards; None if it keeps the tensor whole.

    The weight of an nn.Linear is [out, in], fused experts are [experts, out, in].
    """
    is_bias = leaf == "bias" or leaf.endswith("_bias")
    out_dim, in_dim = (ndim - 1, ndim - 2) if transposed and ndim == 2 else (ndim - 2, ndim - 1)
    if ndim == 0:
        return None
    if kind in (StyleKind.COLWISE, StyleKind.PACKED_COLWISE):
        return ndim - 1 if is_bias or ndim == 1 else out_dim
    if kind is StyleKind.ROWWISE:
        return None if is_bias else max(in_dim, 0)
    if kind is StyleKind.PACKED_ROWWISE:
        return None if is_bias or ndim == 1 else in_dim
    if kind is StyleKind.EMBEDDING_ROWWISE:
        return 0
    if kind is StyleKind.EMBEDDING_COLWISE:
        return 1 if ndim > 1 else None
    return None


def _append_reason(text: str, rule: Rule) -> str:
    return f"{text}; {rule.reason}" if rule.reason else text


def _replace_indices(path: str) -> str:
    """Return the path with every index replaced by `*`."""
    return INDEX_IN_NAME.sub("*", path)


def _matches_indices(pattern: str, path: str) -> bool:
    """Return True if a pattern matches a path that differs from it only in indices."""
    return all(a in ("*", b) for a, b in zip(pattern.split("."), path.split("."), strict=True))


def _specificity_key(pattern: str) -> tuple[int, list[bool]]:
    """Return a sort key: fewer `*` first, then a concrete index further left first."""
    stars = [part == "*" for part in pattern.split(".")]
    return sum(stars), stars


def _is_pattern(text: str) -> bool:
    return all(part == "*" or (part and "*" not in part and part == part.strip()) for part in text.split("."))


def _known_styles() -> str:
    return ", ".join(STYLES)
