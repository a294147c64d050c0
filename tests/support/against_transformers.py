"""Compare the outputs of the ckptx runtime with `stock_outputs.py`, which runs transformers without ckptx.

All files are in one directory: hf/NAME, inputs/NAME.pt, and the outputs in stock/, stock-tp/, stock-dcp/ and ckptx-tp/.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ckptx
from ckptx.architecture.run_support import check_heads
from ckptx.runtime.checkpointing.load import load_from
from ckptx.runtime.checkpointing.reading import open_source
from ckptx.runtime.model.build import build_model, materialize
from ckptx.runtime.parallel.parallelize import parallelize
from ckptx.runtime.parallel.tensor_parallel import styles
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks
from ckptx.runtime.parallel.tensor_parallel.plans import find_plan
from ckptx.runtime.parity.inputs.batch import make_inputs
from ckptx.runtime.parity.noise import NOISE_MULTIPLE, NUM_DRAWS, perturb_embeddings, rounding_tolerance
from tests.support.forked_programs import ForkedProgram
from tests.support.models import EVERY, write
from tests.support.ranks import free_port
from tests.support.stock_outputs import backward, fingerprint, fingerprints, outputs_of, run
from tests.support.tensor_parallel import gather_gradient
from tests.support.transformers_version import INSTALLED, IS_TABLES_VERSION

TP = 2
_PROGRAM = Path(__file__).with_name("stock_outputs.py")
_TIMEOUT = 1800.0  # timeout for all models, in seconds

Results = dict[str, Any]


# ---------------------------------------------------------------------------------------------------- transformers


def prepare(work: Path, names: Iterable[str], *, dtype: str = "float32", dcp: bool = False) -> None:
    """Write the checkpoints and inputs that ckptx and transformers read.

    Args:
        work: Directory of all files.
        names: Recipes to write, in float32.
        dtype: Dtype to load them in. The inputs are those of `verify --run`, which reach every tower.
        dcp: Also write each model as a DCP with transformers names, sharded for two ranks.
    """
    (work / "inputs").mkdir(parents=True, exist_ok=True)
    for name in names:
        write(replace(EVERY[name], dtype=torch.float32), work / "hf" / name)
        if dcp:
            ckptx.reshard(work / "hf" / name, work / "dcp" / name, tp=TP, to="dcp", names="model")
        model = build_model(work / "hf" / name)
        takes_mask = "attention_mask" in inspect.signature(type(model).forward).parameters
        made = make_inputs(model.config.to_dict(), shards=TP, is_padded=takes_mask)
        batch = {
            key: each.to(getattr(torch, dtype)) if each.is_floating_point() else each
            for key, each in made.batch.items()
        }
        torch.save((batch, made.labels, dtype), work / "inputs" / f"{name}.pt")


def run_transformers(work: Path, names: Iterable[str], *, tp: int = 1) -> None:
    """Run `stock_outputs.py` for the recipes in `tp` separate processes; it writes its results into `work`."""
    arguments = [str(_PROGRAM), str(work), *names]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(tp)}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(tp)]
    started = [ForkedProgram(_PROGRAM.read_text(), arguments, each) for each in ranks]
    outputs = [process.communicate(_TIMEOUT) for process in started]
    for process, (_, text) in zip(started, outputs, strict=True):
        assert process.returncode == 0, text[-4000:]


def load_results(work: Path, directory: str, name: str) -> Results:
    """Load the results of a model from one of the directories stock, stock-tp, stock-dcp and ckptx-tp."""
    found: Results = torch.load(work / directory / f"{name}.pt", weights_only=True)
    return found


class TransformersResults:
    """Results of transformers; all fast recipes, or all others, run when the first of them is requested.

    Args:
        work: Directory of all files.
        fast: Names of the recipes that run together; all others run together later.
        tp: Number of ranks of transformers.
        options: Further arguments of `prepare`.
    """

    def __init__(self, work: Path, fast: Collection[str], *, tp: int = 1, **options: Any) -> None:
        self.work, self._fast, self._tp, self._options = work, fast, tp, options
        self._finished: set[bool] = set()

    def __call__(self, name: str, directory: str = "stock") -> Results:
        is_fast = name in self._fast
        if is_fast not in self._finished:
            names = [each for each in EVERY if (each in self._fast) == is_fast]
            prepare(self.work, names, **self._options)
            run_transformers(self.work, names, tp=self._tp)
            self._finished.add(is_fast)
        error = load_results(self.work, "stock", name).get("error")
        assert error is None or not IS_TABLES_VERSION, error
        if error is not None:
            pytest.skip(f"transformers {INSTALLED}, unsharded: {error}")
        return load_results(self.work, directory, name)


# ------------------------------------------------------------------------------------------------------------- ckptx


class _Inputs(NamedTuple):
    batch: dict[str, torch.Tensor]
    labels: torch.Tensor
    dtype: torch.dtype


def _inputs_of(work: Path, name: str) -> _Inputs:
    batch, labels, dtype = torch.load(work / "inputs" / f"{name}.pt", weights_only=True)
    return _Inputs(batch, labels, getattr(torch, dtype))


def load_unsharded_model(work: Path, name: str) -> nn.Module:
    """Build and load a model with the runtime."""
    path = work / "hf" / name
    with open_source(path) as source:
        model = build_model(path, dtype=_inputs_of(work, name).dtype, untied=source.find_untied_names())
        materialize(model)
        load_from(model, source, tied=source.find_tied_names())
    return model.eval()


def compute_results(work: Path, name: str, model: nn.Module) -> Results:
    """Return the parameters and outputs of a model, in the form of `stock_outputs.py`."""
    batch, labels, _ = _inputs_of(work, name)
    parameters = {"tensors": fingerprints(model), "stored": sorted(model.state_dict())}
    return {**parameters, **run(model, batch, labels)}


def save_sharded_results(rank: int, world_size: int, work: Path, name: str, skipped: str = "") -> None:
    """Run a model under TP on one rank of the gloo pool; rank 0 saves the results in ckptx-tp/.

    Args:
        rank: Rank in the pool.
        world_size: Number of TP ranks.
        work: Directory of all files.
        name: Recipe of the model.
        skipped: Function of `styles` that does nothing during the run, to inject a defect; "" for none.
    """
    skip = mock.patch.object(styles, skipped, lambda given, *more: given) if skipped else nullcontext()
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp_shard", "tp"))
    with skip:
        results = _compute_sharded_results(work, name, mesh)
    if rank == 0:
        (work / "ckptx-tp").mkdir(exist_ok=True)
        torch.save(results, work / "ckptx-tp" / f"{name}.pt")


def _compute_sharded_results(work: Path, name: str, mesh: DeviceMesh) -> Results:
    path, (batch, labels, dtype) = work / "hf" / name, _inputs_of(work, name)
    with open_source(path) as source:
        assert source.config is not None and source.architecture is not None
        check_heads(source.config, mesh["tp"].size(), source.architecture)
        model = build_model(path, dtype=dtype, untied=source.find_untied_names())
        layout = parallelize(model, mesh, find_plan(model, source.config)).layout
        assert layout is not None
        materialize(model)
        load_from(model, source, regions=layout.local_regions, tied=source.find_tied_names())
    outputs, loss = outputs_of(model.eval(), batch), backward(model, batch, labels)
    ranks = TpRanks.from_mesh(mesh["tp"])
    gradients = {
        each: gather_gradient(each, parameter, layout, ranks)
        for each, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"outputs": outputs, "loss": loss, "gradients": gradients}


# -------------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between two results, and their tolerances.

    Attributes:
        outputs: Largest difference of outputs, and its tolerance.
        loss: Difference of the loss, and its tolerance.
        gradients: Differences and tolerances by parameter; infinite if only one result has the gradient.
    """

    outputs: tuple[float, float]
    loss: tuple[float, float] | None
    gradients: dict[str, tuple[float, float]]

    @property
    def worst_gradient(self) -> tuple[str, float, float]:
        """Gradient with the largest difference relative to its tolerance."""
        name = max(self.gradients, key=lambda each: _ratio(*self.gradients[each]), default="")
        return name, *self.gradients.get(name, (0.0, 0.0))

    @property
    def faults(self) -> list[str]:
        """Differences that exceed their tolerance, one line each."""
        named = {"outputs": self.outputs, **({"loss": self.loss} if self.loss else {}), **self.gradients}
        return [f"{name}: {found:.2e} of {limit:.2e}" for name, (found, limit) in named.items() if not found <= limit]


