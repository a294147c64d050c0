"""Read the files of all tensor parallel ranks, and join their shards to whole tensors.

Each rank has the files that a checkpoint without tensor parallelism has, with the shapes of its shards. So one
`StepReader` reads the files of each rank, and compares masters and weights there. Then the tensors of all ranks are
joined by name: weights, masters and moments of one parameter by the same rule (`tensor_parallel_rules`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.chunk_assembly import replicas_with_chunks
from ckptx.formats.deepspeed.file_names import parse_parameter_file, tensor_parallel_rank
from ckptx.formats.deepspeed.joined_tensors import RecentChunks, join_shards
from ckptx.formats.deepspeed.model_states import ModelStates
from ckptx.formats.deepspeed.shard_ranges import Join
from ckptx.formats.deepspeed.step_reader import STATE_KEYS, STEP, StepReader, missing_ranks_error, state_name
from ckptx.formats.deepspeed.tensor_parallel_rules import KEY, TensorParallelRules
from ckptx.formats.deepspeed.universal_reader import UniversalReader
from ckptx.formats.unsupported import SAVE_WHERE_TRAINED
from ckptx.storage.interface import FileIdentity, Source, SourceFiles
from ckptx.untrusted.limits import MAX_RANKS
from ckptx.wording import counted, first_of

_BLOCK_NBYTES = 1 << 20  # bytes that are read at once when copies are compared


def files_by_tensor_parallel_rank(names: Sequence[str]) -> dict[int, list[str]]:
    """Return rank -> files, without the files of the parameters of a universal checkpoint, which belong to no rank."""
    by_rank: dict[int, list[str]] = {}
    for name in names:
        if parse_parameter_file(name) is None:
            by_rank.setdefault(tensor_parallel_rank(name.rpartition("/")[2]), []).append(name)
    return by_rank


class TensorParallelReader:
    """Reader of the files that all ranks save in one step.

    Attributes:
        readers: Reader of the files of each tensor parallel rank.
    """

    def __init__(self, source: Source, names: Sequence[str]) -> None:
        """Group the file names.

        Args:
            source: The directory of a step, or its parent.
            names: Files of one step, in one directory, of several tensor parallel ranks.

        Raises:
            InputError: A rank below the highest has no files.
        """
        self.readers = _rank_readers(source, names, StepReader)

    def read(self) -> Catalog:
        """Return the catalog of the step."""
        models = _read_models(self.readers)
        for reader, model in zip(self.readers, models, strict=True):
            reader.add_tensors(model)
        joiner = _Joiner(self.readers, models)
        first = self.readers[0]
        catalog = first.catalog
        by_rank = [reader.catalog.tensors for reader in self.readers]
        owners = _state_owners(models)
        _add_empty_shards(by_rank, owners)
        joiner.check_names(by_rank)
        with first.source.open(joiner.identities) as files:
            catalog.tensors = dict(joiner.join_all(by_rank, owners, files))
        catalog.identities = joiner.identities
        for reader in self.readers[1:]:
            catalog.files |= reader.catalog.files
        catalog.notes += joiner.notes()
        return first.finish(models[0])


class TensorParallelUniversalReader(UniversalReader):
    """Reader of a universal checkpoint of several tensor parallel ranks: its parameters are whole tensors.

    Attributes:
        readers: Reader of the model states of each tensor parallel rank.
    """

    def __init__(self, source: Source, names: Sequence[str]) -> None:
        """Group the file names, see `TensorParallelReader`."""
        self.readers = _rank_readers(source, names, UniversalReader)
        of_first = files_by_tensor_parallel_rank(names)[0]
        super().__init__(source, [*of_first, *(name for name in names if parse_parameter_file(name) is not None)])

    def read_model(self) -> ModelStates:
        """Return the model states of the first data rank, with whole tensors and shapes."""
        models = self._models = _read_models(self.readers)
        joiner = self._joiner = _Joiner(self.readers, models)
        for reader in self.readers:
            self.catalog.files |= reader.catalog.files
        self.catalog.identities |= joiner.identities
        # In stage 3, an empty tensor stands for each parameter.
        placeholders = {} if self.has_module_file else {n: e for n, e in models[0].tensors.items() if not e.numel}
        by_rank = [
            {name: entry for name, entry in model.tensors.items() if name not in placeholders} for model in models
        ]
        joiner.check_names(by_rank)
        with self.source.open(joiner.identities) as files:
            tensors = dict(joiner.join_all(by_rank, {}, files))
        shapes = tuple(
            {
                name: joiner.join_of(name, [_shape_of(model, index, name, joiner.where) for model in models]).shape
                for name in group
            }
            for index, group in enumerate(models[0].param_shapes)
        )
        self.catalog.notes += joiner.notes()
        return models[0]._replace(tensors=placeholders | tensors, param_shapes=shapes, tp_size=None)

    def _frozen_entries(self, model: ModelStates, ranks: int) -> Iterator[TensorEntry]:
        """Yield the frozen parameters of stage 3, joined from the fragments of all ranks."""
        by_rank = [
            {entry.name: entry for entry in reader._frozen_entries(each, ranks)}
            for reader, each in zip(self.readers, self._models, strict=True)
        ]
        self._joiner.check_names(by_rank)
        with self.source.open(self._joiner.identities) as files:
            yield from dict(self._joiner.join_all(by_rank, {}, files)).values()


class _Joiner:
    """Joins the tensors of all ranks by the rules of the checkpoint.

    Attributes:
        where: Directory of the files, for messages.
        identities: Identities of the files of all ranks.
    """

    def __init__(self, readers: Sequence[StepReader], models: Sequence[ModelStates]) -> None:
        self.where = readers[0].where
        first = f"{readers[0].source.location}/{models[0].file}"
        self._rules = TensorParallelRules(models[0].tensor_parallel_info, len(readers), first)
        self._models = models
        self._readers = readers
        self._joins: dict[str, tuple[list[tuple[int, ...]], Join]] = {}  # name in the rules -> shapes of shards, join
        self._padded: dict[str, int] = {}  # name in the rules -> rows of padding
        self._rule_names = self._names_of_tied(models[0])  # tied name -> name in the rules
        self._recent = RecentChunks()
        self._equal_steps: set[tuple[Chunk, ...]] = set()  # the step of each rank, for groups that were compared

    @property
    def identities(self) -> dict[str, FileIdentity]:
        return {name: each for reader in self._readers for name, each in reader.catalog.identities.items()}

    def notes(self) -> list[str]:
        """Return a note on rows of padding that were not read."""
        if not self._padded:
            return []
        rows = max(self._padded.values())
        return [f"vocabulary padding not read: up to {counted(rows, 'row')} of {first_of(list(self._padded))}"]

    def check_names(self, by_rank: Sequence[Mapping[str, TensorEntry]]) -> None:
        """Check that all ranks have the same tensors.

        Raises:
            InputError: A rank lacks one.
        """
        for rank, tensors in enumerate(by_rank):
            for other, name in (
                (rank, min(by_rank[0].keys() - tensors.keys(), default=None)),
                (0, min(tensors.keys() - by_rank[0].keys(), default=None)),
            ):
                if name is not None:
                    raise InputError(
                        f'{self.where}: tensor "{name}" is missing in the files of tensor parallel rank {other}, but '
                        f"those of rank {rank if other == 0 else 0} have it; the files are of different saves, copy "
                        "those of one"
                    )

    def join_all(
        self, by_rank: Sequence[Mapping[str, TensorEntry]], owners: Mapping[str, tuple[str, str]], files: SourceFiles
    ) -> Iterator[tuple[str, TensorEntry]]:
        """Yield the whole tensors by name.

        Args:
            by_rank: The tensors of each rank, which have the same names.
            owners: Name of optimizer state -> its parameter and its key, such as `exp_avg`. Other names are parameters
                and buffers.
            files: Files of all ranks.

        Raises:
            InputError, UnsupportedError: See `open_deepspeed`.
        """
        for name in by_rank[0]:
            shards = [tensors[name] for tensors in by_rank]
            parameter, key = owners.get(name, (name, ""))
            if key == STEP:
                self._check_steps(files, shards)
                yield name, shards[0]
                continue
            for shard in shards:
                if shard.dtype is not shards[0].dtype:
                    raise InputError(
                        f'{self.where}: tensor "{name}" is {shard.dtype} in {shard.chunks[0].file}, but '
                        f"{shards[0].dtype} in {shards[0].chunks[0].file}; the files are of different saves, copy "
                        "those of one"
                    )
            join = self.join_of(parameter, [shard.shape for shard in shards])
            entry = join_shards(name, shards, join, self._recent)
            if join.is_averaged:
                self._check_averaged(files, entry)
            yield name, entry

    def join_of(self, name: str, shapes: Sequence[tuple[int, ...]]) -> Join:
        """Return the positions of the shards of a parameter or buffer.

        Args:
            name: Its name in the state dict.
            shapes: Shape of its shard on each rank.

        Raises:
            InputError, UnsupportedError: See `TensorParallelRules.join`.
        """
        rule_name = self._rule_names.get(name, name)
        known = self._joins.get(rule_name)
        if known is not None and known[0] == list(shapes):
            return known[1]
        is_buffer = name in self._models[0].buffers
        join = (self._rules.join_buffer if is_buffer else self._rules.join)(rule_name, shapes)
        self._joins[rule_name] = list(shapes), join
        if join.padding:
            self._padded[rule_name] = join.padding
        return join

    def _names_of_tied(self, model: ModelStates) -> dict[str, str]:
        """Return tied name -> name that the rules use, which is the one under which the optimizer knows the tensor."""
        names = dict(model.shared)
        first_names: dict[tuple[object, ...], str] = {}
        for name, entry in model.tensors.items():
            if entry.numel and name not in names:
                first = first_names.setdefault((entry.position, entry.shape), name)
                if first != name and not self._rules.has_rule(name):
                    names[name] = first
        return names

    def _check_steps(self, files: SourceFiles, shards: Sequence[TensorEntry]) -> None:
        """Check that the step of a group is the same on all ranks, because files of two saves may have been mixed.

        All parameters of a group have the same chunks for their step, which are compared only once.
        """
        chunks = tuple(shard.chunks[0] for shard in shards)
        if chunks in self._equal_steps:
            return
        self._equal_steps.add(chunks)
        for chunk in chunks:
            if not _have_equal_bytes(files, chunks[0], chunk):
                raise InputError(
                    f"{self.where}: the optimizer step in {chunk.file} differs from that in {chunks[0].file}; the "
                    "files are of different saves, copy those of one"
                )

    def _check_averaged(self, files: SourceFiles, entry: TensorEntry) -> None:
        """Refuse copies that differ, because an average of them is in no file."""
        catalog = Catalog(self._readers[0].source.location, "deepspeed", {entry.name: entry})
        for _, chunk, replica in replicas_with_chunks(catalog):
            if not _have_equal_bytes(files, chunk, replica):
                raise UnsupportedError(
                    f'{self.where}: tensor "{entry.name}": parameter_to_average_patterns lists it, and its copies in '
                    f"{chunk.file} and {replica.file} differ; averages are not computed, {SAVE_WHERE_TRAINED}"
                )


def _rank_readers(source: Source, names: Sequence[str], kind: type[StepReader]) -> list[StepReader]:
    """Return a reader of the files of each tensor parallel rank.

    Raises:
        InputError: A rank below the highest has no files, or there are too many ranks.
    """
    by_rank = files_by_tensor_parallel_rank(names)
    count = max(by_rank) + 1
    where = StepReader(source, by_rank[max(by_rank)]).where
    if count > MAX_RANKS:
        raise InputError(
            f"{where}: files of {count:,} tensor parallel ranks, the limit is {MAX_RANKS:,}; check the file names"
        )
    if len(by_rank) < count:
        raise missing_ranks_error(where, count, sorted(by_rank))
    return [kind(source, by_rank[rank], rank) for rank in range(count)]


def _read_models(readers: Sequence[StepReader]) -> list[ModelStates]:
    """Return the model states of the first data rank of each tensor parallel rank.

    Raises:
        InputError: The files are not of one save.
    """
    first = readers[0]
    models: list[ModelStates] = []
    for reader in readers:
        model = reader.read_model()
        models.append(model._replace(shared=models[0].shared if models else model.shared))  # only rank 0 records them
        where = f"{reader.source.location}/{model.file}"
        if model.tp_size is not None and model.tp_size > len(readers):
            raise missing_ranks_error(reader.where, model.tp_size, range(len(readers)))
        if model.tp_size is not None and model.tp_size < len(readers):
            raise InputError(
                f"{where}: was saved with {counted(model.tp_size, 'tensor parallel rank')}, but there are files of "
                f"{len(readers)}; remove those of other saves"
            )
        counts = [
            (reader.has_module_file, len(reader.model_files), len(reader.optimizer_files)),
            (first.has_module_file, len(first.model_files), len(first.optimizer_files)),
        ]
        if counts[0] != counts[1]:
            raise InputError(
                f"{reader.where}: {_files_text(*counts[0])} of tensor parallel rank {reader.tp_rank}, but "
                f"{_files_text(*counts[1])} of rank 0; copy the files of one save from the machines that wrote them"
            )
        if model.global_steps != models[0].global_steps:
            raise InputError(
                f"{where}: saved after {model.global_steps} steps, but {models[0].file} after "
                f"{models[0].global_steps}; the files are of different saves, copy those of one"
            )
    keys = tuple(key for key in models[0].not_converted if key != KEY)  # the rules are read from `KEY`
    return [models[0]._replace(not_converted=keys), *models[1:]]


def _files_text(has_module_file: bool, models: int, optimizers: int) -> str:
    return f"{counted(int(has_module_file) or models, 'file')} of model states and {optimizers} of optimizer states"


def _shape_of(model: ModelStates, index: int, name: str, where: str) -> tuple[int, ...]:
    """Return the shape of a parameter on one rank.

    Raises:
        InputError: The rank does not have it.
    """
    shape = model.param_shapes[index].get(name) if index < len(model.param_shapes) else None
    if shape is None:
        raise InputError(
            f'{where}: param_shapes in {model.file} lacks "{name}"; the files are of different saves, copy those of one'
        )
    return shape


def _state_owners(models: Sequence[ModelStates]) -> dict[str, tuple[str, str]]:
    """Return name -> (parameter, key) for each name that optimizer state can have; keys are those of `STATE_KEYS`."""
    names = {name for model in models for group in model.param_shapes for name in group}
    return {state_name(name, key): (name, key) for name in names for key in STATE_KEYS}


def _add_empty_shards(by_rank: Sequence[dict[str, TensorEntry]], owners: Mapping[str, tuple[str, str]]) -> None:
    """Add the optimizer state of shards without elements, which is in no file.

    With fewer heads than ranks, the shards of some ranks are empty. Their weights are in the state dict, but the
    optimizer does not know them.
    """
    known = {name: entry for tensors in by_rank for name, entry in tensors.items() if name in owners}
    for tensors in by_rank:
        for name, entry in known.items():
            parameter, key = owners[name]
            weight = tensors.get(parameter)
            if name in tensors or weight is None or weight.numel:
                continue
            tensors[name] = entry if key == STEP else weight._replace(name=name, dtype=entry.dtype)


def _have_equal_bytes(files: SourceFiles, a: Chunk, b: Chunk) -> bool:
    """Return True if two contiguous chunks have the same bytes."""
    if a.nbytes != b.nbytes:
        return False
    for begin in range(0, a.nbytes, _BLOCK_NBYTES):
        count = min(_BLOCK_NBYTES, a.nbytes - begin)
        if bytes(files.read(a.file, a.offset + begin, count)) != bytes(files.read(b.file, b.offset + begin, count)):
            return False
    return True
