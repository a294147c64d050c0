"""Which samples a step sees: one global count says where in the data a run is, whatever the number of data ranks.

    length 5, global batch 2, an order for each epoch    epoch 0: 3 0 4 1 2     epoch 1: 1 4 0 2 3
    step 1: 3 0     step 2: 4 1     step 3: 2 | 1     step 4: 4 0     ...

An epoch ends within a step; the step goes on with the next. All samples of an epoch come once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from ckptx.errors import UsageError

T = TypeVar("T")

_EPOCHS = 1 << 31  # of one seed, so that no two of (seed, epoch) share a number


class Sampler:
    """The order of samples over a run.

    Attributes:
        samples: How many were seen, over all epochs and data ranks.
    """

    def __init__(self, length: int, seed: int, global_batch: int) -> None:
        """Begins at the first sample.

        Args:
            length: Of the data set.
            seed: Of the order.
            global_batch: Samples of a step, over all data ranks.

        Raises:
            UsageError: There is no sample, or none of a step.
        """
        for name, value in (("length", length), ("global_batch", global_batch)):
            if value < 1:
                raise UsageError(f"sampler: {name} is {value}, needed 1 or more; give more samples")
        self.samples = 0
        self._length, self._seed, self._global_batch = length, seed, global_batch
        self._order: tuple[int, list[int]] | None = None

    @property
    def epoch(self) -> int:
        """That of the next sample, from 0 on."""
        return self.samples // self._length

    def next_step(self) -> list[int]:
        """The indices of the samples of the next step, in global order, `global_batch` of them."""
        found: list[int] = []
        while len(found) < self._global_batch:
            begin = self.samples % self._length
            taken = self._of_epoch(self.epoch)[begin : begin + self._global_batch - len(found)]
            found += taken
            self.samples += len(taken)
        return found

    def _of_epoch(self, epoch: int) -> list[int]:
        """The order of an epoch: it depends on the seed and the epoch alone."""
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * _EPOCHS + epoch)
            self._order = epoch, torch.randperm(self._length, generator=generator).tolist()
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, and what it is a place in."""
        return {"samples": self.samples, "length": self._length, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on at a place that `state_dict` gave.

        Raises:
            UsageError: It is a place in other data, or in another order.
        """
        for name, here in (("length", self._length), ("seed", self._seed)):
            if state[name] != here:
                raise UsageError(
                    f"sampler: the checkpoint has {name} {state[name]}, this run {here}, needed the same for the order "
                    f"of samples to go on; give the {name} of the checkpoint"
                )
        self.samples = int(state["samples"])


def part(indices: Sequence[T], index: int, count: int) -> Sequence[T]:
    """What data rank `index` of `count` sees of a step: the same number for each, side by side.

    Raises:
        UsageError: They cannot be divided so.
    """
    if len(indices) % count:
        raise UsageError(
            f"sampler: {len(indices)} samples for {count} data ranks, needed a multiple; use another batch"
        )
    size = len(indices) // count
    return indices[index * size : (index + 1) * size]
