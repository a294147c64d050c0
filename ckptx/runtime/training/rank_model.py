"""Build the model of a recipe on this rank: frozen in part, split into stages, parallelized, and loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ckptx.adapters.state_dicts import is_lora_name
from ckptx.architecture.lookup import find_architecture
from ckptx.architecture.run_support import check_run_support
from ckptx.formats.hf.reader import read_json
from ckptx.model_view.sharder import read_plan
from ckptx.runtime.checkpointing.load import load
from ckptx.runtime.model.build import build_model, materialize
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.distributed import RankContext, mesh_of
from ckptx.runtime.parallel.mixed_inputs import MixedInputs
from ckptx.runtime.parallel.parallelize import parallelize
from ckptx.runtime.parallel.pipeline.pipeline import Pipeline
from ckptx.runtime.parallel.pipeline.plan import BoundaryFinder, PipelinePlan, find_boundaries_on_rank_0, plan_pipeline
from ckptx.runtime.parallel.release import free_storage
from ckptx.runtime.parallel.tensor_parallel.apply import TensorParallelLayout
from ckptx.runtime.parallel.tensor_parallel.plans import find_plan
from ckptx.runtime.parity.inputs.batch import make_inputs
from ckptx.runtime.training.adapter import attach_adapter
from ckptx.runtime.training.dropout_config import set_dropout
from ckptx.runtime.training.freeze import freeze
from ckptx.runtime.training.recipe import LayoutBlock, Recipe


@dataclass(slots=True)
class RankModel:
    """The model of a rank, or its pipeline stages.

    Attributes:
        stages: Models by number of the stage in the whole pipeline; one model with number 0 without a pipeline.
        layouts: TP layout of each model in `stages`; None without TP.
        mesh: Mesh of all ranks.
        pipeline_plan: Plan of the pipeline; None without one.
        pipeline: Pipeline that runs the stages; None before `connect_pipeline`, or without a pipeline.
        frozen_names: Canonical names of the parameters that are not trained, as in the whole model.
        checkpointed_layer_count: Number of layers of this rank that recompute activations.
    """

    stages: dict[int, nn.Module]
    layouts: list[TensorParallelLayout | None]
    mesh: DeviceMesh
    pipeline_plan: PipelinePlan | None
    pipeline: Pipeline | None
    frozen_names: frozenset[str]
    checkpointed_layer_count: int

    @property
    def models(self) -> list[nn.Module]:
        """Models of this rank."""
        return list(self.stages.values())

    @property
    def layout(self) -> TensorParallelLayout | None:
        """Merged TP layout of all models; None without TP."""
        return TensorParallelLayout.merge(self.layouts)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter of this rank once, with its first name in the whole model."""
        for model in self.models:
            for name, parameter in model.named_parameters():
                yield self.full_name(canonical_name(name)), parameter

    def full_name(self, name: str) -> str:
        """Return the first name of a parameter in the whole model, given its first name on a stage.

        The two differ for a copy of a tied weight, such as the output head on the last stage.
        """
        return self.pipeline_plan.names_of_copies.get(name, name) if self.pipeline_plan is not None else name

    def load(self, path: Path, *, has_adapter: bool = True) -> None:
        """Load parameters and buffers from a checkpoint of any layout.

        Args:
            path: Path of the checkpoint.
            has_adapter: False for a checkpoint without the adapter that the recipe trains, which is then not loaded.

        Raises:
            InputError, UnsupportedError: See `ckptx.runtime.checkpointing.load.load`.
        """
        for model, layout in zip(self.models, self.layouts, strict=True):
            load(
                model,
                path,
                regions=layout.local_regions if layout is not None else None,
                skip=None if has_adapter else is_lora_name,
            )

    def release(self) -> None:
        """Free the memory of the models, which are unusable afterwards."""
        for model in self.models:
            free_storage(model)
        self.stages, self.layouts, self.pipeline, self.pipeline_plan = {}, [], None, None


def build_rank_model(
    recipe: Recipe, source: Path, rank_context: RankContext, layout: LayoutBlock | None = None
) -> RankModel:
    """Build the model of a recipe, parallelized and with storage but not loaded; every rank calls it.

    Args:
        recipe: Recipe of the run.
        source: Checkpoint whose config is used.
        rank_context: Context of this rank.
        layout: Layout to use in place of the recipe's; None for the recipe's.

    Raises:
        UnsupportedError: The class cannot run in this layout.
        UsageError: The number of ranks differs from the size of the mesh.
    """
    rank_model = build_rank_model_on_meta(recipe, source, rank_context, layout)
    for model in rank_model.models:
        materialize(model, rank_context.device)
    return rank_model


