"""The checkpoint's side as this rank has it: one model, or the stages of a pipeline that are here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckptx.runtime.build import materialize
from ckptx.runtime.layers import canonical_name
from ckptx.verification import execution
from ckptx.verification.comparison import Held
from ckptx.verification.execution import Outcome
from ckptx.verification.inputs.batch import Inputs
from ckptx.verification.side import Built, Side
from ckptx.verification.staging import Stages, Staging


class Loaded:
    """The parts of the model on this rank, and what loading them did.

    Attributes:
        stored: The names on disk of each tensor of the whole model.
        copied: Names of parameters that several stages have.
        wrapped_layers: Layers of this rank that recompute activations.
        names: Of what was loaded.
        unread: What no part of this rank has a place for, with the reason.
        bytes_read: From the files.
        nbytes: Of what was loaded.
    """

    def __init__(self, side: Side, mesh: DeviceMesh, staging: Staging | None) -> None:
        self._side = side
        self._stages = Stages(side, mesh, staging) if staging is not None else None
        self._built: list[Built] = [side.build(mesh)] if self._stages is None else list(self._stages.built.values())
        self._copies: Mapping[str, str] = staging.copies if staging is not None else {}
        self.copied = frozenset(self._copies.values())
        self.stored = self._built[0].stored
        self.wrapped_layers = sum(each.done.wrapped_layers for each in self._built)
        self.names: list[str] = []
        self.unread: dict[str, str] = {}
        self.bytes_read = self.nbytes = 0

    @property
    def models(self) -> list[nn.Module]:
        """In the order of their stages."""
        return [each.model for each in self._built]

    def load(self, device: torch.device) -> None:
        """Gives every part storage, and its values.

        Raises:
            InputError, UnsupportedError: As `load_from`.
        """
        unread = []
        for built in self._built:
            materialize(built.model, device)
            with self._side.opened() as source:
                ledger = self._side.load(built.model, source, built.regions)
            self.names += [self._copies.get(name, name) for name in ledger.loaded]
            self.bytes_read += ledger.bytes_read
            self.nbytes += ledger.nbytes
            unread.append(ledger.unread)
        self.unread = in_all(unread)

    def held_against(self, other: Side) -> tuple[list[str], dict[str, str]]:
        """As `Side.held_against`, of all parts together."""
        wrong, without_place = [], []
        with other.opened() as source:
            for built in self._built:
                names, left = other.held_against(built.model, source, built.regions)
                wrong += names
                without_place.append(left)
        return wrong, in_all(without_place)

    def run(self, batches: Sequence[Inputs], *, backward: bool) -> Outcome:
        """One step on these batches; gradients stay with the parameters, summed over copies of tied ones.

        Raises:
            UnsupportedError, EnvironmentProblem: As `execution.run`.
        """
        if self._stages is None:
            return execution.run(self.models[0], batches, backward=backward)
        return self._stages.run(batches, backward=backward)

    def held(self) -> Iterator[Held]:
        """Every parameter of this rank."""
        for built in self._built:
            for found, parameter in built.model.named_parameters():
                own = canonical_name(found)
                regions = None if built.regions is None else built.regions(own)
                yield Held(self._copies.get(own, own), parameter, regions)


def in_all(found: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What is in each of them."""
    return {name: reason for name, reason in found[0].items() if all(name in each for each in found)}
