"""Fills the parameters of a model from a checkpoint: each rank reads its shards, and no tensor may stay uninitialized.

model names --- OpenCheckpoint (any format, any naming) ---> entries: byte ranges in files
parameters  --- shards.find_local_shards ---> regions of this rank, and their place in its memory
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

from ckptx.adapters.state_dicts import is_lora_name
from ckptx.catalog.entry import LazyChunks, TensorEntry
from ckptx.catalog.region import Region
from ckptx.errors import InputError, UnsupportedError, UsageError
from ckptx.processes.threads import thread_errors
from ckptx.runtime.checkpointing.load_report import (
    FROM_OTHER_LAYER,
    NOT_IN_MODEL,
    UNKNOWN_TO_CLASS,
    LoadedTensor,
    LoadReport,
)
from ckptx.runtime.checkpointing.reading import OpenCheckpoint, RegionReader, open_source, target_dtype
from ckptx.runtime.model.layers import canonical_name, has_stubs
from ckptx.runtime.parallel.shards import LocalShard, find_local_shards
from ckptx.runtime.torch_private import local_tensor
from ckptx.storage.files import is_regular_file

# Parameter name -> regions of the whole tensor on this rank; see `regions` of `load`.
FindLocalRegions = Callable[[str], "Sequence[Region] | None"]

_MAX_WORKERS = 4
# Old checkpoints may or may not contain these; transformers computes them either way.
_COMPUTED_BUFFERS = r"(^|\.)(position_ids|rotary_emb\.inv_freq)$"

_logger = logging.getLogger(__name__)


def load(
    model: nn.Module,
    root: Path,
    *,
    regions: FindLocalRegions | None = None,
    config: Mapping[str, Any] | None = None,
    prefix: str | None = None,
    workers: int | None = None,
    trust_remote_code: bool = False,
    dequantize: bool = False,
    skip: Callable[[str], bool] | None = None,
) -> LoadReport:
    """Load this rank's shards of every parameter and persistent buffer, and report what was read.

    Args:
        model: Materialized model; plain, sharded by TP or FSDP, or a pipeline stage.
        root: Checkpoint in any format that ckptx reads.
        regions: Function such as `TensorParallelLayout.local_regions`. It takes a parameter name and returns the
            regions of the whole tensor that TP left on this rank, before FSDP, in the order in which its memory has
            them. It returns None if the placements of a DTensor show its regions, or if a plain tensor is whole. None
            instead of a function means that this holds for every name.
        config: Replaces the `config.json` of the checkpoint; None uses that file, or else the model's own config.
        prefix: See `open_source`.
        workers: Number of reading threads; None means up to 4.
        trust_remote_code: See `build_model`.
        dequantize: See `open_source`.
        skip: Function that returns True for the model name of a tensor that is not loaded, and keeps its values; None
            to load all.

    Raises:
        InputError: A tensor is missing, the files are damaged, or tied names have different values.
        UnsupportedError: A shape or dtype does not match, or ckptx does not read the format.
        UsageError: The model has no storage yet.
    """
    config = config or _fallback_config(model, root)
    with open_source(
        root,
        config=config,
        prefix=prefix,
        trust_remote_code=trust_remote_code,
        dequantize=dequantize,
        allow_adapter=any(is_lora_name(name) for name, _ in model.named_parameters()),
    ) as source:
        return load_from(model, source, regions=regions, workers=workers, skip=skip)


def load_from(
    model: nn.Module,
    source: OpenCheckpoint,
    *,
    regions: FindLocalRegions | None = None,
    workers: int | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
    skip: Callable[[str], bool] | None = None,
) -> LoadReport:
    """Load like `load`, from a checkpoint that is open.

    `tied` maps model names to the names under which the checkpoint may store their values, although the model does not
    tie the two (see `OpenCheckpoint.find_tied_names`).
    """
    plan = _plan_load(model, source, regions, tied, skip)
    reader = RegionReader(source.files)
    with torch.no_grad():
        _run_in_threads((partial(reader.fill, *each) for each in plan.region_reads()), workers)
        _run_in_threads(
            (partial(_compare_tied, reader, tie, *each) for tie in plan.ties for each in tie.region_reads()), workers
        )
        retie(model)
    _logger.info(
        "%s: %d tensors loaded, %d tied, %d initialized, %d bytes read of %s", type(model).__name__,
        len(plan.loaded_tensors), len(plan.tied_names), len(plan.initialized_buffers), reader.bytes_read,
        source.files.root,
    )  # fmt: skip
    return LoadReport(
        loaded_tensors=plan.loaded_tensors,
        tied_names=plan.tied_names,
        initialized_buffers=plan.initialized_buffers,
        unread_names=source.non_model_names | _explain_unread(source, plan),
        bytes_read=reader.bytes_read,
        unverified_bytes=reader.unverified_bytes,
    )


def find_differing_names(
    model: nn.Module,
    source: OpenCheckpoint,
    *,
    regions: FindLocalRegions | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Return the names whose shards on this rank are not byte for byte what `load_from` would read from `source`.

    Raises:
        InputError, UnsupportedError: See `load`.
    """
    plan = _plan_load(model, source, regions, tied)
    reader = RegionReader(source.files)
    return [read.name for read in plan.reads if not all(reader.is_equal(*each) for each in read.region_reads())]


