"""Write the tensor shapes of popular classes, as expressions over their config, to ckptx/architecture/models/.

    python tools/build_shapes.py [--workers 2] [model type or class ...]

`tools/classes_with_shapes.txt` lists the classes to measure. The shapes in a file depend on this list, the transformers
version and the corrections, and not on the previous contents of the file. Arguments restrict the run to the files of
these model types, or to those of the model types of these classes; without arguments it takes about ten minutes. Run
`build_tables` first: it writes the files with the names.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout, installed or not
sys.path.insert(0, str(Path(__file__).parent))

from build_tables import config_seeds, known_sections, silence, write_if_changed
from model_file_writer import encode_model, encode_shapes

from ckptx.architecture import class_table, model_files
from ckptx.architecture.shape_rules import ShapeRules
from ckptx.mapping.names import pattern_of

CLASSES = Path(__file__).with_name("classes_with_shapes.txt")


class MeasuredShapes(NamedTuple):
    """The result for one class.

    Attributes:
        class_name: Name of the class.
        base_prefix: Prefix of its base model; empty if it has none.
        rules: Shape rules of the class; None if they are unknown.
        seconds: Time that the measurement took.
    """

    class_name: str
    base_prefix: str
    rules: ShapeRules | None
    seconds: float


def measure_class(class_name: str) -> MeasuredShapes:
    """Derive the shape rules of one class."""
    from shape_derivation import derive_shapes

    from ckptx.architecture.introspection import meta_model

    started = time.perf_counter()
    known, cls = class_table.lookup(class_name), meta_model.find_class(class_name)
    if known is None or cls is None:
        return MeasuredShapes(class_name, "", None, 0.0)
    tied = {pattern_of(name) for pair in known.ties for naming in pair.namings for name in naming}
    rules = None
    for seed in config_seeds(known.model_type):
        try:
            rules = derive_shapes(cls, meta_model.default_config_builder(cls), seed, tied)
        except Exception as error:  # any error of the class means that it has no rules
            print(f"{class_name}: {type(error).__name__}: {error}", file=sys.stderr)
        if rules is not None:
            break
    return MeasuredShapes(class_name, known.base_prefix, rules, time.perf_counter() - started)


def classes_to_measure() -> list[str]:
    """Return the classes in `tools/classes_with_shapes.txt`."""
    lines = CLASSES.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def write_shapes(rules: Mapping[str, tuple[str, ShapeRules]], model_types: Collection[str]) -> int:
    """Replace the shapes in the files of model types, and return the number of changed files.

    Args:
        rules: Class -> prefix of its base model, and its shape rules; the file has no shapes of other classes.
        model_types: Model types whose classes were measured.
    """
    changed = 0
    for model_type in model_types:
        names = model_files.classes_of(model_type)
        source = model_files.source_of(names[0])
        assert source is not None
        shapes = encode_shapes({name: rules[name] for name in names if name in rules})
        sections = {**known_sections(model_type), **shapes}
        changed += write_if_changed(model_files.model_file(model_type), encode_model(source, sections))
    return changed


def main() -> None:
    """Measure classes in worker processes and write their shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types, or classes of them (default: all)")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    type_of_class, listed_classes = model_files.read_index()["classes"], classes_to_measure()
    model_types = {type_of_class.get(name, name) for name in options.names} or set(type_of_class.values())
    if model_types - set(type_of_class.values()):
        parser.error(
            f"neither a model type nor a class: {', '.join(sorted(model_types - set(type_of_class.values())))}"
        )
    names = [name for name in listed_classes if type_of_class.get(name) in model_types]
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.workers, initializer=silence) as pool:
        results = pool.map(measure_class, names, chunksize=8)
    rules = {
        each.class_name: (each.base_prefix, each.rules)
        for each in results
        if each.rules is not None and each.rules.shapes
    }
    changed = write_shapes(rules, model_types)
    sizes = [
        size for _, known in rules.values() for shapes in known.shapes.values() for shape in shapes for size in shape
    ]
    print(
        f"{len(rules)} of {len(results)} classes, {changed} files changed, "
        f"{sum(map(bool, sizes)) / max(1, len(sizes)):.1%} of sizes known, {time.perf_counter() - started:.0f} s"
    )
    slow = sorted(results, key=lambda each: -each.seconds)
    print("slowest:", ", ".join(f"{each.class_name} {each.seconds:.1f} s" for each in slow[:5]))
    faults = [f"{name} is not in {model_files.INDEX_FILE.name}" for name in listed_classes if name not in type_of_class]
    faults += [f"{name} cannot be measured" for name in names if name not in rules]
    if faults:
        sys.exit("\n".join(f"tools/{CLASSES.name}: {fault}" for fault in faults))


if __name__ == "__main__":
    main()
