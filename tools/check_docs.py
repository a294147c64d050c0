"""Runs what README.md, CONTRIBUTING.md and docs/ say, each page in a temporary directory of its own.

    python tools/check_docs.py [--list] [page ...]

What the fence of a block says decides what becomes of it:

    sh          run as it is written; every command of it has to end with 0
    console     a session: what stands behind `$ ` is run, and has to print what stands below, but for numbers that a
                machine decides, such as seconds
    python      run as a program, and held against mypy
    text, json  not run

A block that cannot run here has `<!-- not run: REASON -->` on the line above it; those are listed with their reason.

The blocks of a page run in order and find these beside them:

    model       the checkpoint of `make demo`
    MODEL       a small one of the same class
    step-1000   what a trainer might leave of MODEL: a DCP in float32 with optimizer state and no config
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
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
RUN = ("sh", "console", "python")
NOT_RUN = ("text", "json")
_FENCE = re.compile(r"( *)(`{3,})(\w*)\s*")
_REASON = re.compile(r"\s*<!-- not run: (.+) -->\s*")
_SECONDS_FOR_A_BLOCK = 900

# What a machine decides: time, memory, and how the kernels of a CPU round.
_MACHINE = (
    (re.compile(r"[\d.]+ s\b"), "T s"),
    (re.compile(r"[\d.]+ [KMG]?i?B/s"), "V"),
    (re.compile(r"(peak memory[a-z ]*) [\d.]+ \w+"), r"\1 M"),
)
_ROUNDING = re.compile(r"(logits|loss|gradients) ")
_NUMBER = re.compile(r"[\w.]+\.weight(?= at )|\d[\d.]*(e-?\d+)?")


class Block(NamedTuple):
    """A fenced block: its page, the line of its fence, its language, its text, and why it is not run if so."""

    page: str
    line: int
    language: str
    text: str
    reason: str = ""

    @property
    def is_run(self) -> bool:
        """Whether it is one that the checker runs."""
        return self.language in RUN and not self.reason

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """Every fenced block of a page, without the indentation of its fence."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        opened = _FENCE.fullmatch(lines[at])
        at += 1
        if opened is None:
            continue
        indent, ticks, language = opened.groups()
        begin = at
        while at < len(lines) and lines[at].strip() != ticks:
            at += 1
        above = _REASON.fullmatch(lines[begin - 2]) if begin > 1 else None
        inside = "".join(f"{line.removeprefix(indent)}\n" for line in lines[begin:at])
        yield Block(page, begin, language, inside, above[1] if above else "")
        at += 1


def steps_of(session: str) -> list[tuple[str, str]]:
    """The commands of a session, each with what it prints."""
    found: list[tuple[str, str]] = []
    for line in session.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif found:
            command, printed = found[-1]
            found[-1] = command, f"{printed}{line}\n"
    return [(command, printed.strip("\n")) for command, printed in found]


def without_numbers(printed: str) -> str:
    """What a command prints, the same on every machine."""
    lines = []
    for line in printed.strip("\n").splitlines():
        for pattern, instead in _MACHINE:
            line = pattern.sub(instead, line)
        lines.append(_NUMBER.sub("N", line) if _ROUNDING.match(line) else line)
    return "\n".join(re.sub(r"  +", "  ", line) for line in lines)


def run(block: Block, directory: Path) -> str:
    """Runs a block in a directory; what is wrong, empty if nothing."""
    if block.language == "sh":
        return _fault(["bash", "-euo", "pipefail", "-c", block.text], directory)
    if block.language == "python":
        return _fault([sys.executable, "-c", block.text], directory)
    for command, expected in steps_of(block.text):
        done = _started(["bash", "-euo", "pipefail", "-c", command], directory)
        if done.returncode:
            return f"{command}\nended with {done.returncode}\n{done.stdout}"
        if without_numbers(done.stdout) != without_numbers(expected):
            return f"{command}\nprinted\n{done.stdout}\nthe page says\n{expected}"
    return ""


def _fault(command: list[str], directory: Path) -> str:
    done = _started(command, directory)
    return f"ended with {done.returncode}\n{done.stdout}" if done.returncode else ""


def _started(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    settings = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS_FOR_A_BLOCK,
    )


def write_checkpoints(directory: Path) -> None:
    """What pages find beside them, see above."""
    sys.path.insert(0, str(Path(__file__).parent))
    import demo_checkpoint
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import Qwen3Config, Qwen3ForCausalLM

    demo_checkpoint.main(directory / "model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True))
    model.to(torch.bfloat16).save_pretrained(directory / "MODEL")
    state = {name: value.float() for name, value in model.state_dict().items()}
    trained = {name: value.float() for name, value in model.named_parameters()}  # a tied one once
    moments = {
        name: {"exp_avg": torch.rand_like(value), "exp_avg_sq": torch.rand_like(value), "step": torch.tensor(1000.0)}
        for name, value in trained.items()
    }
    step = {"model": state, "optimizer": {"state": moments}, "train_state": {"step": torch.tensor(1000)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(step, checkpoint_id=directory / "step-1000", no_dist=True)


def types_fault(blocks: list[Block], directory: Path) -> str:
    """What mypy says of Python blocks."""
    for number, block in enumerate(blocks):
        where = block.page.replace("/", "_").removesuffix(".md")
        (directory / f"{where}_{block.line}_{number}.py").write_text(block.text, encoding="utf-8")
    settings = ["--strict", "--config-file", str(ROOT / "pyproject.toml")]
    files = sorted(str(path) for path in directory.glob("*.py"))
    done = subprocess.run([sys.executable, "-m", "mypy", *settings, *files], cwd=ROOT, capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""


def main() -> int:
    """Runs the blocks of the pages; 1 when one does not do what its page says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=PAGES, help=f"of {', '.join(PAGES)} (default: all)")
    parser.add_argument("--list", action="store_true", help="say what would be run and what not; run nothing")
    options = parser.parse_args()

    blocks = [block for page in options.pages for block in blocks_of(page, (ROOT / page).read_text(encoding="utf-8"))]
    left = [block for block in blocks if block.language in RUN and block.reason]
    faults = 0
    with tempfile.TemporaryDirectory(prefix="ckptx-docs-") as work:
        given, typed = Path(work, "given"), Path(work, "typed")
        if not options.list:
            write_checkpoints(given)
            typed.mkdir()
        for block in filter(lambda block: block.is_run, blocks):
            started, directory, fault = time.perf_counter(), Path(work, block.page.replace("/", "_")), ""
            if not options.list:
                if not directory.exists():
                    shutil.copytree(given, directory, copy_function=os.link)
                fault = run(block, directory)
            faults += bool(fault)
            took = "" if options.list else f"{time.perf_counter() - started:6.1f} s  {'FAULT' if fault else 'ok   '}  "
            print(f"{took}{block} {block.language}{chr(10) if fault else ''}{fault}", flush=True)
        programs = [block for block in blocks if block.is_run and block.language == "python"]
        if programs and not options.list:
            fault = types_fault(programs, typed)
            faults += bool(fault)
            print(f"mypy: {fault or 'ok'}")
    for block in left:
        print(f"not run: {block} {block.language}: {block.reason}")
    print(f"{sum(block.is_run for block in blocks)} blocks run, {faults} faults, {len(left)} not run")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