def find_unread(
    model: nn.Module,
    source: OpenCheckpoint,
    *,
    regions: FindLocalRegions | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the names on disk that `load_from` would not read, with the reason; see `LoadReport.unread_names`.

    Raises:
        InputError, UnsupportedError: See `load`.
    """
    return source.non_model_names | _explain_unread(source, _plan_load(model, source, regions, tied))


def _fallback_config(model: nn.Module, root: Path) -> Mapping[str, Any] | None:
    """Return the model's own config for a checkpoint without one; None if the checkpoint has one, or the model none."""
    directory = root.parent if is_regular_file(root) else root
    model_config = getattr(model, "config", None)
    return None if model_config is None or is_regular_file(directory / "config.json") else model_config.to_dict()


# ------------------------------------------------------------------------------------------ what to read


class RegionRead(NamedTuple):
    """A region of an entry, and the memory that it is read into: `target` has the shape of the region."""

    entry: TensorEntry
    region: Region
    target: Tensor


@dataclass(frozen=True, slots=True)
class _TensorRead:
    """A parameter or buffer of this rank that is read from an entry, or compared with one.

    Attributes:
        name: First name of the parameter or buffer in the model.
        entry_name: Model name of the entry; another one if names are tied.
        entry: The entry in the checkpoint.
        local_data: Memory of this rank's shards.
        shards: Regions of the whole tensor on this rank, and their place in `local_data`.
    """

    name: str
    entry_name: str
    entry: TensorEntry
    local_data: Tensor
    shards: list[LocalShard]

    def region_reads(self) -> Iterator[RegionRead]:
        for shard in self.shards:
            yield RegionRead(self.entry, shard.region, _narrow_to_region(self.local_data, shard.local))


@dataclass(slots=True)
class _LoadPlan:
    """The reads of a load, and the parts of its report that are known before it.

    Attributes:
        reads: Reads that fill a tensor.
        ties: Entries of tied names that are stored separately; their bytes are compared with the filled tensor.
        loaded_tensors: See `LoadReport`.
        tied_names: See `LoadReport`.
        initialized_buffers: See `LoadReport`.
        used_names: Model names of all entries that are read, compared, or share the chunks of one that is read.
    """

    reads: list[_TensorRead] = field(default_factory=list)
    ties: list[_TensorRead] = field(default_factory=list)
    loaded_tensors: dict[str, LoadedTensor] = field(default_factory=dict)
    tied_names: dict[str, str] = field(default_factory=dict)
    initialized_buffers: tuple[str, ...] = ()
    used_names: set[str] = field(default_factory=set)

    def region_reads(self) -> list[RegionRead]:
        """Return the reads of `reads`, without `ties`, in the order of the files."""
        return sorted((each for read in self.reads for each in read.region_reads()), key=_file_position)


def _file_position(region_read: RegionRead) -> tuple[str, int]:
    """Return (file, byte offset) of the first chunk of an entry; ("", 0) for an entry without chunks."""
    chunks = region_read.entry.chunks
    first = next(iter(chunks.archives if isinstance(chunks, LazyChunks) else chunks), None)
    return ("", 0) if first is None else (first.file, first.offset)


def _plan_load(
    model: nn.Module,
    source: OpenCheckpoint,
    regions: FindLocalRegions | None,
    tied: Mapping[str, str],
    skip: Callable[[str], bool] | None = None,
) -> _LoadPlan:
    """Plan which entry fills which tensor, and refuse everything that can be refused without reading."""
    tie_groups = _group_ties([*(getattr(model, "all_tied_weights_keys", None) or {}).items(), *tied.items()])
    optional_pattern, is_partial = _optional_names_pattern(model), has_stubs(model)
    plan, missing, computed_names = _LoadPlan(), [], list(_non_persistent_buffers(model))
    for tensor, own_names in _tensors_with_names(model):
        if tensor.is_meta:
            raise UsageError(f"{own_names[0]}: is on the meta device; call materialize first")
        if skip is not None and skip(own_names[0]):
            continue
        candidates = list(
            dict.fromkeys([*own_names, *(name for each in own_names for name in tie_groups.get(each, ()))])
        )
        entry_names = [name for name in candidates if name in source.tensors]
        if is_partial and not {*own_names}.isdisjoint(entry_names):  # the other copy belongs to another stage
            entry_names = [name for name in entry_names if name in own_names]
        if entry_names:
            _plan_tensor(plan, source, tensor, own_names, entry_names, regions)
        elif optional_pattern.search(own_names[0]) and not isinstance(tensor, nn.Parameter):
            computed_names.append(own_names[0])
        else:
            missing.append(own_names[0])
    if missing:
        more_text = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f'{source.root}: tensor "{missing[0]}"{more_text}: not in the checkpoint, required by '
            f"{type(model).__name__}; missing weights are not allowed, use a complete checkpoint of this class"
        )
    plan.initialized_buffers = tuple(computed_names)
    return plan


