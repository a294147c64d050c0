"""Copies of a tied parameter on several stages have to be equal, element by element, and sharded in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckptx.errors import CkptxError
from ckptx.runtime.parallel.pipeline import ties
from ckptx.runtime.parallel.pipeline.ties import Tie, _checksum, check_copies_are_equal
from tests.support.pool import GlooPool

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 22])
def test_a_checksum_depends_on_every_element_and_its_position(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int
) -> None:
    """Elements of one chunk and of several: the rows of an embedding may be swapped, and have the same sum."""
    monkeypatch.setattr(ties, "_CHUNK_NUMEL", chunk)
    values = torch.tensor([1, 2, 4, 8, 16], dtype=dtype)
    expected = _checksum(values)
    assert _checksum(values.clone()) == expected
    for index in range(len(values)):
        changed = values.clone()
        changed[index] = 3
        assert _checksum(changed) != expected
    for first, second in permutations(range(len(values)), 2):
        swapped = values.clone()
        swapped[[first, second]] = values[[second, first]]
        assert _checksum(swapped) != expected, (first, second)


def test_a_checksum_is_of_bits_and_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(12.0).reshape(3, 4)
    expected = _checksum(values)
    assert _checksum(values.t().contiguous().t()) == expected
    assert _checksum(torch.tensor(0.0)) != _checksum(torch.tensor(-0.0))
    for chunk in range(1, 13):
        monkeypatch.setattr(ties, "_CHUNK_NUMEL", chunk)
        assert _checksum(values) == expected


# ---------------------------------------------------------------------------------------------------- on stages

CHANGES: Mapping[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "none": (lambda weight: weight, ""),
    "one element": (lambda weight: weight + torch.eye(4), "their values differ"),
    "rows swapped": (lambda weight: weight[[1, 0, 2, 3]], "their values differ"),
    "rows reversed": (lambda weight: weight.flip(0), "their values differ"),
    "transposed": (lambda weight: weight.t().contiguous(), "their values differ"),
    "shape": (lambda weight: weight[:2], "are sharded differently"),
}


def check_copies(rank: int, world_size: int, change: str) -> str:
    """Return the error for copies on two stages, of which the second is changed."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("pp",))
    weight = torch.arange(16.0).reshape(4, 4)
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(CHANGES[change][0](weight) if rank == 1 else weight)
    return _error([Tie("embed.weight", {0: "weight", 1: "weight"})], {rank: model}, mesh.get_group())


def check_placements(rank: int, world_size: int) -> tuple[str, str]:
    """Return the errors for copies with equal local shards: with equal placements, and with other ones."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("pp",))
    own = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("pp", "tp"))["tp"]
    errors = []
    for placement in (Shard(0), Replicate()):
        model = nn.Linear(4, 4, bias=False)
        local = torch.arange(16.0).reshape(4, 4)
        model.weight = nn.Parameter(DTensor.from_local(local, own, [placement if rank else Shard(0)], run_check=False))
        errors.append(_error([Tie("embed.weight", {0: "weight", 1: "weight"})], {rank: model}, mesh.get_group()))
    return errors[0], errors[1]


def _error(shared: list[Tie], models: Mapping[int, nn.Module], group: torch.distributed.ProcessGroup) -> str:
    try:
        check_copies_are_equal(shared, models, group)
    except CkptxError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("change", CHANGES)
def test_copies_that_differ_are_refused_on_every_rank(pool: GlooPool, change: str) -> None:
    said = CHANGES[change][1]
    for error in pool.run(check_copies, 2, change):
        assert error.startswith("embed.weight: ") if said else error == ""
        assert said in error


def test_copies_with_other_placements_are_refused(pool: GlooPool) -> None:
    for equal, other in pool.run(check_placements, 2):
        assert equal == "" and "are sharded differently" in other
