"""`verify`: compare two checkpoints of any format bit for bit, from freshly read bytes alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptx.catalog.dtype import CAST_TARGETS, DType
from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import full_region
from ckptx.comparison.headers import TiedNames, compare_headers, convert_to_common_names, view_both
from ckptx.comparison.optimizer_state import (
    describe_object_differences,
    describe_uncompared_state,
    has_state,
    pair_state,
)
from ckptx.formats.hf.hub import resolve_source
from ckptx.formats.registry import open_checkpoint
from ckptx.mapping.dtypes import cast_targets
from ckptx.model_view.config_check import match_config_with_notes
from ckptx.model_view.parameter_count import count_parameters
from ckptx.model_view.view import ModelView, compare_replicas, locate_all_archives, locate_archives, resolve_duplicates
from ckptx.options.verify import CompareOptions
from ckptx.processes.threads import run_threads
from ckptx.report.documents.comparison import VerifyReport
from ckptx.report.report import Log, Stopwatch, count_dtypes, counted
from ckptx.storage.interface import SourceFiles
from ckptx.transfer.digest import LEAF_NBYTES
from ckptx.transfer.digest_sink import digest_tensor, stream_cast
from ckptx.transfer.overflow_counts import OverflowCounts, OverflowCountsByTensor
from ckptx.transfer.stream import TensorReader
from ckptx.wording import first_of

_BUFFER = 1 << 20


def verify_bytes(options: CompareOptions, *, with_state: bool = True) -> VerifyReport:
    """Compare the contents of two checkpoints; `exit` of the report is 1 when they differ.

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
    first, second = view_both(open_checkpoint(reference), open_checkpoint(checkpoint), prefix=options.model_prefix)
    for view in (first, second):
        match_config_with_notes(view, log.notes)
    tensors, parameters = len(first.catalog.tensors), count_parameters(first).count
    with first.catalog.source.open() as files_a, second.catalog.source.open() as files_b:
        with_state = with_state and has_state(first) and has_state(second)
        a_view, b_view = _locate(first, files_a, log, with_state), _locate(second, files_b, log, with_state)
        first, second = convert_to_common_names(a_view, b_view)
        targets, ties = _choose_dtypes(first, dtype), TiedNames.from_views(first, second)
        pairs, rows = _pair_tensors(first, second, targets, ties)
        if with_state:
            state = pair_state(a_view, b_view, ties, in_model_names=first is not a_view)
            pairs += [_Pair(name, x, y, x.dtype) for name, x, y in state.pairs]
            rows += state.rows
            log.note(*state.notes)
            log.note(*describe_object_differences(a_view.catalog.objects, b_view.catalog.objects, (files_a, files_b)))
        else:
            log.note(*(describe_uncompared_state(view) for view in (a_view, b_view) if has_state(view)))
        comparison = _Comparison(pairs, (files_a, files_b), options.buffer_bytes)
        rows += comparison.run(options.threads, options.on_progress)
    if comparison.records_without_crc:
        archives = counted(comparison.records_without_crc, "archive")
        log.note(f"{archives} without a recorded CRC-32: their bytes could not be checked")
    overflows = comparison.overflow_counts.overflows
    if overflows:
        numbers, where = counted(sum(overflows.values()), "number"), first_of(list(overflows))
        log.note(f"--dtype {dtype}: {numbers} of the reference became infinite in the cast ({where})")
    note = _note_on_dtypes(rows, first, second, dtype)
    log.note(*([note] if note else []))
    report = VerifyReport(
        command="verify",
        exit=1 if rows or not pairs else 0,
        tensors=tensors,
        bytes_read=comparison.bytes_read,
        dtypes={
            "before": count_dtypes(first.tensors.values()),
            "after": count_dtypes(second.tensors.values()),
        },
        notes=list(log.notes),
        parameters=parameters,
        compared=len(pairs),
        differing=rows,
    )
    return stopwatch.stop(report)


def _locate(view: ModelView, files: SourceFiles, log: Log, with_state: bool) -> ModelView:
    """Locate every block of the model, and with `with_state` of its state; compare tensors that are stored twice."""
    view = (
        locate_all_archives(view, files)
        if with_state and view.catalog.traits.has_archives
        else locate_archives(view, files)
    )
    compare_replicas(view.catalog, files)
    view = resolve_duplicates(view, files, with_state=with_state)
    others = () if with_state else view.notes_on_other_models("not compared")
    log.note(*(f"{view.catalog.root}: {note}" for note in (*view.notes, *others)))
    return view


