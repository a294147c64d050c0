"""Read a universal checkpoint, which `ds_to_universal` makes from the files of all ranks: one file per tensor.

    stages 0 to 2    weights from the model states, in the dtype of training; fp32.pt becomes the tensor `master_param`
    stage 3          weights from fp32.pt, which is flat: the shapes are in the model states

A file holds a dict with the tensor under `param`; in stage 3, and for `step`, the tensor itself. With
`--inject_missing_state`, frozen parameters, buffers and tied names have an fp32.pt, too: a copy in float32, which is
not read.

Source: `merge_tp_slices` and `merge_zero3_slices` in `deepspeed/checkpoint/ds_to_universal.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Shape, full_region
from ckptx.errors import InputError
from ckptx.formats.deepspeed.file_names import parse_parameter_file
from ckptx.formats.deepspeed.master_check import check_masters
from ckptx.formats.deepspeed.model_states import ModelStates
from ckptx.formats.deepspeed.optimizer_states import RankState
from ckptx.formats.deepspeed.pickles import damaged_error, load_optimizer_states
from ckptx.formats.deepspeed.step_reader import MASTER, StepReader, state_name
from ckptx.formats.torch_archive.archive import locate_tensor, open_archive
from ckptx.formats.torch_archive.unpickle import TensorRef, UnsupportedObject
from ckptx.storage.interface import Source
from ckptx.wording import counted, first_of

_FP32, _STEP, _TENSOR = "fp32", "step", "param"


class UniversalReader(StepReader):
    """Reader of a universal checkpoint.

    Attributes:
        files_by_parameter: Parameter -> name of a tensor of it, such as `fp32` or `exp_avg` -> file name, relative to
            `directory`.
    """

    def __init__(self, source: Source, names: Sequence[str], tp_rank: int = 0) -> None:
        super().__init__(source, [name for name in names if parse_parameter_file(name) is None], tp_rank)
        self.files_by_parameter: dict[str, dict[str, str]] = {}
        for name in names:
            if (parsed := parse_parameter_file(name)) is not None:
                self.files_by_parameter.setdefault(parsed[0], {})[parsed[1]] = name[len(self.directory) :]

    def _requires_optimizer_files(self) -> bool:
        return False

    def _add_module(self, model: ModelStates, states: Sequence[RankState]) -> None:
        self._add(model.tensors.values())
        shapes = self._shapes(model)
        pairs = [
            (self._weight(model, name, shape), self._read_tensor(name, _FP32, shape, state_name(name, MASTER)))
            for name, shape in shapes.items()
        ]
        with self.source.open(self.catalog.identities) as files:
            check_masters(files, pairs)
        self._add(master for _, master in pairs)
        self._add_optimizer(model, shapes)

    def _add_stage_3(self, model: ModelStates, states: Sequence[RankState]) -> None:
        shapes = self._shapes(model)
        parameters = {name: self._read_tensor(name, _FP32, shape, name) for name, shape in shapes.items()}
        for entry in self._frozen_entries(model, len(self.model_files)):
            if parameters.setdefault(entry.name, entry) is not entry:
                raise self._duplicate_error(entry.name)
        self._add(parameters.values())
        self._add(self._module_entries(model, parameters))
        self._note_master_dtype(parameters[name] for name in shapes)
        self._add_optimizer(model, shapes)

    def _shapes(self, model: ModelStates) -> dict[str, Shape]:
        """Return the shapes of the parameters of all groups."""
        shapes: dict[str, Shape] = {}
        for group in model.param_shapes:
            for name, shape in group.items():
                if name in shapes:
                    raise self._duplicate_error(name)
                shapes[name] = shape
        return shapes

    def _add_optimizer(self, model: ModelStates, shapes: dict[str, Shape]) -> None:
        """Add the tensors of the optimizer, which must be the same ones for every parameter."""
        keys = sorted({key for name in shapes for key in self.files_by_parameter.get(name, ())} - {_FP32})
        for key in keys:
            self._add(
                self._read_tensor(name, key, () if key == _STEP else shape, state_name(name, key))
                for name, shape in shapes.items()
            )
        copies = sorted(self.files_by_parameter.keys() - shapes.keys())
        if copies:
            self.catalog.notes.append(
                f"float32 copies of {counted(len(copies), 'tensor')} that the optimizer does not update are not read, "
                f"because the model states have them: {first_of(copies)}"
            )
        unknown = [name for name in copies if name not in self.catalog.tensors]
        if unknown:
            raise InputError(
                f"{self.where}/zero: has {counted(len(unknown), 'parameter')} that {model.file} does not have, "
                f"{first_of(unknown)}; the files are of different saves, convert the step again with ds_to_universal"
            )
        if _STEP not in keys:
            self.catalog.notes.append(
                "step.pt is missing, as after ds_to_universal of stage 3, so that the optimizer state has no step"
            )
        self.catalog.notes.append(
            "optimizer settings are not read: learning rate, betas and other values of zero/optimizer_state.pt"
        )

    def _read_tensor(self, parameter: str, key: str, shape: Shape, name: str) -> TensorEntry:
        """Return the tensor in one file of `zero/`, with the shape in the model states.

        Args:
            parameter: Name of the parameter.
            key: Name of the tensor of this parameter, such as `fp32` or `exp_avg`.
            shape: Shape in the model states; the file may have a flat tensor of as many elements.
            name: Name of the result.

        Raises:
            InputError: The file is missing or damaged, or has a tensor of another size.
        """
        file = self.files_by_parameter.get(parameter, {}).get(key)
        if file is None:
            raise InputError(
                f'{self.where}/zero/{parameter}: {key}.pt is missing, but the model states list "{parameter}"; copy it '
                "from the machine that wrote it"
            )
        path = self.directory + file
        with self._open(file) as files:
            where = f"{files.root / path}"
            archive = open_archive(partial(files.read, path), 0, files.size(path), where, load_optimizer_states)
        value = archive.tree.get(_TENSOR) if isinstance(archive.tree, dict) else archive.tree
        if not isinstance(value, TensorRef | UnsupportedObject):
            raise damaged_error(where, "has no tensor")
        payload = locate_tensor(value, archive.records, where)
        if payload.strides is not None or payload.dtype.pack > 1:
            raise damaged_error(where, "not a row-major tensor")
        region = full_region(shape)
        if payload.torch_shape not in (shape, (region.numel,)):
            raise InputError(
                f"{where}: has shape {list(payload.torch_shape)}, but the model states have {list(shape)}; the files "
                "are of different saves, convert the step again with ds_to_universal"
            )
        chunk = Chunk(region, path, payload.data_offset, payload.nbytes, None, payload.record)
        return TensorEntry(name, payload.dtype, shape, (chunk,))
