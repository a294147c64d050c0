"""What a recipe gives as text to be matched or filled in: patterns that never end, and numbers with a width."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ckptx.errors import UsageError
from ckptx.robustness_suite import losses
from ckptx.robustness_suite.commands import fill_placeholders, find_placeholders, split_command
from ckptx.robustness_suite.losses import check_losses, read_losses
from ckptx.runtime.training.recipe import TrainerBlock
from tests.robustness_suite.test_foreign_trainer import run

ENDLESS = (
    r"(?P<step>(\w|\s|\.)+)+ LOSS (?P<loss>\S+)",
    r"(?P<step>(a+)+)(?P<loss>b)",
    r"(?P<step>(a|a)+)(?P<loss>b)",
    r"(?P<step>(a*)*)(?P<loss>b)",
    r"(?P<step>(?:a|aa|aaa)+)(?P<loss>b)",
    r"(?i)(?P<step>([^b]+)+)(?P<loss>b)",
    r"(?P<step>(?:(?:a+)?)+)(?P<loss>b)$",
    r"(?P<step>(?:.*a){30})(?P<loss>b)",
)
LINES = ("a" * 64, "step 1 loss 2.0\n" + "a" * 64 + "\nstep 2 loss 3.0", "\x1b[1m" + "a" * 200)


def block(pattern: str) -> TrainerBlock:
    """A trainer whose losses are in what it prints."""
    return TrainerBlock(command="x", losses="log", losses_kind="regex", pattern=pattern)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("pattern", "text"), product(ENDLESS, LINES))
def test_a_pattern_that_takes_for_ever_is_stopped(
    pattern: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_MATCH_SECONDS", 0.3)
    place = tmp_path / "log"
    place.write_text(text)
    begin = time.monotonic()
    with pytest.raises(
        UsageError, match=r"^trainer\.pattern: .* takes more than 0\.3 seconds to match .*stopped at line"
    ):
        read_losses(place, block(pattern))
    assert time.monotonic() - begin < 10


def test_the_limit_is_ten_seconds() -> None:
    assert losses._MATCH_SECONDS == 10


@pytest.mark.parametrize(
    "pattern",
    [
        "(", "(?P<step>", "*", "(?P<step>x)(?P<step>y)", "a{99999999999999999999}", "(" * 5000 + ")" * 5000, "[z-a]",
        "(?<=a+)b", "\\", "(?P<1>x)", "(?au)x", "(?L)x",
    ],
)  # fmt: skip
def test_what_is_no_pattern_is_refused_with_its_key(pattern: str) -> None:
    with pytest.raises(UsageError, match=r"^trainer\.pattern: "):
        check_losses(block(pattern))


def test_a_pattern_that_matches_gives_what_it_gave(tmp_path: Path) -> None:
    place = tmp_path / "log"
    place.write_text("".join(f"\x1b[32mstep {step} loss {step / 8}\x1b[0m, \n" for step in range(3000)))
    found = read_losses(place, block(r"step (?P<step>\d+) loss (?P<loss>[\d.]+)"))
    assert found.by_step == {step: step / 8 for step in range(3000)}


# ------------------------------------------------------------------------------------------------------------ widths

VALUES = {"step": "12", "steps": "6", "save_at": "3", "total_steps": "100", "out": "/o", "resume": "", "python": "p"}
NUMBERS = ("step", "steps", "save_at", "total_steps")
WIDTHS = ("", ":d", ":1d", ":3d", ":07d", ":7", ":07", ":20d", ":099d")
NO_WIDTHS = (
    ":x", ":07x", ":.2f", ":>7", ":*^9d", ":+d", ":,d", ":0100d", ":00d", ":999999999d", ": d", "!r", "!s:7", ".real",
    "[0]", ":{steps}d", ":_d", ":#x", ":e", ":%", ":c", ":n", ":07d ",
)  # fmt: skip


@pytest.mark.parametrize(("name", "width"), product(NUMBERS, WIDTHS))
def test_a_number_of_steps_may_have_a_width(name: str, width: str) -> None:
    text = f"iter_{{{name}{width}}}/x"
    assert fill_placeholders(text, VALUES, "trainer.checkpoint") == f"iter_{format(int(VALUES[name]), width[1:])}/x"
    assert find_placeholders(text) == {name}


@pytest.mark.parametrize(("name", "width"), product(("step", "steps"), NO_WIDTHS))
def test_another_format_is_refused_with_its_key(name: str, width: str) -> None:
    if "{" in width:  # braces in braces are no placeholder, as ever
        assert fill_placeholders(f"{{{name}{width}}}", VALUES, "trainer.checkpoint") == f"{{{name}:6d}}"
        return
    with pytest.raises(UsageError, match=r"^trainer\.checkpoint: the placeholder .* which must be a width below 100"):
        fill_placeholders(f"iter_{{{name}{width}}}", VALUES, "trainer.checkpoint")


@pytest.mark.parametrize(("name", "form"), product(("out", "resume", "python"), (":07d", ":7", "!r", ".x", ":x")))
def test_a_text_has_no_width(name: str, form: str) -> None:
    with pytest.raises(UsageError, match=r"^trainer\.command: the placeholder .* has a format, which only {save_at}, "):
        split_command(f"run {{{name}{form}}}", VALUES, "trainer.command")


@pytest.mark.parametrize("form", [":d", ":07d", ":4"])
def test_an_unknown_name_with_a_width_is_refused(form: str) -> None:
    with pytest.raises(UsageError, match=r"{stp} is unknown; did you mean {step}\?"):
        fill_placeholders(f"{{stp{form}}}", VALUES, "trainer.checkpoint")


@pytest.mark.parametrize(
    "text", ['{"k": 1}', "{layers:[1,2]}", "{a: 1}", "{0}", "{}", "{{", "{lr:1e-3}", "{x!r}", "{a.b}"]
)
def test_other_braces_stay(text: str) -> None:
    assert fill_placeholders(text, VALUES, "trainer.command") == text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [1, 2, 7, 20])
@pytest.mark.parametrize("form", [":0{}d", ":0{}"])
def test_a_trainer_with_padded_steps_is_judged(tmp_path: Path, width: int, form: str) -> None:
    keys: dict[str, Any] = {
        "command": "{python} {recipe}/stub_trainer.py --out {out} --steps {steps:03d} --total {total_steps} --save-at "
        f"{{save_at}} {{resume}} --width {width}",
        "checkpoint": f"step-{{step{form.format(width)}}}",
    }
    outcome = run(tmp_path, **keys)
    assert outcome.ok
