"""Write `fixtures/torch_checkpointing/`: small checkpoints of torch_checkpointing, and their tensors as safetensors.

    pip install --no-deps --target build/judges torch_checkpointing==0.1.1
    for case in archives safetensors rank_directories pipeline; do
        PYTHONPATH=build/judges torchrun --nproc-per-node 4 tools/build_torch_checkpointing_fixtures.py \
            $case fixtures/torch_checkpointing
    done

Four ranks shard a model and the state of its optimizer, and save both with the writer of the library.
`CASE.safetensors` contains the whole tensors, under the names of ckptx. The script does not use ckptx.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

CASES = ("archives", "safetensors", "rank_directories", "pipeline")
# Name -> shape, and the dims that the mesh dims shard; None is replicated. 13 and 7 rows do not divide by the ranks.
TENSORS: Mapping[str, tuple[tuple[int, ...], tuple[int | None, int | None]]] = {
    "model.embed_tokens.weight": ((13, 4), (0, None)),
    "model.layers.0.up.weight": ((8, 4), (None, 0)),
    "model.layers.0.down.weight": ((4, 8), (0, 1)),
    "model.layers.1.up.weight": ((7, 4), (0, 0)),
    "model.layers.1.down.weight": ((4, 7), (None, 1)),
    "model.norm.weight": ((3,), (0, None)),
    "lm_head.weight": ((13, 4), (None, None)),
}


def replace_cuda_gather() -> None:
    """Gather metadata with gloo; the library uses CUDA for it."""
    from torch_checkpointing.metadata_manager import DefaultMetadataManager

    def gather(self: object, data: object, process_group: Any) -> dict[int, object]:
        gathered: list[object] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(gathered, data, group=process_group)
        return dict(enumerate(gathered))

    DefaultMetadataManager._all_gather_pickled_data = gather


def whole_tensors() -> dict[str, torch.Tensor]:
    """Return the tensors of the model, with different values in each."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, (shape, _) in TENSORS.items()}


def shard(tensor: torch.Tensor, mesh: DeviceMesh, dims: tuple[int | None, int | None]) -> torch.Tensor:
    """Return the DTensor of a tensor, sharded along one dim for each mesh dim."""
    placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
    return distribute_tensor(tensor, mesh, placements)


def payload_of_rank(case: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what this rank saves, and the whole tensors of all ranks."""
    whole = whole_tensors()
    moments = {name: tensor.float() * 2 for name, tensor in whole.items()}
    if case == "pipeline":  # two stages of two ranks
        meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=("dp",)) for ranks in ([0, 1], [2, 3])]
        stage = dist.get_rank() // 2
        names = [name for name in whole if ("layers.1" in name or "norm" in name or "head" in name) == (stage == 1)]
        local = {name: shard(whole[name], meshes[stage], TENSORS[name][1][:1]) for name in names}
        return {"model": local}, whole
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    local = {name: shard(tensor, mesh, TENSORS[name][1]) for name, tensor in whole.items()}
    inverse = torch.arange(3.0)
    state = {
        name: {"exp_avg": shard(tensor, mesh, TENSORS[name][1]), "step": torch.tensor(7.0)}
        for name, tensor in moments.items()
    }
    optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": list(state)}]}
    stored = {**whole, "model.inverse": inverse}
    payload: dict[str, Any] = {"model": {**local, "model.inverse": inverse}, "step": 7}
    if case == "archives":
        payload |= {"optimizer": optimizer, "rng": {"cpu": torch.arange(4) + dist.get_rank()}}
        stored |= {f"optimizer.state.{name}.exp_avg": tensor for name, tensor in moments.items()}
        stored |= {f"optimizer.state.{name}.step": torch.tensor(7.0) for name in moments}
    return payload, stored


def item_specs(case: str) -> dict[str, Any]:
    """Return the layout of each item, and whether the library records its sharding."""
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.schema import ItemSpec

    paths = {"safetensors": "model_{rank}.safetensors", "rank_directories": "rank_{rank}/weights.safetensors"}
    layout = LayoutInfo(paths[case], SafetensorsSerialization()) if case in paths else None
    return {
        "model": ItemSpec(layout=layout, resharder=DefaultResharder()),
        "optimizer": ItemSpec(resharder=DefaultResharder(), required=False),
    }


def main() -> None:
    """Write one case."""
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    case, root = sys.argv[1], Path(sys.argv[2]).resolve()
    if case not in CASES:
        raise SystemExit(f"{case}: not a case, use one of {', '.join(CASES)}")
    dist.init_process_group("gloo")
    replace_cuda_gather()
    payload, stored = payload_of_rank(case)
    config = CheckpointManager.Config(
        items=item_specs(case),
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    if dist.get_rank() == 0:
        shutil.rmtree(root / case, ignore_errors=True)
        root.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, root / f"{case}.safetensors")
    dist.barrier()
    manager = CheckpointManager(config)
    manager.save(str(root / case), payload)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
