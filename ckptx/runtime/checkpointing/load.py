"""Fills the parameters of a model from a checkpoint: of each, what this rank holds, and nothing is left by chance.

model names --- OpenCheckpoint (any format, any naming) ---> entries: which bytes of which files
parameters  --- shards.pieces_of ---> rectangles this rank holds, and where in its memory
both        --- Reading.fill, in threads, in the order of the files ---> loaded
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
from ckptx.runtime.checkpointing.reading import OpenCheckpoint, RegionReader, castable, open_source
from ckptx.runtime.model.layers import canonical_name, has_stubs
from ckptx.runtime.parallel.shards import LocalShard, pieces_of
from ckptx.runtime.torch_private import local_tensor

RegionsOf = Callable[[str], "Sequence[Region] | None"]

_WORKERS = 4
# Old checkpoints lack these or hold them; transformers computes them either way.
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
    """Loads what this rank holds of every parameter and persistent buffer.

    Args:
        model: Materialized; plain or cut by TP, sharded by FSDP, a pipeline stage.
        root: A checkpoint in any format that ckptx reads.
        regions: For a parameter's name the rectangles of the whole tensor that TP left on this rank, laid one after
            another; None for one whose DTensor (or shape) says it all.
        config: Overrides the `config.json` beside the checkpoint; the model's own is used where there is none.
        prefix: As in `open_source`.
        workers: Threads that read; up to 4 when left out.
        trust_remote_code: As in `build_model`.

    Raises:
        InputError: A tensor is missing, the files are damaged, or names that the model ties hold different values.
        UnsupportedError: A shape or dtype does not fit.
        UsageError: The model has no storage yet.
    """
    config = config or _config_beside(model, root)
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
    """`load` from a checkpoint that is open.

    `tied` has names that the checkpoint may store under another name although the model does not tie them
    (`OpenCheckpoint.tied` says which).
    """
    plan = _plan(model, source, regions, tied)
    reading = RegionReader(source.files)
    with torch.no_grad():
        _run((partial(reading.fill, *job) for job in plan.jobs()), workers)
        _run((partial(_hold_against, reading, tie, *job) for tie in plan.ties for job in tie.jobs()), workers)
        retie(model)
    _logger.info(
        "%s: %d tensors loaded, %d tied, %d initialised, %d bytes read of %s", type(model).__name__, len(plan.loaded),
        len(plan.tied), len(plan.initialised), reading.bytes_read, source.files.root,
    )  # fmt: skip
    return LoadLedger(
        loaded=plan.loaded,
        tied=plan.tied,
        initialised=plan.initialised,
        unread=source.unread | _unread(source, plan),
        bytes_read=reading.bytes_read,
        unchecked=reading.unchecked,
    )


def differing(
    model: nn.Module,
    source: OpenCheckpoint,
    *,
    regions: RegionsOf | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Names of what this rank holds that is not, byte for byte, what `load_from` would read from `source`.

    Raises:
        InputError, UnsupportedError: As `load`.
    """
    plan = _plan(model, source, regions, tied)
    reading = RegionReader(source.files)
    return [read.name for read in plan.reads if not all(reading.is_equal(*job) for job in read.jobs())]


