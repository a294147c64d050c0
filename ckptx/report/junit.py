"""JUnit XML of `robustness`, which GitHub, GitLab and Jenkins show with other tests.

JUnit XML has no standard. All three services read this subset: `testsuites` with one `testsuite` with counts and
`properties`, and a `testcase` with `classname`, `name`, `time` and at most one `failure`, `error` or `skipped`. A phase
is a test case, and so is each of its checks, in a class named after the phase. If a check fails, its test case and
that of its phase fail: the phase lists all failures, the check its own. XML 1.0 cannot contain most control
characters, not even as character references; they are written as escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from xml.etree import ElementTree as ET

from ckptx.publishing.report_file import XML_HEAD
from ckptx.report.documents.robustness import RobustnessReport
from ckptx.report.report import Report
from ckptx.report.robustness_phrases import (
    cause_text,
    check_cause,
    check_text,
    differing_items,
    failing_checks,
    find_first_failure,
    first_items,
    kill_place_text,
    kill_text,
    memory_failures,
    mesh_text,
    noise_text,
    phase_notes,
    unchecked_text,
    verdict,
    widened_checks,
    widened_text,
)
from ckptx.untrusted.printable import one_line

_MAX_ITEMS = 40  # items of a check that are listed in a failure


def junit_xml(report: Report, recipe: str) -> str:
    """Return the report as JUnit XML.

    Args:
        report: Report of `robustness`; a plain `Report` is that of a failed run, and becomes an `error`.
        recipe: Recipe argument of the command.
    """
    name = report.recipe if isinstance(report, RobustnessReport) else recipe
    suite = ET.Element("testsuite", {"name": _xml_text(name)})
    class_name = f"ckptx.robustness.{_escape_class_name(name)}"
    if isinstance(report, RobustnessReport):
        _add_properties(suite, report)
        for phase in report.phases:
            _add_phase(suite, report, phase, class_name)
        for row in report.kills or ():
            text = kill_text(row)
            failure = (
                None if row["ok"] else (text, ["the last good step cannot be loaded, or another step looks complete"])
            )
            _add_case(suite, f"{class_name}.killed", kill_place_text(row), 0.0, failure=failure)
        if not report.ok and not suite.findall("testcase/failure"):
            _add_case(suite, class_name, "verdict", report.seconds, failure=(verdict(report), list(report.notes)))
    else:
        case = _add_case(suite, class_name, "run", report.seconds)
        message = report.error or "unknown error"
        error = ET.SubElement(case, "error", {"message": _xml_text(message), "type": f"exit {report.exit}"})
        error.text = "\n".join(map(_xml_text, [message, *report.notes]))
    counts = {
        "tests": len(suite.findall("testcase")),
        "failures": len(suite.findall("testcase/failure")),
        "errors": len(suite.findall("testcase/error")),
        "skipped": len(suite.findall("testcase/skipped")),
        "time": f"{report.seconds:.3f}",
    }
    suite.attrib.update({key: str(value) for key, value in counts.items()})
    ET.indent(suite)
    attributes = "".join(f' {key}="{value}"' for key, value in counts.items())
    body = ET.tostring(suite, encoding="unicode")
    return f'{XML_HEAD}robustness"{attributes}>\n{body}\n</testsuites>\n'


def _add_properties(suite: ET.Element, report: RobustnessReport) -> None:
    values = {
        "recipe_file": report.recipe_file,
        **({"mesh": mesh} if (mesh := mesh_text(report)) else {}),
        "trainer": report.trainer,
        "output": report.output_dir,
        **{f"set {key}": value for key, value in report.overrides.items()},
        **({"injected fault": report.injected_fault} if report.injected_fault else {}),
        **({"cause": cause} if (cause := cause_text(report)) else {}),
        **{f"noise of {quantity}": text for quantity in ("loss", "logits") if (text := noise_text(report, quantity))},
        **{f"widened {phase} {row['name']}": widened_text(phase, row) for phase, row in widened_checks(report)},
        **report.environment,
    }
    properties = ET.SubElement(suite, "properties")
    for name, value in values.items():
        ET.SubElement(properties, "property", {"name": _xml_text(name), "value": _xml_text(str(value))})


def _add_phase(suite: ET.Element, report: RobustnessReport, phase: Mapping[str, Any], class_name: str) -> None:
    name, notes = str(phase["name"]), phase_notes(phase)
    if phase["ok"] is None:
        case = _add_case(suite, class_name, name, 0.0)
        ET.SubElement(case, "skipped", {"message": _xml_text(notes[0] if notes else "not run")})
        return
    failure = None
    if phase["ok"] is False:
        failing, memory = failing_checks(phase), memory_failures(phase)
        parts = [f"{row['name']}: {check_text(row)}" for row in failing] + [f"memory: {fault}" for fault in memory]
        parts = parts or [*notes] or [str(phase.get("title") or "failed")]
        if phase is next(each for each in report.phases if each["ok"] is False):
            cause = find_first_failure(report)
            parts += [str(cause_text(report))] if cause is not None and cause["cause"] not in parts else []
        lines = [line for row in failing for line in _check_lines(report, phase, row)]
        failure = ("; ".join(parts), [*lines, *memory, *notes])
    case = _add_case(suite, class_name, name, float(phase["seconds"]), failure=failure)
    if failure is None and notes:
        ET.SubElement(case, "system-out").text = "\n".join(map(_xml_text, notes))
    for row in phase.get("checks") or ():
        check_failure = (check_text(row), _check_lines(report, phase, row)) if row["ok"] is False else None
        case = _add_case(
            suite, f"{class_name}.{_escape_class_name(name)}", str(row["name"]), 0.0, failure=check_failure
        )
        if row["ok"] is None:
            ET.SubElement(case, "skipped", {"message": _xml_text(unchecked_text(row))})


def _check_lines(report: RobustnessReport, phase: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    name = str(row["name"])
    items = [f"    {item}" for item in first_items(differing_items(report, phase, name), _MAX_ITEMS)]
    cause = check_cause(report, phase, name)
    return [f"{name}: {check_text(row)}", *items, *([] if cause is None else [f"    diagnosis: {cause}"])]


def _add_case(
    suite: ET.Element, class_name: str, name: str, seconds: float, failure: tuple[str, Iterable[str]] | None = None
) -> ET.Element:
    """Add a test case; `failure` is its message and the lines of its text."""
    attributes = {"classname": _xml_text(class_name), "name": _xml_text(name), "time": f"{seconds:.3f}"}
    case = ET.SubElement(suite, "testcase", attributes)
    if failure is not None:
        message, lines = failure
        element = ET.SubElement(case, "failure", {"message": _xml_text(message), "type": "robustness"})
        element.text = "\n".join(map(_xml_text, lines)) or _xml_text(message)
    return case


def _xml_text(text: str) -> str:
    """Return a string as one line of valid XML: no controls or surrogates, and neither U+FFFE nor U+FFFF."""
    return one_line(text).replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")


def _escape_class_name(name: str) -> str:
    """Return a name with underscores for dots, slashes and whitespace, as services split a class name at its dots."""
    return re.sub(r"[.\s/]+", "_", name) or "_"
