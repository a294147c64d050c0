"""Functions of the ranks in tests of the trainer: train a recipe, and return the tensors that changed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from ckptx.robustness_suite.trainer_items import shard_digests
from ckptx.runtime.parallel.distributed import RankContext
from ckptx.runtime.training.data import open_dataset
from ckptx.runtime.training.recipe import Recipe
from ckptx.runtime.training.trainer import Trainer


class StepEffect(NamedTuple):
    """Effect of training steps on the tensors of a rank, by their names in the whole model.

    Attributes:
        changed: Tensors whose bytes changed.
        kept: Tensors whose bytes did not change.
        frozen: Tensors that the recipe freezes, on all ranks.
        trained: Parameters with optimizer moments.
    """

    changed: frozenset[str]
    kept: frozenset[str]
    frozen: frozenset[str]
    trained: frozenset[str]


def train_and_compare(rank: int, world_size: int, recipe: Recipe, source: Path, steps: int) -> StepEffect:
    """Train `steps` steps, and compare the bytes of this rank before and after."""
    place = RankContext(rank, world_size, torch.device("cpu"))
    trainer = Trainer(recipe, source, open_dataset(recipe, source), place)
    before = shard_digests(trainer)
    for _ in range(steps):
        trainer.step()
    after = shard_digests(trainer)
    names = {id(parameter): name for name, parameter in trainer.rank_model.parameters()}
    found = StepEffect(
        frozenset(name for name, part in before if before[name, part] != after[name, part]),
        frozenset(name for name, part in before if before[name, part] == after[name, part]),
        trainer.rank_model.frozen_names,
        frozenset(names[id(each)] for each in trainer.optimizer.state),
    )
    trainer.release()
    return found
