"""Writes ckptx/architecture/shapes.jsonl: the shapes of popular classes, as expressions over their config.

    python tools/build_shapes.py [--output PATH] [--workers 2] [--keep] [--all | ClassName ...]

Without names it measures the classes again that have a row, which takes about ten minutes; with `--all`, every class of
the table of architectures, which takes hours. That table must be there. With `--keep`, rows of classes that are not
named stay as they are: so a class is added.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout, installed or not
sys.path.insert(0, str(Path(__file__).parent))

from build_tables import SEEDS

from ckptx.architecture import shape_table, table
from ckptx.architecture.shape_rows import encode_shapes
from ckptx.architecture.shape_rules import ShapeRules
from ckptx.mapping.names import pattern_of

Row = tuple[str, str, "ShapeRules | None", float]  # class, prefix of its base model, rules, seconds


def row_of(class_name: str) -> Row:
    """The rules of one class."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    from shape_variants import learned

    from ckptx.architecture import meta_model

    started = time.perf_counter()
    known, cls = table.lookup(class_name), meta_model.known_class(class_name)
    if known is None or cls is None:
        return class_name, "", None, 0.0
    tied = {pattern_of(name) for pair in known.ties for spelling in pair.spellings for name in spelling}
    rules = None
    for seed in ({}, *(seed for start, seed in SEEDS if class_name.startswith(start))):
        try:
            rules = learned(cls, meta_model.default_builder(cls), seed, tied)
        except Exception as error:  # whatever the class raises: it has no row
            print(f"{class_name}: {type(error).__name__}: {error}", file=sys.stderr)
        if rules is not None:
            break
    return class_name, known.base_prefix, rules, time.perf_counter() - started


def main() -> None:
    """Measure every class in worker processes and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these classes (default: those that have a row)")
    parser.add_argument("--all", action="store_true", help="every class of the table of architectures")
    parser.add_argument("--output", type=Path, default=shape_table.PATH)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="leave the rows of other classes as they are")
    options = parser.parse_args()

    names = options.names or (table.class_names() if options.all else shape_table.class_names())
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        rows = pool.map(row_of, names, chunksize=8)
    rules = {name: (prefix, found) for name, prefix, found, _ in rows if found is not None and found.shapes}
    if options.keep:
        for name in shape_table.class_names():
            known, architecture = shape_table.shape_rules(name), table.lookup(name)
            if name not in names and known is not None and architecture is not None:
                rules[name] = architecture.base_prefix, known
    options.output.write_text(encode_shapes(rules, version("transformers")), encoding="utf-8")
    sizes = [
        text for _, known in rules.values() for shapes in known.shapes.values() for each in shapes for text in each
    ]
    print(
        f"{len(rules)} of {len(rows)} classes, {options.output.stat().st_size} bytes, "
        f"{sum(map(bool, sizes)) / max(1, len(sizes)):.1%} of sizes known, {time.perf_counter() - started:.0f} s"
    )
    slow = sorted(((seconds, name) for name, _, _, seconds in rows), reverse=True)
    print("slowest:", ", ".join(f"{name} {seconds:.1f} s" for seconds, name in slow[:5]))


if __name__ == "__main__":
    main()
