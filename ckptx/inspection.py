"""`inspect`: what a checkpoint holds, from headers alone."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ckptx.catalog.catalog import Catalog
from ckptx.formats.registry import open_checkpoint
from ckptx.mapping.names import pattern_of
from ckptx.report.report import Report, count_dtypes
from ckptx.view import view_model


def inspect(path: Path, *, tensors: bool = False, match: str | None = None) -> Report:
    """Describes a checkpoint; no tensor byte is read.

    Args:
        path: The checkpoint.
        tensors: List every tensor.
        match: List only names that match this glob; implies `tensors`.

    Raises:
        InputError, UnsupportedError: It cannot be opened.
    """
    report = Report("inspect")
    catalog = open_checkpoint(path)
    view = view_model(catalog)
    report.tensors = len(catalog.tensors)
    report.dtypes = {"before": count_dtypes(catalog.tensors.values())}
    report.warnings.extend(catalog.notes)
    groups: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    parameters = 0
    seen: set[object] = set()
    for name, entry in view.tensors.items():
        group = ".".join(pattern_of(name).split(".")[:3])
        groups[group] += 1
        place = entry.chunks[0][1:3] if entry.numel else name
        if place not in seen:  # a name that shares the bytes of another adds nothing
            seen.add(place)
            sizes[group] += entry.nbytes
            parameters += entry.numel
    report.details = {
        "path": str(catalog.root),
        "format": catalog.format,
        "bytes": catalog.nbytes,
        "parameters": parameters,
        "architecture": None if view.architecture is None else view.architecture.class_name,
        "prefix": view.prefix,
        "files": catalog.files,
        "sidecars": [sidecar.name for sidecar in catalog.sidecars],
        "chunks": sum(len(entry.chunks) for entry in catalog.tensors.values()),
        "shared": _shared_names(catalog),
        "optimizer": {"tensors": len(view.optimizer), "bytes": view.nbytes(view.optimizer)},
        "other": view.other,
        "objects": len(catalog.objects),
        "unknown": view.unknown,
        "groups": [{"pattern": name, "tensors": groups[name], "bytes": sizes[name]} for name in groups],
    }
    if tensors or match:
        names = [name for name in catalog.tensors if match is None or fnmatchcase(name, match)]
        report.details["listed"] = [_describe(catalog, name) for name in names]
    return report.finish()


def _describe(catalog: Catalog, name: str) -> dict[str, Any]:
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


def _shared_names(catalog: Catalog) -> list[list[str]]:
    """Groups of names that point at the same bytes."""
    groups: dict[object, list[str]] = {}
    for name, entry in catalog.tensors.items():
        if entry.numel:
            groups.setdefault(entry.chunks[0][1:3], []).append(name)
    shared = []
    for names in groups.values():
        chunks = catalog.tensors[names[0]].chunks
        if len(names) > 1:
            shared.append([name for name in names if catalog.tensors[name].chunks == chunks])
    return [names for names in shared if len(names) > 1]
