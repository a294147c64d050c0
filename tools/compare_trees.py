"""Convert, reshard and merge the same checkpoints with two source trees of ckptx, and compare files and reports.

    python tools/compare_trees.py OLD [NEW] [--match llama] [--work DIR]

OLD and NEW are directories that contain the package `ckptx`; the default of NEW is this checkout. The checkpoints are
the tiny models of the tests, and a training checkpoint of each with the states of AdamW. Each tree runs in a separate
process. The script prints the name of each file, and of each field of a report, that differs. It does not compare
fields with times, memory and free space. Fields of an older `schema_version` are compared under their new names, from
tools/renamed_fields.json. Notes that differ are listed at the end, each difference once with the number of its calls.
The exit code is 1 if anything but notes differs.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
MEASURED_FIELDS = {"seconds", "written_gb_per_s", "peak_rss", "free_space"}  # differ from run to run
RENAMED: dict[str, Any] = json.loads((CHECKOUT / "tools" / "renamed_fields.json").read_text(encoding="utf-8"))

# Program of the process of each tree: it reads one call per line and prints one report per line.
WORKER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import ckptx
from ckptx.errors import CkptxError
for line in sys.stdin:
    arguments, options = json.loads(line)
    try:
        function = getattr(ckptx, arguments[0])
        report = function(*arguments[1:], **options).to_dict()
    except CkptxError as error:
        report = {"exit": error.exit_code, "error": str(error)}
    print(json.dumps(report), flush=True)
"""

Call = tuple[list[str], dict[str, Any]]  # function of ckptx and its positional arguments; keyword arguments


def calls(hf: str, trained: str) -> Iterator[tuple[Call, str]]:
    """Yield the calls for one model, each with the name of its output.

    `OUT/` in a path is the directory for outputs. A call without output has an empty name.

    Args:
        hf: Path of the HF checkpoint of the model.
        trained: Path of its training checkpoint.
    """

    def convert(direction: str, source: str, target: str, **options: Any) -> tuple[Call, str]:
        return (["convert", direction, source, f"OUT/{target}"], options), target

    def reshard(source: str, target: str, **options: Any) -> tuple[Call, str]:
        return (["reshard", source, f"OUT/{target}"], options), target

    yield convert("hf2dcp", hf, "dcp")
    yield convert("hf2dcp", hf, "prefixed", prefix="model.inner.", files=3)
    yield convert("hf2dcp", hf, "in-model-names", names="model", tp=2)
    yield convert("hf2dcp", hf, "half", dtype="fp16")
    yield convert("hf2dcp", hf, "titan", names="torchtitan")
    yield reshard(hf, "tp2-dp2", to="dcp", tp=2, dp_shard=2)
    yield reshard(hf, "tp4-pp2", to="dcp", tp=4, pp=2)
    yield reshard(hf, "shards", tp=2, pp=2)
    yield reshard(hf, "copies", tp=3, tied="copy")
    yield reshard("OUT/shards", "shards-dcp", to="dcp", tp=2)
    yield reshard("OUT/tp4-pp2", "tp2", tp=2)
    yield reshard("OUT/tp2-dp2", "dcp-shards", to="safetensors", tp=2, dtype="bf16")
    for source in ("dcp", "tp4-pp2", "shards", "in-model-names", "shards-dcp", "half", "titan"):
        yield convert("dcp2hf", f"OUT/{source}", f"{source}-back")
    yield convert("dcp2hf", "OUT/prefixed", "prefixed-back", source_prefix="model.inner.")
    yield convert("dcp2hf", "OUT/dcp", "small-files", max_shard_size="20KB", index="always")
    yield convert("dcp2hf", "OUT/dcp", "single", dtype="fp32", tied="drop")
    yield convert("dcp2hf", "OUT/dcp", "as-base", dtype="base", base=hf)
    yield convert("dcp2hf", "OUT/tp2-dp2", "alone", base="none")
    yield convert("dcp2hf", hf, "completed")
    yield convert("dcp2hf", "OUT/dcp", "dry", dry_run=True)
    yield reshard(trained, "trained-tp2-pp2", base=hf, tp=2, pp=2)
    yield reshard(trained, "trained-dp3", base=hf, dp_shard=3, optimizer="drop")
    yield reshard("OUT/trained-tp2-pp2", "trained-tp3", tp=3)
    yield convert("dcp2hf", trained, "trained-hf", base=hf)
    yield convert("dcp2hf", "OUT/trained-tp2-pp2", "trained-sharded-hf")
    for kind, source in (("inspect", "OUT/tp4-pp2"), ("inspect", "OUT/shards"), ("inspect", trained)):
        yield ([kind, source], {"ranks": True, "tensors": True}), ""
    for other in ("OUT/tp4-pp2", "OUT/shards", "OUT/half", "OUT/trained-hf"):
        yield (["verify", hf, other], {}), ""
        yield (["diff", hf, other], {}), ""


class Tree:
    """A process that runs the calls with one source tree.

    Args:
        root: Directory that contains the package `ckptx`.
        out: Directory for outputs; it is created.
    """

    def __init__(self, root: Path, out: Path) -> None:
        self.out = out
        out.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )

    def send(self, call: Call) -> None:
        """Start one call; `receive` returns its report."""
        arguments, options = call
        assert self._process.stdin is not None
        print(
            json.dumps([[self._replace_out(argument) for argument in arguments], options]),
            file=self._process.stdin,
            flush=True,
        )

    def receive(self) -> dict[str, Any]:
        """Return the report of the call; `OUT` replaces the directory of outputs, and measured fields are removed."""
        assert self._process.stdout is not None
        report: dict[str, Any] = json.loads(self._process.stdout.readline().replace(str(self.out), "OUT"))
        return {name: value for name, value in with_new_names(report).items() if name not in MEASURED_FIELDS}

    def _replace_out(self, argument: str) -> str:
        """Return an argument with the directory of outputs in place of a leading `OUT/`."""
        return str(self.out / argument.removeprefix("OUT/")) if argument.startswith("OUT/") else argument


