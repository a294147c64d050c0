"""The page of `robustness`: whole, alone and safe whatever names say; its plots; what could not be judged."""

from __future__ import annotations

import re

import pytest
from jinja2 import UndefinedError

from ckptx.report.page import render_page
from ckptx.report.plots import NoiseBand, RunCurve, plot_differences, plot_losses
from ckptx.report.report import Report
from ckptx.report.robustness_html import robustness_page
from ckptx.report.robustness_phrases import CAUSES
from ckptx.untrusted.printable import one_line
from tests.report.made import broken, oracle, phase, robust
from tests.report.pages import Page, fault_of_page
from tests.report.test_html import EVIL
from tests.report.test_robustness_text import hostile


def fault(text: str) -> str | None:
    return fault_of_page(text, has_script=False)


@pytest.mark.parametrize("report", [robust(), broken()], ids=["passing", "failing"])
def test_a_page_is_whole_and_alone(report: Report) -> None:
    text = robustness_page(report, "small")
    assert fault(text) is None
    found = Page(text)
    assert [each.text for each in found.all("title")] == ["small - robustness"]
    assert len(found.all("article", "phase")) == (2 if report.ok else 4)


@pytest.mark.parametrize("name", EVIL)
def test_names_are_text_whatever_they_say(name: str) -> None:
    text = robustness_page(hostile(name), "small")
    assert fault(text) is None
    found = Page(text)
    said = one_line(name)
    assert found.all("h1")[0].text == said
    assert said in [cell.text for cell in found.all("td")]
    assert not found.all("img") and not found.all("a")
    assert not [key for element in found.elements for key in element.attributes if key.startswith("on")]


@pytest.mark.parametrize(
    ("search", "replace", "said"),
    [
        ("&lt;img", "<img", "closes|img|script"),
        ("</main>", "", "closes"),
        ("<main>", "<main><script>1</script>", "1 scripts"),
        ("default-src 'none'", "default-src *", "no policy"),
        ("base-uri", "script-src 'sha256-x'; base-uri", "policy"),
        ("<main>", '<main><a href="https://x">y</a>', "href"),
        (":root {", ":root { background: url(https://x/y.png);", "outside"),
    ],
)
def test_an_injected_defect_is_found(search: str, replace: str, said: str) -> None:
    text = robustness_page(hostile("</script><img src=x>"), "small")
    assert fault(text) is None and search in text
    assert re.search(said, fault(text.replace(search, replace)) or "")


def test_verdicts_are_words_and_marks() -> None:
    found = Page(robustness_page(broken(), "small"))
    assert [each.text for each in found.all("p", "verdict")] == [
        "FAILED small: replicas (memory); resume (rng, loss); injected fault: stale_rng",
        f"CAUSE replicas, check memory: {CAUSES['memory']}",
        "WIDENED by the recipe: resume: loss tolerance 4.8e-05 (100 x noise)",
    ]
    assert [each.attributes["aria-label"] for each in found.all("b", "mark")][:4] == [
        "ok",
        "failed",
        "not run",
        "failed",
    ]
    failing = [each.text for each in found.all("li", "bad")]
    assert failing[0].startswith("rng 2 of 185 items differ\ntorch on ranks 0, 1: expected 9c3d, got 1f2a")
    assert "widened" in failing[1]
    passing = Page(robustness_page(robust(), "small"))
    assert [each.text for each in passing.all("p", "verdict")] == ["PASSED small, 2 phases"]
    assert not passing.all("", "bad") and not passing.all("", "red")


def test_memory_above_the_baseline_is_set_off() -> None:
    cells = [each.text for each in Page(robustness_page(broken(), "small")).all("td", "bad")]
    assert cells == ["4.00 KiB, baseline 0 B", "14, baseline 8"]


def test_runs_are_bit_equal_or_said_not_to_be() -> None:
    assert "Bit-identical at every step." in robustness_page(robust(), "small")
    assert "No run is bit-identical at every step." in robustness_page(broken(), "small")