def _ratio(found: float, limit: float) -> float:
    return found / limit if limit else float("inf") if found else 0.0


def measure_tolerances(work: Path, name: str, unsharded: Results) -> Results:
    """Return the tolerances for rounding, measured as by `verify --run`.

    A tolerance is eight times the difference after every embedding is perturbed by one ULP, and at least eight ULPs of
    the largest element, because a gradient that does not change is still subject to rounding. The perturbed model is
    that of ckptx; `test_oracle_from_pretrained.py` checks that it computes the same as `unsharded`, bit for bit.
    """
    model, (batch, labels, dtype) = load_unsharded_model(work, name), _inputs_of(work, name)
    limits: Results = {
        "outputs": 0.0,
        "loss": rounding_tolerance(dtype, abs(float(unsharded["loss"]))),
        "gradients": {key: rounding_tolerance(dtype, _largest(each)) for key, each in unsharded["gradients"].items()},
    }
    for draw in range(NUM_DRAWS):
        with perturb_embeddings(model, draw):
            found = largest_differences(unsharded, run(model, batch, labels))
        limits["outputs"] = max(limits["outputs"], NOISE_MULTIPLE * found["outputs"])
        limits["loss"] = max(limits["loss"], NOISE_MULTIPLE * found["loss"])
        for key, difference in found["gradients"].items():
            limits["gradients"][key] = max(limits["gradients"][key], NOISE_MULTIPLE * difference)
    return limits


