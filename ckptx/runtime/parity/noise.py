"""Measure how much a model's own rounding changes its results: the tolerance for sums in another order.

Every embedding element is perturbed by one unit in the last place (ULP), up or down at random. The change of logits,
loss and gradients is what any computation with these weights may differ by, so nobody has to choose a tolerance.
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
    """Return the parameters of every `nn.Embedding`: each of their names -> the first name."""
    own = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own:
            found[canonical_name(name)] = first.setdefault(id(parameter), canonical_name(name))
    return found


@contextmanager
def perturbed_embeddings(model: nn.Module, draw: int, embeddings: Mapping[str, str] | None = None) -> Iterator[None]:
    """Perturb every embedding by one ULP within the block; afterwards the values are restored bit for bit.

    No copy is kept: the same steps are drawn again and subtracted.

    Args:
        model: Model with storage, or a part of one.
        draw: Seed of the steps; those of an embedding depend on this and its first name only.
        embeddings: Result of `embeddings_of` for the whole model; None if `model` is whole.
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
    """Return the tolerance for values of magnitude `size`: rounding alone may change a sum by this much."""
    return float(ALLOWED * torch.finfo(dtype).eps * size)


def perturbed(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a copy in which each finite, normal element is replaced by one of its two neighbors, at random."""
    found = tensor.detach().clone(memory_format=torch.contiguous_format)
    _perturb(found, generator)
    return found


def _perturb(
    tensor: torch.Tensor, generator: torch.Generator, back: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Perturb the elements in place, in bands so that it takes little memory.

    Args:
        tensor: Tensor on any device.
        generator: CPU generator, so that every device gets the same steps.
        back: Result of an earlier call with the same steps, to undo it; None to perturb.

    Returns:
        For each band, the indices of elements that became perturbable, or ceased to be, by this step.
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
