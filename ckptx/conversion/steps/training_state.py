"""Training state of a DCP, written to another DCP and sharded like the parameters it belongs to.

A state tensor with the shape of its parameter gets the same shards on the same stage; a scalar is stored there whole.
A name that shares the bytes of another shares its state too, and a copy on another stage gets a copy of the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptx.catalog.entry import Block, BytesEntry, TensorEntry
from ckptx.catalog.region import full_region
from ckptx.conversion.steps.sharding import ShardedTarget
from ckptx.errors import UnsupportedError
from ckptx.mapping.state_names import ParameterIndex, StateName, refuse_indexed_state
from ckptx.model_view.sharder import ShardedModel
from ckptx.model_view.view import ModelView
from ckptx.storage.interface import SourceFiles
from ckptx.transfer.digest_sink import digest_tensor
from ckptx.transfer.stream import TensorReader
from ckptx.wording import counted

StagePlacement = tuple[int, tuple[Block, ...]]  # pipeline stage, and blocks of the ranks in it


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Tensors and objects of the training state, by their names in the output.

    Attributes:
        tensors: State tensors, with shapes and dtypes of the target; chunks are not set yet.
        source_names: Name -> stored name in the source.
        stored_names: Name -> stored names of the tensors it is made of.
        aliases: Name that shares the bytes of another state -> name of that state.
        copies: Name that repeats the bytes of another state -> name of that state.
        objects: Pickled objects.
        object_source_names: Name of an object -> its name in the source.
        placements: Stage and blocks of each tensor; empty without a mesh.
        shared_stored_names: Stored names of state that is written under another name.
        dropped: Stored `name` and `reason` of each tensor or object that is not written: state of a tied name that
            differs from that of the other name.
        without_parameter: Stored names of optimizer tensors of more than one element that belong to no known parameter;
            empty without a mesh.
        replicated: Stored names of state of more than one element whose shape differs from that of its parameter.
        notes: Notes for the user.
    """

    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    source_names: Mapping[str, str] = field(default_factory=dict)
    stored_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    objects: Mapping[str, BytesEntry] = field(default_factory=dict)
    object_source_names: Mapping[str, str] = field(default_factory=dict)
    placements: Mapping[str, StagePlacement] = field(default_factory=dict)
    shared_stored_names: frozenset[str] = frozenset()
    dropped: tuple[dict[str, str], ...] = ()
    without_parameter: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def written_stored_names(self) -> set[str]:
        """Return the stored names of all state tensors that are written."""
        return {name for names in self.stored_names.values() for name in names}


def map_training_state(
    view: ModelView, files: SourceFiles, sharded: ShardedTarget, output_names: Mapping[str, str]
) -> TrainingState:
    """Map the training state of the source to the output.

    Args:
        view: Model in the source, with every archive located.
        files: Files of the source.
        sharded: Tensors of the model by output name, with their shards.
        output_names: Parameter name in the view -> name in the output, for parameters that map one to one.

    Raises:
        UnsupportedError: State is keyed by index, or belongs to a parameter that is combined, split or reordered.
    """
    names = [*view.optimizer, *view.other, *view.catalog.objects]
    mapper = _StateMapper(view, files, sharded, output_names)
    refuse_indexed_state(names, mapper.parameters, str(view.catalog.location))
    return mapper.map_names(names)


