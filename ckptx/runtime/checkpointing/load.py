"""Fills the parameters of a model from a checkpoint: on each rank its shards, and no tensor may stay uninitialized.

model names --- OpenCheckpoint (any format, any naming) ---> entries: byte ranges in files
parameters  --- shards.local_shards_of ---> rectangles of this rank, and their place in its memory
both        --- RegionReader.fill, in threads, in the order of the files ---> loaded
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ckptx.catalog.entry import ArchivedChunks, TensorEntry
from ckptx.catalog.region import Region
from ckptx.errors import InputError, UnsupportedError, UsageError
from ckptx.runtime.checkpointing.load_report import LACKING, NO_PLACE, UNKNOWN, LoadedTensor, LoadLedger
from ckptx.runtime.checkpointing.reading import OpenCheckpoint, RegionReader, open_source, target_dtype
from ckptx.runtime.model.layers import canonical_name, has_stubs
from ckptx.runtime.parallel.shards import LocalShard, local_shards_of
from ckptx.runtime.torch_private import local_tensor

RegionsOf = Callable[[str], "Sequence[Region] | None"]

_WORKERS = 4
# Old checkpoints may or may not contain these; transformers computes them either way.
_COMPUTED = r"(^|\.)(position_ids|rotary_emb\.inv_freq)$"

_logger = logging.getLogger(__name__)


def load(
    model: nn.Module,
    root: Path,
    *,
    regions: RegionsOf | None = None,
    config: Mapping[str, Any] | None = None,
    prefix: str | None = None,
    workers: int | None = None,
    trust_remote_code: bool = False,
) -> LoadLedger:
    """Load this rank's shards of every parameter and persistent buffer.

    Args:
        model: Materialized model; plain, sharded by TP or FSDP, or a pipeline stage.
        root: Checkpoint in any format that ckptx reads.
        regions: Returns for a parameter name the rectangles of the whole tensor that TP left on this rank, in the order
            of its memory; None for a parameter whose DTensor or shape is sufficient.
        config: Replaces the `config.json` of the checkpoint; None uses that file, or else the model's own config.
        prefix: See `open_source`.
        workers: Number of reading threads; None means up to 4.
        trust_remote_code: See `build_model`.

    Raises:
        InputError: A tensor is missing, the files are damaged, or tied names have different values.
        UnsupportedError: A shape or dtype does not match.
        UsageError: The model has no storage yet.
    """
    config = config or _config_for(model, root)
    with open_source(root, config=config, prefix=prefix, trust_remote_code=trust_remote_code) as source:
        return load_from(model, source, regions=regions, workers=workers)


def load_from(
    model: nn.Module,
    source: OpenCheckpoint,
    *,
    regions: RegionsOf | None = None,
    workers: int | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> LoadLedger:
    """Load like `load`, from a checkpoint that is open.

    `tied` has names that the checkpoint may store under another name although the model does not tie them
    (see `OpenCheckpoint.tied`).
    """
    plan = _plan(model, source, regions, tied)
    reader = RegionReader(source.files)
    with torch.no_grad():
        _run((partial(reader.fill, *job) for job in plan.jobs()), workers)
        _run((partial(_compare_tied, reader, tie, *job) for tie in plan.ties for job in tie.jobs()), workers)
        retie(model)
    _logger.info(
        "%s: %d tensors loaded, %d tied, %d initialized, %d bytes read of %s", type(model).__name__, len(plan.loaded),
        len(plan.tied), len(plan.initialized), reader.bytes_read, source.files.root,
    )  # fmt: skip
    return LoadLedger(
        loaded=plan.loaded,
        tied=plan.tied,
        initialized=plan.initialized,
        unread=source.unread | _unread(source, plan),
        bytes_read=reader.bytes_read,
        unchecked=reader.unchecked,
    )


def find_differing(
    model: nn.Module,
    source: OpenCheckpoint,
    *,
    regions: RegionsOf | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Return the names whose shards on this rank are not byte for byte what `load_from` would read from `source`.

    Raises:
        InputError, UnsupportedError: See `load`.
    """
    plan = _plan(model, source, regions, tied)
    reader = RegionReader(source.files)
    return [read.name for read in plan.reads if not all(reader.is_equal(*job) for job in read.jobs())]


