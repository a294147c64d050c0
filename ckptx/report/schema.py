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

_DESCRIBED = re.compile(r"^        (\w+): (.+(?:\n            .+)*)", re.MULTILINE)


def reports() -> list[type[Report]]:
    """Return the class of every report that a command prints, module by module of `documents/`."""
    found = []
    for each in sorted(iter_modules(documents.__path__), key=lambda module: module.name):
        module = import_module(f"{documents.__name__}.{each.name}")
        made = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Report)]
        found += [report for report in made if report.__module__ == module.__name__ and report.commands]
    return found


def schema() -> dict[str, Any]:
    """Return the schema, draft 2020-12, of all documents that `--json` prints."""
    definitions = {"Failure": _failure_schema(), **{made.__name__: _report_schema(made) for made in reports()}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A report of ckptx, schema_version {SCHEMA_VERSION}",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in definitions],
        "$defs": definitions,
    }


def _failure_schema() -> dict[str, Any]:
    made = _object_schema(Report)
    made["properties"]["error"] = {**made["properties"]["error"], "type": "string"}
    made["properties"]["ok"] = {"const": False}
    return {**made, "description": "Report of a command that failed."}


def _report_schema(made: type[Report]) -> dict[str, Any]:
    found = _object_schema(made)
    if made is InspectionReport:  # the fields of `--ranks` are on the same level
        found["properties"].update(_object_schema(RanksOfInspection)["properties"])
    found["properties"]["command"] = {**found["properties"]["command"], "enum": list(made.commands)}
    found["properties"]["error"] = {**found["properties"]["error"], "type": "null"}
    return found


def _object_schema(made: type[Any]) -> dict[str, Any]:
    """Return the schema of a dataclass; of a report, with the fields that every document has in addition."""
    types = msgspec.json.schema_components([made])[1][made.__name__]["properties"]
    described = _descriptions(made)
    properties: dict[str, Any] = {}
    required = []
    if issubclass(made, Report):
        properties |= {"schema_version": {"const": SCHEMA_VERSION}, "ok": {"type": "boolean"}}
        required = ["schema_version", "ok"]
    for each in (each for each in fields(made) if each.name != "by_rank"):
        types[each.name].pop("default", None)  # a document has all fields, except optional ones
        properties[each.name] = {**types[each.name], "description": described[each.name]}
        if not each.metadata.get("optional"):
            required.append(each.name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _descriptions(made: type[Any]) -> dict[str, str]:
    """Return the description of each attribute, from the docstrings of a dataclass and its bases."""
    found: dict[str, str] = {}
    for each in reversed(made.__mro__):
        for name, text in _DESCRIBED.findall(each.__doc__ or ""):
            found[name] = " ".join(text.split())
    return found
