"""How the tensors of a model are cut for a mesh: which pipeline stage holds each, and which part each rank gets.

Rules speak of the model's own tensors. A tensor that is stored in another form (an expert of a fused tensor, a fused
projection that the model splits) is cut where the model's tensors would be cut, seen from the form on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ckptx.architecture.fused import compositions_of_unknown
from ckptx.architecture.spec import Architecture
from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Block, TensorEntry
from ckptx.catalog.region import Region, Shape
from ckptx.errors import InputError, UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement, cut, tp_rectangles
from ckptx.layout.stages import StageMap
from ckptx.layout.tensor_parallel_plan import Decision, TensorParallelPlan, decide
from ckptx.mapping.destinations import Destination
from ckptx.mapping.names import pattern_of
from ckptx.mapping.pull_back import PullBack
from ckptx.mapping.quantization_scales import SCALE_OF_BLOCKS
from ckptx.mapping.rules import NameRules
from ckptx.storage.files import read_small
from ckptx.untrusted.json_text import parse_json
from ckptx.untrusted.limits import PLAN_BYTES

_MTP = ("mtp", "nextn", "eagle")  # MTP layers, which follow the last layer


class TensorPlacement(NamedTuple):
    """Where one tensor goes."""

    stage: int
    blocks: tuple[Block, ...]
    decision: Decision


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A model cut for a mesh.

    Attributes:
        dims: The mesh.
        stages: Which layers are on which stage.
        placed: By name.
        passed: Tensors that the model does not have; they are replicated.
    """

    dims: ParallelDims
    stages: StageMap
    placed: Mapping[str, TensorPlacement]
    passed: tuple[str, ...] = ()

    @property
    def unaligned(self) -> list[str]:
        """Return the tensors whose shards do not hold whole heads or groups of every part."""
        return [name for name, placed in self.placed.items() if not placed.decision.aligned]

    def rules(self) -> list[dict[str, Any]]:
        """Which rule decided, for the report: one row for the tensors of a pattern that it cuts alike."""
        rows: dict[tuple[object, ...], dict[str, Any]] = {}
        for name, (_, _, decision) in self.placed.items():
            key = (pattern_of(name), decision)
            row = rows.get(key)
            if row is None:
                placement = decision.placement
                rows[key] = {
                    "pattern": key[0],
                    "tensors": 1,
                    "dim": None if placement is None else placement.dim,
                    "groups": None if placement is None or len(placement.groups) == 1 else list(placement.groups),
                    "rule": decision.decided_by,
                    "reason": decision.reason,
                    "aligned": decision.aligned,
                }
            else:
                row["tensors"] += 1
        return list(rows.values())

    def renamed(self, names: Callable[[str], str]) -> ShardedModel:
        """The same under other names; `passed` keeps those that the rules were asked about."""
        return replace(self, placed={names(name): placed for name, placed in self.placed.items()})

    def layers(self) -> list[list[list[Any]]]:
        """For each stage its layers, as [path of the stack, first, stop]."""
        return [[list(span) for span in self.stages.layers_of(stage)] for stage in range(self.dims.pp)]


