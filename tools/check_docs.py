"""Run the commands and programs in README.md, CONTRIBUTING.md and docs/, each page in a temporary directory.

    python tools/check_docs.py [--list] [--write] [page ...]

The language of a fence decides how its block is checked:

    sh          run as written; every command must exit with 0
    console     a session: each line that begins with `$ ` is run; it must exit with 0 and print the lines below it,
                except for numbers that depend on the machine, such as seconds
    python      run as a program, and checked by mypy
    text, json  not run

A block that cannot run here has `<!-- not run: REASON -->` on the line above it; the summary lists these blocks with
their reasons. `--write` replaces the output in a `console` block by what its commands print now.

The blocks of a page run in order and find the checkpoints of `docs_checkpoints.py` in their directory.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
RUN = ("sh", "console", "python")  # languages whose blocks are run
NOT_RUN = ("text", "json")
_FENCE = re.compile(r"( *)(`{3,})(\w*)\s*")
_REASON = re.compile(r"\s*<!-- not run: (.+) -->\s*")
_BLOCK_TIMEOUT = 900  # seconds

# Output that depends on the machine, each with its replacement: time, throughput, memory. Lines that match
# `_ROUNDING` also have numbers that depend on the rounding of CPU kernels.
_MACHINE_DEPENDENT = (
    (re.compile(r"[\d.]+ s\b"), "T s"),
    (re.compile(r"[\d.]+ [KMG]?i?B/s"), "V"),
    (re.compile(r"(peak memory[a-z ]*) [\d.]+ \w+"), r"\1 M"),
)
_ROUNDING = re.compile(r"(logits|loss|gradients) ")
_NUMBER = re.compile(r"[\w.]+\.weight(?= at )|\d[\d.]*(e-?\d+)?")


class Block(NamedTuple):
    """A fenced block of a page.

    Attributes:
        page: Path of the page in the repository.
        line: Line number of its opening fence, from 1.
        language: Language after the fence.
        text: Lines between the fences, without the indentation of the fence.
        reason: Reason in the comment above the block why it is not run; empty if there is no such comment.
    """

    page: str
    line: int
    language: str
    text: str
    reason: str = ""

    @property
    def is_run(self) -> bool:
        """Return True if the checker runs the block."""
        return self.language in RUN and not self.reason

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """Yield every fenced block of a page, without the indentation of its fence."""
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        fence = _FENCE.fullmatch(lines[index])
        index += 1
        if fence is None:
            continue
        indent, ticks, language = fence.groups()
        begin = index
        while index < len(lines) and lines[index].strip() != ticks:
            index += 1
        reason = _REASON.fullmatch(lines[begin - 2]) if begin > 1 else None
        body = "".join(f"{line.removeprefix(indent)}\n" for line in lines[begin:index])
        yield Block(page, begin, language, body, reason[1] if reason else "")
        index += 1


def commands_of(session: str) -> list[tuple[str, str]]:
    """Return (command, its output on the page) for each command of a session; lines before the first are skipped."""
    found: list[tuple[str, str]] = []
    for line in session.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif found:
            command, printed = found[-1]
            found[-1] = command, f"{printed}{line}\n"
    return [(command, printed.strip("\n")) for command, printed in found]


def without_numbers(printed: str) -> str:
    """Return the output of a command with placeholders for the numbers that depend on the machine."""
    lines = []
    for line in printed.strip("\n").splitlines():
        for pattern, replacement in _MACHINE_DEPENDENT:
            line = pattern.sub(replacement, line)
        lines.append(_NUMBER.sub("N", line) if _ROUNDING.match(line) else line)
    return "\n".join(re.sub(r"  +", "  ", line) for line in lines)


def run(block: Block, directory: Path) -> str:
    """Run a block in a directory; return a description of the fault, empty if there is none."""
    if block.language == "sh":
        return _fault(["bash", "-euo", "pipefail", "-c", block.text], directory)
    if block.language == "python":
        return _fault([sys.executable, "-c", block.text], directory)
    return run_session(block.text, directory)[0]


def run_session(session: str, directory: Path) -> tuple[str, str]:
    """Run the commands of a session.

    Returns:
        The faults of the session, empty if there are none; and the session with the current output of its commands.
        Output that differs only in numbers that depend on the machine stays as written.
    """
    faults, current_parts = [], []
    for command, expected in commands_of(session):
        process = _run_process(["bash", "-euo", "pipefail", "-c", command], directory)
        printed = process.stdout.strip("\n")
        if process.returncode:
            return f"{command}\nended with {process.returncode}\n{process.stdout}", session
        if without_numbers(printed) != without_numbers(expected):
            faults.append(f"{command}\nprinted\n{process.stdout}\nthe page has\n{expected}")
        else:
            printed = expected
        current_parts.append(f"$ {command}\n" + (f"{printed}\n" if printed else ""))
    blank = "\n" if "\n\n$ " in session else ""
    return "\n".join(faults), blank.join(current_parts)


def _fault(command: list[str], directory: Path) -> str:
    process = _run_process(command, directory)
    return f"ended with {process.returncode}\n{process.stdout}" if process.returncode else ""


def _run_process(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    settings = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_BLOCK_TIMEOUT,
    )


def run_and_write(block: Block, directory: Path) -> str:
    """Run a session and replace the output in its page by the current one.

    Returns:
        A description of the fault: a command failed, or the session is not unique in its page; empty if there is none.
    """
    fault, session = run_session(block.text, directory)
    if session == block.text:
        return fault
    path = ROOT / block.page
    text = path.read_text(encoding="utf-8")
    if text.count(block.text) != 1:
        return f"{fault}\ncannot write it: the same text is in the page {text.count(block.text)} times"
    path.write_text(text.replace(block.text, session), encoding="utf-8")
    print(f"{block} has new output")
    return ""


def type_errors(blocks: list[Block], directory: Path) -> str:
    """Return the errors that mypy reports for Python blocks; empty if there are none.

    Args:
        blocks: The blocks.
        directory: Directory for the programs.
    """
    for number, block in enumerate(blocks):
        page_name = block.page.replace("/", "_").removesuffix(".md")
        (directory / f"{page_name}_{block.line}_{number}.py").write_text(block.text, encoding="utf-8")
    settings = ["--strict", "--config-file", str(ROOT / "pyproject.toml")]
    files = sorted(str(path) for path in directory.glob("*.py"))
    process = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, *files], cwd=ROOT, capture_output=True, text=True
    )
    return process.stdout + process.stderr if process.returncode else ""


def main() -> int:
    """Run the blocks of the pages; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=PAGES, help=f"{', '.join(PAGES)} [default: all]")
    parser.add_argument("--list", action="store_true", help="list the blocks; run nothing")
    parser.add_argument("--write", action="store_true", help="replace the output in the pages by the current output")
    options = parser.parse_args()

    blocks = [block for page in options.pages for block in blocks_of(page, (ROOT / page).read_text(encoding="utf-8"))]
    skipped = [block for block in blocks if block.language in RUN and block.reason]
    num_faults = 0
    with tempfile.TemporaryDirectory(prefix="ckptx-docs-") as work:
        checkpoints, programs_directory = Path(work, "checkpoints"), Path(work, "programs")
        if not options.list:
            sys.path.insert(0, str(Path(__file__).parent))
            from docs_checkpoints import write_checkpoints  # imports torch, which --list does not need

            write_checkpoints(checkpoints)
            programs_directory.mkdir()
        for block in filter(lambda block: block.is_run, blocks):
            started, directory, fault = time.perf_counter(), Path(work, block.page.replace("/", "_")), ""
            if not options.list:
                if not directory.exists():
                    shutil.copytree(checkpoints, directory, copy_function=os.link)
                if options.write and block.language == "console":
                    fault = run_and_write(block, directory)
                else:
                    fault = run(block, directory)
            num_faults += bool(fault)
            prefix = (
                "" if options.list else f"{time.perf_counter() - started:6.1f} s  {'FAULT' if fault else 'ok   '}  "
            )
            print(f"{prefix}{block} {block.language}{chr(10) if fault else ''}{fault}", flush=True)
        programs = [block for block in blocks if block.is_run and block.language == "python"]
        if programs and not options.list:
            fault = type_errors(programs, programs_directory)
            num_faults += bool(fault)
            print(f"mypy: {fault or 'ok'}")
    for block in skipped:
        print(f"not run: {block} {block.language}: {block.reason}")
    print(f"{sum(block.is_run for block in blocks)} blocks run, {num_faults} faults, {len(skipped)} not run")
    return bool(num_faults)


if __name__ == "__main__":
    sys.exit(main())
