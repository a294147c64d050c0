"""Check original files against digests that were recorded of the same elements in another order.

What was stored under torchtitan's names, or with experts in one tensor, is no tensor of the original files, so that its
recorded digest is none of theirs. The files that were written are therefore read as the source has them, through the
inverse of the operations that made them, which costs one more pass over these tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import TensorEntry
from ckptx.conversion.steps.restoration import RestoredFiles
from ckptx.conversion.steps.written import changed_since
from ckptx.errors import CkptxError
from ckptx.options.conversion import ConversionOptions
from ckptx.storage.interface import Source, SourceFiles
from ckptx.transfer.digest_sink import digest_of
from ckptx.transfer.stream import TensorReader


def check_reordered(
    tree: Source, written: Catalog, restored: RestoredFiles, source: SourceFiles, options: ConversionOptions
) -> None:
    """Check the tensors that were put together, taken apart or reordered.

    Args:
        tree: The directory of the written files.
        written: The tensors in them.
        restored: The digests that are recorded, and the way back.
        source: Files of the source. A tensor to which no way back leads is read there, in the order it has.
        options: The number of threads, and their memory.

    Raises:
        InputError: The bytes are not those that were recorded.
    """
    back = _way_back(written, restored)
    with tree.open() as files:
        pools = {True: files, False: source}

        def check(name: str) -> None:
            stored = restored.view.tensors[name]
            entry = back.get(name)
            is_back = entry is not None and (entry.dtype, entry.shape) == (stored.dtype, stored.shape)
            reader = TensorReader(pools[is_back], options.buffer_bytes // options.threads)
            found = digest_of(reader, entry if is_back and entry is not None else stored, stored.dtype).digest().hex()
            if found != restored.reordered[name]:
                raise changed_since(name, found, restored.reordered[name])

        with ThreadPoolExecutor(options.threads) as threads:
            for _ in threads.map(check, restored.reordered):
                pass


def _way_back(written: Catalog, restored: RestoredFiles) -> Mapping[str, TensorEntry]:
    try:
        return restored.stored_again(written.tensors)
    except CkptxError:
        return {}
