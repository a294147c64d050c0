"""`verify --run`: compare what a checkpoint computes under TP x PP x FSDP2 with the reference model.

Four levels, the cheap ones first:

    config      what the class makes of the config, key by key
    bytes       what each rank loaded, against the slices of the reference that belong there
    forward     logits and loss on the same inputs
    gradients   of one backward step, parameter by parameter

Sums that TP and FSDP put into another order round otherwise. How much that may be is not chosen but measured, on the
reference, in the same run: see `noise.py`. On one rank nothing is reordered: results are equal bit for bit, if the
device gives the same results twice. A CPU does; another device is asked first, by running the reference again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptx.comparison.stored_dtypes import dtype_notes
from ckptx.options.verify import RunOptions
from ckptx.processes.peak_memory import peak_memory
from ckptx.report.documents.running import RunReport
from ckptx.report.report import Log, Stopwatch
from ckptx.runtime.checkpointing.load_report import NO_PLACE, OPTIMIZER, OTHER_STATE, UNKNOWN
from ckptx.runtime.memory.measured_memory import measure_step
from ckptx.runtime.parallel.distributed import (
    RankContext,
    all_gather_object,
    broadcast_object,
    data_index,
    mesh_of,
    process_group,
    raise_on_all_ranks,
    report_failure_to_peers,
)
from ckptx.runtime.parity.comparison import Comparison, Reference, difference
from ckptx.runtime.parity.configs import ConfigDifference, compare_configs
from ckptx.runtime.parity.divergence import first_divergence
from ckptx.runtime.parity.execution import ForwardResult
from ckptx.runtime.parity.inputs import windows
from ckptx.runtime.parity.inputs.batch import Inputs
from ckptx.runtime.parity.model_under_test import ModelUnderTest, OffloadedModelUnderTest, ResidentModel, in_all
from ckptx.runtime.parity.notes import note, unread_notes
from ckptx.runtime.parity.reference import ReferenceModel, reference_of
from ckptx.runtime.parity.run_report import report_of, rows_of_unread, worst_by_tensor
from ckptx.runtime.parity.side import ModelFacts, both_sides, stored_dtypes_of
from ckptx.runtime.parity.stages import plan_stages, stage_of
from ckptx.runtime.parity.unreached import UnreachedParameters


def verify_run(reference: Path, checkpoint: Path, options: RunOptions, log: Log) -> RunReport:
    """Compare what two checkpoints compute; every rank of the mesh calls it.

    Args:
        reference: Checkpoint with the expected results.
        checkpoint: Checkpoint to test, loaded under the layout of `options`. Without a config.json, that of the
            reference is used.
        options: Options of the run.
        log: Log that receives the notes for the user, the same on every rank.

    Returns:
        The report, the same on every rank; its `exit` is 1 if anything differs.

    Raises:
        UnsupportedError: The class cannot run in this layout; the message names the reason.
        InputError: A checkpoint is incomplete.
        SpaceError: There is not enough memory; the message names the required amount.
        CkptxError: Any other failure, on any rank.
    """
    stopwatch = Stopwatch()
    with process_group(options.device, options.backend) as process:
        mesh = mesh_of(options.dims, process.device.type)
        with raise_on_all_ranks():
            first, second, reference_facts, checkpoint_facts = both_sides(reference, checkpoint, options)
            configs = compare_configs(
                reference_facts.config, checkpoint_facts.config, used=checkpoint_facts.tokens_used
            )
            dtypes = stored_dtypes_of(first, second)
        plan = plan_stages(second, checkpoint_facts, log) if options.dims.pp > 1 else None
        microbatches = plan.microbatches if plan is not None else 1
        with raise_on_all_ranks():
            batches = second.batches(checkpoint_facts, microbatches)
            running = reference_of(first, reference_facts, batches, process) if process.rank == 0 else None
            expected = running.forward() if running is not None else None
        with raise_on_all_ranks():
            loaded: ModelUnderTest = ResidentModel(second, mesh, plan)
            if running is not None and running.partition is not None and process.world_size == 1:
                loaded = OffloadedModelUnderTest(second, mesh, running.partition, process.device)
            loaded.load(first, process.device)
            record = loaded.record
        rows = _rows_of(configs) if process.rank == 0 else []
        unread = [
            in_all(all_gather_object(_of_model(each))) for each in (record.without_place, record.unread)
        ]  # on no stage
        uncompared, added = map(_uncompared, unread)
        rows += _added(added, uncompared) if process.rank == 0 else []
        rows += [difference("bytes", process.rank, name, record.stored) for name in record.wrong]
        index = data_index(mesh) * microbatches
        own = batches[index : index + microbatches]
        with raise_on_all_ranks() if plan is None else report_failure_to_peers():
            found, peak = _run(loaded, own, options, process)
        comparison = Comparison(process, record.stored, _is_exact(expected, process, options), loaded.copied)
        comparison.forward(expected, found, index)
        expected = None
        not_reached = _compare_gradients(comparison, running, loaded, reference_facts) if options.backward else None
        rows += comparison.rows
        if plan is not None:
            rows = [{**row, "stage": stage_of(plan, row)} for row in rows]
        numbers = {
            **comparison.numbers,
            "without_gradient": not_reached,
            "pieces": running.stage_count if running is not None else 1,
        }
        if any(all_gather_object(any(row["level"] == "forward" for row in rows))):
            numbers["first_divergence"] = _first_divergence(running, loaded, batches[0], is_exact=comparison.is_exact)
        share = {
            "rows": rows,
            "inconclusive": comparison.inconclusive,
            "taken": peak,
            "dtype": " and ".join(sorted(record.dtypes)),
            "read": record.bytes_read,
            "nbytes": record.nbytes,
            "names": record.names,
            "wrapped": record.wrapped_layers,
            "gathered": record.gathered,
            "sharded": record.sharded,
            "peak_rss": peak_memory(),
            **numbers,
        }
        share["by_tensor"] = comparison.gradients
        everyone = all_gather_object(share)
    inputs = batches[0]
    note(
        log,
        record.architecture,
        configs,
        uncompared,
        inputs,
        everyone[0].get("without_gradient"),
        first.separate_names | second.separate_names,
    )
    if options.dims.tp > 1 and not any(share["sharded"] for share in everyone):
        log.note(
            f"--tp {options.dims.tp} shards no parameter of {record.architecture}: every TP rank ran the whole model; "
            "pass --tp-plan FILE with rules for it, or leave out --tp"
        )
    unread_rows = rows_of_unread(*unread)
    log.note(*unread_notes([row for row in unread_rows if row["is_expected"]]))
    log.note(*dtype_notes(dtypes, everyone[0]["dtype"]))
    worst = worst_by_tensor(everyone, record.stored)
    small = {
        key: [value, windows.SMALL] for key, value in {**reference_facts.windows, **checkpoint_facts.windows}.items()
    }
    report = report_of(options, everyone, inputs, small, worst, plan)
    report = replace(report, unread_tensors=unread_rows, dtype_differences=dtypes)
    return stopwatch.stop(replace(report, warnings=list(log.notes)))


def _run(
    loaded: ModelUnderTest, own: Sequence[Inputs], options: RunOptions, process: RankContext
) -> tuple[ForwardResult, int | None]:
    """Run the checkpoint; returns the results, and the peak bytes if they are measured."""
    if not options.measures:
        return loaded.run(own, backward=options.backward), None
    found: list[ForwardResult] = []
    taken = measure_step(lambda: found.append(loaded.run(own, backward=options.backward)), (), process.device)
    return found[0], taken.peak - taken.before + loaded.record.nbytes  # others, as the reference, are there as well


def _rows_of(configs: Sequence[ConfigDifference]) -> list[dict[str, Any]]:
    return [
        {"level": "config", "rank": 0, "name": each.key, "reference": each.reference, "checkpoint": each.checkpoint}
        for each in configs
        if not each.is_noted
    ]


def _of_model(found: Mapping[str, str] | None) -> dict[str, str]:
    """Drop optimizer and other training state from stored names that nothing reads."""
    return {name: reason for name, reason in (found or {}).items() if reason not in (OPTIMIZER, OTHER_STATE)}


def _uncompared(found: Mapping[str, str]) -> dict[str, str]:
    """Select the stored names without a known place in the model."""
    return {name: reason for name, reason in found.items() if reason in (NO_PLACE, UNKNOWN)}


def _added(checkpoint: Mapping[str, str], reference: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return rows for tensors that nothing reads and that the reference lacks."""
    return [
        {"level": "bytes", "rank": 0, "name": name, "what": f"{reason}, and not in the reference"}
        for name, reason in checkpoint.items()
        if name not in reference
    ]