def unread(
    model: nn.Module,
    source: OpenCheckpoint,
    *,
    regions: RegionsOf | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """What `load_from` would leave unread of `source`: names on disk, with the reason; see `LoadLedger.unread`.

    Raises:
        InputError, UnsupportedError: As `load`.
    """
    return source.unread | _unread(source, _plan(model, source, regions, tied))


def _config_beside(model: nn.Module, root: Path) -> Mapping[str, Any] | None:
    """The model's own config, for a checkpoint that has none."""
    directory = root if root.is_dir() else root.parent
    own = getattr(model, "config", None)
    return None if own is None or (directory / "config.json").is_file() else own.to_dict()


# ------------------------------------------------------------------------------------------ what to read


class RegionRead(NamedTuple):
    """A region of an entry, and the memory for it."""

    entry: TensorEntry
    region: Region
    target: Tensor


@dataclass(frozen=True, slots=True)
class _Read:
    """One parameter or buffer of this rank, read through an entry, or compared with one."""

    name: str
    other: str
    entry: TensorEntry
    local: Tensor
    pieces: list[LocalShard]

    def jobs(self) -> Iterator[RegionRead]:
        for piece in self.pieces:
            yield RegionRead(self.entry, piece.region, _narrowed(self.local, piece.local))


@dataclass(slots=True)
class _LoadPlan:
    reads: list[_Read] = field(default_factory=list)
    ties: list[_Read] = field(default_factory=list)
    loaded: dict[str, LoadedTensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    initialised: tuple[str, ...] = ()
    used: set[str] = field(default_factory=set)

    def jobs(self) -> list[RegionRead]:
        """In the order of the files."""
        return sorted((job for read in self.reads for job in read.jobs()), key=_position)


def _position(job: RegionRead) -> tuple[str, int]:
    chunks = job.entry.chunks
    first = next(iter(chunks.archives if isinstance(chunks, ArchivedChunks) else chunks), None)
    return ("", 0) if first is None else (first.file, first.offset)


def _plan(model: nn.Module, source: OpenCheckpoint, regions: RegionsOf | None, tied: Mapping[str, str]) -> _LoadPlan:
    """Which entry fills which tensor; everything that can be refused without reading is refused here."""
    names = _names_by_tensor(model)
    families = _families([*(getattr(model, "all_tied_weights_keys", None) or {}).items(), *tied.items()])
    optional, parted = _optional(model), has_stubs(model)
    plan, missing, computed = _LoadPlan(), [], list(_computed_buffers(model))
    for tensor, own in names:
        if tensor.is_meta:
            raise UsageError(f"{own[0]}: is on the meta device, needed storage; call materialize first")
        family = list(dict.fromkeys([*own, *(name for each in own for name in families.get(each, ()))]))
        stored = [name for name in family if name in source.tensors]
        if parted and not {*own}.isdisjoint(stored):
            stored = [name for name in stored if name in own]  # the other copy is in the files of another stage
        if stored:
            _add(plan, source, tensor, own, stored, regions)
        elif optional.search(own[0]) and not isinstance(tensor, nn.Parameter):
            computed.append(own[0])
        else:
            missing.append(own[0])
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f'{source.root}: tensor "{missing[0]}"{more}: not in the checkpoint, needed by '
            f"{type(model).__name__}; nothing may be left at random, use a complete checkpoint of this class"
        )
    plan.initialised = tuple(computed)
    return plan


def _add(
    plan: _LoadPlan,
    source: OpenCheckpoint,
    tensor: Tensor,
    own: list[str],
    stored: list[str],
    regions: RegionsOf | None,
) -> None:
    """Plans one tensor, which may have several names, and be stored under several."""
    name = own[0]
    local_regions = (
        next((each for each in map(regions, own) if each is not None), None) if regions is not None else None
    )
    through = next((each for each in own if each in stored), stored[0])
    local = _local_of(tensor)
    layout = pieces_of(name, tensor, local_regions)
    for each in stored:
        entry = source.tensors[each]
        shape = (
            tuple(tensor.shape) if local_regions is None or isinstance(tensor, DTensor) else _hull(local_regions, entry)
        )
        if entry.shape != shape and each == through:
            raise UnsupportedError(
                f'{source.root}: tensor "{each}" has shape {list(entry.shape)}, needed {list(shape)} for '
                f"{name}; the config is of another model"
            )
        castable(entry, tensor.dtype)
        read = _Read(name, each, entry, local, layout)
        if each == through:
            plan.reads.append(read)
        elif entry.shape != shape:
            raise _differ(through, each)
        elif entry.chunks != source.tensors[through].chunks:
            plan.ties.append(read)
        plan.used.add(each)
    nbytes = local.numel() * local.element_size()
    plan.loaded[name] = LoadedTensor(source.stored[through], nbytes)
    plan.tied |= dict.fromkeys(own[1:], name)
    if through not in own:
        plan.tied[name] = through


def _hull(local_regions: Sequence[Region], entry: TensorEntry) -> tuple[int, ...]:
    """The shape of `entry` if the rectangles fit in it; else what they need at least."""
    ends = [max(region.offsets[dim] + region.sizes[dim] for region in local_regions) for dim in range(len(entry.shape))]
    fits = bool(local_regions) and all(end <= size for end, size in zip(ends, entry.shape, strict=True))
    return entry.shape if fits or not local_regions else tuple(ends)


def _names_by_tensor(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Every parameter and persistent buffer with all its names, without wrappers."""
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
    """The names that are tied to each other, by each of them; also names that only other stages have."""
    families: dict[str, list[str]] = {}
    for target, source in ties:
        joined = list(dict.fromkeys([*families.get(source, [source]), *families.get(target, [target])]))
        families.update(dict.fromkeys(joined, joined))
    return families


def _optional(model: nn.Module) -> re.Pattern[str]:
    """Names that a checkpoint may lack, as `from_pretrained` allows it."""
    patterns = [_COMPUTED, *(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())]
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def _computed_buffers(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf in module._non_persistent_buffers_set:
                yield canonical_name(f"{path}.{leaf}" if path else leaf)


def _unread(source: OpenCheckpoint, plan: _LoadPlan) -> dict[str, str]:
    """Tensors of the checkpoint that went nowhere, with the reason."""
    needed = {stored for name in plan.used for stored in source.stored[name]}
    left = [(name, each) for name, stored in source.stored.items() if name not in plan.used for each in stored]
    left = [(name, each) for name, each in left if each not in needed]
    extras = source.extras() if left else {}
    found = {}
    for name, each in left:
        if source.is_lacking(name) or source.is_lacking(each):
            found[each] = LACKING
        elif source.architecture is None:
            found[each] = UNKNOWN
        else:
            found[each] = extras.get(each, NO_PLACE)  # a layer of another stage, or behind the last
    return found


# ------------------------------------------------------------------------------------------ reading


def _run(calls: Iterable[Callable[[], None]], workers: int | None) -> None:
    """Makes the calls in threads, begun in their order; the first that fails ends all."""
    count = workers or min(_WORKERS, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(count, thread_name_prefix="ckptx-load")
    try:
        futures: list[Future[None]] = [pool.submit(call) for call in calls]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _hold_against(reading: RegionReader, tie: _Read, entry: TensorEntry, region: Region, target: Tensor) -> None:
    if not reading.is_equal(entry, region, target):
        raise _differ(tie.name, tie.other)


def _differ(name: str, other: str) -> InputError:
    return InputError(
        f'tensors "{name}" and "{other}": the config ties them, the checkpoint holds two different ones; set '
        "tie_word_embeddings to false in config.json, or build the model with `untied`"
    )


def _local_of(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


def _narrowed(tensor: Tensor, part: Region) -> Tensor:
    for dim, (begin, size) in enumerate(zip(*part, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, size)
    return tensor


# ------------------------------------------------------------------------------------------ ties


def retie(model: nn.Module) -> list[str]:
    """Makes one parameter again of tied names that were torn apart and lie in memory alike.

    Parameters that FSDP manages are left alone: it keeps references of its own. They hold the same values.

    Returns:
        The names that share a parameter now.
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
        if first is None or second is None or first is second or not _lie_alike(first, second):
            continue
        into[target_leaf] = first
        tied.append(target)
    return tied


def _lie_alike(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    if isinstance(first, DTensor) and isinstance(second, DTensor):
        return bool(first.placements == second.placements and first.device_mesh == second.device_mesh)
    return not isinstance(first, DTensor) and not isinstance(second, DTensor)
