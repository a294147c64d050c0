"""Every conversion, from the opened source to the published output.

    open -> base -> Megatron's names -> dequantize -> model -> adapters -> ties -> names -> quantize -> dtypes ->
    combine -> shard -> state -> allocate -> plan -> publish

Each step is a function of the results of the steps before it and returns an immutable value, whose notes `log` records
for the user. Steps in which output formats differ are methods of `output`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ckptx.catalog.catalog import Catalog
from ckptx.conversion.outputs.output_format import ConfigEdits, OutputContents, OutputFormat
from ckptx.conversion.steps.adapter_source import select_conversion_source
from ckptx.conversion.steps.adapters import merge_adapters, open_adapters
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint, ConfigNeed, find_base
from ckptx.conversion.steps.dequantization import dequantize_source
from ckptx.conversion.steps.dtypes import cast_tensors
from ckptx.conversion.steps.ledger import build_ledger
from ckptx.conversion.steps.megatron_source import RenamedSource, rename_megatron_source
from ckptx.conversion.steps.naming import NamedTarget, SchemeChange
from ckptx.conversion.steps.open_source import SourceCheckpoint
from ckptx.conversion.steps.overflow_check import refuse_overflow
from ckptx.conversion.steps.quantization import quantize_target
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
from ckptx.conversion.steps.trainer_buffers import add_trainer_buffers
from ckptx.conversion.steps.training_state import TrainingState, map_training_state
from ckptx.formats.hf.hf_metadata import name_config_in_errors
from ckptx.model_view.view import compare_replicas
from ckptx.publishing.overwrite_checks import list_removed_files, refuse_unrelated_files, removal_note
from ckptx.publishing.publish import Job, publish
from ckptx.quantization.computed_files import reset_counts
from ckptx.report.documents.conversion import ConversionReport
from ckptx.report.report import Log
from ckptx.storage.interface import SourceFiles
from ckptx.transfer.executor import CopyResult
from ckptx.transfer.planner import plan_copy

_logger = logging.getLogger(__name__)


def run_conversion(
    command: str, source_checkpoint: SourceCheckpoint, output: OutputFormat, config_need: ConfigNeed, log: Log
) -> ConversionReport:
    """Run one conversion and return its report.

    Args:
        command: Command name for the report.
        source_checkpoint: Opened source checkpoint, destination, options and processes.
        output: Format to write.
        config_need: Behavior when there is no config.
        log: Receives the notes of every step.

    Raises:
        CkptxError: A step failed; no output was created.
    """
    with ExitStack() as stack:
        return _run_steps(command, source_checkpoint, output, config_need, log, stack)


def _run_steps(
    command: str,
    source_checkpoint: SourceCheckpoint,
    output: OutputFormat,
    config_need: ConfigNeed,
    log: Log,
    stack: ExitStack,
) -> ConversionReport:
    """Run the steps of a conversion; `stack` closes the files of the base."""
    source, files, dst, options = (
        source_checkpoint.source,
        source_checkpoint.files,
        source_checkpoint.dst,
        source_checkpoint.options,
    )

    # Read the source.
    keeps_state = output.keeps_state(source)
    found_base = find_base(source, dst, options, config_need)
    if output.adapter_settings is None:
        log(found_base)
    adapters = open_adapters(options, dst, found_base.config, stack)
    conversion_source = log(select_conversion_source(found_base, files, output.adapter_settings, found_base.config))
    renamed = log(rename_megatron_source(conversion_source.base, files, options, with_optimizer=keeps_state))
    keeps_state = keeps_state and (renamed.model is None or renamed.keeps_optimizer)
    dequantized = dequantize_source(renamed.base, renamed.files, options)
    base, files = dequantized.base, dequantized.files
    stack.enter_context(name_config_in_errors(base.sidecar_source))
    found_model = log(find_model(base, files, options, with_state=keeps_state))
    merged = log(merge_adapters(adapters, found_model, base, files, options))
    base, model, files = merged.base, merged.model, merged.files
    view = model.view
    _logger.info(
        "config of %s, %s, %d tensors of the model, %d of the optimizer, %d others", base.sidecar_source.root,
        view.architecture.class_name if view.architecture else "no class", len(view.tensors), len(view.optimizer),
        len(view.other),
    )  # fmt: skip
    ties = log(resolve_ties(view, files, options))
    config_check = log(check_against_config(view, base, allow_config_mismatch=options.allow_config_mismatch))
    if renamed.model is not None:
        dropped_state = renamed.dropped_state()
    else:
        dropped_state = log(DroppedState() if keeps_state else output.dropped_state(view))
    if output.needs_model:
        refuse_without_model(view)

    # Choose the tensors of the target, their names, dtypes and shards.
    selection = log(select_tensors(base, view, ties, output, options))
    check_recorded_config(view, base, selection.named_target)
    buffered = log(add_trainer_buffers(selection.named_target, files))
    quantized = log(quantize_target(buffered.named_target, base, buffered.files, _open_base_files(base, output, stack)))
    named_target = quantized.named_target
    _logger.info(
        "%s: %d tensors, %d aliases", "original files restored" if selection.restored_files else "new layout",
        len(named_target.target.tensors), len(named_target.target.aliases),
    )  # fmt: skip
    dtype = "base" if quantized.encoders else options.dtype  # `--quantize` implies the dtypes of the base
    cast = log(cast_tensors(view, named_target, base, dtype))
    combined = output.combine(view, replace(named_target, target=cast.target), base, quantized.files)
    quantized, files = replace(quantized, files=combined.files), combined.files
    dropped_state = replace(dropped_state, tensors=(*dropped_state.tensors, *combined.dropped))
    stored_target = combined.named_target
    naming = stored_target.naming
    sharded = ShardedTarget(stored_target.target)
    if output.sharding is not None:
        sharded = log(
            shard_tensors(
                view,
                stored_target.target,
                naming,
                output.sharding,
                ties.decisions,
                own_files_only=output.own_files_only,
            )
        )
    output_name_by_target_name = output.names(view, stored_target)
    output_tensors = sharded.renamed(output_name_by_target_name).with_aliases(
        output.aliases(view, stored_target, output_name_by_target_name)
    )
    output_name_by_view_name = (
        {
            old: output_name_by_target_name[new]
            for old, new in naming.target_names(view).items()
            if selection.named_target.is_unchanged(new, view)
        }
        if keeps_state
        else {}
    )

    def map_source_state() -> TrainingState:
        return (
            map_training_state(view, files, output_tensors, output_name_by_view_name)
            if keeps_state
            else TrainingState()
        )

    training_state = log(map_source_state())

    # Allocate the files, and collect what is copied with them.
    is_altered = cast.was_cast or output.has_new_prefix or base.is_dequantized or base.is_merged
    original_files = None if is_altered else selection.original
    contents = OutputContents(
        output_tensors,
        training_state,
        output_name_by_target_name,
        naming,
        base,
        selection.restored_files,
        original_files,
    )
    allocation = log(output.allocate(dst, contents, files))
    edits = ConfigEdits()
    if selection.restored_files is None:
        edits = log(output.edits(view, named_target, cast, base, ties, dtype))
    all_edits = (*dequantized.config_edits, *config_check.edits, *edits.changes)
    sidecars = log(
        collect_sidecars(
            base, output.sidecars(base), all_edits, needs_tokenizer=output.needs_tokenizer, keeps_state=keeps_state
        )
    )
    target = output_tensors.target
    plan = plan_copy(
        target.source,
        allocation.catalog,
        {**target.source_names, **training_state.source_names, **training_state.object_source_names},
        build_frame=allocation.build_frame,
        prologues=allocation.prologues,
        file_groups=allocation.file_groups,
    )
    _logger.info("plan: %d files in %d groups, %d bytes", len(plan.files), len(plan.file_groups), plan.bytes_written)
    if _logger.isEnabledFor(logging.DEBUG):
        for line in plan.to_lines():
            _logger.debug("%s", line)

    def stored_names(names: Iterable[str]) -> set[str]:
        """Return the names in the source, before renaming, dequantization, use of master weights and merging."""
        names = dequantized.stored_names(model.stored_names(merged.stored_names(names)))
        return conversion_source.stored_names(renamed.stored_names(names))

    written = stored_names(target.written_stored_names() | training_state.written_stored_names())
    dropped_for_adapters = [*conversion_source.dropped, *merged.dropped(written)]

    ledger = build_ledger(
        source.tensors.keys(),
        plan,
        written=written,
        shared=stored_names(
            target.tied_stored_names | training_state.shared_stored_names | view.model_duplicates.keys()
        ),
        decoded=dequantized.decoded,
        dropped={
            each["name"]
            for each in (
                *dequantized.dropped,
                *model.dropped,
                *dropped_state.tensors,
                *training_state.dropped,
                *dropped_for_adapters,
            )
        },
        aliases={**target.aliases, **training_state.aliases},
        representatives=ties.representatives,
        stored_dtype=lambda entry: quantized.float_dtype(entry) or dequantized.stored_dtype(merged.stored_entry(entry)),
    )

    def are_source_decisions_unchanged() -> bool:
        """Return True if the source still leads to the same decisions; see `Job`."""
        compare_replicas(view.catalog, files)
        return resolve_ties(view, files, options) == ties and map_source_state() == training_state

    job = Job(
        plan=plan,
        source=target.source,
        sidecars={output.directory + name: data for name, data in sidecars.files.items()},
        settings=options.fingerprint(),
        build_manifest=lambda outcome: output.manifest(contents, allocation, outcome.digests),
        opened_catalog=source,
        are_source_decisions_unchanged=are_source_decisions_unchanged,
        validate_result=lambda outcome: refuse_overflow(outcome, options.allow_overflow, options.dtype, log),
        check_staged_files=allocation.check,
        markers=list(allocation.markers),
    )
    conversion = ConversionState(
        dst, options, source_checkpoint.processes, dequantized, quantized, model, ties, config_check, dropped_state,
        cast, sharded, contents, allocation, sidecars, job, job.nbytes, ledger,
        _scheme_change(renamed, stored_target, options.names or output.default_naming(view) or "hf"), combined, merged,
        dropped_for_adapters, conversion_source,
    )  # fmt: skip
    reset_counts(dequantized.files, merged.files, quantized.files)
    removed_files = list_removed_files(dst, job.file_names) if options.overwrite else []
    other_sources = (*(() if base.catalog is None else (base.catalog,)), *merged.catalogs)
    outcome = None if options.dry_run else _publish(job, dst, files, source_checkpoint, other_sources)
    if outcome is not None and outcome.restart_reason:
        log.note(f"--resume: discarded the output of an interrupted run, because {outcome.restart_reason}")
    if removed_files and (options.dry_run or (outcome is not None and not outcome.was_complete)):
        log.note(removal_note(dst, removed_files, dry_run=options.dry_run))
    return build_report(command, conversion, outcome, log)


def _scheme_change(renamed: RenamedSource, target: NamedTarget, names: str) -> SchemeChange | None:
    """Return the change of naming schemes from the source to the target; None if neither has names of a trainer.

    Args:
        renamed: Source; renamed to disk names if its names are Megatron's.
        target: Target tensors under their final names.
        names: Value of `--names`, or the scheme that it defaults to.
    """
    before = renamed.scheme_change(names)
    change = target.scheme_change
    return change if before is None else before if change is None else replace(change, before=before.before)


def _open_base_files(base: BaseCheckpoint, output: OutputFormat, stack: ExitStack) -> SourceFiles | None:
    """Open the files of a base whose quantization the output gets; None without `--quantize`."""
    if not output.quantizes or base.catalog is None:
        return None
    return stack.enter_context(base.catalog.source.open(base.catalog.identities))


def _publish(
    job: Job, dst: Path, files: SourceFiles, source: SourceCheckpoint, other_sources: Iterable[Catalog]
) -> CopyResult | None:
    """Write and publish the output.

    Args:
        job: Contents of the output.
        dst: Directory to write.
        files: Files of the source, and computed ones.
        source: Source with its options and processes.
        other_sources: Other checkpoints that the output is made from.

    Returns:
        The result of the copy; None on a rank that found the output already complete.
    """
    options, total = source.options, job.plan.bytes_written
    return publish(
        job,
        dst,
        files,
        workers=options.threads,
        max_memory=options.buffer_bytes,
        overwrite=options.overwrite,
        resume=options.resume,
        on_progress=lambda done: options.on_progress(done, total),
        processes=source.processes,
        other_sources=other_sources,
        check_replaceable=refuse_unrelated_files,
    )
