"""Shard the target tensors for the requested mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.class_table import find_class_record
from ckptx.architecture.configs import remote_reference
from ckptx.architecture.run_support import find_head_refusal, find_run_refusal
from ckptx.architecture.tied import TieDecision
from ckptx.conversion.steps.naming import NameMap
from ckptx.conversion.steps.replication import Replication, count_replication
from ckptx.conversion.steps.target_tensors import TargetTensors
from ckptx.errors import UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.stages import StageMap
from ckptx.layout.tensor_parallel_plan import decide_placement
from ckptx.model_view.sharder import ShardedModel, Sharder, effective_plan, read_plan
from ckptx.model_view.unknown_class import code_advice
from ckptx.model_view.view import ModelView, rules_of
from ckptx.options.mesh import OutputShardingOptions
from ckptx.wording import counted, first_of


@dataclass(frozen=True, slots=True)
class ShardedTarget:
    """Target tensors with their shards.

    Attributes:
        target: Target tensors; an alias becomes a copy if its tensor is on another stage, or if each rank reads only
            its own files.
        sharded_model: Stage of each tensor, and the blocks that it is split into; None without a mesh, if tensors are
            whole.
        replication: Sizes of the tensors that TP shards and replicates; None without TP.
        notes: Notes for the user.
    """

    target: TargetTensors
    sharded_model: ShardedModel | None = None
    replication: Replication | None = None
    notes: tuple[str, ...] = ()

    def renamed(self, names: Mapping[str, str]) -> ShardedTarget:
        """Return the same target under other names.

        Args:
            names: Old name -> new name, for every tensor and alias.
        """
        if all(old == new for old, new in names.items()):
            return self
        sharded_model = None if self.sharded_model is None else self.sharded_model.renamed(names.__getitem__)
        return replace(self, target=self.target.renamed(names.__getitem__), sharded_model=sharded_model)

    def with_aliases(self, names: Mapping[str, str]) -> ShardedTarget:
        """Return the same target with more names that share the bytes of others.

        Args:
            names: New name -> name of a tensor or of an alias.
        """
        target = self.target
        aliases = {new: target.aliases.get(name, name) for new, name in names.items()}
        return replace(self, target=replace(target, aliases={**target.aliases, **aliases})) if aliases else self


def shard_tensors(
    view: ModelView,
    target: TargetTensors,
    naming: NameMap,
    options: OutputShardingOptions,
    ties: Sequence[TieDecision],
    *,
    own_files_only: bool,
) -> ShardedTarget:
    """Assign a stage and blocks to every tensor.

    Args:
        view: Model in the source.
        target: Target tensors under their names and with their dtypes.
        naming: Map from target names to the names that they are loaded as.
        options: Mesh, split of layers into stages, and TP plan.
        ties: Decisions on the tied weights of the source.
        own_files_only: True if each rank reads only its own files, so that replicated tensors and tied names are stored
            for each rank.

    Raises:
        UsageError: The layer split is invalid, or a pattern of the TP plan matches no tensor.
        UnsupportedError: Pipeline stages are requested, and the layers of the model are unknown.
    """
    sharder = _make_sharder(view, [*target.tensors, *target.aliases], naming, options, own_files_only)
    unshareable = [
        name
        for name, stored in target.aliases.items()
        if own_files_only or sharder.stage_of(name) != sharder.stage_of(stored)
    ]
    target = target.with_copies(unshareable)
    sharded_model = sharder.place(target.tensors, _unknown_names(view, target, naming))
    replication = None
    architecture = view.disk_architecture  # for messages; `view.architecture` has the names of the source
    subject = "this model" if architecture is None else architecture.class_name
    run_notes = list(_run_notes(view, sharder, ties))
    notes = _sharding_notes(
        sharded_model, architecture, has_tp_advice=_has_tp_advice(run_notes, view, sharded_model.dims.tp)
    )
    if sharded_model.dims.tp > 1:
        replication = count_replication(
            sharded_model,
            target.tensors,
            target.copied_aliases,
            target.aliases,
            lambda name: sharder.stages.is_in_layer(naming.loaded_name(name) or name),
        )
        notes += replication.notes(sharded_model.dims.tp, subject)
    notes += run_notes
    return ShardedTarget(target, sharded_model, replication, tuple(notes))


def _make_sharder(
    view: ModelView, names: list[str], naming: NameMap, options: OutputShardingOptions, own_files_only: bool
) -> Sharder:
    architecture = view.architecture
    dims = options.dims
    user_plan = read_plan(str(options.tp_plan)) if options.tp_plan else None
    plan = effective_plan(architecture, view.config, user_plan)
    stacks = architecture.stacks(view.config) if architecture is not None and view.config is not None else ()
    root = view.catalog.location
    # The beginning of an error that ends with ": cannot find the layer list, ...".
    subject = architecture.class_name if architecture is not None else f"{root}: its architecture is unknown"
    assignment = options.stage_assignment
    stages = StageMap(stacks, assignment.stage_count, options.pp_split, subject, _advice_on_layers(view))
    if user_plan is not None:
        loaded_names = [naming.loaded_name(name) or name for name in names]
        unmatched = plan.find_unmatched_patterns(loaded_names)
        if unmatched:
            others = f", nor do {len(unmatched) - 1} more" if len(unmatched) > 1 else ""
            raise UsageError(
                f'--tp-plan: "{unmatched[0]}" matches no tensor{others}; '
                "patterns are names of the model's parameters or modules, with * for an index"
            )
        if not (view.config and view.config.get("quantization_config")):  # scales and packed weights have no rules
            plan.refuse_modules_without_weight(loaded_names)
    return Sharder(
        plan,
        dims,
        stages,
        naming.rules,
        own_files_only,
        user_plan,
        ep_inner=options.ep_inner,
        assignment=assignment if assignment.stages_per_rank > 1 else None,
    )


def _run_notes(view: ModelView, sharder: Sharder, ties: Sequence[TieDecision]) -> Iterator[str]:
    """Yield notes on why `verify --run` or `forecast` cannot run this layout; none without a config."""
    dims, architecture, config = sharder.dims, view.architecture, view.config
    if dims.world_size == 1 or architecture is None or config is None:
        return
    refusal = find_run_refusal(config, architecture, dims.tp, dims.pp)
    if refusal:
        yield f"verify --run and forecast cannot run this layout: {refusal}"
        return
    if dims.ep > 1:
        yield (
            "verify --run and forecast have no --ep: they run the checkpoint with TP and FSDP, so that each rank reads "
            "experts from the files of other ranks"
        )
    if dims.pp == 1 or dims.tp == 1:
        return
    rules = rules_of(view)  # ties have the names of the source checkpoint
    for tie in ties:
        if not tie.declared or tie.action != "alias" or tie.stored_name is None:
            continue
        names = [name if rules is None else rules.model_name(name) or name for name in (tie.source, tie.target)]
        shape = view.tensors[tie.stored_name].shape
        placements = [decide_placement(sharder.plan, name, shape, dims.tp).placement for name in names]
        if sharder.stages.stage_of(names[0]) != sharder.stages.stage_of(names[1]) and placements[0] != placements[1]:
            yield (
                f"verify --run cannot run this layout: {names[0]} and {names[1]} are tied, on two pipeline stages, and "
                "sharded differently; set one style for both with --tp-plan, or leave out --pp"
            )


def _has_tp_advice(run_notes: Sequence[str], view: ModelView, tp: int) -> bool:
    """Return True if one of the notes of `_run_notes` names the values of `--tp` that divide the heads."""
    if view.architecture is None or view.config is None:
        return False
    refusal = find_head_refusal(view.config, view.architecture, tp)
    return bool(refusal) and any(note.endswith(refusal) for note in run_notes)


def _unknown_names(view: ModelView, target: TargetTensors, naming: NameMap) -> list[str]:
    """Return the target names of tensors that the class does not have or does not use.

    For example, a layer that shares the keys and values of another does not use its own projections.
    """
    architecture, config = view.architecture, view.config
    if architecture is None or config is None:
        return []
    loaded_names = {name: naming.loaded_name(name) for name in target.tensors}
    unused = {each for each in {*loaded_names.values()} if each is not None and architecture.is_unused(each, config)}
    unknown_source_names = set(view.unknown)  # these pass through under their names
    return [name for name, loaded in loaded_names.items() if name in unknown_source_names or loaded in unused]


def _advice_on_layers(view: ModelView) -> str:
    """Return what to do if the layers of the class are unknown; empty for a class that ckptx knows."""
    architecture = view.disk_architecture
    if architecture is None or view.config is None or not architecture.is_unknown_class:
        return ""
    return code_advice(remote_reference(view.config, architecture.class_name))


def _sharding_notes(
    sharded_model: ShardedModel, architecture: Architecture | None, *, has_tp_advice: bool
) -> list[str]:
    """Return the notes on shards and on replicated tensors.

    Args:
        sharded_model: Sharded tensors.
        architecture: Class of the model; None if it is unknown.
        has_tp_advice: True if another note names the values of `--tp` to choose from.
    """
    notes = []
    subject = "this model" if architecture is None else architecture.class_name
    is_known = architecture is not None and find_class_record(architecture.class_name) is not None
    if sharded_model.unaligned and not is_known:
        notes.append(
            f"not aligned: ckptx does not know all heads, key/value groups and fused parts of {subject}, so TP layers "
            "that compute on local shards may not be able to use those of "
            f"{counted(len(sharded_model.unaligned), 'tensor')} ({first_of(sharded_model.unaligned)}); compare them "
            "with what the code of the class expects"
        )
    elif sharded_model.unaligned:
        advice = "" if has_tp_advice else "; choose another --tp, or pass rules for these tensors with --tp-plan"
        notes.append(
            f"not aligned: --tp {sharded_model.dims.tp} splits heads, key/value groups or fused parts of "
            f"{counted(len(sharded_model.unaligned), 'tensor')} ({first_of(sharded_model.unaligned)}); loaders that "
            f"assemble whole tensors read the output, but no model can run on these shards{advice}"
        )
    if sharded_model.maybe_fused:
        names = sharded_model.maybe_fused
        notes.append(
            f"alignment unknown: ckptx does not know whether {subject} fuses parts, such as [gate|up] or [q|k|v], in "
            f"{counted(len(names), 'tensor')} that TP shards in plain chunks ({first_of(names)}); use packed_colwise "
            "for two fused parts of one size, and replicate for other fused parts"
        )
    if sharded_model.unknown_tensors and sharded_model.dims.world_size > 1:
        notes.append(
            f"{counted(len(sharded_model.unknown_tensors), 'tensor')} not defined or not used by {subject} "
            f"({first_of(sharded_model.unknown_tensors)}): replicated across TP ranks; nothing to do if you expect "
            "these tensors"
        )
    return notes


def rank_entries(files: Mapping[str, int], ranks: Mapping[str, int], dims: ParallelDims) -> list[dict[str, Any]]:
    """Return the `ranks` of the report: coordinates, bytes and files of each rank.

    Args:
        files: File name -> size in bytes.
        ranks: File name -> rank.
        dims: Mesh dimensions.
    """
    entries: list[dict[str, Any]] = []
    for rank in range(dims.world_size):
        pp, dp, tp = dims.coordinates(rank)
        entries.append({"rank": rank, "stage": pp, "dp": dp, "tp": tp, "bytes": 0, "files": []})
    for name, nbytes in files.items():
        entries[ranks[name]]["bytes"] += nbytes
        entries[ranks[name]]["files"].append(name)
    return entries
