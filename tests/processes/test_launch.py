"""Ranks that die before there is a report: named, with what they printed last, and the others ended."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from ckptx.errors import EnvironmentProblem
from ckptx.processes import launch

RANK = """#!{python}
import os, sys, time
assert sys.argv[1:3] == ["-m", "ckptx.cli.rank"] and open(sys.argv[3]).read() == "order"
assert os.environ["WORLD_SIZE"] == "2" and os.environ["LOCAL_RANK"] == os.environ["RANK"] and os.environ["MASTER_PORT"]
if os.environ["RANK"] == "1":
    {body}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "sys.exit('no such device')",
            "rank 1 of 2 ended with code 1 and without a report; its stderr: no such device",
        ),
        ("os.kill(os.getpid(), 9)", "rank 1 of 2 ended with code -9 and without a report; its stderr: empty"),
    ],
)
def test_a_rank_that_dies_is_named_and_the_others_end(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(RANK.format(python=sys.executable, body=body))
    program.chmod(0o700)
    monkeypatch.setattr(launch.sys, "executable", str(program))
    monkeypatch.setattr(launch, "_GRACE_PERIOD", 0.2)
    begin = time.monotonic()
    with pytest.raises(EnvironmentProblem, match=f"^{said}$"):
        launch.launch("order", 2)
    assert time.monotonic() - begin < 20
