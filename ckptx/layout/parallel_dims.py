"""Mesh dimensions: the size of each kind of parallelism, and the coordinates of each rank.

rank = (pp_index * dp + dp_index) * tp + tp_index  tp_index runs fastest, pp_index slowest
dp_index = replica * dp_shard + shard              dp = dp_replicate * dp_shard ranks with different batches

Checkpoint files do not depend on dp_replicate, as all replicas hold the same data.

Expert parallelism (expert_parallel.py) has no axis of its own: the EP rank of a rank is (rank within its stage) % ep.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptx.errors import UsageError
from ckptx.untrusted.limits import MAX_RANKS


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Size of the mesh along each of its axes.

    Attributes:
        tp: Number of tensor-parallel ranks.
        pp: Number of pipeline stages.
        dp_shard: Number of ranks over which FSDP shards the parameters of a TP rank.
        dp_replicate: Number of groups of `dp_shard` ranks that replicate the parameters (HSDP).
        ep: Number of expert-parallel ranks; it divides `tp * dp_shard`.

    Raises:
        UsageError: A size is below 1, the mesh has more than `MAX_RANKS` ranks, or `ep` does not divide
            `tp * dp_shard`.
    """

    tp: int = 1
    pp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        sizes = {
            "tp": self.tp,
            "pp": self.pp,
            "dp_shard": self.dp_shard,
            "dp_replicate": self.dp_replicate,
            "ep": self.ep,
        }
        for axis, size in sizes.items():
            if size < 1:
                raise UsageError(f"mesh: {axis} must be 1 or more, found {size}; use 1 to disable it")
        if self.world_size > MAX_RANKS:
            raise UsageError(f"mesh: {self.world_size} ranks, but at most {MAX_RANKS} are allowed; use fewer ranks")
        if self.tp * self.dp_shard % self.ep:
            raise UsageError(
                f"mesh: ep {self.ep} must divide tp x dp_shard, found {self.tp} x {self.dp_shard}; use a divisor of it"
            )

    @property
    def world_size(self) -> int:
        """Return the total number of ranks."""
        return self.pp * self.ranks_per_stage

    @property
    def dp(self) -> int:
        """Return the number of data-parallel ranks, `dp_replicate * dp_shard`."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks_per_stage(self) -> int:
        """Return the number of ranks of one pipeline stage."""
        return self.tp * self.dp

    def rank(self, pp: int, dp: int, tp: int) -> int:
        """Return the global rank at the given coordinates."""
        return (pp * self.dp + dp) * self.tp + tp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return the coordinates (pp, dp, tp) of a global rank."""
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return pp, dp, tp

    def rank_in_stage(self, dp: int, tp: int) -> int:
        """Return the rank at the given coordinates within its pipeline stage."""
        return dp * self.tp + tp

    def ep_rank(self, rank: int) -> int:
        """Return the expert-parallel rank of a global rank."""
        return rank % self.ranks_per_stage % self.ep

    def ranks_of_stage(self, pp: int) -> range:
        """Return the global ranks of a stage, in the order of `rank_in_stage`."""
        return range(pp * self.ranks_per_stage, (pp + 1) * self.ranks_per_stage)
