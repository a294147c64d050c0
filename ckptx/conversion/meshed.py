"""Cutting the tensors of a conversion: the mesh that options ask for, and what the report says about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptx.conversion.names import Spelling
from ckptx.conversion.run import Conversion
from ckptx.conversion.target import Target
from ckptx.cutting import Cutter, Mesh, plan_of, read_plan
from ckptx.errors import UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.stages import StageMap
from ckptx.mapping.rules import NameRules
from ckptx.report.report import counted
from ckptx.view import ModelView


def cutter_for(run: Conversion, view: ModelView, rules: NameRules | None, names: list[str], replicate: bool) -> Cutter:
    """What decides how the tensors of this model are cut.

    Args:
        run: Its options say for which mesh.
        view: The model.
        rules: From the names in `names` to those of the model.
        names: Of the tensors that will be cut.
        replicate: As in `Cutter`.

    Raises:
        UsageError: Layers cannot be split as asked, or the user's plan matches no tensor.
        UnsupportedError: Stages are asked for and no layers are known.
    """
    options, architecture = run.options, view.architecture
    dims = ParallelDims(options.tp, options.pp, options.dp_shard)
    user = read_plan(options.tp_plan) if options.tp_plan else None
    plan = plan_of(architecture, view.config, user)
    stacks = architecture.stacks(view.config) if architecture is not None and view.config is not None else ()
    subject = architecture.class_name if architecture is not None else f"{run.source.root}: its architecture is unknown"
    stages = StageMap(stacks, options.pp, options.pp_split, subject)
    if user is not None:
        model_names = names if rules is None else [rules.model_name(name) or name for name in names]
        idle = plan.unmatched(model_names)
        if idle:
            others = f", nor do {len(idle) - 1} more" if len(idle) > 1 else ""
            raise UsageError(
                f'--tp-plan: "{idle[0]}" matches no tensor{others}; '
                "patterns are names of the model's parameters or modules, with * for an index"
            )
    return Cutter(plan, dims, stages, rules, replicate)


def unknown_names(view: ModelView, target: Target, spelling: Spelling) -> list[str]:
    """Names in the target that the model does not have, or that another layer's tensor stands for in it."""
    architecture, config = view.architecture, view.config
    if architecture is None or config is None:
        return []
    unknown = set(view.unknown)
    found = []
    for name in target.tensors:
        model_name = name if spelling.rules is None else spelling.rules.model_name(name)
        if name in unknown or (model_name is not None and architecture.lacks(model_name, config)):
            found.append(name)
    return found


def cut_target(run: Conversion, target: Target, cutter: Cutter, unknown: list[str]) -> Mesh:
    """Places every tensor of `target`; a name that shares bytes with one on another stage gets a copy of its own."""
    for name, stored in list(target.aliases.items()):
        if cutter.replicate or cutter.stage_of(name) != cutter.stage_of(stored):
            target.copy_out(name)
    mesh = cutter.place(target.tensors, unknown)
    describe(run, mesh)
    return mesh


def describe(run: Conversion, mesh: Mesh) -> None:
    """Puts the layout into the report."""
    report, dims = run.report, mesh.dims
    report.details["layout"] = {"tp": dims.tp, "pp": dims.pp, "dp_shard": dims.dp_shard, "stages": mesh.layers()}
    report.details["chunks"] = sum(len(placed.blocks) for placed in mesh.placed.values())
    report.details["rules"] = mesh.rules()
    report.details["unaligned"] = mesh.unaligned
    report.details["passed_through"] = mesh.passed
    if mesh.unaligned:
        report.warnings.append(
            f"storage cut, not head-aligned: {counted(len(mesh.unaligned), 'tensor')}, "
            f'"{mesh.unaligned[0]}"{" and more" if len(mesh.unaligned) > 1 else ""}; tp is {dims.tp}'
        )
    if mesh.passed and dims.world_size > 1:
        report.warnings.append(
            f"not in the model, replicated: {counted(len(mesh.passed), 'tensor')}, "
            f'"{mesh.passed[0]}"{" and more" if len(mesh.passed) > 1 else ""}'
        )


def describe_ranks(run: Conversion, files: Mapping[str, int], ranks: Mapping[str, int], dims: ParallelDims) -> None:
    """Bytes and files of each rank, for the report."""
    rows: list[dict[str, Any]] = []
    for rank in range(dims.world_size):
        pp, dp, tp = dims.coordinates(rank)
        rows.append({"rank": rank, "stage": pp, "dp": dp, "tp": tp, "bytes": 0, "files": []})
    for name, nbytes in files.items():
        rows[ranks[name]]["bytes"] += nbytes
        rows[ranks[name]]["files"].append(name)
    run.report.ranks = rows