def _is_exact(expected: Reference | None, process: RankContext, options: RunOptions) -> bool:
    """Return True if both sides do the same operations in the same order; pipeline stages reorder nothing."""
    if expected is None or not expected.is_repeatable or options.compile:
        return False
    return process.world_size == options.dims.pp


def _compare_gradients(
    comparison: Comparison, reference: ReferenceModel | None, loaded: ModelUnderTest, facts: ModelFacts
) -> list[dict[str, Any]] | None:
    """Compare gradients with those of the reference, portion by portion.

    Returns:
        On the rank of the reference, rows of the parameters that no gradient reaches; None on the others.
    """
    portions = reference.gradients() if reference is not None else None
    reached = UnreachedParameters(facts)
    for number in itertools.count():
        with raise_on_all_ranks():
            portion = next(portions, None) if portions is not None else None
        if not broadcast_object(portion is not None):
            break
        with loaded.parameters_of_stage(number) as parameters:
            comparison.backward(portion, parameters)
            if not loaded.is_whole:
                comparison.report_missing_gradients()
        reached.record({each.name: each.tensor for each in portion or ()})
        portion = None  # the next one needs the room
    comparison.report_missing_gradients()
    comparison.finish_gradients()
    return reached.rows() if reference is not None else None


def _first_divergence(
    reference: ReferenceModel | None, loaded: ModelUnderTest, inputs: Inputs, *, is_exact: bool
) -> dict[str, Any] | None:
    """Return the first divergence, on the first rank; every rank runs the same batch as the reference."""
    with raise_on_all_ranks():
        ours = list(loaded.observed(inputs)) if loaded.is_whole else loaded.observed(inputs)
    with raise_on_all_ranks():
        if reference is None:
            return None
        return first_divergence(reference.observed(inputs), iter(ours), is_exact=is_exact)
