"""`python -m tests.fuzz`: runs cases for a while, or replays some; keeps what fails.

    python -m tests.fuzz --seconds 600 --seed 1        as long, from this seed on
    python -m tests.fuzz --seed 4711 --cases 1 -v      one case again, with what it does
    python -m tests.fuzz --replay tests/fuzz/corpus    cases that were kept

Exit 1 when a case failed. Nothing heavy is imported: torch and transformers are made to look absent.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from ckptx.cli.main import commands
from tests.fuzz.cases import Case, Judge
from tests.fuzz.seeds import seeds

_SMALL = 64 << 10


def main() -> int:
    """Runs, and says how many cases failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("FUZZ_SECONDS", "600")))
    parser.add_argument("--seed", type=int, default=None, help="of the first case; the others follow")
    parser.add_argument("--cases", type=int, default=None, help="how many, whatever the time")
    parser.add_argument("--replay", type=Path, nargs="*", help="files or directories of cases")
    parser.add_argument("--keep", type=Path, default=Path("tests/fuzz/found"), help="where failed cases go")
    parser.add_argument("-v", action="store_true", dest="verbose")
    options = parser.parse_args()
    for name in ("torch", "transformers"):
        sys.modules[name] = None  # type: ignore[assignment]
    commands()  # imports them all, once for every child
    known = seeds()
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as room:
        judge = Judge(Path(room), known["single"])
        judge.warm(known)
        return _replay(options, judge) if options.replay else _run(options, judge, known)


def _replay(options: argparse.Namespace, judge: Judge) -> int:
    paths = [each for path in options.replay for each in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    failed = 0
    for path in paths:
        fault, code = judge.fault(Case.read(path))
        failed += fault is not None
        if fault is not None or options.verbose:
            print(f"{path.name}: {fault or f'exit {code}'}")
    print(f"{len(paths)} cases replayed, {failed} failed; {judge.close()}")
    return min(failed, 1)


def _run(options: argparse.Namespace, judge: Judge, known: dict[str, dict[str, bytes]]) -> int:
    seed = time.time_ns() % 10**9 if options.seed is None else options.seed
    began, done, codes, failed = time.monotonic(), 0, Counter[int](), Counter[str]()
    print(f"first seed {seed}", flush=True)
    ended = _signalled()
    while not ended and (time.monotonic() - began < options.seconds if options.cases is None else done < options.cases):
        case = Case.of_seed(seed, known)
        fault, code = judge.fault(case)
        codes[code] += 1
        if options.verbose:
            print(f"{seed}: {case.command}: {fault or f'exit {code}'}")
        if fault is not None:
            kind = f"{case.command.split()[0]}: {fault[:60]}"
            failed[kind] += 1
            if failed[kind] <= 3:
                print(f"FAILED seed {seed}: ckptx {case.command}: {fault}", flush=True)
                options.keep.mkdir(parents=True, exist_ok=True)
                if sum(map(len, case.files.values())) < _SMALL:
                    case.write(options.keep / f"{seed}.json")
        seed, done = seed + 1, done + 1
    seconds = time.monotonic() - began
    said = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
    print(f"{done} cases in {seconds:.0f} s ({done / seconds:.0f} a second, {_processor():.0f} s of CPU); exits {said}")
    print(f"{judge.close()}; {failed.total()} failed")
    return 1 if failed else 0


def _signalled() -> list[int]:
    """The signals that asked for an end, as they come: the case that runs is finished, and what was done is said."""
    heard: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, _: heard.append(number))
    return heard


def _processor() -> float:
    """Seconds of CPU of this process and of every child that ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


if __name__ == "__main__":
    sys.exit(main())