def _plan_tensor(
    plan: _LoadPlan,
    source: OpenCheckpoint,
    tensor: Tensor,
    names: list[str],
    entry_names: list[str],
    regions: FindLocalRegions | None,
) -> None:
    """Plan one tensor, which has one or more names in the model, and one or more entries in the checkpoint."""
    name = names[0]
    local_regions = (
        next((each for each in map(regions, names) if each is not None), None) if regions is not None else None
    )
    source_name = next((each for each in names if each in entry_names), entry_names[0])
    local_data = _detached_local(tensor)
    shards = find_local_shards(name, tensor, local_regions)
    for entry_name in entry_names:
        entry = source.tensors[entry_name]
        shape = (
            tuple(tensor.shape)
            if local_regions is None or isinstance(tensor, DTensor)
            else _covering_shape(local_regions, entry)
        )
        if entry.shape != shape and entry_name == source_name:
            raise UnsupportedError(
                f'{source.root}: tensor "{entry_name}" has shape {list(entry.shape)}, expected {list(shape)} for '
                f"{name}; use the config of this checkpoint"
            )
        target_dtype(entry, tensor.dtype)  # raises if the entry cannot be cast to it
        read = _TensorRead(name, entry_name, entry, local_data, shards)
        if entry_name == source_name:
            plan.reads.append(read)
        elif entry.shape != shape:
            raise _tied_values_differ(source_name, entry_name)
        elif entry.chunks != source.tensors[source_name].chunks:
            plan.ties.append(read)
        plan.used_names.add(entry_name)
    nbytes = local_data.numel() * local_data.element_size()
    plan.loaded_tensors[name] = LoadedTensor(source.stored_names[source_name], nbytes)
    plan.tied_names |= dict.fromkeys(names[1:], name)
    if source_name not in names:
        plan.tied_names[name] = source_name


def _covering_shape(local_regions: Sequence[Region], entry: TensorEntry) -> tuple[int, ...]:
    """Return the shape of `entry` if the regions fit in it; else the smallest shape that contains them.

    A plain tensor that TP sharded does not know its whole shape, so that only this can be compared. No regions, as on a
    rank without a part of the tensor, fit in any shape.
    """
    if not local_regions:
        return entry.shape
    ndim = len(local_regions[0].sizes)
    ends = tuple(max(region.offsets[dim] + region.sizes[dim] for region in local_regions) for dim in range(ndim))
    fits = len(ends) == len(entry.shape) and all(end <= size for end, size in zip(ends, entry.shape, strict=True))
    return entry.shape if fits else ends


