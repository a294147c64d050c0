"""What the runtime of ckptx computes, held against `stock_outputs.py`: a transformers that knows nothing of ckptx.

Everything lies in one folder: hf/NAME, inputs/NAME.pt, and what each side computed in stock/, stock-tp/, stock-dcp/ and
ours-tp/.
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
from ckptx.runtime.checkpointing.load import load_from
from ckptx.runtime.checkpointing.reading import open_source
from ckptx.runtime.model.build import build_model, materialize
from ckptx.runtime.parallel.parallelize import parallelize
from ckptx.runtime.parallel.tensor_parallel import styles
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks
from ckptx.runtime.parallel.tensor_parallel.plans import check_heads, find_plan
from ckptx.runtime.parity.inputs.batch import make_inputs
from ckptx.runtime.parity.noise import NOISE_MULTIPLE, NUM_DRAWS, perturb_embeddings, rounding_tolerance
from tests.support.forked import Forked
from tests.support.installed import INSTALLED, IS_ASKED
from tests.support.models import EVERY, write
from tests.support.ranks import free_port
from tests.support.stock_outputs import backward, fingerprint, fingerprints, outputs_of, run
from tests.support.tensor_parallel import whole_gradient

TP = 2
_PROGRAM = Path(__file__).with_name("stock_outputs.py")
_PATIENCE = 1800.0  # seconds for all models

Computed = dict[str, Any]


# ---------------------------------------------------------------------------------------------------- the other side


def prepare(work: Path, names: Iterable[str], *, dtype: str = "float32", dcp: bool = False) -> None:
    """Writes what both sides read.

    Args:
        work: Where.
        names: Recipes; written in float32.
        dtype: They are loaded in. The inputs are those of `verify --run`, which reach every tower.
        dcp: Write each as a DCP under the names of the model, too, cut for two ranks.
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


def ask_transformers(work: Path, names: Iterable[str], *, tp: int = 1) -> None:
    """Has `stock_outputs.py` load and compute, in processes of its own."""
    words = [str(_PROGRAM), str(work), *names]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(tp)}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(tp)]
    started = [Forked(_PROGRAM.read_text(), words, each) for each in ranks]
    said = [process.communicate(_PATIENCE) for process in started]
    for process, (_, text) in zip(started, said, strict=True):
        assert process.returncode == 0, text[-4000:]


def computed(work: Path, side: str, name: str) -> Computed:
    """What a side computed: stock, stock-tp, stock-dcp, ours-tp."""
    found: Computed = torch.load(work / side / f"{name}.pt", weights_only=True)
    return found


class Judge:
    """Asks transformers about all recipes of a kind at once, when the first of them is wanted."""

    def __init__(self, work: Path, fast: Collection[str], *, tp: int = 1, **how: Any) -> None:
        self.work, self._fast, self._tp, self._how = work, fast, tp, how
        self._asked: set[bool] = set()

    def __call__(self, name: str, side: str = "stock") -> Computed:
        is_fast = name in self._fast
        if is_fast not in self._asked:
            names = [each for each in EVERY if (each in self._fast) == is_fast]
            prepare(self.work, names, **self._how)
            ask_transformers(self.work, names, tp=self._tp)
            self._asked.add(is_fast)
        error = computed(self.work, "stock", name).get("error")
        assert error is None or not IS_ASKED, error
        if error is not None:
            pytest.skip(f"transformers {INSTALLED} in one piece: {error}")
        return computed(self.work, side, name)


# ---------------------------------------------------------------------------------------------------------- our side


class _Inputs(NamedTuple):
    batch: dict[str, torch.Tensor]
    labels: torch.Tensor
    dtype: torch.dtype


def _inputs_of(work: Path, name: str) -> _Inputs:
    batch, labels, dtype = torch.load(work / "inputs" / f"{name}.pt", weights_only=True)
    return _Inputs(batch, labels, getattr(torch, dtype))


def in_one_piece(work: Path, name: str) -> nn.Module:
    """Built and loaded by the runtime."""
    path = work / "hf" / name
    with open_source(path) as source:
        model = build_model(path, dtype=_inputs_of(work, name).dtype, untied=source.find_untied_names())
        materialize(model)
        load_from(model, source, tied=source.find_tied_names())
    return model.eval()


def described(work: Path, name: str, model: nn.Module) -> Computed:
    """What a model holds and computes, as `stock_outputs.py` says it of its own."""
    batch, labels, _ = _inputs_of(work, name)
    held = {"tensors": fingerprints(model), "stored": sorted(model.state_dict())}
    return {**held, **run(model, batch, labels)}


def cut_on_rank(rank: int, world_size: int, work: Path, name: str, skipped: str = "") -> None:
    """The same under TP, on one rank of the gloo pool; `skipped` is a function of `styles` that does nothing."""
    skip = mock.patch.object(styles, skipped, lambda given, *more: given) if skipped else nullcontext()
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp_shard", "tp"))
    with skip:
        done = _cut(work, name, mesh)
    if rank == 0:
        (work / "ours-tp").mkdir(exist_ok=True)
        torch.save(done, work / "ours-tp" / f"{name}.pt")


