"""Sharding of the tensors of a model for a mesh: the pipeline stage of each, and the shard of each rank.

Rules of a tensor-parallel plan apply to tensors of the transformers model. A tensor that is stored in another form (an
expert of a tensor that the model fuses, a fused projection that the model splits) is sharded so that each rank gets the
same elements as in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.fused import compositions_of_unknown_class
from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Block, TensorEntry
from ckptx.catalog.region import Region, Shape
from ckptx.errors import InputError, UnsupportedError, UsageError
from ckptx.formats.sidecars import MANIFEST
from ckptx.layout.expert_parallel import InnerSharding
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement, blocks_of_stage, tp_regions
from ckptx.layout.stages import StageAssignment, StageMap
from ckptx.layout.tensor_parallel_plan import PlacementDecision, TensorParallelPlan, decide_placement
from ckptx.mapping.destinations import Destination
from ckptx.mapping.names import pattern_of
from ckptx.mapping.pull_back import PullBack
from ckptx.mapping.quantization_scales import BLOCK_SCALE_SUFFIX
from ckptx.mapping.rules import NameRules
from ckptx.storage.files import read_small
from ckptx.untrusted.json_text import parse_json
from ckptx.untrusted.limits import MAX_PLAN_BYTES

_MTP_PREFIXES = ("mtp", "nextn", "eagle")  # MTP layers, which follow the last layer


class TensorPlacement(NamedTuple):
    """Placement of one tensor in the mesh.

    Attributes:
        stage: Pipeline rank, from 0; it is the pipeline stage unless ranks have several.
        blocks: Blocks on the ranks of the stage, see `blocks_of_stage`; a rank may hold several, or none.
        decision: TP placement of the tensor, and the rule that determined it.
    """

    stage: int
    blocks: tuple[Block, ...]
    decision: PlacementDecision


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """Model sharded for a mesh.

    Attributes:
        dims: Mesh dimensions.
        stages: Assignment of layers to stages.
        placements: Placement of each tensor by name.
        unknown_tensors: Names of tensors that the model does not have or use; TP replicates them.
        user_plan: Tensor-parallel rules of the user, pattern -> style; None if there are none.
        ep_inner: Sharding of experts among the ranks with the same EP rank; unused if `dims.ep` is 1.
        assignment: Assignment of stages to pipeline ranks; None if each rank has one.
    """

    dims: ParallelDims
    stages: StageMap
    placements: Mapping[str, TensorPlacement]
    unknown_tensors: tuple[str, ...] = ()
    user_plan: Mapping[str, str] | None = None
    ep_inner: InnerSharding = "experts"
    assignment: StageAssignment | None = None

    @property
    def unaligned(self) -> list[str]:
        """Return the names of the tensors that are not aligned, see `PlacementDecision.aligned`."""
        return [name for name, placement in self.placements.items() if placement.decision.aligned is False]

    @property
    def maybe_fused(self) -> list[str]:
        """Return the names of the tensors of an unknown class that TP shards along a dim where parts may be fused.

        These are the output features.
        """
        return [
            name
            for name, placement in self.placements.items()
            if placement.decision.aligned is None and _shards_output_features(placement)
        ]

    def rules(self, aliases: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the `rules` of the report: an entry for each pattern and decision, with its number of tensor names.

        Args:
            aliases: Name that shares bytes -> name in `placements`.
        """
        decisions = {name: placement.decision for name, placement in self.placements.items()}
        decisions |= {name: decisions[stored] for name, stored in aliases.items()}
        entries: dict[tuple[object, ...], dict[str, Any]] = {}
        for name, decision in decisions.items():
            key = (pattern_of(name), decision)
            entry = entries.get(key)
            if entry is None:
                placement = decision.placement
                entries[key] = {
                    "pattern": key[0],
                    "tensors": 1,
                    "dim": None if placement is None else placement.dim,
                    "groups": None if placement is None or len(placement.groups) == 1 else list(placement.groups),
                    "rule": decision.decided_by,
                    "reason": decision.reason,
                    "aligned": decision.aligned,
                }
            else:
                entry["tensors"] += 1
        return list(entries.values())

    def renamed(self, rename: Callable[[str], str]) -> ShardedModel:
        """Return the same placements under other names; `unknown_tensors` keeps the old names."""
        return replace(self, placements={rename(name): placement for name, placement in self.placements.items()})

    def layers(self) -> list[list[list[Any]]]:
        """Return the layers of each stage, as [path of a list of layers, first index, index after the last]."""
        return [[list(span) for span in self.stages.layers_of(stage)] for stage in range(self.stages.count)]

    def mesh_entry(self) -> dict[str, Any]:
        """Return the `layout` of the report: sizes of the mesh, and the layers of each stage."""
        dims, entry = self.dims, dict[str, Any]()
        entry |= {"tp": dims.tp, "pp": dims.pp, "dp_shard": dims.dp_shard}
        if dims.ep > 1:
            entry |= {"ep": dims.ep, "ep_inner": self.ep_inner}
        if self.assignment is not None:
            entry |= {"virtual_stages": self.assignment.stages_per_rank, "schedule_style": self.assignment.style}
        return entry | {"stages": self.layers()}


