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
from ckptx.runtime.parallel.release import release
from ckptx.runtime.parity import execution
from ckptx.runtime.parity.comparison import RankParameter
from ckptx.runtime.parity.divergence import Outputs, record_outputs
from ckptx.runtime.parity.execution import ForwardResult
from ckptx.runtime.parity.inputs.batch import Inputs
from ckptx.runtime.parity.offloaded_model import ComputePass, OffloadedModel, StagePartition, share_parameters
from ckptx.runtime.parity.side import ModelSide, ShardedMetaModel
from ckptx.runtime.parity.stages import LocalStages


@dataclass(slots=True)
class LoadRecord:
    """Results of loading, on this rank.

    Attributes:
        stored: Names on disk of each tensor of the whole model.
        architecture: Name of the model class.
        dtypes: Dtypes of the parameters, such as "bfloat16".
        wrapped_layers: Layers of this rank that recompute activations.
        gathered: Modules of this rank that did not run on their TP shards alone: what was gathered, "parameters" or
            "output", and whether the shards are aligned.
        sharded: Parameters of this rank that TP shards.
        names: Names of the loaded tensors.
        wrong: Names of loaded tensors that differ from the reference.
        unread: Stored names that no model part of this rank reads, with the reason; None before the first part.
        without_place: Stored names of the reference that no model part of this rank has, with the reason; likewise.
        bytes_read: Bytes read from the files.
        nbytes: Bytes of the loaded tensors.
    """

    stored: dict[str, tuple[str, ...]] = field(default_factory=dict)
    architecture: str = ""
    dtypes: set[str] = field(default_factory=set)
    wrapped_layers: int = 0
    gathered: dict[str, tuple[str, bool]] = field(default_factory=dict)
    sharded: int = 0
    names: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unread: dict[str, str] | None = None
    without_place: dict[str, str] | None = None
    bytes_read: int = 0
    nbytes: int = 0

    def load(
        self,
        side: ModelSide,
        built: ShardedMetaModel,
        reference: ModelSide,
        device: torch.device,
        copies: Mapping[str, str],
    ) -> None:
        """Load a model part, and compare its values with the reference.

        Raises:
            InputError, UnsupportedError: See `load_from`.
        """
        materialize(built.model, device)
        with side.open_checkpoint() as source:
            ledger = side.load(built.model, source, built.regions)
        with reference.open_checkpoint() as source:
            wrong, without_place = reference.config_mismatches(built.model, source, built.regions)
        self.stored, self.architecture = built.stored, built.model.config.architectures[0]
        self.dtypes |= {str(each.dtype).removeprefix("torch.") for each in built.model.parameters()}
        self.wrapped_layers += built.parallelized.wrapped_layers
        layout = built.parallelized.layout
        if layout is not None:
            self.gathered |= {name: ("output", aligned) for name, aligned in layout.gathered_outputs.items()}
            self.gathered |= {
                name: (
                    "parameters",
                    all(decision.aligned for path, decision in layout.decisions.items() if path.startswith(f"{name}.")),
                )
                for name in layout.gathered
            }
            self.sharded += sum(placement is not None for placement in layout.placements.values())
        self.names += [copies.get(name, name) for name in ledger.loaded]
        self.wrong += wrong
        self.unread = _in_both(self.unread, ledger.unread)
        self.without_place = _in_both(self.without_place, without_place)
        self.bytes_read += ledger.bytes_read
        self.nbytes += ledger.nbytes


class ModelUnderTest(Protocol):
    """The checkpoint on this rank.

    Attributes:
        record: Results of loading.
        copied: Names of parameters with a copy on several stages, whose gradients are summed in another order.
        is_whole: True if all gradients exist at the same time.
    """

    record: LoadRecord
    copied: frozenset[str]
    is_whole: bool

    def load(self, reference: ModelSide, device: torch.device) -> None:
        """Load every part of the model; see `LoadRecord.load`."""
        ...

    def run(self, batches: Sequence[Inputs], *, backward: bool) -> ForwardResult:
        """Run one step on these batches.

        Raises:
            UnsupportedError, SpaceError: See `execution.run`.
        """
        ...

    @contextmanager
    def parameters_of_stage(self, number: int) -> Iterator[Iterator[RankParameter]]:
        """Yield the parameters of one stage with their gradients, within the block.

        Stages are numbered from the last. A model whose gradients exist all at once yields everything for number 0.
        """
        ...

    def observed(self, inputs: Inputs) -> Iterator[Outputs]:
        """Yield the outputs of module calls, part by part, in the order of the model."""
        ...


