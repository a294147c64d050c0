"""Run `verify --run` on tiny models in stages under TP and FSDP2, and list differences relative to tolerances.

    python benchmarks/stages_matrix.py [--results DIR] [MODEL ...]

The meshes are tp 2 x pp 2 x dp_shard 2 on 8 gloo ranks in float32, with every kind of activation checkpointing; and
pp 2, and tp 2 x pp 2, in bfloat16 as stored. Each model runs with a tied and with an untied head, independent of its
recipe. Vision models have images in some microbatches only, and each of the two data-parallel ranks in different ones.
The script measures differences, not time.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from measure import publish, table  # noqa: E402 (benchmarks run from a checkout)

_RECIPES = (
    "llama-tied", "qwen3", "gemma3", "gemma3-vlm", "gemma4", "gemma4-ple", "gemma4-shared-kv", "gemma4-vlm", "mixtral",
    "qwen3-moe", "phi3",
)  # fmt: skip
MODELS = tuple(f"{name} {head}" for name in _RECIPES for head in ("tied", "untied"))
LAYERS = 4
_ALL_AXES = {"tp": 2, "pp": 2, "dp_shard": 2}
CASES: dict[str, dict[str, Any]] = {
    "all": _ALL_AXES,
    "all, full": {**_ALL_AXES, "activation_checkpointing": "full"},
    "all, selective": {**_ALL_AXES, "activation_checkpointing": "selective"},
    "bf16, pp 2": {"tp": 1, "pp": 2, "dp_shard": 1, "compute_dtype": "auto"},
    "bf16, tp 2 x pp 2": {"tp": 2, "pp": 2, "dp_shard": 1, "compute_dtype": "auto"},
}
_REPORT_KEYS = (
    "exit", "max_abs", "max_abs_tolerance", "grad_max_abs", "grad_closest_to_tolerance",
    "checkpointed_layers", "compute_dtype", "differing",
)  # fmt: skip


def verify_case(pool: Any, name: str, case: str, work: Path) -> dict[str, Any]:
    """Verify one model in one case, and return its row."""
    from tests.support.verify_runs import run_verify

    settings = dict(CASES[case])
    path = write_model(name, work, is_stored_in_bf16="compute_dtype" in settings)
    row: dict[str, Any] = {"model": name, "case": case}
    if "vlm" in name:
        settings["inject"] = "images in some"
    document, text = run_verify(pool, path, path, **settings)
    if not isinstance(document, dict):
        return {**row, "error": text.replace(f"{work}/", "")}
    row |= {key: document[key] for key in _REPORT_KEYS} | {"inconclusive": len(document["inconclusive"])}
    if "activation_checkpointing" in settings:
        mode = settings["activation_checkpointing"]
        row["unsplit_checkpointed_layers"] = run_verify(pool, path, path, 1, 1, activation_checkpointing=mode)[0][
            "checkpointed_layers"
        ]
    return row


def write_model(name: str, work: Path, *, is_stored_in_bf16: bool) -> Path:
    """Return the directory of a model, "RECIPE tied" or "RECIPE untied"; write the model first if it does not exist."""
    from tests.support.models import randomize
    from tests.support.staged_models import build_deep_model

    path = work / f"{name.replace(' ', '-')}{'-bf16' if is_stored_in_bf16 else ''}"
    if not path.exists():
        recipe, head = name.split()
        model: Any = build_deep_model(recipe, LAYERS)
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = head == "tied"
        model = randomize(type(model)(model.config).float()).eval()
        weights = [each.weight for each in (model.get_input_embeddings(), model.get_output_embeddings())]
        assert (weights[0] is weights[1]) == (head == "tied"), name
        (model.bfloat16() if is_stored_in_bf16 else model).save_pretrained(path)
    return path


def is_within_tolerance(row: dict[str, Any]) -> bool:
    """Return True if all differences are within tolerance and as many layers are checkpointed as without stages."""
    expected_layers = row.get("unsplit_checkpointed_layers")
    return row.get("exit") == 0 and (expected_layers is None or row["checkpointed_layers"] == expected_layers > 0)


def format_cell(row: dict[str, Any]) -> str:
    """Format the differences of a row relative to their tolerances, and the number of checkpointed layers."""
    if "error" in row:
        return str(row["error"]).replace("|", "\\|")
    ratio = row["max_abs"] / row["max_abs_tolerance"] if row["max_abs_tolerance"] else 0.0
    exact = row["max_abs"] == row["max_abs_tolerance"] == 0
    text = f"{'bit-equal' if exact else f'{ratio:.0%}'}, {row['grad_closest_to_tolerance'][1]:.0%}"
    if "unsplit_checkpointed_layers" in row:
        text += f", {row['checkpointed_layers']} of {row['unsplit_checkpointed_layers']} checkpointed"
    if row["inconclusive"]:
        text += f", {row['inconclusive']} inconclusive"
    return text if is_within_tolerance(row) else f"DIFFERENT: {text}"


def main() -> None:
    """Run all models, and write stages_matrix.json and stages_matrix.md; exit with 1 if a run is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    import torch
    import transformers

    from tests.support.pool import GlooPool

    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    names = arguments.models or list(MODELS)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    pool = GlooPool()
    with tempfile.TemporaryDirectory(prefix="ckptx-stages-") as directory:
        for name in names:
            for case in CASES:
                row = verify_case(pool, name, case, Path(directory))
                rows.setdefault(name, {})[case] = row
                print(name, case, format_cell(row), file=sys.stderr)
    pool.close()
    all_rows = [row for cases in rows.values() for row in cases.values()]
    lines = [(name, *(format_cell(cases[case]) for case in CASES)) for name, cases in rows.items()]
    passed = sum(map(is_within_tolerance, all_rows))
    title = f"Models with {LAYERS} layers at tp 2 x pp 2 x dp_shard 2 (all) and in bf16: logits, gradients / tolerance"
    text = f"{len(all_rows)} runs: {passed} within tolerance.\n"
    publish(arguments.results, "stages_matrix", {"rows": all_rows}, [table(title, ("model", *CASES), lines), text])
    sys.exit(passed != len(all_rows))


if __name__ == "__main__":
    main()
