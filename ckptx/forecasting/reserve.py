"""What of a GPU is kept free for what is no tensor."""

from __future__ import annotations

CONTEXT = 3 * 2**29  # bytes: the context of CUDA, libraries and NCCL
FRAGMENTATION = 0.05  # of the peak: rounding, fragmentation, workspaces of kernels


def reserved(peak: int) -> int:
    """Bytes that are kept free beside a peak. No card has confirmed them yet."""
    return CONTEXT + int(FRAGMENTATION * peak)
