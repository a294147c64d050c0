"""Read the model states of one rank: the state dict of the module, and the names and shapes of the parameters.

    module                    the state dict; in stage 3, an empty tensor stands for each parameter
    param_shapes              for each group of the optimizer, the shapes of its parameters, in their flat order
    frozen_param_shapes       the shapes of parameters without gradients
    frozen_param_fragments    in stage 3, the range of each frozen parameter on this rank, as a flat tensor
    shared_params             name of a tied parameter -> name under which it is stored; filled by rank 0 only

    buffer_names              names in `module` that are not parameters
    mp_world_size             number of tensor parallel ranks
    global_steps              number of steps so far
    universal_checkpoint_info    how tensor parallelism shards each parameter, see `tensor_parallel_rules`

The remaining keys are the optimizer of stage 0, the scheduler, settings, counters, and what the training script passed
as `client_state`.

Source: `_save_checkpoint` in `deepspeed/runtime/engine.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Chunk, Record, TensorEntry
from ckptx.catalog.region import Shape, full_region
from ckptx.errors import UnsupportedError
from ckptx.formats.deepspeed.flat_chunks import FlatPart
from ckptx.formats.deepspeed.pickles import (
    damaged_error,
    load_model_states,
    read_shapes,
    require_dict,
    require_list,
    require_name,
)
from ckptx.formats.torch_archive.archive import locate_tensor, open_archive
from ckptx.formats.torch_archive.unpickle import TensorRef, UnsupportedObject
from ckptx.formats.unsupported import SAVE_WHERE_TRAINED
from ckptx.storage.interface import SourceFiles

# Keys that are not reported as not converted: those that are read, and those that only describe the checkpoint.
_DESCRIPTION = frozenset(
    {
        "module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
        "ds_config", "ds_version", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "global_steps",
        "global_samples", "skipped_steps", "sparse_tensor_module_names", "ds_autoep_layers",
    }
)  # fmt: skip
_AUTO_EP = "ds_autoep_layers"


class ModelStates(NamedTuple):
    """The model states of one rank.

    Attributes:
        file: File name.
        tensors: The tensors in `module`, by name.
        other_values: Names in `module` of values that are not tensors.
        param_shapes: For each group of the optimizer, the shapes of its parameters by name, in their flat order; empty
            in stage 0.
        frozen_shapes: Shapes of frozen parameters, by name.
        frozen_fragments: Range of each frozen parameter on this rank, by name; empty below stage 3.
        shared: Name of a tied parameter -> name under which it is stored.
        not_converted: Keys of values that are not converted, such as the scheduler.
        has_zenflow: True if the optimizer is ZenFlow's, which keeps moments outside of the flat tensors.
        buffers: Names in `module` that are not parameters.
        tp_size: Number of tensor parallel ranks; None if not recorded.
        global_steps: Number of steps so far; None if not recorded.
        tensor_parallel_info: The value of `universal_checkpoint_info`, not checked.
    """

    file: str
    tensors: dict[str, TensorEntry]
    other_values: tuple[str, ...]
    param_shapes: tuple[dict[str, Shape], ...]
    frozen_shapes: dict[str, Shape]
    frozen_fragments: dict[str, FlatPart]
    shared: dict[str, str]
    not_converted: tuple[str, ...]
    has_zenflow: bool
    buffers: frozenset[str]
    tp_size: int | None
    global_steps: int | None
    tensor_parallel_info: object


def read_model_states(files: SourceFiles, name: str, *, is_stage_3: bool) -> ModelStates:
    """Read the pickle of one file of model states.

    Args:
        files: Files of the checkpoint.
        name: Name of the file.
        is_stage_3: True if the file is of one data rank of stage 3, whose frozen parameters are fragments.

    Raises:
        InputError: The file is damaged.
        UnsupportedError: It is of a pipeline, of experts in stage 3, or has tensors that are not converted.
    """
    where = f"{files.root / name}"
    archive = open_archive(partial(files.read, name), 0, files.size(name), where, load_model_states)
    tree = require_dict(archive.tree, where)
    module = tree.get("module")
    if module is None:
        raise UnsupportedError(
            f"{where}: has no module, so its layers are in files of pipeline stages, which are not supported; "
            f"{SAVE_WHERE_TRAINED}"
        )
    _refuse_partitioned_experts(tree.get(_AUTO_EP), where)
    tensors, other_values = _read_module(require_dict(module, where), archive.records, name, where)
    return ModelStates(
        name,
        tensors,
        other_values,
        tuple(
            read_shapes(group, where) for group in require_list(tree.get("param_shapes") or [], where, "param_shapes")
        ),
        read_shapes(tree.get("frozen_param_shapes") or {}, where),
        _read_fragments(tree.get("frozen_param_fragments"), archive.records, name, where) if is_stage_3 else {},
        _read_shared(tree.get("shared_params"), where),
        tuple(
            sorted(
                str(key)[:40]
                for key, value in tree.items()
                if type(key) is str and key not in _DESCRIPTION and not _is_empty(value)
            )
        ),
        _has_zenflow(tree.get("ds_config")),
        _read_buffers(tree.get("buffer_names")),
        _number(tree.get("mp_world_size")),
        _number(tree.get("global_steps")),
        tree.get("universal_checkpoint_info"),
    )


def read_frozen_fragments(files: SourceFiles, name: str) -> dict[str, FlatPart]:
    """Return the range of each frozen parameter in the model states of one rank of stage 3, by name.

    Raises:
        InputError: The file is damaged.
        UnsupportedError: They are quantized.
    """
    where = f"{files.root / name}"
    archive = open_archive(partial(files.read, name), 0, files.size(name), where, load_model_states)
    tree = require_dict(archive.tree, where)
    return _read_fragments(tree.get("frozen_param_fragments"), archive.records, name, where)


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, dict | list | tuple) and not value)


def _read_buffers(names: object) -> frozenset[str]:
    return frozenset(name for name in names if type(name) is str) if isinstance(names, list | tuple) else frozenset()


def _number(value: object) -> int | None:
    """Return an integer unchanged, and None for any other value."""
    return value if type(value) is int else None


def _has_zenflow(config: object) -> bool:
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(zero, dict) and not _is_empty(zero.get("zenflow"))


def _refuse_partitioned_experts(layers: object, where: str) -> None:
    """Refuse experts that AutoEP partitioned in stage 3 over groups of ranks that no file records.

    Raises:
        UnsupportedError: There are some.
    """
    values = layers.values() if isinstance(layers, dict) else layers if isinstance(layers, list) else ()
    if any(isinstance(layer, dict) and layer.get("checkpoint_format") == "zero3_partitioned" for layer in values):
        raise UnsupportedError(
            f"{where}: has experts that AutoEP partitioned in stage 3, which is not supported; {SAVE_WHERE_TRAINED}"
        )


def _read_module(
    module: Mapping[Any, Any], records: dict[str, Record], file: str, where: str
) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """Return the tensors of a state dict, and the names of its other values.

    Only the first tensor of each storage gets its record, so that a storage is checked against its checksum only once:
    all tensors of a group may share one.
    """
    tensors: dict[str, TensorEntry] = {}
    others: list[str] = []
    chunks: dict[str, Chunk] = {}
    checked: set[str] = set()
    for key, value in module.items():
        name = require_name(key, where)
        if not isinstance(value, TensorRef | UnsupportedObject):
            others.append(name)
            continue
        payload = locate_tensor(value, records, f'{where}: tensor "{name}"')
        dtype, shape = payload.dtype, payload.torch_shape
        if dtype.pack > 1:
            raise UnsupportedError(
                f'{where}: tensor "{name}": dtype {dtype.torch_name} is not supported in DeepSpeed checkpoints; '
                "save it with save_pretrained"
            )
        assert isinstance(value, TensorRef)
        position = repr((payload.data_offset, payload.nbytes, shape, payload.strides))
        if position not in chunks:
            record = None if value.storage.key in checked else payload.record
            checked.add(value.storage.key)
            location = file, payload.data_offset, payload.nbytes, payload.strides, record
            chunks[position] = Chunk(full_region(shape), *location)
        tensors[name] = TensorEntry(name, dtype, shape, (chunks[position],))
    return tensors, tuple(others)


def _read_fragments(value: object, records: dict[str, Record], file: str, where: str) -> dict[str, FlatPart]:
    if value is None:
        return {}
    fragments: dict[str, FlatPart] = {}
    for key, fragment in require_dict(value, where).items():
        name = require_name(key, where)
        subject = f'{where}: frozen parameter "{name}"'
        if not isinstance(fragment, TensorRef | UnsupportedObject):
            raise damaged_error(subject, "not a tensor")
        payload = locate_tensor(fragment, records, subject)
        if payload.strides is not None or len(payload.torch_shape) != 1:
            raise damaged_error(subject, "not a flat tensor")
        _refuse_quantized(payload.dtype, subject)
        fragments[name] = FlatPart(payload.dtype, payload.torch_shape[0], file, payload.data_offset, payload.record)
    return fragments


def _refuse_quantized(dtype: DType, where: str) -> None:
    """Refuse fragments of `zero_quantized_nontrainable_weights`, whose scales DeepSpeed does not save.

    Raises:
        UnsupportedError: The dtype is that of such fragments.
    """
    if dtype.pack > 1 or dtype.name == "I8":
        raise UnsupportedError(
            f"{where}: dtype {dtype.torch_name}, as with zero_quantized_nontrainable_weights, whose scales are not "
            f"saved; {SAVE_WHERE_TRAINED}"
        )


def _read_shared(value: object, where: str) -> dict[str, str]:
    pairs = require_dict({} if value is None else value, where).items()
    return {require_name(name, where): require_name(stored, where) for name, stored in pairs}
