"""Words of a forecast that its text and its page share."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ckptx.report.documents.forecast import ForecastReport
from ckptx.report.report import counted, human_bytes

_PARTS = {"build": "the inputs of the step", "clipping": "clipping of gradients", "optimizer": "the optimizer"}
_PASSES = ("forward", "backward")
LOSSES = {"sharded": "loss on sharded logits", "whole": "loss on whole logits", "none": "no loss"}


def mesh(report: ForecastReport) -> str:
    """`tp 2 x dp_shard 2, 4 ranks`."""
    dims = mesh_text(report.layout)
    return f"{dims}{', ' if dims else ''}{counted(prod(report.layout.values()), 'rank')}"


def mesh_text(layout: Mapping[str, int]) -> str:
    """`tp 2 x dp_shard 2`; nothing for one GPU."""
    return " x ".join(f"{name} {size}" for name, size in layout.items() if size > 1)


def rows_text(report: ForecastReport) -> str:
    """What a step has to do on a data rank."""
    step = report.settings
    images = f" and {counted(step['images'], 'image')}" if step["images"] else ""
    portions = f" in {step['microbatches']} microbatches" if step["microbatches"] > 1 else ""
    schedule = f", {step['schedule']}" if step["schedule"] else ""
    return f"{counted(step['batch'], 'row')} of {step['seq']:,} tokens{images}{portions}{schedule}"


def settings_text(report: ForecastReport) -> str:
    """How it is done."""
    step = report.settings
    mode, scope = step["activation_checkpointing"], step["ac_scope"]
    return f"{step_text(step)}, activation checkpointing {mode}{'' if scope == 'all' else f' of {scope} layers'}"


def step_text(step: Mapping[str, Any]) -> str:
    """What a step does on any mesh: dtypes, optimizer, loss."""
    said = [str(step["dtype"])]
    if step["param_dtype"]:
        said.append(f"gathered in {step['param_dtype']}")
    if step["reduce_dtype"]:
        said.append(f"reduced in {step['reduce_dtype']}")
    said.append("no optimizer" if step["optimizer"] == "none" else str(step["optimizer"]))
    said.append(LOSSES[step["loss"]])
    return ", ".join(said)


def called(report: ForecastReport, row: Mapping[str, Any]) -> str:
    """`each rank`, or the pipeline stages that a rank has."""
    stages = row["stages"]
    if report.layout["pp"] == 1:
        return "each rank"
    return f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}"


def pass_text(report: ForecastReport, part: str, microbatch: int) -> str:
    """`backward of microbatch 1`, or what else a step does."""
    if part not in _PASSES:
        return _PARTS.get(part, part)
    return part if report.settings["microbatches"] == 1 else f"{part} of microbatch {microbatch}"


def place_text(module: str) -> str:
    """For which module something happens."""
    return f"in {module}" if module else "outside of modules"


def moment_text(report: ForecastReport, at: Mapping[str, Any]) -> str:
    """`backward of microbatch 1, in lm_head`."""
    again = ", computed again" if at["recomputed"] else ""
    said = pass_text(report, at["part"], at["microbatch"])
    return f"{said}, {place_text(at['module'])}{again}" if at["part"] in _PASSES else said


def tensor_text(tensor: Mapping[str, Any]) -> str:
    """`bfloat16 [32000, 512]`."""
    return f"{tensor['dtype']} {list(tensor['shape'])}"


def flops_text(row: Mapping[str, Any] | ForecastReport) -> str:
    """`56.2 TFLOPs, 8.1 % of them recomputed`."""
    flops, recomputed = (row.flops, row.recomputed) if isinstance(row, ForecastReport) else (
        row["flops"], row["recomputed"],
    )  # fmt: skip
    share = f"{recomputed / flops:.1%}" if recomputed else "none"
    return f"{human_count(flops)}FLOPs, {share} of them recomputed"


def sent_text(row: Mapping[str, Any]) -> str:
    """What a rank sends in a step, by collective."""
    return f"sends {', '.join(f'{name} {human_bytes(nbytes)}' for name, nbytes in row['sent'].items())}"


def human_count(number: float) -> str:
    """A number with the prefix of its thousands: `56.2 T`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} E"


def worst_of(report: ForecastReport) -> Mapping[str, Any]:
    """The row with the highest peak."""
    return max(report.by_stage, key=lambda row: int(row["peak"]))


def verdict(report: ForecastReport) -> str:
    """Whether it fits, with the margin; without a size to judge by, what it takes at most."""
    worst = worst_of(report)
    peak = f"{human_bytes(worst['peak'])} at the peak"
    if report.layout["pp"] > 1:
        peak += f" of {called(report, worst)}"
    if report.gpu_memory is None:
        return f"PEAK: {peak}, {human_bytes(worst['between_steps'])} between steps"
    left = report.gpu_memory - worst["peak"] - report.reserved
    needed = f"{peak} and {human_bytes(report.reserved)} kept free, of {human_bytes(report.gpu_memory)}"
    if left >= 0:
        return f"FITS: {needed}; {human_bytes(left)} to spare"
    return f"DOES NOT FIT: {needed}; {human_bytes(-left)} too much"
