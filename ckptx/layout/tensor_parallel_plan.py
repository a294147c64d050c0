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
from ckptx.layout.styles import STYLES, Kind
from ckptx.untrusted.limits import INDEX

USER = "user plan"
_NO_COMPOSITIONS = Compositions()


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of a plan for the tensors of one pattern.

    Attributes:
        style: One of `STYLES`.
        decided_by: Origin of the rule: "user plan", "override", "model plan".
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

    A pattern is the name of a parameter or of the module that holds it. A component `*` stands for any index.

    Attributes:
        rules: Rule for each pattern.
        fallback: Plan for parameters without a rule here, even if its rules are more specific; None for none.
        compositions: Heads and fused parts of the tensors of the model; None to use those of the fallback.

    Raises:
        UnsupportedError: A rule has an unknown style.
    """

    rules: Mapping[str, Rule]
    fallback: TensorParallelPlan | None = None
    compositions: Compositions | None = field(default=None, compare=False)
    _by_stars: Mapping[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_stars: dict[str, list[str]] = {}
        for pattern, rule in self.rules.items():
            if rule.style not in STYLES:
                raise UnsupportedError(
                    f'{rule.decided_by}: "{pattern}" has the unknown style "{rule.style}"; override it in your own TP '
                    f"plan with one of {_known_styles()}"
                )
            by_stars.setdefault(_starred(pattern), []).append(pattern)
        ordered = {key: tuple(sorted(patterns, key=_vagueness)) for key, patterns in by_stars.items()}
        object.__setattr__(self, "_by_stars", ordered)

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
        return cls({pattern: Rule(style, USER) for pattern, style in plan.items()}, fallback)

    def rule_for(self, name: str) -> tuple[str, Rule] | None:
        """Return the pattern and the rule for a parameter; None if there is no rule.

        A pattern of the parameter itself takes precedence over one of its module, and concrete indices over `*`.
        """
        pattern = self._match(name) or ("." in name and self._match(name.rpartition(".")[0]))
        if pattern:
            return pattern, self.rules[pattern]
        return self.fallback.rule_for(name) if self.fallback is not None else None

    def rules_for(self, name: str) -> list[Rule]:
        """Return the rules for a parameter in this plan and in its fallbacks, this plan first."""
        pattern = self._match(name) or ("." in name and self._match(name.rpartition(".")[0]))
        own = [self.rules[pattern]] if pattern else []
        return own + (self.fallback.rules_for(name) if self.fallback is not None else [])

    def known_compositions(self) -> Compositions:
        """Return the compositions of this plan, or of the first fallback that has some."""
        if self.compositions is not None:
            return self.compositions
        return self.fallback.known_compositions() if self.fallback is not None else _NO_COMPOSITIONS

    def patterns(self) -> list[str]:
        """Return the patterns of this plan, then those of the fallback."""
        return [*self.rules, *(self.fallback.patterns() if self.fallback is not None else ())]

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns of this plan, without its fallback, that match none of `names`, in the order of the plan.

        A style without sharding may name a module that holds parameters at any depth.
        """
        missing = dict(self.rules)
        for name in names:
            if not missing:
                break
            path = name
            for depth in range(name.count(".") + 1):
                for pattern in self._matches(path):
                    if depth < 2 or not STYLES[self.rules[pattern].style].cuts:
                        missing.pop(pattern, None)
                path = path.rpartition(".")[0]
        return list(missing)

    def _matches(self, path: str) -> Iterable[str]:
        """Yield the patterns of exactly this parameter or module, the most concrete first."""
        key = _starred(path)
        return (found for found in self._by_stars.get(key, ()) if found == key or _stands_for(found, path))

    def _match(self, path: str) -> str | None:
        return next(iter(self._matches(path)), None)


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision on the TP placement of one tensor.

    Attributes:
        placement: TP placement; None if the tensor is replicated.
        decided_by: `Rule.decided_by`, or "default" if no rule matches.
        reason: Short explanation for the report.
        aligned: True if each rank holds whole heads, or groups, of every part that is fused along the sharded dim,
            so that a TP kernel can use the shard as it is stored; True for a tensor that is not sharded.
    """

    placement: Placement | None
    decided_by: str
    reason: str
    aligned: bool


def decide(
    plan: TensorParallelPlan,
    name: str,
    shape: Shape,
    tp: int,
    weight: tuple[Shape, Placement | None] | None = None,
) -> Decision:
    """Decide the TP placement of one tensor of the model.

    Args:
        plan: Tensor parallel plan.
        name: Model name of the tensor.
        shape: Shape of the whole tensor.
        tp: Number of TP ranks.
        weight: Shape and placement of the weight of the same module, for a tensor that may be its scale.
    """
    found = plan.rule_for(name)
    leaf = name.rpartition(".")[2]
    decided_by = found[1].decided_by if found else "default"
    is_named = found is not None and found[0].count(".") == name.count(".")
    is_companion = not is_named and leaf not in ("weight", "bias")
    if is_companion and weight is not None:
        placement, reason = (None, "tp is 1") if tp == 1 else scale_placement(*weight, shape, tp)
        weight_name = name.removesuffix(leaf) + "weight"
        aligned = placement is None or (
            is_aligned(shape, placement, tp) and _is_aligned(plan, weight_name, weight[0], weight[1], tp)
        )
        return Decision(placement, decided_by, reason, aligned)
    if found is None:
        return Decision(None, decided_by, "no rule; replicated", True)
    rule = found[1]
    kind = STYLES[rule.style]
    if tp == 1:
        return Decision(None, decided_by, "tp is 1", True)
    if kind is Kind.EXPERT:
        return Decision(None, decided_by, "expert parallelism is not TP; replicated", True)
    if is_companion and kind.cuts:
        return Decision(None, decided_by, "quantization scale without a weight, replicated", True)
    dim = _cut_dim(kind, leaf, len(shape), _is_transposed(plan, name))
    if dim is None:
        return Decision(None, decided_by, _with_reason(f"{rule.style} keeps it whole", rule), True)
    decision = _cut_along(dim, kind, rule, shape, tp)
    return replace(decision, aligned=_is_aligned(plan, name, shape, decision.placement, tp))


def _cut_along(dim: int, kind: Kind, rule: Rule, shape: Shape, tp: int) -> Decision:
    """Return the decision to shard along `dim`, with the groups and head size along it."""
    n = shape[dim]
    if n < 2:
        return Decision(None, rule.decided_by, f"dim {dim} has size {n}, replicated", True)
    groups: tuple[int, ...] = (n,)
    if rule.groups:
        groups = rule.groups
        if sum(groups) != n:
            reason = f"dim {dim} has size {n}, its groups {'+'.join(map(str, groups))} do not add up; replicated"
            return Decision(None, rule.decided_by, reason, True)
    elif kind in (Kind.PACKED_COLWISE, Kind.PACKED_ROWWISE):
        groups = (n - n // 2, n // 2)
    align = next((size for count, size in rule.heads if count * size == n), 1)
    placement = Placement(dim, groups, align)
    fused = f" in groups {'+'.join(map(str, groups))}" if len(groups) > 1 else ""
    reason = _with_reason(f"{rule.style} shards dim {dim}{fused}", rule)
    return Decision(placement, rule.decided_by, reason, True)


def _is_transposed(plan: TensorParallelPlan, name: str) -> bool:
    """Return True if the weight is stored [in, out], whichever rule shards it."""
    module = _starred(name.rpartition(".")[0])
    return module in plan.known_compositions().transposed or any(rule.transposed for rule in plan.rules_for(name))


def _is_aligned(plan: TensorParallelPlan, name: str, shape: Shape, placement: Placement | None, tp: int) -> bool:
    """Return True if each rank holds whole heads, or groups, of every part along the sharded dim."""
    if placement is None:
        return True
    if not is_aligned(shape, placement, tp):
        return False
    found = _parts_of(plan, name, shape, placement.dim)
    if found is None:
        return True
    return bool(found) and holds_whole_parts(shape, placement, found, tp)


def _parts_of(plan: TensorParallelPlan, name: str, shape: Shape, dim: int) -> tuple[Part, ...] | None:
    """Return the parts that lie along a dim.

    Groups and heads in the rules of the model take precedence, whichever rule shards the tensor; then comes the
    composition of the module.

    Returns:
        The parts; None if only the rule that shards the tensor is known; empty for heads or parts of unknown size.
    """
    leaf, n = name.rpartition(".")[2], shape[dim]
    is_transposed, is_elsewhere = _is_transposed(plan, name), False
    for rule in plan.rules_for(name):
        along = _cut_dim(STYLES[rule.style], leaf, len(shape), is_transposed)
        found = None if rule.decided_by == USER or along is None else _parts_of_rule(rule, shape[along])
        if found is not None and along == dim:
            return found
        is_elsewhere = is_elsewhere or found is not None
    known = plan.known_compositions()
    composition = known.of(name)
    dims = _feature_dims(composition.side, leaf, len(shape), is_transposed) if composition is not None else ()
    if composition is None or is_elsewhere or dim not in dims:
        return ((n, 1),) if known.is_complete or composition is not None else None
    return composition.parts(n) or ()


def _parts_of_rule(rule: Rule, n: int) -> tuple[Part, ...] | None:
    """Return the parts that a rule of the model knows of the dim that it shards, of size `n`; None if it knows none."""
    head = next((size for count, size in rule.heads if count * size == n), 1)
    if rule.groups and sum(rule.groups) == n:
        sizes = [head if width % head == 0 else 1 for width in rule.groups]
        return tuple((width // size, size) for width, size in zip(rule.groups, sizes, strict=True))
    if head > 1:
        return ((n // head, head),)
    if STYLES[rule.style] in (Kind.PACKED_COLWISE, Kind.PACKED_ROWWISE):
        return ((n - n // 2, 1), (n // 2, 1))
    return None


def _feature_dims(side: str, leaf: str, ndim: int, transposed: bool) -> tuple[int, ...]:
    """Return the dim of the output or input features of a tensor; empty if it has none."""
    is_bias = leaf == "bias" or leaf.endswith("_bias")
    if side == "in":
        return () if is_bias else ((ndim - 2,) if transposed and ndim == 2 else (ndim - 1,))
    if leaf == "weight" and ndim > 2:  # a convolution: [channels, .., width]
        return (0,)
    dim = _cut_dim(Kind.COLWISE, leaf, ndim, transposed)
    return () if dim is None else (dim,)


def _cut_dim(kind: Kind, leaf: str, ndim: int, transposed: bool) -> int | None:
    """Return the dim of a tensor that a style shards; None if it keeps the tensor whole.

    The weight of an nn.Linear is [out, in], fused experts are [experts, out, in].
    """
    is_bias = leaf == "bias" or leaf.endswith("_bias")
    out_dim, in_dim = (ndim - 1, ndim - 2) if transposed and ndim == 2 else (ndim - 2, ndim - 1)
    if ndim == 0:
        return None
    if kind in (Kind.COLWISE, Kind.PACKED_COLWISE):
        return ndim - 1 if is_bias or ndim == 1 else out_dim
    if kind is Kind.ROWWISE:
        return None if is_bias else max(in_dim, 0)
    if kind is Kind.PACKED_ROWWISE:
        return None if is_bias or ndim == 1 else in_dim
    if kind is Kind.EMBEDDING_ROWWISE:
        return 0
    if kind is Kind.EMBEDDING_COLWISE:
        return 1 if ndim > 1 else None
    return None


def _with_reason(text: str, rule: Rule) -> str:
    return f"{text}; {rule.reason}" if rule.reason else text


def _starred(path: str) -> str:
    """Return the path with every index replaced by `*`."""
    return INDEX.sub("*", path)


def _stands_for(pattern: str, path: str) -> bool:
    """Return True if a pattern matches a path that differs from it only in indices."""
    return all(a in ("*", b) for a, b in zip(pattern.split("."), path.split("."), strict=True))


def _vagueness(pattern: str) -> tuple[int, list[bool]]:
    """Return a sort key: fewer `*` first, then a concrete index further left first."""
    stars = [part == "*" for part in pattern.split(".")]
    return sum(stars), stars


def _is_pattern(text: str) -> bool:
    return all(part == "*" or (part and "*" not in part and part == part.strip()) for part in text.split("."))


def _known_styles() -> str:
    return ", ".join(STYLES)
