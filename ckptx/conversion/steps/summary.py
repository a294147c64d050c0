"""The report of a conversion, from what its steps found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptx.conversion.outputs.output_format import Allocation, OutputContents
from ckptx.conversion.steps.cast_losses import notes_on_losses, rows_of
from ckptx.conversion.steps.dtypes import CastTarget
from ckptx.conversion.steps.ledger import Ledger
from ckptx.conversion.steps.model import ConfigCheck, DroppedState, SourceModel, Ties
from ckptx.conversion.steps.sharding import ShardedTarget, rank_rows
from ckptx.conversion.steps.sidecars import Sidecars
from ckptx.conversion.steps.tie_actions import tie_actions
from ckptx.formats.sidecars import MANIFEST
from ckptx.model_view.view import tie_rows
from ckptx.options.conversion import ConversionOptions
from ckptx.processes.peak_memory import peak_memory
from ckptx.processes.peers import PeerProcesses
from ckptx.publishing.output_place import free_space
from ckptx.publishing.publish import Job, manifest_size
from ckptx.report.documents.conversion import ConversionReport
from ckptx.report.numbers import peak_of_processes
from ckptx.report.report import Log, human_bytes
from ckptx.transfer.executor import CopyResult
from ckptx.wording import counted


@dataclass(frozen=True, slots=True)
class ConversionState:
    """What the steps of one conversion found; each value is described where it is made."""

    dst: Path
    options: ConversionOptions
    processes: PeerProcesses | None
    model: SourceModel
    ties: Ties
    held: ConfigCheck
    left: DroppedState
    cast: CastTarget
    sharded: ShardedTarget
    contents: OutputContents
    allocation: Allocation
    sidecars: Sidecars
    job: Job
    ledger: Ledger


def report_of(command: str, found: ConversionState, outcome: CopyResult | None, log: Log) -> ConversionReport:
    """One report, built once.

    Args:
        command: Name for the report.
        found: By the steps before anything was written.
        outcome: Result of the copy; None for a dry run, and on a rank that found the output complete already.
        log: Has the notes of all steps.
    """
    view, state, job = found.model.view, found.contents.state, found.job
    target, architecture = found.contents.sharded.target, found.model.view.architecture
    described = _described(found, log) if found.options.dry_run else {}
    bytes_read, bytes_written, output_bytes = _cost(found, outcome, described, log)
    ties = found.ties.decisions
    actions = tie_actions(ties, found.contents)
    if outcome is not None:
        log.note(*notes_on_losses(outcome))
    carried = sum(not step.framed for step in job.plan.steps())
    known = architecture is not None
    return ConversionReport(
        command=command,
        tensors=found.ledger.tensors,
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        aliases={**target.aliases, **state.aliases},
        ties=[{**row, "action": action} for row, action in zip(tie_rows(ties), actions, strict=True)],
        dropped=[*found.left.dropped, *state.dropped],
        edits=list(found.sidecars.edits),
        dtypes=found.ledger.dtypes,
        ranks=_ranks(found),
        warnings=list(log.notes),
        output_bytes=output_bytes,
        parameters=found.ties.parameters,
        architecture=None
        if architecture is None
        else {"class": architecture.class_name, "known_from": architecture.known_from},
        ledger=found.ledger.to_dict(),
        fit=None if found.held.fit is None else found.held.fit.to_dict(),
        prefix=view.prefix or None,
        unknown=list(view.unknown) if view.unknown and known else None,
        kept_dtype=found.cast.kept,
        base_dtypes=found.cast.base_dtypes,
        overflows=rows_of(outcome.overflows) if outcome is not None and outcome.overflows else None,
        underflows=rows_of(outcome.underflows) if outcome is not None and outcome.underflows else None,
        optimizer=found.left.optimizer,
        objects={"count": carried, "carried": True} if carried else found.left.objects,
        state_without_parameter=list(state.without_parameter) or None,
        state_replicated=list(state.replicated) or None,
        **peak_of_processes(
            [peak_memory(), *([] if outcome is None else [outcome.peak_rss])], are_ranks=found.processes is not None
        ),
        **_mesh(found.sharded),
        **described,
    )


def _mesh(sharded: ShardedTarget) -> dict[str, Any]:
    """How the model is cut, in the names that rules speak of."""
    model = sharded.model
    if model is None:
        return {}
    dims = model.dims
    return {
        "layout": {"tp": dims.tp, "pp": dims.pp, "dp_shard": dims.dp_shard, "stages": model.layers()},
        "chunks": sum(len(placed.blocks) for placed in model.placed.values()),
        "rules": model.rules(),
        "unaligned": model.unaligned,
        "replicated": None if sharded.replication is None else sharded.replication.to_dict(),
        "passed_through": list(model.passed),
    }


def _ranks(found: ConversionState) -> list[dict[str, Any]]:
    model, allocation = found.sharded.model, found.allocation
    return [] if model is None else rank_rows(allocation.catalog.files, allocation.ranks, model.dims)


def _described(found: ConversionState, log: Log) -> dict[str, Any]:
    """What a dry run says of the files that it does not write."""
    job, options, dst = found.job, found.options, found.dst
    sizes = [(file.name, file.nbytes, file.blocks) for file in job.plan.files]
    sizes += [(name, len(data), 0) for name, data in job.markers]
    sizes += [(name, nbytes, 0) for name, nbytes in job.sidecar_sizes().items()]
    sizes.append((MANIFEST, manifest_size(job), 0))
    needed, free = sum(nbytes for _, nbytes, _ in sizes), free_space(dst)
    if free < needed:
        log.note(f"not enough space: needs {human_bytes(needed)}, {human_bytes(free)} free at {dst}")
    files = [{"name": name, "bytes": nbytes, "tensors": tensors} for name, nbytes, tensors in sizes]
    return {"dry_run": True, "files": files, "memory": options.buffer_bytes, "free_space": free}


def _cost(
    found: ConversionState, outcome: CopyResult | None, described: dict[str, Any], log: Log
) -> tuple[int, int, int]:
    """Return the bytes that this run read and wrote, and the bytes of all files of the output."""
    job, dst = found.job, found.dst
    if described:
        size = sum(file["bytes"] for file in described["files"])
        return job.plan.bytes_read, size, size
    manifest = (dst / MANIFEST).stat().st_size
    if outcome is None or outcome.was_complete:
        log.note(f"{dst} is complete already; nothing to resume")
        return 0, 0, job.nbytes + manifest
    if outcome.unrecorded:
        log.note(
            f"without a recorded CRC-32: {counted(outcome.unrecorded, 'archive')}, whose bytes could not be checked"
        )
    if not outcome.was_locked:
        log.note(
            f"{dst.parent}: its file system knows no locks; two runs at once that write {dst.name} were not kept apart"
        )
    size = job.nbytes + manifest
    return outcome.bytes_read, size - job.plan.bytes_written + outcome.bytes_written, size
