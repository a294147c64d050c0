"""Read the files of the data ranks of one tensor parallel rank: weights under the names of the module, and the state
of each parameter.

    stages 0 to 2    the weights in `mp_rank_00_model_states.pt`, in the dtype of training
    stage 3          the fp32 masters of all ranks; frozen parameters from their fragments, buffers from rank 0

    optimizer.state.PARAMETER.exp_avg         moments of stages 1 to 3, under the names of a DCP
    optimizer.state.PARAMETER.step
    optimizer.state.PARAMETER.master_param    fp32 masters of stages 1 and 2

Only the zip directory and the pickle of each file are read here, the steps, and samples of the masters of stages 1 and
2 (`master_check`). With tensor parallelism, these are the shards of one rank; `tensor_parallel_reader` joins them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Shape, full_region
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.deepspeed.copied_files import refuse_copies
from ckptx.formats.deepspeed.file_names import ZeroFile, model_file_name, parse_zero_file, step_directory
from ckptx.formats.deepspeed.flat_chunks import FlatPart
from ckptx.formats.deepspeed.master_check import check_masters
from ckptx.formats.deepspeed.model_states import ModelStates, read_frozen_fragments, read_model_states
from ckptx.formats.deepspeed.optimizer_states import ZERO_TO_FP32, RankState, read_rank_state
from ckptx.formats.deepspeed.partitions import (
    Partition,
    check_partition_counts,
    partition_by_group,
    partition_by_parameter,
)
from ckptx.storage.interface import Source, SourceFiles
from ckptx.untrusted.limits import MAX_RANKS
from ckptx.wording import counted, first_of

# Tensors of an optimizer with one element for each element of a parameter.
_MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "sum"}
)
STEP = "step"
MASTER = "master_param"
# Last components of the names of optimizer state in a catalog, see `state_name`.
STATE_KEYS = (*sorted(_MOMENTS), STEP, MASTER)
_MAX_LISTED = 4  # values in a message


class StepReader:
    """Reader of the files that the data ranks of one tensor parallel rank save in one step.

    Methods raise the errors of `open_deepspeed`.

    Attributes:
        source: The directory to which names are relative.
        directory: Directory of the files, empty or with a slash at the end.
        tp_rank: The tensor parallel rank; 0 without tensor parallelism.
        model_file: Name of the model states that stages 0 to 2 save, such as `mp_rank_00_model_states.pt`.
        has_module_file: True if there is this file.
        model_files: The model states of each data rank, which only stage 3 saves, sorted by rank.
        optimizer_files: The optimizer states of each data rank, sorted by rank; empty in stage 0.
        catalog: Receives tensors, files and notes.
        where: Directory of the files, for messages.
    """

    def __init__(self, source: Source, names: Sequence[str], tp_rank: int = 0) -> None:
        """Group the file names.

        Args:
            source: The directory of a step, or its parent.
            names: Files of one tensor parallel rank in one step, in one directory.
            tp_rank: The tensor parallel rank.
        """
        self.source = source
        self.directory = step_directory(names)
        self.tp_rank, self.model_file = tp_rank, model_file_name(tp_rank)
        base_names = [name[len(self.directory) :] for name in names]
        self.has_module_file = self.model_file in base_names
        rank_files = [found for name in base_names if (found := parse_zero_file(name)) is not None]
        self.model_files = sorted(file for file in rank_files if file.kind == "model")
        self.optimizer_files = sorted(file for file in rank_files if file.kind == "optim")
        self.catalog = Catalog(source.location, "deepspeed", {}, opened_source=source)
        self.where = f"{source.location / self.directory.rstrip('/')}" if self.directory else f"{source.location}"

    def read(self) -> Catalog:
        """Return the catalog of the step."""
        model = self.read_model()
        if model.tp_size is not None and model.tp_size > 1:
            raise missing_ranks_error(self.where, model.tp_size, [0])
        self.add_tensors(model)
        return self.finish(model)

    def read_model(self) -> ModelStates:
        """Check which files there are, and return the model states of the first data rank."""
        self._check_files()
        is_stage_3 = not self.has_module_file
        return self._read_model(self.model_file if self.has_module_file else self.model_files[0].name, is_stage_3)

    def add_tensors(self, model: ModelStates) -> None:
        """Read the optimizer states, and add all tensors to the catalog."""
        states = [self._read_optimizer(file) for file in self.optimizer_files]
        if self.has_module_file:
            self._add_module(model, states)
        else:
            self._add_stage_3(model, states)

    def finish(self, model: ModelStates) -> Catalog:
        """Add the notes on what is not converted, and return the catalog with its tensors in the order of the files."""
        if model.not_converted:
            listed = ", ".join(model.not_converted[:_MAX_LISTED])
            more = ", ..." if len(model.not_converted) > _MAX_LISTED else ""
            self.catalog.notes.append(f"{model.file}: not converted: {listed}{more}")
        if model.other_values:
            self.catalog.notes.append(
                f"{model.file}: {counted(len(model.other_values), 'value')} other than tensors ignored, "
                f"{first_of(model.other_values)}"
            )
        in_order = sorted(self.catalog.tensors.values(), key=lambda entry: entry.chunks[0][1:3])
        self.catalog.tensors = {entry.name: entry for entry in in_order}
        return self.catalog

    def _check_files(self) -> None:
        """Check that the file names are those of one save, and that no data rank below the highest is missing."""
        if self.has_module_file and self.model_files:
            raise InputError(
                f"{self.where}: has {self.model_file} of stages 0 to 2 and {self.model_files[0].name} of stage 3; "
                "remove the files of one save"
            )
        if not self.has_module_file and (not self.model_files or self.model_files[0].rank):
            expected = f"zero_pp_rank_0_{self.model_file}" if self.model_files else self.model_file
            raise InputError(
                f"{self.where}: {expected} is missing, which has the names of the parameters; copy it from the machine "
                "that wrote it"
            )
        prefixes = {file.prefix for file in self.optimizer_files}
        if len(prefixes) > 1:
            first = {file.prefix: file.name for file in reversed(self.optimizer_files)}
            names = [first[prefix] for prefix in sorted(prefixes)]
            raise InputError(
                f"{self.where}: {' and '.join(names)} are of different saves; remove the files of one save"
            )
        ranks = {file.rank for file in self.optimizer_files}
        count = max(ranks, default=-1) + 1
        if count > MAX_RANKS:
            raise InputError(
                f"{self.where}: optimizer states of {count:,} ranks, the limit is {MAX_RANKS:,}; check the file names"
            )
        missing = [rank for rank in range(count) if rank not in ranks]
        if missing:
            numbers = ", ".join(map(str, missing[:_MAX_LISTED])) + (", ..." if len(missing) > _MAX_LISTED else "")
            raise InputError(
                f"{self.where}: {len(missing)} of {count} *_optim_states.pt files are missing, of ranks {numbers}; "
                "copy them from the machines that wrote them"
            )
        if not self.has_module_file and not count and self._requires_optimizer_files():
            raise InputError(
                f"{self.where}: the *_optim_states.pt files are missing, which have the parameters of stage 3; copy "
                "them from the machines that wrote them"
            )

    def _requires_optimizer_files(self) -> bool:
        """Return True: the parameters of stage 3 are in the files of the optimizer. Other readers override this."""
        return True

    # ---------------------------------------------------------------------------------------------------------- files

    def _open(self, base_name: str) -> SourceFiles:
        """Open the source to read one file, and add this file to the catalog; the caller closes the result."""
        name = self.directory + base_name
        files = self.source.open()
        self.catalog.identities[name] = identity = files.identity(name)
        self.catalog.files[name] = identity.nbytes
        return files

    def _read_model(self, base_name: str, is_stage_3: bool) -> ModelStates:
        with self._open(base_name) as files:
            return read_model_states(files, self.directory + base_name, is_stage_3=is_stage_3)

    def _read_optimizer(self, file: ZeroFile) -> RankState:
        with self._open(file.name) as files:
            return read_rank_state(files, self.directory + file.name)

    # ----------------------------------------------------------------------------------------------- stages 0, 1 and 2

    def _add_module(self, model: ModelStates, states: Sequence[RankState]) -> None:
        """Add the tensors of the state dict, and the optimizer state of stages 1 and 2."""
        self._add(model.tensors.values())
        if not states:
            self._note_absent_state(model)
            return
        groups = self._check_groups(model, states, stage=2)
        pairs: list[tuple[TensorEntry, TensorEntry]] = []
        for index in range(groups):
            shapes = model.param_shapes[index]
            masters = [state.groups[index].masters for state in states]
            paddings = states[0].alignment_paddings
            if paddings is not None and len(paddings) != groups:
                raise InputError(
                    f"{self.where}/{self.optimizer_files[0].name}: param_alignment_paddings are of {len(paddings)} "
                    f"groups, but there are {groups}; the file is damaged, copy it again"
                )
            partition = partition_by_group(
                shapes, None if paddings is None else paddings[index], masters, f"{self.source.location}"
            )
            partition.check(masters, f"{self.source.location}", f"the fp32 masters of group {index}")
            for name, shape in shapes.items():
                weight = self._weight(model, name, shape)
                master = TensorEntry(state_name(name, MASTER), masters[0].dtype, shape, partition.chunks(name, masters))
                pairs.append((weight, master))
            self._add(master for _, master in pairs[len(pairs) - len(shapes) :])
            self._add_state(index, shapes, partition, states, model)
        self._note_settings(states, model)
        with self.source.open(self.catalog.identities) as files:
            check_masters(files, pairs)

    def _note_absent_state(self, model: ModelStates) -> None:
        """Note that there are no optimizer states, or that they were not passed; stage 0 has none and gets no note."""
        listing = self.source.listing() if not self.directory else None
        has_files = listing is not None and any(
            found.kind == "optim" for name in listing if (found := parse_zero_file(name)) is not None
        )
        if has_files:
            self.catalog.notes.append(
                f"optimizer state not read, because {self.model_file} was passed; pass its directory to read it"
            )
        elif model.param_shapes:
            self.catalog.notes.append("optimizer state is missing: there are no *_optim_states.pt files")

    def _weight(self, model: ModelStates, name: str, shape: Shape) -> TensorEntry:
        """Return a weight in the state dict, which must have the shape in `param_shapes`."""
        weight = model.tensors.get(name)
        if weight is None or weight.shape != shape:
            found = "is missing" if weight is None else f"has shape {list(weight.shape)}"
            raise InputError(
                f'{self.source.location}/{model.file}: tensor "{name}" {found} in module, but param_shapes has '
                f"{list(shape)}; the file is damaged, copy it again"
            )
        return weight

    # -------------------------------------------------------------------------------------------------------- stage 3

    def _add_stage_3(self, model: ModelStates, states: Sequence[RankState]) -> None:
        """Add the parameters, whose values are the masters, the frozen parameters, the buffers and the moments."""
        groups = self._check_groups(model, states, stage=3)
        with self.source.open(self.catalog.identities) as files:
            refuse_copies(files, [[group.masters for group in state.groups] for state in states])
        parameters: dict[str, TensorEntry] = {}
        for index in range(groups):
            shapes = model.param_shapes[index]
            masters = [state.groups[index].masters for state in states]
            partition = partition_by_parameter(shapes, len(states))
            if partition.numel and not any(part.numel for part in masters):
                raise UnsupportedError(
                    f"{self.where}: the fp32 masters are empty, as with offload to NVMe; save the checkpoint without it"
                )
            partition.check(masters, f"{self.source.location}", f"the fp32 masters of group {index}")
            for name, shape in shapes.items():
                entry = TensorEntry(name, masters[0].dtype, shape, partition.chunks(name, masters))
                if parameters.setdefault(name, entry) is not entry:
                    raise self._duplicate_error(name)
            self._add_state(index, shapes, partition, states, model)
        for entry in self._frozen_entries(model, len(states)):
            if parameters.setdefault(entry.name, entry) is not entry:
                raise self._duplicate_error(entry.name)
        self._add(parameters.values())
        self._add(self._module_entries(model, parameters))
        self._note_settings(states, model)
        self._note_master_dtype(entry for name, entry in parameters.items() if name not in model.frozen_shapes)

    def _note_master_dtype(self, masters: Iterable[TensorEntry]) -> None:
        if {entry.dtype.name for entry in masters} == {"F32"}:
            self.catalog.notes.append(
                "the weights are the fp32 masters of the optimizer; pass --dtype bf16 or fp16 for the dtype of training"
            )

    def _module_entries(self, model: ModelStates, parameters: dict[str, TensorEntry]) -> Iterator[TensorEntry]:
        """Yield the tensors of `module` that are not in `parameters`: buffers, and tied names of parameters."""
        for name, entry in model.tensors.items():
            if name in parameters:
                continue
            stored = model.shared.get(name)
            if stored is not None and stored in parameters:
                yield parameters[stored].with_name(name)
            elif entry.numel:
                yield entry
            else:
                raise InputError(
                    f'{self.source.location}/{model.file}: tensor "{name}" is empty in module, and neither '
                    "param_shapes, frozen_param_shapes nor shared_params has it; the file is damaged, copy it again"
                )

    def _frozen_entries(self, model: ModelStates, ranks: int) -> Iterator[TensorEntry]:
        """Yield the frozen parameters, whose fragments are in the model states of all ranks."""
        if not model.frozen_shapes:
            return
        if [file.rank for file in self.model_files] != list(range(ranks)):
            found = {file.rank for file in self.model_files}
            missing = next((rank for rank in range(ranks) if rank not in found), ranks)
            raise InputError(
                f"{self.where}: zero_pp_rank_{missing}_{self.model_file} is "
                f"{'missing' if missing < ranks else 'of a rank without optimizer states'}, and the frozen parameters "
                "are spread over the files of all ranks; copy the files of one save"
            )
        fragments = {model.file: model.frozen_fragments}
        for file in self.model_files[1:]:
            with self._open(file.name) as files:
                name = self.directory + file.name
                fragments[name] = read_frozen_fragments(files, name)
        with self.source.open(self.catalog.identities) as files:
            refuse_copies(files, [list(parts.values()) for parts in fragments.values()])
        for name, shape in model.frozen_shapes.items():
            parts: list[FlatPart] = []
            for file_name, parts_by_name in fragments.items():
                part = parts_by_name.get(name)
                if part is None:
                    raise InputError(
                        f'{self.source.location}/{file_name}: frozen parameter "{name}" is missing, but {model.file} '
                        "lists it; the files are of different saves, copy them again"
                    )
                parts.append(part)
            partition = partition_by_parameter({name: shape}, ranks)
            partition.check(parts, f"{self.source.location}", f'frozen parameter "{name}"')
            yield TensorEntry(name, parts[0].dtype, shape, partition.chunks(name, parts))

    # ------------------------------------------------------------------------------------------------ optimizer state

    def _check_groups(self, model: ModelStates, states: Sequence[RankState], stage: int) -> int:
        """Check that all ranks have the groups of `param_shapes`; return their number.

        Args:
            model: Model states with `param_shapes`.
            states: Optimizer states of all data ranks.
            stage: 3, or 2 for stages 1 and 2, whose files are the same.
        """
        groups = len(model.param_shapes)
        for file, state in zip(self.optimizer_files, states, strict=True):
            where = f"{self.where}/{file.name}"
            if state.stage != stage:
                raise InputError(
                    f"{where}: of stage {'3' if state.stage == 3 else '1 or 2'}, but {model.file} is not; the files "
                    "are of different saves, copy those of one"
                )
            check_partition_counts(state.partition_counts, len(states), self.where)
            if len(state.groups) != groups and stage == 3:
                raise UnsupportedError(
                    f"{where}: has {counted(len(state.groups), 'group')} of masters, but param_shapes has {groups}, as "
                    f"in an old DeepSpeed; {ZERO_TO_FP32}"
                )
            if len(state.groups) != groups:
                raise InputError(
                    f"{where}: has {counted(len(state.groups), 'group')} of masters, but param_shapes has {groups}; "
                    "the files are of different saves, copy those of one"
                )
        return groups

    def _add_state(
        self,
        index: int,
        shapes: dict[str, Shape],
        partition: Partition,
        states: Sequence[RankState],
        model: ModelStates,
    ) -> None:
        """Add the moments and the step of each parameter of one group."""
        if model.has_zenflow:
            return
        group = states[0].groups[index]
        for key in sorted(group.flat.keys() & _MOMENTS):
            parts = self._state_parts(states, index, key)
            partition.check(parts, f"{self.source.location}", f"{key} of group {index}")
            self._add(
                TensorEntry(state_name(name, key), parts[0].dtype, shape, partition.chunks(name, parts))
                for name, shape in shapes.items()
            )
        if STEP in group.scalars:
            steps = self._state_parts(states, index, STEP, is_scalar=True)
            self._check_steps(steps)
            step = steps[0]
            chunk = Chunk(full_region(()), step.file, step.offset, step.dtype.itemsize, None, step.record)
            self._add(TensorEntry(state_name(name, STEP), step.dtype, (), (chunk,)) for name in shapes)

    def _state_parts(
        self, states: Sequence[RankState], index: int, key: str, *, is_scalar: bool = False
    ) -> list[FlatPart]:
        """Return one flat tensor or scalar of the optimizer from the file of each data rank.

        Args:
            states: Optimizer states of all data ranks.
            index: Index of the group.
            key: Name of the tensor, such as `exp_avg` or `step`.
            is_scalar: True if it is one number for the group, False if it has an element for each master.

        Raises:
            InputError: A rank does not have it.
        """
        parts: list[FlatPart] = []
        for file, state in zip(self.optimizer_files, states, strict=True):
            group = state.groups[index]
            part = (group.scalars if is_scalar else group.flat).get(key)
            if part is None:
                raise InputError(
                    f"{self.where}/{file.name}: {key} of group {index} is missing, but {self.optimizer_files[0].name} "
                    "has it; the files are of different saves, copy those of one"
                )
            parts.append(part)
        return parts

    def _check_steps(self, steps: Sequence[FlatPart]) -> None:
        """Check that the step is the same on all ranks, because files of several saves may have been mixed."""
        first = b""
        for step in steps:
            with self.source.open(self.catalog.identities) as files:
                value = files.read(step.file, step.offset, step.dtype.itemsize)
            first = first or value
            if value != first:
                raise InputError(
                    f"{self.source.location}/{step.file}: its optimizer step differs from that in {steps[0].file}; the "
                    "files are of different saves, copy those of one"
                )

    def _note_settings(self, states: Sequence[RankState], model: ModelStates) -> None:
        """Note that settings of the optimizer are not converted, and which other values of its state are not."""
        if model.has_zenflow:
            self.catalog.notes.append("optimizer state not converted: ZenFlow keeps a part of it in another form")
        ignored_keys = {
            key
            for group in states[0].groups
            for key in (*group.others, *(group.flat.keys() - _MOMENTS), *(group.scalars.keys() - {STEP}))
        }
        listed = "".join(f', "{key[:40]}"' for key in sorted(ignored_keys)[:_MAX_LISTED])
        self.catalog.notes.append(
            "optimizer settings are not read: learning rate, betas, loss scale and other values of param_groups"
            + listed
        )

    # -------------------------------------------------------------------------------------------------------- catalog

    def _add(self, entries: Iterable[TensorEntry]) -> None:
        for entry in entries:
            if entry.name in self.catalog.tensors:
                raise self._duplicate_error(entry.name)
            self.catalog.tensors[entry.name] = entry

    def _duplicate_error(self, name: str) -> InputError:
        return InputError(
            f'{self.where}: two tensors have the name "{name}"; the files are damaged or of different saves, copy them '
            "again"
        )


def missing_ranks_error(where: str, count: int, found: Sequence[int]) -> InputError:
    """Return the error for tensor parallel ranks without files.

    Args:
        where: Directory of the files.
        count: Number of tensor parallel ranks.
        found: Tensor parallel ranks that have files.
    """
    missing = [f"mp_rank_{rank:02d}" for rank in range(count) if rank not in found]
    more = ", ..." if len(missing) > _MAX_LISTED else ""
    return InputError(
        f"{where}: files of {count - len(missing)} of {count} tensor parallel ranks; copy those with "
        f"{', '.join(missing[:_MAX_LISTED])}{more} in their names from the machines that wrote them"
    )


def state_name(parameter: str, key: str) -> str:
    """Return the name of optimizer state, as in a DCP of `get_optimizer_state_dict`."""
    return f"optimizer.state.{parameter}.{key}"
