"""Stock transformers models under TP x PP x FSDP2: build, parallelize, load, train, save and resume.

A training loop imports from here; the subpackages are organized for readers of the code. Names are imported when they
are first used, so that `import ckptx.runtime` does not import torch.

    model           models without storage, and their layers
    parallel        TP, PP, FSDP2 and activation checkpointing on a mesh, gradients, process groups
    checkpointing   load, save, save in the background, training state
    memory          the storages that are alive in a training step
    parity          `ckptx verify --run`
    training        recipes, data, and the trainer of `ckptx robustness`
    forecasting     `ckptx forecast`: memory of a training step
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptx.layout.parallel_dims import ParallelDims
    from ckptx.runtime.checkpointing.async_save import Saver
    from ckptx.runtime.checkpointing.load import load
    from ckptx.runtime.checkpointing.save import load_optimizer, save
    from ckptx.runtime.checkpointing.training_state import PerRank, load_training_state
    from ckptx.runtime.model.build import build_model, materialize
    from ckptx.runtime.parallel.distributed import broadcast_object, data_index, mesh_of, process_group
    from ckptx.runtime.parallel.gradients import clip_grad_norm, loss_divisor, sync_gradients
    from ckptx.runtime.parallel.parallelize import parallelize
    from ckptx.runtime.parallel.pipeline.plan import plan_pipeline
    from ckptx.runtime.parallel.randomness import RandomState, seed
    from ckptx.runtime.parallel.tensor_parallel.apply import TensorParallelLayout
    from ckptx.runtime.parallel.tensor_parallel.loss import make_loss
    from ckptx.runtime.parallel.tensor_parallel.plans import find_plan
    from ckptx.runtime.training.checkpoints import StepDirectories

_MODULES_BY_NAME = {
    "ParallelDims": "ckptx.layout.parallel_dims",
    "PerRank": "ckptx.runtime.checkpointing.training_state",
    "RandomState": "ckptx.runtime.parallel.randomness",
    "Saver": "ckptx.runtime.checkpointing.async_save",
    "StepDirectories": "ckptx.runtime.training.checkpoints",
    "TensorParallelLayout": "ckptx.runtime.parallel.tensor_parallel.apply",
    "broadcast_object": "ckptx.runtime.parallel.distributed",
    "build_model": "ckptx.runtime.model.build",
    "clip_grad_norm": "ckptx.runtime.parallel.gradients",
    "data_index": "ckptx.runtime.parallel.distributed",
    "find_plan": "ckptx.runtime.parallel.tensor_parallel.plans",
    "load": "ckptx.runtime.checkpointing.load",
    "load_optimizer": "ckptx.runtime.checkpointing.save",
    "load_training_state": "ckptx.runtime.checkpointing.training_state",
    "loss_divisor": "ckptx.runtime.parallel.gradients",
    "make_loss": "ckptx.runtime.parallel.tensor_parallel.loss",
    "materialize": "ckptx.runtime.model.build",
    "mesh_of": "ckptx.runtime.parallel.distributed",
    "parallelize": "ckptx.runtime.parallel.parallelize",
    "plan_pipeline": "ckptx.runtime.parallel.pipeline.plan",
    "process_group": "ckptx.runtime.parallel.distributed",
    "save": "ckptx.runtime.checkpointing.save",
    "seed": "ckptx.runtime.parallel.randomness",
    "sync_gradients": "ckptx.runtime.parallel.gradients",
}

__all__ = [
    "ParallelDims", "PerRank", "RandomState", "Saver", "StepDirectories", "TensorParallelLayout", "broadcast_object",
    "build_model", "clip_grad_norm", "data_index", "find_plan", "load", "load_optimizer", "load_training_state",
    "loss_divisor", "make_loss", "materialize", "mesh_of", "parallelize", "plan_pipeline", "process_group", "save",
    "seed", "sync_gradients",
]  # fmt: skip


if not TYPE_CHECKING:  # a type checker reads the imports above, and reports names that are not among them

    def __getattr__(name: str) -> object:
        """Import a name when it is first used.

        Raises:
            AttributeError: This package does not export the name.
            EnvironmentProblem: torch or transformers is missing.
        """
        if name not in _MODULES_BY_NAME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = import_module(_MODULES_BY_NAME[name])
        except ImportError as error:
            from ckptx.errors import missing_package

            raise missing_package(f"ckptx.runtime.{name}", error) from error
        return getattr(module, name)


def __dir__() -> list[str]:
    """Return the exported names, imported yet or not."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__") and name.endswith("__"))})
