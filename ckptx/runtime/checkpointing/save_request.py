"""The arguments of a save, declared once for `save`, `Saver.save` and the snapshot that they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ckptx.runtime.parallel.tensor_parallel.apply import TensorParallelLayout


class SaveOptions(TypedDict, total=False):
    """The keyword arguments of `save`; see `SaveRequest`."""

    layout: TensorParallelLayout | None
    step: int | None
    base: Path | None
    training_state: Mapping[str, Any] | None
    mesh: DeviceMesh | None
    overwrite: bool
    on_published: Callable[[], object] | None


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """One checkpoint to save.

    Attributes:
        model: A plain model, one sharded by TP or FSDP2, or a pipeline stage; on a rank with several stages, all of
            them.
        optimizer: The optimizer of this model, or of all these stages, made after sharding; None saves no optimizer
            state.
        path: A directory on a file system that all ranks share; without `overwrite` it must not exist yet, or be empty.
        layout: TP layout of the model; required if TP shards it. `TensorParallelLayout.merge` merges those of several
            stages.
        step: Number that is stored under "step"; None stores none.
        base: A checkpoint whose config, tokenizer and similar files are copied before the call returns. None writes
            the config of the model.
        training_state: All other state that resuming requires, by name: objects with a `state_dict`, or plain values
            (numbers, strings, tensors, in lists and dicts), identical on all ranks; state that differs is wrapped in
            `PerRank`. None stores none.
        mesh: The mesh of the run; required for a `PerRank`.
        overwrite: True replaces a checkpoint at `path` atomically.
        on_published: Called on rank 0 after the checkpoint is complete, in the thread that wrote it, e.g. to mark it
            as the latest.
    """

    model: nn.Module | Sequence[nn.Module]
    optimizer: Optimizer | None
    path: Path
    layout: TensorParallelLayout | None = None
    step: int | None = None
    base: Path | None = None
    training_state: Mapping[str, Any] | None = None
    mesh: DeviceMesh | None = None
    overwrite: bool = False
    on_published: Callable[[], object] | None = None

    @property
    def models(self) -> list[nn.Module]:
        """The stages of this rank; one for a model without a pipeline."""
        return [self.model] if isinstance(self.model, nn.Module) else list(self.model)
