"""Sharding of the target tensors for the mesh of the options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptx.conversion.steps.naming import NameMap
from ckptx.conversion.steps.replication import Replication, count_replication
from ckptx.conversion.steps.target_tensors import TargetTensors
from ckptx.errors import UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.stages import StageMap
from ckptx.model_view.sharder import ShardedModel, Sharder, effective_plan, read_plan
from ckptx.model_view.view import ModelView
from ckptx.options.mesh import ShardingOptions
from ckptx.wording import counted, first_of


@dataclass(frozen=True, slots=True)
class ShardedTarget:
    """Target tensors with their shards.

    Attributes:
        target: Target tensors; a name that shared bytes with one on another stage has become a copy.
        model: Stage and blocks of each tensor; None if tensors are whole.
        replication: Tensors that TP does not shard; None without TP.
        notes: Notes for the user.
    """

    target: TargetTensors
    model: ShardedModel | None = None
    replication: Replication | None = None
    notes: tuple[str, ...] = ()

    def renamed(self, names: Mapping[str, str]) -> ShardedTarget:
        """Return the same target under other names."""
        if all(old == new for old, new in names.items()):
            return self
        model = None if self.model is None else self.model.renamed(names.__getitem__)
        return replace(self, target=self.target.renamed(names.__getitem__), model=model)

    def with_aliases(self, names: Mapping[str, str]) -> ShardedTarget:
        """Return the same target with more names that share the bytes of others.

        Args:
            names: New name -> name of a tensor or of an alias.
        """
        target = self.target
        aliases = {new: target.aliases.get(name, name) for new, name in names.items()}
        return replace(self, target=replace(target, aliases={**target.aliases, **aliases})) if aliases else self


def shard_tensors(
    view: ModelView, target: TargetTensors, naming: NameMap, sharding: ShardingOptions, *, own_files_only: bool
) -> ShardedTarget:
    """Assign a stage and blocks to every tensor.

    Args:
        view: Model in the source.
        target: Target tensors under their names and with their dtypes.
        naming: Map from target names to model names.
        sharding: Mesh, split of layers into stages, and TP plan.
        own_files_only: True if each rank reads only its own files, so that replicated tensors and tied names are stored
            for each rank.

    Raises:
        UsageError: The layer split is invalid, or a pattern of the TP plan matches no tensor.
        UnsupportedError: Pipeline stages are requested, and the layers of the model are unknown.
    """
    sharder = _make_sharder(view, list(target.tensors), naming, sharding, own_files_only)
    unshareable = [
        name
        for name, stored in target.aliases.items()
        if own_files_only or sharder.stage_of(name) != sharder.stage_of(stored)
    ]
    target = target.with_copies(unshareable)
    model = sharder.place(target.tensors, _unknown_names(view, target, naming))
    replication = None
    notes = _sharding_notes(model)
    if model.dims.tp > 1:
        replication = count_replication(
            model,
            target.tensors,
            target.copies,
            target.aliases,
            lambda name: sharder.stages.is_in_layer(naming.model_name(name) or name),
        )
        architecture = view.architecture
        subject = "this model" if architecture is None else architecture.class_name
        notes += replication.notes(model.dims.tp, subject)
    return ShardedTarget(target, model, replication, tuple(notes))


def _make_sharder(
    view: ModelView, names: list[str], naming: NameMap, sharding: ShardingOptions, own_files_only: bool
) -> Sharder:
    architecture = view.architecture
    dims = sharding.dims
    user_plan = read_plan(str(sharding.tp_plan)) if sharding.tp_plan else None
    plan = effective_plan(architecture, view.config, user_plan)
    stacks = architecture.stacks(view.config) if architecture is not None and view.config is not None else ()
    root = view.catalog.root
    subject = architecture.class_name if architecture is not None else f"{root}: its architecture is unknown"
    stages = StageMap(stacks, dims.pp, sharding.pp_split, subject)
    if user_plan is not None:
        unmatched = plan.find_unmatched_patterns([naming.model_name(name) or name for name in names])
        if unmatched:
            others = f", nor do {len(unmatched) - 1} more" if len(unmatched) > 1 else ""
            raise UsageError(
                f'--tp-plan: "{unmatched[0]}" matches no tensor{others}; '
                "patterns are names of the model's parameters or modules, with * for an index"
            )
    return Sharder(plan, dims, stages, naming.rules, own_files_only, user_plan)


def _unknown_names(view: ModelView, target: TargetTensors, naming: NameMap) -> list[str]:
    """Return the target names that the model lacks, or that share the tensor of another layer in it."""
    architecture, config = view.architecture, view.config
    if architecture is None or config is None:
        return []
    model_names = {name: naming.model_name(name) for name in target.tensors}
    unused = {each for each in {*model_names.values()} if each is not None and architecture.is_unused(each, config)}
    unknown = set(view.unknown)
    return [name for name, model_name in model_names.items() if name in unknown or model_name in unused]


def _sharding_notes(model: ShardedModel) -> list[str]:
    notes = []
    if model.unaligned:
        notes.append(
            f"not aligned: --tp {model.dims.tp} splits heads, groups or fused parts of "
            f"{counted(len(model.unaligned), 'tensor')} ({first_of(model.unaligned)}); TP kernels cannot use these "
            "shards; choose another --tp, or pass rules for these tensors with --tp-plan"
        )
    if model.unknown_tensors and model.dims.world_size > 1:
        notes.append(
            f"replicated, not in the model: {counted(len(model.unknown_tensors), 'tensor')}, "
            f"{first_of(model.unknown_tensors)}"
        )
    return notes


def rank_rows(files: Mapping[str, int], ranks: Mapping[str, int], dims: ParallelDims) -> list[dict[str, Any]]:
    """Return the bytes and files of each rank, for the report.

    Args:
        files: Size of each file in bytes.
        ranks: Rank of each file.
        dims: Mesh dimensions.
    """
    rows: list[dict[str, Any]] = []
    for rank in range(dims.world_size):
        pp, dp, tp = dims.coordinates(rank)
        rows.append({"rank": rank, "stage": pp, "dp": dp, "tp": tp, "bytes": 0, "files": []})
    for name, nbytes in files.items():
        rows[ranks[name]]["bytes"] += nbytes
        rows[ranks[name]]["files"].append(name)
    return rows
