"""What `ckptx.verify` takes by name, for callers and type checkers; None is not given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypedDict, get_args

from ckptx.report.report import Log

Dtype = Literal["auto", "bf16", "fp16", "fp32"]
Device = Literal["auto", "cpu", "cuda"]
Backend = Literal["auto", "gloo", "nccl"]
ActivationCheckpointing = Literal["none", "full", "submodule", "selective"]
Scope = Literal["all", "language", "vision", "audio"]
Schedule = Literal["gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev"]

CHOICES = {
    "device": get_args(Device),
    "backend": get_args(Backend),
    "compute_dtype": get_args(Dtype),
    "activation_checkpointing": get_args(ActivationCheckpointing),
    "ac_scope": get_args(Scope),
    "schedule": get_args(Schedule),
}


class BytesArguments(TypedDict, total=False):
    """Of comparing the bytes, see `ckptx.comparison.contents.verify`."""

    dtype: Dtype | None
    prefix: str | None
    workers: int | None
    max_memory: int | None
    on_progress: Callable[[int, int], None] | None
    log: Log | None


class RunArguments(TypedDict, total=False):
    """Of running the models, see `ckptx.api.verify_run.verify_running`."""

    tp: int | None
    pp: int | None
    pp_split: str | None
    dp_shard: int | None
    dp_replicate: int | None
    schedule: Schedule | None
    microbatches: int | None
    reference_memory: int | str | None
    gpu_memory: int | str | None
    tp_plan: str | Path | None
    device: Device | None
    backend: Backend | None
    compute_dtype: Dtype | None
    activation_checkpointing: ActivationCheckpointing | None
    ac_scope: Scope | None
    compile: bool | None
    backward: bool | None
    prefix: str | None
    trust_remote_code: bool | None
    strict: bool | None
    log: Log | None
