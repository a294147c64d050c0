"""Where two models part: the first module, in the order of the reference, that gives something else.

Outputs are compared where they have the shape of the reference's: not inside of modules that TP cuts, and not where
experts get other tokens. A pipeline stage, and a piece, shows what is its own; on the way to its layers only the last
one has what the whole model has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ckptx.layout.stages import StageMap
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.pipeline.stage import Stub, modules_on_the_path
from ckptx.runtime.parity import execution, noise
from ckptx.runtime.parity.distances import furthest
from ckptx.runtime.parity.execution import ModuleCall, module_hooks

Outputs = dict[ModuleCall, torch.Tensor]


def first_divergence(
    reference: Iterator[tuple[Outputs, Outputs]], checkpoint: Iterator[Outputs], *, is_exact: bool
) -> dict[str, Any] | None:
    """The first call whose output is further away than its noise allows.

    Args:
        reference: What its calls gave, and what they gave with moved embeddings; of one piece after another.
        checkpoint: What its calls gave, of one stage after another; as many are asked for as it takes.
        is_exact: Whether both sides should be equal bit for bit.
    """
    ours: Outputs = {}
    for seen, other in reference:
        for call, output in seen.items():
            while call not in ours and (more := next(checkpoint, None)) is not None:
                ours |= {each: found for each, found in more.items() if each not in ours}
            found, moved = ours.pop(call, None), other.get(call)
            if found is None or moved is None or not found.shape == moved.shape == output.shape:
                continue
            limit = 0.0 if is_exact else noise.ALLOWED * furthest(output, moved)
            distance = furthest(output, found)
            if not distance <= limit:
                return {"module": call.module, "max_abs": distance, "limit": limit}
    return None


def record_outputs(
    model: nn.Module, into: Outputs, stages: StageMap | None = None, number: int = 0
) -> AbstractContextManager[None]:
    """Keeps what each call of a module gives within the block, whole, on the CPU, as it was before anything was added
    to it in place.

    Args:
        model: As a whole; or a stage.
        into: Gets it.
        stages: Which stage `number` is one of.
        number: See `stages`.
    """
    unless = {canonical_name(name) for name, module in model.named_modules() if isinstance(module, Stub)}
    if stages is not None and number < stages.pp - 1:
        unless |= set(modules_on_the_path(stages))
    return module_hooks(
        model, lambda call, found: into.__setitem__(call, execution.full_tensor(found).to("cpu", copy=True)), unless
    )
