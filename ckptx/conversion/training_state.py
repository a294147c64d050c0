"""What a DCP of a training run holds besides the model, carried into another: cut like the parameters it belongs to.

A state tensor of the shape of its parameter is cut as that is, and lies on the same stage; a scalar lies there whole. A
name that shares the bytes of another shares its state too, and a copy of it on another stage has a copy of its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptx.catalog.entry import Block, BytesEntry, TensorEntry
from ckptx.catalog.region import whole
from ckptx.conversion.run import Conversion
from ckptx.conversion.state import Owners, State, refuse_indices
from ckptx.conversion.target import Target
from ckptx.cutting import Mesh
from ckptx.errors import UnsupportedError
from ckptx.report.report import counted
from ckptx.transfer.sinks import digest_of
from ckptx.transfer.stream import TensorReader
from ckptx.view import ModelView

Place = tuple[int, tuple[Block, ...]]


@dataclass(slots=True)
class TrainingState:
    """Tensors and objects to carry, by their names in the output.

    Attributes:
        target: The tensors, aliases and copies too.
        objects: Pickled objects.
        object_origin: Name of an object -> its name in the source.
        places: Stage and blocks of each tensor, when there is a mesh.
    """

    target: Target = field(default_factory=lambda: Target({}, {}, {}))
    objects: dict[str, BytesEntry] = field(default_factory=dict)
    object_origin: dict[str, str] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)


def carry_state(
    run: Conversion, view: ModelView, model: Target, outward: Mapping[str, str], mesh: Mesh | None
) -> TrainingState:
    """Everything that is not the model.

    Args:
        run: The conversion; its report lists what could not be cut, and what was kept of two.
        view: Of the source, payloads of everything located.
        model: The tensors of the model in the output.
        outward: Name of a parameter in the view -> its name in the output, of those that are there one to one.
        mesh: How the model is cut, by its names in the output.

    Raises:
        UnsupportedError: State is keyed by indices, or belongs to a parameter that takes another form.
    """
    names = [*view.optimizer, *view.other, *run.source.objects]
    refuse_indices(names, str(run.source.root))
    return _Carrier(run, view, model, outward, mesh).carry(names)


class _Carrier:
    """One pass over the state of a checkpoint."""

    def __init__(
        self, run: Conversion, view: ModelView, model: Target, outward: Mapping[str, str], mesh: Mesh | None
    ) -> None:
        self.run, self.model, self.outward, self.mesh = run, model, outward, mesh
        self.on_disk = {name: entry.name for name, entry in view.tensors.items()}
        self.owners = Owners.of(self.on_disk, view.prefix)
        self.optimizer = frozenset(view.optimizer)
        self.state = TrainingState()
        self.apart: list[str] = []
        self.reader = TensorReader(run.files)

    def carry(self, names: list[str]) -> TrainingState:
        owned: dict[str, list[State]] = {}
        loose: list[str] = []
        for name in names:
            found = self.owners.find(name)
            if found is None:
                loose.append(name)
            else:
                owned.setdefault(self._out(found), []).append(found)
        self._list_orphans([name for name in loose if name in self.optimizer])
        for name in loose:
            self._add(name, name, None)
        shared = {**self.model.aliases, **self.model.copies}
        done: set[str] = set()
        for name, stored in shared.items():
            done |= self._carry_shared(name, stored, owned)
        for parameter, states in owned.items():
            for state in states:
                if state.name not in done:
                    self._add(state.name, self._called(state), parameter)
        if self.apart:
            self.run.report.details["state_replicated"] = self.apart
            self.run.report.warnings.append(
                "state of another shape than its parameter, replicated: "
                f'{counted(len(self.apart), "tensor")}, "{self.apart[0]}"'
            )
        return self.state

    def _list_orphans(self, names: list[str]) -> None:
        """Says which tensors of the optimizer stay whole because nobody knows what they belong to."""
        orphans = [name for name in names if self.run.source.tensors[name].numel > 1]
        if orphans and self.mesh is not None and self.mesh.dims.world_size > 1:
            self.run.report.details["state_without_parameter"] = orphans
            self.run.report.warnings.append(
                f"optimizer state of no known parameter, whole on rank 0: {counted(len(orphans), 'tensor')}, "
                f'"{orphans[0]}"'
            )

    def _out(self, state: State) -> str:
        """The name in the output of the parameter of a state."""
        out = self.outward.get(state.parameter)
        if out is None:
            raise UnsupportedError(
                f'optimizer state "{state.name}" belongs to a parameter that takes another form under these names; '
                "leave names as they are, or pass --optimizer drop"
            )
        return out

    def _called(self, state: State) -> str:
        out = self._out(state)
        return state.name if out == self.on_disk[state.parameter] else state.of(out)

    def _carry_shared(self, name: str, stored: str, owned: Mapping[str, list[State]]) -> set[str]:
        """The state of `name`, which shares the bytes of `stored`; gives the names on disk that this settles."""
        settled = set()
        mine = {(state.before, state.after): state for state in owned.get(name, ())}
        others = {(state.before, state.after): state for state in owned.get(stored, ())}
        for key, state in others.items():
            twin = mine.pop(key, None)
            called = self._called(state)
            self._share(
                self._twin_name(state, stored, name) if twin is None else self._called(twin), called, state.name, name
            )
            if twin is not None:
                settled.add(twin.name)
                self._settle(twin.name, state.name)
        for state in mine.values():  # the trainer kept it under this name alone
            called = self._called(state)
            self._add(state.name, called, name)
            settled.add(state.name)
            self._share(self._twin_name(state, name, stored), called, state.name, stored)
        return settled

    def _twin_name(self, state: State, parameter: str, other: str) -> str:
        """The name of the same state of another parameter, as the trainer would spell it."""
        if self._called(state) == state.name and state.spelled != parameter and parameter.endswith(state.spelled):
            lead = parameter[: len(parameter) - len(state.spelled)]
            return state.of(other.removeprefix(lead))
        return state.of(other)

    def _share(self, name: str, stored: str, on_disk: str, parameter: str) -> None:
        """Makes `name` another name of `stored`, or a copy where no file can share it."""
        target = self.state.target
        if on_disk in self.run.source.objects:
            self._add(on_disk, name, parameter)
        elif self._is_apart(parameter):
            self._add(on_disk, name, parameter)
            target.copies[name] = stored
        else:
            target.aliases[name] = stored

    def _is_apart(self, parameter: str) -> bool:
        """True for a parameter that is a copy, or that has one: it has state of its own."""
        return parameter in self.model.copies or parameter in self.model.copies.values()

    def _settle(self, twin: str, kept: str) -> None:
        """Two states of one tensor: the same, or the one of the stored name is kept and the other reported."""
        report = self.run.report
        if twin in self.run.source.objects:
            same = self._object(twin) == self._object(kept)
        else:
            first, second = self.run.source.tensors[twin], self.run.source.tensors[kept]
            same = (first.shape, first.dtype) == (second.shape, second.dtype) and (
                first.chunks == second.chunks or self._leaves(first) == self._leaves(second)
            )
            if same:
                self.run.shared.add(twin)
        if not same:
            reason = f'state of a tied name; "{kept}" is kept'
            report.dropped.append({"name": twin, "reason": reason})
            report.warnings.append(
                f'"{twin}" and "{kept}" differ although their parameters are tied; the second is kept'
            )

    def _leaves(self, entry: TensorEntry) -> list[bytes]:
        return digest_of(self.reader, entry, entry.dtype).leaves

    def _object(self, name: str) -> bytes:
        place = self.run.source.objects[name]
        return self.run.files.read(place.file, place.offset, place.nbytes)

    def _add(self, on_disk: str, name: str, parameter: str | None) -> None:
        """Carries one tensor or object under a name."""
        state = self.state
        if on_disk in self.run.source.objects:
            state.objects[name] = self.run.source.objects[on_disk]._replace(name=name)
            state.object_origin[name] = on_disk
            return
        entry = self.run.source.tensors[on_disk]
        state.target.tensors[name] = entry._replace(name=name)
        state.target.origin[name], state.target.read[name] = on_disk, (on_disk,)
        if self.mesh is not None:
            state.places[name] = self._place(entry, parameter, self.mesh)

    def _place(self, entry: TensorEntry, parameter: str | None, mesh: Mesh) -> Place:
        alone = (Block(0, whole(entry.shape)),)
        if parameter is None:
            return 0, alone
        stored = self.model.aliases.get(parameter, parameter)
        placed = mesh.placed[stored]
        if entry.shape == self.model.tensors[stored].shape:
            return placed.stage, placed.blocks
        if entry.numel > 1:
            self.apart.append(entry.name)
        return placed.stage, alone
