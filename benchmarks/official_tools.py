"""Time conversions against the tools of the trainers that wrote the checkpoint, and list what each tool gets wrong.

    pip install deepspeed==0.19.8 verl
    python benchmarks/official_tools.py [--rounds 3] [--parts zero,verl,faults] [--ram DIRECTORY]

zero: files of DeepSpeed's engine on two ranks, of a model with 0.2 B parameters in bf16. `zero_to_fp32` and ckptx write
the masters as safetensors, `ds_to_universal` and ckptx all weights and optimizer state. verl: rank files of FSDP2 with
0.5 B parameters in float32 on four ranks, merged by verl and by ckptx. faults: small checkpoints with tied and frozen
weights, whose values are compared with those of the engine. The RAM disk needs 16 GiB.

Started under torchrun with `--write KIND DIRECTORY`, the script writes the input of a part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import CKPTX, HERE, Step, Timing, parse_arguments, publish, table, time_rounds, timing_table

WIDTH, LAYERS, ROWS = 2048, 32, 32000  # of the model of the part `zero`; rows of its embedding
MODEL = {  # config of the part `verl`
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1536, "intermediate_size": 4096,
    "num_hidden_layers": 14, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 128, "vocab_size": 32000,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
FAULT_CASES = ("stage1", "stage2", "stage2_elastic", "stage3")
FIXTURE_SCRIPT = HERE.parent / "tools" / "build_deepspeed_fixtures.py"


def write_zero(stage: int, out: Path) -> None:
    """Save a checkpoint of DeepSpeed's engine after one step, on the ranks of torchrun."""
    import deepspeed
    import torch

    for name, value in (("CROSS_RANK", "0"), ("CROSS_SIZE", "1"), ("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])):
        os.environ.setdefault(name, value)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # compiles C++
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(ROWS, WIDTH), *(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.arange(4)[None]).float().square().mean())
    engine.step()
    engine.save_checkpoint(str(out))


def write_verl(out: Path) -> None:
    """Save a Llama as verl's FSDP2 engine does, on the ranks of torchrun."""
    import torch
    import torch.distributed as dist
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    if not rank:
        model.config.save_pretrained(out / "huggingface")
        words = Tokenizer(WordLevel({"word": 0}, unk_token="word"))  # verl requires a tokenizer
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(out / "huggingface")
        (out / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",)))
    torch.save(model.state_dict(), out / f"model_world_size_{ranks}_rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(ranks: int, arguments: Sequence[str | Path]) -> None:
    """Run a script under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, *arguments], env=environment, check=True, capture_output=True)


def copy_step(source: Path, work: Path) -> Step:
    """Return the step that copies a directory."""
    return Step(f"cp -r of {source.name}", ["cp", "-r", str(source), str(work / "copy")], work / "copy")


def time_zero(work: Path, stage: int, rounds: int) -> tuple[list[Timing], list[Timing]]:
    """Time two conversions of a ZeRO checkpoint: to fp32 weights, and to all weights and optimizer state."""
    run_ranks(2, [Path(__file__), "--write", f"zero{stage}", work / "zero"])
    (step,) = (work / "zero").glob("global_step*")
    masters = ["--weights", "masters"] if stage < 3 else []
    to_hf = [*CKPTX, "convert", "to-hf", step, work / "hf", "--base", "none", *masters]
    to_dcp = [*CKPTX, "convert", "to-dcp", step, work / "dcp", "--base", "none"]
    subprocess.run([*to_hf, "--quiet"], check=True)
    (work / "hf").rename(work / "masters")
    scripts = [sys.executable, "-m"]
    universal = [
        "deepspeed.checkpoint.ds_to_universal",
        "--inject_missing_state",
        "--input_folder",
        step,
        "--output_folder",
        work / "universal",
    ]
    zero_to_fp32 = ["deepspeed.utils.zero_to_fp32", work / "zero", work / "fp32", "--safe_serialization"]
    weights = time_rounds(
        [
            copy_step(work / "masters", work),
            Step("ckptx convert to-hf", [*map(str, to_hf)], work / "hf"),
            Step("zero_to_fp32.py", [*map(str, [*scripts, *zero_to_fp32])], work / "fp32"),
        ],
        rounds,
        _size(work / "masters"),
    )
    state = time_rounds(
        [
            copy_step(step, work),
            Step("ckptx convert to-dcp", [*map(str, to_dcp)], work / "dcp"),
            Step("ds_to_universal", [*map(str, [*scripts, *universal])], work / "universal"),
        ],
        rounds,
        _size(step),
    )
    subprocess.run(["rm", "-rf", work / "zero", work / "masters", work / "latest_universal"], check=True)
    return weights, state


def time_verl(work: Path, rounds: int) -> list[Timing]:
    """Time merging the rank files of verl."""
    source = work / "actor"
    source.mkdir()
    run_ranks(4, [Path(__file__), "--write", "verl", source])
    merge = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", source]
    to_hf = [*CKPTX, "convert", "to-hf", source, work / "hf"]
    rows = time_rounds(
        [
            copy_step(source, work),
            Step("ckptx convert to-hf", [*map(str, to_hf)], work / "hf"),
            Step("ckptx convert to-hf --dtype bf16", [*map(str, to_hf), "--dtype", "bf16"], work / "hf"),
            Step("verl.model_merger (bf16)", [*map(str, [*merge, "--target_dir", work / "merged"])], work / "merged"),
        ],
        rounds,
        _size(source),
    )
    subprocess.run(["rm", "-rf", source], check=True)
    return rows


def find_faults(work: Path) -> list[tuple[str, str, str, str]]:
    """Return for each small checkpoint what the tools and ckptx do, compared with the values of the engine."""
    rows = []
    for case in FAULT_CASES:
        run_ranks(3, [FIXTURE_SCRIPT, case, work])
        (step,) = (work / case).glob("global_step*")
        expected = _read(work / f"{case}.safetensors")
        names = {name for name in expected if not name.startswith("optimizer.")}
        masters = {name: expected.get(f"optimizer.state.{name}.master_param", expected[name]) for name in names}
        if "head.weight" in masters:
            masters["head.weight"] = masters["embed.weight"]
        outcomes = []
        for serialization in (["--safe_serialization"], []):
            script = ["deepspeed.utils.zero_to_fp32", work / case, work / "fp32", *serialization]
            done = subprocess.run([sys.executable, "-m", *script], capture_output=True, text=True)
            outcomes.append(_outcome(done, work / "fp32", masters))
            subprocess.run(["rm", "-rf", work / "fp32"], check=True)
        weights = ["--weights", "masters"] if case != "stage3" else []
        command = [*CKPTX, "-q", "convert", "to-hf", step, work / "hf", "--base", "none", *weights]
        done = subprocess.run(command, capture_output=True, text=True)
        rows.append((case, *outcomes, _outcome(done, work / "hf", masters)))
        subprocess.run(["rm", "-rf", work / "hf", work / case], check=True)
    return rows


def _outcome(done: subprocess.CompletedProcess[str], output: Path, expected: dict[str, Any]) -> str:
    """Describe the output of a tool: its exit code, or the number of tensors that are equal, wrong and missing."""
    import torch

    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if "Error: " in line), lines[-1] if lines else "")
        return f"exit {done.returncode}: {reason[:60]}"
    files = [*output.glob("*.safetensors"), *output.glob("*.bin")]
    found = {name: value for file in files for name, value in _read(file).items()}
    missing = expected.keys() - found.keys()
    equal = [name for name in expected.keys() - missing if torch.equal(found[name].float(), expected[name].float())]
    wrong = len(expected) - len(missing) - len(equal)
    parts = [f"{len(equal)} equal", f"{wrong} wrong" if wrong else ""]
    parts.append(f"missing: {', '.join(sorted(missing))}" if missing else "")
    return ", ".join(filter(None, parts))


def _read(file: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors or torch file, by name."""
    import torch
    from safetensors.torch import load_file

    return load_file(file) if file.suffix == ".safetensors" else torch.load(file)


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def main() -> None:
    """Run the selected parts and write the tables, or write the input of one part."""
    if sys.argv[1:2] == ["--write"]:
        kind, out = sys.argv[2], Path(sys.argv[3])
        write_verl(out) if kind == "verl" else write_zero(int(kind[-1]), out)
        return
    arguments = parse_arguments(__doc__, ("zero", "verl", "faults"))
    results: dict[str, Any] = {}
    tables: list[str] = []

    def add(title: str, rows: Sequence[Timing]) -> None:
        results[title] = [row.to_dict() for row in rows]
        tables.append(timing_table(title, rows))

    with tempfile.TemporaryDirectory(dir=arguments.ram) as directory:
        work = Path(directory)
        for stage in (2, 3) if "zero" in arguments.parts else ():
            weights, state = time_zero(work, stage, arguments.rounds)
            add(f"fp32 masters of ZeRO stage {stage}, 0.2 B parameters on 2 ranks", weights)
            add(f"weights and optimizer state of ZeRO stage {stage}, 0.2 B parameters on 2 ranks", state)
        if "verl" in arguments.parts:
            add("verl, FSDP2 files of 4 ranks, 0.5 B parameters in float32", time_verl(work, arguments.rounds))
        if "faults" in arguments.parts:
            rows = find_faults(work)
            results["faults"] = rows
            columns = ("checkpoint", "zero_to_fp32.py --safe_serialization", "zero_to_fp32.py", "ckptx")
            tables.append(table("Masters of small models with tied and frozen weights on 3 ranks", columns, rows))
    publish(arguments.results, "official_tools", results, tables)


if __name__ == "__main__":
    main()
