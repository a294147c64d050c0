"""Tensor parallel styles that a plan may name, and the sharding that each implies for the tensors of a module.

The names are those of transformers 5.23 (`ALL_PARALLEL_STYLES`) and of the versions before it.
"""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """Sharding that a style implies."""

    COLWISE = "colwise"  # output features: rows of the weight of a Linear, and its bias
    ROWWISE = "rowwise"  # input features: columns of the weight; the bias is whole
    PACKED_COLWISE = "packed_colwise"  # two fused halves along the output features
    PACKED_ROWWISE = "packed_rowwise"  # two fused halves along the last dim
    EMBEDDING_ROWWISE = "embedding_rowwise"  # vocabulary
    EMBEDDING_COLWISE = "embedding_colwise"  # hidden size
    REPLICATE = "replicate"  # no sharding: the style affects only the forward pass
    EXPERT = "expert"  # whole experts, which is expert parallelism

    @property
    def cuts(self) -> bool:
        """Return True if tensors are sharded over TP ranks."""
        return self not in (Kind.REPLICATE, Kind.EXPERT)


STYLES: dict[str, Kind] = {
    "colwise": Kind.COLWISE,
    "colwise_gather_output": Kind.COLWISE,
    "rowwise": Kind.ROWWISE,
    "rowwise_split_input": Kind.ROWWISE,
    "packed_colwise": Kind.PACKED_COLWISE,
    "packed_rowwise": Kind.PACKED_ROWWISE,
    "embedding_rowwise": Kind.EMBEDDING_ROWWISE,
    "embedding_colwise": Kind.EMBEDDING_COLWISE,
    "replicate": Kind.REPLICATE,
    "replicated_with_grad_allreduce": Kind.REPLICATE,
    "sequence_parallel": Kind.REPLICATE,
    "all_reduce": Kind.REPLICATE,
    "mla_kv_a_proj": Kind.REPLICATE,
    "moe_tp_experts": Kind.REPLICATE,
    "moe_identity_expert": Kind.REPLICATE,
    "local_params": Kind.REPLICATE,
    "ep_dispatch_experts": Kind.REPLICATE,
    "grouped_gemm": Kind.EXPERT,
    # Older names of the same.
    "colwise_rep": Kind.COLWISE,
    "rowwise_rep": Kind.ROWWISE,
    "local_colwise": Kind.COLWISE,
    "local_rowwise": Kind.ROWWISE,
    "local_packed_colwise": Kind.PACKED_COLWISE,
    "local_packed_rowwise": Kind.PACKED_ROWWISE,
    "local": Kind.REPLICATE,
    "gather": Kind.REPLICATE,
    "ep_router": Kind.REPLICATE,
    "megamoe_router": Kind.REPLICATE,
    "megamoe_experts": Kind.REPLICATE,
}
