"""Writes shapes into ckptx/architecture/models/: those of popular classes, as expressions over their config.

    python tools/build_shapes.py [--workers 2] [--all | model type or class ...]

Without names it measures the classes again of which shapes are known, which takes about ten minutes; with `--all`,
every class, which takes hours. A class that is named is added; what is known of others of its model type stays. The
files must be there: see `build_tables`.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout, installed or not
sys.path.insert(0, str(Path(__file__).parent))

from build_tables import known_sections, starts, write_if_new
from model_file_writer import encode_model, encode_shapes

from ckptx.architecture import model_files, table
from ckptx.architecture.shape_rules import ShapeRules
from ckptx.mapping.names import pattern_of

Row = tuple[str, str, "ShapeRules | None", float]  # class, prefix of its base model, rules, seconds


def row_of(class_name: str) -> Row:
    """The rules of one class."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    from shape_variants import learned

    from ckptx.architecture.introspection import meta_model

    started = time.perf_counter()
    known, cls = table.lookup(class_name), meta_model.known_class(class_name)
    if known is None or cls is None:
        return class_name, "", None, 0.0
    tied = {pattern_of(name) for pair in known.ties for naming in pair.namings for name in naming}
    rules = None
    for seed in starts(known.model_type):
        try:
            rules = learned(cls, meta_model.default_builder(cls), seed, tied)
        except Exception as error:  # whatever the class raises: it has no row
            print(f"{class_name}: {type(error).__name__}: {error}", file=sys.stderr)
        if rules is not None:
            break
    return class_name, known.base_prefix, rules, time.perf_counter() - started


def write_shapes(rules: Mapping[str, tuple[str, ShapeRules]], measured: Collection[str]) -> int:
    """Writes what was found into the files of the model types; how many of them changed.

    Args:
        rules: Per class the prefix of its base model, and its rules.
        measured: Classes that were looked at, with or without rules; what is known of others stays.
    """
    by_type: dict[str, dict[str, tuple[str, ShapeRules]]] = {}
    types = model_files.index()["classes"]
    for model_type in {types[name] for name in measured}:
        found = by_type.setdefault(model_type, {})
        for name in model_files.classes_of(model_type):
            known, architecture = table.shape_rules(name), table.lookup(name)
            if name in rules:
                found[name] = rules[name]
            elif name not in measured and known is not None and architecture is not None:
                found[name] = architecture.base_prefix, known
    changed = 0
    for model_type, found in by_type.items():
        source = model_files.source_of(model_files.classes_of(model_type)[0])
        assert source is not None
        sections = {**known_sections(model_type), **encode_shapes(found)}
        changed += write_if_new(model_files.file_of(model_type), encode_model(source, sections))
    return changed


def main() -> None:
    """Measures classes in worker processes and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types or classes (default: those whose shapes are known)")
    parser.add_argument("--all", action="store_true", help="every class")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    every = model_files.class_names()
    names = every if options.all else [name for name in every if table.shape_rules(name) is not None]
    if options.names:
        names = [each for name in options.names for each in (model_files.classes_of(name) or [name])]
    if set(names) - set(every):
        parser.error(f"neither a model type nor a class: {', '.join(sorted(set(names) - set(every)))}")
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        rows = pool.map(row_of, names, chunksize=8)
    rules = {name: (prefix, found) for name, prefix, found, _ in rows if found is not None and found.shapes}
    changed = write_shapes(rules, set(names))
    sizes = [
        text for _, known in rules.values() for shapes in known.shapes.values() for each in shapes for text in each
    ]
    print(
        f"{len(rules)} of {len(rows)} classes, {changed} files changed, "
        f"{sum(map(bool, sizes)) / max(1, len(sizes)):.1%} of sizes known, {time.perf_counter() - started:.0f} s"
    )
    slow = sorted(((seconds, name) for name, _, _, seconds in rows), reverse=True)
    print("slowest:", ", ".join(f"{name} {seconds:.1f} s" for seconds, name in slow[:5]))


if __name__ == "__main__":
    main()
