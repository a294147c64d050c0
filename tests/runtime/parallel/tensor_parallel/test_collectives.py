"""Each collective, and each style that only changes how a module runs, is what it is defined to be.

Forward and backward, on sizes that leave ranks short or without anything; whole models are compared in
`test_tensor_parallel.py`, where an error may hide because a model has even sizes or passes its inputs in one way.
"""

from __future__ import annotations

import pytest

from tests.support import collective_cases as worker
from tests.support.pool import GlooPool


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", worker.COLLECTIVES)
def test_a_collective_and_its_gradient(pool: GlooPool, name: str, world_size: int) -> None:
    assert pool.run(worker.find_wrong_collectives, world_size, name) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shards_of_any_width_and_order_are_gathered(pool: GlooPool, world_size: int) -> None:
    assert pool.run(worker.find_wrong_gathered_shards, world_size) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_experts_get_their_inputs_by_position_or_by_name(pool: GlooPool, world_size: int) -> None:
    assert pool.run(worker.find_wrong_experts, world_size) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_rotary_part_of_a_latent_projection_sums_its_gradient(pool: GlooPool, world_size: int) -> None:
    assert pool.run(worker.find_wrong_mla_projections, world_size) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_that_are_whole_or_local(pool: GlooPool, world_size: int) -> None:
    assert pool.run(worker.find_wrong_parameter_styles, world_size) == [[]] * world_size
