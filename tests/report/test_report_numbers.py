"""Numbers that several reports show: computed by one function, said by one function."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptx.report import number_formats
from ckptx.report.report import LARGEST_PROCESS, LARGEST_RANK, THIS_PROCESS, Stopwatch, written_gb_per_s
from ckptx.report.text import cost_text
from tests.report.made import converted

MIB = 1 << 20


@pytest.mark.parametrize(
    ("peaks", "are_ranks", "expected"),
    [
        ([5 * MIB], False, {"peak_rss": 5 * MIB, "peak_rss_of": THIS_PROCESS}),
        ([5 * MIB, 9 * MIB, 7 * MIB], True, {"peak_rss": 9 * MIB, "peak_rss_of": LARGEST_RANK}),
    ],
)
def test_the_largest_process_is_that_of_a_run(peaks: list[int], are_ranks: bool, expected: dict[str, object]) -> None:
    assert number_formats.peak_of_processes(peaks, are_ranks=are_ranks) == expected


@pytest.mark.parametrize(
    ("of", "label"),
    [
        (THIS_PROCESS, "peak memory"),
        (LARGEST_RANK, "peak memory of the largest rank"),
        (LARGEST_PROCESS, "peak memory of the largest process"),
    ],
)
def test_peak_memory_has_a_label(of: str, label: str) -> None:
    assert number_formats.peak_memory_text(converted(peak_rss=3 * MIB, peak_rss_of=of)) == (label, "3.00 MiB")
    assert cost_text(converted(peak_rss=3 * MIB, peak_rss_of=of)) == f"0.00 s, {label} 3.00 MiB"


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((90, 0, 0), ""),
        ((90, 0, 1), "90 + 1 alias"),
        ((1200, 2, 0), "1,200 + 2 copies"),
        ((90, 1, 2), "90 + 1 copy + 2 aliases"),
    ],
)
def test_names_that_share_bytes_are_said(counts: tuple[int, int, int], said: str) -> None:
    stored, copies, aliases = counts
    assert number_formats.stored_text(stored, copies=copies, aliases=aliases) == said


@pytest.mark.parametrize(
    ("output", "written", "said"),
    [
        (3 * MIB, 3 * MIB, "3.00 MiB in files"),
        (3 * MIB, MIB, "3.00 MiB in files, 2.00 MiB of it by an earlier, interrupted run"),
        (3 * MIB, 0, "3.00 MiB in files"),
    ],
)
def test_what_an_earlier_run_wrote_is_said(output: int, written: int, said: str) -> None:
    assert number_formats.written_text(output, written) == said


def test_bytes_read_are_said() -> None:
    assert number_formats.bytes_read_text(converted(bytes_read=5 * MIB)) == "5.00 MiB read"


def test_a_dry_run_has_no_speed_in_text_or_document() -> None:
    """The document had one, of bytes that nobody wrote; the summary had none."""
    wrote = converted(bytes_written=10**9, output_bytes=10**9)
    assert written_gb_per_s(wrote, 2.0) == 0.5
    dry = replace(wrote, dry_run=True)
    assert written_gb_per_s(dry, 2.0) == 0.0
    for report, has_speed in ((wrote, True), (dry, False)):
        done = Stopwatch().stop(report)
        assert (done.to_dict()["written_gb_per_s"] > 0) is has_speed
        assert ("/s" in cost_text(done)) is has_speed
