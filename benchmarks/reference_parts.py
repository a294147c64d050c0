"""Compare the peak memory of a reference that runs in parts with that of the whole reference.

    python benchmarks/reference_parts.py [--ram /dev/shm] [--results DIR]

The models are Llamas of 0.7 B parameters stored in bfloat16 and run as stored: one with an untied head, one tied, and
one with the large vocabulary of Llama 3. Each run is a separate process that does only the work of rank 0 on its
reference: forward, gradients and noise, for one batch and for two. The table has the peak RSS above the RSS before the
model was built. A digest of logits, loss, gradients and noise shows if the results are equal bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import HERE, publish, table

_MODEL = """
import json, sys, torch, transformers
config = transformers.LlamaConfig(**json.loads(sys.argv[2]))
torch.manual_seed(0)
transformers.utils.logging.disable_progress_bar()
torch.set_default_dtype(torch.bfloat16)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""
_LLAMA = {
    "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 18, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip
_TIED = "tied, vocabulary 32,000"
_MODELS = {
    "untied, vocabulary 32,000": {**_LLAMA, "tie_word_embeddings": False},
    _TIED: {**_LLAMA, "num_hidden_layers": 19, "tie_word_embeddings": True},
    "tied, vocabulary 128,256": {**_LLAMA, "num_hidden_layers": 15, "tie_word_embeddings": True, "vocab_size": 128256},
}
_RUNS = {
    (_TIED, 1): (1, 2, 6, 12),
    (_TIED, 2): (1, 12),
    ("untied, vocabulary 32,000", 1): (1, 12),
    ("tied, vocabulary 128,256", 1): (1, 12),
}  # (model, number of batches) -> numbers of parts
_MIB = 1 << 20


def peak_rss() -> int:
    """Return the peak RSS of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_reference(path: Path, parts: int, count: int) -> dict[str, Any]:
    """Run only the reference of a model in this process.

    Args:
        path: HF checkpoint of the model.
        parts: Number of parts in which the reference runs; 1 keeps the whole model in memory.
        count: Number of batches.

    Returns:
        Number of parameters, peak RSS above the RSS before the run and its estimate in bytes, number of compared
        results, digest of all results, and CPU seconds.
    """
    import torch

    from ckptx.layout.stages import StageMap
    from ckptx.options.verify import RunOptions
    from ckptx.runtime.parallel.distributed import RankContext
    from ckptx.runtime.parity.budget import MemoryBudget
    from ckptx.runtime.parity.model_loaders import ModelLoader
    from ckptx.runtime.parity.reference import StagewiseReference, WholeReference, partition_reference

    torch.set_num_threads(2)
    rank_context = RankContext(0, 1, torch.device("cpu"))
    loader = ModelLoader(path, path, RunOptions(device="cpu", compute_dtype="auto"))
    facts = loader.inspect_model()
    batches = loader.make_batches(facts, count)
    model, stacks = loader.build_with_stacks()
    budget = MemoryBudget(model, stacks, batches, backward=True, includes_checkpoint=False)
    reference: Any = WholeReference(loader, batches, rank_context, backward=True)
    estimate = budget.whole_bytes
    if parts > 1:
        stage_map = StageMap(stacks, parts)
        estimate = budget.peak_bytes(stage_map)
        reference = StagewiseReference(
            loader, batches, rank_context, partition_reference(model, stage_map, facts), backward=True
        )
    rss_before = peak_rss()
    outcome = reference.forward()
    digests = {f"logits {index}": _digest(each) for index, each in enumerate(outcome.result.logits)}
    digests["loss"] = outcome.result.loss.hex()
    digests["noise"] = repr((outcome.logits_noise, outcome.loss_noise))
    for gradients in reference.gradients():
        digests |= {each.name: f"{_digest(each.tensor)} {each.noise!r}" for each in gradients}
        del gradients  # as verify does
    digests_json = json.dumps(digests, sort_keys=True)
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "peak": peak_rss() - rss_before,
        "estimate": estimate,
        "tensors": len(digests),
        "digest": hashlib.sha256(digests_json.encode()).hexdigest(),
        "seconds": sum(resource.getrusage(resource.RUSAGE_SELF)[:2]),
    }


def _digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()


def run_in_process(path: Path, parts: int, batches: int) -> dict[str, Any]:
    """Call `run_reference` in a separate process."""
    command = [sys.executable, __file__, "--work", str(path), "--parts", str(parts), "--batches", str(batches)]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    outcome: dict[str, Any] = json.loads(
        subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    )
    return outcome


def main() -> None:
    """Measure all runs, and write reference_parts.json and .md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    for name, kind in {"--work": Path, "--parts": int, "--batches": int}.items():
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        print(json.dumps(run_reference(arguments.work, arguments.parts, arguments.batches)))
        return
    rows: list[dict[str, Any]] = []
    for name, config in _MODELS.items():
        with tempfile.TemporaryDirectory(dir=arguments.ram, prefix="ckptx-bench-") as directory:
            subprocess.run([sys.executable, "-c", _MODEL, directory, json.dumps(config)], check=True)
            for batches in (count for model, count in _RUNS if model == name):
                resident = None
                for parts in _RUNS[name, batches]:
                    outcome = run_in_process(Path(directory), parts, batches)
                    resident = resident or outcome
                    rows.append(
                        {
                            "model": name,
                            "batches": batches,
                            "parts": parts,
                            **outcome,
                            "relative_peak": outcome["peak"] / resident["peak"],
                            "is_equal": outcome["digest"] == resident["digest"],
                            "relative_time": outcome["seconds"] / resident["seconds"],
                        }
                    )
                    print(rows[-1], file=sys.stderr)
    lines = [
        (
            f"{row['model']}, {row['parameters'] / 1e9:.2f} B parameters", row["batches"], row["parts"],
            f"{row['peak'] / _MIB:,.0f} MiB", f"{row['relative_peak']:.0%}", f"{row['estimate'] / _MIB:,.0f} MiB",
            f"{row['tensors']} of {row['tensors']}" if row["is_equal"] else "DIFFERENT",
        )
        for row in rows
    ]  # fmt: skip
    columns = (
        "model",
        "batches of two sequences",
        "parts",
        "peak memory",
        "relative to one part",
        "estimate",
        "bit-identical results",
    )
    title = "Reference of `verify --run`, in parts; bfloat16 as stored"
    publish(arguments.results, "reference_parts", {"rows": rows}, [table(title, columns, lines)])


if __name__ == "__main__":
    main()
