"""Under torchrun each process judges what its rank says, files are written once, and all end with the same code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
# Notes what it ends with: torchrun ends with SIGTERM whoever is still leaving when the first one has left.
_NOTING = """
import os
from pathlib import Path
from ckptx.cli.main import main
try:
    main()
except SystemExit as ended:
    Path(os.environ["ENDED"], os.environ["RANK"]).write_text(str(ended.code))
    raise
"""


def launched(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Two processes of `ckptx robustness llama_tiny`; one that has ended waits for the other."""
    (tmp_path / "ended").mkdir()
    (tmp_path / "noting.py").write_text(_NOTING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    command += [str(tmp_path / "noting.py"), "robustness", "llama_tiny", *arguments]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "ENDED": str(tmp_path / "ended")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_all_phases_pass_and_only_rank_0_speaks(tmp_path: Path) -> None:
    ran = launched(tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("PASSED: llama_tiny, 8 phases") == 1
    assert "one rank: not run, requires 1 ranks" in ran.stdout
    assert "Traceback" not in ran.stderr
    assert not list(tmp_path.glob("ckptx-robustness-*"))


def test_a_fault_fails_on_every_rank(tmp_path: Path) -> None:
    ran = launched(tmp_path, "--inject", "rng_stale")
    assert ran.stdout.count("FAILED: llama_tiny: resume (rng") == 1
    assert {each.name: each.read_text() for each in (tmp_path / "ended").iterdir()} == {"0": "1", "1": "1"}
