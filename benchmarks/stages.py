"""Split every tiny model of the tests into pipeline stages; list differences and the tensors between stages.

    python benchmarks/stages.py [--parts splits,schedules,images] [--results DIR] [MODEL ...]

The first table is for one process that runs the stages in order. The second is for two gloo ranks that run them under
the schedules of torch. The next two are for microbatches with no, one and three images (or audio clips). The script
measures differences, not time. Tables of parts that are not run remain unchanged in DIR.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from measure import publish, table  # noqa: E402 (benchmarks run from a checkout)

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
MICROBATCHES = 4
IMAGE_MODELS = ("gemma3-vlm", "qwen3-vl", "mllama", "gemma4-audio")
POOL_TIMEOUT = 20.0  # seconds that ranks wait for a message of a rank that failed


def run_splits(names: Sequence[str]) -> list[dict[str, Any]]:
    """Run every model with every split into stages in this process, and return a row for each."""
    from ckptx.errors import CkptxError
    from tests.support.staged_models import SPLITS, compare_split

    rows = []
    for name in names:
        for split in SPLITS:
            row: dict[str, Any] = {"model": name, "split": split}
            try:
                is_equal, gradients, boundary = compare_split(name, split)
                boundary_values = [[str(slot) for slot in slots] for slots in boundary.slots[1:]]
                row |= {"logits_equal": is_equal, "gradients": gradients, "boundary_values": boundary_values}
            except CkptxError as error:
                row |= {"error": str(error)}
            rows.append(row)
            print(name, split, row.get("gradients", row.get("error")), file=sys.stderr)
    return rows


def run_image_splits(names: Sequence[str]) -> list[dict[str, Any]]:
    """Run every model with every split in this process, over microbatches with different numbers of images."""
    from ckptx.errors import CkptxError
    from tests.support.microbatches import image_microbatches
    from tests.support.staged_models import SPLITS, compare_split_in_microbatches

    rows = []
    for name in names:
        image_rows = image_microbatches(name)
        counts = [image_rows.count(index) for index in range(max(image_rows) + 1)]
        for split in SPLITS:
            row: dict[str, Any] = {"model": name, "split": split, "images": counts}
            try:
                row["logits_equal"], row["gradients"] = compare_split_in_microbatches(name, split, image_rows)
            except CkptxError as error:
                row["error"] = str(error)
            rows.append(row)
            print(name, split, row.get("gradients", row.get("error")), file=sys.stderr)
    return rows


def run_schedules(names: Sequence[str], *, with_images: bool = False) -> list[dict[str, Any]]:
    """Run every model under every schedule on two ranks, and return a row for each.

    Args:
        names: Names of the models.
        with_images: Give microbatches different numbers of images.
    """
    from tests.support import pool as pools
    from tests.support.microbatches import image_microbatches
    from tests.support.pool import GlooPool, WorkerError
    from tests.support.staged_models import run_one_step

    pools._TIMEOUT = POOL_TIMEOUT
    pool = GlooPool()
    rows = []
    for name in names:
        for schedule in SCHEDULES:
            row: dict[str, Any] = {"model": name, "schedule": schedule}
            try:
                image_rows = image_microbatches(name) if with_images else None
                results_of_ranks = pool.run(run_one_step, 2, name, schedule, MICROBATCHES, image_rows)
                row |= {
                    "logits_equal": all(each[0] for each in results_of_ranks)
                    and sum(each[2] for each in results_of_ranks) == MICROBATCHES,
                    "gradients": max(each[1] for each in results_of_ranks),
                    "loss": max(each[3] for each in results_of_ranks),
                }
            except WorkerError as error:
                causes = re.findall(r"^\w+Error: ([^.(]*)", str(error), re.MULTILINE)
                row |= {"error": f"fails: {causes[0].strip() if causes else 'no answer'}"}
            rows.append(row)
            print(name, schedule, row.get("gradients", row.get("error")), file=sys.stderr)
    pool.close()
    return rows


def format_values(boundary_values: Sequence[str]) -> str:
    """List the values that a stage receives, by argument name or position, with their number.

    Example:
        "argument 0, 2 x `position_bias`"
    """
    names = (re.sub(r"^.*?\((.*?)(\[.*)?\).*$", r"\1", each) for each in boundary_values)
    counts = Counter(f"argument {each}" if each.isdecimal() else each for each in names)
    return ", ".join(f"{count} x `{name}`" if count > 1 else f"`{name}`" for name, count in counts.items())


def format_cell(row: dict[str, Any]) -> str:
    """Format the largest gradient difference of a row, with a warning if its logits differ."""
    if "error" in row:
        return str(row["error"]).replace("|", "\\|")
    return f"{row['gradients']:.1e}" if row["logits_equal"] else f"LOGITS DIFFER, {row['gradients']:.1e}"


def group_by_model(rows: Sequence[dict[str, Any]], key: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Group rows by model, then by split or schedule."""
    grouped: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(row["model"], {})[row[key]] = row
    return grouped


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count the rows, and those with equal logits, and find the largest relative difference of a gradient."""
    finished = [row for row in rows if "error" not in row]
    return {
        "cases": len(rows),
        "run": len(finished),
        "logits_equal": sum(row["logits_equal"] for row in finished),
        "gradients": max((row["gradients"] for row in finished), default=0.0),
    }


def summary_line(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the summary as one line of text."""
    counts = summary(rows)
    return (
        f"{counts['cases']} {name}: {counts['run']} run, logits bit-equal in {counts['logits_equal']}; the largest "
        f"relative difference of a gradient is {counts['gradients']:.1e}.\n"
    )


