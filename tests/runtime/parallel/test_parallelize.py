"""The order of parallelisms, FSDP2 units, HSDP and mixed precision on gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from ckptx.errors import UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.runtime.checkpointing.load import load
from ckptx.runtime.model.build import build_model, materialize
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.distributed import mesh_of
from ckptx.runtime.parallel.parallelize import local_bytes, parallelize
from ckptx.runtime.parallel.tensor_parallel.plans import find_plan
from tests.support.models import EVERY, build, tokens
from tests.support.pool import GlooPool


def model_of(name: str) -> Any:
    return build(EVERY[name]).float()


def loss_of(model: Any, row: int) -> torch.Tensor:
    batch = {key: value[row : row + 1] for key, value in tokens().items()}
    return model(**batch).logits.float().pow(2).mean()  # type: ignore[no-any-return]


def gradients_in_one_piece(name: str, rows: list[int]) -> dict[str, torch.Tensor]:
    model = model_of(name)
    for row in rows:
        (loss_of(model, row) / len(rows)).backward()
    return {key: parameter.grad for key, parameter in model.named_parameters()}


def step(rank: int, world_size: int, name: str, sizes: dict[str, int], settings: dict[str, Any]) -> Any:
    """One backward pass; the largest difference of gathered gradients, and what was made of the model."""
    mixed = settings.pop("mixed", False)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = model_of(name)
    plan = find_plan(model, model.config.to_dict()) if sizes["tp"] > 1 else None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None
    done = parallelize(model, mesh, plan, mixed_precision=policy, **settings)
    replicas = mesh["dp_replicate"].get_local_rank() if "dp_replicate" in sizes else 0
    data = replicas * sizes["dp_shard"] + mesh["dp_shard"].get_local_rank()
    count = sizes["dp_shard"] * sizes.get("dp_replicate", 1)
    loss_of(model, data % 2).backward()
    wanted = gradients_in_one_piece(name, [index % 2 for index in range(count)])
    furthest = 0.0
    for key, parameter in model.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        scale = wanted[canonical_name(key)].abs().max().clamp(min=1e-6)
        furthest = max(furthest, float((whole - wanted[canonical_name(key)]).abs().max() / scale))
    units = [canonical_name(key) for key, module in model.named_modules() if isinstance(module, FSDPModule)]
    kinds = {str(parameter.dtype) for parameter in model.parameters()}
    return furthest, done._replace(layout=None), units, kinds, sum(local_bytes(model).values())


@pytest.mark.parametrize("mode", ["none", "full"])
def test_each_layer_is_a_unit_and_the_root_has_the_rest(pool: GlooPool, mode: str) -> None:
    settings = {"activation_checkpointing": mode}
    found = pool.run(step, 2, "llama-untied", {"dp_shard": 2, "tp": 1}, settings)
    for furthest, done, units, kinds, nbytes in found:
        assert furthest < 1e-5, "float32, two gradients averaged"
        assert (done.fsdp_unit_count, done.checkpointed_layer_count) == (3, 2 if mode == "full" else 0)
        assert units == ["", "model.layers.0", "model.layers.1"]
        assert kinds == {"torch.float32"}
        assert nbytes < 0.6 * sum(p.numel() * 4 for p in model_of("llama-untied").parameters())


def test_replicas_of_shards_average_over_both(pool: GlooPool) -> None:
    found = pool.run(step, 4, "llama-tied", {"dp_replicate": 2, "dp_shard": 2, "tp": 1}, {})
    assert max(furthest for furthest, *_ in found) < 1e-5


def left_training(rank: int, world_size: int, path: Path, mode: str) -> list[str]:
    """Modules that are no longer in training mode when the model is parallel, has storage, and is loaded."""
    model = build_model(path).train()
    mesh = mesh_of(ParallelDims(dp_shard=world_size), "cpu")
    parallelize(model, mesh, None, activation_checkpointing=mode)
    materialize(model)
    load(model, path)
    return [name for name, module in model.named_modules() if not module.training]


def test_training_mode_stays(pool: GlooPool, tmp_path: Path) -> None:
    model_of("gpt2").save_pretrained(tmp_path)
    for mode in ("none", "full", "submodule", "selective"):
        assert pool.run(left_training, 2, tmp_path, mode) == [[], []]


def meshes(rank: int, world_size: int) -> Any:
    """Names, sizes and ranks of the mesh of each layout."""
    found = []
    for dims in (ParallelDims(dp_shard=2, dp_replicate=2), ParallelDims(tp=2, dp_replicate=2), ParallelDims(tp=4)):
        mesh = mesh_of(dims, "cpu")
        found.append((mesh.mesh_dim_names, tuple(mesh.mesh.shape), mesh.mesh.flatten().tolist()))
        assert mesh is mesh_of(dims, "cpu")
    try:
        mesh_of(ParallelDims(dp_replicate=3), "cpu")
    except UsageError as error:
        found.append(str(error))
    return found


def test_a_layout_with_replicas_is_a_mesh_with_replicas(pool: GlooPool) -> None:
    names = ("pp", "dp_replicate", "dp_shard", "tp")
    *found, refusal = pool.run(meshes, 4)[3]
    assert [each[:2] for each in found] == [
        (names, (1, 2, 2, 1)), (names, (1, 2, 1, 2)), (("pp", "dp_shard", "tp"), (1, 1, 4)),
    ]  # fmt: skip
    assert all(ranks == [0, 1, 2, 3] for *_, ranks in found)
    assert "dp_replicate 3: requires 3 processes, not 4" in refusal


def test_replicas_of_tensor_parallel_shards(pool: GlooPool) -> None:
    found = pool.run(step, 4, "llama-tied", {"dp_replicate": 2, "dp_shard": 1, "tp": 2}, {})
    assert max(furthest for furthest, *_ in found) < 1e-5


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32(pool: GlooPool) -> None:
    ((furthest, done, _, kinds, _),) = pool.run(step, 1, "llama-untied", {"dp_shard": 1, "tp": 1}, {"mixed": True})
    assert done.fsdp_unit_count == 3, "who casts is FSDP2, on one rank too"
    assert kinds == {"torch.float32"}
    assert 1e-4 < furthest < 0.2, "as far away as bfloat16 rounds, and no further"


def test_on_one_rank_nothing_is_sharded(pool: GlooPool) -> None:
    ((furthest, done, units, _, _),) = pool.run(step, 1, "llama-untied", {"dp_shard": 1, "tp": 1}, {})
    assert (furthest, done.fsdp_unit_count, units) == (0.0, 0, [])


def parallelize_without_plan(rank: int, world_size: int) -> str:
    """Return the message of the error."""
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp_shard", "tp"))
    with pytest.raises(UsageError) as caught:
        parallelize(model_of("llama-untied"), mesh, None)
    return str(caught.value)


def test_tensor_parallel_ranks_require_a_plan(pool: GlooPool) -> None:
    expected = "parallelize: plan is None, but the mesh has 2 TP ranks; pass find_plan(model, config)"
    assert pool.run(parallelize_without_plan, 2) == [expected, expected]
