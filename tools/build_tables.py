"""Write ckptx/architecture/models/ and the index of classes from meta models of the installed transformers.

    python tools/build_tables.py [--workers 2] [model type or class ...]

The output depends only on the transformers version and the corrections. Arguments restrict the run to the files of
these model types, or to those of the model types of these classes; without arguments, files of model types that no
longer exist are removed. A class that needs its real config.json (it cannot be built from the default config, or
`shared_ties` finds no rule for its ties between numbered layers) gets a row with the reason;
`ckptx.architecture.lookup` builds such a class when a checkpoint has it. The tensor names of a row are those of the
default config and of its variants (`config_variants`). The shapes in the files stay as they are: `build_shapes` writes
them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout, installed or not
sys.path.insert(0, str(Path(__file__).parent))

from model_file_writer import encode_index, encode_model, encode_rows

from ckptx.architecture import model_files
from ckptx.architecture.architecture import Architecture
from ckptx.architecture.class_decoding import ClassRecord
from ckptx.architecture.corrections import corrections_of
from ckptx.architecture.transformers_version import source_digest

if TYPE_CHECKING:
    from ckptx.architecture.introspection.meta_model import MetaModelNames
    from ckptx.architecture.structure import Structure

# Config keys of composites for language models, and model types of the language models that composites are published
# with.
TEXT_KEYS = ("decoder", "encoder", "text_config", "text_encoder", "vlm_config")
TEXT_TYPES = ("gemma", "gemma2", "llama", "mistral", "phi3", "qwen2", "qwen3")


def class_names() -> list[str]:
    """Return every concrete model class that transformers exports, sorted."""
    import transformers
    from transformers import PreTrainedModel

    folder = Path(transformers.__file__).parent / "models"
    found = set()
    for path in sorted(folder.glob("*/modeling_*.py")):
        try:
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        except ImportError:
            continue  # it needs a package that is not installed, and a checkpoint of its classes needs it, too
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, PreTrainedModel) and not _is_abstract(name):
                found.add(name)
    return sorted(name for name in found if isinstance(getattr(transformers, name, None), type))


def _is_abstract(name: str) -> bool:
    return "pretrained" in name.lower()


class MeasuredClass(NamedTuple):
    """The result for one class.

    Attributes:
        row: Record of the class, a row of the tables.
        directory: Directory of transformers that contains its code.
        seconds: Time that the measurement took.
    """

    row: ClassRecord
    directory: str
    seconds: float


def silence() -> None:
    """Disable warnings and log records in a worker process."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)


def measure_class(class_name: str) -> MeasuredClass:
    """Derive the row of one class, and measure how long it takes."""
    from ckptx.architecture.introspection import meta_model

    started = time.perf_counter()
    row, cls = derive_row(class_name), meta_model.find_class(class_name)
    assert cls is not None, class_name
    return MeasuredClass(row, cls.__module__.split(".")[2], time.perf_counter() - started)


def model_types() -> dict[str, str]:
    """Return every concrete model class that transformers exports, with the model type of its config."""
    from ckptx.architecture.introspection import meta_model

    classes = {name: meta_model.find_class(name) for name in class_names()}
    return {name: str(getattr(cls.config_class, "model_type", "")) for name, cls in classes.items() if cls is not None}


