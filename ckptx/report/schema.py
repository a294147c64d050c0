"""JSON schema of reports, generated from their dataclasses."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import msgspec

from ckptx.report import documents
from ckptx.report.documents.inspection import InspectionReport, RanksOfInspection
from ckptx.report.report import SCHEMA_VERSION, Report

_ATTRIBUTE_LINE = re.compile(r"^        (\w+): (.+(?:\n            .+)*)", re.MULTILINE)


def report_classes() -> list[type[Report]]:
    """Return the class of every report that a command prints, module by module of `documents/`."""
    classes = []
    for each in sorted(iter_modules(documents.__path__), key=lambda module: module.name):
        module = import_module(f"{documents.__name__}.{each.name}")
        candidates = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Report)]
        classes += [report for report in candidates if report.__module__ == module.__name__ and report.commands]
    return classes


def build_schema() -> dict[str, Any]:
    """Return the schema, draft 2020-12, of all documents that `--json` prints."""
    definitions = {"Failure": _failure_schema(), **{each.__name__: _report_schema(each) for each in report_classes()}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A report of ckptx, schema_version {SCHEMA_VERSION}",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in definitions],
        "$defs": definitions,
    }


def _failure_schema() -> dict[str, Any]:
    document = _object_schema(Report)
    document["properties"]["error"] = {**document["properties"]["error"], "type": "string"}
    document["properties"]["ok"] = {"const": False}
    return {**document, "description": "Report of a command that failed."}


def _report_schema(report_class: type[Report]) -> dict[str, Any]:
    document = _object_schema(report_class)
    if report_class is InspectionReport:  # the fields of `--ranks` are on the same level
        document["properties"].update(_object_schema(RanksOfInspection)["properties"])
    document["properties"]["command"] = {**document["properties"]["command"], "enum": list(report_class.commands)}
    document["properties"]["error"] = {**document["properties"]["error"], "type": "null"}
    return document


def _object_schema(document_class: type[Any]) -> dict[str, Any]:
    """Return the schema of a dataclass; that of a report also has `schema_version` and `ok`, which no dataclass has."""
    types = msgspec.json.schema_components([document_class])[1][document_class.__name__]["properties"]
    descriptions = _descriptions(document_class)
    properties: dict[str, Any] = {}
    required = []
    if issubclass(document_class, Report):
        properties |= {"schema_version": {"const": SCHEMA_VERSION}, "ok": {"type": "boolean"}}
        required = ["schema_version", "ok"]
    # `by_rank` is not in the document itself, see `InspectionReport.to_dict`.
    for each in (each for each in fields(document_class) if each.name != "by_rank"):
        types[each.name].pop("default", None)  # a document has all fields, except optional ones
        properties[each.name] = {**types[each.name], "description": descriptions[each.name]}
        if not each.metadata.get("optional"):
            required.append(each.name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _descriptions(document_class: type[Any]) -> dict[str, str]:
    """Return the description of each attribute, from the docstrings of a dataclass and its bases."""
    descriptions: dict[str, str] = {}
    for each in reversed(document_class.__mro__):
        for name, text in _ATTRIBUTE_LINE.findall(each.__doc__ or ""):
            descriptions[name] = " ".join(text.split())
    return descriptions