def with_new_names(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document of an older `schema_version` with the field names of the current one."""
    if document.get("schema_version", RENAMED["schema_version"]) >= RENAMED["schema_version"]:
        return document
    names = RENAMED["commands"].get(document["command"].split()[0], {})
    renamed: dict[str, Any] = _rename_keys(document, names, "")
    return renamed | {"schema_version": RENAMED["schema_version"]}


def _rename_keys(value: Any, names: dict[str, str], path: str) -> Any:
    """Return a value with its keys renamed, at any depth.

    Args:
        value: The value.
        names: Old path of a key -> new name. A path has the old names from the document to the key, with dots;
            entries of a list have the path of the list.
        path: Old path of the value with a dot at its end; empty for the document.
    """
    if isinstance(value, list):
        return [_rename_keys(each, names, path) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        names.get(f"{path}{name}", name): _rename_keys(each, names, f"{path}{name}.") for name, each in value.items()
    }


def differing_files(old: Path, new: Path) -> list[str]:
    """Return the relative paths of files that only one directory has, or whose bytes differ."""
    names = {str(path.relative_to(root)) for root in (old, new) for path in root.rglob("*") if path.is_file()}
    found = []
    for name in sorted(names):
        a, b = old / name, new / name
        if not (a.is_file() and b.is_file() and filecmp.cmp(a, b, shallow=False)):
            found.append(name)
    return found


def differing_fields(old: dict[str, Any], new: dict[str, Any], note_differences: Counter[tuple[str, ...]]) -> list[str]:
    """Return the names of fields that differ, except notes.

    Args:
        old: Report of one tree.
        new: Report of the other tree for the same call.
        note_differences: Differing notes of a call, with `- ` for removed and `+ ` for added ones -> number of calls;
            those of this call are added.
    """
    found = [name for name in sorted(old.keys() | new.keys()) if name != "notes" and old.get(name) != new.get(name)]
    before, after = (Counter(report.get("notes", ())) for report in (old, new))
    if before != after:
        note_differences[(*(f"- {note}" for note in before - after), *(f"+ {note}" for note in after - before))] += 1
    return found


def write_trained(hf: Path, target: Path) -> None:
    """Write a DCP of a training run: the tensors of an HF checkpoint, and the two moments of AdamW for each."""
    import torch.distributed.checkpoint as dcp

    from tests.support.models import read_hf

    tensors = read_hf(hf)
    state = {
        f"optim.state.{name}.{moment}": tensor.float() * scale
        for name, tensor in tensors.items()
        for moment, scale in (("exp_avg", 2), ("exp_avg_sq", 3))
    }
    dcp.save({"model": tensors, **state, "train_state": {"step": 7}}, checkpoint_id=target, no_dist=True)


def main() -> int:
    """Compare two trees model by model; return 1 if they differ."""
    parser = argparse.ArgumentParser(description="compare the outputs of two source trees of ckptx for tiny models")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=CHECKOUT)
    parser.add_argument("--match", default="", help="only models whose name contains this string")
    parser.add_argument("--work", type=Path, help="parent of the temporary directory for the outputs")
    options = parser.parse_args()
    sys.path[:0] = [str(CHECKOUT)]
    from tests.support.models import EVERY, write

    num_calls, num_files, num_differing_files, num_differing_calls = 0, 0, 0, 0
    note_differences = Counter[tuple[str, ...]]()
    exit_codes: Counter[int] = Counter()
    with tempfile.TemporaryDirectory(dir=options.work) as directory:
        work = Path(directory)
        trees = [Tree(options.old.resolve(), work / "old"), Tree(options.new.resolve(), work / "new")]
        for model in (name for name in EVERY if options.match in name):
            hf, trained = work / "hf", work / "trained"
            write(EVERY[model], hf)
            write_trained(hf, trained)
            for call, target in calls(str(hf), str(trained)):
                for tree in trees:
                    tree.send(call)
                old, new = (tree.receive() for tree in trees)
                num_calls += 1
                exit_codes[old["exit"]] += 1
                differences = differing_fields(old, new, note_differences)
                if target:
                    differing = differing_files(*(tree.out / target for tree in trees))
                    differences = differing + differences
                    if old["exit"] == new["exit"]:
                        num_differing_files += len(differing)
                    num_files += sum(path.is_file() for path in (trees[0].out / target).rglob("*"))
                if differences:
                    num_differing_calls += 1
                    print(f"{model}: {' '.join(call[0])} {call[1]}: {', '.join(differences[:9])}", flush=True)
            for path in (hf, trained, *(path for tree in trees for path in tree.out.iterdir())):
                shutil.rmtree(path)
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(exit_codes.items()))
        print(
            f"{num_calls} calls (exits of OLD {codes}), {num_files} files compared, {num_differing_calls} calls differ"
        )
        print(f"{num_differing_files} files differ between outputs of calls with the same exit code")
        for notes, count in note_differences.most_common():
            print(f"notes of {count} calls:", *notes, sep="\n  ")
    return 1 if num_differing_calls else 0


if __name__ == "__main__":
    sys.exit(main())
