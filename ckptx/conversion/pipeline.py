"""Every conversion, from the opened source to the published output.

    open -> base -> model -> ties -> state -> names -> dtypes -> shard -> allocate -> plan -> publish

Each step is a function of what the steps before it found. It returns a value that nobody changes afterwards; what the
user should know of it is in its notes, which `log` takes down. Where output formats differ, the step asks `output`.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ckptx.conversion.outputs.output_format import ConfigEdits, OutputContents, OutputFormat
from ckptx.conversion.steps.base import BaseCheckpoint, Need, find_base
from ckptx.conversion.steps.cast_losses import refuse_overflow
from ckptx.conversion.steps.dtypes import cast_tensors
from ckptx.conversion.steps.ledger import build_ledger
from ckptx.conversion.steps.model import (
    DroppedState,
    check_against_config,
    find_model,
    refuse_without_model,
    resolve_ties,
)
from ckptx.conversion.steps.opening import SourceCheckpoint
from ckptx.conversion.steps.recorded_config import check_recorded_config
from ckptx.conversion.steps.selection import select_tensors
from ckptx.conversion.steps.sharding import ShardedTarget, shard
from ckptx.conversion.steps.sidecars import carry
from ckptx.conversion.steps.summary import ConversionState, report_of
from ckptx.conversion.steps.training_state import TrainingState, carry_state
from ckptx.model_view.view import compare_replicas
from ckptx.options.conversion import ConversionOptions
from ckptx.processes.peers import PeerProcesses
from ckptx.publishing.publish import Job, publish
from ckptx.publishing.replacing import refuse_foreign
from ckptx.report.documents.conversion import ConversionReport
from ckptx.report.report import Log
from ckptx.storage.interface import SourceFiles
from ckptx.transfer.executor import CopyResult
from ckptx.transfer.planner import plan_copy

_logger = logging.getLogger(__name__)


def convert_opened(
    command: str, opened: SourceCheckpoint, output: OutputFormat, need: Need, log: Log
) -> ConversionReport:
    """Carries out one conversion.

    Args:
        command: Name for the report.
        opened: The source, and what was asked for.
        output: What to write.
        need: What to do where there is no config.
        log: Takes down the notes of every step.

    Raises:
        CkptxError: Whatever is in the way; nothing was published.
    """
    source, files, dst, options = opened.source, opened.files, opened.dst, opened.options
    keeps_state = output.keeps_state(source)

    # What is there.
    base = log(find_base(source, dst, options, need))
    model = log(find_model(base, files, options, with_state=keeps_state))
    view = model.view
    _logger.info(
        "config of %s, %s, %d tensors of the model, %d of the optimizer, %d others", base.files_from.root,
        view.architecture.class_name if view.architecture else "no class", len(view.tensors), len(view.optimizer),
        len(view.other),
    )  # fmt: skip
    ties = log(resolve_ties(view, files, options))
    held = log(check_against_config(view, allow_config_mismatch=options.allow_config_mismatch))
    left = log(DroppedState() if keeps_state else output.dropped_state(view))
    if output.needs_model:
        refuse_without_model(view)

    # What the target holds: which tensors, called what, in which dtypes, cut how.
    chosen = log(select_tensors(base, view, ties, output, options))
    check_recorded_config(view, base, chosen.named)
    naming = chosen.named.naming
    _logger.info(
        "%s: %d tensors, %d aliases", "original files again" if chosen.restored else "laid out anew",
        len(chosen.named.target.tensors), len(chosen.named.target.aliases),
    )  # fmt: skip
    cast = log(cast_tensors(view, chosen.named, base, options.dtype))
    sharded = ShardedTarget(cast.target)
    if output.layout is not None:
        sharded = log(shard(view, cast.target, naming, output.layout, every_rank_alone=output.every_rank_alone))
    names = output.names(view, chosen.named)
    placed = sharded.renamed(names).with_second_names(output.second_names(view, chosen.named, names))
    outward = {old: names[new] for old, new in naming.renamed(view).items()} if keeps_state else {}

    def state_of_source() -> TrainingState:
        return carry_state(view, files, placed, outward) if keeps_state else TrainingState()

    state = log(state_of_source())

    # Where it lies, and what goes along.
    is_altered = cast.was_cast or output.has_new_prefix
    original = None if is_altered else chosen.original
    contents = OutputContents(placed, state, names, naming, base, chosen.restored, original)
    allocation = log(output.allocate(dst, contents, files))
    edits = ConfigEdits()
    if chosen.restored is None:
        edits = log(output.edits(view, chosen.named, cast, base, ties, options.dtype))
    sidecars = log(carry(base, output.sidecars(base), edits.rows))
    target = placed.target
    plan = plan_copy(
        target.source,
        allocation.catalog,
        {**target.source_names, **state.source_names, **state.object_source_names},
        frame_of=allocation.frame_of,
        prologues=allocation.prologues,
        groups=allocation.groups,
    )
    _logger.info("plan: %d files in %d groups, %d bytes", len(plan.files), len(plan.groups), plan.bytes_written)
    if _logger.isEnabledFor(logging.DEBUG):
        for line in plan.lines():
            _logger.debug("%s", line)
    ledger = build_ledger(
        source.tensors.keys(),
        plan,
        written=target.written() | state.written(),
        shared=target.shared | state.shared | view.model_duplicates.keys(),
        dropped={row["name"] for row in (*left.dropped, *state.dropped)},
        aliases={**target.aliases, **state.aliases},
        leaders=ties.leaders,
    )

    def is_decision_unchanged() -> bool:
        compare_replicas(view.catalog, files)
        return resolve_ties(view, files, options) == ties and state_of_source() == state

    job = Job(
        plan=plan,
        source=target.source,
        sidecars=dict(sidecars.files),
        options=options.fingerprint(),
        manifest=lambda outcome: output.manifest(contents, allocation, outcome.digests),
        opened=source,
        is_decision_unchanged=is_decision_unchanged,
        refuse=lambda outcome: refuse_overflow(outcome, options.allow_overflow, options.dtype, log),
        check=allocation.check,
        markers=list(allocation.markers),
    )
    found = ConversionState(
        dst, options, opened.processes, model, ties, held, left, cast, sharded, contents, allocation, sidecars, job,
        ledger,
    )  # fmt: skip
    outcome = None if options.dry_run else _published(job, dst, files, options, opened.processes, base)
    return report_of(command, found, outcome, log)


def _published(
    job: Job,
    dst: Path,
    files: SourceFiles,
    options: ConversionOptions,
    processes: PeerProcesses | None,
    base: BaseCheckpoint,
) -> CopyResult | None:
    """Writes the output."""
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
        beside=() if base.catalog is None else (base.catalog,),
        may_replace=refuse_foreign,
    )
