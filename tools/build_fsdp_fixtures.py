"""Build fixtures/fsdp: what verl saves with older releases of torch, two ranks each, and the full state beside it.

    python tools/build_fsdp_fixtures.py /path/to/python-with-torch-2.2 /path/to/python-with-torch-2.4 ...

The pickles of sharded tensors differ between releases: `torch.distributed._tensor` until 2.4, and a `DeviceMesh` with a
tensor of ranks until 2.8 or so. Each interpreter runs `_WRITER`, which needs nothing but its torch.

    fixtures/fsdp/2.4.1/fsdp1/actor/model_world_size_2_rank_R.pt    FSDP1 with a device mesh, as verl uses it
    fixtures/fsdp/2.4.1/sharded1/...                                FSDP1 without one: ShardedTensor
    fixtures/fsdp/2.4.1/fsdp2/...                                   FSDP2, from 2.4 on
    fixtures/fsdp/2.4.1/fsdp2.safetensors                           the full state
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

KINDS = ("fsdp1", "sharded1", "fsdp2")
_OUT = Path(__file__).resolve().parent.parent / "fixtures" / "fsdp"

_WRITER = r"""
import sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

WORLD = 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=i == 0) for i in range(2))
        self.one = nn.Linear(6, 1)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.register_buffer("inv_freq", torch.arange(3.0))


def state_of(model, kind):
    if kind == "fsdp2":
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError:
            from torch.distributed._composable.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model.state_dict()
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType

    mesh = None
    if kind == "fsdp1":
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    del model.scale  # FSDP1 cannot flatten it with parameters of another dtype
    sharded = FullyShardedDataParallel(
        model, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True,
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or module in list(model.layers),
    )
    with FullyShardedDataParallel.state_dict_type(
        sharded, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
    ):
        return sharded.state_dict()


def write(rank, kind, out, store):
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=WORLD)
    torch.manual_seed(1)
    model = Model()
    full = {name: value.detach().clone() for name, value in model.state_dict().items()}
    state = state_of(model, kind)
    torch.save(state, "%s/model_world_size_%d_rank_%d.pt" % (out, WORLD, rank))
    if rank == 0:
        torch.save({name: full[name] for name in state}, out + "/full.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(write, sys.argv[1:4], nprocs=WORLD)
"""


def main(interpreters: list[str]) -> None:
    """Write the fixtures of each interpreter, in a directory with the name of the version of its torch."""
    for python in interpreters:
        command = [python, "-c", "import torch; print(torch.__version__)"]
        version = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().partition("+")[0]
        shutil.rmtree(_OUT / version, ignore_errors=True)
        has_fsdp2 = tuple(map(int, version.split(".")[:2])) >= (2, 4)
        for kind in KINDS if has_fsdp2 else KINDS[:2]:
            actor = _OUT / version / kind / "actor"
            actor.mkdir(parents=True)
            with tempfile.TemporaryDirectory() as work:
                script = Path(work, "write_ranks.py")
                script.write_text(_WRITER)
                subprocess.run([python, str(script), kind, str(actor), f"{work}/store"], check=True)
            full = torch.load(actor / "full.pt")
            (actor / "full.pt").unlink()
            save_file({name: value.clone() for name, value in full.items()}, _OUT / version / f"{kind}.safetensors")
        print(version, *sorted(str(path.relative_to(_OUT)) for path in (_OUT / version).rglob("*.pt")), sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
