"""Cutting the tensors of a conversion for the mesh that options ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptx.conversion.steps.naming import NameMap
from ckptx.conversion.steps.replication import Replication, replication_of
from ckptx.conversion.steps.target import TargetTensors
from ckptx.errors import UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.stages import StageMap
from ckptx.model_view.sharder import ShardedModel, Sharder, plan_of, read_plan
from ckptx.model_view.view import ModelView
from ckptx.options.mesh import ShardingOptions
from ckptx.wording import counted, first_of


@dataclass(frozen=True, slots=True)
class ShardedTarget:
    """A target, and how it is cut.

    Attributes:
        target: The tensors; a name that shared bytes with one on another stage has become a copy.
        model: Stage and blocks of each tensor; None where nothing is cut.
        replication: What TP does not shard; None without TP.
        notes: What the user should know.
    """

    target: TargetTensors
    model: ShardedModel | None = None
    replication: Replication | None = None
    notes: tuple[str, ...] = ()

    def renamed(self, names: Mapping[str, str]) -> ShardedTarget:
        """The same under other names."""
        if all(old == new for old, new in names.items()):
            return self
        model = None if self.model is None else self.model.renamed(names.__getitem__)
        return replace(self, target=self.target.renamed(names.__getitem__), model=model)

    def with_second_names(self, names: Mapping[str, str]) -> ShardedTarget:
        """The same with further names that share the bytes of others.

        Args:
            names: New name -> name of a tensor, or of one that shares bytes itself.
        """
        target = self.target
        aliases = {new: target.aliases.get(name, name) for new, name in names.items()}
        return replace(self, target=replace(target, aliases={**target.aliases, **aliases})) if aliases else self


def shard(
    view: ModelView, target: TargetTensors, naming: NameMap, layout: ShardingOptions, *, every_rank_alone: bool
) -> ShardedTarget:
    """Gives every tensor its stage and its blocks.

    Args:
        view: The model.
        target: In the names and dtypes of the output.
        naming: Of these names.
        layout: MeshOptions, split of the layers and plan.
        every_rank_alone: Each rank reads its own files and no other: tensors that are not cut, and names that share
            bytes, are stored for each.

    Raises:
        UsageError: Layers cannot be split as asked, or the user's plan matches no tensor.
        UnsupportedError: Stages are asked for and no layers are known.
    """
    sharder = _cutter_for(view, list(target.tensors), naming, layout, every_rank_alone)
    apart = [
        name
        for name, stored in target.aliases.items()
        if every_rank_alone or sharder.stage_of(name) != sharder.stage_of(stored)
    ]
    target = target.with_copies(apart)
    model = sharder.place(target.tensors, _unknown_names(view, target, naming))
    replication = None
    notes = _notes_on(model)
    if model.dims.tp > 1:
        replication = replication_of(
            model,
            target.tensors,
            target.copies,
            lambda name: sharder.stages.is_in_layer(naming.model_name(name) or name),
        )
        architecture = view.architecture
        subject = "this model" if architecture is None else architecture.class_name
        notes += replication.notes(model.dims.tp, subject)
    return ShardedTarget(target, model, replication, tuple(notes))


def _cutter_for(
    view: ModelView, names: list[str], naming: NameMap, layout: ShardingOptions, every_rank_alone: bool
) -> Sharder:
    architecture = view.architecture
    dims = layout.dims
    user = read_plan(str(layout.tp_plan)) if layout.tp_plan else None
    plan = plan_of(architecture, view.config, user)
    stacks = architecture.stacks(view.config) if architecture is not None and view.config is not None else ()
    root = view.catalog.root
    subject = architecture.class_name if architecture is not None else f"{root}: its architecture is unknown"
    stages = StageMap(stacks, dims.pp, layout.pp_split, subject)
    if user is not None:
        idle = plan.unmatched([naming.model_name(name) or name for name in names])
        if idle:
            others = f", nor do {len(idle) - 1} more" if len(idle) > 1 else ""
            raise UsageError(
                f'--tp-plan: "{idle[0]}" matches no tensor{others}; '
                "patterns are names of the model's parameters or modules, with * for an index"
            )
    return Sharder(plan, dims, stages, naming.rules, every_rank_alone)


def _unknown_names(view: ModelView, target: TargetTensors, naming: NameMap) -> list[str]:
    """Names in the target that the model does not have, or that another layer's tensor stands for in it."""
    architecture, config = view.architecture, view.config
    if architecture is None or config is None:
        return []
    model_names = {name: naming.model_name(name) for name in target.tensors}
    lacking = {each for each in {*model_names.values()} if each is not None and architecture.lacks(each, config)}
    unknown = set(view.unknown)
    return [name for name, model_name in model_names.items() if name in unknown or model_name in lacking]


def _notes_on(model: ShardedModel) -> list[str]:
    notes = []
    if model.unaligned:
        notes.append(
            f"not aligned: --tp {model.dims.tp} does not give each rank whole heads or groups of every fused part of "
            f"{counted(len(model.unaligned), 'tensor')}, {first_of(model.unaligned)}; TP kernels cannot use these "
            "shards as they are stored, so choose another --tp, or rules for them with --tp-plan"
        )
    if model.passed and model.dims.world_size > 1:
        notes.append(f"not in the model, replicated: {counted(len(model.passed), 'tensor')}, {first_of(model.passed)}")
    return notes


def rank_rows(files: Mapping[str, int], ranks: Mapping[str, int], dims: ParallelDims) -> list[dict[str, Any]]:
    """Bytes and files of each rank, for the report.

    Args:
        files: Bytes of each file.
        ranks: Rank of each file.
        dims: The mesh.
    """
    rows: list[dict[str, Any]] = []
    for rank in range(dims.world_size):
        pp, dp, tp = dims.coordinates(rank)
        rows.append({"rank": rank, "stage": pp, "dp": dp, "tp": tp, "bytes": 0, "files": []})
    for name, nbytes in files.items():
        rows[ranks[name]]["bytes"] += nbytes
        rows[ranks[name]]["files"].append(name)
    return rows
