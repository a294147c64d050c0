"""Share of a model that tensor parallelism shards, and the tensors that TP ranks replicate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptx.catalog.entry import TensorEntry
from ckptx.model_view.sharder import ShardedModel
from ckptx.report.report import human_bytes
from ckptx.wording import counted

_MIN_SHARDED_SHARE = 0.5  # fraction of the bytes; sharding less with TP is rarely intended


@dataclass(frozen=True, slots=True)
class Replication:
    """Sizes of the tensors that TP shards and replicates.

    Attributes:
        tensors: Number of tensors of the model that are replicated.
        sharded: Number of tensors that TP shards.
        nbytes: Bytes of the replicated tensors, each counted once.
        model_nbytes: Bytes of all tensors, each counted once.
        layer_share: Share of the bytes within layers that TP shards; None without known layers.
        stored_nbytes: Bytes that all ranks store together.
    """

    tensors: int
    sharded: int
    nbytes: int
    model_nbytes: int
    layer_share: float | None
    stored_nbytes: int

    @property
    def share(self) -> float:
        """Return the replicated share of the bytes of the model."""
        return self.nbytes / self.model_nbytes if self.model_nbytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the `replicated` entry of the report."""
        return {"tensors": self.tensors, "bytes": self.nbytes, "share": round(self.share, 6)}

    def notes(self, tp: int, subject: str) -> tuple[str, ...]:
        """Return a warning if TP shards nothing, or only a small part of the model or of its layers.

        Args:
            tp: Number of TP ranks.
            subject: Name of the model class.
        """
        is_small = 1 - self.share < _MIN_SHARDED_SHARE
        is_outside = self.layer_share is not None and self.layer_share < _MIN_SHARDED_SHARE
        if tp == 1 or not self.model_nbytes or not (is_small or is_outside):
            return ()
        rules = f"no TP rule matches a tensor of {subject}" if not self.sharded else f"TP rules of {subject} match few"
        if self.sharded and not is_small:
            rules = f"TP rules of {subject} leave its layers replicated"
        return (
            (
                f"--tp {tp} shards {counted(self.sharded, 'tensor')} and replicates {counted(self.tensors, 'tensor')}, "
                f"{self.share:.0%} of the parameter bytes: {rules}; {self._cost()}; "
                "pass --tp-plan FILE with rules for them, or a smaller --tp"
            ),
        )

    def _cost(self) -> str:
        ratio = self.stored_nbytes / self.model_nbytes
        stored = f"{human_bytes(self.stored_nbytes)} stored for {human_bytes(self.model_nbytes)} of source tensors"
        if ratio > 1:
            return f"{stored} ({ratio:.1f}x)"
        return f"{stored}, but every TP rank has to load the replicated tensors"


def count_replication(
    model: ShardedModel,
    tensors: Mapping[str, TensorEntry],
    copies: Mapping[str, str],
    aliases: Mapping[str, str],
    is_in_layer: Callable[[str], bool],
) -> Replication:
    """Count the tensors and bytes that TP shards and replicates.

    Args:
        model: Placement of every tensor.
        tensors: Target tensors by name.
        copies: Names that hold the bytes of another tensor; they add no bytes of the model.
        aliases: Names that share the bytes of another tensor; they add no bytes.
        is_in_layer: True for the name of a tensor that belongs to a layer.
    """
    counts = {True: 0, False: 0}
    nbytes, layer_nbytes = {True: 0, False: 0}, {True: 0, False: 0}
    stored_nbytes = 0
    for name, (_, blocks, decision) in model.placements.items():
        entry = tensors[name]
        elements = sum(block.region.numel for block in blocks)
        stored_nbytes += entry.nbytes * elements // entry.numel if entry.numel else 0
        is_sharded = decision.placement is not None
        counts[is_sharded] += 1
        if name in copies:
            continue
        nbytes[is_sharded] += entry.nbytes
        if is_in_layer(name):
            layer_nbytes[is_sharded] += entry.nbytes
    for stored in aliases.values():
        counts[model.placements[stored].decision.placement is not None] += 1
    layer_bytes = sum(layer_nbytes.values())
    return Replication(
        counts[False],
        counts[True],
        nbytes[False],
        sum(nbytes.values()),
        layer_nbytes[True] / layer_bytes if layer_bytes else None,
        stored_nbytes,
    )
