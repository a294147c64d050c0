"""How much a model's own rounding moves what it computes: the yardstick for differences that come from reordered sums.

Every embedding is moved by one unit in the last place, up or down at random. What that does to logits, loss and
gradients is what any computation with these weights must be allowed to differ by; no one has to pick a tolerance.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ckptx.runtime.model.layers import canonical_name

DRAWS = 3
ALLOWED = 8  # times the noise

_BAND = 1 << 16  # elements
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def embeddings_of(model: nn.Module) -> dict[str, str]:
    """The parameters of every `nn.Embedding`: all names of each -> the first."""
    own = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own:
            found[canonical_name(name)] = first.setdefault(id(parameter), canonical_name(name))
    return found


@contextmanager
def perturbed_embeddings(model: nn.Module, draw: int, embeddings: Mapping[str, str] | None = None) -> Iterator[None]:
    """Moves every embedding by one unit in the last place; afterwards they are what they were, bit for bit.

    No copy is kept: the steps are drawn again to be taken back.

    Args:
        model: With storage; or a part of a model.
        draw: Which steps; those of an embedding depend on its first name, too, and on nothing else.
        embeddings: From `embeddings_of` the model that this is a part of.
    """
    known = embeddings_of(model) if embeddings is None else embeddings
    done = []
    try:
        for name, parameter in model.named_parameters():
            first = known.get(canonical_name(name))
            if first is not None:
                weight = parameter.detach()
                done.append((weight, first, _perturb(weight, _steps_of(first, draw))))
        yield
    finally:
        for weight, first, at_the_edge in done:
            _perturb(weight, _steps_of(first, draw), at_the_edge)


def _steps_of(name: str, draw: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{draw} {name}".encode()))


def rounding(dtype: torch.dtype, size: float) -> float:
    """What the last place of numbers of `size` may come to: the least that anything summed from them may differ by."""
    return float(ALLOWED * torch.finfo(dtype).eps * size)


def perturbed(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`tensor` with each finite element that is not zero replaced by the next one, away from zero or towards it."""
    found = tensor.detach().clone(memory_format=torch.contiguous_format)
    _perturb(found, generator)
    return found


def _perturb(
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
        usual = _can_perturb(band)
        if back is not None:
            usual[back[number]] ^= True
            steps = -steps
        bits = band.view(_BITS[band.element_size()])
        bits += steps.masked_fill_(~usual, 0)
        at_the_edge.append((usual != _can_perturb(band)).nonzero()[:, 0])
    if row_major is not tensor:
        tensor.copy_(row_major)
    return at_the_edge


def _can_perturb(band: torch.Tensor) -> torch.Tensor:
    info = torch.finfo(band.dtype)
    return band.isfinite() & (band.abs() >= info.tiny) & (band.abs() < float(info.max))
