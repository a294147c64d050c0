"""`python -m tests.fuzz.pickled`: compares pairs of pickled values for a while, and prints those that are judged wrong.

    FUZZ_SECONDS=600 python -m tests.fuzz.pickled --seed 1     as long, from this seed on
    python -m tests.fuzz.pickled --seed 4711 --pairs 1         one pair again

Exit 1 when a pair is judged wrong. The pairs are those of `tests.robustness_suite.pickle_values`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.robustness_suite.pickle_pairs import outcome_of, pair_of
from tests.robustness_suite.pickle_values import key_of, protocol_of

_SHOWN = 10


def main() -> int:
    """Runs, and says how many pairs were judged wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.pickled")
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("FUZZ_SECONDS", "600")))
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="seed of the first pair")
    parser.add_argument("--pairs", type=int, default=None, help="number of pairs, whatever the time")
    options = parser.parse_args()
    seed, began, faults = options.seed, time.monotonic(), 0
    kinds: Counter[bool | None] = Counter()
    print(f"first seed {seed}", flush=True)
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        while (
            time.monotonic() - began < options.seconds if options.pairs is None else seed < options.seed + options.pairs
        ):
            found = outcome_of(seed, Path(folder))
            kinds[found.are_equal] += 1
            if found.fault is not None:
                faults += 1
                if faults <= _SHOWN:
                    first, second, form = pair_of(seed)
                    keys = [ascii(key_of(each, protocol_of(form)))[:600] for each in (first, second)]
                    print(f"FAULT seed {seed}: {found.fault}", *keys, sep="\n    ", flush=True)
            seed += 1
    counts = f"{kinds[True]} equal, {kinds[False]} unequal, {kinds[None]} that cannot be written"
    print(f"{kinds.total()} pairs in {time.monotonic() - began:.0f} s: {counts}; {faults} judged wrong")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
