"""Measure the memory of a training step with real tensors in gloo processes, with torch's profiler.

The step is that of `ckptx/runtime/forecasting/step.py`, which a forecast also runs. Storage and processes are real, and
bytes are counted by the allocator.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from torch.profiler._utils import traverse_dfs

from ckptx.options.forecast import ForecastOptions
from ckptx.runtime.forecasting.ranks import count_stages
from ckptx.runtime.forecasting.run import BoundaryCache, RankForecast, find_sent_shapes, run_rank
from ckptx.runtime.forecasting.step import StepSpec, make_step_batches, make_step_inputs, make_step_optimizer
from ckptx.runtime.forecasting.task import ForecastTask, task_from_options
from ckptx.runtime.memory.storage_ledger import StorageLedger
from ckptx.runtime.model.build import build_model, materialize
from ckptx.runtime.model.layers import layer_groups
from ckptx.runtime.parallel.distributed import RankContext, process_group
from ckptx.runtime.parallel.live_tensors import iter_live_tensors
from ckptx.runtime.training.rank_model import build_rank_model_on_meta, connect_pipeline
from tests.support.pool import GlooPool

_SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 4096, "max_position_embeddings": 1024, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SEQ = 256
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_SIZES},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **_SIZES, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 32,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_SIZES, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **_SIZES},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 8,
        "n_positions": 1024, "vocab_size": 4096, "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen2.5-vl": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "image_token_id": 4090, "video_token_id": 4091, "vision_start_token_id": 4092, "vision_end_token_id": 4093,
        "text_config": {
            **_SIZES, "model_type": "qwen2_5_vl_text",
            "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [4, 6, 6]},
        },
        "vision_config": {
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 256,
            "patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
        },
    },
}  # fmt: skip
_DEEP_SIZES = {**_SIZES, "num_hidden_layers": 8, "vocab_size": 512}
# Models with a layer for each of eight stages, and small enough for one tensor that stages exchange to matter.
DEEP_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-8-layers": {**CONFIGS["llama"], **_DEEP_SIZES},
    "granite-8-layers": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", **_DEEP_SIZES, "embedding_multiplier": 12.0,
        "attention_multiplier": 0.03, "residual_multiplier": 0.22, "logits_scaling": 4.0, "tie_word_embeddings": True,
    },
    "qwen3-moe-8-layers": {**CONFIGS["qwen3-moe"], **_DEEP_SIZES},
    "gemma4-8-layers": {  # its stages also send keys, values and inputs of each layer
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", **_DEEP_SIZES, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 4, "global_head_dim": 32,
        "num_global_key_value_heads": 4, "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 512,
    },
}  # fmt: skip
LAYOUTS: dict[str, dict[str, int]] = {
    "dp1": {}, "tp4": {"tp": 4}, "dp4": {"dp_shard": 4}, "tp2 x dp2": {"tp": 2, "dp_shard": 2}, "pp2": {"pp": 2},
}  # fmt: skip
PIPELINE_LAYOUTS: dict[str, dict[str, int]] = {"pp2": {"pp": 2}, "pp4": {"pp": 4}}
_STEPS = 2  # measured steps with several ranks
_GLOO_OPERATIONS = ("c10d::", "gloo:")  # operations that only send; NCCL does not need their copies
MODES = ("none", "full", "submodule", "selective")


class Block(NamedTuple):
    """An allocation.

    Attributes:
        nbytes: Size in bytes.
        op: Innermost operation that allocated it.
    """

    nbytes: int
    op: str


class MeasuredMemory(NamedTuple):
    """Memory of a step on one rank.

    Attributes:
        before: Bytes of tensors before the step.
        peak: Peak bytes during the step, without buffers of gloo.
        after: Bytes after the step.
        with_gloo: Peak bytes during the step, with buffers of gloo.
        alive: Allocations of the step that are alive at the peak.
    """

    before: int
    peak: int
    after: int
    with_gloo: int
    alive: list[Block]


def write_config(model: str, directory: Path) -> Path:
    """Write the config.json of one of CONFIGS or DEEP_CONFIGS, and return its directory."""
    found = directory / model
    found.mkdir(exist_ok=True)
    (found / "config.json").write_text(json.dumps((CONFIGS | DEEP_CONFIGS)[model]))
    return found


def task_of(source: Path, layout: str, mode: Any, **settings: Any) -> ForecastTask:
    """Return the forecast task of a small model.

    Args:
        source: Directory of the config.json.
        layout: One of LAYOUTS or PIPELINE_LAYOUTS, or "tp2".
        mode: Activation checkpointing mode.
        settings: Other options of `forecast`. By default the schedule is 1F1B, with one microbatch per pipeline stage.
    """
    sizes: dict[str, Any] = {"tp": 2} if layout == "tp2" else (LAYOUTS | PIPELINE_LAYOUTS)[layout]
    options = ForecastOptions(source, **sizes, seq=SEQ, activation_checkpointing=mode, dtype="fp32", **settings)
    return task_from_options(source, options, options.dims.pp)


def forecast_in_this_process(task: ForecastTask) -> list[RankForecast]:
    """Forecast each stage in this process, because a fork of a process that has trained cannot do it."""
    known, found = BoundaryCache(), []
    stages = count_stages(task.dims.pp, task.recipe.layout.schedule)
    for number in range(stages if stages > task.dims.pp else 0):
        known = find_sent_shapes(task, stages, number, known)
    for rank in range(task.dims.pp):
        forecast, known = run_rank(task, rank, known)
        found.append(forecast)
    return found


def measure_in_this_process(task: ForecastTask) -> MeasuredMemory:
    """Measure a task with one rank in this process."""
    with process_group("cpu") as context:
        return measure(task, context)


def measure_stages(pool: GlooPool, task: ForecastTask) -> list[MeasuredMemory]:
    """Measure a task on one rank of each pipeline stage.

    All shards are even, so that the ranks of a stage use the same memory; the rank with the lowest peak counts.
    """
    size = task.dims.ranks_per_stage
    found = pool.run(measure_on_rank, task.dims.world_size, task)
    return [min(found[begin : begin + size], key=lambda each: each.peak) for begin in range(0, len(found), size)]


def measure_on_rank(rank: int, world_size: int, task: ForecastTask) -> MeasuredMemory:
    """Measure a task on this rank of a pool."""
    return measure(task, RankContext(rank, world_size, torch.device("cpu")))


def measure(task: ForecastTask, context: RankContext) -> MeasuredMemory:
    """Measure a task on this rank.

    The first step allocates lasting state, such as that of the optimizer. Of the later steps, the one with the lowest
    peak counts, because threads of gloo may free sent buffers later than the operation ends.
    """
    others = _storages()  # kept, so that none of them is freed during a step
    step = _prepared(task, context)
    step.run(StorageLedger())
    found = [_measured(step, others) for _ in range(_STEPS if context.world_size > 1 else 1)]
    return min(found, key=lambda each: each.peak)


def _measured(step: StepSpec, others: Mapping[int, torch.UntypedStorage]) -> MeasuredMemory:
    gc.collect()
    rows = {each.untyped_storage().data_ptr() for each in (*step.inputs.batch.values(), step.inputs.labels)}
    before = sum(each.nbytes() for address, each in _storages().items() if address not in {*rows, *others})
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step.run(StorageLedger())
    return _counted(before, seen)


def _prepared(task: ForecastTask, context: RankContext) -> StepSpec:
    assembled = build_rank_model_on_meta(task.recipe, task.source, context)
    for model in assembled.models:
        materialize(model, context.device)
    parameters = [each for _, each in assembled.parameters()]
    with torch.no_grad():
        for each in parameters:
            local = getattr(each, "_local_tensor", each)
            random = torch.Generator().manual_seed(0)  # copies on several stages must be equal
            local.copy_(torch.randn(local.shape, generator=random) * 0.02)
    model = assembled.models[0]
    config: Mapping[str, Any] = {**model.config.to_dict(), "architectures": model.config.architectures}
    inputs = make_step_inputs(task, config)
    step = StepSpec(assembled, task, inputs, make_step_optimizer(task, parameters))
    connect_pipeline(assembled)
    if assembled.pipeline_plan is not None:
        assembled.pipeline.prepare(make_step_batches(task, inputs)[: assembled.pipeline_plan.microbatches])
    return step


def _storages() -> dict[int, torch.UntypedStorage]:
    """Return every tensor storage of this process by its address."""
    found = {}
    for each in iter_live_tensors():
        if each.device.type == "cpu":
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage
    found.pop(0, None)  # the address of empty storages
    return found


def _counted(before: int, seen: Any) -> MeasuredMemory:
    tree = seen.profiler.kineto_results.experimental_event_tree()
    events = [each for each in traverse_dfs(tree) if each.typed[0] == torch._C._profiler._EventType.Allocation]
    now = peak = with_gloo = before
    gloo_blocks: Counter[tuple[int, int]] = Counter()  # events of different threads may be out of order
    alive: dict[int, Block] = {}
    alive_at_peak: list[Block] = []
    for each in sorted(events, key=lambda each: each.start_time_ns):
        nbytes, address = each.extra_fields.alloc_size, each.extra_fields.ptr
        operations = _enclosing_operations(each)
        if nbytes > 0 and any(name.startswith(_GLOO_OPERATIONS) for name in operations):
            gloo_blocks[address, nbytes] += 1
        elif nbytes > 0:
            now += nbytes
            alive[address] = Block(nbytes, " < ".join(operations[:6]))
        elif gloo_blocks[address, -nbytes]:
            gloo_blocks[address, -nbytes] -= 1
        else:
            now += nbytes
            alive.pop(address, None)
        with_gloo = max(with_gloo, now + sum(size * count for (_, size), count in gloo_blocks.items()))
        if now > peak:
            peak, alive_at_peak = now, list(alive.values())
    return MeasuredMemory(before, peak, now, with_gloo, alive_at_peak)


def _enclosing_operations(event: Any) -> list[str]:
    """Return the names of the operations that enclose an event, the innermost first."""
    found = []
    while event.parent is not None:
        event = event.parent
        found.append(event.name)
    return found


def layer_parameters(source: Path) -> int:
    """Return the number of parameters of the largest layer of a model."""
    groups = layer_groups(build_model(source)).values()
    return max(sum(each.numel() for each in layer.module.parameters()) for group in groups for layer in group)
