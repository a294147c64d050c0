"""Phrases of forecast reports, shared by their text and HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ckptx.report.documents.forecast import ForecastReport, SearchReport
from ckptx.report.report import counted, human_bytes

_PHASE_TEXTS = {"build": "inputs of the step", "clipping": "gradient clipping", "optimizer": "optimizer step"}
_KIND_TEXTS = {"pipeline_p2p": "p2p buffers"}  # other kinds are printed as they are
_PASSES = ("forward", "backward")
PRECISION_KEYS = ("dtype", "param_dtype", "reduce_dtype")
_LOSS_TEXTS = {"full": "loss on full logits", "none": "no loss"}


def mesh_text(report: ForecastReport) -> str:
    """Return the mesh and its number of ranks: `tp 2 x dp_shard 2, 4 ranks`."""
    dims = dims_text(report.layout)
    return f"{dims}{', ' if dims else ''}{counted(prod(report.layout.values()), 'rank')}"


def dims_text(layout: Mapping[str, int]) -> str:
    """Return the mesh dims larger than 1: `tp 2 x dp_shard 2`; empty for one GPU."""
    return " x ".join(f"{name} {size}" for name, size in layout.items() if size > 1)


def batch_text(report: ForecastReport) -> str:
    """Return the batch of a data-parallel rank: `batch 2 x 1,024 tokens in 2 microbatches (numbered from 0), 1f1b`."""
    step = report.settings
    images = f" with {counted(step['images'], 'image')} each" if step["images"] else ""
    count = step["microbatches"]
    microbatches = f" in {counted(count, 'microbatch')} (numbered from 0)" if count > 1 else ""
    schedule = f", {step['schedule']}" if step["schedule"] else ""
    return f"batch {step['batch']:,} x {step['seq']:,} tokens{images}{microbatches}{schedule}"


def settings_text(report: ForecastReport) -> str:
    """Return dtypes, optimizer, loss and activation checkpointing of the step."""
    step = report.settings
    mode, scope = step["activation_checkpointing"], step["ac_scope"]
    layers = "" if scope == "all" else f" ({scope} layers)"
    return f"{step_text(step, report.layout['tp'])}, activation checkpointing {mode}{layers}"


def step_text(step: Mapping[str, Any], tp: int | None) -> str:
    """Return dtypes, optimizer and loss of a step.

    Args:
        step: Settings of the step.
        tp: Number of TP ranks; None for several meshes.
    """
    parts = [str(step["dtype"])]
    if step["param_dtype"]:
        parts.append(f"gathered in {step['param_dtype']}")
    if step["reduce_dtype"]:
        parts.append(f"reduced in {step['reduce_dtype']}")
    parts.append("no optimizer" if step["optimizer"] == "none" else str(step["optimizer"]))
    parts.append(_LOSS_TEXTS.get(step["loss"]) or _sharded_loss_text(tp, step.get("has_sharded_logits", True)))
    return ", ".join(parts)


def _sharded_loss_text(tp: int | None, has_sharded_logits: bool) -> str:
    """Return the text of a loss on logits that TP shards, if the head allows it; see `step_text` for `tp`."""
    if tp is None:
        return "loss on sharded logits with TP"
    if tp == 1:
        return "loss in float32"
    return "loss on sharded logits" if has_sharded_logits else "loss in float32 on full logits"


def stages_text(report: ForecastReport, row: Mapping[str, Any]) -> str:
    """Return `each rank`, or the pipeline stages of a rank: `stages 0, 2`."""
    stages = row["stages"]
    if report.layout["pp"] == 1:
        return "each rank"
    return f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}"


def pass_text(report: ForecastReport, phase: str, microbatch: int) -> str:
    """Return the name of a phase of the step: `backward of microbatch 1`, `optimizer step`."""
    if phase not in _PASSES:
        return _PHASE_TEXTS.get(phase, phase)
    return phase if report.settings["microbatches"] == 1 else f"{phase} of microbatch {microbatch}"


def module_text(module: str) -> str:
    """Return where an operation ran: `in lm_head`, `in the loss`, or `outside modules`."""
    return "in the loss" if module == "loss" else f"in {module}" if module else "outside modules"


def peak_time_text(report: ForecastReport, peak: Mapping[str, Any]) -> str:
    """Return where in the step the peak is: `backward of microbatch 1, in lm_head, recomputed`."""
    recomputed = ", recomputed" if peak["is_recomputed"] else ""
    phase = pass_text(report, peak["phase"], peak["microbatch"])
    return f"{phase}, {module_text(peak['module'])}{recomputed}" if peak["phase"] in _PASSES else phase


def tensor_text(tensor: Mapping[str, Any]) -> str:
    """Return dtype and shape: `bfloat16 [32000, 512]`."""
    return f"{tensor['dtype']} {list(tensor['shape'])}"


def origin_text(tensor: Mapping[str, Any]) -> str:
    """Return the parameter of a tensor, or else what allocated it: `of lm_head.weight`, `from aten::mm, in lm_head`."""
    place = place_text(tensor)
    return place if tensor["parameter"] else f"from {tensor['op']}, {place}"


def place_text(tensor: Mapping[str, Any]) -> str:
    """Return the parameter of a tensor, or else the module that allocated it: `of lm_head.weight`, `in lm_head`."""
    return f"of {tensor['parameter']}" if tensor["parameter"] else module_text(tensor["module"])


def flops_text(row: Mapping[str, Any] | ForecastReport) -> str:
    """Return the FLOPs of a step and the recomputed share of them: `56.2 TFLOP per step, 8.1% recomputed`.

    `row` is an entry of `by_pipeline_rank`, or the report for the sum over all ranks.
    """
    flops, recomputed = (row.flops, row.recomputed_flops) if isinstance(row, ForecastReport) else (
        row["flops"], row["recomputed_flops"],
    )  # fmt: skip
    share = f"{recomputed / flops:.1%}" if recomputed else "none"
    return f"{human_count(flops)}FLOP per step, {share} recomputed"


def communication_text(row: Mapping[str, Any]) -> str:
    """Return the bytes that a rank sends in a step, by collective: `sent per step: 1.20 GiB in all-gather`."""
    sent = (f"{human_bytes(nbytes)} in {name}" for name, nbytes in row["sent_bytes"].items())
    return f"sent per step: {', '.join(sent)}"


def present_kinds(report: ForecastReport, row: Mapping[str, Any]) -> set[str]:
    """Return the kinds of memory that a rank has at the peak of any part of the step."""
    sizes_by_kind = zip(*(part[3:] for part in row["timeline"]), strict=True)  # after phase, microbatch and layer
    return {kind for kind, sizes in zip(report.memory_kinds, sizes_by_kind, strict=True) if any(sizes)}


def kind_text(kind: str) -> str:
    """Return the printed name of a kind of memory."""
    return _KIND_TEXTS.get(kind, kind)


def human_count(number: float) -> str:
    """Return a number with a decimal prefix: `56.2 T`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 999.5:  # the next number with three digits is 1000
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} E" if abs(number) < 999.5 else f"{number:,.0f} E"


