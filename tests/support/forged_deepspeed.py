"""Write DeepSpeed checkpoints value by value, by the formulas of DeepSpeed's partitions and without DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
        tp_rank: Tensor parallel rank that writes the files.
        storage: Storage class of the trained weights below stage 3; other classes get the bits of bf16.
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
    tp_rank: int = 0
    storage: str = "BFloat16Storage"

    def write(self, root: Path) -> Path:
        root.mkdir(parents=True, exist_ok=True)
        self.write_models(root)
        for rank in range(self.ranks if self.stage else 0):
            self.write_optimizer(root / f"bf16_zero_pp_rank_{rank}_mp_rank_{self.tp_rank:02d}_optim_states.pt", rank)
        return root

    def write_models(self, root: Path) -> None:
        """Write the model states of all data ranks."""
        for rank in range(self.ranks if self.stage == 3 else 1):
            name = f"mp_rank_{self.tp_rank:02d}_model_states.pt"
            self.write_model(root / (f"zero_pp_rank_{rank}_{name}" if self.stage == 3 else name), rank)

    def write_universal(self, root: Path) -> Path:
        """Write the model states and one file per tensor, as `ds_to_universal --inject_missing_state` makes them."""
        (root / "zero").mkdir(parents=True, exist_ok=True)
        self.write_models(root)
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
                module[name] = archive.stored(self.storage, values.shape, bf16(values))
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
            "shared_params": self.shared if rank == 0 and self.tp_rank == 0 else {},
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


@dataclass
class Rule:
    """The shards of one parameter; a test changes it.

    Attributes:
        kind: "replicated", "averaged", "row", "column", "two parts" or "parts".
        widths: Size along `dim` of each part on each rank; equal sizes if empty.
        dim: Sharded dim of "parts".
        spec: Shape of "parts" in the rule.
        rows: Rows without padding, for a parameter of the vocabulary.
    """

    kind: str
    widths: tuple[tuple[int, ...], ...] = ()
    dim: int = 0
    spec: tuple[Any, ...] = ()
    rows: int = 0

    def shards(self, values: np.ndarray[Any, Any], size: int) -> list[np.ndarray[Any, Any]]:
        """Return the shard of each rank."""
        if self.kind in ("replicated", "averaged"):
            return [values] * size
        dim = {"row": 1, "parts": self.dim}.get(self.kind, 0)
        parts = {"two parts": 2, "parts": 3}.get(self.kind, 1)
        widths = self.widths or ((values.shape[dim] // parts // size,) * size,) * parts
        whole = np.split(values, np.cumsum([sum(part) for part in widths])[:-1], dim)
        pieces = [np.split(part, np.cumsum(each)[:-1], dim) for part, each in zip(whole, widths, strict=True)]
        return [np.concatenate([part[rank] for part in pieces], dim) for rank in range(size)]


@dataclass
class TensorParallelCheckpoint:
    """A checkpoint of several tensor parallel ranks.

    Attributes:
        whole: The whole tensors, with padding.
        size: Number of tensor parallel ranks.
        rules: Rule of each tensor; buffers have none.
        info: Entries of `universal_checkpoint_info` that replace those of the rules; `...` removes one.
        by_rank: Fields of `Checkpoint` that one rank has other than the others.
    """

    whole: Checkpoint
    size: int
    rules: dict[str, Rule]
    info: dict[str, Any] = field(default_factory=dict)
    by_rank: dict[int, dict[str, Any]] = field(default_factory=dict)

    def write(self, root: Path) -> Path:
        for rank in range(self.size):
            self.shard(rank).write(root)
        return root

    def write_universal(self, root: Path) -> Path:
        """Write the model states of all ranks, and one file per whole tensor, without padding."""
        replace(self.whole, groups=[self.unpadded(group) for group in self.whole.groups]).write_universal(root)
        for path in root.glob("*_model_states.pt"):
            path.unlink()
        for rank in range(self.size):
            self.shard(rank).write_models(root)
        return root

    def shard(self, rank: int) -> Checkpoint:
        """Return the checkpoint that one tensor parallel rank writes."""
        groups = [self.local(group, rank) for group in self.whole.groups]
        keys = {"mp_world_size": self.size, "global_steps": 3, "universal_checkpoint_info": self.universal_info()}
        local = replace(
            self.whole,
            groups=groups,
            frozen=self.local(self.whole.frozen, rank),
            model_keys={**keys, **self.whole.model_keys},
            tp_rank=rank,
        )
        return replace(local, **self.by_rank.get(rank, {}))

    def local(self, values: Values, rank: int) -> Values:
        return {name: self.rules[name].shards(each, self.size)[rank] for name, each in values.items()}

    def unpadded(self, values: Values) -> Values:
        return {name: each[: self.rules[name].rows] if self.rules[name].rows else each for name, each in values.items()}

    def universal_info(self) -> dict[str, Any]:
        names: dict[str, list[str]] = {}
        for name, rule in self.rules.items():
            names.setdefault(rule.kind, []).append(f"^{name}$")
        parts = {f"^{name}$": rule for name, rule in self.rules.items() if rule.kind == "parts"}
        rows = {name: rule.rows for name, rule in self.rules.items() if rule.rows}
        info = {
            "universal_checkpoint_version": 0.4,
            "tp_replicated_parameter_patterns": names.get("replicated", []),
            "parameter_to_average_patterns": names.get("averaged", []),
            "parameter_with_row_parallelism_patterns": names.get("row", []),
            "parameter_with_2_sub_params_cat_dim_0": names.get("two parts", []),
            "parameter_with_sub_params": [
                {"patterns": [pattern], "shape": list(rule.spec), "partition_dim": rule.dim}
                for pattern, rule in parts.items()
            ],
            "sub_param_shard_widths": {
                pattern: [list(each) for each in rule.widths] for pattern, rule in parts.items()
            },
            "vocabulary_parameter_patterns": list(rows),
            "original_vocab_size": next(iter(rows.values()), None),
        }
        return {key: value for key, value in {**info, **self.info}.items() if value is not ...}


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