class _StateMapper:
    """Mapper of the training state of one checkpoint to the output."""

    def __init__(
        self, view: ModelView, files: SourceFiles, sharded: ShardedTarget, output_names: Mapping[str, str]
    ) -> None:
        self.source, self.files, self.target, self.sharding = view.catalog, files, sharded.target, sharded.sharded_model
        self.output_names = output_names
        self.stored_names = {name: entry.name for name, entry in view.tensors.items()}
        self.parameters = ParameterIndex.of(self.stored_names, view.prefix)
        self.duplicates = view.duplicates
        self.optimizer, self.other = frozenset(view.optimizer), frozenset(view.other)
        self.reader = TensorReader(files)
        self.tensors: dict[str, TensorEntry] = {}
        self.source_names: dict[str, str] = {}
        self.aliases: dict[str, str] = {}
        self.copies: dict[str, str] = {}
        self.objects: dict[str, BytesEntry] = {}
        self.object_source_names: dict[str, str] = {}
        self.placements: dict[str, StagePlacement] = {}
        self.shared: set[str] = set()
        self.dropped: list[dict[str, str]] = []
        self.replicated: list[str] = []
        self.notes: list[str] = []

    def map_names(self, names: list[str]) -> TrainingState:
        states_by_parameter: dict[str, list[StateName]] = {}
        without_parameter: list[str] = []
        for name in names:
            found = self.parameters.find(name)
            if found is None:
                without_parameter.append(name)
            else:
                states_by_parameter.setdefault(self._output_parameter(found), []).append(found)
        unmatched = self._find_unmatched([name for name in without_parameter if name in self.optimizer])
        for name in without_parameter:
            self._add(name, name, None)
        shared_names = {**self.target.aliases, **self.target.copied_aliases}
        mapped: set[str] = set()
        for name, stored in shared_names.items():
            mapped |= self._map_shared(name, stored, states_by_parameter)
        for parameter, states in states_by_parameter.items():
            for state in states:
                if state.name not in mapped:
                    self._add(state.name, self._output_name(state), parameter)
        self._keep_duplicates()
        if self.replicated:
            self.notes.append(
                "optimizer state replicated because its shape differs from that of its parameter: "
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
            self.placements,
            frozenset(self.shared),
            tuple(self.dropped),
            tuple(unmatched),
            tuple(self.replicated),
            tuple(self.notes),
        )

    def _keep_duplicates(self) -> None:
        """Keep the second names of state that the checkpoint stores twice with equal bytes."""
        state = {*self.optimizer, *self.other}
        output_names = {on_disk: name for name, on_disk in self.source_names.items()}
        for name, other in self.duplicates.items():
            if other not in state:
                continue
            self.shared.add(name)
            if output_names.get(other) == other and name not in self.tensors and name not in self.aliases:
                self.aliases[name] = other

    def _find_unmatched(self, names: list[str]) -> list[str]:
        """Return those of more than one element, which stay whole, and note them; none without a mesh.

        Args:
            names: Stored names of optimizer tensors without a known parameter.
        """
        if self.sharding is None or self.sharding.dims.world_size == 1:
            return []
        unmatched = [name for name in names if self.source.tensors[name].numel > 1]
        if unmatched:
            tensors = f'{counted(len(unmatched), "tensor")}, "{unmatched[0]}"'
            self.notes.append(f"optimizer state without a known parameter, stored whole on rank 0: {tensors}")
        return unmatched

    def _output_parameter(self, state: StateName) -> str:
        """Return the output name of the parameter that a state belongs to.

        Raises:
            UnsupportedError: The parameter is combined, split or reordered.
        """
        output_name = self.output_names.get(state.parameter)
        if output_name is None:
            raise UnsupportedError(
                f'optimizer state "{state.name}" belongs to a parameter that these names combine, split or reorder; '
                "leave out --names, or pass --optimizer drop"
            )
        return output_name

    def _output_name(self, state: StateName) -> str:
        output_parameter = self._output_parameter(state)
        return (
            state.name if output_parameter == self.stored_names[state.parameter] else state.name_for(output_parameter)
        )

    def _map_shared(self, name: str, stored: str, states_by_parameter: Mapping[str, list[StateName]]) -> set[str]:
        """Map the state of `name`, which shares the bytes of `stored`; return the stored names that were mapped."""
        mapped = set()
        own_states = {(state.prefix, state.suffix): state for state in states_by_parameter.get(name, ())}
        stored_states = {(state.prefix, state.suffix): state for state in states_by_parameter.get(stored, ())}
        for key, state in stored_states.items():
            counterpart = own_states.pop(key, None)
            output_name = self._output_name(state)
            self._share(
                self._counterpart_name(state, stored, name) if counterpart is None else self._output_name(counterpart),
                output_name,
                state.name,
                name,
            )
            if counterpart is not None:
                mapped.add(counterpart.name)
                self._merge_states(counterpart.name, state.name)
        for state in own_states.values():  # the trainer stored it under this name only
            output_name = self._output_name(state)
            self._add(state.name, output_name, name)
            mapped.add(state.name)
            self._share(self._counterpart_name(state, name, stored), output_name, state.name, stored)
        return mapped

    def _counterpart_name(self, state: StateName, parameter: str, other: str) -> str:
        """Return the name of the same state of another parameter, with or without prefix as in the source."""
        if (
            self._output_name(state) == state.name
            and state.name_in_state != parameter
            and parameter.endswith(state.name_in_state)
        ):
            prefix = parameter[: len(parameter) - len(state.name_in_state)]
            return state.name_for(other.removeprefix(prefix))
        return state.name_for(other)

    def _share(self, name: str, stored: str, on_disk: str, parameter: str) -> None:
        """Make the state `name` an alias of the state `stored`, or a copy if they cannot share bytes.

        Args:
            name: Output name of the state to add.
            stored: Output name of the state that has the bytes.
            on_disk: Stored name of that state.
            parameter: Output name of the parameter that the state `name` belongs to.
        """
        if on_disk in self.source.objects:
            self._add(on_disk, name, parameter)
        elif self._has_copy(parameter):
            self._add(on_disk, name, parameter)
            self.copies[name] = stored
        else:
            self.aliases[name] = stored

    def _has_copy(self, parameter: str) -> bool:
        """Return True for a parameter that is a copy or has one, and so needs separate state."""
        return parameter in self.target.copied_aliases or parameter in self.target.copied_aliases.values()

    def _merge_states(self, duplicate: str, stored: str) -> None:
        """Merge two states of one parameter, by stored name; if they differ, keep `stored` and drop the other."""
        if duplicate in self.source.objects:
            is_same = self._read_object(duplicate) == self._read_object(stored)
        else:
            first, second = self.source.tensors[duplicate], self.source.tensors[stored]
            is_same = (first.shape, first.dtype) == (second.shape, second.dtype) and (
                first.chunks == second.chunks or self._digest_leaves(first) == self._digest_leaves(second)
            )
            if is_same:
                self.shared.add(duplicate)
        if not is_same:
            reason = f'state of a tied name; "{stored}" is kept'
            self.dropped.append({"name": duplicate, "reason": reason})
            self.notes.append(
                f'"{duplicate}" and "{stored}" differ although their parameters are tied; "{stored}" is kept'
            )

    def _digest_leaves(self, entry: TensorEntry) -> list[bytes]:
        return digest_tensor(self.reader, entry, entry.dtype).leaves

    def _read_object(self, name: str) -> bytes:
        location = self.source.objects[name]
        return self.files.read(location.file, location.offset, location.nbytes)

    def _add(self, on_disk: str, name: str, parameter: str | None) -> None:
        """Add one tensor or object under its output name.

        Args:
            on_disk: Stored name.
            name: Output name.
            parameter: Output name of its parameter; None if it belongs to none.
        """
        if on_disk in self.source.objects:
            self.objects[name] = self.source.objects[on_disk]._replace(name=name)
            self.object_source_names[name] = on_disk
            return
        entry = self.source.tensors[on_disk]
        self.tensors[name], self.source_names[name] = entry.with_name(name), on_disk
        if self.sharding is not None:
            self.placements[name] = self._place(entry, parameter, self.sharding)

    def _place(self, entry: TensorEntry, parameter: str | None, sharding: ShardedModel) -> StagePlacement:
        """Return stage and blocks of a state tensor; `parameter` is the output name of its parameter, None for none."""
        whole_block = (Block(0, full_region(entry.shape)),)
        if parameter is None:
            return 0, whole_block
        stored = self.target.aliases.get(parameter, parameter)
        placed = sharding.placements[stored]
        if entry.shape == self.target.tensors[stored].shape:
            return placed.stage, placed.blocks
        if entry.numel > 1:
            self.replicated.append(entry.name)
        return placed.stage, whole_block
