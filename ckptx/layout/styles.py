"""Tensor parallel styles that a plan may name, and the sharding that each implies for the tensors of a module.

The names are those of transformers 5.23 (`ALL_PARALLEL_STYLES`) and of the versions before it.
"""

from __future__ import annotations

from enum import Enum


class StyleKind(Enum):
    """Sharding that a style implies."""

    COLWISE = "colwise"  # output features: rows of the weight of a Linear, and its bias
    ROWWISE = "rowwise"  # input features: columns of the weight; the bias is whole
    PACKED_COLWISE = "packed_colwise"  # two fused halves along the output features
    PACKED_ROWWISE = "packed_rowwise"  # two fused halves along the input features; the bias is whole
    EMBEDDING_ROWWISE = "embedding_rowwise"  # vocabulary
    EMBEDDING_COLWISE = "embedding_colwise"  # hidden size
    REPLICATE = "replicate"  # no sharding: the style affects only the forward pass
    EXPERT = "expert"  # whole experts, which is expert parallelism

    @property
    def is_sharding(self) -> bool:
        """Return True if tensors are sharded over TP ranks."""
        return self not in (StyleKind.REPLICATE, StyleKind.EXPERT)


STYLES: dict[str, StyleKind] = {
    "colwise": StyleKind.COLWISE,
    "colwise_gather_output": StyleKind.COLWISE,
    "rowwise": StyleKind.ROWWISE,
    "rowwise_split_input": StyleKind.ROWWISE,
    "packed_colwise": StyleKind.PACKED_COLWISE,
    "packed_rowwise": StyleKind.PACKED_ROWWISE,
    "embedding_rowwise": StyleKind.EMBEDDING_ROWWISE,
    "embedding_colwise": StyleKind.EMBEDDING_COLWISE,
    "replicate": StyleKind.REPLICATE,
    "replicated_with_grad_allreduce": StyleKind.REPLICATE,
    "sequence_parallel": StyleKind.REPLICATE,
    "all_reduce": StyleKind.REPLICATE,
    "mla_kv_a_proj": StyleKind.REPLICATE,
    "moe_tp_experts": StyleKind.REPLICATE,
    "moe_identity_expert": StyleKind.REPLICATE,
    "local_params": StyleKind.REPLICATE,
    "ep_dispatch_experts": StyleKind.REPLICATE,
    "grouped_gemm": StyleKind.EXPERT,
    # Former names of these styles.
    "colwise_rep": StyleKind.COLWISE,
    "rowwise_rep": StyleKind.ROWWISE,
    "local_colwise": StyleKind.COLWISE,
    "local_rowwise": StyleKind.ROWWISE,
    "local_packed_colwise": StyleKind.PACKED_COLWISE,
    "local_packed_rowwise": StyleKind.PACKED_ROWWISE,
    "local": StyleKind.REPLICATE,
    "gather": StyleKind.REPLICATE,
    "ep_router": StyleKind.REPLICATE,
    "megamoe_router": StyleKind.REPLICATE,
    "megamoe_experts": StyleKind.REPLICATE,
}
