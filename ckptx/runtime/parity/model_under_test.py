"""The checkpoint's side as this rank has it: one model, the stages of a pipeline that are here, or piece by piece."""

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
from ckptx.runtime.parity.comparison import HeldParameter
from ckptx.runtime.parity.divergence import Outputs, record_outputs
from ckptx.runtime.parity.execution import ForwardResult
from ckptx.runtime.parity.inputs.batch import Inputs
from ckptx.runtime.parity.offloaded_model import ComputePass, OffloadedModel, StagePartition, share_parameters
from ckptx.runtime.parity.side import ModelSide, ShardedMetaModel
from ckptx.runtime.parity.stages import LocalStages


@dataclass(slots=True)
class LoadRecord:
    """What loading did, on this rank.

    Attributes:
        stored: The names on disk of each tensor of the whole model.
        architecture: Name of the class.
        dtypes: What the parameters are computed in.
        wrapped_layers: Layers of this rank that recompute activations.
        gathered: Modules of this rank that did not run on their TP shards alone: what was gathered, "parameters" or
            "output", and whether the shards are aligned.
        sharded: Parameters of this rank that TP shards.
        names: Of what was loaded.
        wrong: Of these, what is not what the reference has.
        unread: What no part of this rank has a place for, with the reason.
        without_place: Of what the reference stores, what no part of this rank has a place for.
        bytes_read: From the files.
        nbytes: Of what was loaded.
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
        """Gives a part storage and its values, and holds them against those of the reference.

        Raises:
            InputError, UnsupportedError: As `load_from`.
        """
        materialize(built.model, device)
        with side.open_checkpoint() as source:
            ledger = side.load(built.model, source, built.regions)
        with reference.open_checkpoint() as source:
            wrong, without_place = reference.config_mismatches(built.model, source, built.regions)
        self.stored, self.architecture = built.stored, built.model.config.architectures[0]
        self.dtypes |= {str(each.dtype).removeprefix("torch.") for each in built.model.parameters()}
        self.wrapped_layers += built.done.wrapped_layers
        layout = built.done.layout
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
    """The checkpoint's side on this rank.

    Attributes:
        record: What loading it did.
        copied: Names of parameters that several stages have, whose gradients are summed in another order.
        is_whole: Whether all gradients are there at once.
    """

    record: LoadRecord
    copied: frozenset[str]
    is_whole: bool

    def load(self, reference: ModelSide, device: torch.device) -> None:
        """Gives every part storage, and its values; see `LoadRecord.load`."""
        ...

    def run(self, batches: Sequence[Inputs], *, backward: bool) -> ForwardResult:
        """One step on these batches.

        Raises:
            UnsupportedError, SpaceError: As `execution.run`.
        """
        ...

    @contextmanager
    def parameters_of_stage(self, number: int) -> Iterator[Iterator[HeldParameter]]:
        """Parameters of this rank with their gradients, within the block; of all that it has, those that come as the
        `number`th portion.
        """
        ...

    def observed(self, inputs: Inputs) -> Iterator[Outputs]:
        """What calls of modules give, of one part after another, in the order of the model."""
        ...


class ResidentModel(ModelUnderTest):
    """One model, or the stages of a pipeline that are here: all of it is there, with all gradients after a step.

    Gradients of copies on several stages are summed up.
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
    def parameters_of_stage(self, number: int) -> Iterator[Iterator[HeldParameter]]:
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
    """Pieces that are built, loaded, run and released one after another, on one rank."""

    def __init__(self, side: ModelSide, mesh: DeviceMesh, partition: StagePartition, device: torch.device) -> None:
        self._side, self._mesh, self._partition, self._device = side, mesh, partition, device
        self._copies = {name: tie.name for tie in partition.ties for name in tie.copies.values()}
        self.copied, self.is_whole = frozenset[str](), False  # summed as in one piece
        self._model: OffloadedModel | None = None
        self.record = LoadRecord()

    def load(self, reference: ModelSide, device: torch.device) -> None:
        for number in range(self._partition.stages.pp):
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
    def parameters_of_stage(self, number: int) -> Iterator[Iterator[HeldParameter]]:
        assert self._model is not None
        with self._model.backward(self._partition.last - number) as part:
            later = {tie.copies.get(part.number) for tie in self._partition.ties if part.number != min(tie.copies)}
            found = ((canonical_name(name), each) for name, each in part.model.named_parameters())
            yield (HeldParameter(self._copies.get(name, name), each, None) for name, each in found if name not in later)

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


def _local_parameters(built: ShardedMetaModel, copies: Mapping[str, str]) -> Iterator[HeldParameter]:
    for found, parameter in built.model.named_parameters():
        name = canonical_name(found)
        regions = None if built.regions is None else built.regions(name)
        yield HeldParameter(copies.get(name, name), parameter, regions)


def in_all(found: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What is in each of them."""
    return {name: reason for name, reason in found[0].items() if all(name in each for each in found)}


def _in_both(before: dict[str, str] | None, found: Mapping[str, str]) -> dict[str, str]:
    return dict(found) if before is None else in_all([before, found])