def _cut(work: Path, name: str, mesh: DeviceMesh) -> Computed:
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
    ranks = TpRanks.of(mesh["tp"])
    gradients = {
        each: whole_gradient(each, parameter, layout, ranks)
        for each, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"outputs": outputs, "loss": loss, "gradients": gradients}


# -------------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two sides are apart, and how far they may be.

    Attributes:
        outputs: Largest difference of outputs, and what is allowed.
        loss: Likewise.
        gradients: By parameter; one that only one side has is infinitely far away.
    """

    outputs: tuple[float, float]
    loss: tuple[float, float] | None
    gradients: dict[str, tuple[float, float]]

    @property
    def worst_gradient(self) -> tuple[str, float, float]:
        """The one that takes most of what it may."""
        name = max(self.gradients, key=lambda each: _ratio(*self.gradients[each]), default="")
        return name, *self.gradients.get(name, (0.0, 0.0))

    @property
    def faults(self) -> list[str]:
        named = {"outputs": self.outputs, **({"loss": self.loss} if self.loss else {}), **self.gradients}
        return [f"{name}: {found:.2e} of {limit:.2e}" for name, (found, limit) in named.items() if not found <= limit]


def _ratio(found: float, limit: float) -> float:
    return found / limit if limit else float("inf") if found else 0.0


def allowed(work: Path, name: str, whole: Computed) -> Computed:
    """What rounding may do, as `verify --run` measures it.

    Eight times what it does when every embedding moves by one unit in the last place; and no less than eight units in
    the last place of the largest element, for a gradient that does not move then is no more exact for that. The model
    that is moved is ours: that it computes what `whole` says, bit for bit, is what `test_oracle_from_pretrained.py`
    asks.
    """
    model, (batch, labels, dtype) = in_one_piece(work, name), _inputs_of(work, name)
    limits: Computed = {
        "outputs": 0.0,
        "loss": rounding_tolerance(dtype, abs(float(whole["loss"]))),
        "gradients": {key: rounding_tolerance(dtype, _largest(each)) for key, each in whole["gradients"].items()},
    }
    for draw in range(NUM_DRAWS):
        with perturb_embeddings(model, draw):
            found = between(whole, run(model, batch, labels))
        limits["outputs"] = max(limits["outputs"], NOISE_MULTIPLE * found["outputs"])
        limits["loss"] = max(limits["loss"], NOISE_MULTIPLE * found["loss"])
        for key, apart in found["gradients"].items():
            limits["gradients"][key] = max(limits["gradients"][key], NOISE_MULTIPLE * apart)
    return limits


def distance(first: Computed, second: Computed, limits: Computed) -> Distance:
    """Between what two sides computed; of outputs alone, where one could not go on to gradients."""
    found = between(first, second)
    return Distance(
        (found["outputs"], limits["outputs"]),
        (found["loss"], limits["loss"]) if "loss" in found else None,
        {key: (apart, limits["gradients"].get(key, 0.0)) for key, apart in found["gradients"].items()},
    )


def between(first: Computed, second: Computed) -> Computed:
    """Largest differences of outputs, loss and gradients.

    What one side does not train, because the constructor of the class says so, is left out.
    """
    outputs = max(_furthest(a, b) for a, b in zip(first["outputs"], second["outputs"], strict=True))
    if "loss" not in first or "loss" not in second:
        return {"outputs": outputs, "gradients": {}}
    ours, theirs = first["gradients"], second["gradients"]
    frozen = {*first.get("frozen", ()), *second.get("frozen", ())}
    return {
        "outputs": outputs,
        "loss": abs(float(first["loss"]) - float(second["loss"])),
        "gradients": {
            key: _furthest(ours.get(key), theirs.get(key)) for key in {**ours, **theirs} if key not in frozen
        },
    }


def _furthest(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    if first is None or second is None:
        there = first if first is not None else second
        return 0.0 if there is None or not there.any() else float("inf")
    assert first.shape == second.shape
    return float((first - second).abs().max()) if first.numel() else 0.0


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def unequal(ours: Computed, theirs: Computed) -> list[str]:
    """What two models in one piece do not have in common, bit for bit."""
    held, known = ours["tensors"], theirs["tensors"]
    found = [
        f"{name}: {held.get(name)}, not {known.get(name)}"
        for name in {**held, **known}
        if held.get(name) != known.get(name)
    ]
    if ours["stored"] != theirs["stored"]:
        found.append("names of the state dict")
    pairs = zip([*ours["outputs"], ours["loss"]], [*theirs["outputs"], theirs["loss"]], strict=True)
    found += [f"output {number}" for number, (a, b) in enumerate(pairs) if fingerprint(a) != fingerprint(b)]
    frozen = set(theirs.get("frozen", ()))
    grads, wanted = ours["gradients"], theirs["gradients"]
    return found + [
        f"gradient of {name}"
        for name in {**grads, **wanted}
        if name not in frozen
        and not (name in grads and name in wanted and fingerprint(grads[name]) == fingerprint(wanted[name]))
    ]