class ResidentModel(ModelUnderTest):
    """One model, or the pipeline stages of this rank, that stay in memory with all gradients.

    Gradients of copies on several stages are summed.
    """

    def __init__(self, side: ModelSide, mesh: DeviceMesh, plan: PipelinePlan | None) -> None:
        self._side = side
        self._stages = LocalStages(side, mesh, plan) if plan is not None else None
        self._built: list[ShardedMetaModel] = (
            [side.build(mesh)] if self._stages is None else list(self._stages.built.values())
        )
        self._copies: Mapping[str, str] = plan.copies if plan is not None else {}
        self.copied, self.is_whole = frozenset(self._copies.values()), True
        self.record = LoadRecord()

    def load(self, reference: ModelSide, device: torch.device) -> None:
        for built in self._built:
            self.record.load(self._side, built, reference, device, self._copies)

    def run(self, batches: Sequence[Inputs], *, backward: bool) -> ForwardResult:
        if self._stages is None:
            return execution.run(self._built[0].model, batches, backward=backward)
        return self._stages.run(batches, backward=backward)

    @contextmanager
    def parameters_of_stage(self, number: int) -> Iterator[Iterator[RankParameter]]:
        yield (each for built in self._built if not number for each in _local_parameters(built, self._copies))

    def observed(self, inputs: Inputs) -> Iterator[Outputs]:
        if self._stages is not None:
            yield from self._stages.observed(inputs)
            return
        found: Outputs = {}
        with record_outputs(self._built[0].model, found):
            execution.run(self._built[0].model, [inputs], backward=False)
        yield found


class OffloadedModelUnderTest(ModelUnderTest):
    """All stages of the model on one rank, each built, loaded, run and released in turn."""

    def __init__(self, side: ModelSide, mesh: DeviceMesh, partition: StagePartition, device: torch.device) -> None:
        self._side, self._mesh, self._partition, self._device = side, mesh, partition, device
        self._copies = {name: tie.name for tie in partition.ties for name in tie.copies.values()}
        self.copied, self.is_whole = frozenset[str](), False  # summed as in one piece
        self._model: OffloadedModel | None = None
        self.record = LoadRecord()

    def load(self, reference: ModelSide, device: torch.device) -> None:
        for number in range(self._partition.stages.count):
            built = self._build(number, {})
            self.record.load(self._side, built, reference, device, self._copies)
            release(built.model)

    def run(self, batches: Sequence[Inputs], *, backward: bool) -> ForwardResult:
        outcome, compute_pass = ForwardResult(), ComputePass()
        self._model = OffloadedModel(self._partition, batches, [compute_pass], self._open, self._device)
        self._model.forward(lambda _, logits: outcome.logits.append(logits), backward=backward)
        outcome.loss = compute_pass.loss
        return outcome

    @contextmanager
    def parameters_of_stage(self, number: int) -> Iterator[Iterator[RankParameter]]:
        assert self._model is not None
        with self._model.backward(self._partition.last - number) as part:
            later = {tie.copies.get(part.number) for tie in self._partition.ties if part.number != min(tie.copies)}
            found = ((canonical_name(name), each) for name, each in part.model.named_parameters())
            yield (RankParameter(self._copies.get(name, name), each, None) for name, each in found if name not in later)

    def observed(self, inputs: Inputs) -> Iterator[Outputs]:
        for (found,) in OffloadedModel(self._partition, [inputs], [ComputePass()], self._open, self._device).observed():
            yield found

    def _build(self, number: int, shared: Mapping[str, nn.Parameter]) -> ShardedMetaModel:
        def make_local_stage(model: nn.Module) -> None:
            make_stage(model, self._partition.stages, number, self._partition.boundaries.forms, self._device)
            share_parameters(model, shared)

        return self._side.build(self._mesh, make_local_stage)

    def _open(self, number: int, shared: Mapping[str, nn.Parameter]) -> nn.Module:
        built = self._build(number, shared)
        materialize(built.model, self._device)
        with self._side.open_checkpoint() as source:
            self._side.load(built.model, source, built.regions)
        return built.model


def _local_parameters(built: ShardedMetaModel, copies: Mapping[str, str]) -> Iterator[RankParameter]:
    for found, parameter in built.model.named_parameters():
        name = canonical_name(found)
        regions = None if built.regions is None else built.regions(name)
        yield RankParameter(copies.get(name, name), parameter, regions)


def in_all(found: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the entries whose name is in all of the mappings."""
    return {name: reason for name, reason in found[0].items() if all(name in each for each in found)}


def _in_both(before: dict[str, str] | None, found: Mapping[str, str]) -> dict[str, str]:
    return dict(found) if before is None else in_all([before, found])
