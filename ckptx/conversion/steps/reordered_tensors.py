"""Check restored files against digests that were recorded for the same elements in another order.

A source tensor under torchtitan names, or with several experts in it, is not a tensor of the original files, so its
recorded digest matches none of theirs. The written files are therefore read back in the order of the source, through
the inverse of the operations that made them, which costs one more pass over these tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import TensorEntry
from ckptx.conversion.steps.output_check import changed_bytes_error
from ckptx.conversion.steps.restoration import RestoredFiles
from ckptx.errors import CkptxError
from ckptx.options.conversion import ConversionOptions
from ckptx.processes.threads import thread_errors
from ckptx.storage.interface import Source, SourceFiles
from ckptx.transfer.digest_sink import digest_tensor
from ckptx.transfer.stream import TensorReader


def check_reordered(
    tree: Source, written: Catalog, restored: RestoredFiles, source: SourceFiles, options: ConversionOptions
) -> None:
    """Check the tensors that were combined, split or reordered.

    Args:
        tree: Directory of the written files.
        written: Catalog of these files.
        restored: Recorded digests and the inverse operations.
        source: Files of the source; a source tensor that the inverse operations do not give is read there instead.
        options: Number of threads and memory for buffers.

    Raises:
        InputError: A digest differs from the recorded one.
    """
    inverse = _inverse_tensors(written, restored)
    with tree.open() as files:
        files_by_has_inverse = {True: files, False: source}

        def check(name: str) -> None:
            stored = restored.view.tensors[name]
            entry = inverse.get(name)
            has_inverse = entry is not None and (entry.dtype, entry.shape) == (stored.dtype, stored.shape)
            reader = TensorReader(files_by_has_inverse[has_inverse], options.buffer_bytes // options.threads)
            digest = (
                digest_tensor(reader, entry if has_inverse and entry is not None else stored, stored.dtype)
                .digest()
                .hex()
            )
            if digest != restored.reordered_digests[name]:
                raise changed_bytes_error(name, digest, restored.reordered_digests[name])

        with thread_errors(), ThreadPoolExecutor(options.threads) as threads:
            for _ in threads.map(check, restored.reordered_digests):
                pass


def _inverse_tensors(written: Catalog, restored: RestoredFiles) -> Mapping[str, TensorEntry]:
    """Return source tensors, by name in the source, that are read from the written files; empty if irreversible."""
    try:
        return restored.in_source_form(written.tensors)
    except CkptxError:
        return {}
