"""`verify`: compare two checkpoints of any format bit for bit, from freshly read bytes alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPE_BY_OPTION, DType
from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import full_region
from ckptx.comparison.adapters import compare_adapter_settings
from ckptx.comparison.common_names import with_common_names
from ckptx.comparison.configs import ABSENT, ConfigDifference, compare_configs
from ckptx.comparison.headers import TiedNames, compare_headers, convert_to_common_names, view_both
from ckptx.comparison.optimizer_state import (
    check_objects,
    find_uncompared_objects,
    has_state,
    pair_state,
)
from ckptx.comparison.uncompared import count_uncompared, note_on_uncompared
from ckptx.errors import InputError
from ckptx.formats.hf.hub import resolve_source
from ckptx.formats.registry import open_checkpoint
from ckptx.mapping.dtypes import dtypes_after_cast
from ckptx.model_view.config_check import match_config_with_notes
from ckptx.model_view.master_weights import has_master_weights, use_master_weights
from ckptx.model_view.parameter_count import count_parameters
from ckptx.model_view.unknown_class import note_on_unknown_ties
from ckptx.model_view.view import ModelView, compare_replicas, locate_all_archives, locate_archives, resolve_duplicates
from ckptx.options.verify import VerifyOptions
from ckptx.processes.threads import run_threads
from ckptx.quantization.checkpoint import is_quantized, open_dequantized
from ckptx.quantization.computed_files import reset_counts, stored_bytes_read
from ckptx.report.documents.comparison import VerifyReport
from ckptx.report.report import Log, Stopwatch, count_dtypes
from ckptx.storage.interface import SourceFiles
from ckptx.transfer.digest import LEAF_NBYTES
from ckptx.transfer.digest_sink import digest_tensor, stream_cast
from ckptx.transfer.overflow_counts import OverflowCounts, OverflowCountsByTensor
from ckptx.transfer.stream import CheckedRecords, TensorReader, strided_row_nbytes
from ckptx.wording import counted, first_of

_BUFFER = 1 << 20  # bytes
_MAX_LISTED_KEYS = 4  # keys of a config in a note


def verify_bytes(options: VerifyOptions, *, with_state: bool = True) -> VerifyReport:
    """Compare the contents of two checkpoints.

    The `exit` of the report is 1 if they differ, if nothing can be compared, and with `strict` if state was not
    compared.

    Args:
        options: Checkpoints and options of the comparison.
        with_state: Also compare training state if both checkpoints have it.

    Raises:
        InputError, UnsupportedError: A checkpoint cannot be read.
    """
    stopwatch, log, dtype = Stopwatch(), options.log or Log(), options.dtype
    reference, checkpoint = (
        resolve_source(str(path), revision=options.revision, token=options.token, cache_dir=options.cache_dir)
        for path in (options.reference, options.checkpoint)
    )
    opened = with_common_names(open_checkpoint(reference), open_checkpoint(checkpoint))
    setting_differences = compare_adapter_settings(*opened)
    if options.dequantize:
        opened = _dequantize_both(*opened, dtype)
    first, second = view_both(
        *opened, prefix=options.source_prefix_or_none, trust_remote_code=options.trust_remote_code
    )
    matches = [(view.catalog, match_config_with_notes(view, log.notes)) for view in (first, second)]
    mismatched_configs = [str(found.location) for found, match in matches if match is not None and match["mismatches"]]
    changed_keys = _note_on_configs(*opened, log)
    tensors, parameters = len(first.catalog.tensors), count_parameters(first).count
    with first.catalog.source.open() as files_a, second.catalog.source.open() as files_b:
        if options.weights == "masters":
            first, second = _use_masters((first, files_a), (second, files_b))
        compares_tensors_of_state = with_state and has_state(first) and has_state(second)
        a_view = _prepare_view(first, files_a, log, compares_tensors_of_state)
        b_view = _prepare_view(second, files_b, log, compares_tensors_of_state)
        a_common, b_common, were_converted = convert_to_common_names(a_view, b_view)
        cast_dtypes, ties = _choose_dtypes(a_common, dtype), TiedNames.from_views(a_common, b_common)
        pairs, differences = _pair_tensors(a_common, b_common, cast_dtypes, ties)
        uncompared_views = [a_view, b_view]  # views whose training state is not compared
        if compares_tensors_of_state:
            state = pair_state(a_view, b_view, ties, in_model_names=were_converted)
            pairs += [_Pair(name, x, y, x.dtype) for name, x, y in state.pairs]
            differences += state.differences
            if state.is_comparable:
                uncompared_views = []
        log.note(*(note for view in uncompared_views for note in note_on_uncompared(view)))
        objects = a_view.catalog.objects, b_view.catalog.objects
        for found, files in zip(objects, (files_a, files_b), strict=True):
            check_objects(found, files)
        uncompared_objects = find_uncompared_objects(*(objects if with_state else ({}, {})), (files_a, files_b))
        log.note(*uncompared_objects.notes)
        not_compared = count_uncompared(*uncompared_views, objects=uncompared_objects.count)
        comparison = _Comparison(pairs, (files_a, files_b), options.buffer_bytes)
        reset_counts(files_a, files_b)
        differences += comparison.run(options.threads, options.on_progress)
        bytes_read = stored_bytes_read(comparison.bytes_read, files_a, files_b)
    differences += setting_differences
    if comparison.records_without_crc:
        records = counted(comparison.records_without_crc, "archive record")
        log.note(f"{records} without a CRC-32: their bytes could not be checked")
    overflows = comparison.overflow_counts.overflows
    if overflows:
        values, where = counted(sum(overflows.values()), "value"), first_of(list(overflows))
        log.note(f"--dtype {dtype}: {values} of the reference became infinite in the cast ({where})")
    if any(difference["what"] == "missing" for difference in differences):
        log.note(*note_on_unknown_ties(a_view, b_view))
    note = _note_on_dtypes(differences, a_common, b_common, ties, dtype)
    log.note(*([note] if note else []))
    is_inconclusive = any(not_compared.values()) or bool(changed_keys) or bool(mismatched_configs)
    report = VerifyReport(
        command="verify",
        exit=1 if differences or not pairs or (options.strict and is_inconclusive) else 0,
        tensors=tensors,
        bytes_read=bytes_read,
        dtypes={
            "before": count_dtypes(a_common.tensors.values()),
            "after": count_dtypes(b_common.tensors.values()),
        },
        notes=list(dict.fromkeys(log.notes)),
        parameters=parameters,
        compared=len(pairs),
        total=len(pairs) + sum(difference["what"] not in ("content", "setting") for difference in differences),
        not_compared=not_compared,
        config_differences=changed_keys,
        config_mismatches=mismatched_configs,
        differing=differences,
    )
    return stopwatch.stop(report)


def _note_on_configs(a: Catalog, b: Catalog, log: Log) -> list[str]:
    """Note the keys of config.json that differ and change what a model computes.

    Keys that only one config has are noted, but not returned, as the default of the class may be the same value.

    Returns:
        Keys that both configs have, with different values.
    """
    if a.config is None or b.config is None:
        return []
    differences = [each for each in compare_configs(a.config, b.config) if _has_effect(each)]
    if not differences:
        return []
    shown = [
        f"{each.key} ({each.reference} in the reference, {each.checkpoint} in the checkpoint)"
        for each in differences[:_MAX_LISTED_KEYS]
    ]
    shown += [f"and {len(differences) - len(shown)} more"] * (len(differences) > len(shown))
    log.note(
        f"config.json differs: {', '.join(shown)}; only tensors are compared, so the models may compute "
        "different results; verify --run compares their results"
    )
    return [each.key for each in differences if ABSENT not in (each.reference, each.checkpoint)]


def _has_effect(difference: ConfigDifference) -> bool:
    """Return True if a key may change what is computed; how tensors are quantized shows in the tensors."""
    return not difference.has_no_effect and difference.key.partition(".")[0] != "quantization_config"


def _dequantize_both(a: Catalog, b: Catalog, dtype: str) -> tuple[Catalog, Catalog]:
    """Decode the quantized weights of both checkpoints to one dtype: F32 for --dtype fp16 and fp32, otherwise BF16.

    A checkpoint that is not quantized is returned unchanged.

    Raises:
        InputError: Neither is quantized.
        UnsupportedError: See `open_dequantized`.
    """
    if not is_quantized(a) and not is_quantized(b):
        raise InputError(f"--dequantize: neither {a.location} nor {b.location} is quantized; leave out --dequantize")
    target = DTYPE_BY_OPTION.get(dtype)
    decoded_dtype = "BF16" if target is None or target.name == "BF16" else "F32"
    return open_dequantized(a, decoded_dtype), open_dequantized(b, decoded_dtype)


def _use_masters(*views: tuple[ModelView, SourceFiles]) -> list[ModelView]:
    """Replace the weights of each model by the fp32 masters in its optimizer state, if it has them.

    Raises:
        InputError: No model has master weights.
    """
    if not any(has_master_weights(view) for view, _ in views):
        roots = " nor ".join(str(view.catalog.location) for view, _ in views)
        raise InputError(
            f"--weights masters: neither {roots} has fp32 master weights in an optimizer state; leave out --weights"
        )
    return [use_master_weights(view, files).view if has_master_weights(view) else view for view, files in views]


def _prepare_view(view: ModelView, files: SourceFiles, log: Log, with_state: bool) -> ModelView:
    """Locate every chunk of the model, and with `with_state` of its state; check that tensors stored twice are equal.

    `log` receives the notes of the view.
    """
    view = (
        locate_all_archives(view, files)
        if with_state and view.catalog.traits.has_archives
        else locate_archives(view, files)
    )
    compare_replicas(view.catalog, files)
    view = resolve_duplicates(view, files, with_state=with_state)
    others = () if with_state else view.notes_on_other_models("not compared")
    log.note(*(f"{view.catalog.location}: {note}" for note in (*view.notes, *others)))
    return view


def _choose_dtypes(reference: ModelView, dtype: str) -> dict[str, DType]:
    """Return the dtype of each reference tensor after the cast that `--dtype` requests."""
    architecture, cast_dtype = reference.architecture, DTYPE_BY_OPTION.get(dtype)
    dtype_name: Any = dtype  # a Literal for `keeps_fp32`, a str here
    return dtypes_after_cast(
        reference.tensors,
        cast_dtype,
        lambda name: architecture is not None and dtype != "fp32" and architecture.keeps_fp32(name, dtype_name),
    )


def _note_on_dtypes(
    differences: list[dict[str, Any]], a: ModelView, b: ModelView, ties: TiedNames, dtype: str
) -> str | None:
    """Return a note on tensors in two dtypes, which were not compared, with the --dtype that compares them, if any."""
    names = [difference["name"] for difference in differences if difference["what"] == "dtype"]
    if not names:
        return None
    from ckptx.quantization.tensors import CODE_DTYPES

    found = [
        (ties.find_entry(name, in_view=a, other_view=b), ties.find_entry(name, in_view=b, other_view=a))
        for name in names
    ]
    entries = [(x, y) for x, y in found if x is not None and y is not None]  # without optimizer state: it is never cast
    stored_dtypes = {y.dtype.name for _, y in entries}
    other_options = [
        option for option, target in DTYPE_BY_OPTION.items() if {target.name} == stored_dtypes and option != dtype
    ]
    can_cast = len(entries) == len(names) and all(x.dtype.is_castable for x, _ in entries)
    if other_options and can_cast:
        advice = f"pass --dtype {other_options[0]} to cast the reference first, as convert --dtype does"
    elif entries and all((x.dtype.name in CODE_DTYPES) != (y.dtype.name in CODE_DTYPES) for x, y in entries):
        advice = "if one of the checkpoints is quantized, pass --dequantize to decode it"
    else:
        advice = "no single --dtype makes them comparable"
    return (
        f"dtype: {counted(len(names), 'tensor')} with a dtype other than in the reference, contents not compared: "
        f"{first_of(names)}; {advice}"
    )


@dataclass(slots=True)
class _Pair:
    """Two tensors to compare.

    Attributes:
        name: Name in the report.
        a: Tensor of the reference.
        b: Tensor of the checkpoint, whose dtype is `dtype`.
        dtype: Dtype to which `a` is cast first.
    """

    name: str
    a: TensorEntry
    b: TensorEntry
    dtype: DType


def _pair_tensors(
    a: ModelView, b: ModelView, cast_dtypes: dict[str, DType], ties: TiedNames
) -> tuple[list[_Pair], list[dict[str, Any]]]:
    """Return the pairs of tensors to compare, and the differences in headers, as entries of `differing` in the report.

    A tied name that one side lacks is compared with its partner there, so that every alias is checked.
    """
    differences = compare_headers(replace_dtypes(a, cast_dtypes), b)
    differing_names = {difference["name"] for difference in differences}
    pairs = []
    for name in [*a.tensors, *(name for name in b.tensors if name not in a.tensors)]:
        in_a = name if name in a.tensors else ties.find_counterpart(name, in_view=a, other_view=b)
        in_b = name if name in b.tensors else ties.find_counterpart(name, in_view=b, other_view=a)
        if name not in differing_names and in_a is not None and in_b is not None:
            pairs.append(_Pair(name, a.tensors[in_a], b.tensors[in_b], cast_dtypes[in_a]))
    return pairs, differences


def replace_dtypes(view: ModelView, cast_dtypes: dict[str, DType]) -> ModelView:
    """Return the view with the dtypes after a cast, for a comparison of headers."""
    tensors = {name: entry._replace(dtype=cast_dtypes[name]) for name, entry in view.tensors.items()}
    return replace(view, tensors=tensors)


class _LeafSink:
    """Sink that keeps the bytes of one leaf of the digest of a tensor and discards the rest.

    Attributes:
        leaf_bytes: Bytes of the leaf with index `leaf`; a leaf has `LEAF_NBYTES` or, at the end, fewer.
    """

    def __init__(self, leaf: int) -> None:
        self.leaf_bytes = bytearray()
        self._position, self._leaf = 0, leaf
        self._buffer = memoryview(bytearray(_BUFFER))

    def space(self, nbytes: int) -> memoryview:
        return self._buffer[: min(nbytes, LEAF_NBYTES - self._position % LEAF_NBYTES)]

    def commit(self, view: memoryview) -> None:
        if self._position // LEAF_NBYTES == self._leaf:
            self.leaf_bytes += view
        self._position += len(view)


def _group_pairs(pairs: list[_Pair]) -> list[list[int]]:
    """Return the indices of the pairs, in groups of those that have stored bytes in common: the names of a tied tensor.

    The pairs of a group are compared together, so that shared bytes are read once.
    """
    groups: dict[int, list[int]] = {}
    group_by_bytes: dict[object, int] = {}
    for index, pair in enumerate(pairs):
        keys = [(side, entry.position) for side, entry in enumerate((pair.a, pair.b)) if entry.numel]
        found = sorted({group_by_bytes[key] for key in keys if key in group_by_bytes})
        group = found[0] if found else index
        for other in found[1:]:
            groups[group] += groups.pop(other)
            group_by_bytes.update({key: group for key, value in group_by_bytes.items() if value == other})
        groups.setdefault(group, []).append(index)
        group_by_bytes.update(dict.fromkeys(keys, group))
    return list(groups.values())


@dataclass(slots=True)
class _Comparison:
    """Comparison of pairs in several threads; differences come in the order of the pairs.

    Attributes:
        pairs: Pairs to compare.
        files: Open files of both checkpoints.
        max_memory: Limit for the buffers of strided reads of all threads together, in bytes.
        bytes_read: Bytes read from both checkpoints.
        records_without_crc: Number of archive records without a CRC-32.
        overflow_counts: Overflows and underflows in the casts of the reference, by tensor.
        _differences: Entry of the report for each pair that differs, by index in `pairs`.
        _errors: Exceptions of the threads; the first is raised by `run`.
    """

    pairs: list[_Pair]
    files: tuple[SourceFiles, SourceFiles]
    max_memory: int
    bytes_read: int = 0
    records_without_crc: int = 0
    overflow_counts: OverflowCountsByTensor = field(default_factory=OverflowCountsByTensor)
    _differences: dict[int, dict[str, Any]] = field(default_factory=dict)
    _errors: list[BaseException] = field(default_factory=list)

    def run(self, workers: int, on_progress: Callable[[int, int], None]) -> list[dict[str, Any]]:
        """Compare all pairs.

        Args:
            workers: Maximum number of threads; fewer are used if `max_memory` is too small for them.
            on_progress: Called with the number of bytes of the reference that have been compared, and the total.

        Returns:
            Entries of `differing` in the report.

        Raises:
            InputError, UnsupportedError: A tensor cannot be read.
        """
        queue = deque(sorted(_group_pairs(self.pairs), key=lambda group: -sum(self.pairs[i].a.nbytes for i in group)))
        total = sum(pair.a.nbytes for pair in self.pairs)
        largest_row = max((strided_row_nbytes(entry) for pair in self.pairs for entry in (pair.a, pair.b)), default=0)
        if largest_row:  # each thread has two readers, and each reader has to buffer a row
            workers = max(1, min(workers, self.max_memory // (2 * largest_row)))
        compared_nbytes = [0] * workers
        lock = threading.Lock()
        checked_records = [CheckedRecords() for _ in self.files]

        def work(worker: int) -> None:
            readers = [
                TensorReader(files, self.max_memory // (2 * workers), checked)
                for files, checked in zip(self.files, checked_records, strict=True)
            ]
            try:
                while queue and not self._errors:
                    try:
                        group = queue.popleft()
                    except IndexError:
                        break
                    digests = _Digests((readers[0], readers[1]), self.overflow_counts)
                    for index in group:
                        difference = _compare(self.pairs[index], digests)
                        if difference is not None:
                            self._differences[index] = difference
                        compared_nbytes[worker] += self.pairs[index].a.nbytes
            except BaseException as error:  # re-raised in the calling thread
                self._errors.append(error)
            with lock:
                self.bytes_read += sum(reader.bytes_read for reader in readers)
                self.records_without_crc += sum(reader.records_without_crc for reader in readers)

        run_threads(work, workers, stop=queue.clear, on_wait=lambda: on_progress(sum(compared_nbytes), total))
        if self._errors:
            raise self._errors[0]
        return [self._differences[index] for index in sorted(self._differences)]


@dataclass(slots=True)
class _Digests:
    """Digests of the tensors of a group of pairs; bytes that several names share are read once.

    Attributes:
        readers: Readers of both checkpoints.
        overflow_counts: Overflows and underflows in the casts, by tensor.
        _leaves: Leaves of the digests so far, by side (0 for the reference, 1 for the checkpoint), chunks, stored dtype
            and dtype after the cast.
    """

    readers: tuple[TensorReader, TensorReader]
    overflow_counts: OverflowCountsByTensor
    _leaves: dict[object, Sequence[bytes]] = field(default_factory=dict)

    def leaves_of(self, pair: _Pair, side: int) -> Sequence[bytes]:
        """Return the leaves of the digest of one side of a pair (0 or 1), cast to the dtype of the pair."""
        entry = (pair.a, pair.b)[side]
        key = side, entry.chunks, entry.dtype, pair.dtype
        if key not in self._leaves:
            counts = OverflowCounts()
            self._leaves[key] = digest_tensor(self.readers[side], entry, pair.dtype, counts).leaves
            self.overflow_counts.add(pair.name, counts)
        return self._leaves[key]


def _compare(pair: _Pair, digests: _Digests) -> dict[str, Any] | None:
    """Return the entry of `differing` in the report, with the first differing element; None if the bytes are equal."""
    leaves = [digests.leaves_of(pair, side) for side in range(2)]
    if leaves[0] == leaves[1]:
        return None
    leaf = next(i for i, (x, y) in enumerate(zip(*leaves, strict=True)) if x != y)
    leaf_bytes = []
    for reader, entry in zip(digests.readers, (pair.a, pair.b), strict=True):
        sink = _LeafSink(leaf)
        stream_cast(reader, entry, full_region(entry.shape), pair.dtype, sink)
        leaf_bytes.append(sink.leaf_bytes)
    return {"name": pair.name, "what": "content"} | _locate_difference(pair, leaf, *leaf_bytes)


def _locate_difference(pair: _Pair, leaf: int, a: bytearray, b: bytearray) -> dict[str, Any]:
    """Return index and bytes of the first element that differs, and the number of differing elements in its leaf.

    `differing_elements` is a phrase with this number. Bytes are in hex, most significant first. Of elements that
    share a byte, the first is in its lowest bits; for these, the whole byte is shown.

    Args:
        pair: Pair whose bytes differ.
        leaf: Index of the first leaf that differs.
        a: Bytes of this leaf in the first tensor.
        b: Bytes of this leaf in the second tensor.
    """
    import numpy as np

    bits = pair.dtype.bits
    width = max(1, bits // 8)
    first = np.frombuffer(a, np.uint8).reshape(-1, width)
    second = np.frombuffer(b, np.uint8).reshape(-1, width)
    different = np.flatnonzero((first != second).any(axis=1))
    elements = leaf * LEAF_NBYTES // width + different
    if bits < 8:  # several elements share a byte, and `elements` has indices of bytes until here
        flipped = np.unpackbits((first ^ second)[different], axis=1, bitorder="little")
        at_byte, at_bit = flipped.nonzero()
        elements = np.unique((elements[at_byte] * 8 + at_bit) // bits)
    index: list[int] = []
    rest = int(elements[0])
    for size in reversed(pair.a.shape):
        index.append(rest % size)
        rest //= size
    position = int(different[0])
    count = f"{counted(len(elements), 'element')} {'differs' if len(elements) == 1 else 'differ'}"
    if pair.a.numel * bits > LEAF_NBYTES * 8:
        count += " in the first 16 MiB block with a difference"
    return {
        "index": index[::-1],
        "a": first[position].tobytes()[::-1].hex(),
        "b": second[position].tobytes()[::-1].hex(),
        "differing_count": len(elements),
        "differing_elements": count,
    }
