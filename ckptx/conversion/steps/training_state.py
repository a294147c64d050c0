"""What a DCP of a training run holds besides the model, carried into another: cut like the parameters it belongs to.

A state tensor of the shape of its parameter is cut as that is, and lies on the same stage; a scalar lies there whole. A
name that shares the bytes of another shares its state too, and a copy of it on another stage has a copy of its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptx.catalog.entry import Block, BytesEntry, TensorEntry
from ckptx.catalog.region import whole
from ckptx.conversion.steps.sharding import ShardedTarget
from ckptx.errors import UnsupportedError
from ckptx.mapping.state_names import Owners, State, refuse_indices
from ckptx.model_view.sharder import ShardedModel
from ckptx.model_view.view import ModelView
from ckptx.storage.interface import SourceFiles
from ckptx.transfer.digest_sink import digest_of
from ckptx.transfer.stream import TensorReader
from ckptx.wording import counted

Place = tuple[int, tuple[Block, ...]]


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Tensors and objects to carry, by their names in the output.

    Attributes:
        tensors: As in `Target`, and so are `source_names`, `read`, `aliases` and `copies`.
        source_names: Name -> name on disk.
        read: Name -> names on disk of what it is made of.
        aliases: Names that share the bytes of another state.
        copies: Names that hold the bytes of another state once more.
        objects: Pickled objects.
        object_source_names: Name of an object -> its name in the source.
        places: Stage and blocks of each tensor, when there is a mesh.
        shared: Names on disk of state that another name stands for.
        dropped: Rows for the ledger: state of a tied name that differs from its twin's.
        without_parameter: Names on disk of optimizer tensors that belong to no known parameter; empty without a mesh.
        replicated: Names on disk of state whose shape differs from its parameter's.
        notes: What the user should know.
    """

    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    source_names: Mapping[str, str] = field(default_factory=dict)
    read: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    objects: Mapping[str, BytesEntry] = field(default_factory=dict)
    object_source_names: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    dropped: tuple[dict[str, str], ...] = ()
    without_parameter: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def written(self) -> set[str]:
        """Names on disk of the tensors it is made of."""
        return {name for names in self.read.values() for name in names}


def carry_state(
    view: ModelView, files: SourceFiles, sharded: ShardedTarget, outward: Mapping[str, str]
) -> TrainingState:
    """Everything that is not the model.

    Args:
        view: Of the source, payloads of everything located.
        files: Of the source.
        sharded: The tensors of the model by their names in the output, and how they are cut.
        outward: Name of a parameter in the view -> its name in the output, of those that are there one to one.

    Raises:
        UnsupportedError: State is keyed by indices, or belongs to a parameter that takes another form.
    """
    names = [*view.optimizer, *view.other, *view.catalog.objects]
    refuse_indices(names, str(view.catalog.root))
    return _StateMapper(view, files, sharded, outward).carry(names)