def build_tables(part: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the Markdown table of a part and its summary."""
    from tests.support.staged_models import LAYERS, SPLITS

    titles = {
        "splits": f"Tiny random models with {LAYERS} layers, split into stages that run in order in one process, fp32",
        "schedules": f"Gradients on two gloo ranks, {MICROBATCHES} microbatches, two or four stages, fp32",
        "images": "The same splits: gradients, microbatches with different numbers of images or audio clips, fp32",
        "image_schedules": "Gradients of such microbatches on two gloo ranks, two or four stages, fp32",
    }
    is_split = "split" in rows[0]
    lines, rows_by_model = [], group_by_model(rows, "split" if is_split else "schedule")
    for name, model_rows in rows_by_model.items():
        line = [name, *(format_cell(model_rows[split]) for split in (SPLITS if is_split else SCHEDULES))]
        if part == "splits":
            line.append("; ".join(map(format_values, model_rows["three"].get("boundary_values", []))))
        if part == "images":
            line.insert(1, ", ".join(map(str, model_rows["three"]["images"])))
        lines.append(tuple(line))
    columns = [f"gradients: {split.replace('|', 'then')}" for split in SPLITS] if is_split else list(SCHEDULES)
    if part == "splits":
        columns.append("values sent between three stages")
    if part == "images":
        columns.insert(0, "images per microbatch")
    return [table(titles[part], ("model", *columns), lines), summary_line("splits" if is_split else "runs", rows)]


def main() -> None:
    """Run the parts, and write stages.json and stages.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--parts", default="splits,schedules,images")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    import torch

    from tests.support.microbatches import MULTIMODAL
    from tests.support.models import EVERY
    from tests.support.staged_models import PIPELINE_MODELS

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)

    def select_names(names: Sequence[str]) -> list[str]:
        return [name for name in names if name in (arguments.models or names)]

    new_rows: dict[str, list[dict[str, Any]]] = {}
    parts = arguments.parts.split(",")
    if "splits" in parts:
        new_rows["splits"] = run_splits(select_names(list(EVERY)))
    if "schedules" in parts:
        new_rows["schedules"] = run_schedules(select_names(PIPELINE_MODELS))
    if "images" in parts:
        new_rows["images"] = run_image_splits(select_names(MULTIMODAL))
        new_rows["image_schedules"] = run_schedules(select_names(IMAGE_MODELS), with_images=True)
    results_file = arguments.results / "stages.json"
    earlier = json.loads(results_file.read_text()) if results_file.exists() else {}
    results, tables = {}, []
    for part in ("splits", "schedules", "images", "image_schedules"):
        rows = new_rows.get(part) or earlier.get(part, {}).get("rows")
        if rows:
            results[part] = {"summary": summary(rows), "rows": rows}
            tables += build_tables(part, rows)
    publish(arguments.results, "stages", results, tables)


if __name__ == "__main__":
    main()
