"""Write DeepSpeed checkpoints value by value, by the formulas of DeepSpeed's partitions and without DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.forged_fsdp import Archive, FunctionCall, Name, Object

Values = dict[str, np.ndarray[Any, Any]]

STAGE = Name("deepspeed.runtime.zero.config", "ZeroStageEnum")
SCALER = Name("deepspeed.runtime.fp16.loss_scaler", "LossScaler")


def bf16(values: np.ndarray[Any, Any]) -> bytes:
    """Round to bf16 as the optimizer does: to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


@dataclass
class Checkpoint:
    """The values of a checkpoint; a test changes some of them.

    Attributes:
        groups: Parameters of each group (stage 3: sub-group), as float32.
        ranks: Number of data parallel ranks.
        stage: 0 to 3.
        frozen, buffers: Tensors outside of the optimizer; as bf16.
        shared: Tied name -> stored name.
        model_keys, rank_keys: Other entries of the model states, and of `optimizer_state_dict`.
        step: The step of each rank; a scalar tensor.
        padding: Elements after each parameter, in stages 1 and 2.
    """

    groups: list[Values]
    ranks: int = 2
    stage: int = 2
    frozen: Values = field(default_factory=dict)
    buffers: Values = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    model_keys: dict[str, Any] = field(default_factory=dict)
    rank_keys: dict[str, Any] = field(default_factory=dict)
    step: dict[int, float] = field(default_factory=dict)
    padding: int = 0

    def write(self, root: Path) -> Path:
        root.mkdir(parents=True, exist_ok=True)
        for rank in range(self.ranks if self.stage == 3 else 1):
            name = f"zero_pp_rank_{rank}_mp_rank_00" if self.stage == 3 else "mp_rank_00"
            self.write_model(root / f"{name}_model_states.pt", rank)
        for rank in range(self.ranks if self.stage else 0):
            self.write_optimizer(root / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", rank)
        return root

    def write_universal(self, root: Path) -> Path:
        """Write the model states and one file per tensor, as `ds_to_universal --inject_missing_state` makes them."""
        for rank in range(self.ranks if self.stage == 3 else 1):
            name = f"zero_pp_rank_{rank}_mp_rank_00" if self.stage == 3 else "mp_rank_00"
            (root / "zero").mkdir(parents=True, exist_ok=True)
            self.write_model(root / f"{name}_model_states.pt", rank)
        for name, values in self.parameters().items():
            states = {"fp32": values, "exp_avg": values * np.float32(2), "exp_avg_sq": values * values}
            for key, each in states.items():
                self.write_parameter(root / "zero" / name / f"{key}.pt", each)
            if self.stage < 3:
                archive = Archive()
                step = archive.stored("FloatStorage", (), np.float32(3).tobytes())
                archive.write(root / "zero" / name / "step.pt", step)
        for name, values in {**self.frozen, **self.buffers}.items() if self.stage < 3 else ():
            self.write_parameter(root / "zero" / name / "fp32.pt", values)
        Archive().write(root / "zero" / "optimizer_state.pt", {"zero_stage": self.stage})
        return root

    def write_parameter(self, path: Path, values: np.ndarray[Any, Any], **keys: Any) -> None:
        """Write one tensor of a universal checkpoint: in a dict, but in stage 3 alone and flat."""
        path.parent.mkdir(exist_ok=True)
        archive = Archive()
        tensor = archive.stored("FloatStorage", values.shape if self.stage < 3 else (values.size,), values.tobytes())
        archive.write(path, tensor if self.stage == 3 else {"param": tensor, "cat_dim": 0, **keys})

    def write_model(self, path: Path, rank: int = 0) -> None:
        archive = Archive()
        module: dict[str, Any] = {}
        for name, values in {**self.parameters(), **self.frozen}.items():
            if self.stage == 3:
                module[name] = archive.stored("BFloat16Storage", (0,), b"")
            else:
                module[name] = archive.stored("BFloat16Storage", values.shape, bf16(values))
        for name, values in self.buffers.items():
            module[name] = archive.stored("BFloat16Storage", values.shape, bf16(values))
        for name, stored in self.shared.items():
            module[name] = module[stored]
        fragments = {}
        for name, values in self.frozen.items() if self.stage == 3 else ():
            part = _split(values, self.ranks)[rank]
            fragments[name] = archive.stored("BFloat16Storage", part.shape, bf16(part))
        state = {
            "module": module,
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": [_shapes(group) for group in self.groups] if self.stage else None,
            "frozen_param_shapes": _shapes(self.frozen),
            "frozen_param_fragments": fragments,
            "shared_params": self.shared if rank == 0 else {},
            "ds_config": {"zero_optimization": {"stage": self.stage}},
            **self.model_keys,
        }
        archive.write(path, {key: value for key, value in state.items() if value is not ...})

    def write_optimizer(self, path: Path, rank: int) -> None:
        archive = Archive()
        masters, states = [], {}
        for index, group in enumerate(self.groups):
            flat = self.flat(group, rank)
            masters.append(archive.tensor(flat[: self.lean_length(group, rank)] if self.stage < 3 else flat))
            states[index] = {
                "step": archive.stored("FloatStorage", (), np.float32(self.step.get(rank, 3)).tobytes()),
                "exp_avg": archive.tensor(flat * 2),
                "exp_avg_sq": archive.tensor(flat * flat),
            }
        base = {"state": states, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}
        state: dict[str, Any] = {"loss_scaler": Object(SCALER, (), {"cur_scale": 1.0})}
        if self.stage == 3:
            state |= {"partition_count": self.ranks, "fp32_flat_groups": masters, "optimizer_state_dict": base}
        else:
            state |= {
                "partition_count": [self.ranks] * len(self.groups),
                "single_partition_of_fp32_groups": masters,
                "base_optimizer_state": base,
                "param_alignment_paddings": [[self.padding] * (len(group) - 1) + [0] for group in self.groups],
            }
        state |= {"zero_stage": FunctionCall(STAGE, (self.stage,)), **self.rank_keys}
        archive.write(path, {"optimizer_state_dict": {key: each for key, each in state.items() if each is not ...}})

    def parameters(self) -> Values:
        return {name: values for group in self.groups for name, values in group.items()}

    def flat(self, group: Values, rank: int) -> np.ndarray[Any, Any]:
        """Return the flat tensor of a rank, padded; the padding is not a number, as memory that is not initialized."""
        if self.stage == 3:
            parts = [_split(values, self.ranks, pad=True)[rank] for values in group.values()]
            return np.concatenate(parts or [np.zeros(0, np.float32)])
        whole = self._concatenated(group)
        padded = np.full(-(-len(whole) // (2 * self.ranks)) * 2 * self.ranks, np.nan, np.float32)
        padded[: len(whole)] = whole
        return padded.reshape(self.ranks, -1)[rank]

    def lean_length(self, group: Values, rank: int) -> int:
        """Return the length of the masters of a rank without the padding, which is on the last rank."""
        part = len(self.flat(group, rank))
        return max(len(self._concatenated(group)) - rank * part, 0) if rank == self.ranks - 1 else part

    def _concatenated(self, group: Values) -> np.ndarray[Any, Any]:
        gap = np.full(self.padding, np.nan, np.float32)
        parts = [part for values in group.values() for part in (values.ravel(), gap)]
        return np.concatenate(parts[:-1])


def _shapes(values: Values) -> dict[str, Any]:
    return {name: FunctionCall(Name("torch", "Size"), (each.shape,)) for name, each in values.items()}


def _split(values: np.ndarray[Any, Any], ranks: int, pad: bool = True) -> list[np.ndarray[Any, Any]]:
    """Return the part of each rank in stage 3, padded to equal lengths."""
    length = -(-prod(values.shape) // ranks)
    padded = np.full(length * ranks, np.nan, np.float32)
    padded[: values.size] = values.ravel()
    return list(padded.reshape(ranks, length)) if length else [np.zeros(0, np.float32)] * ranks


def numbers(*shapes: tuple[int, ...], seed: int = 0, prefix: str = "w") -> Values:
    """Return random parameters `w0`, `w1`, ... of these shapes."""
    generator = np.random.default_rng(seed)
    return {f"{prefix}{at}": generator.standard_normal(shape).astype(np.float32) for at, shape in enumerate(shapes)}
