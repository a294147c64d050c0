"""Mixins for commands that shard a model: mesh, pipeline stages, TP plan."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ckptx.errors import UsageError
from ckptx.layout.stages import SPLIT_RULES, ScheduleStyle
from ckptx.options.option import LAYOUT, Option, Options, Requirement
from ckptx.untrusted.limits import MAX_RANKS
from ckptx.wording import counted

if TYPE_CHECKING:  # not imported for a help page
    from ckptx.layout.parallel_dims import ParallelDims
    from ckptx.layout.stages import StageAssignment

InnerSharding = Literal["experts", "rows", "columns"]  # as in layout/expert_parallel.py, not imported for a help page
Schedule = Literal["gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev"]

PP_SPLIT = Option(
    "Assignment of layers to stages, e.g. of 10 layers to 4 stages: even (3,3,2,2), vllm (2,3,3,2, as vLLM: extra "
    "layers before the last stage), torchtitan (2,3,3,2: embedding and head count as a layer each), hf (2,2,2,4: extra "
    "layers on the last stage), or the layer count of each stage.",
    LAYOUT,
    metavar="even|vllm|torchtitan|hf|a,b,c",
    keywords=SPLIT_RULES,
    requires=[Requirement("pp", 2)],
)
TP_PLAN = Option(
    'JSON file such as {"model.layers.*.mlp.up_proj": "colwise"}, with module names (* is any index) and TP styles of '
    "transformers: colwise, rowwise, packed_colwise, packed_rowwise, embedding_rowwise, embedding_colwise, replicate "
    "(not sharded) and others (https://ckptx.github.io/ckptx/shard/). Other tensors follow the model's plan.",
    LAYOUT,
    metavar="FILE",
    default="the model's plan",
    requires=[Requirement("tp", 2)],
)


class MeshOptions(Options):
    """Options for the mesh."""

    tp: Annotated[
        int | None,
        Option(
            "Tensor-parallel size (TP).",
            LAYOUT,
            flags=("--tp", "--tensor-parallel-size"),
            minimum=1,
            maximum=MAX_RANKS,
            default="1",
            replaces=("tensor_model_parallel_size", "tensor_parallel_degree", "tp_size"),
        ),
    ] = None
    pp: Annotated[
        int | None,
        Option(
            "Pipeline-parallel size (PP).",
            LAYOUT,
            flags=("--pp", "--pipeline-parallel-size"),
            minimum=1,
            maximum=MAX_RANKS,
            default="1",
            replaces=("pipeline_model_parallel_size", "pipeline_parallel_degree", "pp_size"),
        ),
    ] = None
    dp_shard: Annotated[
        int | None,
        Option(
            "Number of FSDP ranks.",
            LAYOUT,
            minimum=1,
            maximum=MAX_RANKS,
            default="1",
            replaces=("dp", "dp_size", "fsdp", "data_parallel_size", "data_parallel_shard_degree"),
        ),
    ] = None

    @property
    def dims(self) -> "ParallelDims":
        """Return the mesh; an axis that is not set has size 1."""
        from ckptx.layout.parallel_dims import ParallelDims

        return ParallelDims(self.tp or 1, self.pp or 1, self.dp_shard or 1)

    def check(self) -> None:
        super().check()
        ranks = (self.tp or 1) * (self.pp or 1) * (self.dp_shard or 1)
        if ranks > MAX_RANKS:
            raise UsageError(f"--tp x --pp x --dp-shard: {ranks:,} ranks must be at most {MAX_RANKS:,}")


class StageSplitOptions(MeshOptions):
    """Options for assigning layers to pipeline stages."""

    pp_split: Annotated[str, PP_SPLIT] = "even"


class TpPlanOptions(MeshOptions):
    """Option for tensor-parallel rules."""

    tp_plan: Annotated[str | Path | None, TP_PLAN] = None


class ShardingOptions(TpPlanOptions, StageSplitOptions):
    """Options for sharding tensors over a mesh."""


class ExpertParallelOptions(MeshOptions):
    """Options for expert parallelism."""

    ep: Annotated[
        int | None,
        Option(
            "Expert-parallel size (EP), a divisor of --tp x --dp-shard. Rank r of a pipeline stage gets the experts of "
            "EP rank r % ep, and TP does not shard experts.",
            LAYOUT,
            flags=("--ep", "--expert-parallel-size"),
            minimum=1,
            maximum=MAX_RANKS,
            default="1",
            replaces=("expert_model_parallel_size", "expert_parallel_degree", "ep_size"),
        ),
    ] = None
    ep_inner: Annotated[
        InnerSharding,
        Option(
            "Sharding among the ranks with the same EP rank: experts (whole experts, as torchtitan), rows (dim 1 of a "
            "tensor of all experts, as VeOmni) or columns (dim 2, as NeMo AutoModel).",
            LAYOUT,
            requires=[Requirement("ep", 2)],
        ),
    ] = "experts"

    @property
    def dims(self) -> "ParallelDims":
        """Return the mesh; an axis that is not set has size 1."""
        from ckptx.layout.parallel_dims import ParallelDims

        return ParallelDims(self.tp or 1, self.pp or 1, self.dp_shard or 1, ep=self.ep or 1)

    def check(self) -> None:
        super().check()
        ranks = (self.tp or 1) * (self.dp_shard or 1)
        if ranks % (self.ep or 1):
            raise UsageError(
                f"--ep {self.ep}: must divide --tp x --dp-shard, the {counted(ranks, 'rank')} of a pipeline stage; "
                "use a smaller --ep, or more ranks"
            )


class VirtualStageOptions(StageSplitOptions):
    """Options for several pipeline stages on each pipeline rank."""

    virtual_stages: Annotated[
        int | None,
        Option(
            "Number of stages of each pipeline rank, for interleaved and V schedules; --pp-split then has --pp x "
            "--virtual-stages stages.",
            LAYOUT,
            minimum=1,
            maximum=MAX_RANKS,
            default="1",
            requires=[Requirement("pp", 2)],
            replaces=("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "vpp_size"),
        ),
    ] = None
    schedule_style: Annotated[
        ScheduleStyle,
        Option(
            "Assignment of stages to pipeline ranks: loop (with 2 ranks: stages 0 and 2, 1 and 3, as Interleaved1F1B) "
            "or v (0 and 3, 1 and 2, as ZBVZeroBubble and DualPipeV).",
            LAYOUT,
            requires=[Requirement("virtual_stages", 2)],
        ),
    ] = "loop"

    @property
    def stage_assignment(self) -> "StageAssignment":
        """Return the assignment of stages to pipeline ranks."""
        from ckptx.layout.stages import StageAssignment

        return StageAssignment(self.pp or 1, self.virtual_stages or 1, self.schedule_style)

    def check(self) -> None:
        super().check()
        stages = (self.pp or 1) * (self.virtual_stages or 1)
        if stages > MAX_RANKS:
            raise UsageError(f"--pp x --virtual-stages: {stages:,} stages must be at most {MAX_RANKS:,}")
        if self.schedule_style == "v" and self.virtual_stages != 2:
            raise UsageError("--schedule-style v has two stages per pipeline rank; pass --virtual-stages 2")


class OutputShardingOptions(ShardingOptions, ExpertParallelOptions, VirtualStageOptions):
    """Options for sharding the tensors of an output over a mesh."""


class ReplicaOptions(MeshOptions):
    """Options for a mesh with replicas."""

    dp_replicate: Annotated[
        int | None,
        Option(
            "Number of replicas of the model (HSDP).",
            LAYOUT,
            minimum=1,
            maximum=MAX_RANKS,
            default="1",
            replaces=("ddp", "data_parallel_replicate_degree"),
        ),
    ] = None

    @property
    def dims(self) -> "ParallelDims":
        """Return the mesh; an axis that is not set has size 1."""
        from ckptx.layout.parallel_dims import ParallelDims

        return ParallelDims(self.tp or 1, self.pp or 1, self.dp_shard or 1, self.dp_replicate or 1)


class PipelineOptions(StageSplitOptions):
    """Options for a pipeline schedule."""

    schedule: Annotated[
        Schedule,
        Option(
            "Pipeline schedule: gpipe, 1f1b, interleaved1f1b, interleavedzerobubble, zbvzerobubble or dualpipev. The "
            "last four have two stages per rank, so that --pp-split takes two counts per rank.",
            LAYOUT,
            metavar="SCHEDULE",
            requires=[Requirement("pp", 2)],
        ),
    ] = "1f1b"
