"""Write the checkpoints that the commands in the documentation use.

model                         the checkpoint of `make demo`
MODEL                         a small checkpoint of the same class
MODEL-MOE                     a small Qwen3 MoE with 16 experts in each of 8 layers
MODEL-FP8                     MODEL with the projections in fp8, in blocks of 32 x 32
ADAPTER                       a LoRA adapter of MODEL for q_proj and v_proj, as PEFT saves it
ADAPTER-2                     the same for q_proj and o_proj
step-lora                     a DCP of MODEL with ADAPTER, as a loop with PEFT saves the state dict of the whole model
step-1000                     a DCP of MODEL after training in float32: weights that bfloat16 would round, and
                              optimizer state, but no config
outputs/checkpoint/step-1000  the same as torchtitan writes it, under torchtitan's names
state-plain                   the weights of MODEL without a config, as accelerate writes them without FSDP
state-1000                    the same as accelerate writes it with FSDP and SHARDED_STATE_DICT
checkpoint-1000               the same in bf16, in the files that two ranks of DeepSpeed ZeRO 2 write
global_step_1000/actor        MODEL in the files that two ranks of verl write with FSDP2
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import demo_checkpoint
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import ckptx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.forged_deepspeed import Checkpoint  # noqa: E402  # after the path
from tests.support.fsdp_writers import save_pretrained_model  # noqa: E402


def write_checkpoints(directory: Path) -> None:
    """Write the checkpoints that the blocks of a page find in their directory, see the docstring of this module."""
    demo_checkpoint.main(directory / "model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True))
    state, trained = model.state_dict(), dict(model.named_parameters())  # in `trained`, tied parameters are once
    assert any(not torch.equal(value, value.bfloat16().float()) for value in state.values())
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(directory / "MODEL")
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    moe = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts))
    moe.to(torch.bfloat16).save_pretrained(directory / "MODEL-MOE")
    _write_fp8(directory / "MODEL", directory / "MODEL-FP8")
    _write_adapter(directory / "MODEL", directory / "ADAPTER", ["q_proj", "v_proj"], directory / "step-lora")
    _write_adapter(directory / "MODEL", directory / "ADAPTER-2", ["q_proj", "o_proj"])
    (directory / "state-plain").mkdir()
    shutil.copy(directory / "MODEL" / "model.safetensors", directory / "state-plain")
    counter = {"train_state": {"step": torch.tensor(1000)}}
    _save_dcp({"model": state, "optimizer": optimizer_of(trained), **counter}, directory / "step-1000")
    _save_dcp({"model": state}, directory / "state-1000" / "pytorch_model_fsdp_0")
    _save_dcp({"optimizer": optimizer_of(trained)}, directory / "state-1000" / "optimizer_0")

    with tempfile.TemporaryDirectory() as work:
        float32, renamed = Path(work, "float32"), Path(work, "renamed")
        model.save_pretrained(float32)
        report = ckptx.convert("to-dcp", float32, renamed, names="torchtitan", tied="drop")
        entries = ckptx.open_checkpoint(renamed).tensors
        titan_tensors = {name: torch.empty(entry.shape) for name, entry in entries.items()}
        assert report.tensors == len(titan_tensors)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about a single process
            dcp.load(titan_tensors, checkpoint_id=renamed, no_dist=True)
    _write_deepspeed(trained, directory / "checkpoint-1000")
    _write_verl(directory / "MODEL", directory / "global_step_1000" / "actor")
    titan_state = {**titan_tensors, "optimizer": optimizer_of(titan_tensors), **counter}
    _save_dcp(titan_state, directory / "outputs" / "checkpoint" / "step-1000")


def _write_fp8(model: Path, path: Path) -> None:
    """Write a checkpoint with its projections in fp8, in blocks of 32 x 32."""
    shutil.copytree(model, path)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        blocks = weight.float().unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale_inv"] = codes.reshape(weight.shape), scale
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _write_adapter(model: Path, path: Path, modules: list[str], step: Path | None = None) -> None:
    """Write a LoRA adapter with random values, as PEFT saves it after training; and as a DCP to `step`."""
    config = LoraConfig(r=8, lora_alpha=16, target_modules=modules, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT finds no config of org/MODEL on the Hub
        adapted = get_peft_model(Qwen3ForCausalLM.from_pretrained(model), config)
        adapted.peft_config["default"].base_model_name_or_path = "org/MODEL"
        adapted.save_pretrained(str(path))
    if step is not None:
        dcp.save({"model": adapted.state_dict()}, checkpoint_id=step)


def optimizer_of(parameters: dict[str, Tensor]) -> dict[str, object]:
    """Return the state of Adam after 1,000 steps, by parameter name."""
    return {
        "state": {
            name: {"exp_avg": torch.rand_like(each), "exp_avg_sq": torch.rand_like(each), "step": torch.tensor(1000.0)}
            for name, each in parameters.items()
        }
    }


def _save_dcp(state: dict[str, object], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about a single process
        dcp.save(state, checkpoint_id=path, no_dist=True)


def _write_deepspeed(trained: dict[str, Tensor], path: Path) -> None:
    """Write the directory that Trainer writes with DeepSpeed ZeRO 2 on two ranks."""
    groups = [{name: each.detach().numpy() for name, each in trained.items()}]
    Checkpoint(groups, shared={"lm_head.weight": "model.embed_tokens.weight"}).write(path / "global_step1000")
    (path / "latest").write_text("global_step1000")


def _write_verl(hf: Path, path: Path) -> None:
    """Write the directory of an actor that verl trains with FSDP2 on two ranks."""
    with tempfile.TemporaryDirectory() as store:
        mp.spawn(_write_rank_of_verl, (hf, path, f"{store}/store"), nprocs=2)


def _write_rank_of_verl(rank: int, hf: Path, path: Path, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    save_pretrained_model(rank, 2, "fsdp2", hf, path)
    (path / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 2}))
    dist.destroy_process_group()
