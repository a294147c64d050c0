"""The page of `forecast`: whole, alone and safe whatever names say; areas that are as high as the bytes are many."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ckptx.report.area_plot import Scale, Slot, make_slots
from ckptx.report.forecast_html import forecast_page
from ckptx.report.plots import Tick
from ckptx.report.report import Report
from ckptx.untrusted.printable import one_line
from tests.report.made import forecasted, too_large
from tests.report.pages import Page, fault_of_page
from tests.report.test_forecast_text import alone, hostile
from tests.report.test_html import EVIL


def fault(text: str) -> str | None:
    return fault_of_page(text, has_script=False)


@pytest.mark.parametrize("report", [forecasted(), too_large(), alone(gpu_memory=None, fits=None)])
def test_a_page_is_whole_and_alone(report: Any) -> None:
    text = forecast_page(report, "MODEL")
    assert fault(text) is None
    found = Page(text)
    assert found.all("title")[0].text == "SomeForCausalLM - forecast"
    assert len(found.all("svg")) == len(report.by_pipeline_rank)
    assert len(found.all("span", "peak")) == len(report.by_pipeline_rank)
    assert [each.text for each in found.all("li")] == list(report.assumptions)


@pytest.mark.parametrize("name", EVIL)
def test_names_are_text_whatever_they_say(name: str) -> None:
    text = forecast_page(hostile(name), name)
    assert fault(text) is None
    found = Page(text)
    assert found.all("h1")[0].text == one_line(name)
    assert one_line(name) in [cell.text for cell in found.all("td")]


def test_the_verdict_has_a_word_and_a_colour() -> None:
    for report, kind, word in ((forecasted(), "ok", "FITS"), (too_large(), "bad", "DOES NOT FIT")):
        (said,) = Page(forecast_page(report, "m")).all("p", "verdict")
        assert said.has(kind) and said.text.startswith(f"{word} peak 40.00 MiB (stage 1) + reserve 24.00 MiB")
    (said,) = Page(forecast_page(forecasted(gpu_memory=None, fits=None), "m")).all("p", "verdict")
    assert said.has("known") and said.text.startswith("PEAK ")


def test_what_could_not_be_forecast_says_why() -> None:
    text = forecast_page(Report(command="forecast", exit=3, error="config.json: <b>is none", notes=["a note"]), "m")
    assert fault(text) is None
    found = Page(text)
    assert found.all("p", "verdict")[0].text == "ERROR config.json: <b>is none"
    assert [each.text for each in found.all("p", "note")] == ["a note"]


# -------------------------------------------------------------------------------------------------------- the drawing


def points(path: str) -> list[tuple[str, float]]:
    return [(letter, float(number)) for letter, number in re.findall(r"([VH])([\d.]+)", path)]


def areas_of(report: Any, number: int) -> dict[str, list[float]]:
    """The height of each area at each slot, in MiB, by colour; from the drawing of a stage."""
    page = forecast_page(report, "m")
    svg = page.split("<svg")[number + 1].split("</svg>")[0]
    marks = dict(re.findall(r"top:([\d.]+)%\">([\d.]+ MiB|0)<", page.split("<svg")[number]))
    (most, said), *_ = sorted(marks.items(), key=lambda each: float(each[0]))
    a_mib = (400 - float(most) * 4) / float(said.split()[0])  # units of the drawing
    found = {}
    for color, path in re.findall(r'class="area c(\d)" d="M0 [\d.]+([^Z"]*)Z"', svg):
        downs = [number for letter, number in points(path) if letter == "V"]
        half = len(downs) // 2
        found[color] = [
            (low - high) / a_mib for high, low in zip(downs[:half], reversed(downs[half:]), strict=True)
        ]  # fmt: skip
    return found


def test_areas_are_as_high_as_bytes_are_many() -> None:
    """Parameters, optimizer, gradients, activations, temporaries; what is never there has no area."""
    report = forecasted()
    for number, times in ((0, 1), (1, 2)):
        found = areas_of(report, number)
        expected = {"0": [4, 4, 4, 4], "5": [8, 8, 8, 8], "2": [0, 0, 4, 0], "1": [0, 2, 2, 0], "4": [0, 0, 2, 0]}
        assert list(found) == list(expected)
        for color, heights in expected.items():
            assert found[color] == pytest.approx([each * times for each in heights], abs=0.05), color


def test_the_peak_is_marked_where_it_is() -> None:
    page = forecast_page(forecasted(), "m")
    marks = re.findall(r'<path class="peak" d="M([\d.]+) 0V400"/><|<path class="peak" d="M([\d.]+) 0V400"/>', page)
    assert [float(a or b) for a, b in marks] == [625.0, 625.0]  # the third of four
    (first, _) = Page(page).all("span", "peak")
    assert first.text == "peak 20.00 MiB: backward of microbatch 1, in lm_head"
    assert "right:37.50%" in str(first.attributes["style"])


def test_each_slot_says_what_it_is() -> None:
    titles = [each.text for each in Page(forecast_page(forecasted(), "m")).all("title")][1:]
    assert len(titles) == 8
    assert titles[2] == (
        "backward of microbatch 0, layers.0: 20.00 MiB: parameters 4.00 MiB, gradients 4.00 MiB, "
        "optimizer 8.00 MiB, activations 2.00 MiB, temporaries 2.00 MiB"
    )
    assert titles[3].startswith("optimizer step: 12.00 MiB")


def test_gpu_memory_is_a_line_where_it_is_near() -> None:
    near = Page(forecast_page(too_large(), "m"))
    assert len(near.all("path", "memory")) == len(near.all("rect", "reserved")) == 2
    assert {each.text for each in near.all("span", "memory")} == {"GPU memory 50.00 MiB, 24.00 MiB reserved"}
    far = Page(forecast_page(forecasted(), "m"))
    assert not far.all("path", "memory")
    (note,) = far.all("p", "note")
    assert note.text.endswith("GPU memory (1.00 GiB) is above the range of the plot.")
    none = Page(forecast_page(forecasted(gpu_memory=None, fits=None), "m"))
    (note,) = none.all("p", "note")
    assert not none.all("path", "memory") and "GPU memory" not in note.text


@pytest.mark.parametrize("peak", [1, 900, 20 << 20, 70 << 30, 3 << 40, 1 << 62])
def test_marks_are_few_and_below_the_top(peak: int) -> None:
    scale = Scale.fit(peak, None, 0)
    marks = scale.ticks()
    assert marks[0] == Tick(400.0, "0") and 2 <= len(marks) <= 1000
    assert all(0 <= mark.y <= 400 for mark in marks)
    assert len(marks) <= 8 or peak > 1 << 50


def test_what_is_around_a_layer_goes_with_it() -> None:
    rows = [
        ["forward", 0, "", 1], ["forward", 0, "l.0", 5], ["forward", 0, "", 7], ["forward", 0, "l.0", 2],
        ["forward", 0, "l.1", 3], ["forward", 0, "", 9], ["backward", 0, "", 8], ["backward", 0, "l.1", 6],
    ]  # fmt: skip
    assert make_slots(rows) == [
        Slot("forward", 0, "", (1,)), Slot("forward", 0, "l.0", (7,)), Slot("forward", 0, "l.1", (3,)),
        Slot("forward", 0, "", (9,)), Slot("backward", 0, "", (8,)), Slot("backward", 0, "l.1", (6,)),
    ]  # fmt: skip


def test_a_long_step_is_drawn_with_fewer_slots_and_its_peak() -> None:
    rows = [["forward", turn, f"l.{layer}", turn * layer % 977] for turn in range(40) for layer in range(60)]
    slots = make_slots(rows)
    assert 500 < len(slots) <= 640
    assert max(sum(slot.bytes_by_kind) for slot in slots) == max(row[3] for row in rows)
