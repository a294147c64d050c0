"""Run every case of malformed input in tests/situations and write the results to docs/situations.md."""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
sys.path.insert(0, str(CHECKOUT))

from tests.situations import load_all  # noqa: E402 (run from a checkout)
from tests.situations.box import SITUATIONS, Runner, play  # noqa: E402 (run from a checkout)

_HEAD = """# Malformed input and expected errors

This page is written by `python tools/situations.py`, and the tests in `tests/situations` check every row. In each
situation the command ends in time with a documented exit code, an error is one line, nothing outside DST is created,
changed or removed, a failed run leaves nothing at DST or next to it, only printable text from the input reaches the
terminal, and `ckptx verify` finds the output of a successful run equal to its source.

SRC is a small model, usually a Llama, and each row states what differs from a valid checkpoint or
command. In the messages, `hf` is an HF checkpoint; `step`, `dcp` and `titan` are DCPs, `titan` with torchtitan's names;
`base` is the HF checkpoint of `--base`; `canary.txt` is a text file of the user. The column *output* is the first line
on stderr, or on stdout if there is none on stderr. Long lines are shortened in the middle.

"""


def main() -> int:
    """Run the cases and write the page; return 1 if a case did not end as required."""
    load_all()
    rows: list[str] = []
    num_passed, num_failed = Counter[str](), 0  # by area; in all areas
    runner = Runner()
    with tempfile.TemporaryDirectory(prefix="situations-") as work:
        for number, situation in enumerate(SITUATIONS):
            root = Path(work, str(number))
            root.mkdir()
            outcome = play(situation, root, runner)
            num_passed[situation.area] += not outcome.wrong
            num_failed += bool(outcome.wrong)
            for reason in outcome.wrong:
                print(f"{situation.area}: {situation.name}: {reason}", file=sys.stderr)
            rows.append(
                f"| {situation.area} | {_cell(situation.name)} | {outcome.exit} | {_cell(outcome.line, root)} |"
            )
    runner.close()
    counts = Counter(situation.area for situation in SITUATIONS)
    table = ["| area | situations | as expected |", "|---|---|---|"]
    table += [f"| {area} | {count} | {num_passed[area]} |" for area, count in counts.items()]
    table += [f"| total | {len(SITUATIONS)} | {sum(num_passed.values())} |"]
    rows = ["| area | situation | exit code | output |", "|---|---|---|---|", *rows]
    (CHECKOUT / "docs" / "situations.md").write_text(_HEAD + "\n".join(table) + "\n\n" + "\n".join(rows) + "\n")
    return int(num_failed > 0)


def _cell(text: str, root: Path | None = None) -> str:
    """Return text for a cell of a table: short, without times, with pipes and markup escaped.

    Args:
        text: The text.
        root: Directory to remove from paths in it; None if it has none.
    """
    if root is not None:
        text = text.replace(f"{root}/", "").replace(str(root), ".")
    text = re.sub(r"\d+(\.\d+)? s, .*", "", text)
    if len(text) > 240:  # the next step is at the end
        start, end = re.sub(r" \S{,30}$", "", text[:115]), re.sub(r"^\S{,30} ", "", text[-120:])
        text = f"{start} ... {end}"
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
