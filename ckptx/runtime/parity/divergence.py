"""Find the first module, in the order of the reference, whose output differs.

Outputs are compared if both have the same shape, which excludes the insides of modules that TP shards and experts that
get other tokens. A pipeline stage records its own modules only; modules that contain the layers are recorded on the
last stage, which alone gives the same output as the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ckptx.layout.stages import StageMap
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.pipeline.stage import Stub, modules_on_layer_path
from ckptx.runtime.parity import execution, noise
from ckptx.runtime.parity.distances import max_abs_difference
from ckptx.runtime.parity.execution import ModuleCall, module_hooks

OutputsByCall = dict[ModuleCall, torch.Tensor]


def find_first_divergence(
    reference: Iterator[tuple[OutputsByCall, OutputsByCall]], checkpoint: Iterator[OutputsByCall], *, is_exact: bool
) -> dict[str, Any] | None:
    """Return `module`, `max_abs` and `tolerance` of the first call whose output differs too much; None if none does.

    Args:
        reference: Outputs of the reference without and with perturbed embeddings, stage by stage.
        checkpoint: Outputs of the checkpoint, stage by stage; consumed only as far as necessary.
        is_exact: True if both sides must be equal bit for bit.
    """
    checkpoint_outputs: OutputsByCall = {}
    for outputs, perturbed_outputs in reference:
        for call, output in outputs.items():
            while call not in checkpoint_outputs and (next_outputs := next(checkpoint, None)) is not None:
                checkpoint_outputs |= {
                    each: found for each, found in next_outputs.items() if each not in checkpoint_outputs
                }
            actual, perturbed = checkpoint_outputs.pop(call, None), perturbed_outputs.get(call)
            if actual is None or perturbed is None or not actual.shape == perturbed.shape == output.shape:
                continue
            tolerance = 0.0 if is_exact else noise.NOISE_MULTIPLE * max_abs_difference(output, perturbed)
            distance = max_abs_difference(output, actual)
            if not distance <= tolerance:
                return {"module": call.module, "max_abs": distance, "tolerance": tolerance}
    return None


def record_outputs(
    model: nn.Module, outputs: OutputsByCall, stages: StageMap | None = None, number: int = 0
) -> AbstractContextManager[None]:
    """Record the output of each module call within the block: whole, on the CPU, copied before any in-place change.

    Args:
        model: The whole model, or one stage of it.
        outputs: Dict that receives the outputs.
        stages: Assignment of layers to stages; None for a whole model.
        number: Number of the stage that `model` is.
    """
    excluded = {canonical_name(name) for name, module in model.named_modules() if isinstance(module, Stub)}
    if stages is not None and number < stages.count - 1:
        excluded |= set(modules_on_layer_path(stages))
    return module_hooks(
        model,
        lambda call, found: outputs.__setitem__(call, execution.full_tensor(found).to("cpu", copy=True)),
        excluded,
    )
