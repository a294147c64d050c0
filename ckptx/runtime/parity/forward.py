"""`verify --run`: compare what a checkpoint computes under TP x PP x FSDP2 with the reference model.

Four levels, the cheap ones first:

    config      what the class makes of the config, key by key
    bytes       what each rank loaded, against the slices of the reference that belong there
    forward     logits and loss on the same inputs
    gradients   of one backward step, parameter by parameter

TP and FSDP change the order of sums, and with it their rounding. The tolerance for that is not chosen but measured on
the reference, in the same run: see `noise.py`. On one rank nothing is reordered: results are equal bit for bit, if the
device gives the same results twice. A CPU does; for another device, the reference is run twice to find out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptx.comparison.configs import ConfigDifference, compare_configs
from ckptx.comparison.stored_dtypes import describe_dtype_differences
from ckptx.options.verify import RunOptions
from ckptx.processes.peak_memory import peak_memory
from ckptx.report.documents.verify_run import RunReport
from ckptx.report.report import Log, Stopwatch
from ckptx.runtime.checkpointing.load_report import NOT_IN_MODEL, OPTIMIZER_STATE, OTHER_STATE, UNKNOWN_TO_CLASS
from ckptx.runtime.memory.measured_memory import measure_step
from ckptx.runtime.parallel.distributed import (
    RankContext,
    all_gather_object,
    broadcast_object,
    count_local_ranks,
    data_index,
    mesh_of,
    process_group,
    raise_on_all_ranks,
    report_failure_to_peers,
    unused_gpus_note,
)
from ckptx.runtime.parity.comparison import Comparison, ReferenceResult, make_difference
from ckptx.runtime.parity.divergence import find_first_divergence
from ckptx.runtime.parity.execution import StepResult
from ckptx.runtime.parity.inputs import windows
from ckptx.runtime.parity.inputs.batch import Inputs
from ckptx.runtime.parity.model_loaders import ModelFacts, compare_stored_dtypes, make_loaders
from ckptx.runtime.parity.model_under_test import ModelUnderTest, ResidentModel, StagewiseModelUnderTest, intersect
from ckptx.runtime.parity.notes import add_notes, unread_notes
from ckptx.runtime.parity.reference import ReferenceModel, make_reference
from ckptx.runtime.parity.run_report import (
    build_run_report,
    find_largest_gradient_differences,
    list_unread_tensors,
)
from ckptx.runtime.parity.stages import find_stage_of_difference, plan_stages
from ckptx.runtime.parity.unreached_parameters import UnreachedParameters


def verify_run(reference: Path, checkpoint: Path, options: RunOptions, log: Log) -> RunReport:
    """Compare what two checkpoints compute; every rank of the mesh calls it.

    Args:
        reference: Checkpoint with the expected results.
        checkpoint: Checkpoint to test, loaded under the layout of `options`. If one of the two has no config.json, that
            of the other is used.
        options: Options of the run.
        log: Log that receives the notes for the user, the same on every rank.

    Returns:
        The report, the same on every rank; its `exit` is 1 if anything differs, and with --strict if a result is
        inconclusive.

    Raises:
        UnsupportedError: The class cannot run in this layout; the message names the reason.
        InputError: A checkpoint is incomplete.
        SpaceError: There is not enough memory; the message names the required amount.
        CkptxError: Any other failure, on any rank.
    """
    stopwatch = Stopwatch()
    with process_group(options.device, options.backend) as rank_context:
        device_note = unused_gpus_note(options.device, rank_context.device, count_local_ranks())
        if device_note is not None:
            log.note(device_note)
        mesh = mesh_of(options.dims, rank_context.device.type)
        log.step("reading the checkpoints" + (", importing their code" if options.trust_remote_code else ""))
        with raise_on_all_ranks():
            reference_loader, checkpoint_loader, reference_facts, checkpoint_facts = make_loaders(
                reference, checkpoint, options
            )
            config_differences = compare_configs(
                reference_facts.config, checkpoint_facts.config, relevant_keys=checkpoint_facts.used_token_keys
            )
            dtypes = compare_stored_dtypes(reference_loader, checkpoint_loader)
        plan = plan_stages(checkpoint_loader, checkpoint_facts, log) if options.dims.pp > 1 else None
        microbatches = plan.microbatches if plan is not None else 1
        log.step("running the reference")
        with raise_on_all_ranks():
            batches = checkpoint_loader.make_batches(checkpoint_facts, microbatches)
            reference_model = (
                make_reference(reference_loader, reference_facts, batches, rank_context)
                if rank_context.rank == 0
                else None
            )
            expected = reference_model.forward() if reference_model is not None else None
        log.step("loading the checkpoint")
        with raise_on_all_ranks():
            model_under_test: ModelUnderTest = ResidentModel(checkpoint_loader, mesh, plan)
            if reference_model is not None and reference_model.partition is not None and rank_context.world_size == 1:
                model_under_test = StagewiseModelUnderTest(
                    checkpoint_loader, mesh, reference_model.partition, rank_context.device
                )
            model_under_test.load(reference_loader, rank_context.device)
            record = model_under_test.record
        differences = _config_differences(config_differences) if rank_context.rank == 0 else []
        unread_names = [  # of the reference and of the checkpoint: names that no stage reads
            intersect(all_gather_object(_drop_training_state(each)))
            for each in (record.reference_only_names, record.unread_names)
        ]
        uncompared_names, added_names = map(_select_uncompared, unread_names)
        differences += _added_tensor_differences(added_names, uncompared_names) if rank_context.rank == 0 else []
        differences += [
            make_difference("bytes", rank_context.rank, name, record.stored_names) for name in record.differing_names
        ]
        log.step("running the checkpoint")
        first_batch = data_index(mesh) * microbatches
        own_batches = batches[first_batch : first_batch + microbatches]
        with raise_on_all_ranks() if plan is None else report_failure_to_peers():
            result, peak = _run_checkpoint(model_under_test, own_batches, options, rank_context)
        comparison = Comparison(
            rank_context, record.stored_names, _is_exact(expected, rank_context, options), model_under_test.tied_copies
        )
        log.step("comparing the outputs" + (" and gradients" if options.backward else ""))
        comparison.compare_forward(expected, result, first_batch)
        expected = None  # free its memory
        unreached_parameters = (
            _compare_gradients(comparison, reference_model, model_under_test, reference_facts)
            if options.backward
            else None
        )
        differences += comparison.differences
        if plan is not None:
            differences = [{**each, "stage": find_stage_of_difference(plan, each)} for each in differences]
        metrics = {
            **comparison.metrics,
            "without_gradient": unreached_parameters,
            "reference_parts": reference_model.stage_count if reference_model is not None else 1,
        }
        if any(all_gather_object(any(each["level"] == "forward" for each in differences))):
            metrics["first_divergence"] = _find_first_divergence(
                reference_model, model_under_test, batches[0], is_exact=comparison.is_exact
            )
        rank_result = {
            "differences": differences,
            "inconclusive": comparison.inconclusive,
            "measured_peak": peak,
            "dtype": " and ".join(sorted(record.dtypes)),
            "bytes_read": record.bytes_read,
            "nbytes": record.nbytes,
            "loaded_names": record.loaded_names,
            "wrapped_layers": record.wrapped_layers,
            "gathered_modules": record.gathered_modules,
            "sharded_parameters": record.sharded_parameters,
            "peak_rss": peak_memory(),
            "gradient_distances": comparison.gradient_distances,
            **metrics,
        }
        rank_results = all_gather_object(rank_result)
    inputs = batches[0]
    add_notes(
        log,
        record.architecture,
        config_differences,
        uncompared_names,
        inputs,
        rank_results[0].get("without_gradient"),
        reference_loader.separate_names | checkpoint_loader.separate_names,
    )
    if options.dims.tp > 1 and not any(rank_result["sharded_parameters"] for rank_result in rank_results):
        log.note(
            f"--tp {options.dims.tp} shards no parameter of {record.architecture}: every TP rank ran the whole model; "
            "pass --tp-plan FILE with rules for it, or leave out --tp"
        )
    unread_tensors = list_unread_tensors(*unread_names)
    log.note(*unread_notes([each for each in unread_tensors if each["is_expected"]]))
    log.note(*describe_dtype_differences(dtypes, rank_results[0]["dtype"]))
    gradient_differences = find_largest_gradient_differences(rank_results, record.stored_names)
    small_windows = {
        key: [value, windows.SHRUNK_WINDOW]
        for key, value in {**reference_facts.windows, **checkpoint_facts.windows}.items()
    }
    report = build_run_report(options, rank_results, inputs, small_windows, gradient_differences, plan)
    report = replace(report, unread_tensors=unread_tensors, dtype_differences=dtypes)
    return stopwatch.stop(replace(report, notes=list(log.notes)))


def _run_checkpoint(
    model_under_test: ModelUnderTest, own_batches: Sequence[Inputs], options: RunOptions, rank_context: RankContext
) -> tuple[StepResult, int | None]:
    """Run the checkpoint, and return the results, and the peak bytes of its tensors; None if they are not measured."""
    if not options.measures_memory:
        return model_under_test.run(own_batches, backward=options.backward), None
    results: list[StepResult] = []
    measured = measure_step(
        lambda: results.append(model_under_test.run(own_batches, backward=options.backward)), (), rank_context.device
    )
    # `before_step` also counts other tensors, such as those of the reference.
    return results[0], measured.peak - measured.before_step + model_under_test.record.nbytes


def _config_differences(differences: Sequence[ConfigDifference]) -> list[dict[str, Any]]:
    """Return the entries of the report for config differences that affect the comparison."""
    return [
        {"level": "config", "rank": 0, "name": each.key, "reference": each.reference, "checkpoint": each.checkpoint}
        for each in differences
        if not each.has_no_effect
    ]


def _drop_training_state(reasons: Mapping[str, str] | None) -> dict[str, str]:
    """Drop optimizer and other training state from unread stored names, mapped to the reasons; None counts as empty."""
    return {name: reason for name, reason in (reasons or {}).items() if reason not in (OPTIMIZER_STATE, OTHER_STATE)}


def _select_uncompared(reasons: Mapping[str, str]) -> dict[str, str]:
    """Select the unread stored names for which no better reason is known than that the model does not have them."""
    return {name: reason for name, reason in reasons.items() if reason in (NOT_IN_MODEL, UNKNOWN_TO_CLASS)}


def _added_tensor_differences(checkpoint: Mapping[str, str], reference: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the differences for tensors of the checkpoint that nothing reads and that the reference lacks."""
    return [
        {"level": "bytes", "rank": 0, "name": name, "what": f"{reason}, and not in the reference"}
        for name, reason in checkpoint.items()
        if name not in reference
    ]


