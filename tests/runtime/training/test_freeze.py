"""What a recipe freezes keeps its bytes on every mesh, also in copies, while all else is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptx.runtime.training.recipe import Recipe
from ckptx.runtime.training.recipe_file import read_recipe
from ckptx.runtime.training.source import prepare_source
from tests.support.pool import GlooPool
from tests.support.slow import slow_but
from tests.support.training_ranks import StepEffect, train_and_compare

MESHES = {
    "one rank": (),
    "tp": ("layout.tp=2",),
    "pp": ("layout.pp=2",),
    "fsdp": ("layout.dp_shard=2",),
    "fsdp, recomputed": ("layout.dp_shard=2", "layout.activation_checkpointing=full"),
    "tp and pp": ("layout.tp=2", "layout.pp=2"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_source(recipe(["embeddings"]), tmp_path_factory.mktemp("frozen") / "source")


def recipe(parts: Sequence[str], mesh: str = "one rank") -> Recipe:
    """Images and a head that is tied to the table."""
    parts = f"[{', '.join(parts)}]"
    sets = ("data.samples=8", "training.global_batch=4", f"model.freeze={parts}", *MESHES[mesh])
    return read_recipe("gemma4_vlm_tiny", sets)


def trained(pool: GlooPool, made: Recipe, source: Path) -> list[StepEffect]:
    return pool.run(train_and_compare, made.layout.dims.world_size, made, source, 2)


@pytest.mark.parametrize("mesh", slow_but(MESHES, ["pp"]))
def test_tables_and_towers_stay_and_the_rest_moves(pool: GlooPool, source: Path, mesh: str) -> None:
    ranks = trained(pool, recipe(["embeddings", "vision"], mesh), source)
    frozen = ranks[0].frozen
    assert any(map(is_table, frozen))
    assert any("vision_tower" in name for name in frozen)
    for rank in ranks:
        assert rank.frozen == frozen
        assert not rank.changed & frozen
        assert not rank.trained & frozen
        assert any(map(is_table, rank.kept))  # on the last stage it is the head, a copy
    trained_names = frozenset().union(*(rank.trained for rank in ranks))
    assert trained_names == frozenset().union(*(rank.changed for rank in ranks))
    assert any("layers.0" in name for name in trained_names)
    assert any("embed_vision" in name for name in trained_names)  # what leads from the tower to the layers


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["one rank", "pp"])
def test_a_table_that_is_not_frozen_moves_with_its_copies(pool: GlooPool, source: Path, mesh: str) -> None:
    for rank in trained(pool, recipe(["vision"], mesh), source):
        assert any(map(is_table, rank.changed))
        assert not rank.changed & rank.frozen


def is_table(name: str) -> bool:
    return name.endswith("embed_tokens.weight")