def test_what_could_not_be_judged_says_why() -> None:
    report = Report(command="robustness", exit=3, error="recipe.yaml: <b>is none", notes=["a note"])
    text = robustness_page(report, "</title><script>1</script>")
    assert fault(text) is None
    found = Page(text)
    assert found.all("p", "verdict")[0].text == "ERROR recipe.yaml: <b>is none"
    assert found.all("dd")[0].text == "3"
    assert fault(robustness_page(Report(command="robustness", exit=130), "x")) is None


def test_a_report_of_next_to_nothing() -> None:
    report = robust(phases=[], noise={}, losses=[], environment={}, layout={})
    text = robustness_page(report, "small")
    assert fault(text) is None and "No phase ran." in text
    assert not Page(text).all("svg")


def test_runs_without_steps_in_common() -> None:
    losses = [{"run": "a", "steps": [1], "losses": [2.0]}, {"run": "b", "steps": [7], "losses": ["inf"]}]
    text = robustness_page(robust(losses=losses), "small")
    assert fault(text) is None
    assert len(Page(text).all("svg")) == 1


def test_resumed_runs_are_drawn_before_those_that_are_noise() -> None:
    names = ["uninterrupted", "rerun", *(f"perturbed-{at}" for at in range(9)), "resumed", "resumed-2"]
    losses = [{"run": name, "steps": [1], "losses": [1.0]} for name in names]
    exact = oracle("loss", ok=True, value=0.0, tolerance=0.0, noise_factor=8.0)
    noisy = oracle("loss", ok=True, value=0.0, tolerance=3.84e-6, noise_factor=8.0)
    phases = [phase("uninterrupted", True, exact), phase("layouts", True, noisy)]
    text = robustness_page(robust(losses=losses, phases=phases), "small")
    legend = Page(text).all("p", "legend")[1].text
    assert legend.startswith("resumedresumed-2rerunperturbed-0")
    assert legend.endswith("tolerance 3.84e-06 (phase layouts)")


def test_runs_are_named_with_their_steps_and_those_without_a_loss_are_left_out() -> None:
    losses = [
        {"run": "uninterrupted", "steps": [1, 2, 3], "losses": [3.0, 2.0, 1.0]},
        {"run": "saved-again", "steps": [], "losses": []},
        {"run": "rerun", "steps": [1, 2, 3], "losses": [3.0, 2.0, 1.0]},
        {"run": "resumed", "steps": [2, 3], "losses": [2.0, 1.0]},
        {"run": "resumed-2", "steps": [3], "losses": [1.0]},
    ]
    text = robustness_page(robust(losses=losses), "small")
    names = [each.text for each in Page(text).all("p", "legend")[0:1]]
    assert names == ["uninterruptedresumed (steps 2-3)resumed-2 (step 3)rerun"]
    assert "in the --json report" not in text


def test_a_run_is_drawn_against_the_run_that_it_is_compared_with() -> None:
    losses = [
        {"run": "uninterrupted", "steps": [1, 2], "losses": [3.0, 2.0], "compared_with": None, "mesh": "dp_shard 2"},
        {"run": "rerun", "steps": [1, 2], "losses": [3.0, 2.0], "compared_with": "uninterrupted", "mesh": "dp_shard 2"},
        {"run": "without-dropout", "steps": [2], "losses": [1.5], "compared_with": None, "mesh": "dp_shard 2"},
        {"run": "layout-1", "steps": [2], "losses": [1.5], "compared_with": "without-dropout", "mesh": "tp 2"},
    ]
    found = Page(robustness_page(robust(losses=losses), "small"))
    of_losses, of_differences = (each.text for each in found.all("p", "legend"))
    assert of_losses == "uninterruptedrerunwithout-dropout (step 2)layout-1 (tp 2, step 2)"
    assert of_differences.startswith("rerunlayout-1 (tp 2, step 2) vs without-dropout")
    assert "Bit-identical at every step." in found.all("section")[1].text