def _is_exact(expected: ReferenceResult | None, rank_context: RankContext, options: RunOptions) -> bool:
    """Return True if both sides do the same operations in the same order; pipeline stages reorder nothing.

    Only the value of the rank of the reference counts (see `Comparison.is_exact`); on others `expected` is None, and
    the result False.
    """
    if expected is None or not expected.is_repeatable or options.compile:
        return False
    return rank_context.world_size == options.dims.pp


def _compare_gradients(
    comparison: Comparison, reference: ReferenceModel | None, model_under_test: ModelUnderTest, facts: ModelFacts
) -> list[dict[str, Any]] | None:
    """Compare gradients with those of the reference, stage by stage.

    Returns:
        On the rank of the reference, the parameters that no gradient reaches; None on the others.
    """
    gradient_groups = reference.gradients() if reference is not None else None
    unreached = UnreachedParameters(facts)
    for number in itertools.count():
        with raise_on_all_ranks():
            gradients = next(gradient_groups, None) if gradient_groups is not None else None
        if not broadcast_object(gradients is not None):
            break
        with model_under_test.parameters_of_stage(number) as parameters:
            comparison.compare_gradients(gradients, parameters)
            if not model_under_test.is_resident:
                comparison.report_extra_gradients()
        unreached.record({each.name: each.tensor for each in gradients or ()})
        gradients = None  # free them before the next stage is loaded
    comparison.report_extra_gradients()
    comparison.finish_gradients()
    return unreached.list_parameters() if reference is not None else None


def _find_first_divergence(
    reference: ReferenceModel | None, model_under_test: ModelUnderTest, inputs: Inputs, *, is_exact: bool
) -> dict[str, Any] | None:
    """Return the first divergence on the rank of the reference, None if there is none; None on all other ranks.

    Every rank of the mesh calls it; all run the same batch as the reference.
    """
    with raise_on_all_ranks():
        checkpoint_outputs = (
            list(model_under_test.iter_module_outputs(inputs))
            if model_under_test.is_resident
            else model_under_test.iter_module_outputs(inputs)
        )
    with raise_on_all_ranks():
        if reference is None:
            return None
        return find_first_divergence(reference.iter_module_outputs(inputs), iter(checkpoint_outputs), is_exact=is_exact)