def _tensors_with_names(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Return every parameter and persistent buffer once, with all its canonical names."""
    tensors_by_id: dict[int, tuple[Tensor, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        persistent = {
            leaf: buffer for leaf, buffer in module._buffers.items() if leaf not in module._non_persistent_buffers_set
        }
        for leaf, tensor in {**module._parameters, **persistent}.items():
            if tensor is not None:
                name = canonical_name(f"{path}.{leaf}" if path else leaf)
                tensors_by_id.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(tensors_by_id.values())


def _group_ties(ties: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return name -> all names that are tied to it, itself included; some may be names of other pipeline stages."""
    groups: dict[str, list[str]] = {}
    for target, source in ties:
        group = list(dict.fromkeys([*groups.get(source, [source]), *groups.get(target, [target])]))
        groups.update(dict.fromkeys(group, group))
    return groups


def _optional_names_pattern(model: nn.Module) -> re.Pattern[str]:
    """Return a pattern for names that a checkpoint may lack, as in `from_pretrained`."""
    patterns = [_COMPUTED_BUFFERS, *(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())]
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def _non_persistent_buffers(model: nn.Module) -> Iterator[str]:
    """Yield the canonical name of each non-persistent buffer."""
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf in module._non_persistent_buffers_set:
                yield canonical_name(f"{path}.{leaf}" if path else leaf)


def _explain_unread(source: OpenCheckpoint, plan: _LoadPlan) -> dict[str, str]:
    """Return the names on disk of the model's tensors that the plan does not read, with the reason."""
    used_on_disk = {stored for name in plan.used_names for stored in source.stored_names[name]}
    unread = [
        (name, stored_name)
        for name, stored_names in source.stored_names.items()
        if name not in plan.used_names
        for stored_name in stored_names
        if stored_name not in used_on_disk
    ]
    extra_tensors = source.explain_extra_tensors() if unread else {}
    reasons = {}
    for name, stored_name in unread:
        if source.uses_other_layer(name) or source.uses_other_layer(stored_name):
            reasons[stored_name] = FROM_OTHER_LAYER
        elif source.architecture is None:
            reasons[stored_name] = UNKNOWN_TO_CLASS
        else:  # not an extra tensor: it belongs to another stage, or follows the last layer
            reasons[stored_name] = extra_tensors.get(stored_name, NOT_IN_MODEL)
    return reasons


# ------------------------------------------------------------------------------------------ reading


def _run_in_threads(calls: Iterable[Callable[[], None]], workers: int | None) -> None:
    """Run the calls in threads, started in order, and wait for them.

    After the first failure no further call starts; the failure is raised when the running calls have ended.

    Args:
        calls: Functions without arguments.
        workers: Number of threads; None means up to 4.
    """
    count = workers or min(_MAX_WORKERS, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(count, thread_name_prefix="ckptx-load")
    try:
        with thread_errors():
            futures: list[Future[None]] = [pool.submit(call) for call in calls]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _compare_tied(
    reader: RegionReader, tensor_read: _TensorRead, entry: TensorEntry, region: Region, target: Tensor
) -> None:
    if not reader.is_equal(entry, region, target):
        raise _tied_values_differ(tensor_read.name, tensor_read.entry_name)


def _tied_values_differ(name: str, other: str) -> InputError:
    return InputError(
        f'tensors "{name}" and "{other}": the config ties them, but their values in the checkpoint differ; set '
        "tie_word_embeddings to false in config.json, or pass their names to build_model(untied=...)"
    )


def _detached_local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


def _narrow_to_region(tensor: Tensor, region: Region) -> Tensor:
    """Return a region of a tensor as a view; the tensor itself if the region covers it."""
    for dim, (begin, size) in enumerate(zip(*region, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, size)
    return tensor


# ------------------------------------------------------------------------------------------ ties


def retie(model: nn.Module) -> list[str]:
    """Tie parameters again whose names are tied and that have the same layout but became separate.

    A model in which FSDP manages any module is left unchanged, as FSDP keeps references to its parameters. The values
    of the tied parameters are equal all the same.

    Returns:
        The names that have the parameter of another name again.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return []
    modules_by_name = {canonical_name(path): module for path, module in model.named_modules()}
    tied = []
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        (target_path, _, target_leaf), (path, _, leaf) = target.rpartition("."), source.rpartition(".")
        if target_path not in modules_by_name or path not in modules_by_name:
            continue
        target_parameters = modules_by_name[target_path]._parameters
        source_parameters = modules_by_name[path]._parameters
        source_parameter, target_parameter = source_parameters.get(leaf), target_parameters.get(target_leaf)
        if source_parameter is None or target_parameter is None or source_parameter is target_parameter:
            continue
        if not _have_same_layout(source_parameter, target_parameter):
            continue
        target_parameters[target_leaf] = source_parameter
        tied.append(target)
    return tied


def _have_same_layout(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    if isinstance(first, DTensor) and isinstance(second, DTensor):
        return bool(first.placements == second.placements and first.device_mesh == second.device_mesh)
    return not isinstance(first, DTensor) and not isinstance(second, DTensor)
