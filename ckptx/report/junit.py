"""The report of `robustness` as JUnit XML, which GitHub, GitLab and Jenkins show beside other tests.

There is no standard; what all of them read is this: `testsuites` of one `testsuite` with counts and `properties`, and a
`testcase` with `classname`, `name`, `time` and at most one `failure`, `error` or `skipped`. A phase is a test case, and
so is each of its oracles, in a class of the name of the phase: a phase that fails says all there is to say, an oracle
its own part, and both fail, as a reader may look at either. XML has no place for most control characters, in no form;
they are written as escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from xml.etree import ElementTree as ET

from ckptx.publishing.report_file import XML_HEAD
from ckptx.report.documents.robustness import RobustnessReport
from ckptx.report.report import Report
from ckptx.report.robustness_words import (
    cause_of,
    cause_text,
    failing_oracles,
    first_cause,
    items_of,
    kill_text,
    memory_faults,
    mesh,
    noise_text,
    notes_of,
    oracle_text,
    some,
    unchecked_text,
    verdict,
    widened,
    widened_text,
)
from ckptx.untrusted.printable import one_line

_MOST_ITEMS = 40


def junit_xml(report: Report, recipe: str) -> str:
    """The document.

    Args:
        report: Of `robustness`; a plain report is that of a run that could not be judged, which is an error.
        recipe: As it was asked for.
    """
    name = report.recipe if isinstance(report, RobustnessReport) else recipe
    suite = ET.Element("testsuite", {"name": _clean(name)})
    kind = f"ckptx.robustness.{_class(name)}"
    if isinstance(report, RobustnessReport):
        _properties(suite, report)
        for phase in report.phases:
            _phase(suite, report, phase, kind)
        for row in report.kills or ():
            said = kill_text(row)
            wrong = (
                None if row["ok"] else (said, ["the last good step cannot be loaded, or another can be taken for it"])
            )
            _case(suite, f"{kind}.killed", said, 0.0, failure=wrong)
        if not report.ok and not suite.findall("testcase/failure"):
            _case(suite, kind, "verdict", report.seconds, failure=(verdict(report), list(report.warnings)))
    else:
        case = _case(suite, kind, "run", report.seconds)
        said = report.error or "no reason was given"
        error = ET.SubElement(case, "error", {"message": _clean(said), "type": f"exit {report.exit}"})
        error.text = "\n".join(map(_clean, [said, *report.warnings]))
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


def _properties(suite: ET.Element, report: RobustnessReport) -> None:
    said = {
        "recipe_file": report.recipe_file,
        "mesh": mesh(report),
        "trainer": report.trainer,
        "out": report.out,
        **{f"set {key}": value for key, value in report.settings.items()},
        **({"planted": report.injected} if report.injected else {}),
        **({"cause": said_cause} if (said_cause := cause_text(report)) else {}),
        **{f"noise of {what}": text for what in ("loss", "logits") if (text := noise_text(report, what))},
        **{f"widened {phase} {row['name']}": widened_text(phase, row) for phase, row in widened(report)},
        **report.environment,
    }
    properties = ET.SubElement(suite, "properties")
    for name, value in said.items():
        ET.SubElement(properties, "property", {"name": _clean(name), "value": _clean(str(value))})


def _phase(suite: ET.Element, report: RobustnessReport, phase: Mapping[str, Any], kind: str) -> None:
    name, notes = str(phase["name"]), notes_of(phase)
    if phase["ok"] is None:
        case = _case(suite, kind, name, 0.0)
        ET.SubElement(case, "skipped", {"message": _clean(notes[0] if notes else "not run")})
        return
    failure = None
    if phase["ok"] is False:
        failing, memory = failing_oracles(phase), memory_faults(phase)
        told = [f"{row['name']}: {oracle_text(row)}" for row in failing] + [f"memory: {fault}" for fault in memory]
        told = told or [*notes] or [str(phase.get("title") or "failed")]
        if phase is next(each for each in report.phases if each["ok"] is False):
            cause = first_cause(report)
            told += [str(cause_text(report))] if cause is not None and cause["cause"] not in told else []
        lines = [line for row in failing for line in _oracle_lines(report, phase, row)]
        failure = ("; ".join(told), [*lines, *memory, *notes])
    case = _case(suite, kind, name, float(phase["seconds"]), failure=failure)
    if failure is None and notes:
        ET.SubElement(case, "system-out").text = "\n".join(map(_clean, notes))
    for row in phase.get("oracles") or ():
        of_oracle = (oracle_text(row), _oracle_lines(report, phase, row)) if row["ok"] is False else None
        case = _case(suite, f"{kind}.{_class(name)}", str(row["name"]), 0.0, failure=of_oracle)
        if row["ok"] is None:
            ET.SubElement(case, "skipped", {"message": _clean(unchecked_text(row))})


def _oracle_lines(report: RobustnessReport, phase: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    name = str(row["name"])
    items = [f"    {item}" for item in some(items_of(report, phase, name), _MOST_ITEMS)]
    cause = cause_of(report, phase, name)
    return [f"{name}: {oracle_text(row)}", *items, *([] if cause is None else [f"    that is: {cause}"])]


def _case(
    suite: ET.Element, kind: str, name: str, seconds: float, failure: tuple[str, Iterable[str]] | None = None
) -> ET.Element:
    """A test case; `failure` is what it says in one line and in several."""
    attributes = {"classname": _clean(kind), "name": _clean(name), "time": f"{seconds:.3f}"}
    case = ET.SubElement(suite, "testcase", attributes)
    if failure is not None:
        message, lines = failure
        found = ET.SubElement(case, "failure", {"message": _clean(message), "type": "robustness"})
        found.text = "\n".join(map(_clean, lines)) or _clean(message)
    return case


def _clean(text: str) -> str:
    """A text as one line of what XML may hold: beside controls and half surrogates, two characters are excluded."""
    return one_line(text).replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")


def _class(name: str) -> str:
    """A part of the name of a class, which readers split at points."""
    return re.sub(r"[.\s/]+", "_", name) or "_"
