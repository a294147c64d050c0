"""Functions of the ranks in tests of `load`: shard a model on the meta device, load it, compare with torch's shards."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckptx.catalog.region import Region
from ckptx.layout.placement import Placement, tp_regions
from ckptx.runtime.checkpointing.load import load
from ckptx.runtime.model.build import build_model, materialize
from tests.support.torch_dcp import raw

Answer = tuple[str | None, int, int]  # error or None, bytes of this rank's shards, bytes read for them
Regions = Callable[[str], "list[Region] | None"]


def load_with_transformers(path: Path) -> Any:
    """Return the model that transformers loads."""
    import transformers

    name = json.loads((path / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(path, dtype="auto")


def shard_matrices(model: nn.Module, mesh: DeviceMesh, layout: str) -> Regions:
    """Replace every matrix by a DTensor sharded over `mesh` by "rows" or "columns", or "packed": rows in three parts.

    Returns:
        Regions of this rank by name for "packed"; empty for the others, which DTensor placements describe.
    """
    regions_by_name: dict[str, list[Region]] = {}
    sharded: dict[int, nn.Parameter] = {}
    for path, module in list(model.named_modules()):
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None or parameter.dim() < 2:
                continue
            name = f"{path}.{leaf}"
            if id(parameter) not in sharded:
                sharded[id(parameter)] = nn.Parameter(_shard(parameter.detach(), mesh, layout, name, regions_by_name))
            module._parameters[leaf] = sharded[id(parameter)]
    return lambda name: regions_by_name.get(name)


def _shard(
    tensor: torch.Tensor, mesh: DeviceMesh, layout: str, name: str, regions_by_name: dict[str, list[Region]]
) -> Any:
    if layout != "packed":
        dim = 0 if layout == "rows" else tensor.dim() - 1
        return distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)
    rows, rank, size = tensor.shape[0], mesh.get_local_rank(), mesh.size()
    groups = (rows // 2, rows // 4, rows - rows // 2 - rows // 4)
    parts = tensor.split(groups)
    local = torch.cat([part.chunk(size)[rank] for part in parts])  # computed by torch, not by ckptx
    regions_by_name[name] = list(tp_regions(tuple(tensor.shape), Placement(0, groups), size)[rank])
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def first_difference(model: nn.Module, expected: nn.Module) -> str | None:
    """Return the first tensor whose local shard differs from that of `expected`; None if all are equal."""
    expected_state = expected.state_dict()
    state = model.state_dict()
    if state.keys() != expected_state.keys():
        return f"names {state.keys() ^ expected_state.keys()}"
    return next((name for name in state if raw(_local(state[name])) != raw(_local(expected_state[name]))), None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).contiguous()


def load_sharded(rank: int, world_size: int, hf: Path, path: Path, layout: str) -> Answer:
    """Load with TP only."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    expected = load_with_transformers(hf)
    shard_matrices(expected, mesh, layout)
    model = build_model(hf)
    regions = shard_matrices(model, mesh, layout)
    materialize(model)
    ledger = load(model, path, regions=regions)
    return first_difference(model, expected), ledger.nbytes, ledger.bytes_read


def load_fsdp_in_tp(rank: int, world_size: int, hf: Path, path: Path, layout: str) -> Answer:
    """Load with TP 2 and FSDP2; each layer and the remaining modules are FSDP units."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp_shard", "tp"))
    expected, model = load_with_transformers(hf), build_model(hf)
    shard_matrices(expected, mesh["tp"], layout)
    regions = shard_matrices(model, mesh["tp"], layout)
    for each in (expected, model):
        for module in [module for name, module in each.named_modules() if name.rpartition(".")[2].isdecimal()]:
            if any(True for _ in module.parameters()):
                fully_shard(module, mesh=mesh["dp_shard"])
        fully_shard(each, mesh=mesh["dp_shard"])
    materialize(model)
    ledger = load(model, path, regions=regions)
    return first_difference(model, expected), ledger.nbytes, ledger.bytes_read


def load_tied_fsdp(rank: int, world_size: int, hf: Path) -> str | None:
    """Load a model with tied parameters under FSDP2; they remain tied, and the forward pass is the stock one."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    ids = torch.arange(3, 17).reshape(2, 7)
    expected = load_with_transformers(hf)(ids).logits
    model = build_model(hf)
    fully_shard(model, mesh=mesh)
    materialize(model)
    load(model, hf)
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        return "not tied before"
    found = model(ids).logits
    model.reshard()
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        return "not tied after"
    return None if torch.equal(found, expected) else "other logits"


def load_wrong_shard(rank: int, world_size: int, hf: Path) -> str | None:
    """Load with the regions of the other rank; return the first tensor that differs."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    expected, model = load_with_transformers(hf), build_model(hf)
    shard_matrices(expected, mesh, "rows")
    shard_matrices(model, mesh, "rows")
    materialize(model)

    def regions(name: str) -> list[Region] | None:
        if "q_proj" not in name:
            return None
        rows, columns = model.get_parameter(name).shape
        return [Region(((1 - rank) * rows // 2, 0), (rows // 2, columns))]

    load(model, hf, regions=regions)
    return first_difference(model, expected)


# ------------------------------------------------------------------------------------ memory


def write_large(path: Path) -> None:
    """Write a Llama of 310 MB, whose largest tensor has 130 MB."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32768, hidden_size=1024, intermediate_size=2816, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=8, tie_word_embeddings=False, dtype="float32", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    path.mkdir(parents=True)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    save_file(
        {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps(config.to_dict()))


def _rss(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def main() -> None:
    """Print by how many bytes the memory grows while rank 0 of 2 loads, and the bytes of its shards."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hf, path, layout = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = build_model(hf)
    regions = shard_matrices(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), layout)
    before = _rss("VmRSS")
    materialize(model)
    ledger = load(model, path, regions=regions)
    print(_rss("VmHWM") - before, ledger.nbytes)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