def read_plan(path: str) -> Mapping[str, Any]:
    """The contents of a `--tp-plan` file.

    Raises:
        UsageError: It cannot be read or is not JSON.
    """
    try:
        plan = parse_json(read_small(Path(path), PLAN_BYTES).decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise UsageError(f"--tp-plan: {path} is not UTF-8 at byte {error.start}") from error
    except InputError as error:
        cause = error.__cause__
        said = f"{path} cannot be read: {cause.strerror}" if isinstance(cause, OSError) else str(error)
        raise UsageError(f"--tp-plan: {said}") from error
    if not isinstance(plan, dict):
        raise UsageError(f'--tp-plan: {path} holds a {type(plan).__name__}, needed {{"pattern": "style"}}')
    return plan


def plan_of(
    architecture: Architecture | None, config: Mapping[str, Any] | None, user: Mapping[str, Any] | None
) -> TensorParallelPlan:
    """The plan to follow: the user's first, then what is known about the class.

    Raises:
        UsageError: The user's plan is malformed.
    """
    known = TensorParallelPlan({}, compositions=compositions_of_unknown(config))
    if architecture is not None and config is not None:
        known = architecture.tensor_parallel_plan(config)
    return known if user is None else TensorParallelPlan.from_user(user, fallback=known)


@dataclass(slots=True)
class Sharder:
    """Decides, tensor by tensor.

    Attributes:
        plan: In names of the model.
        dims: The mesh.
        stages: Which layers are on which stage.
        rules: Between the names of the tensors and those of the model; None when they are the same.
        replicate: Give tensors that TP does not cut to every TP rank, not to the first alone.
    """

    plan: TensorParallelPlan
    dims: ParallelDims
    stages: StageMap
    rules: NameRules | None
    replicate: bool

    def place(self, tensors: Mapping[str, TensorEntry], unknown: Iterable[str]) -> ShardedModel:
        """Places every tensor.

        Args:
            tensors: By name; shapes and dtypes count.
            unknown: Names that the model does not have.
        """
        decisions = _Decisions(self.plan, self.dims.tp, self.rules, {name: e.shape for name, e in tensors.items()})
        placed: dict[str, TensorPlacement] = {}
        replicated = []
        passed = frozenset(unknown)
        stages: dict[str, tuple[int, bool]] = {}  # of tensors of the model, into which many may go
        cuts: dict[tuple[Shape, int, DType], tuple[Block, ...]] = {}  # by `id` of the decision, kept in `placed`
        for name, entry in tensors.items():
            model_name = decisions.model_name(name)
            path = model_name or name
            known = stages.get(path)
            if known is None:
                known = stages[path] = self.stages.stage_of(path), self.stages.is_extra(path)
            stage, is_extra = known[0], known[1] and model_name is not None
            is_unknown = is_extra or model_name is None or name in passed
            if is_unknown and (is_extra or not decisions.has_weight(name, passed)):
                replicated.append(name)
                decision = _PASSED
                stage = self._stage_of_unknown(path)
            else:
                decision = decisions.of(name)
            _, dtype, shape, _, _ = entry
            blocks = cuts.get((shape, id(decision), dtype))
            if blocks is None:
                blocks = cut(shape, decision.placement, self.dims, self.replicate, dtype.pack)
                cuts[shape, id(decision), dtype] = blocks
            placed[name] = TensorPlacement(stage, blocks, decision)
        return ShardedModel(self.dims, self.stages, placed, tuple(replicated))

    def stage_of(self, name: str) -> int:
        """The stage of a tensor under one more name."""
        model_name = name if self.rules is None else self.rules.model_name(name)
        return self.stages.stage_of(model_name or name)

    def _stage_of_unknown(self, name: str) -> int:
        """With the layer it belongs to; MTP layers with the last."""
        first = name.removeprefix("model.").partition(".")[0]
        return self.dims.pp - 1 if first.startswith(_MTP) else self.stages.stage_of(name)


class _Decisions:
    """What the plan says about each tensor of one checkpoint; tensors that are alike share the answer."""

    def __init__(self, plan: TensorParallelPlan, tp: int, rules: NameRules | None, shapes: Mapping[str, Shape]) -> None:
        self._plan, self._tp, self._rules, self._shapes = plan, tp, rules, shapes
        self._places: Mapping[str, Destination | str | None] = {} if rules is None else rules.places(shapes)
        self._has_indices = any(part.isdecimal() for pattern in plan.patterns() for part in pattern.split("."))
        # Conversions that hold a tensor in another form, not only under another name or its rows reordered.
        self._rebuilding = {
            index
            for index, conversion in enumerate(() if rules is None else rules.conversions)
            if any(op.kind != "permute_rope" for op in conversion.ops)
        }
        self._known: dict[tuple[object, ...], Decision] = {}
        self._of_targets: dict[str, Decision] = {}
        self._of_experts: dict[tuple[str, Shape], Decision] = {}
        self._pull_back = None if rules is None else PullBack(rules, shapes, self._blocks_of)

    def model_name(self, name: str) -> str | None:
        """The tensor of the model that a tensor goes into; the first of several."""
        if self._rules is None:
            return name
        place = self._places[name]
        return place if isinstance(place, str) or place is None else self._rules.model_name(name)

    def has_weight(self, name: str, passed: Collection[str]) -> bool:
        """True for what lies beside a weight of the model and belongs to it: a scale, a zero point."""
        weight = self._weight_of(name)
        return weight is not None and weight not in passed

    def _weight_of(self, name: str) -> str | None:
        """The weight that a tensor lies beside: in the same module, or the parameter that it is called after."""
        module, _, leaf = name.rpartition(".")
        if leaf in ("weight", "bias"):
            return None
        candidates = [f"{module}.weight"]
        if name.endswith(SCALE_OF_BLOCKS):
            candidates.append(name.removesuffix(SCALE_OF_BLOCKS))
        return next((weight for weight in candidates if weight in self._shapes), None)

    def of(self, name: str) -> Decision:
        """The decision for a tensor of the model, in whatever form it is stored."""
        shape = self._shapes[name]
        weight, beside = None, self._weight_of(name)
        if beside is not None:
            weight = self._shapes[beside], self.of(beside).placement
        model_name = self.model_name(name)
        place = self._places.get(name)
        if weight is None and type(place) is Destination and place.conversion in self._rebuilding:
            return self._seen_from_disk(name)
        key = (model_name if self._has_indices else pattern_of(model_name or name), shape, weight)
        decision = self._known.get(key)
        if decision is None:
            decision = self._known[key] = decide(self._plan, model_name or name, shape, self._tp, weight)
        return decision

    def _seen_from_disk(self, name: str) -> Decision:
        """The decision for a tensor that is a part of tensors of the model, or holds several of them."""
        assert self._pull_back is not None
        shape = self._shapes[name]
        key = (pattern_of(name), shape)
        known = self._of_experts.get(key)
        if known is not None:
            return known
        decision = self._pulled_decision(name, shape)
        place = self._places[name]
        if isinstance(place, Destination) and self._rules is not None and not self._has_indices:
            target = self._of_targets.get(self.model_name(name) or "")
            dim = target.placement.dim if target is not None and target.placement is not None else None
            ops = self._rules.conversions[place.conversion].ops
            if not any(op.kind in ("merge", "unmerge") and op.dim == dim for op in ops):
                self._of_experts[key] = decision  # all tensors of a module list are cut alike, but along the list
        return decision

    def _pulled_decision(self, name: str, shape: Shape) -> Decision:
        assert self._pull_back is not None
        blocks = self._pull_back.blocks(name)
        decision = self._of_targets.get(self.model_name(name) or "")
        if blocks is None or decision is None:
            return _UNCUT
        if all(block.region.sizes == shape for block in blocks):
            return replace(decision, placement=None)
        placement = placement_of(shape, blocks, self._tp)
        if placement is None:
            return _UNCUT
        reason = f"{decision.reason} of the model's tensor"
        return Decision(placement, decision.decided_by, reason, decision.aligned)

    def _blocks_of(self, target: str, shape: Shape) -> tuple[Block, ...]:
        """The cut of a tensor of the model."""
        decision = self._of_targets[target] = decide(self._plan, target, shape, self._tp)
        return cut(shape, decision.placement, ParallelDims(tp=self._tp), True)


_PASSED = Decision(None, "default", "not in the model; replicated", True)
_UNCUT = Decision(None, "default", "stored in a form that cannot be cut as the model is; replicated", True)


def placement_of(shape: Shape, blocks: Iterable[Block], tp: int) -> Placement | None:
    """The placement that gives each TP rank exactly its `blocks`; None when there is none."""
    by_rank: list[list[Region]] = [[] for _ in range(tp)]
    for block in blocks:
        by_rank[block.rank_in_stage].append(block.region)
    cut_dims = [dim for dim in range(len(shape)) if any(region.sizes[dim] != shape[dim] for region in by_rank[0])]
    if len(cut_dims) != 1:
        return None
    (dim,) = cut_dims
    starts = sorted(region.offsets[dim] for region in by_rank[0])
    groups = tuple(end - begin for begin, end in pairwise([*starts, shape[dim]]))
    placement = Placement(dim, groups)
    wanted = [sorted(regions) for regions in tp_rectangles(shape, placement, tp)] if starts[:1] == [0] else []
    return placement if wanted == [sorted(regions) for regions in by_rank] else None
