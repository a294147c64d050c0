"""Writes ckptx/architecture/table.jsonl: asks a meta model of every class of the installed transformers.

    python tools/build_tables.py [--output PATH] [--workers 2] [ClassName ...]

The output depends only on the transformers version. Classes that need their real config.json (defaults that cannot be
built, ties between numbered layers by no rule that `shared_ties` finds) get a row that says so;
`ckptx.architecture.find` builds those when they are met. The names of a row are those of the default config and of its
variants (`config_variants`).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import logging
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout, installed or not
sys.path.insert(0, str(Path(__file__).parent))

from ckptx.architecture.rows import Row, encode_table
from ckptx.architecture.spec import Architecture

if TYPE_CHECKING:
    from ckptx.architecture.meta_model import Names
    from ckptx.architecture.structure import Structure

TABLE = Path(__file__).parent.parent / "ckptx" / "architecture" / "table.jsonl"

# Config keys of sub-models that hold a language model, and the language models composites are published with.
TEXT_KEYS = ("decoder", "encoder", "text_config", "text_encoder", "vlm_config")
_ROPE = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
# Classes (by the start of their name) whose own defaults cannot be built, with the least that makes them
# build. The values choose sizes only; the names and ties are the same for every checkpoint of the class.
SEEDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AyaVision", {"vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16}}),
    ("Chameleon", {"vocabulary_map": {"<image>": 8711}}),
    ("CohereCompass", {"rope_parameters": _ROPE}),
    ("CohereCompass", {"text_config": {"rope_parameters": _ROPE}}),
    ("Dbrx", {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8, "clip_qkv": 8.0}}),
    ("DeepseekOcr2", {"text_config": {"mlp_layer_types": ["dense"] + ["sparse"] * 31}}),
    ("DeepseekOcr2Text", {"mlp_layer_types": ["dense"] + ["sparse"] * 31}),
    ("Dots1", {"n_routed_experts": 4, "n_shared_experts": 1}),
    ("Emu3", {"vocabulary_map": {"<image>": 8711}}),
    ("Esm", {"vocab_size": 33}),
    ("HunYuan", {"head_dim": 128}),
    ("HunYuanVL", {"text_config": {"head_dim": 128}}),
    ("Lfm2Moe", {"layer_types": ["conv", "full_attention"] * 16}),
    ("Ministral", {"head_dim": 128}),
    ("MoonshineStreaming", {"num_key_value_heads": 8}),
    ("Moshi", {"audio_vocab_size": 2048}),
    ("Nemotron", {"num_key_value_heads": 8}),
    ("ReformerModelWithLMHead", {"is_decoder": True}),
    ("T5GemmaEncoder", {"is_encoder_decoder": False}),
    ("Wav2Vec2BertForCTC", {"vocab_size": 32}),
    ("Wav2Vec2ConformerForCTC", {"vocab_size": 32}),
)
TEXT_TYPES = ("gemma", "gemma2", "llama", "mistral", "phi3", "qwen2", "qwen3")


def class_names() -> list[str]:
    """Every concrete model class that transformers exports, sorted."""
    import transformers
    from transformers import PreTrainedModel

    folder = Path(transformers.__file__).parent / "models"
    found = set()
    for path in sorted(folder.glob("*/modeling_*.py")):
        try:
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        except ImportError:
            continue  # its classes cannot be met without the same package
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, PreTrainedModel) and not _is_abstract(name):
                found.add(name)
    return sorted(name for name in found if isinstance(getattr(transformers, name, None), type))


def _is_abstract(name: str) -> bool:
    return "pretrained" in name.lower()


def row_of(class_name: str) -> tuple[Row, float]:
    """The table row of one class and the seconds it took."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    started = time.perf_counter()
    row = measured_row(class_name)
    return row, time.perf_counter() - started


def measured_row(class_name: str) -> Row:
    """Ask the meta model of a class; a class that its defaults do not determine says so."""
    from config_variants import names_of_variants
    from shared_ties import is_numbered, measured

    from ckptx.architecture import meta_model

    cls = meta_model.known_class(class_name)
    assert cls is not None, class_name
    builder = meta_model.default_builder(cls)
    model_type = str(getattr(cls.config_class, "model_type", ""))
    known, seed = None, {}
    for seed in ({}, *(seed for start, seed in SEEDS if class_name.startswith(start))):
        try:
            known = meta_model.derive(cls, builder, seed, origin="table")
            break
        except Exception:  # whatever the class raises: the next seed, or a row without names
            continue
    if known is None:
        return Row(class_name, model_type, "its defaults cannot be built", None)
    shared = None
    if any(map(is_numbered, known.ties)):
        found = measured(cls, builder, known)
        if found is None:
            return Row(class_name, known.model_type, "ties between numbered layers", None)
        shared, seed = found
        known = dataclasses.replace(known, ties=tuple(pair for pair in known.ties if not is_numbered(pair)))
    sub_models, names, structures = _exchangeable(cls, builder, known)
    every = names_of_variants(cls, builder, seed, names)
    structures = {text: each.with_changes_of(every.structure) for text, each in structures.items()}
    return Row(class_name, known.model_type, "", every.put_into(known), sub_models, structures, shared)


def _exchangeable(
    cls: type, builder: Callable[[dict[str, Any]], Any], known: Architecture
) -> tuple[dict[str, tuple[str, ...]], Names, dict[str, Structure]]:
    """The text models for which a composite class keeps its ties, the names with all of them, and its structures."""
    from ckptx.architecture import meta_model

    measured: dict[str, tuple[str, ...]] = {}
    names = meta_model.Names.of(known)
    structures: dict[str, Structure] = {}
    config = builder({})
    for key in sorted(getattr(config, "sub_configs", {})):
        nested = getattr(config, key, None)
        if key not in TEXT_KEYS or nested is None or config.sub_configs[key].__name__ != "AutoConfig":
            continue
        types = [str(nested.model_type)]
        for model_type in TEXT_TYPES if known.ties and key == "text_config" else ():
            try:
                other = meta_model.derive(cls, builder, {key: {"model_type": model_type}}, origin="table")
            except Exception:  # a text model that does not fit is not listed
                continue
            if meta_model.Names.of(known).put_into(other) == known:
                types.append(model_type)
                names = names._replace(
                    patterns=names.patterns | other.name_patterns, ignored=names.ignored | set(other.ignored)
                )
                if other.structure != known.structure:
                    structures[model_type] = other.structure
        measured[key] = tuple(sorted(set(types)))
    return measured, names, structures


def main() -> None:
    """Measure every class in worker processes and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these classes (default: all)")
    parser.add_argument("--output", type=Path, default=TABLE)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        names = options.names or pool.apply(class_names)
        measured = pool.map(row_of, names, chunksize=16)
    rows = [row for row, _ in measured]
    slow = sorted(((seconds, row.class_name) for row, seconds in measured), reverse=True)
    options.output.write_text(encode_table(rows, version("transformers")), encoding="utf-8")

    reasons = Counter(row.introspect or "in the table" for row in rows)
    print(f"{len(rows)} classes, {options.output.stat().st_size} bytes, {time.perf_counter() - started:.0f} s")
    for reason, count in reasons.most_common():
        print(f"{count:6} {reason}")
    print("slowest:", ", ".join(f"{name} {seconds:.1f} s" for seconds, name in slow[:5]))


if __name__ == "__main__":
    main()
