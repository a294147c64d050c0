"""Choose the samples of each step from one global count, independent of the number of data-parallel ranks.

    5 samples, global batch 2        epoch 0: 3 0 4 1 2        epoch 1: 1 4 0 2 3        ...
    step 1: 3 0     step 2: 4 1     step 3: 2 | 1     step 4: 4 0     ...

An epoch may end within a step, which continues with the next epoch. Each epoch has every sample once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from ckptx.errors import UsageError

T = TypeVar("T")

_MAX_EPOCHS = 1 << 31  # the generator's seed is seed * _MAX_EPOCHS + epoch, which differs for each (seed, epoch)


class Sampler:
    """The order of samples over a run.

    Attributes:
        samples_seen: Number of samples used so far, over all epochs and data-parallel ranks.
    """

    def __init__(self, length: int, seed: int, global_batch: int) -> None:
        """Start at the first sample.

        Args:
            length: Number of samples in the dataset.
            seed: Seed of the order.
            global_batch: Samples per step, over all data-parallel ranks.

        Raises:
            UsageError: The dataset or the batch is empty.
        """
        if length < 1:
            raise UsageError(f"sampler: length is {length} and must be 1 or more; use more samples")
        if global_batch < 1:
            raise UsageError(f"sampler: global_batch is {global_batch} and must be 1 or more; increase global_batch")
        self.samples_seen = 0
        self._length, self._seed, self._global_batch = length, seed, global_batch
        self._order: tuple[int, list[int]] | None = None  # the epoch that was used last, and its order

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0."""
        return self.samples_seen // self._length

    def next_step(self) -> list[int]:
        """Return the `global_batch` sample indices of the next step, in global order, and advance."""
        indices: list[int] = []
        while len(indices) < self._global_batch:
            begin = self.samples_seen % self._length
            epoch_indices = self._epoch_order(self.epoch)[begin : begin + self._global_batch - len(indices)]
            indices += epoch_indices
            self.samples_seen += len(epoch_indices)
        return indices

    def _epoch_order(self, epoch: int) -> list[int]:
        """Return the order of an epoch, which depends on the seed and the epoch only."""
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * _MAX_EPOCHS + epoch)
            self._order = epoch, torch.randperm(self._length, generator=generator).tolist()
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, with the length and seed that it refers to."""
        return {"samples": self.samples_seen, "length": self._length, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a position from `state_dict`.

        Raises:
            UsageError: The position refers to other data, or to another order.
        """
        for name, own in (("length", self._length), ("seed", self._seed)):
            if state[name] != own:
                raise UsageError(
                    f"sampler: the checkpoint has {name} {state[name]} and this run {own}, but resuming requires the "
                    f"same order of samples; use the {name} of the checkpoint"
                )
        self.samples_seen = int(state["samples"])


def split_over_ranks(indices: Sequence[T], index: int, count: int) -> Sequence[T]:
    """Return the samples of one data-parallel rank: a contiguous slice, of the same size for every rank.

    Args:
        indices: Samples of a step, in global order.
        index: Index of the data-parallel rank.
        count: Number of data-parallel ranks.

    Raises:
        UsageError: The samples cannot be divided evenly.
    """
    if len(indices) % count:
        raise UsageError(
            f"sampler: {len(indices)} samples cannot be split over {count} data-parallel ranks; set global_batch to a "
            f"multiple of {count}"
        )
    size = len(indices) // count
    return indices[index * size : (index + 1) * size]