def _choose_dtypes(reference: ModelView, dtype: str) -> dict[str, DType]:
    """Return the dtype of each reference tensor after the cast that `--dtype` requests."""
    architecture, cast_dtype = reference.architecture, CAST_TARGETS.get(dtype)
    dtype_name: Any = dtype
    return cast_targets(
        reference.tensors,
        cast_dtype,
        lambda name: architecture is not None and dtype != "fp32" and architecture.keeps_fp32(name, dtype_name),
    )


def _note_on_dtypes(rows: list[dict[str, Any]], a: ModelView, b: ModelView, dtype: str) -> str | None:
    """Return a note on tensors in two dtypes, which were not compared, with the --dtype that compares them."""
    names = [row["name"] for row in rows if row["what"] == "dtype"]
    if not names:
        return None
    model_names = [name for name in names if name in a.tensors and name in b.tensors]  # optimizer state is never cast
    stored_dtypes = {b.tensors[name].dtype.name for name in model_names}
    targets = [word for word, target in CAST_TARGETS.items() if {target.name} == stored_dtypes and word != dtype]
    is_float = model_names == names and all(a.tensors[name].dtype.is_castable for name in model_names)
    if targets and is_float:
        advice = f"pass --dtype {targets[0]} to cast the reference first, as convert --dtype does"
    else:
        advice = "no single --dtype makes them comparable"
    return (
        f"dtype: {counted(len(names), 'tensor')} with a dtype other than in the reference, contents not compared: "
        f"{first_of(names)}; {advice}"
    )


@dataclass(slots=True)
class _Pair:
    """Two tensors to compare; the first is cast to `dtype`."""

    name: str
    a: TensorEntry
    b: TensorEntry
    dtype: DType


def _pair_tensors(
    a: ModelView, b: ModelView, targets: dict[str, DType], ties: TiedNames
) -> tuple[list[_Pair], list[dict[str, Any]]]:
    """Return pairs of tensors to compare, and rows for differences in headers.

    A tied name that one side lacks is compared with its partner there, so that every alias is checked.
    """
    rows = compare_headers(replace_dtypes(a, targets), b)
    differing_names = {row["name"] for row in rows}
    pairs = []
    for name in [*a.tensors, *(name for name in b.tensors if name not in a.tensors)]:
        in_a = name if name in a.tensors else ties.find_counterpart(name, b, a)
        in_b = name if name in b.tensors else ties.find_counterpart(name, a, b)
        if name in differing_names or in_a is None or in_b is None:
            continue
        first, second, dtype = a.tensors[in_a], b.tensors[in_b], targets[in_a]
        if (first.shape, dtype) != (second.shape, second.dtype):
            headers = [f"{kind.name} {list(entry.shape)}" for kind, entry in ((dtype, first), (second.dtype, second))]
            rows.append({"name": name, "what": "tied", "a": headers[0], "b": headers[1]})
            continue
        pairs.append(_Pair(name, first, second, dtype))
    return pairs, rows


def replace_dtypes(view: ModelView, targets: dict[str, DType]) -> ModelView:
    """Return the view with the dtypes after a cast, for a comparison of headers."""
    tensors = {name: entry._replace(dtype=targets[name]) for name, entry in view.tensors.items()}
    return replace(view, tensors=tensors)


