"""Read the arguments of the training run that a Megatron `torch_dist` checkpoint records.

    common.pt                        a pickle with `args`, an `argparse.Namespace`; megatron-core 0.16 and earlier
    common_state/shard_0_1           the same pickle, as an object in the DCP; later versions

Nothing in the pickle is imported or called: objects of other classes, such as enums and functions, become stand-ins.
Checkpoints of Megatron Bridge have no `args`, but a `run_config.yaml`, which is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.errors import InputError
from ckptx.formats.dcp.megatron import COMMON_FILE
from ckptx.formats.torch_archive.archive import open_archive
from ckptx.formats.torch_archive.unknown_objects import UnknownNames, UnknownObject
from ckptx.formats.torch_archive.unpickle import load_torch
from ckptx.storage.interface import SourceFiles

_COMMON_OBJECT = "common_state"
_NAMESPACE = "argparse.Namespace"
_MAX_NBYTES = 64 << 20  # arguments take 20 KB; optimizers with a step for each parameter take more


class RecordedArguments(NamedTuple):
    """Arguments of a training run.

    Attributes:
        where: The file or object that records them.
        values: Value by name, as in `args.num_layers`; objects are stand-ins.
    """

    where: str
    values: Mapping[str, Any]


def read_arguments(catalog: Catalog, files: SourceFiles) -> RecordedArguments | None:
    """Return the recorded arguments of a checkpoint; None if it records none.

    Args:
        catalog: Catalog of the checkpoint.
        files: Its open files.

    Raises:
        InputError: The pickle is damaged, or larger than 64 MiB.
        UnsupportedError: The pickle is in a format of `torch.save` that is not read.
        ReadError: The storage failed.
    """
    if catalog.source.listing().is_file(COMMON_FILE):
        return _arguments_in(files, COMMON_FILE, 0, files.size(COMMON_FILE), f"{files.root / COMMON_FILE}")
    for name, entry in catalog.objects.items():
        if name.partition("/")[0] == _COMMON_OBJECT:
            where = f'{files.root / entry.file}: object "{name}"'
            return _arguments_in(files, entry.file, entry.offset, entry.nbytes, where)
    return None


def _arguments_in(files: SourceFiles, file: str, offset: int, nbytes: int, where: str) -> RecordedArguments | None:
    if nbytes > _MAX_NBYTES:
        raise InputError(f"{where}: has {nbytes:,} bytes, more than {_MAX_NBYTES:,}; save it without tensors")
    load_tree = partial(load_torch, unknown=UnknownNames())
    tree = open_archive(partial(files.read, file), offset, nbytes, where, load_tree).tree
    arguments = tree.get("args") if isinstance(tree, dict) else None
    if not isinstance(arguments, UnknownObject) or type(arguments).class_name != _NAMESPACE:
        return None
    states = [each for each in arguments.contents if isinstance(each, dict)]
    return RecordedArguments(where, {str(key): value for each in states for key, value in each.items()})
