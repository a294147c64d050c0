"""Measure conversions from trainers' files: peak memory by size of the model, and time and memory with many ranks.

    python benchmarks/sources.py [--parts memory,ranks] [--ram DIRECTORY]

memory: `convert to-hf` of Llamas of 0.3, 1 and 2 B parameters, from the files of four ranks of verl (FSDP2, float32)
and of DeepSpeed ZeRO (stage 2: the fp32 masters; stage 3), and from Megatron's `torch_dist`. ranks: `inspect` and
`convert to-hf --dry-run` of Llama 3 8B from the files of 64 ranks of verl and of ZeRO 3.

The rank files are written by `torch.save`, with the keys that the trainers save, through a file that leaves holes for
zeros: all tensors are zero, have their full size and occupy no space.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from checkpoints import Model, llama, write_checkpoint
from measure import CKPTX, parse_arguments, publish, table, time_command
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

_LAYERS = {"0.3 B": 4, "1 B": 19, "2 B": 41}  # of the Llama of `checkpoints.py`
_RANKS, _MANY_RANKS = 4, 64
_LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": False, "rope_theta": 500000.0,
}  # fmt: skip

Shapes = dict[str, torch.Size]


class _FileWithHoles(io.RawIOBase):
    """A file in which writes of zeros leave holes.

    Args:
        file: File opened for writing.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._end = file, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) >= 4096 and not np.frombuffer(view, np.uint8).any():
            self._file.seek(len(view), io.SEEK_CUR)
        else:
            self._file.write(view)
        self._end += len(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        """Extend the file over a hole at its end."""
        self._file.truncate(self._end)


def save_with_holes(state: Any, path: Path) -> None:
    """Save with `torch.save`; zeros become holes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        out = _FileWithHoles(file)
        torch.save(state, out)
        out.finish()


def model_shapes(config: dict[str, Any]) -> Shapes:
    """Return the shapes of all parameters of a Llama."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    return {name: each.shape for name, each in model.named_parameters()}


def write_verl(config: dict[str, Any], ranks: int, out: Path) -> None:
    """Write the files that verl saves with FSDP2, rank by rank, with torch's fake process group."""
    out.mkdir()
    LlamaConfig(**config).save_pretrained(out / "huggingface")
    (out / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    server = multiprocessing.get_context("forkserver")
    for rank in range(ranks):  # a process keeps the rank of its first process group
        process = server.Process(target=_write_rank_of_verl, args=(config, rank, ranks, out))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"rank {rank}: exit {process.exitcode}")


def _write_rank_of_verl(config: dict[str, Any], rank: int, ranks: int, out: Path) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    fully_shard(model, mesh=mesh)
    state = {name: _zeros_like(each) for name, each in model.state_dict().items()}
    save_with_holes(state, out / f"model_world_size_{ranks}_rank_{rank}.pt")


def _zeros_like(tensor: DTensor) -> DTensor:
    local = torch.zeros(tensor.to_local().shape)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def write_zero(config: dict[str, Any], ranks: int, stage: int, out: Path) -> None:
    """Write the files that DeepSpeed's engine saves in bf16 with Adam, with one group of parameters."""
    shapes = model_shapes(config)
    param_shapes = [OrderedDict(shapes)]
    common = {"buffer_names": [], "optimizer": None, "param_shapes": param_shapes, "frozen_param_shapes": {},
              "frozen_param_fragments": {}, "shared_params": {},
              "ds_config": {"zero_optimization": {"stage": stage}}}  # fmt: skip
    if stage < 3:
        module = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        save_with_holes({"module": module, **common}, out / "mp_rank_00_model_states.pt")
        total = sum(map(prod, shapes.values()))
        length = -(-total // (2 * ranks)) * 2
    else:
        module = {name: torch.zeros(0, dtype=torch.bfloat16) for name in shapes}
        length = sum(-(-prod(shape) // ranks) for shape in shapes.values())
    for rank in range(ranks):
        prefix = f"zero_pp_rank_{rank}_mp_rank_00"
        if stage == 3:
            save_with_holes({"module": module, **common}, out / f"{prefix}_model_states.pt")
        flat, moment = torch.zeros(length), torch.zeros(length)
        base = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": torch.zeros(length)}},
                "param_groups": [{"lr": 0.1}]}  # fmt: skip
        if stage == 3:
            state = {"partition_count": ranks, "fp32_flat_groups": [flat], "optimizer_state_dict": base}
        else:
            state = {"partition_count": [ranks], "single_partition_of_fp32_groups": [flat],
                     "base_optimizer_state": base}  # fmt: skip
        save_with_holes(
            {"optimizer_state_dict": {**state, "zero_stage": stage}}, out / f"bf16_{prefix}_optim_states.pt"
        )
    base = out.with_name("base")
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text(json.dumps(config))


def write_megatron(model: Model, out: Path) -> None:
    """Write a `torch_dist` checkpoint with ckptx, from a checkpoint of zeros."""
    source = out.with_name("hf-of-zeros")
    write_checkpoint(source, model, sparse=True)
    time_command([*CKPTX, "convert", "to-megatron", str(source), str(out)])
    (out / "release" / "config.json").write_text((source / "config.json").read_text())
    shutil.rmtree(source)


class Source(NamedTuple):
    """A kind of checkpoint.

    Attributes:
        write: Writes it, given the model and the directory.
        path: Path to convert, below the directory.
        options: Options of `convert to-hf`.
        has_base: True if its config is in the directory `base` beside it, for `--base`.
    """

    write: Callable[[Model, Path], None]
    path: str = ""
    options: Sequence[str] = ()
    has_base: bool = False

    def base_options(self, directory: Path) -> list[str]:
        """Return `--base`, if the source needs it."""
        return ["--base", str(directory.with_name("base"))] if self.has_base else []


def _sources(ranks: int) -> dict[str, Source]:
    return {
        f"verl, FSDP2, {ranks} ranks": Source(lambda model, out: write_verl(model.config, ranks, out)),
        f"ZeRO 2 masters, {ranks} ranks": Source(
            lambda model, out: write_zero(model.config, ranks, 2, out), options=("--weights", "masters"), has_base=True
        ),
        f"ZeRO 3, {ranks} ranks": Source(lambda model, out: write_zero(model.config, ranks, 3, out), has_base=True),
        "Megatron torch_dist": Source(write_megatron, "release"),
    }


def measure_memory(work: Path) -> list[dict[str, Any]]:
    """Return seconds and peak RSS of the conversion of each source and size."""
    rows = []
    for name, source in _sources(_RANKS).items():
        for size, layers in _LAYERS.items():
            directory, out = work / "source", work / "out"
            source.write(llama(layers), directory)
            options = [*source.options, *source.base_options(directory)]
            command = [*CKPTX, "convert", "to-hf", str(directory / source.path), str(out), *options]
            seconds, peak = time_command(command)
            nbytes = sum(file.stat().st_size for file in out.iterdir())
            rows.append({"source": name, "parameters": size, "output_gib": round(nbytes / 2**30, 2),
                         "seconds": round(seconds, 2), "peak_rss_mib": round(peak / 2**20, 1)})  # fmt: skip
            print(f"  {rows[-1]}", flush=True)
            shutil.rmtree(directory)
            shutil.rmtree(out)
    return rows


def measure_ranks(work: Path) -> list[dict[str, Any]]:
    """Return seconds and peak RSS of commands that read no tensors, with the files of many ranks."""
    rows = []
    names = ("verl, FSDP2", "ZeRO 3")
    for name, source in _sources(_MANY_RANKS).items():
        if not name.startswith(names):
            continue
        directory = work / "source"
        source.write(Model(iter(()), _LLAMA_3_8B), directory)
        nbytes = sum(file.stat().st_size for file in directory.iterdir())
        options = source.base_options(directory)
        to_hf = ["convert", "to-hf", str(directory), str(work / "out"), "--dtype", "bf16", "--dry-run", *options]
        commands = {
            "inspect": ["inspect", str(directory)],
            "convert to-hf --dtype bf16 --dry-run": to_hf,
        }
        for title, command in commands.items():
            seconds, peak = time_command([*CKPTX, *command])
            rows.append({"source": name, "gib": round(nbytes / 2**30, 1), "command": title,
                         "seconds": round(seconds, 2), "peak_rss_mib": round(peak / 2**20, 1)})  # fmt: skip
            print(f"  {rows[-1]}", flush=True)
        shutil.rmtree(directory)
    return rows


def main() -> None:
    """Measure the selected parts, and write sources.json and sources.md."""
    arguments = parse_arguments(__doc__, ("memory", "ranks"))
    results: dict[str, Any] = {}
    tables = []
    with tempfile.TemporaryDirectory(dir=arguments.ram, prefix="ckptx-bench-") as directory:
        if "memory" in arguments.parts:
            results["memory"] = rows = measure_memory(Path(directory))
            columns = ("source", "parameters", "output", "seconds (one run)", "peak RSS")
            cells = [
                (row["source"], row["parameters"], f"{row['output_gib']} GiB", row["seconds"],
                 f"{row['peak_rss_mib']:.0f} MiB")
                for row in rows
            ]  # fmt: skip
            tables.append(table("`ckptx convert to-hf`, RAM disk", columns, cells))
        if "ranks" in arguments.parts:
            results["ranks"] = rows = measure_ranks(Path(directory))
            columns = ("source", "files", "command", "seconds (one run)", "peak RSS")
            cells = [
                (row["source"], f"{row['gib']} GiB", row["command"], row["seconds"], f"{row['peak_rss_mib']:.0f} MiB")
                for row in rows
            ]
            tables.append(table("Llama 3 8B in the files of 64 ranks, RAM disk", columns, cells))
    publish(arguments.results, "sources", results, tables)


if __name__ == "__main__":
    main()
