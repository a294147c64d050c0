"""The mesh: how many ranks each kind of parallelism takes, and which rank sits where.

rank = (pp * dp + dp_index) * tp + tp_index        tp runs fastest, pp slowest
dp_index = replica * dp_shard + shard              of dp = dp_replicate * dp_shard ranks that see other data

Files know no replicas: each would hold the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptx.errors import UsageError
from ckptx.untrusted.limits import RANKS


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """The size of the mesh along each of its axes.

    Attributes:
        tp: Ranks that share each tensor.
        pp: Pipeline stages.
        dp_shard: Ranks over which FSDP cuts what TP left to one of them.
        dp_replicate: Groups of `dp_shard` ranks that each hold all of it (HSDP).

    Raises:
        UsageError: A size is below 1.
    """

    tp: int = 1
    pp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1

    def __post_init__(self) -> None:
        sizes = {"tp": self.tp, "pp": self.pp, "dp_shard": self.dp_shard, "dp_replicate": self.dp_replicate}
        for axis, size in sizes.items():
            if size < 1:
                raise UsageError(f"mesh: {axis} is {size}, needed 1 or more; give 1 to leave it out")
        if self.world_size > RANKS:
            raise UsageError(f"mesh: {self.world_size} ranks, allowed at most {RANKS}; use fewer")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pp * self.per_stage

    @property
    def dp(self) -> int:
        """Ranks that see other data: shards of all replicas."""
        return self.dp_replicate * self.dp_shard

    @property
    def per_stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.dp

    def rank(self, pp: int, dp: int, tp: int) -> int:
        """The rank at a place in the mesh."""
        return (pp * self.dp + dp) * self.tp + tp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """The place (pp, dp, tp) of a rank."""
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return pp, dp, tp

    def rank_in_stage(self, dp: int, tp: int) -> int:
        """The rank within its pipeline stage."""
        return dp * self.tp + tp

    def ranks_of_stage(self, pp: int) -> range:
        """The ranks of a stage, by rank_in_stage."""
        return range(pp * self.per_stage, (pp + 1) * self.per_stage)
