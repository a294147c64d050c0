"""The loss of a language model on logits that stay sharded over the vocabulary.

Cross entropy needs three numbers per position from all ranks: the largest logit, the sum of exponentials, and the
logit of the target, which one rank has. The logits themselves are never gathered (Megatron-LM, arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functions
from torch import nn
from torch.distributed.tensor import DTensor

from ckptx.errors import UsageError
from ckptx.layout.placement import ceil_chunks
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks, all_reduce


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: torch.Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the loss of transformers' `ForCausalLMLoss` as a float32 tensor without dims, also for sharded logits.

    Args:
        logits: [B, S, V]; a DTensor sharded along its last dim, or whole.
        labels: [B, S], not shifted, as in transformers: the label of a position is its token.
        vocab_size: Ignored; accepted so that `model.loss_function` can be this function.
        num_items_in_batch: Divisor of the summed loss; None means the number of labels that count.
        ignore_index: Label that does not count.
        shift_labels: Labels that are already shifted, used instead of `labels`; None shifts `labels`.

    Raises:
        UsageError: The logits are a DTensor that is not sharded along its last dim.
    """
    if shift_labels is None:
        shift_labels = functions.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    if isinstance(logits, DTensor):
        losses = _sharded_losses(logits, targets, ignore_index)
    else:
        flat = logits.float().reshape(-1, logits.shape[-1])
        losses = functions.cross_entropy(flat, targets, ignore_index=ignore_index, reduction="none")
    if num_items_in_batch is None:
        return losses.sum() / (targets != ignore_index).sum()
    return losses.sum() / torch.as_tensor(num_items_in_batch, device=losses.device)


def make_loss(labels: Sequence[torch.Tensor], num_items: torch.Tensor) -> Callable[[Any, int], torch.Tensor]:
    """Return a loss function for `Pipeline.step` that weights every label of the step equally.

    The function takes the output of the model and the index of the microbatch, and returns a tensor without dims.

    Args:
        labels: Labels of each microbatch, [B, S], as for `causal_lm_loss`.
        num_items: Divisor of each sum, from `gradients.loss_divisor` of the same labels.
    """
    return lambda output, index: causal_lm_loss(output.logits, labels[index], num_items_in_batch=num_items)


def install_sharded_loss(model: nn.Module) -> None:
    """Make `model(labels=...)` compute its loss on sharded logits."""
    model.loss_function = causal_lm_loss


def _sharded_losses(logits: DTensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return the loss of each position, [B * S]; 0 for labels that do not count."""
    (placement,) = logits.placements
    if not placement.is_shard(logits.dim() - 1):
        raise UsageError(
            f"logits: must be sharded over the vocabulary, Shard({logits.dim() - 1}), not {placement}; "
            "gather them with full_tensor()"
        )
    ranks = TpRanks.from_mesh(logits.device_mesh)
    begin, _ = ceil_chunks(logits.shape[-1], ranks.size)[ranks.rank]
    local = logits.to_local()
    flat = local.reshape(targets.numel(), local.shape[-1]).float()  # -1 is ambiguous for an empty slice
    losses: torch.Tensor = _CrossEntropy.apply(flat, targets, begin, ignore_index, ranks)
    return losses


class _CrossEntropy(torch.autograd.Function):  # type: ignore[misc]  # torch says Any
    """Cross entropy from logits [N, V / tp] and targets [N] to losses [N].

    Targets are indices into the whole vocabulary, of which `begin` is the first that this rank has. Each rank computes
    the gradient of its own logits: softmax minus one-hot.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, begin: int, ignore_index: int, ranks: TpRanks
    ) -> torch.Tensor:
        rows, width = logits.shape
        lowest = logits.new_full((rows,), torch.finfo(logits.dtype).min)
        largest = all_reduce(logits.amax(-1) if width else lowest, "max", ranks)
        exponentials = (logits - largest[:, None]).exp()
        total = all_reduce(exponentials.sum(-1), "sum", ranks)
        is_own = (targets >= begin) & (targets < begin + width) & (targets != ignore_index)
        index = (targets - begin).masked_fill(~is_own, 0)[:, None]
        picked_logits = logits.gather(1, index)[:, 0] if width else lowest
        target_logit = all_reduce(picked_logits.masked_fill(~is_own, 0), "sum", ranks)
        is_counted = targets != ignore_index
        ctx.save_for_backward(exponentials / total[:, None], index, is_own, is_counted)
        return (total.log() + largest - target_logit).masked_fill(~is_counted, 0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        probabilities, index, is_own, is_counted = ctx.saved_tensors
        grad = probabilities.clone()
        if grad.shape[1]:
            grad.scatter_add_(1, index, -is_own.to(grad.dtype)[:, None])
        return grad * (grads[0] * is_counted)[:, None], None, None, None, None