class _StateMapper:
    """One pass over the state of a checkpoint."""

    def __init__(self, view: ModelView, files: SourceFiles, sharded: ShardedTarget, outward: Mapping[str, str]) -> None:
        self.source, self.files, self.model, self.mesh = view.catalog, files, sharded.target, sharded.model
        self.outward = outward
        self.on_disk = {name: entry.name for name, entry in view.tensors.items()}
        self.owners = Owners.of(self.on_disk, view.prefix)
        self.duplicates = view.duplicates
        self.optimizer, self.other = frozenset(view.optimizer), frozenset(view.other)
        self.reader = TensorReader(files)
        self.tensors: dict[str, TensorEntry] = {}
        self.source_names: dict[str, str] = {}
        self.aliases: dict[str, str] = {}
        self.copies: dict[str, str] = {}
        self.objects: dict[str, BytesEntry] = {}
        self.object_source_names: dict[str, str] = {}
        self.places: dict[str, Place] = {}
        self.shared: set[str] = set()
        self.dropped: list[dict[str, str]] = []
        self.replicated: list[str] = []
        self.notes: list[str] = []

    def carry(self, names: list[str]) -> TrainingState:
        owned: dict[str, list[State]] = {}
        loose: list[str] = []
        for name in names:
            found = self.owners.find(name)
            if found is None:
                loose.append(name)
            else:
                owned.setdefault(self._out(found), []).append(found)
        orphans = self._orphans([name for name in loose if name in self.optimizer])
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
        self._carry_duplicates()
        if self.replicated:
            self.notes.append(
                "optimizer state replicated, its shape differs from its parameter's: "
                f'{counted(len(self.replicated), "tensor")}, "{self.replicated[0]}"'
            )
        return TrainingState(
            self.tensors,
            self.source_names,
            {name: (on_disk,) for name, on_disk in self.source_names.items()},
            self.aliases,
            self.copies,
            self.objects,
            self.object_source_names,
            self.places,
            frozenset(self.shared),
            tuple(self.dropped),
            tuple(orphans),
            tuple(self.replicated),
            tuple(self.notes),
        )

    def _carry_duplicates(self) -> None:
        """Keeps the second names of state that the checkpoint has twice; it was found to have equal bytes."""
        state = {*self.optimizer, *self.other}
        called = {on_disk: name for name, on_disk in self.source_names.items()}
        for name, kept in self.duplicates.items():
            if kept not in state:
                continue
            self.shared.add(name)
            if called.get(kept) == kept and name not in self.tensors and name not in self.aliases:
                self.aliases[name] = kept

    def _orphans(self, names: list[str]) -> list[str]:
        """Tensors of the optimizer that stay whole because nobody knows what they belong to."""
        if self.mesh is None or self.mesh.dims.world_size == 1:
            return []
        orphans = [name for name in names if self.source.tensors[name].numel > 1]
        if orphans:
            said = f'{counted(len(orphans), "tensor")}, "{orphans[0]}"'
            self.notes.append(f"optimizer state of no known parameter, whole on rank 0: {said}")
        return orphans

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
        if (
            self._called(state) == state.name
            and state.name_in_state != parameter
            and parameter.endswith(state.name_in_state)
        ):
            lead = parameter[: len(parameter) - len(state.name_in_state)]
            return state.of(other.removeprefix(lead))
        return state.of(other)

    def _share(self, name: str, stored: str, on_disk: str, parameter: str) -> None:
        """Makes `name` another name of `stored`, or a copy where no file can share it."""
        if on_disk in self.source.objects:
            self._add(on_disk, name, parameter)
        elif self._is_apart(parameter):
            self._add(on_disk, name, parameter)
            self.copies[name] = stored
        else:
            self.aliases[name] = stored

    def _is_apart(self, parameter: str) -> bool:
        """True for a parameter that is a copy, or that has one: it has state of its own."""
        return parameter in self.model.copies or parameter in self.model.copies.values()

    def _settle(self, twin: str, kept: str) -> None:
        """Two states of one tensor: the same, or the one of the stored name is kept and the other reported."""
        if twin in self.source.objects:
            same = self._object(twin) == self._object(kept)
        else:
            first, second = self.source.tensors[twin], self.source.tensors[kept]
            same = (first.shape, first.dtype) == (second.shape, second.dtype) and (
                first.chunks == second.chunks or self._leaves(first) == self._leaves(second)
            )
            if same:
                self.shared.add(twin)
        if not same:
            reason = f'state of a tied name; "{kept}" is kept'
            self.dropped.append({"name": twin, "reason": reason})
            self.notes.append(f'"{twin}" and "{kept}" differ although their parameters are tied; the second is kept')

    def _leaves(self, entry: TensorEntry) -> list[bytes]:
        return digest_of(self.reader, entry, entry.dtype).leaves

    def _object(self, name: str) -> bytes:
        place = self.source.objects[name]
        return self.files.read(place.file, place.offset, place.nbytes)

    def _add(self, on_disk: str, name: str, parameter: str | None) -> None:
        """Carries one tensor or object under a name."""
        if on_disk in self.source.objects:
            self.objects[name] = self.source.objects[on_disk]._replace(name=name)
            self.object_source_names[name] = on_disk
            return
        entry = self.source.tensors[on_disk]
        self.tensors[name], self.source_names[name] = entry.called(name), on_disk
        if self.mesh is not None:
            self.places[name] = self._place(entry, parameter, self.mesh)

    def _place(self, entry: TensorEntry, parameter: str | None, mesh: ShardedModel) -> Place:
        alone = (Block(0, whole(entry.shape)),)
        if parameter is None:
            return 0, alone
        stored = self.model.aliases.get(parameter, parameter)
        placed = mesh.placed[stored]
        if entry.shape == self.model.tensors[stored].shape:
            return placed.stage, placed.blocks
        if entry.numel > 1:
            self.replicated.append(entry.name)
        return placed.stage, alone
