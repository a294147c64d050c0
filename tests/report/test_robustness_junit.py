"""JUnit XML of `robustness`: what readers expect of it, counts that add up, and no character that XML has not."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from ckptx.publishing.report_file import XML_HEAD
from ckptx.report.junit import junit_xml
from ckptx.report.report import Report
from tests.report.made import broken, oracle, phase, robust
from tests.report.test_html import EVIL as EVIL_MARKUP
from tests.report.test_robustness_text import EVIL, hostile

COUNTS = {
    "tests": "testcase",
    "failures": "testcase/failure",
    "errors": "testcase/error",
    "skipped": "testcase/skipped",
}
# Element -> attributes it must have, and may have; what may stand in it.
GRAMMAR: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": ({"name", "time", *COUNTS}, set(), {"testsuite"}),
    "testsuite": ({"name", "time", *COUNTS}, set(), {"properties", "testcase"}),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, set(), set()),
    "testcase": ({"classname", "name", "time"}, set(), {"failure", "error", "skipped", "system-out"}),
    "failure": ({"message", "type"}, set(), set()),
    "error": ({"message", "type"}, set(), set()),
    "skipped": ({"message"}, set(), set()),
    "system-out": (set(), set(), set()),
}


def fault_of(text: str) -> str | None:
    """The first reason why a reader would stumble; None when there is none."""
    try:
        root = ET.fromstring(text.encode())
    except (ET.ParseError, UnicodeEncodeError) as error:
        return f"no XML: {error}"
    if not text.startswith(XML_HEAD):
        return "its beginning"
    for element in root.iter():
        if element.tag not in GRAMMAR:
            return f"<{element.tag}>"
        needed, may, below = GRAMMAR[element.tag]
        if not needed <= set(element.attrib) <= needed | may:
            return f"<{element.tag}> has {sorted(element.attrib)}"
        if {each.tag for each in element} - below:
            return f"<{element.tag}> holds {[each.tag for each in element]}"
        if element.tag == "testcase" and len(element.findall("failure") + element.findall("skipped")) > 1:
            return "two verdicts"
        if any("\n" in value for value in element.attrib.values()):
            return "a line break in an attribute"
        if "time" in element.attrib and not float(element.attrib["time"]) >= 0:
            return "its time"
    (suite,) = root
    for key, path in COUNTS.items():
        if not root.attrib[key] == suite.attrib[key] == str(len(suite.findall(path))):
            return f"{key} is {suite.attrib[key]}"
    order = [element.tag for element in suite]
    return "properties come late" if "properties" in order[1:] else None


def cases(text: str) -> dict[str, ET.Element]:
    """Test cases by class and name."""
    return {
        f"{each.get('classname')} {each.get('name')}": each for each in ET.fromstring(text.encode()).iter("testcase")
    }


@pytest.mark.parametrize("report", [robust(), broken(), robust(phases=[]), Report(command="robustness", exit=3)])
def test_a_document_is_as_readers_expect(report: Report) -> None:
    assert fault_of(junit_xml(report, "small")) is None


@pytest.mark.parametrize("text", [*EVIL, *EVIL_MARKUP, "\ufffe\uffff", "\U0001fffe", "x" * 100_000, "]]>"])
def test_names_are_text_whatever_they_say(text: str) -> None:
    assert fault_of(junit_xml(hostile(text), text)) is None
    failure = Report(command="robustness", exit=70, error=text, notes=[text])
    assert fault_of(junit_xml(failure, text)) is None


@pytest.mark.parametrize(
    ("search", "replace", "said"),
    [
        ('tests="12"', 'tests="11"', "tests is 11"),
        ("<skipped ", '<skipped x="" ', "skipped"),
        ("</failure>", "</failure><skipped message='x' />", "two verdicts|skipped is"),
        ("rng", "\x1b", "no XML"),
        ('name="uninterrupted"', 'name="a&#10;b"', "line break"),
        ('<?xml version="1.0"', "<?xml version='1.0'", "beginning"),
        ('time="1.250"', 'time="-1"', "time"),
        ("properties>", "propertied>", "propertied"),
    ],
)
def test_an_injected_defect_is_found(search: str, replace: str, said: str) -> None:
    text = junit_xml(broken(), "small")
    assert fault_of(text) is None and search in text
    found = fault_of(text.replace(search, replace))
    assert found is not None and any(each in found for each in said.split("|"))


def test_a_case_for_each_phase_and_each_oracle_below_it() -> None:
    found = cases(junit_xml(broken(), "small"))
    assert list(found)[:5] == [
        "ckptx.robustness.small uninterrupted",
        "ckptx.robustness.small.uninterrupted finite",
        "ckptx.robustness.small.uninterrupted model",
        "ckptx.robustness.small replicas",
        "ckptx.robustness.small.replicas replicas",
    ]
    assert found["ckptx.robustness.small uninterrupted"].get("time") == "1.250"
    skipped = found["ckptx.robustness.small layouts"].find("skipped")
    assert skipped is not None and skipped.get("message") == "--phases left it out"
    oracle_failure = found["ckptx.robustness.small.resume rng"].find("failure")
    assert oracle_failure is not None and oracle_failure.get("message") == "2 of 185 items differ"
    assert "torch on ranks 0, 1: expected 9c3d, got 1f2a" in str(oracle_failure.text)
    whole = found["ckptx.robustness.small resume"].find("failure")
    assert whole is not None and "a note" in str(whole.text) and "loss: difference 0.003" in str(whole.get("message"))
    assert (
        found["ckptx.robustness.small.killed rank 1 killed at fsync 2 (asynchronous save)"].find("failure") is not None
    )
    memory = found["ckptx.robustness.small replicas"].find("failure")
    assert memory is not None and "14 threads" in str(memory.text)


def test_properties_say_what_it_ran_with() -> None:
    suite = ET.fromstring(junit_xml(broken(), "small").encode())[0]
    said = {each.get("name"): each.get("value") for each in suite.iter("property")}
    assert said["set checks.loss_noise_factor"] == "100"
    assert said["output"] == broken().output_dir and "out" not in said
    assert said["injected fault"] == "stale_rng" and said["torch"] == "2.13.0"
    assert said["widened resume loss"] == "resume: loss tolerance 4.8e-05 (100 x noise)"


def test_what_could_not_be_judged_is_an_error() -> None:
    failure = Report(command="robustness", exit=3, error="recipe.yaml: is none", notes=["a note"])
    ((name, case),) = cases(junit_xml(failure, "a.b/c")).items()
    assert name == "ckptx.robustness.a_b_c run"
    (error,) = case
    assert (error.tag, error.get("type"), error.get("message")) == ("error", "exit 3", "recipe.yaml: is none")
    assert error.text == "recipe.yaml: is none\na note"


def test_a_failure_that_no_phase_has_is_a_case() -> None:
    found = cases(junit_xml(robust(exit=1, notes=["why"]), "small"))
    failure = found["ckptx.robustness.small verdict"].find("failure")
    assert failure is not None and failure.text == "why"


def test_a_phase_that_fails_by_itself_says_its_notes() -> None:
    report = robust(exit=1, phases=[phase("export", False, oracle("model"), notes=["transformers refused it"])])
    failure = cases(junit_xml(report, "small"))["ckptx.robustness.small export"].find("failure")
    assert failure is not None and failure.get("message") == "transformers refused it"
