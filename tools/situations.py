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
terminal, and `ckptx verify` finds the output of a successful run equal to its source. Long messages are shortened at
the end.

"""


def main() -> int:
    """Run the cases and write the page; return 1 if a case did not end as required."""
    load_all()
    rows, num_passed, num_failed = [], Counter[str](), 0  # passed: by area
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
    text = text if len(text) <= 200 else f"{text[:197]}..."
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
