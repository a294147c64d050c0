"""The JSON schema of reports, from the dataclasses that they are."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from ckptx.report.documents.comparison import DiffReport, VerifyReport
from ckptx.report.documents.conversion import ConversionReport
from ckptx.report.documents.environment import EnvironmentReport
from ckptx.report.documents.forecast import ForecastReport, SearchReport
from ckptx.report.documents.inspection import InspectionReport, RanksOfInspection
from ckptx.report.documents.robustness import FaultsReport, RobustnessReport
from ckptx.report.documents.running import RunReport
from ckptx.report.report import SCHEMA_VERSION, Report

# Words of the command line -> what they report. A call that cannot be understood and any failure are plain reports.
COMMANDS: Mapping[type[Report], tuple[str, ...]] = {
    ConversionReport: ("convert hf2dcp", "convert dcp2hf", "reshard"),
    InspectionReport: ("inspect",),
    DiffReport: ("diff",),
    VerifyReport: ("verify",),
    RunReport: ("verify",),
    ForecastReport: ("forecast",),
    SearchReport: ("forecast",),
    RobustnessReport: ("robustness",),
    FaultsReport: ("robustness",),
    EnvironmentReport: ("env",),
}
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}
_DESCRIBED = re.compile(r"^        (\w+): (.+(?:\n            .+)*)", re.MULTILINE)


def schema() -> dict[str, Any]:
    """The schema, draft 2020-12, of every document that `--json` prints."""
    definitions = {"Failure": _failure(), **{made.__name__: _report(made, words) for made, words in COMMANDS.items()}}
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


def _report(made: type[Report], words: Sequence[str]) -> dict[str, Any]:
    found = _object(made)
    if made is InspectionReport:  # what `--ranks` adds stands beside the other fields
        found["properties"].update(_object(RanksOfInspection)["properties"])
    found["properties"]["command"] = {**found["properties"]["command"], "enum": list(words)}
    found["properties"]["error"] = {**found["properties"]["error"], "type": "null"}
    return found


def _object(made: type[Any]) -> dict[str, Any]:
    """The properties of a dataclass and, of a report, those that every document has beside them."""
    hints, described = get_type_hints(made), _descriptions(made)
    properties: dict[str, Any] = {}
    required = []
    if issubclass(made, Report):
        properties |= {"schema_version": {"const": SCHEMA_VERSION}, "ok": {"type": "boolean"}}
        required = ["schema_version", "ok"]
    for each in (each for each in fields(made) if each.name != "by_rank"):
        properties[each.name] = {**_type(hints[each.name]), "description": described[each.name]}
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


def _type(hint: Any) -> dict[str, Any]:
    """A type hint as a schema; what may be anything is not narrowed."""
    if hint is Any:
        return {}
    if hint is type(None):
        return {"type": "null"}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type(each) for each in arguments]}
    if origin is Sequence:
        return {"type": "array", "items": _type(arguments[0])}
    assert origin in (dict, Mapping), hint
    return {"type": "object", "additionalProperties": _type(arguments[1])}
