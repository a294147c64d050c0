"""What the ranks in the tests of the trainer do: train a recipe for some steps, and say what that changed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from ckptx.robustness_suite.state_snapshot import shard_digests
from ckptx.runtime.parallel.distributed import RankContext
from ckptx.runtime.training.data import open_dataset
from ckptx.runtime.training.recipe import Recipe
from ckptx.runtime.training.trainer import Trainer


class Moved(NamedTuple):
    """What some steps did to what a rank holds of a model, by the names of the whole model.

    Attributes:
        changed: Tensors of other bytes than before.
        kept: Tensors of the same.
        frozen: What the recipe freezes, wherever it is.
        trained: What the optimizer has moments of.
    """

    changed: frozenset[str]
    kept: frozenset[str]
    frozen: frozenset[str]
    trained: frozenset[str]


def moved(rank: int, world_size: int, recipe: Recipe, source: Path, steps: int) -> Moved:
    """Trains, and compares the bytes of this rank before and after."""
    place = RankContext(rank, world_size, torch.device("cpu"))
    trainer = Trainer(recipe, source, open_dataset(recipe, source), place)
    before = shard_digests(trainer)
    for _ in range(steps):
        trainer.step()
    after = shard_digests(trainer)
    names = {id(parameter): name for name, parameter in trainer.rank_model.parameters()}
    found = Moved(
        frozenset(name for name, part in before if before[name, part] != after[name, part]),
        frozenset(name for name, part in before if before[name, part] == after[name, part]),
        trainer.rank_model.frozen,
        frozenset(names[id(each)] for each in trainer.optimizer.state),
    )
    trainer.release()
    return found
