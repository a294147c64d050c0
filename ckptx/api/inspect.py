"""`inspect`: summary of a checkpoint, from headers alone."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ckptx.catalog.catalog import Catalog
from ckptx.errors import EnvironmentProblem, UsageError
from ckptx.formats.hf.hub import resolve_source
from ckptx.formats.registry import open_checkpoint
from ckptx.mapping.names import pattern_of
from ckptx.model_view.config_check import match_config_with_notes
from ckptx.model_view.parameter_count import count_parameters, find_aliases
from ckptx.model_view.view import ModelView, read_valid_manifest, view_model
from ckptx.options.api import api
from ckptx.options.inspect import InspectOptions
from ckptx.publishing.report_file import check_report_path, write_text
from ckptx.report.documents.inspection import InspectionReport
from ckptx.report.report import Log, Stopwatch, count_dtypes
from ckptx.wording import counted


@api(InspectOptions)
def inspect(options: InspectOptions) -> InspectionReport:
    """Summarize a checkpoint; reads headers and, to compare tied weights, samples of 64 KiB.

    Raises:
        InputError, UnsupportedError: The checkpoint cannot be opened.
        OutputError: The page cannot be written.
    """
    stopwatch, log = Stopwatch(), options.log or Log()
    match, ranks, html = options.match, options.ranks, options.html
    if html is not None:
        check_report_path(html)
    checkpoint = open_checkpoint(
        resolve_source(str(options.path), revision=options.revision, token=options.token, cache_dir=options.cache_dir)
    )
    prefix = options.model_prefix
    if prefix is not None and not checkpoint.traits.is_training_format:
        raise UsageError(f"--source-prefix requires a DCP; {checkpoint.root} is not a DCP")
    view = log(_view_without_class_if_needed(checkpoint, prefix, log))
    log.note(*view.notes_on_other_models("not described"))
    catalog, parameters, aliases = view.catalog, count_parameters(view), find_aliases(view.catalog)
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
        path=str(catalog.root),
        format=catalog.format,
        bytes=catalog.nbytes,
        parameters=parameters.count,
        architecture=None if view.architecture is None else view.architecture.class_name,
        prefix=view.prefix,
        files=catalog.files,
        other_files=[sidecar.name for sidecar in catalog.sidecars],
        chunks=sum(len(entry.chunks) for name, entry in catalog.tensors.items() if name not in aliases),
        alias_groups=_shared_names(aliases),
        tied_groups=parameters.tied,
        optimizer={"tensors": len(view.optimizer), "bytes": view.nbytes(view.optimizer)},
        other_tensors=list(view.other),
        objects=len(catalog.objects),
        unknown_tensors=list(view.unknown),
        config_check=match_config_with_notes(view, log.notes),
        groups=_group_rows(view),
        selected_tensors=[_tensor_row(catalog, name) for name in names] if is_listed else None,
    )
    if ranks or html is not None:
        report = _with_layout(report, view, names, ranks, html, log)
    return stopwatch.stop(replace(report, notes=list(log.notes)))


def _group_rows(view: ModelView) -> list[dict[str, Any]]:
    """Count tensors and bytes by the first three components of their name patterns."""
    sizes_by_pattern: dict[str, list[int]] = {}
    seen_locations: set[object] = set()
    for name, entry in view.tensors.items():
        pattern, nbytes = pattern_of(name), entry.nbytes
        tensor_sizes = sizes_by_pattern.get(pattern)
        if tensor_sizes is None:
            tensor_sizes = sizes_by_pattern[pattern] = []
        location = entry.position if nbytes else name
        if location in seen_locations:
            nbytes = 0  # a name that shares the bytes of another adds none
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
    """Return the view of a checkpoint, without its model class if packages that determine the class are missing."""
    try:
        return view_model(catalog, prefix=prefix, allow_several=True)
    except EnvironmentProblem as error:
        log.note(str(error))
        return view_model(catalog, config={}, prefix=prefix, allow_several=True)


def _with_layout(
    report: InspectionReport, view: ModelView, names: list[str], ranks: bool, html: str | Path | None, log: Log
) -> InspectionReport:
    """Add the layout of the tensors `names` over ranks or files to the report, and write the HTML page."""
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
    layout = layout_by_rank(catalog, {name: model_names.get(name, name) for name in names}, dims)
    if ranks:
        report = replace(report, by_rank=layout_report(layout), ranks=rank_rows(layout))
    if html is not None:
        from ckptx.report.html import layout_page

        write_text(html, layout_page(report, layout))
        report = replace(report, html=str(html))
    return report


def _tensor_row(catalog: Catalog, name: str) -> dict[str, Any]:
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
