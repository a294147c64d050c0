"""Read what a Megatron `torch_dist` checkpoint records about its training run: the arguments and the optimizer step.

    common.pt                        a pickle of a dict; megatron-core 0.16 and earlier
    common_state/shard_0_1           the same pickle, as an object in the DCP; later versions

    {"args": argparse.Namespace(...), "optimizer": {"optimizer": {"param_groups": [{"step": 1000, ...}]}}, ...}

Nothing in the pickle is imported or called: objects of other classes, such as enums and functions, become stand-ins.
Checkpoints of Megatron Bridge have no `args`, but a `run_config.yaml`, see `megatron_run_config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
_MAX_DEPTH = 8  # levels of dicts and lists around a `step`; chained optimizers are a list
_MAX_NBYTES = 64 << 20  # arguments take 20 KB; optimizers with a step for each parameter take more


class CommonState(NamedTuple):
    """State that is equal on all ranks.

    Attributes:
        where: The file or object that records it, for messages.
        values: Contents of the pickled dict, with stand-ins for objects.
    """

    where: str
    values: Mapping[Any, Any]

    def arguments(self) -> dict[str, Any] | None:
        """Return the arguments of the run by name, such as `num_layers`; None if none are recorded."""
        arguments = self.values.get("args")
        if not isinstance(arguments, UnknownObject) or type(arguments).class_name != _NAMESPACE:
            return None
        states = [each for each in arguments.contents if isinstance(each, dict)]
        return {str(key): value for each in states for key, value in each.items()}

    def optimizer_steps(self) -> set[int | float]:
        """Return the steps that optimizers and their parameter groups record; empty if none does."""
        return set(_find_steps(self.values.get("optimizer"), 0))


def read_common_state(catalog: Catalog, files: SourceFiles) -> CommonState | None:
    """Return the common state of a checkpoint; None if it has none, or if the pickle is not a dict.

    Args:
        catalog: Catalog of the checkpoint.
        files: Its open files.

    Raises:
        InputError: The pickle is damaged, or larger than 64 MiB.
        UnsupportedError: The pickle is in a format of `torch.save` that is not read.
        ReadError: The storage failed.
    """
    if catalog.source.listing().is_file(COMMON_FILE):
        return _read_pickle(files, COMMON_FILE, 0, files.size(COMMON_FILE), f"{files.root / COMMON_FILE}")
    for name, entry in catalog.objects.items():
        if name.partition("/")[0] == _COMMON_OBJECT:
            where = f'{files.root / entry.file}: object "{name}"'
            return _read_pickle(files, entry.file, entry.offset, entry.nbytes, where)
    return None


def _read_pickle(files: SourceFiles, file: str, offset: int, nbytes: int, where: str) -> CommonState | None:
    if nbytes > _MAX_NBYTES:
        raise InputError(f"{where}: has {nbytes:,} bytes, more than {_MAX_NBYTES:,}; save it without tensors")
    load_tree = partial(load_torch, unknown=UnknownNames())
    tree = open_archive(partial(files.read, file), offset, nbytes, where, load_tree).tree
    return CommonState(where, tree) if isinstance(tree, dict) else None


def _find_steps(value: object, depth: int) -> Iterator[int | float]:
    """Yield the numbers under `step` and `common_step` at any place in the state of the optimizers."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, dict):
        for key, child in value.items():
            if key in ("step", "common_step"):
                if isinstance(child, int | float) and not isinstance(child, bool):
                    yield child
            else:
                yield from _find_steps(child, depth + 1)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _find_steps(child, depth + 1)
