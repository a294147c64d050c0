"""Decide whether existing files have the contents that a run would write, by their bytes instead of a manifest.

A manifest is not proof: whoever changed the files could have changed the manifest, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, ShardedChunks, TensorEntry
from ckptx.errors import CkptxError, OutputFailure
from ckptx.storage.files import output_read_failures
from ckptx.storage.interface import Source, SourceFiles
from ckptx.transfer.digest_sink import digest_tensor
from ckptx.transfer.executor import CopyResult
from ckptx.transfer.overflow_counts import OverflowCounts, OverflowCountsByTensor
from ckptx.transfer.plan import CopyPlan, CopyStep
from ckptx.transfer.stream import TensorReader


def compare_existing_files(target: Source, plan: CopyPlan, source: SourceFiles, max_memory: int) -> CopyResult | None:
    """Return the digests and overflows that a copy would have, if files that were written before have the same bytes.

    Both the source and the existing files, these as a loader reads them, are read up to the first difference.

    Args:
        target: The directory of the existing files.
        plan: The plan of the copy.
        source: Files of the source.
        max_memory: Memory limit for buffers, in bytes; one half is for reading the source, the other for the files.

    Returns:
        The result of the copy, with empty `file_digests`; None if the files of `plan` in `target` have other bytes than
        a copy would write, or cannot be read as a checkpoint.

    Raises:
        InputError: The source is corrupt.
        OutputFailure: The storage of the files failed.
    """
    reader = TensorReader(source, max_memory // 2)
    digests, overflow_counts = {}, OverflowCountsByTensor()
    with target.open() as existing_files:
        try:
            with output_read_failures():
                if any(
                    existing_files.read_up_to(file.name, 0, len(file.prologue)) != file.prologue for file in plan.files
                ):
                    return None
        except OutputFailure:
            raise
        except CkptxError:
            return None
        for step in plan.steps():
            counts = OverflowCounts()
            digest = digest_tensor(reader, step.source, step.target.dtype, counts)
            digests[step.target.name] = digest.digest().hex()
            overflow_counts.add(step.target.name, counts)
            try:
                stored_leaves = _digest_combinations(
                    step, existing_files, plan.build_frame is not None, max_memory // 2
                )
                with output_read_failures():
                    if any(leaves != digest.leaves for leaves in stored_leaves):
                        return None
            except OutputFailure:
                raise
            except CkptxError:
                return None
    return CopyResult(
        digests, was_complete=True, overflows=overflow_counts.overflows, underflows=overflow_counts.underflows
    )


def _digest_combinations(
    step: CopyStep, existing_files: SourceFiles, in_archives: bool, max_memory: int
) -> Iterator[list[bytes]]:
    """Yield the leaf digests of a tensor as it was written, once for each combination of chunks and replicas.

    Args:
        step: Copy step that wrote the tensor.
        existing_files: Files of the output.
        in_archives: True if each chunk of a tensor is in a `torch.save` archive of its own, as in a DCP.
        max_memory: Limit for the buffers of strided reads, in bytes.
    """
    from ckptx.formats.dcp.reader import locate_payloads

    reader = TensorReader(existing_files, max_memory)
    entry = step.target
    for chunks in _combine_chunks(entry):
        combined_entry = entry._replace(chunks=chunks, replicas=())
        if in_archives and step.is_tensor:
            combined_entry = locate_payloads(
                Catalog(existing_files.root, "dcp", {entry.name: combined_entry}), existing_files
            ).tensors[entry.name]
        yield digest_tensor(reader, combined_entry, entry.dtype).leaves


def _combine_chunks(entry: TensorEntry) -> Iterator[tuple[Chunk, ...]]:
    """Yield sets of chunks that each make up the whole tensor, so that every chunk and every replica is in one of them.

    The first set has no replicas; in each of the next, replicas replace the chunks of their regions.
    """
    chunks = entry.chunks
    if not isinstance(chunks, ShardedChunks):
        yield tuple(chunks)
        return
    primary_chunks = {
        chunk.region: chunk for block, chunk in zip(chunks.blocks, chunks, strict=True) if not block.is_replica
    }
    yield tuple(primary_chunks.values())
    pending = [chunk for block, chunk in zip(chunks.blocks, chunks, strict=True) if block.is_replica]
    while pending:
        combination, deferred = dict(primary_chunks), []
        replaced_regions = set()
        for chunk in pending:
            if chunk.region in replaced_regions:
                deferred.append(chunk)
            else:
                replaced_regions.add(chunk.region)
                combination[chunk.region] = chunk
        yield tuple(combination.values())
        pending = deferred