def find_unread(
    model: nn.Module,
    source: OpenCheckpoint,
    *,
    regions: RegionsOf | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the names on disk that `load_from` would not read from `source`, with the reason; see `LoadLedger.unread`.

    Raises:
        InputError, UnsupportedError: See `load`.
    """
    return source.unread | _unread(source, _plan(model, source, regions, tied))


def _config_for(model: nn.Module, root: Path) -> Mapping[str, Any] | None:
    """Return the model's own config for a checkpoint without one; None if it has one."""
    directory = root if root.is_dir() else root.parent
    own = getattr(model, "config", None)
    return None if own is None or (directory / "config.json").is_file() else own.to_dict()


# ------------------------------------------------------------------------------------------ what to read


class RegionRead(NamedTuple):
    """A region of an entry, and the memory that it is read into."""

    entry: TensorEntry
    region: Region
    target: Tensor


@dataclass(frozen=True, slots=True)
class _TensorRead:
    """A parameter or buffer of this rank that is read from an entry, or compared with one."""

    name: str
    other: str
    entry: TensorEntry
    local: Tensor
    shards: list[LocalShard]

    def jobs(self) -> Iterator[RegionRead]:
        for shard in self.shards:
            yield RegionRead(self.entry, shard.region, _narrow(self.local, shard.local))


@dataclass(slots=True)
class _LoadPlan:
    reads: list[_TensorRead] = field(default_factory=list)
    ties: list[_TensorRead] = field(default_factory=list)
    loaded: dict[str, LoadedTensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    initialized: tuple[str, ...] = ()
    used: set[str] = field(default_factory=set)

    def jobs(self) -> list[RegionRead]:
        """Return the reads in the order of the files."""
        return sorted((job for read in self.reads for job in read.jobs()), key=_position)


def _position(job: RegionRead) -> tuple[str, int]:
    chunks = job.entry.chunks
    first = next(iter(chunks.archives if isinstance(chunks, ArchivedChunks) else chunks), None)
    return ("", 0) if first is None else (first.file, first.offset)


def _plan(model: nn.Module, source: OpenCheckpoint, regions: RegionsOf | None, tied: Mapping[str, str]) -> _LoadPlan:
    """Plan which entry fills which tensor, and refuse everything that can be refused without reading."""
    names = _names_by_tensor(model)
    families = _families([*(getattr(model, "all_tied_weights_keys", None) or {}).items(), *tied.items()])
    optional, is_partial = _optional(model), has_stubs(model)
    plan, missing, computed = _LoadPlan(), [], list(_computed_buffers(model))
    for tensor, own in names:
        if tensor.is_meta:
            raise UsageError(f"{own[0]}: is on the meta device; call materialize first")
        family = list(dict.fromkeys([*own, *(name for each in own for name in families.get(each, ()))]))
        stored = [name for name in family if name in source.tensors]
        if is_partial and not {*own}.isdisjoint(stored):
            stored = [name for name in stored if name in own]  # the other copy belongs to another stage
        if stored:
            _add(plan, source, tensor, own, stored, regions)
        elif optional.search(own[0]) and not isinstance(tensor, nn.Parameter):
            computed.append(own[0])
        else:
            missing.append(own[0])
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f'{source.root}: tensor "{missing[0]}"{more}: not in the checkpoint, required by '
            f"{type(model).__name__}; missing weights are not allowed, use a complete checkpoint of this class"
        )
    plan.initialized = tuple(computed)
    return plan


def _add(
    plan: _LoadPlan,
    source: OpenCheckpoint,
    tensor: Tensor,
    names: list[str],
    stored: list[str],
    regions: RegionsOf | None,
) -> None:
    """Plan one tensor, which may have several names, and may be stored under several."""
    name = names[0]
    local_regions = (
        next((each for each in map(regions, names) if each is not None), None) if regions is not None else None
    )
    through = next((each for each in names if each in stored), stored[0])
    local = _local_of(tensor)
    layout = local_shards_of(name, tensor, local_regions)
    for each in stored:
        entry = source.tensors[each]
        shape = (
            tuple(tensor.shape) if local_regions is None or isinstance(tensor, DTensor) else _hull(local_regions, entry)
        )
        if entry.shape != shape and each == through:
            raise UnsupportedError(
                f'{source.root}: tensor "{each}" has shape {list(entry.shape)}, expected {list(shape)} for '
                f"{name}; use the config of this checkpoint"
            )
        target_dtype(entry, tensor.dtype)
        read = _TensorRead(name, each, entry, local, layout)
        if each == through:
            plan.reads.append(read)
        elif entry.shape != shape:
            raise _tied_values_differ(through, each)
        elif entry.chunks != source.tensors[through].chunks:
            plan.ties.append(read)
        plan.used.add(each)
    nbytes = local.numel() * local.element_size()
    plan.loaded[name] = LoadedTensor(source.stored[through], nbytes)
    plan.tied |= dict.fromkeys(names[1:], name)
    if through not in names:
        plan.tied[name] = through


def _hull(local_regions: Sequence[Region], entry: TensorEntry) -> tuple[int, ...]:
    """Return the shape of `entry` if the rectangles fit in it; else the smallest shape that contains them."""
    ends = [max(region.offsets[dim] + region.sizes[dim] for region in local_regions) for dim in range(len(entry.shape))]
    fits = bool(local_regions) and all(end <= size for end, size in zip(ends, entry.shape, strict=True))
    return entry.shape if fits or not local_regions else tuple(ends)


def _names_by_tensor(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Return every parameter and persistent buffer with all its names, without wrappers."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        persistent = {
            leaf: buffer for leaf, buffer in module._buffers.items() if leaf not in module._non_persistent_buffers_set
        }
        for leaf, tensor in {**module._parameters, **persistent}.items():
            if tensor is not None:
                name = canonical_name(f"{path}.{leaf}" if path else leaf)
                found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def _families(ties: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the groups of tied names, by each of their names; they include names of other stages."""
    families: dict[str, list[str]] = {}
    for target, source in ties:
        joined = list(dict.fromkeys([*families.get(source, [source]), *families.get(target, [target])]))
        families.update(dict.fromkeys(joined, joined))
    return families


def _optional(model: nn.Module) -> re.Pattern[str]:
    """Return a pattern for names that a checkpoint may lack, as in `from_pretrained`."""
    patterns = [_COMPUTED, *(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())]
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def _computed_buffers(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf in module._non_persistent_buffers_set:
                yield canonical_name(f"{path}.{leaf}" if path else leaf)


def _unread(source: OpenCheckpoint, plan: _LoadPlan) -> dict[str, str]:
    """Return the tensors of the checkpoint that were not read, with the reason."""
    needed = {stored for name in plan.used for stored in source.stored[name]}
    remaining = [(name, each) for name, stored in source.stored.items() if name not in plan.used for each in stored]
    remaining = [(name, each) for name, each in remaining if each not in needed]
    extras = source.extras() if remaining else {}
    found = {}
    for name, each in remaining:
        if source.is_lacking(name) or source.is_lacking(each):
            found[each] = LACKING
        elif source.architecture is None:
            found[each] = UNKNOWN
        else:
            found[each] = extras.get(each, NO_PLACE)  # a layer of another stage, or after the last
    return found


# ------------------------------------------------------------------------------------------ reading


def _run(calls: Iterable[Callable[[], None]], workers: int | None) -> None:
    """Run the calls in threads, started in order; the first failure ends all."""
    count = workers or min(_WORKERS, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(count, thread_name_prefix="ckptx-load")
    try:
        futures: list[Future[None]] = [pool.submit(call) for call in calls]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _compare_tied(reader: RegionReader, tie: _TensorRead, entry: TensorEntry, region: Region, target: Tensor) -> None:
    if not reader.is_equal(entry, region, target):
        raise _tied_values_differ(tie.name, tie.other)


def _tied_values_differ(name: str, other: str) -> InputError:
    return InputError(
        f'tensors "{name}" and "{other}": the config ties them, but their values in the checkpoint differ; set '
        "tie_word_embeddings to false in config.json, or pass their names to build_model(untied=...)"
    )


def _local_of(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


def _narrow(tensor: Tensor, part: Region) -> Tensor:
    for dim, (begin, size) in enumerate(zip(*part, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, size)
    return tensor


# ------------------------------------------------------------------------------------------ ties


def retie(model: nn.Module) -> list[str]:
    """Tie parameters again whose names are tied and that have the same layout but became separate.

    Parameters that FSDP manages are left unchanged, as it keeps its own references. Their values are equal.

    Returns:
        The names that share a parameter again.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return []
    places = {canonical_name(path): module for path, module in model.named_modules()}
    tied = []
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        (target_path, _, target_leaf), (path, _, leaf) = target.rpartition("."), source.rpartition(".")
        if target_path not in places or path not in places:
            continue
        into, source = places[target_path]._parameters, places[path]._parameters
        first, second = source.get(leaf), into.get(target_leaf)
        if first is None or second is None or first is second or not _have_same_layout(first, second):
            continue
        into[target_leaf] = first
        tied.append(target)
    return tied


def _have_same_layout(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    if isinstance(first, DTensor) and isinstance(second, DTensor):
        return bool(first.placements == second.placements and first.device_mesh == second.device_mesh)
    return not isinstance(first, DTensor) and not isinstance(second, DTensor)