def test_a_passed_check_says_what_was_found() -> None:
    rows = [oracle(name, compared=3) for name in ("sharded", "finite", "readable", "memory", "model")]
    skipped = oracle("replicas", compared=0, ok=None)
    found = Page(robustness_page(robust(phases=[phase("resume", True, *rows, skipped)]), "small"))
    assert [each.text.strip() for each in found.all("li")] == [
        "sharded as the recipe requires", "finite 3 items finite", "readable 3 checkpoints readable",
        "memory 3 measurements not above the level after warmup", "model 3 items identical",
        "replicas skipped: no replicated state",
    ]  # fmt: skip
    assert "1.2 s, 1 check skipped: replicas" in found.all("article", "phase")[0].text


def test_long_lists_are_cut_and_counted() -> None:
    rows = [{"phase": "resume", "check": "model", "item": f"layers.{at}", "rank": 0} for at in range(5000)]
    row = oracle("model", ["layers.0"], differing_count=5000, compared=5000)
    runs = [{"run": f"run {at}", "steps": [1], "losses": [1.0]} for at in range(20)]
    report = robust(exit=1, phases=[phase("resume", False, row)], differing=rows, losses=runs)
    text = robustness_page(report, "small")
    assert len(text) < 200_000
    assert (
        "4,600 more differences" in text
        and "and 4,988 more" in text
        and "and 7 more; the --json report has all" in text
    )


def heights(shapes: str) -> dict[float, float]:
    """Where the dots of the first run of a plot are: x -> y."""
    (path,) = re.findall(r'class="dot run c1" d="([^"]*)"', shapes)
    return {float(x): float(y) for x, y in re.findall(r"M([\d.]+) ([\d.]+)h0", path)}


def test_distances_lie_in_decades_above_what_is_equal() -> None:
    run = RunCurve("resumed", 1, [(1, 0.0), (2, 1e-6), (3, 1e-4), (4, 1e-2), (5, float("nan"))])
    plot = plot_differences([run], NoiseBand(1e-6, 8e-6))
    assert plot is not None
    text = "".join(plot.shapes)
    places = list(heights(text).values())
    assert len(places) == 4 and places == sorted(places, reverse=True)
    assert places[1] - places[2] == pytest.approx(places[2] - places[3], abs=0.2)
    assert 'class="dot nan"' in text and {"nan", "equal"} <= {mark.text for mark in plot.ticks}
    noise, tolerance = (
        float(re.findall(rf'<path class="{name}" d="M0 ([\d.]+)H', text)[0]) for name in ("noise", "tolerance")
    )
    assert noise == pytest.approx(places[1], abs=0.1) and places[2] < tolerance < noise


def test_a_run_is_drawn_to_scale_with_a_gap_where_there_is_no_number() -> None:
    first = RunCurve("uninterrupted", 0, [(1, 4.0), (2, 3.0), (3, 2.0)])
    second = RunCurve("resumed", 1, [(1, 4.0), (2, float("nan")), (3, 2.0)])
    plot = plot_losses([first, second])
    assert plot is not None
    text = "".join(plot.shapes)
    assert re.search(r'class="run c1" d="M[\d. ]+M[\d. ]+"', text)
    assert re.search(r'class="first c0" d="M[\d. ]+L[\d. ]+L[\d. ]+"', text)


def test_nothing_is_drawn_of_nothing() -> None:
    assert plot_losses([]) is None and plot_losses([RunCurve("a", 0, [(1, float("nan"))])]) is None
    assert plot_differences([], NoiseBand(None, None)) is None


def test_a_page_has_its_policy_whether_it_has_a_script_or_not() -> None:
    assert "script-src" not in render_page("page.html", "t", ["robustness.css"])
    assert "script-src 'sha256-" in render_page("page.html", "t", ["robustness.css"], "1")


def test_a_template_that_prints_what_is_not_there_is_refused() -> None:
    with pytest.raises(UndefinedError, match="heading"):
        render_page("robustness.html", "t", [], report=None)