def compare_results(first: Results, second: Results, limits: Results) -> Comparison:
    """Compare two results; only the outputs if one of them has no gradients."""
    found = largest_differences(first, second)
    return Comparison(
        (found["outputs"], limits["outputs"]),
        (found["loss"], limits["loss"]) if "loss" in found else None,
        {key: (difference, limits["gradients"].get(key, 0.0)) for key, difference in found["gradients"].items()},
    )


def largest_differences(first: Results, second: Results) -> Results:
    """Return the largest differences of outputs, loss and gradients.

    Parameters that the constructor of the class excludes from training are not compared.
    """
    outputs = max(_max_difference(a, b) for a, b in zip(first["outputs"], second["outputs"], strict=True))
    if "loss" not in first or "loss" not in second:
        return {"outputs": outputs, "gradients": {}}
    ours, theirs = first["gradients"], second["gradients"]
    frozen = {*first.get("frozen", ()), *second.get("frozen", ())}
    return {
        "outputs": outputs,
        "loss": abs(float(first["loss"]) - float(second["loss"])),
        "gradients": {
            key: _max_difference(ours.get(key), theirs.get(key)) for key in {**ours, **theirs} if key not in frozen
        },
    }


def _max_difference(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    if first is None or second is None:
        other = first if first is not None else second
        return 0.0 if other is None or not other.any() else float("inf")
    assert first.shape == second.shape
    return float((first - second).abs().max()) if first.numel() else 0.0


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def list_differences(ours: Results, theirs: Results) -> list[str]:
    """List the tensors, outputs and gradients that are not bit-identical in two unsharded models."""
    our_tensors, their_tensors = ours["tensors"], theirs["tensors"]
    found = [
        f"{name}: {our_tensors.get(name)}, not {their_tensors.get(name)}"
        for name in {**our_tensors, **their_tensors}
        if our_tensors.get(name) != their_tensors.get(name)
    ]
    if ours["stored"] != theirs["stored"]:
        found.append("names of the state dict")
    pairs = zip([*ours["outputs"], ours["loss"]], [*theirs["outputs"], theirs["loss"]], strict=True)
    found += [f"output {number}" for number, (a, b) in enumerate(pairs) if fingerprint(a) != fingerprint(b)]
    frozen = set(theirs.get("frozen", ()))
    our_gradients, their_gradients = ours["gradients"], theirs["gradients"]
    return found + [
        f"gradient of {name}"
        for name in {**our_gradients, **their_gradients}
        if name not in frozen
        and not (
            name in our_gradients
            and name in their_gradients
            and fingerprint(our_gradients[name]) == fingerprint(their_gradients[name])
        )
    ]