def find_unknown_names(names: Iterable[str]) -> list[str]:
    """Return the names that are neither a model type nor a class of transformers, without importing its models."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    index = model_files.read_index()["classes"]
    known = {*CONFIG_MAPPING_NAMES, *dir(transformers), *index, *index.values()}
    return sorted(set(names) - known)


def config_seeds(model_type: str) -> list[dict[str, Any]]:
    """Return the configs, as dicts, to try for a model type: its defaults ({}), then those of the corrections."""
    return [{}, *(dict(row.config) for row in corrections_of(model_type).defaults)]


def derive_row(class_name: str) -> ClassRecord:
    """Return the row of a class from its meta model, or a row with the reason if the defaults do not determine it."""
    from config_variants import names_of_variants
    from shared_ties import derive_shared_layers, is_numbered

    from ckptx.architecture.introspection import meta_model

    cls = meta_model.find_class(class_name)
    assert cls is not None, class_name
    builder = meta_model.default_config_builder(cls)
    model_type = str(getattr(cls.config_class, "model_type", ""))
    known, seed = None, {}
    for seed in config_seeds(model_type):
        try:
            known = meta_model.derive_architecture(cls, builder, seed, known_from="table")
            break
        except Exception:  # any error of the class means the next seed, or a row without names
            continue
    if known is None:
        return ClassRecord(class_name, model_type, "cannot be built from the default config", None)
    shared = None
    if any(map(is_numbered, known.ties)):
        found = derive_shared_layers(cls, builder, known)
        if found is None:
            return ClassRecord(class_name, known.model_type, "ties between numbered layers", None)
        shared, seed = found
        known = dataclasses.replace(known, ties=tuple(pair for pair in known.ties if not is_numbered(pair)))
    sub_models, names, structures = _measure_text_models(cls, builder, known)
    variant_names = names_of_variants(cls, builder, seed, names)
    structures = {text: each.with_conversions_of(variant_names.structure) for text, each in structures.items()}
    return ClassRecord(
        class_name, known.model_type, "", variant_names.applied_to(known), sub_models, structures, shared
    )


def _measure_text_models(
    cls: type, builder: Callable[[dict[str, Any]], Any], known: Architecture
) -> tuple[dict[str, tuple[str, ...]], MetaModelNames, dict[str, Structure]]:
    """Measure a composite with other text models.

    Returns:
        Config key -> the text model types whose models differ from `known` only in names and structure, for every key
        in `TEXT_KEYS` that accepts any type; the names with all of them; text model type -> structure, where it is not
        that of `known`.
    """
    from ckptx.architecture.introspection import meta_model

    measured: dict[str, tuple[str, ...]] = {}
    names = meta_model.MetaModelNames.from_architecture(known)
    structures: dict[str, Structure] = {}
    config = builder({})
    for key in sorted(getattr(config, "sub_configs", {})):
        sub_config = getattr(config, key, None)
        if key not in TEXT_KEYS or sub_config is None or config.sub_configs[key].__name__ != "AutoConfig":
            continue
        types = [str(sub_config.model_type)]
        for model_type in TEXT_TYPES if known.ties and key == "text_config" else ():
            try:
                other = meta_model.derive_architecture(
                    cls, builder, {key: {"model_type": model_type}}, known_from="table"
                )
            except Exception:  # a text model that does not fit is not listed
                continue
            if meta_model.MetaModelNames.from_architecture(known).applied_to(other) == known:
                types.append(model_type)
                names = names._replace(
                    patterns=names.patterns | other.name_patterns, ignored=names.ignored | set(other.ignored)
                )
                if other.structure != known.structure:
                    structures[model_type] = other.structure
        measured[key] = tuple(sorted(set(types)))
    return measured, names, structures


def write_models(measured: Iterable[MeasuredClass], models: Path) -> int:
    """Write the files of model types, and return the number of changed files.

    Args:
        measured: All classes of these model types.
        models: The directory `models` of the transformers package.
    """
    by_type: dict[str, list[MeasuredClass]] = {}
    for each in measured:
        by_type.setdefault(each.row.model_type, []).append(each)
    changed = 0
    for model_type, found in by_type.items():
        directories = sorted({each.directory for each in found})
        source = {"directories": directories, "digest": source_digest(models, directories)}
        sections = {**known_sections(model_type), **encode_rows(each.row for each in found)}
        changed += write_if_changed(model_files.model_file(model_type), encode_model(source, sections))
    return changed


def known_sections(model_type: str) -> dict[str, Mapping[str, Any]]:
    """Return the sections of the existing file of a model type; each is empty if there is no file."""
    path = model_files.model_file(model_type)
    known = json.loads(path.read_bytes()) if path.exists() else {}
    return {name: known.get(name, {}) for name in model_files.FACT_SECTIONS}


def write_if_changed(path: Path, text: str) -> bool:
    """Write a file unless it has this text already; return True if it was written."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return True


def main() -> None:
    """Measure classes in worker processes and write the files of their model types."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types, or classes of them (default: all)")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    unknown_names = find_unknown_names(options.names)
    if unknown_names:
        parser.error(
            f"neither a model type nor a class of transformers {version('transformers')}: {', '.join(unknown_names)}; "
            "a class with custom code cannot be added to the tables"
        )
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.workers, initializer=silence) as pool:
        type_of_class = pool.apply(model_types)
        wanted_types = {type_of_class.get(name, name) for name in options.names} or set(type_of_class.values())
        if wanted_types - set(type_of_class.values()):
            parser.error(
                f"neither a model type nor a class: {', '.join(sorted(wanted_types - set(type_of_class.values())))}"
            )
        measured = pool.map(
            measure_class, [name for name, found in type_of_class.items() if found in wanted_types], chunksize=16
        )
    transformers = find_spec("transformers")
    assert transformers is not None and transformers.origin is not None
    changed = write_models(measured, Path(transformers.origin).parent / "models")
    known = {each.row.class_name: each.row.model_type for each in measured}
    if options.names:
        others = {
            name: found for name, found in model_files.read_index()["classes"].items() if found not in wanted_types
        }
        text = encode_index({**others, **known}, model_files.read_index()["transformers"])
    else:
        text = encode_index(known, version("transformers"))
        current_files = {model_files.model_file(found) for found in known.values()}
        for path in set(model_files.MODELS_DIR.glob("*.json")) - current_files:
            path.unlink()
    write_if_changed(model_files.INDEX_FILE, text)

    reasons = Counter(each.row.introspection_reason or "known" for each in measured)
    files = len({each.row.model_type for each in measured})
    seconds = time.perf_counter() - started
    print(f"{len(measured)} classes of {files} model types, {changed} files changed, {seconds:.0f} s")
    for reason, count in reasons.most_common():
        print(f"{count:6} {reason}")
    slow = sorted(measured, key=lambda each: -each.seconds)
    print("slowest:", ", ".join(f"{each.row.class_name} {each.seconds:.1f} s" for each in slow[:5]))


if __name__ == "__main__":
    main()