class _BlockSink:
    """Sink that keeps one block of a tensor and discards the rest."""

    def __init__(self, block: int) -> None:
        self.block_bytes = bytearray()
        self._position, self._block = 0, block
        self._buffer = memoryview(bytearray(_BUFFER))

    def space(self, nbytes: int) -> memoryview:
        return self._buffer[: min(nbytes, LEAF_NBYTES - self._position % LEAF_NBYTES)]

    def commit(self, view: memoryview) -> None:
        if self._position // LEAF_NBYTES == self._block:
            self.block_bytes += view
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
    """Comparison of pairs in several threads; rows come in the order of the pairs.

    Attributes:
        pairs: Pairs to compare.
        files: Open files of both checkpoints.
        max_memory: Memory for the buffers of all threads, in bytes.
        bytes_read: Bytes read from both checkpoints.
        records_without_crc: Number of archive records without a CRC-32.
        overflow_counts: Number of elements that casts of the reference made infinite or zero, by tensor.
        _rows: Row of each pair that differs, by index in `pairs`.
        _errors: Exceptions of the threads; the first is raised by `run`.
    """

    pairs: list[_Pair]
    files: tuple[SourceFiles, SourceFiles]
    max_memory: int
    bytes_read: int = 0
    records_without_crc: int = 0
    overflow_counts: OverflowCountsByTensor = field(default_factory=OverflowCountsByTensor)
    _rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    _errors: list[BaseException] = field(default_factory=list)

    def run(self, workers: int, on_progress: Callable[[int, int], None]) -> list[dict[str, Any]]:
        queue = deque(sorted(_group_pairs(self.pairs), key=lambda group: -sum(self.pairs[i].a.nbytes for i in group)))
        total = sum(pair.a.nbytes for pair in self.pairs)
        compared_nbytes = [0] * workers
        lock = threading.Lock()

        def work(worker: int) -> None:
            readers = [TensorReader(files, self.max_memory // (2 * workers)) for files in self.files]
            try:
                while queue and not self._errors:
                    try:
                        group = queue.popleft()
                    except IndexError:
                        break
                    digests = _Digests((readers[0], readers[1]), self.overflow_counts)
                    for index in group:
                        row = _compare(self.pairs[index], digests)
                        if row is not None:
                            self._rows[index] = row
                        compared_nbytes[worker] += self.pairs[index].a.nbytes
            except BaseException as error:  # re-raised in the calling thread
                self._errors.append(error)
            with lock:
                self.bytes_read += sum(reader.bytes_read for reader in readers)
                self.records_without_crc += sum(reader.records_without_crc for reader in readers)

        run_threads(work, workers, stop=queue.clear, on_wait=lambda: on_progress(sum(compared_nbytes), total))
        if self._errors:
            raise self._errors[0]
        return [self._rows[index] for index in sorted(self._rows)]


@dataclass(slots=True)
class _Digests:
    """Digests of the tensors of a group of pairs; bytes that several names share are read once.

    Attributes:
        readers: Readers of both checkpoints.
        overflow_counts: Number of elements that casts made infinite or zero, by tensor.
        _leaves: Leaves of the digests so far, by side, location of the bytes and dtype after the cast.
    """

    readers: tuple[TensorReader, TensorReader]
    overflow_counts: OverflowCountsByTensor
    _leaves: dict[object, Sequence[bytes]] = field(default_factory=dict)

    def leaves_of(self, pair: _Pair, side: int) -> Sequence[bytes]:
        """Return the leaves of the digest of one side of a pair, cast to the dtype of the pair."""
        entry = (pair.a, pair.b)[side]
        key = side, entry.chunks, entry.dtype, pair.dtype
        if key not in self._leaves:
            counts = OverflowCounts()
            self._leaves[key] = digest_tensor(self.readers[side], entry, pair.dtype, counts).leaves
            self.overflow_counts.add(pair.name, counts)
        return self._leaves[key]


def _compare(pair: _Pair, digests: _Digests) -> dict[str, Any] | None:
    """Return None if the bytes are equal, else a row with the position of the first difference."""
    leaves = [digests.leaves_of(pair, side) for side in range(2)]
    if leaves[0] == leaves[1]:
        return None
    block = next(i for i, (x, y) in enumerate(zip(*leaves, strict=True)) if x != y)
    block_bytes = []
    for reader, entry in zip(digests.readers, (pair.a, pair.b), strict=True):
        sink = _BlockSink(block)
        stream_cast(reader, entry, full_region(entry.shape), pair.dtype, sink)
        block_bytes.append(sink.block_bytes)
    return {"name": pair.name, "what": "content"} | _locate_difference(pair, block, *block_bytes)


def _locate_difference(pair: _Pair, block: int, a: bytearray, b: bytearray) -> dict[str, Any]:
    """Return index and bytes of the first element that differs, and the number of differing elements in its block.

    For elements smaller than a byte, the first is in the lowest bits, and the first differing byte is shown.
    """
    import numpy as np

    bits = pair.dtype.bits
    width = max(1, bits // 8)
    first = np.frombuffer(a, np.uint8).reshape(-1, width)
    second = np.frombuffer(b, np.uint8).reshape(-1, width)
    different = np.flatnonzero((first != second).any(axis=1))
    elements = block * LEAF_NBYTES // width + different
    if bits < 8:
        flipped = np.unpackbits((first ^ second)[different], axis=1, bitorder="little")
        at_byte, at_bit = flipped.nonzero()
        elements = np.unique((elements[at_byte] * 8 + at_bit) // bits)
    index: list[int] = []
    rest = int(elements[0])
    for size in reversed(pair.a.shape):
        index.append(rest % size)
        rest //= size
    position = int(different[0])
    return {
        "index": index[::-1],
        "a": first[position].tobytes()[::-1].hex(),
        "b": second[position].tobytes()[::-1].hex(),
        "differing_elements": f"{len(elements)} in the first 16 MiB block that differs",
    }
