"""`verify --run`: start the ranks, and complete the report of rank 0.

Under torchrun this process is one of the ranks. Otherwise it is the only rank, or it starts as many as the mesh needs,
passes them its options as one document, and reads the report of rank 0.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ckptx.api.memory_check import check_memory_fit
from ckptx.comparison.headers import view_both
from ckptx.errors import InputError, PeerFailure, missing_package
from ckptx.formats.hf.hub import resolve_source
from ckptx.formats.manifest_file import read_manifest
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.sidecars import MANIFEST
from ckptx.layout.stages import StageAssignment, split_layers
from ckptx.model_view.sharder import read_plan
from ckptx.options.document import to_json
from ckptx.options.verify import VerifyRunOptions
from ckptx.processes.launch import launch
from ckptx.processes.rendezvous import is_first_rank, is_launched, is_launched_by_us
from ckptx.report.documents.verify_run import RunReport
from ckptx.report.number_formats import peak_of_processes
from ckptx.report.report import Log, Stopwatch


def verify_models(options: VerifyRunOptions) -> RunReport:
    """Build both models, load the checkpoint on a mesh, and compare logits, loss and gradients.

    Raises:
        CkptxError: See `ckptx.verify`.
    """
    stopwatch, log, dims = Stopwatch(), options.log or Log(), options.dims
    reference, checkpoint = (
        resolve_source(str(path), revision=options.revision, token=options.token, cache_dir=options.cache_dir)
        for path in (options.reference, options.checkpoint)
    )
    if not is_launched_by_us():
        log.note(*_config_notes(reference, checkpoint))
    options = _with_recorded_layout(options, checkpoint, log if is_first_rank() and not is_launched_by_us() else Log())
    if options.tp_plan is not None:
        read_plan(str(options.tp_plan))  # errors are raised before a rank starts
    if options.source_prefix_or_none is not None:  # raises an error if neither checkpoint has the prefix
        view_both(open_checkpoint(reference), open_checkpoint(checkpoint), prefix=options.source_prefix_or_none)
    peak = None
    if options.gpu_bytes is not None and not is_launched_by_us() and is_first_rank():  # other ranks wait for rank 0
        log.step("forecasting the memory of the checkpoint")
        peak = check_memory_fit(reference, checkpoint, options, options.gpu_bytes)
    if dims.world_size > 1 and not is_launched():
        options_json = to_json(options.with_values(reference=str(reference), checkpoint=str(checkpoint)))
        document = launch(
            options_json, dims.world_size, lambda: log.step(f"comparing the models on {dims.world_size} ranks")
        )
        return replace(_merge_report_of_rank_0(document, log, stopwatch), forecast_peak=peak)
    log.step("importing torch and transformers")
    try:
        from ckptx.runtime.parity.forward import verify_run
    except ImportError as error:
        raise missing_package("--run", error) from error
    return replace(verify_run(reference, checkpoint, options, log), forecast_peak=peak)


def _config_notes(reference: Path, checkpoint: Path) -> list[str]:
    """Return a note for a checkpoint without a config, which runs with that of the other.

    Raises:
        InputError: Neither has a config.
    """
    first, second = open_checkpoint(reference), open_checkpoint(checkpoint)
    if first.config is None and second.config is None:
        raise InputError(
            f"{second.location}: neither this checkpoint nor {first.location} has a config.json, which --run requires "
            "to build the model; add one, or compare the bytes without --run"
        )
    return [
        f"{catalog.location}: no config.json; using that of {other.root}"
        for catalog, other in ((first, second), (second, first))
        if catalog.config is None
    ]


def _with_recorded_layout(options: VerifyRunOptions, checkpoint: Path, log: Log) -> VerifyRunOptions:
    """Return the options with the tensor-parallel rules and the stages that the manifest of the checkpoint records.

    The rules are used for tp > 1 if the options have no TP plan. The stages are used if the schedule assigns as many to
    each of as many ranks, in the same order, and the options leave the split at "even".
    """
    if options.dims.tp == options.dims.pp == 1:
        return options
    source = open_checkpoint(checkpoint).source
    manifest = read_manifest(source, [])
    if manifest is None:
        return options
    recorded, values = manifest.layout, dict[str, Any]()
    if recorded.tp_plan is not None and options.tp_plan is None and options.dims.tp > 1:
        values["tp_plan"] = str(source.location / MANIFEST)
        log.note(f"using the tensor-parallel rules of {values['tp_plan']}; pass --tp-plan to use others")
    counts = [sum(stop - first for _, first, stop in stage) for stage in recorded.stages or ()]
    from ckptx.runtime.parallel.pipeline.schedules import find_schedule  # not needed without a mesh

    assignment = StageAssignment(
        recorded.pp, recorded.virtual_stages, "v" if recorded.schedule_style == "v" else "loop"
    )
    has_same_stages = options.dims.pp > 1 and find_schedule(options.schedule).assignment(options.dims.pp) == assignment
    if has_same_stages and options.pp_split == "even" and tuple(counts) != split_layers(sum(counts), len(counts)):
        values["pp_split"] = ",".join(map(str, counts))
        log.note(f"using the stages of {source.location / MANIFEST}: --pp-split {values['pp_split']}")
    return options.with_values(**values) if values else options


def _merge_report_of_rank_0(document: dict[str, Any], log: Log, stopwatch: Stopwatch) -> RunReport:
    """Return the report of rank 0, with the wall time of this process and the peak memory of the largest rank.

    Raises:
        PeerFailure: Rank 0 reports an error.
    """
    log.note(*document["notes"])
    if document["error"] is not None:
        raise PeerFailure(document["error"], document["exit"], is_reported=False)
    field_names = {each.name for each in fields(RunReport)}
    report = RunReport(**{name: value for name, value in document.items() if name in field_names})
    peak_of_rank_0 = report.ranks[0].get("peak_rss", report.peak_rss) if report.ranks else report.peak_rss
    peak_fields = peak_of_processes([report.peak_rss], are_ranks=True)
    return stopwatch.stop(replace(report, notes=list(log.notes), peak_rss_rank_0=peak_of_rank_0, **peak_fields))
