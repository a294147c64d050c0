"""Measure how much a model's own rounding changes its results: the tolerance for sums in another order.

Every embedding element is perturbed by one unit in the last place (ULP), up or down at random. The change of logits,
loss and gradients, the noise, shows by how much correct computations with these weights may differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ckptx.runtime.model.layers import canonical_name

NUM_DRAWS = 3  # runs with different perturbations; the noise is the largest change in any of them
NOISE_MULTIPLE = 8  # tolerance, in multiples of the noise

_CHUNK_NUMEL = 1 << 16  # elements that are perturbed at a time
_INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes per element -> dtype


def find_embeddings(model: nn.Module) -> dict[str, str]:
    """Return every name of the weight of an `nn.Embedding` -> the first name of that weight."""
    weight_ids = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    first_by_id: dict[int, str] = {}
    first_names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in weight_ids:
            first_names[canonical_name(name)] = first_by_id.setdefault(id(parameter), canonical_name(name))
    return first_names


@contextmanager
def perturb_embeddings(model: nn.Module, draw: int, embeddings: Mapping[str, str] | None = None) -> Iterator[None]:
    """Perturb every embedding by one ULP within the block; afterwards the values are restored bit for bit.

    No copy is kept: the same steps are drawn again and subtracted.

    Args:
        model: Model with storage, or a part of one.
        draw: Seed of the steps up or down; the steps of an embedding depend on this seed and its first name only.
        embeddings: Result of `find_embeddings` for the whole model; None if `model` is whole.
    """
    first_names = find_embeddings(model) if embeddings is None else embeddings
    perturbed_weights = []
    try:
        for name, parameter in model.named_parameters():
            first = first_names.get(canonical_name(name))
            if first is not None:
                weight = parameter.detach()
                perturbed_weights.append((weight, first, _perturb(weight, _make_step_generator(first, draw))))
        yield
    finally:
        for weight, first, toggled_indices in perturbed_weights:
            _perturb(weight, _make_step_generator(first, draw), toggled_indices)


def _make_step_generator(name: str, draw: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{draw} {name}".encode()))


def rounding_tolerance(dtype: torch.dtype, magnitude: float) -> float:
    """Return `NOISE_MULTIPLE` rounding errors of a value of this magnitude: a change that rounding alone may cause."""
    return float(NOISE_MULTIPLE * torch.finfo(dtype).eps * magnitude)


def perturb_copy(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a copy in which each finite, normal element is replaced by one of its two neighbors, at random."""
    copied = tensor.detach().clone(memory_format=torch.contiguous_format)
    _perturb(copied, generator)
    return copied


def _perturb(
    tensor: torch.Tensor, generator: torch.Generator, earlier_toggles: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Perturb the elements in place, in chunks so that it takes little memory.

    Args:
        tensor: Tensor on any device.
        generator: CPU generator, so that every device gets the same steps.
        earlier_toggles: Result of an earlier call with the same steps, to undo it; None to perturb.

    Returns:
        For each chunk, the indices of elements that became perturbable, or ceased to be, by this step.
    """
    row_major = tensor.contiguous()
    toggled_indices = []
    for number, chunk in enumerate(row_major.view(-1).split(_CHUNK_NUMEL) if tensor.numel() else ()):
        steps = torch.randint(0, 2, chunk.shape, generator=generator, dtype=torch.int8).to(chunk.device) * 2 - 1
        is_perturbable = _can_perturb(chunk)
        if earlier_toggles is not None:
            is_perturbable[earlier_toggles[number]] ^= True
            steps = -steps
        bits = chunk.view(_INTEGER_DTYPES[chunk.element_size()])
        bits += steps.masked_fill_(~is_perturbable, 0)
        toggled_indices.append((is_perturbable != _can_perturb(chunk)).nonzero()[:, 0])
    if row_major is not tensor:
        tensor.copy_(row_major)
    return toggled_indices


def _can_perturb(chunk: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements that are finite, normal, and smaller in magnitude than the largest number."""
    info = torch.finfo(chunk.dtype)
    return chunk.isfinite() & (chunk.abs() >= info.tiny) & (chunk.abs() < float(info.max))
