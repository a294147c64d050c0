"""Load and run models with stock transformers, as a separate program without ckptx.

    python stock_outputs.py WORK NAME ...

For each model WORK/hf/NAME, run on WORK/inputs/NAME.pt, it writes the loaded tensors and the results:

    `from_pretrained`, unsharded                                                 -> WORK/stock/NAME.pt
    a model loaded with torch from WORK/dcp/NAME, if it exists                   -> WORK/stock-dcp/NAME.pt
    sharded by transformers' own plan; with RANK, WORLD_SIZE=2, ... set          -> WORK/stock-tp/NAME.pt

It takes many models at once, because imports are slow.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.tensor import DTensor

OUTPUTS = ("logits", "prediction_logits", "seq_relationship_logits", "last_hidden_state")
_TIMEOUT = timedelta(seconds=60)  # timeout of a rank whose peer failed

Inputs = Mapping[str, torch.Tensor]


def fingerprint(tensor: torch.Tensor) -> str:
    """Return the dtype, the shape and a hash of the bytes of a tensor."""
    plain = tensor.detach().contiguous()
    data = plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return f"{plain.dtype} {tuple(plain.shape)} {hashlib.sha256(data).hexdigest()}"


def fingerprints(model: torch.nn.Module) -> dict[str, str]:
    """Return fingerprints of all parameters and buffers by all their names, including non-persistent ones."""
    found = {name: fingerprint(each) for name, each in model.named_parameters(remove_duplicate=False)}
    return found | {name: fingerprint(each) for name, each in model.named_buffers(remove_duplicate=False)}


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def forward(model: Any, inputs: Inputs, **more: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return all comparable outputs, and the loss of the class if it has one."""
    found = model(**inputs, **more)
    return [gather(found[name]) for name in OUTPUTS if found.get(name) is not None], found.get("loss")


def outputs_of(model: Any, inputs: Inputs) -> list[torch.Tensor]:
    """Return the outputs without gradients, for which transformers has other code paths."""
    with torch.no_grad():
        return [each.clone() for each in forward(model, inputs)[0]]


def backward(model: Any, inputs: Inputs, labels: torch.Tensor) -> torch.Tensor:
    """Run a backward pass, and return the loss.

    The loss is that of the class if it takes labels for these outputs, else a function of all outputs.
    """
    outputs, _ = forward(model, inputs)
    takes = "labels" in inspect.signature(type(model).forward).parameters and outputs[0].shape[:-1] == labels.shape
    again, loss = forward(model, inputs, labels=labels) if takes else (outputs, None)
    if loss is None:
        loss = torch.stack([each.float().pow(2).mean() for each in again]).sum()
    model.zero_grad()
    loss.backward()
    return loss.detach()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients by parameter, gathered."""
    return {name: gather(each.grad).clone() for name, each in model.named_parameters() if each.grad is not None}


def run(model: Any, inputs: Inputs, labels: torch.Tensor) -> dict[str, Any]:
    """Return outputs, loss and gradients."""
    outputs = outputs_of(model, inputs)
    return {"outputs": outputs, "loss": backward(model, inputs, labels), "gradients": gradients(model)}


class Task:
    """A model to load and to run."""

    def __init__(self, work: Path, name: str) -> None:
        self.hf, self.dcp, self.name = work / "hf" / name, work / "dcp" / name, name
        self.inputs, self.labels, dtype = torch.load(work / "inputs" / f"{name}.pt", weights_only=True)
        self.dtype = getattr(torch, dtype)
        self.cls = getattr(transformers, json.loads((self.hf / "config.json").read_text())["architectures"][0])

    def from_pretrained(self, **options: Any) -> Any:
        model, info = self.cls.from_pretrained(self.hf, dtype=self.dtype, output_loading_info=True, **options)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            assert not info[kind], f"{kind}: {sorted(info[kind])}"
        return model.eval()

    def build_random(self) -> Any:
        """Build the model with random weights."""
        return self.cls._from_config(self.cls.config_class.from_pretrained(self.hf), dtype=self.dtype).eval()

    def from_dcp(self) -> Any:
        """Load the DCP with torch under the names of the model; all names must exist.

        Tied names get separate parameters if the DCP has different values for them, as with `from_pretrained`.
        """
        model = self.build_random()
        state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        dcp.load(state, storage_reader=dcp.FileSystemReader(self.dcp), no_dist=True)
        first: dict[int, str] = {}
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            if not torch.equal(state[name], state[first.setdefault(id(parameter), name)]):
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(torch.zeros_like(parameter)))
        model.load_state_dict(state, strict=True)
        return model

    def results(self, model: Any) -> dict[str, Any]:
        """Return the parameters and results of the unsharded model."""
        parameters = {"tensors": fingerprints(model), "stored": sorted(model.state_dict())}
        return {**parameters, **run(model, self.inputs, self.labels)}

    def frozen(self) -> list[str]:
        """Return the parameters that the constructor of the class excludes from training."""
        return sorted(name for name, each in self.build_random().named_parameters() if not each.requires_grad)

    def tensor_parallel_results(self, world_size: int) -> dict[str, Any]:
        """Return the results under transformers' own tensor parallelism, or the error of transformers."""
        from transformers.distributed import DistributedConfig

        done: dict[str, Any] = {}
        step = "loading"
        try:
            with _without_accelerate():
                model = self.from_pretrained(distributed_config=DistributedConfig(tp_size=world_size))
            step = "forward"
            done["outputs"] = outputs_of(model, self.inputs)
            step = "backward"
            done |= {"loss": backward(model, self.inputs, self.labels), "gradients": gradients(model)}
        except Exception as error:  # an error of any kind is the result for this class
            done["error"] = f"{step}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        errors_by_rank: list[Any] = [None] * world_size
        dist.all_gather_object(errors_by_rank, done.get("error"))
        errors = [each for each in errors_by_rank if each is not None]
        return {**done, "error": errors[0]} if errors else done


def _without_accelerate() -> Any:
    """Replace the check for accelerate, which transformers requires for any device but does not use on a CPU."""
    return mock.patch("transformers.integrations.accelerate.is_accelerate_available", lambda *args: True)


def _all_results(task: Task, world_size: int) -> dict[str, dict[str, Any]]:
    """Return all results by directory."""
    try:
        done = {"stock": task.results(task.from_pretrained())}
    except Exception as error:  # an older transformers may fail for a model, and the others are still needed
        return {"stock": {"error": f"{type(error).__name__}: {error}"}}
    if task.dcp.exists():
        done["stock-dcp"] = task.results(task.from_dcp())
    if world_size > 1:
        done["stock-tp"] = task.tensor_parallel_results(world_size)
    return done


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("names", nargs="+")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    for name in arguments.names:
        task = Task(arguments.work, name)
        done, frozen = _all_results(task, world_size), task.frozen()
        for directory, found in done.items() if rank == 0 else ():
            (arguments.work / directory).mkdir(exist_ok=True)
            torch.save({**found, "frozen": frozen}, arguments.work / directory / f"{name}.pt")
    if world_size > 1:
        dist.destroy_process_group()
    ours = {name for name in sys.modules if name.split(".")[0] in ("ckptx", "support")}
    ours -= {"support", "tests.support.forked_programs", "tests.support.preload"}  # modules that started this program
    assert not ours, f"ckptx was imported: {ours}"


if __name__ == "__main__":
    main()
