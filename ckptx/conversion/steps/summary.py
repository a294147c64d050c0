"""Report of a conversion, from the results of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptx.conversion.outputs.output_format import Allocation, OutputContents
from ckptx.conversion.steps.adapter_source import ConversionSource
from ckptx.conversion.steps.adapters import MergedModel
from ckptx.conversion.steps.combined_tensors import CombinedTarget
from ckptx.conversion.steps.dequantization import DequantizedSource
from ckptx.conversion.steps.dtypes import CastTensors
from ckptx.conversion.steps.ledger import Ledger
from ckptx.conversion.steps.naming import SchemeChange
from ckptx.conversion.steps.overflow_check import overflow_entries, range_notes
from ckptx.conversion.steps.quantization import QuantizedTarget
from ckptx.conversion.steps.sharding import ShardedTarget, rank_entries
from ckptx.conversion.steps.sidecars import Sidecars
from ckptx.conversion.steps.source_model import ConfigCheck, DroppedState, SourceModel, Ties
from ckptx.conversion.steps.tie_actions import tie_actions
from ckptx.errors import ReadError, SpaceError
from ckptx.formats.sidecars import MANIFEST
from ckptx.model_view.view import ModelView, tie_entries
from ckptx.options.conversion import ConversionOptions
from ckptx.processes.peak_memory import peak_memory
from ckptx.processes.peers import PeerProcesses
from ckptx.publishing.output_checks import free_space
from ckptx.publishing.publish import Job, manifest_size
from ckptx.quantization.computed_files import stored_bytes_read
from ckptx.report.documents.conversion import ConversionReport
from ckptx.report.number_formats import NOT_ENOUGH_SPACE, peak_of_processes
from ckptx.report.report import Log, human_bytes
from ckptx.storage.files import read_size
from ckptx.transfer.executor import CopyResult
from ckptx.wording import counted


@dataclass(frozen=True, slots=True)
class ConversionState:
    """Results of the steps of one conversion; each is described at its class.

    Attributes:
        nbytes: Size of the output in bytes, without the manifest.
        scheme_change: Change from or to the names of a trainer; None for no such change.
        dropped_for_adapters: Stored `name` and `reason` of each tensor that an adapter replaces, or that is not part of
            the adapter that is written.
    """

    dst: Path
    options: ConversionOptions
    processes: PeerProcesses | None
    dequantized: DequantizedSource
    quantized: QuantizedTarget
    model: SourceModel
    ties: Ties
    config_check: ConfigCheck
    dropped_state: DroppedState
    cast: CastTensors
    sharded: ShardedTarget
    contents: OutputContents
    allocation: Allocation
    sidecars: Sidecars
    job: Job
    nbytes: int
    ledger: Ledger
    scheme_change: SchemeChange | None
    combined: CombinedTarget
    merged: MergedModel
    dropped_for_adapters: list[dict[str, str]]
    conversion_source: ConversionSource


def build_report(command: str, conversion: ConversionState, outcome: CopyResult | None, log: Log) -> ConversionReport:
    """Build the report of a conversion.

    Args:
        command: Command name for the report.
        conversion: Results of the steps.
        outcome: Result of the copy; None for a dry run, and on a rank that found the output already complete.
        log: Log with the notes of all steps.
    """
    view, state, job = conversion.model.view, conversion.contents.state, conversion.job
    target, architecture = conversion.contents.sharded.target, conversion.model.view.architecture
    dry_run = _dry_run_entries(conversion, log) if conversion.options.dry_run else {}
    bytes_read, bytes_written, output_bytes = _byte_counts(conversion, outcome, dry_run, log)
    ties = conversion.ties.decisions
    actions = tie_actions(ties, conversion.contents)
    if outcome is not None:
        log.note(*range_notes(outcome))
    copied_objects = sum(not step.is_tensor for step in job.plan.steps())  # a step copies one tensor or one object
    return ConversionReport(
        command=command,
        tensors=conversion.ledger.target_count,
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        aliases={**target.aliases, **state.aliases},
        ties=[
            {**tie, "action": each.action, "output_names": list(each.output_names)}
            for tie, each in zip(tie_entries(ties), actions, strict=True)
        ],
        dropped=[
            *conversion.dequantized.dropped,
            *conversion.model.dropped,
            *conversion.dropped_state.tensors,
            *state.dropped,
            *conversion.dropped_for_adapters,
        ],
        config_edits=list(conversion.sidecars.edits),
        dtypes=conversion.ledger.dtypes,
        ranks=_rank_entries(conversion),
        notes=list(log.notes),
        format=conversion.allocation.catalog.format,
        output_bytes=output_bytes,
        parameters=conversion.ties.parameters,
        architecture=None
        if architecture is None
        else {"class": architecture.class_name, "known_from": architecture.known_from},
        ledger=conversion.ledger.report_entry(),
        config_check=None if conversion.config_check.match is None else conversion.config_check.match.to_dict(),
        names=None if conversion.scheme_change is None else conversion.scheme_change.report_entry(),
        megatron=conversion.combined.megatron,
        prefix=view.prefix or None,
        output_prefix=_output_prefix(view, conversion.contents.names),
        # Unknown to the class, in any output; those in `other_tensors` are unknown to the sharding of the output.
        unknown_tensors=list(view.unknown) if view.unknown and architecture is not None else None,
        dequantized=conversion.dequantized.report_entry(),
        quantized=conversion.quantized.report_entry(),
        adapters=conversion.conversion_source.report_entry() or conversion.merged.report_entry(),
        merged_weights=len(conversion.merged.merged) if conversion.merged.adapters else None,
        dtype_unchanged=conversion.cast.uncast,
        base_dtypes=conversion.cast.base_dtype_counts,
        overflows=overflow_entries(outcome.overflows) if outcome is not None and outcome.overflows else None,
        underflows=overflow_entries(outcome.underflows) if outcome is not None and outcome.underflows else None,
        dropped_optimizer=conversion.dropped_state.optimizer,
        objects={"count": copied_objects, "is_copied": True} if copied_objects else conversion.dropped_state.objects,
        state_without_parameter=list(state.without_parameter) or None,
        state_replicated=list(state.replicated) or None,
        **peak_of_processes(
            [peak_memory(), *([] if outcome is None else [outcome.peak_rss])],
            are_ranks=conversion.processes is not None,
        ),
        **_mesh_entries(conversion.sharded),
        **dry_run,
    )


def _output_prefix(view: ModelView, output_names: Mapping[str, str]) -> str | None:
    """Return the prefix that names of the model have in the output: that of the source or a new one; None for none.

    Args:
        view: Model in the source.
        output_names: Map from target names, which have no prefix, to output names.
    """
    renamed = [(name, output_name) for name, output_name in output_names.items() if name != output_name]
    if view.catalog.traits.is_training_format:
        # A training checkpoint has its prefix already, which is kept or not: one name that has it shows that it is.
        return view.prefix if view.prefix and any(name.startswith(view.prefix) for _, name in renamed) else None
    # Names of HF weights have none; if one is added, it is the same for all names, so that one renamed tensor shows it.
    return next((output_name.removesuffix(name) for name, output_name in renamed), None)


def _mesh_entries(sharded: ShardedTarget) -> dict[str, Any]:
    """Return the mesh and sharding entries of the report; empty if tensors are whole."""
    sharding = sharded.sharded_model
    if sharding is None:
        return {}
    return {
        "layout": sharding.mesh_entry(),
        # A placement divides a tensor into blocks; once they are stored, they are called chunks, as in a catalog.
        "chunks": sum(len(placed.blocks) for placed in sharding.placements.values()),
        "rules": sharding.rules(sharded.target.aliases),
        "unaligned_tensors": sharding.unaligned,
        "replicated": None if sharded.replication is None else sharded.replication.report_entry(),
        # Not defined or not used by the class, so that TP replicates them; `unknown_tensors` has only the first kind.
        "other_tensors": list(sharding.unknown_tensors),
    }


def _rank_entries(conversion: ConversionState) -> list[dict[str, Any]]:
    """Return the `ranks` of the report; empty if tensors are whole."""
    sharding, allocation = conversion.sharded.sharded_model, conversion.allocation
    return [] if sharding is None else rank_entries(allocation.catalog.files, allocation.ranks, sharding.dims)


def _dry_run_entries(conversion: ConversionState, log: Log) -> dict[str, Any]:
    """Return the entries of the report for a dry run: the files it would write, free space, and the exit code.

    The exit code is 6 if the output does not fit, as for the conversion. With `resume` it is 0, because a part of the
    output may be there already.
    """
    job, options, dst = conversion.job, conversion.options, conversion.dst
    # A block is a tensor or a part of one; the report has their number as `tensors` of the file.
    sizes = [(file.name, file.nbytes, file.block_count) for file in job.plan.files]
    sizes += [(name, len(data), 0) for name, data in job.markers]
    sizes += [(name, nbytes, 0) for name, nbytes in job.sidecar_sizes().items()]
    sizes.append((MANIFEST, manifest_size(job), 0))
    needed, free = sum(nbytes for _, nbytes, _ in sizes), free_space(dst)
    fits = free >= needed
    if not fits:
        log.note(f"{NOT_ENOUGH_SPACE}: {human_bytes(needed)} required, {human_bytes(free)} free at {dst}")
    files = [{"name": name, "bytes": nbytes, "tensors": tensors} for name, nbytes, tensors in sizes]
    exit_code = 0 if fits or options.resume else SpaceError.exit_code
    return {
        "exit": exit_code, "dry_run": True, "files": files, "buffer_bytes": options.buffer_bytes, "free_space": free,
    }  # fmt: skip


def _byte_counts(
    conversion: ConversionState, outcome: CopyResult | None, dry_run: dict[str, Any], log: Log
) -> tuple[int, int, int]:
    """Return the bytes that this run read, the bytes that it wrote, and the total size of the output files.

    In a dry run they are the planned numbers: with `--quantize`, a lower bound of the bytes to read.
    """
    job, dst = conversion.job, conversion.dst
    if dry_run:
        size = sum(file["bytes"] for file in dry_run["files"])
        planned = conversion.quantized.min_bytes_to_read(conversion.dequantized.bytes_to_read(job.plan))
        return planned - conversion.combined.padding_bytes + conversion.merged.adapter_bytes, size, size
    try:
        manifest = read_size(dst / MANIFEST)
    except ReadError as error:
        log.note(f"{error}; {dst} is complete")
        manifest = manifest_size(job)
    if outcome is not None and outcome.leftover:
        log.note(f"{outcome.leftover}: could not be removed; {dst} is complete, remove that directory")
    if outcome is None or outcome.was_complete:
        log.note(f"{dst} is already complete; nothing to resume")
        return 0, 0, conversion.nbytes + manifest
    if outcome.records_without_crc:
        log.note(
            f"{counted(outcome.records_without_crc, 'archive record')} without a CRC-32: their bytes could not be "
            "checked"
        )
    if not outcome.was_locked:
        log.note(
            f"{dst.parent}: the file system has no locks; a concurrent run that writes {dst.name} would not be detected"
        )
    size = conversion.nbytes + manifest
    return (
        stored_bytes_read(
            outcome.bytes_read, conversion.dequantized.files, conversion.merged.files, conversion.quantized.files
        )
        + conversion.quantized.base_bytes_read
        + conversion.merged.adapter_bytes,
        size - job.plan.bytes_written + outcome.bytes_written,
        size,
    )
