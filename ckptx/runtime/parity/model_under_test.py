"""The checkpoint on this rank: one model, some pipeline stages, or all stages one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckptx.runtime.model.build import materialize
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.pipeline.plan import PipelinePlan
from ckptx.runtime.parallel.pipeline.stage import make_stage
from ckptx.runtime.parallel.release import free_storage
from ckptx.runtime.parity import execution
from ckptx.runtime.parity.comparison import RankParameter
from ckptx.runtime.parity.divergence import OutputsByCall, record_outputs
from ckptx.runtime.parity.execution import StepResult
from ckptx.runtime.parity.inputs.batch import Inputs
from ckptx.runtime.parity.model_loaders import ModelLoader, ShardedMetaModel
from ckptx.runtime.parity.stages import LocalStages
from ckptx.runtime.parity.stagewise_model import ComputePass, StagePartition, StagewiseModel, share_parameters


@dataclass(slots=True)
class LoadRecord:
    """Results of loading, on this rank.

    Attributes:
        stored_names: Name of each tensor of the whole model -> its names on disk.
        architecture: Name of the model class.
        dtypes: Dtypes of the parameters, such as "bfloat16".
        wrapped_layers: Number of layers of this rank that recompute activations.
        gathered_modules: Name of a module of this rank that did not run on its TP shards alone -> what was gathered
            ("parameters" or "output"), and False if a shard is known to split a head or a fused part, else True.
        sharded_parameters: Number of parameters of this rank that TP shards.
        loaded_names: Names in the whole model of the loaded tensors.
        differing_names: Names of loaded tensors that are not byte for byte those of the reference.
        unread_names: Stored name that no model part of this rank reads -> reason; None before the first part.
        reference_only_names: Stored name of the reference that no model part of this rank reads -> reason; None before
            the first part.
        bytes_read: Bytes read from the files.
        nbytes: Bytes of the loaded tensors.
    """

    stored_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    architecture: str = ""
    dtypes: set[str] = field(default_factory=set)
    wrapped_layers: int = 0
    gathered_modules: dict[str, tuple[str, bool]] = field(default_factory=dict)
    sharded_parameters: int = 0
    loaded_names: list[str] = field(default_factory=list)
    differing_names: list[str] = field(default_factory=list)
    unread_names: dict[str, str] | None = None
    reference_only_names: dict[str, str] | None = None
    bytes_read: int = 0
    nbytes: int = 0

    def load(
        self,
        loader: ModelLoader,
        meta_model: ShardedMetaModel,
        reference: ModelLoader,
        device: torch.device,
        copies: Mapping[str, str],
    ) -> None:
        """Load a model part, compare its values with the reference, and add the results.

        Args:
            loader: Loader of the checkpoint.
            meta_model: The part, without storage; a whole model or a pipeline stage.
            reference: Loader of the reference.
            device: Device of the part.
            copies: Name of a copy of a tied parameter -> name in the whole model.

        Raises:
            InputError, UnsupportedError: See `ckptx.runtime.checkpointing.load.load`.
        """
        materialize(meta_model.model, device)
        with loader.open_checkpoint() as source:
            load_report = loader.load(meta_model.model, source, meta_model.find_local_regions)
        with reference.open_checkpoint() as source:
            differing_names, reference_only_names = reference.find_differences(
                meta_model.model, source, meta_model.find_local_regions
            )
        self.stored_names, self.architecture = meta_model.stored_names, meta_model.model.config.architectures[0]
        self.dtypes |= {str(each.dtype).removeprefix("torch.") for each in meta_model.model.parameters()}
        self.wrapped_layers += meta_model.parallelized.checkpointed_layer_count
        layout = meta_model.parallelized.layout
        if layout is not None:
            self.gathered_modules |= {name: ("output", aligned) for name, aligned in layout.gathered_outputs.items()}
            self.gathered_modules |= {
                name: (
                    "parameters",
                    all(
                        decision.aligned is not False
                        for path, decision in layout.decisions.items()
                        if path.startswith(f"{name}.")
                    ),
                )
                for name in layout.gathered_modules
            }
            self.sharded_parameters += sum(placement is not None for placement in layout.placements.values())
        self.loaded_names += [copies.get(name, name) for name in load_report.loaded_tensors]
        self.differing_names += differing_names
        self.unread_names = _intersect_known(self.unread_names, load_report.unread_names)
        self.reference_only_names = _intersect_known(self.reference_only_names, reference_only_names)
        self.bytes_read += load_report.bytes_read
        self.nbytes += load_report.nbytes


class ModelUnderTest(Protocol):
    """The checkpoint on this rank.

    Attributes:
        record: Results of loading.
        tied_copies: Names of parameters with a copy on several stages, whose gradients are summed in another order than
            in the reference.
        is_resident: True if the model stays in memory with all gradients; False if it is loaded stage by stage.
    """

    record: LoadRecord
    tied_copies: frozenset[str]
    is_resident: bool

    def load(self, reference: ModelLoader, device: torch.device) -> None:
        """Load every part of the model; see `LoadRecord.load`."""
        ...

    def run(self, batches: Sequence[Inputs], *, backward: bool) -> StepResult:
        """Run one step on these batches.

        Raises:
            UnsupportedError, SpaceError: See `execution.run_step`.
        """
        ...

    @contextmanager
    def parameters_of_stage(self, number: int) -> Iterator[Iterator[RankParameter]]:
        """Yield the parameters of one stage with their gradients, within the block.

        Stages are numbered from the last: 0 is the last stage. A resident model yields everything for number 0, and
        nothing for others; any other model loads the stage and runs it backward first, so numbers must ascend.
        """
        ...

    def iter_module_outputs(self, inputs: Inputs) -> Iterator[OutputsByCall]:
        """Yield the outputs of module calls, stage by stage from the first; with a pipeline, on the first rank only."""
        ...


class ResidentModel(ModelUnderTest):
    """One model, or the pipeline stages of this rank, that stay in memory with all gradients.

    Gradients of copies on several stages are summed.
    """

    def __init__(self, loader: ModelLoader, mesh: DeviceMesh, plan: PipelinePlan | None) -> None:
        self._loader = loader
        self._stages = LocalStages(loader, mesh, plan) if plan is not None else None
        self._meta_models: list[ShardedMetaModel] = (
            [loader.build_parallel(mesh)] if self._stages is None else list(self._stages.meta_models.values())
        )
        self._copies: Mapping[str, str] = plan.names_of_copies if plan is not None else {}
        self.tied_copies, self.is_resident = frozenset(self._copies.values()), True
        self.record = LoadRecord()

    def load(self, reference: ModelLoader, device: torch.device) -> None:
        for meta_model in self._meta_models:
            self.record.load(self._loader, meta_model, reference, device, self._copies)

    def run(self, batches: Sequence[Inputs], *, backward: bool) -> StepResult:
        if self._stages is None:
            return execution.run_step(self._meta_models[0].model, batches, backward=backward)
        return self._stages.run(batches, backward=backward)

    @contextmanager
    def parameters_of_stage(self, number: int) -> Iterator[Iterator[RankParameter]]:
        models = () if number else self._meta_models
        yield (each for model in models for each in _iter_rank_parameters(model, self._copies))

    def iter_module_outputs(self, inputs: Inputs) -> Iterator[OutputsByCall]:
        if self._stages is not None:
            yield from self._stages.iter_module_outputs(inputs)
            return
        outputs: OutputsByCall = {}
        with record_outputs(self._meta_models[0].model, outputs):
            execution.run_step(self._meta_models[0].model, [inputs], backward=False)
        yield outputs


class StagewiseModelUnderTest(ModelUnderTest):
    """All stages of the model on one rank, each built, loaded, run and released in turn."""

    def __init__(self, loader: ModelLoader, mesh: DeviceMesh, partition: StagePartition, device: torch.device) -> None:
        self._loader, self._mesh, self._partition, self._device = loader, mesh, partition, device
        self._copies = {name: tie.name for tie in partition.ties for name in tie.copies.values()}
        self.tied_copies, self.is_resident = frozenset[str](), False  # gradients are summed as in a whole model
        self._model: StagewiseModel | None = None
        self.record = LoadRecord()

    def load(self, reference: ModelLoader, device: torch.device) -> None:
        for number in range(self._partition.stages.count):
            meta_model = self._build_stage(number, {})
            self.record.load(self._loader, meta_model, reference, device, self._copies)
            free_storage(meta_model.model)

    def run(self, batches: Sequence[Inputs], *, backward: bool) -> StepResult:
        result, compute_pass = StepResult(), ComputePass()
        self._model = StagewiseModel(self._partition, batches, [compute_pass], self._open_stage, self._device)
        self._model.forward(lambda _, logits: result.logits.append(logits), backward=backward)
        result.loss = compute_pass.loss
        return result

    @contextmanager
    def parameters_of_stage(self, number: int) -> Iterator[Iterator[RankParameter]]:
        assert self._model is not None
        with self._model.backward(self._partition.last_stage - number) as runner:
            later_copies = {
                tie.copies.get(runner.number) for tie in self._partition.ties if runner.number != min(tie.copies)
            }
            named_parameters = ((canonical_name(name), each) for name, each in runner.model.named_parameters())
            yield (
                RankParameter(self._copies.get(name, name), each, None)
                for name, each in named_parameters
                if name not in later_copies
            )

    def iter_module_outputs(self, inputs: Inputs) -> Iterator[OutputsByCall]:
        model = StagewiseModel(self._partition, [inputs], [ComputePass()], self._open_stage, self._device)
        for (outputs,) in model.iter_module_outputs():
            yield outputs

    def _build_stage(self, number: int, shared: Mapping[str, nn.Parameter]) -> ShardedMetaModel:
        def make_local_stage(model: nn.Module) -> None:
            make_stage(
                model, self._partition.stages, number, self._partition.boundaries.output_structures, self._device
            )
            share_parameters(model, shared)

        return self._loader.build_parallel(self._mesh, make_local_stage)

    def _open_stage(self, number: int, shared: Mapping[str, nn.Parameter]) -> nn.Module:
        meta_model = self._build_stage(number, shared)
        materialize(meta_model.model, self._device)
        with self._loader.open_checkpoint() as source:
            self._loader.load(meta_model.model, source, meta_model.find_local_regions)
        return meta_model.model


def _iter_rank_parameters(meta_model: ShardedMetaModel, copies: Mapping[str, str]) -> Iterator[RankParameter]:
    for wrapped_name, parameter in meta_model.model.named_parameters():
        name = canonical_name(wrapped_name)
        regions = None if meta_model.find_local_regions is None else meta_model.find_local_regions(name)
        yield RankParameter(copies.get(name, name), parameter, regions)


def intersect(mappings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the entries of the first mapping whose name is in all mappings."""
    return {name: reason for name, reason in mappings[0].items() if all(name in each for each in mappings)}


def _intersect_known(earlier: dict[str, str] | None, new: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of earlier model parts that `new` has, too; all of `new` for the first part."""
    return dict(new) if earlier is None else intersect([earlier, new])
