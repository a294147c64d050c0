"""Open per-rank FSDP files as one checkpoint.

Every file contains every name. A DTensor or ShardedTensor records the region of its rank, a plain tensor is the whole;
regions on several ranks are replicas, which are compared when the tensor is read. Only the zip directory and the pickle
of each file are read here.

verl's optimizer files are not converted: they are keyed by parameter index, and no file maps an index to a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import Chunk, Record
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.fsdp.file_names import STATE_FILE_PATTERN, RankFile, parse_rank_file
from ckptx.formats.fsdp.pickled_tensors import RankShards, load_state_dict, shards_of_rank
from ckptx.formats.hf.torch_bin import describe_value, is_utf8
from ckptx.formats.rank_tensors import RankTensors
from ckptx.formats.torch_archive.archive import locate_tensor, open_archive
from ckptx.formats.torch_archive.unpickle import without_garbage_collection
from ckptx.storage.interface import Source, SourceFiles
from ckptx.untrusted.json_text import parse_json
from ckptx.untrusted.limits import MAX_CONFIG_BYTES, MAX_RANKS
from ckptx.wording import counted

_CONFIG = "fsdp_config.json"
_FLAT_PARAMETERS = ("_flat_param", "flat_param")


def open_fsdp(source: Source, names: Sequence[str]) -> Catalog:
    """Return the catalog of per-rank FSDP files.

    Args:
        source: The directory.
        names: File names of one world size, see `RankFile.name`.

    Raises:
        InputError: A rank has no file, a file is damaged or of another save, or the ranks do not cover a tensor.
        UnsupportedError: A file contains more than named dense tensors, or FSDP1's flat parameters without names.
    """
    rank_files = [found for name in names if (found := parse_rank_file(name)) is not None]
    _check_ranks(source, rank_files)
    catalog = Catalog(source.location, "fsdp", {}, opened_source=source)
    state_dicts = _StateDicts()
    with without_garbage_collection():
        for file in rank_files:
            with source.open() as files:
                identity = files.identity(file.name)
                catalog.files[file.name], catalog.identities[file.name] = identity.nbytes, identity
                state_dicts.add(files, file)
        catalog.tensors = state_dicts.tensors.entries(str(source.location))
    catalog.notes.extend(_state_file_notes(source))
    return catalog


def _check_ranks(source: Source, files: Sequence[RankFile]) -> None:
    """Check that every rank of the world size has a file.

    Raises:
        InputError: A file is missing, or `fsdp_config.json` has another world size.
    """
    world_size = files[0].world_size
    if world_size > MAX_RANKS:
        raise InputError(
            f"{source.location}: per-rank FSDP files of {world_size:,} ranks, the limit is {MAX_RANKS:,}; "
            "check the file names"
        )
    ranks = {file.rank for file in files}
    missing = [RankFile(world_size, rank).name for rank in islice(_missing_ranks(ranks, world_size), 4)]
    if missing:
        more = f" and {world_size - len(ranks) - 3} more" if len(missing) > 3 else ""
        raise InputError(
            f"{source.location}: {world_size - len(ranks)} of {world_size} per-rank FSDP files are missing "
            f"({', '.join(missing[:3])}{more}); copy them from the machines that wrote them"
        )
    if not source.listing().has(_CONFIG):
        return
    where = source.location / _CONFIG
    config = parse_json(source.read_small(_CONFIG, MAX_CONFIG_BYTES).decode("utf-8", "replace"), where)
    recorded = config.get("world_size") if isinstance(config, dict) else None
    if type(recorded) is int and recorded != world_size:
        raise InputError(
            f"{where}: world_size is {recorded}, but there are files of {world_size} ranks; some files are of another "
            "save, remove those"
        )


def _missing_ranks(ranks: set[int], world_size: int) -> Iterator[int]:
    return (rank for rank in range(world_size) if rank not in ranks)


def _state_file_notes(source: Source) -> Iterator[str]:
    """Yield notes about optimizer and trainer state files, which are not converted."""
    state = [name for name in source.listing() if re.fullmatch(STATE_FILE_PATTERN, name)]
    optimizer = [name for name in state if name.startswith("optim")]
    if optimizer:
        yield (
            f"optimizer state not converted: {counted(len(optimizer), 'optim_world_size_* file')}, keyed by parameter "
            "index instead of name"
        )
    if len(optimizer) < len(state):
        others = counted(len(state) - len(optimizer), "extra_state_world_size_* file")
        yield f"{others} (scheduler and RNG state) not converted"


class _StateDicts:
    """Merges the state dicts of the ranks that were read.

    Attributes:
        tensors: The shards of each tensor.
    """

    def __init__(self) -> None:
        self._first_file = ""  # name of the file that was added first; empty before
        self.tensors = RankTensors()

    def add(self, files: SourceFiles, file: RankFile) -> None:
        """Add the state dict of one rank.

        Raises:
            InputError, UnsupportedError: See `open_fsdp`.
        """
        where = f"{files.root / file.name}"
        archive = open_archive(partial(files.read, file.name), 0, files.size(file.name), where, load_state_dict)
        if not isinstance(archive.tree, dict):
            raise UnsupportedError(
                f"{where}: expected a dict of named tensors, found {describe_value(archive.tree)}; save "
                "model.state_dict()"
            )
        _refuse_flat(archive.tree, where)
        for name, value in archive.tree.items():
            if type(name) is not str or not is_utf8(name):
                raise UnsupportedError(
                    f"{where}: expected tensor names as keys, found a key of type {type(name).__name__}; save "
                    "model.state_dict()"
                )
            subject = f'{where}: tensor "{name}"'
            shards = shards_of_rank(value, file.rank, subject)
            if self._first_file and name not in self.tensors.names:
                raise InputError(
                    f"{subject}: {self._first_file} has no such tensor; the files are of different saves, pass those "
                    "of one"
                )
            dtype, chunks = locate_shards(shards, archive.records, file.name, subject)
            self.tensors.add(name, dtype, shards.shape, chunks, file.name, subject)
        if not self._first_file:
            self._first_file = file.name
        elif len(archive.tree) != len(self.tensors.names):
            missing = next(name for name in self.tensors.names if name not in archive.tree)
            raise InputError(
                f'{where}: tensor "{missing}" is missing, but {self._first_file} contains it; the files are of '
                "different saves, pass those of one"
            )


def locate_shards(
    shards: RankShards, records: dict[str, Record], file: str, where: str
) -> tuple[DType | None, list[Chunk]]:
    """Return the dtype of a tensor, and its shards in the archive of one rank.

    Args:
        shards: Shards on the rank. If there are none, the dtype is None.
        records: Storage key -> record of the storage, see `Archive`.
        file: Name of the file, relative to the root of the checkpoint.
        where: The tensor in the file, for error messages.

    Raises:
        InputError: See `locate_tensor`.
        UnsupportedError: See `locate_tensor`; or several elements share a byte.
    """
    chunks, dtype = [], None
    for local, region in shards.local_shards:
        payload = locate_tensor(local, records, where)
        if payload.dtype.pack > 1:
            raise UnsupportedError(
                f"{where}: dtype {payload.dtype.torch_name} is not supported in the files of ranks; save it as a DCP"
            )
        dtype = payload.dtype
        chunks.append(Chunk(region, file, payload.data_offset, payload.nbytes, payload.strides, payload.record))
    return dtype, chunks


def _refuse_flat(tree: dict[Any, Any], where: str) -> None:
    """Refuse FSDP1's LOCAL_STATE_DICT: one flat vector per wrapped module.

    Raises:
        UnsupportedError: The state dict is one.
    """
    for name in tree:
        if type(name) is str and name.rpartition(".")[2] in _FLAT_PARAMETERS:
            raise UnsupportedError(
                f'{where}: "{name[:80]}" is a flat parameter of FSDP1 (LOCAL_STATE_DICT), which does not record the '
                "parameters in it; save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT"
            )