def build_rank_model_on_meta(
    recipe: Recipe,
    source: Path,
    rank_context: RankContext,
    layout: LayoutBlock | None = None,
    *,
    find_boundaries: BoundaryFinder = find_boundaries_on_rank_0,
) -> RankModel:
    """Build and parallelize the model as `build_rank_model` does, without storage.

    Args:
        recipe: Recipe of the run.
        source: Checkpoint whose config is used.
        rank_context: Context of this rank.
        layout: Layout to use in place of the recipe's; None for the recipe's.
        find_boundaries: Finds the values that stages send each other; see `plan_pipeline`.

    Raises:
        UnsupportedError, UsageError: See `build_rank_model`.
    """
    layout = layout or recipe.layout
    mesh = mesh_of(layout.dims, rank_context.device.type)
    config = read_json(source / "config.json")
    dropout = recipe.training.dropout
    whole_model = build_model(
        source,
        dtype=getattr(torch, recipe.model.dtype),
        trust_remote_code=recipe.model.trust_remote_code,
        attn_implementation=recipe.model.attn_implementation or "sdpa",
        edit_config=lambda each: set_dropout(each, dropout) if dropout is not None else None,
    ).train()
    custom_code_dir = source if recipe.model.trust_remote_code else None
    architecture = find_architecture(config, config_dir=custom_code_dir, trust_remote_code=custom_code_dir is not None)
    if architecture is not None:
        check_run_support(config, architecture, layout.tp, layout.pp)
    frozen = freeze(whole_model, recipe.model.freeze)
    if recipe.adapter is not None:
        frozen = attach_adapter(whole_model, recipe.adapter)
    user_plan = None if layout.tp_plan is None else dict(read_plan(layout.tp_plan))
    plan = find_plan(whole_model, config, user_plan) if layout.tp > 1 else None
    pipeline_plan, stages = None, {0: whole_model}
    if layout.pp > 1:
        pipeline_plan = plan_pipeline(
            whole_model,
            config,
            layout.dims,
            microbatches=recipe.training.local_batch // recipe.training.microbatch,
            schedule=layout.schedule,
            split=layout.pp_split,
            activation_checkpointing=layout.activation_checkpointing,
            make_batches=_make_small_batches,
            find_boundaries=find_boundaries,
            custom_code_dir=custom_code_dir,
        )
        stages = pipeline_plan.models(whole_model, mesh)
    layouts, checkpointed_layer_count = [], 0
    for model in stages.values():
        parallelized = parallelize(
            model,
            mesh,
            plan,
            activation_checkpointing=layout.activation_checkpointing,
            scope=layout.ac_scope,
            mixed_precision=_make_mixed_precision_policy(recipe, layout),
        )
        layouts.append(parallelized.layout)
        checkpointed_layer_count += parallelized.checkpointed_layer_count
    return RankModel(stages, layouts, mesh, pipeline_plan, None, frozen, checkpointed_layer_count)


def connect_pipeline(rank_model: RankModel) -> None:
    """Connect loaded stages to a pipeline; do nothing without a pipeline, or if they are connected."""
    if rank_model.pipeline_plan is not None and rank_model.pipeline is None:
        rank_model.pipeline = rank_model.pipeline_plan.pipeline(rank_model.stages, rank_model.mesh)


def make_mixed_inputs(rank_model: RankModel) -> MixedInputs | None:
    """Return the support for images on only some data-parallel ranks; None for a pipeline, which includes it."""
    return MixedInputs(rank_model.models[0]) if rank_model.pipeline_plan is None else None


def _make_mixed_precision_policy(recipe: Recipe, layout: LayoutBlock) -> MixedPrecisionPolicy | None:
    """Return the mixed-precision policy of FSDP2; None if the layout sets no dtypes, so that nothing is cast."""
    if layout.reduction_dtype is None:
        return None
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, layout.param_dtype or recipe.model.dtype),
        reduce_dtype=getattr(torch, layout.reduction_dtype),
    )


def _make_small_batches(small_model: nn.Module) -> Sequence[dict[str, Tensor]]:
    """Return batches for a small model of the class with all inputs that it takes, without and with padding."""
    config = {**small_model.config.to_dict(), "architectures": small_model.config.architectures}
    return [make_inputs(config, batch_size=2, seed=int(padded), is_padded=padded).batch for padded in (False, True)]
