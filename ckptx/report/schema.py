"""The JSON schema of reports, from the dataclasses that they are."""

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
    """The schema, draft 2020-12, of every document that `--json` prints."""
    definitions = {"Failure": _failure(), **{made.__name__: _report(made) for made in reports()}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A report of ckptx, schema_version {SCHEMA_VERSION}",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in definitions],
        "$defs": definitions,
    }


def _failure() -> dict[str, Any]:
    made = _object(Report)
    made["properties"]["error"] = {**made["properties"]["error"], "type": "string"}
    made["properties"]["ok"] = {"const": False}
    return {**made, "description": "Of a command that could not do what was asked."}


def _report(made: type[Report]) -> dict[str, Any]:
    found = _object(made)
    if made is InspectionReport:  # what `--ranks` adds stands beside the other fields
        found["properties"].update(_object(RanksOfInspection)["properties"])
    found["properties"]["command"] = {**found["properties"]["command"], "enum": list(made.commands)}
    found["properties"]["error"] = {**found["properties"]["error"], "type": "null"}
    return found


def _object(made: type[Any]) -> dict[str, Any]:
    """Describe the fields of a dataclass, and of a report also what every document has beside them."""
    types = msgspec.json.schema_components([made])[1][made.__name__]["properties"]
    described = _descriptions(made)
    properties: dict[str, Any] = {}
    required = []
    if issubclass(made, Report):
        properties |= {"schema_version": {"const": SCHEMA_VERSION}, "ok": {"type": "boolean"}}
        required = ["schema_version", "ok"]
    for each in (each for each in fields(made) if each.name != "by_rank"):
        types[each.name].pop("default", None)  # a document has all fields, or leaves one out that is optional
        properties[each.name] = {**types[each.name], "description": described[each.name]}
        if not each.metadata.get("optional"):
            required.append(each.name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _descriptions(made: type[Any]) -> dict[str, str]:
    """What the docstrings of a dataclass and of those it is made of say of each attribute."""
    found: dict[str, str] = {}
    for each in reversed(made.__mro__):
        for name, text in _DESCRIBED.findall(each.__doc__ or ""):
            found[name] = " ".join(text.split())
    return found
