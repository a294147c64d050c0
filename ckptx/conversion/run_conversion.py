"""Every conversion, from the opened source to the published output.

    open -> base -> model -> ties -> state -> names -> dtypes -> shard -> allocate -> plan -> publish

Each step is a function of the results of the steps before it and returns an immutable value, whose notes `log` records
for the user. Steps in which output formats differ are methods of `output`.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ckptx.conversion.outputs.output_format import ConfigEdits, OutputContents, OutputFormat
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint, ConfigNeed, find_base
from ckptx.conversion.steps.dtypes import cast_tensors
from ckptx.conversion.steps.ledger import build_ledger
from ckptx.conversion.steps.open_source import SourceCheckpoint
from ckptx.conversion.steps.overflow_check import refuse_overflow
from ckptx.conversion.steps.recorded_config import check_recorded_config
from ckptx.conversion.steps.selection import select_tensors
from ckptx.conversion.steps.sharding import ShardedTarget, shard_tensors
from ckptx.conversion.steps.sidecars import collect_sidecars
from ckptx.conversion.steps.source_model import (
    DroppedState,
    check_against_config,
    find_model,
    refuse_without_model,
    resolve_ties,
)
from ckptx.conversion.steps.summary import ConversionState, build_report
from ckptx.conversion.steps.training_state import TrainingState, map_training_state
from ckptx.model_view.view import compare_replicas
from ckptx.options.conversion import ConversionOptions
from ckptx.processes.peers import PeerProcesses
from ckptx.publishing.overwrite_checks import refuse_unrelated_files
from ckptx.publishing.publish import Job, publish
from ckptx.report.documents.conversion import ConversionReport
from ckptx.report.report import Log
from ckptx.storage.interface import SourceFiles
from ckptx.transfer.executor import CopyResult
from ckptx.transfer.planner import plan_copy

_logger = logging.getLogger(__name__)


def run_conversion(
    command: str, request: SourceCheckpoint, output: OutputFormat, config_need: ConfigNeed, log: Log
) -> ConversionReport:
    """Run one conversion and return its report.

    Args:
        command: Command name for the report.
        request: Opened source checkpoint, destination, options and processes.
        output: Format to write.
        config_need: Behavior when there is no config.
        log: Receives the notes of every step.

    Raises:
        CkptxError: A step failed; nothing was published.
    """
    source, files, dst, options = (
        request.source,
        request.files,
        request.dst,
        request.options,
    )
    keeps_state = output.keeps_state(source)

    # Read the source.
    base = log(find_base(source, dst, options, config_need))
    model = log(find_model(base, files, options, with_state=keeps_state))
    view = model.view
    _logger.info(
        "config of %s, %s, %d tensors of the model, %d of the optimizer, %d others", base.sidecar_source.root,
        view.architecture.class_name if view.architecture else "no class", len(view.tensors), len(view.optimizer),
        len(view.other),
    )  # fmt: skip
    ties = log(resolve_ties(view, files, options))
    config_check = log(check_against_config(view, allow_config_mismatch=options.allow_config_mismatch))
    dropped_state = log(DroppedState() if keeps_state else output.dropped_state(view))
    if output.needs_model:
        refuse_without_model(view)

    # Choose the tensors of the target, their names, dtypes and shards.
    selection = log(select_tensors(base, view, ties, output, options))
    check_recorded_config(view, base, selection.named)
    naming = selection.named.naming
    _logger.info(
        "%s: %d tensors, %d aliases", "original files restored" if selection.restored_files else "new layout",
        len(selection.named.target.tensors), len(selection.named.target.aliases),
    )  # fmt: skip
    cast = log(cast_tensors(view, selection.named, base, options.dtype))
    sharded = ShardedTarget(cast.target)
    if output.sharding is not None:
        sharded = log(shard_tensors(view, cast.target, naming, output.sharding, own_files_only=output.own_files_only))
    output_name_by_model_name = output.names(view, selection.named)
    output_tensors = sharded.renamed(output_name_by_model_name).with_aliases(
        output.aliases(view, selection.named, output_name_by_model_name)
    )
    output_name_by_source_model_name = (
        {old: output_name_by_model_name[new] for old, new in naming.target_names(view).items()} if keeps_state else {}
    )

    def map_source_state() -> TrainingState:
        return (
            map_training_state(view, files, output_tensors, output_name_by_source_model_name)
            if keeps_state
            else TrainingState()
        )

    training_state = log(map_source_state())

    # Allocate the files, and collect what is copied with them.
    is_altered = cast.was_cast or output.has_new_prefix
    original_catalog = None if is_altered else selection.original
    contents = OutputContents(
        output_tensors,
        training_state,
        output_name_by_model_name,
        naming,
        base,
        selection.restored_files,
        original_catalog,
    )
    allocation = log(output.allocate(dst, contents, files))
    edits = ConfigEdits()
    if selection.restored_files is None:
        edits = log(output.edits(view, selection.named, cast, base, ties, options.dtype))
    sidecars = log(collect_sidecars(base, output.sidecars(base), edits.rows))
    target = output_tensors.target
    plan = plan_copy(
        target.source,
        allocation.catalog,
        {**target.source_names, **training_state.source_names, **training_state.object_source_names},
        build_frame=allocation.block_frame,
        prologues=allocation.prologues,
        groups=allocation.groups,
    )
    _logger.info("plan: %d files in %d groups, %d bytes", len(plan.files), len(plan.groups), plan.bytes_written)
    if _logger.isEnabledFor(logging.DEBUG):
        for line in plan.to_lines():
            _logger.debug("%s", line)
    ledger = build_ledger(
        source.tensors.keys(),
        plan,
        written=target.written_disk_names() | training_state.written_disk_names(),
        shared=target.tied_disk_names | training_state.shared_disk_names | view.model_duplicates.keys(),
        dropped={row["name"] for row in (*dropped_state.rows, *training_state.dropped_rows)},
        aliases={**target.aliases, **training_state.aliases},
        representatives=ties.representatives,
    )

    def are_source_decisions_unchanged() -> bool:
        compare_replicas(view.catalog, files)
        return resolve_ties(view, files, options) == ties and map_source_state() == training_state

    job = Job(
        plan=plan,
        source=target.source,
        sidecars=dict(sidecars.files),
        settings=options.fingerprint(),
        build_manifest=lambda outcome: output.manifest(contents, allocation, outcome.digests),
        opened_catalog=source,
        are_source_decisions_unchanged=are_source_decisions_unchanged,
        validate_result=lambda outcome: refuse_overflow(outcome, options.allow_overflow, options.dtype, log),
        check_staged_files=allocation.check,
        markers=list(allocation.markers),
    )
    results = ConversionState(
        dst, options, request.processes, model, ties, config_check, dropped_state, cast, sharded, contents,
        allocation, sidecars, job, job.nbytes, ledger,
    )  # fmt: skip
    outcome = None if options.dry_run else _publish(job, dst, files, options, request.processes, base)
    return build_report(command, results, outcome, log)


def _publish(
    job: Job,
    dst: Path,
    files: SourceFiles,
    options: ConversionOptions,
    processes: PeerProcesses | None,
    base: BaseCheckpoint,
) -> CopyResult | None:
    """Write and publish the output."""
    total = job.plan.bytes_written
    return publish(
        job,
        dst,
        files,
        workers=options.threads,
        max_memory=options.buffer_bytes,
        overwrite=options.overwrite,
        resume=options.resume,
        on_progress=lambda done: options.on_progress(done, total),
        processes=processes,
        other_sources=() if base.catalog is None else (base.catalog,),
        check_replaceable=refuse_unrelated_files,
    )
