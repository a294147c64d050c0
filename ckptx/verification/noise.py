"""How much a model's own rounding moves what it computes: the yardstick for differences that come from reordered sums.

Every embedding is moved by one unit in the last place, up or down at random. What that does to logits, loss and
gradients is what any computation with these weights must be allowed to differ by; no one has to pick a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

DRAWS = 3
ALLOWED = 8  # times the noise

_BAND = 1 << 22  # elements
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def moved_embeddings(model: nn.Module, seed: int) -> Iterator[None]:
    """Moves every `nn.Embedding` by one unit in the last place; afterwards they are what they were, bit for bit.

    No copy is kept: the steps are drawn again to be taken back.
    """
    weights = {id(each.weight): each.weight.detach() for each in model.modules() if isinstance(each, nn.Embedding)}
    generator = torch.Generator().manual_seed(seed)
    done = []
    try:
        for weight in weights.values():
            state = generator.get_state()
            done.append((weight, state, _move(weight, generator)))
        yield
    finally:
        for weight, state, at_the_edge in done:
            generator.set_state(state)
            _move(weight, generator, at_the_edge)


def rounding(dtype: torch.dtype, size: float) -> float:
    """What the last place of numbers of `size` may come to: the least that anything summed from them may differ by."""
    return float(ALLOWED * torch.finfo(dtype).eps * size)


def moved(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`tensor` with each finite element that is not zero replaced by the next one, away from zero or towards it."""
    found = tensor.detach().clone(memory_format=torch.contiguous_format)
    _move(found, generator)
    return found


def _move(
    tensor: torch.Tensor, generator: torch.Generator, back: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Moves the elements in place, some at a time so that it takes little memory.

    Args:
        tensor: On any device.
        generator: Of the CPU, so that every device gets the same steps.
        back: What moving it gave, to take it back.

    Returns:
        By band, which elements can be moved now and could not before, or the other way round.
    """
    row_major = tensor.contiguous()
    at_the_edge = []
    for number, band in enumerate(row_major.view(-1).split(_BAND) if tensor.numel() else ()):
        steps = torch.randint(0, 2, band.shape, generator=generator, dtype=torch.int8).to(band.device) * 2 - 1
        usual = _can_move(band)
        if back is not None:
            usual[back[number]] ^= True
            steps = -steps
        bits = band.view(_BITS[band.element_size()])
        bits += steps.masked_fill_(~usual, 0)
        at_the_edge.append((usual != _can_move(band)).nonzero()[:, 0])
    if row_major is not tensor:
        tensor.copy_(row_major)
    return at_the_edge


def _can_move(band: torch.Tensor) -> torch.Tensor:
    info = torch.finfo(band.dtype)
    return band.isfinite() & (band.abs() >= info.tiny) & (band.abs() < float(info.max))
