"""Training state of the source, such as that of the optimizer, written to a DCP and sharded like its parameters.

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
        source_names: Output name -> stored name.
        stored_names: Output name -> stored names of the tensors that it is made of, always one.
        aliases: Output name that shares the bytes of another state tensor -> name of that tensor.
        copies: Output name in `tensors` with the same bytes as another state tensor -> name of that tensor.
        objects: Pickled objects.
        object_source_names: Output name of an object -> its stored name.
        placements: Output name -> stage and blocks of the tensor; empty without a mesh.
        shared_stored_names: Stored names of state whose bytes are written from another, equal tensor.
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
        view: Model in the source; the chunks of its catalog are located, see `locate_all_archives`.
        files: Files of the source.
        sharded: Tensors of the model by output name, with their shards.
        output_names: View name of a parameter -> output name, for parameters that map one to one.

    Raises:
        UnsupportedError: State is keyed by index, or belongs to a parameter that is combined, split or reordered.
    """
    names = [*view.optimizer, *view.other, *view.catalog.objects]
    mapper = _StateMapper(view, files, sharded, output_names)
    refuse_indexed_state(names, mapper.parameters, str(view.catalog.location))
    return mapper.map_names(names)


class _StateMapper:
    """Mapper of the training state of one checkpoint to the output.

    "Stored" names are those in the source; other names are output names if nothing else is said.
    """

    def __init__(
        self, view: ModelView, files: SourceFiles, sharded: ShardedTarget, output_names: Mapping[str, str]
    ) -> None:
        """Start without state; for the arguments see `map_training_state`."""
        self.source, self.files, self.target, self.sharding = view.catalog, files, sharded.target, sharded.sharded_model
        self.output_names = output_names
        self.stored_names = {name: entry.name for name, entry in view.tensors.items()}  # by view name
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
        """Map state tensors and objects, given by their stored names; called once.

        Raises:
            UnsupportedError: State belongs to a parameter that is combined, split or reordered.
        """
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
        for name, kept in shared_names.items():
            mapped |= self._map_shared(name, kept, states_by_parameter)
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
            {name: (stored_name,) for name, stored_name in self.source_names.items()},
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
        output_names = {stored_name: name for name, stored_name in self.source_names.items()}
        for name, other in self.duplicates.items():
            if other not in state:
                continue
            self.shared.add(name)
            if output_names.get(other) == other and name not in self.tensors and name not in self.aliases:
                self.aliases[name] = other

    def _find_unmatched(self, names: list[str]) -> list[str]:
        """Return those of `names` that have several elements, and add a note: they are written whole on rank 0.

        Without a mesh, the result is empty and no note is added.

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
        """Return the output name of a state: the stored one, unless its parameter is renamed."""
        output_parameter = self._output_parameter(state)
        return (
            state.name if output_parameter == self.stored_names[state.parameter] else state.name_for(output_parameter)
        )

    def _map_shared(self, name: str, kept: str, states_by_parameter: Mapping[str, list[StateName]]) -> set[str]:
        """Map the state of a parameter that is an alias or a copy of another.

        Args:
            name: Output name of the alias or copy.
            kept: Output name of the other parameter.
            states_by_parameter: Output name of a parameter -> its state in the source.

        Returns:
            The stored names of the state that was mapped; that of `kept` is not among them.
        """
        mapped = set()
        own_states = {(state.prefix, state.suffix): state for state in states_by_parameter.get(name, ())}
        kept_states = {(state.prefix, state.suffix): state for state in states_by_parameter.get(kept, ())}
        for key, state in kept_states.items():
            counterpart = own_states.pop(key, None)
            output_name = self._output_name(state)
            self._share(
                self._counterpart_name(state, kept, name) if counterpart is None else self._output_name(counterpart),
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
            self._share(self._counterpart_name(state, name, kept), output_name, state.name, kept)
        return mapped

    def _counterpart_name(self, state: StateName, parameter: str, other: str) -> str:
        """Return the output name of the same state of the parameter `other`, with or without prefix as in the source.

        Args:
            state: State in the source.
            parameter: Output name of the parameter that it belongs to.
            other: Output name of the other parameter.
        """
        if (
            self._output_name(state) == state.name
            and state.name_in_state != parameter
            and parameter.endswith(state.name_in_state)
        ):
            prefix = parameter[: len(parameter) - len(state.name_in_state)]
            return state.name_for(other.removeprefix(prefix))
        return state.name_for(other)

    def _share(self, name: str, kept: str, stored_name: str, parameter: str) -> None:
        """Make the state `name` an alias of the state `kept`, or a copy if they cannot share bytes.

        Args:
            name: Output name of the state to add.
            kept: Output name of the state that has the bytes.
            stored_name: Stored name of the state that has the bytes.
            parameter: Output name of the parameter that the state `name` belongs to.
        """
        if stored_name in self.source.objects:
            self._add(stored_name, name, parameter)
        elif self._has_copy(parameter):
            self._add(stored_name, name, parameter)
            self.copies[name] = kept
        else:
            self.aliases[name] = kept

    def _has_copy(self, parameter: str) -> bool:
        """Return True for a parameter that is a copy or has one, and so needs separate state."""
        return parameter in self.target.copied_aliases or parameter in self.target.copied_aliases.values()

    def _merge_states(self, duplicate: str, stored: str) -> None:
        """Account for `duplicate`, which the source has in addition to the state `stored` of a tied parameter.

        If their bytes differ, the duplicate is dropped, with a note. Both arguments are stored names.
        """
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

    def _add(self, stored_name: str, name: str, parameter: str | None) -> None:
        """Add one tensor or object under its output name.

        Args:
            stored_name: Stored name.
            name: Output name.
            parameter: Output name of its parameter; None if it belongs to none.
        """
        if stored_name in self.source.objects:
            self.objects[name] = self.source.objects[stored_name]._replace(name=name)
            self.object_source_names[name] = stored_name
            return
        entry = self.source.tensors[stored_name]
        self.tensors[name], self.source_names[name] = entry.with_name(name), stored_name
        if self.sharding is not None:
            self.placements[name] = self._place(entry, parameter, self.sharding)

    def _place(self, entry: TensorEntry, parameter: str | None, sharding: ShardedModel) -> StagePlacement:
        """Return stage and blocks of a state tensor; `parameter` is the output name of its parameter, None for none."""
        whole_block = (Block(0, full_region(entry.shape)),)
        if parameter is None:
            return 0, whole_block
        kept = self.target.aliases.get(parameter, parameter)
        placed = sharding.placements[kept]
        if entry.shape == self.target.tensors[kept].shape:
            return placed.stage, placed.blocks
        if entry.numel > 1:
            self.replicated.append(entry.name)
        return placed.stage, whole_block