def highest_peak_entry(report: ForecastReport) -> Mapping[str, Any]:
    """Return the entry of `by_pipeline_rank` with the highest peak."""
    return max(report.by_pipeline_rank, key=lambda row: int(row["peak"]))


def verdict(report: ForecastReport) -> str:
    """Return FITS or DOES NOT FIT with the margin; without GPU memory, PEAK with the highest peak."""
    worst = highest_peak_entry(report)
    peak = human_bytes(worst["peak"])
    if report.layout["pp"] > 1:
        peak += f" ({stages_text(report, worst)})"
    precision = precision_text(report.settings)
    if report.gpu_memory is None:
        return f"PEAK: {peak}, {human_bytes(worst['between_steps'])} between steps; {precision}"
    return f"{_fit_text(report.gpu_memory, worst['peak'], report.reserved, peak)}; {precision}"


def _fit_text(gpu_memory: int, peak: int, reserved: int, peak_text: str) -> str:
    """Return FITS or DOES NOT FIT with the margin; sizes are in bytes, and `peak_text` is the peak as printed."""
    free = gpu_memory - peak - reserved
    required, memory = f"peak {peak_text} + reserve {human_bytes(reserved)}", human_bytes(gpu_memory)
    if free >= 0:
        return f"FITS: {required} of {memory} GPU memory; {human_bytes(free)} free"
    return f"DOES NOT FIT: {required} exceeds {memory} GPU memory by {human_bytes(-free)}"


def precision_text(step: Mapping[str, Any]) -> str:
    """Return the precision of a step: `bfloat16 parameters and optimizer state, no float32 master weights`."""
    states = "parameters" if step["optimizer"] in ("none", "sgd") else "parameters and optimizer state"
    if step["param_dtype"] and step["param_dtype"] != step["dtype"]:
        return f"{step['dtype']} {states}, computed in {step['param_dtype']}"
    return f"{step['dtype']} {states}" + ("" if step["dtype"] == "float32" else ", no float32 master weights")


def other_precision_text(report: ForecastReport | SearchReport) -> str:
    """Return the peak in the other common precision, and the options for it; empty if the report has none.

    Example:
        float32 parameters, computed in bfloat16 (--dtype fp32 --param-dtype bf16 --reduce-dtype fp32): FITS: peak ...
    """
    other = report.other_precision
    if other is None:
        return ""
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    options = " ".join(f"--{key.replace('_', '-')} {names[other[key]]}" for key in PRECISION_KEYS if other[key])
    peak = human_bytes(other["peak"])
    fit = (
        f"peak {peak}"
        if report.gpu_memory is None
        else _fit_text(report.gpu_memory, other["peak"], other["reserved"], peak)
    )
    return f"{precision_text({**report.settings, **other})} ({options}): {fit}"
