"""Fraction of a model that tensor parallelism shards, and the tensors that TP ranks replicate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptx.catalog.entry import TensorEntry
from ckptx.model_view.sharder import ShardedModel
from ckptx.report.report import human_bytes
from ckptx.wording import counted

_MIN_SHARDED_FRACTION = 0.5  # of the bytes; sharding less with TP is rarely intended


@dataclass(frozen=True, slots=True)
class Replication:
    """Sizes of the tensors that TP shards and replicates.

    Attributes:
        replicated_count: Number of tensor names that TP replicates, including copies and aliases.
        sharded_count: Number of tensor names that TP shards, including copies and aliases.
        replicated_nbytes: Bytes of the replicated tensors, each counted once.
        model_nbytes: Bytes of all tensors, each counted once.
        sharded_layer_fraction: Fraction of the bytes within layers that TP shards, 0 to 1; None without known layers.
        stored_nbytes: Bytes that are stored, summed over all ranks.
    """

    replicated_count: int
    sharded_count: int
    replicated_nbytes: int
    model_nbytes: int
    sharded_layer_fraction: float | None
    stored_nbytes: int

    @property
    def replicated_fraction(self) -> float:
        """Return the fraction of the bytes of the model that TP replicates, 0 to 1."""
        return self.replicated_nbytes / self.model_nbytes if self.model_nbytes else 0.0

    def report_entry(self) -> dict[str, Any]:
        """Return the `replicated` entry of the report."""
        share = round(self.replicated_fraction, 6)
        return {"tensors": self.replicated_count, "bytes": self.replicated_nbytes, "share": share}

    def notes(self, tp: int, subject: str) -> tuple[str, ...]:
        """Return one note if TP shards nothing, or only a small part of the model or of its layers; else none.

        Args:
            tp: Number of TP ranks.
            subject: Name of the model class.
        """
        is_small = 1 - self.replicated_fraction < _MIN_SHARDED_FRACTION
        fraction = self.sharded_layer_fraction
        is_outside = fraction is not None and fraction < _MIN_SHARDED_FRACTION
        if tp == 1 or not self.model_nbytes or not (is_small or is_outside):
            return ()
        replicated = (
            f"{counted(self.replicated_count, 'tensor')}, {self.replicated_fraction:.0%} of the parameter bytes"
        )
        rules = (
            f"no TP rule matches a tensor of {subject}"
            if not self.sharded_count
            else f"TP rules of {subject} match few"
        )
        if self.sharded_count and not is_small:
            rules = f"TP rules of {subject} leave its layers replicated"
        return (
            (
                f"--tp {tp} shards {counted(self.sharded_count, 'tensor')} and replicates {replicated}: {rules}; "
                f"{self._cost()}; pass --tp-plan FILE with rules for them, or a smaller --tp"
            ),
        )

    def _cost(self) -> str:
        ratio = self.stored_nbytes / self.model_nbytes
        stored = f"{human_bytes(self.stored_nbytes)} stored for {human_bytes(self.model_nbytes)} of source tensors"
        if ratio > 1:
            return f"{stored} ({ratio:.1f}x)"
        return f"{stored}, but every TP rank has to load the replicated tensors"


def count_replication(
    sharded_model: ShardedModel,
    tensors: Mapping[str, TensorEntry],
    copies: Mapping[str, str],
    aliases: Mapping[str, str],
    is_in_layer: Callable[[str], bool],
) -> Replication:
    """Count the tensors and bytes that TP shards and replicates.

    Args:
        sharded_model: Placement of every tensor.
        tensors: Target tensors by name.
        copies: Names under which the bytes of another tensor are stored again -> that tensor. They count in the stored
            bytes, but not in the bytes of the model.
        aliases: Names that refer to the stored bytes of another tensor -> that tensor. They add no bytes.
        is_in_layer: True for the name of a tensor that belongs to a layer.
    """
    counts = {True: 0, False: 0}
    nbytes, layer_nbytes = {True: 0, False: 0}, {True: 0, False: 0}
    stored_nbytes = 0
    for name, (_, blocks, decision) in sharded_model.placements.items():
        entry = tensors[name]
        elements = sum(block.region.numel for block in blocks)
        stored_nbytes += entry.nbytes * elements // entry.numel if entry.numel else 0
        is_sharded = decision.is_distributed
        counts[is_sharded] += 1
        if name in copies:
            continue
        nbytes[is_sharded] += entry.nbytes
        if is_in_layer(name):
            layer_nbytes[is_sharded] += entry.nbytes
    for stored in aliases.values():
        counts[sharded_model.placements[stored].decision.is_distributed] += 1
    layer_bytes = sum(layer_nbytes.values())
    return Replication(
        counts[False],
        counts[True],
        nbytes[False],
        sum(nbytes.values()),
        layer_nbytes[True] / layer_bytes if layer_bytes else None,
        stored_nbytes,
    )
