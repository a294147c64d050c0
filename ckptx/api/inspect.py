"""`inspect`: summary of a checkpoint, from headers alone."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ckptx.architecture.trainer_naming.megatron_prefixes import find_prefixes
from ckptx.catalog.catalog import Catalog
from ckptx.errors import EnvironmentProblem, InputError, UnsupportedError
from ckptx.formats.hf.hub import resolve_source
from ckptx.formats.registry import open_checkpoint
from ckptx.mapping.names import pattern_of
from ckptx.model_view.config_check import match_config_with_notes
from ckptx.model_view.parameter_count import count_parameters, find_absent_ties, find_aliases
from ckptx.model_view.unknown_class import unknown_class_note
from ckptx.model_view.view import ModelView, read_valid_manifest, view_model
from ckptx.options.api import api
from ckptx.options.inspect import InspectOptions
from ckptx.publishing.report_file import check_report_path, write_text
from ckptx.quantization.checkpoint import find_quantized_tensors, is_quantized, open_dequantized
from ckptx.report.documents.inspection import InspectionReport
from ckptx.report.report import Log, Stopwatch, count_dtypes
from ckptx.wording import counted


@api(InspectOptions)
def inspect(options: InspectOptions) -> InspectionReport:
    """Summarize a checkpoint from its headers, and samples of 64 KiB from tied weights that are stored twice.

    Raises:
        InputError, UnsupportedError: The checkpoint cannot be opened.
        UsageError: `source_prefix` is set, and the checkpoint is not a training checkpoint.
        OutputError, SpaceError: The page cannot be written.
        EnvironmentProblem: huggingface_hub is missing, and the path is a Hub id.
    """
    stopwatch, log = Stopwatch(), options.log or Log()
    match, ranks, html = options.match, options.ranks, options.html
    if html is not None:
        check_report_path(html)
    path = resolve_source(
        str(options.path), revision=options.revision, token=options.token, cache_dir=options.cache_dir
    )
    checkpoint = open_checkpoint(path)
    options.check_source_prefix(checkpoint.traits, checkpoint.location)
    prefix = options.source_prefix_or_none
    view = log(_view_without_class_if_needed(checkpoint, prefix, log))  # records its notes
    log.note(*view.notes_on_other_models("not described"))
    unknown_note = unknown_class_note(view, checkpoint, accepts_code=False)
    if unknown_note is not None:
        log.note(unknown_note)
    catalog, aliases = view.catalog, find_aliases(view.catalog)
    decoded, quantization = _inspect_quantization(checkpoint, prefix, log)
    parameters = count_parameters(decoded or view)
    checked = decoded or _view_under_disk_names(checkpoint, log) or view
    names = [name for name in catalog.tensors if match is None or fnmatchcase(name, match)]
    if match is not None and not names:
        log.note(
            f'--match "{match}": matches none of {counted(len(catalog.tensors), "tensor name")}, such as '
            f'"{next(iter(catalog.tensors))}"; a pattern must match a whole name, and * stands for any part of it'
        )
    is_listed = options.tensors or (match and not (ranks or html))
    report = InspectionReport(
        command="inspect",
        tensors=len(catalog.tensors),
        dtypes={"before": count_dtypes(catalog.tensors.values())},
        aliases=aliases,
        path=str(path),
        format=catalog.format,
        bytes=catalog.nbytes,
        parameters=parameters.count,
        architecture=None if view.architecture is None else view.architecture.class_name,
        prefix=view.prefix,
        files=catalog.files,
        other_files=sorted({*(sidecar.name for sidecar in catalog.sidecars), *catalog.training_files}),
        chunks=sum(len(entry.chunks) for name, entry in catalog.tensors.items() if name not in aliases),
        alias_groups=_shared_names(aliases),
        tied_groups=parameters.tied,
        absent_ties=find_absent_ties(view),
        optimizer={"tensors": len(view.optimizer), "bytes": view.nbytes(view.optimizer)},
        other_tensors=list(view.other),
        objects=len(catalog.objects),
        unknown_tensors=list(checked.unknown),
        config_check=match_config_with_notes(checked, log.notes),
        groups=_group_sizes(view),
        quantization=quantization,
        adapter=_inspect_adapter(checkpoint, log),
        selected_tensors=[_selected_tensor(catalog, name) for name in names] if is_listed else None,
    )
    if ranks or html is not None:
        report = _with_layout(report, view, names, ranks, html, log)
    return stopwatch.stop(replace(report, notes=list(log.notes)))


def _inspect_quantization(
    checkpoint: Catalog, prefix: str | None, log: Log
) -> tuple[ModelView | None, dict[str, Any] | None]:
    """Return the model with its quantized weights decoded, and the entry `quantization` of the report.

    Both are None for a checkpoint that is not quantized. If its quantization cannot be decoded, a note says why.
    """
    try:
        if not is_quantized(checkpoint):
            return None, None
        from ckptx.quantization.tensors import describe_schemes

        decoded = open_dequantized(checkpoint)
        quantized = find_quantized_tensors(checkpoint)
        view = _view_without_class_if_needed(decoded, prefix, Log())
    except (InputError, UnsupportedError) as error:
        log.note(f"quantization: {error}")
        return None, None
    parts = {*quantized.tensors, *quantized.companion_names, *quantized.activation_scales}
    plain = [entry for name, entry in checkpoint.tensors.items() if name not in parts]
    quantization = {
        "schemes": describe_schemes(quantized.tensors.values()),
        "not_quantized": {"tensors": len(plain), "bytes": sum(each.nbytes for each in plain)},
        "activation_scales": len(quantized.activation_scales),
        "dequantized_bytes": decoded.nbytes,
    }
    return view, quantization


def _inspect_adapter(checkpoint: Catalog, log: Log) -> dict[str, Any] | None:
    """Return the entry `adapter` of the report; None for a model.

    It is None, too, for an adapter that ckptx cannot merge, and a note says why.
    """
    if not checkpoint.traits.is_adapter and not any(".lora_" in name for name in checkpoint.tensors):
        return None
    from ckptx.adapters.adapter import describe_adapter, open_adapter
    from ckptx.adapters.state_dicts import describe_stored_adapter

    try:
        if checkpoint.traits.is_adapter:
            return describe_adapter(open_adapter(checkpoint))
        return describe_stored_adapter(checkpoint)
    except (InputError, UnsupportedError) as error:
        log.note(str(error))
        return None


def _view_under_disk_names(checkpoint: Catalog, log: Log) -> ModelView | None:
    """Return the view of a checkpoint with Megatron's names, renamed to the disk names of the class in its config.

    None for other names, or without a config that names a class. If the names cannot be mapped, it is None, too, and a
    note says why.
    """
    if not find_prefixes(checkpoint.tensors):
        return None
    from ckptx.model_view.megatron_names import map_megatron_names

    try:
        model = map_megatron_names(checkpoint, checkpoint.config, None)
    except (InputError, UnsupportedError) as error:
        log.note(str(error))
        return None
    return None if model is None else _view_without_class_if_needed(model.catalog, None, Log())


def _group_sizes(view: ModelView) -> list[dict[str, Any]]:
    """Return the `groups` of the report: tensors and bytes by the first three components of the name pattern.

    A tensor that shares the bytes of an earlier one counts with 0 bytes.
    """
    sizes_by_pattern: dict[str, list[int]] = {}
    seen_locations: set[object] = set()
    for name, entry in view.tensors.items():
        pattern, nbytes = pattern_of(name), entry.nbytes
        tensor_sizes = sizes_by_pattern.get(pattern)
        if tensor_sizes is None:
            tensor_sizes = sizes_by_pattern[pattern] = []
        location = entry.position if nbytes else name
        if location in seen_locations:
            nbytes = 0
        seen_locations.add(location)
        tensor_sizes.append(nbytes)
    groups: dict[str, dict[str, Any]] = {}
    for pattern, sizes in sizes_by_pattern.items():
        name = ".".join(pattern.split(".")[:3])
        group = groups.setdefault(name, {"pattern": name, "tensors": 0, "bytes": 0})
        group["tensors"] += len(sizes)
        group["bytes"] += sum(sizes)
    return list(groups.values())


def _view_without_class_if_needed(catalog: Catalog, prefix: str | None, log: Log) -> ModelView:
    """Return the view of a checkpoint; without its model class, with a note, if a package to build it is missing."""
    try:
        return view_model(catalog, prefix=prefix, allow_several=True, allow_adapter=True)
    except EnvironmentProblem as error:
        log.note(str(error))
        return view_model(catalog, config={}, prefix=prefix, allow_several=True, allow_adapter=True)


def _with_layout(
    report: InspectionReport, view: ModelView, names: list[str], ranks: bool, html: str | Path | None, log: Log
) -> InspectionReport:
    """Return the report with the layout of the tensors `names` over ranks or files.

    Args:
        report: Report without a layout.
        view: View of the checkpoint.
        names: Stored names of the tensors to include.
        ranks: True to add the layout to the report.
        html: Path of the HTML page to write; None to write none.
        log: Log for notes.
    """
    from ckptx.model_view.rank_layout import layout_by_rank, recorded_mesh  # a plain summary needs none of this
    from ckptx.report.ranks import layout_report, rank_rows

    catalog = view.catalog
    manifest_notes: list[str] = []
    manifest = read_valid_manifest(catalog, manifest_notes)
    log.note(*manifest_notes)
    dims, mesh_note = recorded_mesh(None if manifest is None else manifest.layout, catalog.files)
    if mesh_note is not None:
        log.note(mesh_note)
    model_names = {entry.name: name for name, entry in view.tensors.items()}
    layout = layout_by_rank(catalog, {name: model_names.get(name) for name in names}, dims)
    if ranks:
        report = replace(report, by_rank=layout_report(layout), ranks=rank_rows(layout))
    if html is not None:
        from ckptx.report.html import layout_page

        write_text(html, layout_page(report, layout))
        report = replace(report, html=str(html))
    return report


def _selected_tensor(catalog: Catalog, name: str) -> dict[str, Any]:
    """Return the entry of `selected_tensors` for a tensor."""
    entry = catalog.tensors[name]
    files = sorted({chunk.file for chunk in entry.chunks})
    return {
        "name": name,
        "dtype": entry.dtype.name,
        "shape": list(entry.shape),
        "bytes": entry.nbytes,
        "chunks": len(entry.chunks),
        "files": files,
    }


def _shared_names(aliases: dict[str, str]) -> list[list[str]]:
    """Return the groups of names that share bytes, given each alias and the name that it is an alias of."""
    groups: dict[str, list[str]] = {}
    for name, stored in aliases.items():
        groups.setdefault(stored, [stored]).append(name)
    return list(groups.values())
