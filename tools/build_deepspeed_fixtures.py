"""Write `fixtures/deepspeed/`: small checkpoints of DeepSpeed, and the values of its engine as safetensors.

    pip install deepspeed==0.19.8
    for case in stage2 stage3; do
        DS_ACCELERATOR=cpu torchrun --nproc-per-node 3 tools/build_deepspeed_fixtures.py $case fixtures/deepspeed
    done

Three data parallel ranks train a small model for three steps and save it. `CASE.safetensors` contains the weights, and
the fp32 masters and moments that the engine returns for each parameter. The script does not use ckptx.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

STEPS = 3
# Case -> config of `zero_optimization`. Only benchmarks/official_tools.py uses stage1 and stage2_elastic.
CASES: dict[str, dict[str, Any]] = {
    "stage1": {"stage": 1},
    "stage2": {"stage": 2, "parameter_alignment": True},
    "stage2_elastic": {"stage": 2, "elastic_checkpoint": True},
    "stage3": {"stage": 3, "sub_group_size": 50, "stage3_param_persistence_threshold": 0},
}


class Model(torch.nn.Module):
    """A model with uneven shapes, tied embeddings, frozen parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 6)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6, bias=index == 0) for index in range(2))
        self.up, self.down = torch.nn.Linear(6, 7), torch.nn.Linear(7, 6, bias=False)
        self.norm, self.scale = torch.nn.LayerNorm(6), torch.nn.Parameter(torch.tensor([1.5]))
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.head = torch.nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("inverse", torch.arange(5.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = torch.relu(layer(hidden)) + hidden
        hidden = self.down(torch.tanh(self.up(hidden)))
        return self.head(self.frozen(self.norm(hidden)) * self.scale).float().logsumexp(-1).mean()


def train(case: str) -> Any:
    """Return DeepSpeed's engine after a few steps."""
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # compiles C++
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(7)
    model = Model().bfloat16()
    parameters = [each for each in model.parameters() if each.requires_grad]
    groups: Any = parameters
    if CASES[case]["stage"] == 3:
        groups = [{"params": [each for each in parameters if (each.dim() > 1) is wide]} for wide in (True, False)]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": CASES[case],
    }
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        engine.backward(engine(torch.randint(0, 13, (2, 5), generator=generator)))
        engine.step()
    return engine


def engine_values(engine: Any, stage: int) -> dict[str, torch.Tensor]:
    """Return the weights, masters and moments of an engine under the names that ckptx gives them.

    In stage 3 the masters are the weights, as ckptx reads them; a tied weight has the state of the first of its names.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    values: dict[str, torch.Tensor] = dict(engine.module.named_buffers())
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            values[name] = parameter.detach().clone()
        if not parameter.requires_grad:
            continue
        master = safe_get_full_fp32_param(parameter)
        if stage == 3:
            values[name] = master
        if name == "head.weight":  # its state has the name of the tied embedding
            continue
        if stage < 3:
            values[f"optimizer.state.{name}.master_param"] = master
        for key in ("exp_avg", "exp_avg_sq"):
            values[f"optimizer.state.{name}.{key}"] = safe_get_full_optimizer_state(parameter, key)
    return {name: value.detach().clone().contiguous() for name, value in values.items()}


def main(case: str, out: Path) -> None:
    """Save the checkpoint on all ranks, and the values of the engine on rank 0."""
    os.environ.setdefault("CROSS_RANK", "0")
    os.environ.setdefault("CROSS_SIZE", "1")
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    engine = train(case)
    if dist.get_rank() == 0:
        shutil.rmtree(out / case, ignore_errors=True)
        (out / case).mkdir(parents=True)
    dist.barrier()
    engine.save_checkpoint(str(out / case))
    values = engine_values(engine, CASES[case]["stage"])
    if dist.get_rank() == 0:
        save_file(values, out / f"{case}.safetensors")
        for script in (out / case).glob("*.py"):  # copies of DeepSpeed's own scripts
            script.unlink()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