def read_plan(path: str) -> Mapping[str, Any]:
    """Read the rules in a `--tp-plan` file, or those that a `ckptx.json` records: pattern -> style, not checked here.

    Raises:
        UsageError: The file cannot be read, is not a JSON object, or is a `ckptx.json` without rules.
    """
    if Path(path).name == MANIFEST:
        return _read_recorded_plan(Path(path))
    try:
        plan = parse_json(read_small(Path(path), MAX_PLAN_BYTES).decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise UsageError(f"--tp-plan: {path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except InputError as error:
        cause = error.__cause__
        reason = f"{path} cannot be read: {cause.strerror}" if isinstance(cause, OSError) else str(error)
        raise UsageError(f"--tp-plan: {reason}") from error
    if not isinstance(plan, dict):
        raise UsageError(
            f"--tp-plan: {path}: expected a JSON object such as "
            f'{{"model.layers.*.self_attn.q_proj": "colwise"}}, found {type(plan).__name__}'
        )
    return plan


def _read_recorded_plan(path: Path) -> Mapping[str, Any]:
    from ckptx.catalog.manifest_parser import read_manifest  # not needed for other conversions

    try:
        plan = read_manifest(path).layout.tp_plan
    except (InputError, UnsupportedError) as error:
        raise UsageError(f"--tp-plan: {error}") from error
    if plan is None:
        raise UsageError(f"--tp-plan: {path}: records no tensor-parallel rules; pass a file with rules")
    return plan


def effective_plan(
    architecture: Architecture | None, config: Mapping[str, Any] | None, user_plan: Mapping[str, Any] | None
) -> TensorParallelPlan:
    """Return the plan of the user, with the plan of the class as fallback.

    Args:
        architecture: Class of the model; None if it is unknown, so that it has no plan.
        config: Contents of `config.json`; None without one.
        user_plan: Rules of the user, pattern -> style; None to return the plan of the class.

    Raises:
        UsageError: The plan of the user is malformed.
        InputError: See `Architecture.tensor_parallel_plan`.
    """
    class_plan = TensorParallelPlan({}, compositions=compositions_of_unknown_class(config))
    if architecture is not None and config is not None:
        class_plan = architecture.tensor_parallel_plan(config)
    return class_plan if user_plan is None else TensorParallelPlan.from_user(user_plan, fallback=class_plan)


@dataclass(slots=True)
class Sharder:
    """Assigns a pipeline stage and TP shards to the tensors of one model.

    Attributes:
        plan: Tensor parallel plan, in model names.
        dims: Mesh dimensions.
        stages: Assignment of layers to stages.
        rules: Rules from tensor names to model names; None if they are the same.
        replicate: True to store tensors that TP does not shard on every TP rank, False to store them on the first only.
        user_plan: Tensor-parallel rules of the user, which `plan` contains; None if there are none.
        ep_inner: Sharding of experts among the ranks with the same EP rank; unused if `dims.ep` is 1.
        assignment: Assignment of stages to pipeline ranks; None if each rank has one.
    """

    plan: TensorParallelPlan
    dims: ParallelDims
    stages: StageMap
    rules: NameRules | None
    replicate: bool
    user_plan: Mapping[str, str] | None = None
    ep_inner: InnerSharding = "experts"
    assignment: StageAssignment | None = None

    def place(self, tensors: Mapping[str, TensorEntry], unknown: Iterable[str]) -> ShardedModel:
        """Assign a stage and blocks to every tensor.

        Args:
            tensors: Tensors by name; only shapes and dtypes matter.
            unknown: Names that the model does not have or use. Those that belong to one of its weights, as a scale
                does, are sharded with it; the others are replicated.

        Raises:
            UsageError: Expert parallelism is requested, and there are no experts, or they cannot be divided equally.
            UnsupportedError: It is requested, and experts are stored in an unknown form.
        """
        decisions = _Decisions(
            self.plan, self.dims.tp, self.rules, {name: entry.shape for name, entry in tensors.items()}
        )
        placements: dict[str, TensorPlacement] = {}
        experts = None
        if self.dims.ep > 1:
            from ckptx.model_view.expert_sharder import ExpertSharder  # not needed for most conversions

            experts = ExpertSharder(tensors, decisions.model_name, self.dims, self.ep_inner, replicate=self.replicate)
        replicated = []
        unknown_names = frozenset(unknown)
        # By model name, which many tensors may share: stage, and True for a layer after the last one.
        stages: dict[str, tuple[int, bool]] = {}
        # By shape, `id` of the decision, which `placements` keeps alive, and dtype.
        known_blocks: dict[tuple[Shape, int, DType], tuple[Block, ...]] = {}

        def is_in_model(name: str) -> bool:
            model_name = decisions.model_name(name)
            if model_name is None or name in unknown_names:
                return False
            return not self.stages.is_after_last_layer(model_name)

        for name, entry in tensors.items():
            model_name = decisions.model_name(name)
            path = model_name or name
            known = stages.get(path)
            if known is None:
                known = stages[path] = self._rank_of_path(path), self.stages.is_after_last_layer(path)
            stage, is_extra = known[0], known[1] and model_name is not None
            is_unknown = is_extra or model_name is None or name in unknown_names
            expert = None if experts is None else experts.place(name)
            if expert is not None:
                stage = self._stage_of_unknown(path) if is_unknown else stage
                placements[name] = TensorPlacement(stage, *expert)
                continue
            if is_unknown and not decisions.has_weight(name, is_in_model):
                replicated.append(name)
                decision = _NOT_IN_MODEL
                stage = self._stage_of_unknown(path)
            else:
                decision = decisions.find_decision(name)
            _, dtype, shape, _, _ = entry
            blocks = known_blocks.get((shape, id(decision), dtype))
            if blocks is None:
                blocks = blocks_of_stage(shape, decision.placement, self.dims, self.replicate, dtype.pack)
                known_blocks[shape, id(decision), dtype] = blocks
            placements[name] = TensorPlacement(stage, blocks, decision)
        return ShardedModel(
            self.dims, self.stages, placements, tuple(replicated), self.user_plan, self.ep_inner, self.assignment
        )

    def stage_of(self, name: str) -> int:
        """Return the pipeline rank of a tensor, which is its stage unless ranks have several."""
        model_name = name if self.rules is None else self.rules.model_name(name)
        return self._rank_of_path(model_name or name)

    def _rank_of_path(self, path: str) -> int:
        """Return the pipeline rank that has the stage of a model name."""
        return self._rank_of(self.stages.stage_of(path))

    def _rank_of(self, stage: int) -> int:
        """Return the pipeline rank of a stage."""
        return stage if self.assignment is None else self.assignment.rank_of(stage)

    def _stage_of_unknown(self, name: str) -> int:
        """Return the pipeline rank of a tensor that the model lacks: that of its layer; the last stage's for MTP."""
        first = name.removeprefix("model.").partition(".")[0]
        return self._rank_of(self.stages.count - 1) if first.startswith(_MTP_PREFIXES) else self._rank_of_path(name)


def _shards_output_features(placement: TensorPlacement) -> bool:
    """Return True if TP shards a tensor, and not along the last of several dims, the input features of a weight."""
    dims = len(placement.blocks[0].region.sizes)
    sharded = placement.decision.placement
    return sharded is not None and (dims == 1 or sharded.dim < dims - 1)


class _Decisions:
    """Decisions of a plan on the tensors of one checkpoint; tensors of one pattern and shape share a decision."""

    def __init__(self, plan: TensorParallelPlan, tp: int, rules: NameRules | None, shapes: Mapping[str, Shape]) -> None:
        self._plan, self._tp, self._rules, self._shapes = plan, tp, rules, shapes
        self._destinations: Mapping[str, Destination | str | None] = {} if rules is None else rules.destinations(shapes)
        self._has_indices = any(part.isdecimal() for pattern in plan.patterns() for part in pattern.split("."))
        # Indices of conversions that combine or split tensors, rather than only rename them or reorder rows.
        self._rebuilding_conversions = {
            index
            for index, conversion in enumerate(() if rules is None else rules.conversions)
            if any(op.kind != "permute_rope" for op in conversion.ops)
        }
        self._known: dict[tuple[object, ...], PlacementDecision] = {}
        self._target_decisions: dict[str, PlacementDecision] = {}  # by name of the model tensor
        self._disk_form_decisions: dict[tuple[str, Shape], PlacementDecision] = {}
        self._pull_back = None if rules is None else PullBack(rules, shapes, self._blocks_of)

    def model_name(self, name: str) -> str | None:
        """Return the model tensor that a tensor is loaded into, the first if there are several; None if unknown."""
        if self._rules is None:
            return name
        destination = self._destinations[name]
        return destination if isinstance(destination, str) or destination is None else self._rules.model_name(name)

    def has_weight(self, name: str, is_in_model: Callable[[str], bool]) -> bool:
        """Return True for a tensor that belongs to a weight of the model, such as a scale or zero point."""
        weight = self._weight_of(name)
        return weight is not None and is_in_model(weight)

    def _weight_of(self, name: str) -> str | None:
        """Return the weight that a tensor belongs to: that of its module, or the one whose name its own extends.

        None for a weight or bias, and if there is no such weight.
        """
        module, _, leaf = name.rpartition(".")
        if leaf in ("weight", "bias"):
            return None
        candidates = [f"{module}.weight"]
        if name.endswith(BLOCK_SCALE_SUFFIX):
            candidates.append(name.removesuffix(BLOCK_SCALE_SUFFIX))
        return next((weight for weight in candidates if weight in self._shapes), None)

    def find_decision(self, name: str) -> PlacementDecision:
        """Return the decision for a tensor, in the form in which it is stored."""
        shape = self._shapes[name]
        weight, weight_name = None, self._weight_of(name)
        if weight_name is not None:
            weight = self._shapes[weight_name], self.find_decision(weight_name).placement
        model_name = self.model_name(name)
        destination = self._destinations.get(name)
        if (
            weight is None
            and type(destination) is Destination
            and destination.conversion in self._rebuilding_conversions
        ):
            return self._decide_disk_form(name)
        key = (model_name if self._has_indices else pattern_of(model_name or name), shape, weight)
        decision = self._known.get(key)
        if decision is None:
            decision = self._known[key] = decide_placement(self._plan, model_name or name, shape, self._tp, weight)
        return decision

    def _decide_disk_form(self, name: str) -> PlacementDecision:
        """Return the decision for a tensor that is a part of model tensors, or combines several of them."""
        assert self._pull_back is not None
        shape = self._shapes[name]
        key = (pattern_of(name), shape)
        known = self._disk_form_decisions.get(key)
        if known is not None:
            return known
        decision = self._derive_decision(name, shape)
        destination = self._destinations[name]
        if isinstance(destination, Destination) and self._rules is not None and not self._has_indices:
            target = self._target_decisions.get(self.model_name(name) or "")
            dim = target.placement.dim if target is not None and target.placement is not None else None
            ops = self._rules.conversions[destination.conversion].ops
            # Tensors of a module list have the same shards, except if the list itself is sharded.
            if not any(op.kind == "merge" and op.dim == dim for op in ops):
                self._disk_form_decisions[key] = decision
        return decision

    def _derive_decision(self, name: str, shape: Shape) -> PlacementDecision:
        """Return the decision for a tensor on disk with which each rank holds the same elements as in the model."""
        assert self._pull_back is not None
        blocks = self._pull_back.blocks(name)
        decision = self._target_decisions.get(self.model_name(name) or "")
        if blocks is None or decision is None:
            return _NOT_SHARDABLE
        if all(block.region.sizes == shape for block in blocks):
            return replace(decision, placement=None)
        placement = find_placement(shape, blocks, self._tp)
        if placement is None:
            return _NOT_SHARDABLE
        reason = f"{decision.reason} of the model's tensor"
        return PlacementDecision(placement, decision.decided_by, reason, decision.aligned)

    def _blocks_of(self, target: str, shape: Shape) -> tuple[Block, ...]:
        """Return the TP shards of a model tensor."""
        decision = self._target_decisions[target] = decide_placement(self._plan, target, shape, self._tp)
        return blocks_of_stage(shape, decision.placement, ParallelDims(tp=self._tp), True)


_NOT_IN_MODEL = PlacementDecision(None, "default", "not in the model; replicated", True)
_NOT_SHARDABLE = PlacementDecision(
    None, "default", "stored in a form that cannot be sharded like the model; replicated", True
)


def find_placement(shape: Shape, blocks: Iterable[Block], tp: int) -> Placement | None:
    """Return the placement that gives each TP rank exactly its `blocks`; None if there is none."""
    by_rank: list[list[Region]] = [[] for _ in range(tp)]
    for block in blocks:
        by_rank[block.rank_in_stage].append(block.region)
    sharded_dims = [dim for dim in range(len(shape)) if any(region.sizes[dim] != shape[dim] for region in by_rank[0])]
    if len(sharded_dims) != 1:
        return None
    (dim,) = sharded_dims
    starts = sorted(region.offsets[dim] for region in by_rank[0])
    groups = tuple(end - begin for begin, end in pairwise([*starts, shape[dim]]))
    placement = Placement(dim, groups)
    expected = [sorted(regions) for regions in tp_regions(shape, placement, tp)] if starts[:1] == [0] else []
    return placement if expected == [sorted(regions) for regions in by_rank] else None
