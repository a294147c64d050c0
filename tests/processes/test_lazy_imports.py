"""Imports that happen at once beside threads that could fork, and on first use otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import sys, threading
from ckptx.cli.signals import install_handlers
from ckptx.processes.imports import import_all_modules

install_handlers()
if sys.argv[1] == "another thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
import_all_modules()
print("ckptx.api.convert" in sys.modules)
"""


@pytest.mark.parametrize(("threads", "imports_all"), [("the thread of signals", False), ("another thread", True)])
def test_a_command_imports_what_it_needs(threads: str, imports_all: bool) -> None:
    """The thread of the command line that watches signals never forks."""
    result = subprocess.run([sys.executable, "-c", _PROGRAM, threads], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(imports_all)
