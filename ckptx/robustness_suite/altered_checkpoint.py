"""Copy a checkpoint and alter a few weights in the copy, to test whether a trainer loads the copy.

With a fixed seed, a trainer that ignores its checkpoint reaches the state of the uninterrupted run from scratch. No
seed recreates the altered weights: a run that has them has loaded them.

In up to four tensors of the model, up to 16 elements change by the lowest bit that the tensor uses (of float32 values
that bfloat16 or float16 can represent, by a bit that these dtypes have), so that the altered model is as good as the
saved one; CRC-32 of zip files are updated. Tensors in safetensors, in a DCP and in zip files of `torch.save` can be
altered, other files cannot.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from functools import partial
from os import SEEK_END
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zipfile import ZipFile

import numpy as np

from ckptx.catalog.entry import Chunk, Record, TensorEntry
from ckptx.catalog.region import full_region
from ckptx.errors import CkptxError, OutputError
from ckptx.formats.dcp.reader import locate_payloads
from ckptx.formats.hf.safetensors import parse_header
from ckptx.robustness_suite.checkpoint_files import DCP, PICKLE, SAFETENSORS, ComparedFile, list_files
from ckptx.robustness_suite.item_oracles import StoredItem, oracles_of_items
from ckptx.robustness_suite.oracles import Items
from ckptx.robustness_suite.pickle_reader import PickleReader
from ckptx.robustness_suite.stored_items import read_items
from ckptx.robustness_suite.tensor_digests import TensorDigests
from ckptx.storage.files import FilePool

_MAX_TENSORS = 4
_MAX_ELEMENTS = 16
_MAX_READ_BYTES = 1 << 20
_BF16_MANTISSA_BITS = 7
_DESCRIPTOR_NBYTES = 8  # signature and CRC-32 of a data descriptor
# Name of a dtype -> integers of its width, number of mantissa bits, mask of the exponent.
_LAYOUTS = {
    "F64": ("<u8", 52, 0x7FF << 52),
    "F32": ("<u4", 23, 0xFF << 23),
    "BF16": ("<u2", 7, 0xFF << 7),
    "F16": ("<u2", 10, 0x1F << 10),
}


class AlteredCheckpoint(NamedTuple):
    """An altered copy of a checkpoint.

    Attributes:
        items: Items of the model that differ from those of the original, with their values in the copy; empty if no
            tensor could be altered.
        reason: Reason why no tensor could be altered; "" if one was.
    """

    items: Items
    reason: str = ""


class _TensorBytes(NamedTuple):
    """A tensor of the model in the copy.

    Attributes:
        path: File with its first chunk.
        entry: Located tensor.
        text: Digest, with dtype and shape.
        archive_end: End of the archive of the first chunk in a file of a DCP, in bytes from the start of the file; None
            for other formats, in which an archive is a whole file.
    """

    path: Path
    entry: TensorEntry
    text: str
    archive_end: int | None


def copy_altered(source: Path, target: Path, source_items: Items) -> AlteredCheckpoint:
    """Copy a checkpoint, and alter weights in the copy.

    Args:
        source: Folder or file of the checkpoint; it is only read.
        target: Path of the copy; it must not exist.
        source_items: Items of the checkpoint.

    Raises:
        OutputError: The copy cannot be written.
        InputError: The checkpoint is damaged.
    """
    if any(oracle == "master weights" for oracle, _ in source_items):
        return AlteredCheckpoint(
            {}, "the optimizer has master weights, from which a trainer may overwrite the weights that it loaded"
        )
    try:
        target.parent.mkdir(parents=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
    except (OSError, shutil.Error) as error:
        text = (error.strerror if isinstance(error, OSError) else None) or "a file of the checkpoint cannot be copied"
        raise OutputError(f"{target}: cannot be written: {text}") from error
    tensors = _alterable_tensors(target)
    if not tensors:
        return AlteredCheckpoint(
            {}, "no weights were found in safetensors files, in a DCP or in zip files of torch.save that can be altered"
        )
    for tensor in tensors:
        _alter(tensor)
    items = read_items(target)
    altered = {key: value for key, value in items.items() if key[0] == "model" and source_items.get(key) != value}
    return AlteredCheckpoint(altered, "" if altered else "all weights that can be altered are 0 or not finite")


def _alterable_tensors(path: Path) -> list[_TensorBytes]:
    """Return up to `_MAX_TENSORS` of the largest tensors of the model, without copies of others, such as tied weights.

    A tensor that has a copy is left out, too.
    """
    tensors = [each for file in list_files(path) for each in _tensors_of(file)]
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor.text] = counts.get(tensor.text, 0) + 1
    unique = [each for each in tensors if counts[each.text] == 1]
    unique.sort(key=lambda each: -each.entry.nbytes)
    return unique[:_MAX_TENSORS]


def _tensors_of(file: ComparedFile) -> Iterator[_TensorBytes]:
    """Yield the floating-point tensors of the model in a file, or in a DCP."""
    if file.kind not in (DCP, SAFETENSORS, PICKLE) or not file.may_contain("model"):
        return
    folder = file.path if file.kind == DCP else file.path.parent
    with FilePool(folder) as files:
        digests = TensorDigests(files)
        try:
            entries = list(_entries(file, files, digests))
        except CkptxError:
            return  # another kind of file, which is compared by its bytes
        is_parameter_by_default = file.kind != PICKLE
        stored = [
            StoredItem(file.full_name(each.name), file.label, is_parameter_by_default, each.shape, each.dtype.name)
            for each in entries
        ]
        for entry, oracles in zip(entries, oracles_of_items(stored), strict=True):
            if oracles == ("model",) and entry.dtype.name in _LAYOUTS and entry.numel:
                end = None
                if file.catalog is not None:
                    archive = file.catalog.tensors[entry.name].chunks[0]
                    end = archive.offset + archive.nbytes
                yield _TensorBytes(folder / entry.chunks[0].file, entry, digests.describe(entry), end)


def _entries(file: ComparedFile, files: FilePool, digests: TensorDigests) -> Iterator[TensorEntry]:
    """Yield the tensors in a file or DCP, with the positions of their bytes."""
    name = file.path.name
    if file.kind == DCP:
        assert file.catalog is not None
        yield from locate_payloads(file.catalog, files, lazy=True).tensors.values()
    elif file.kind == SAFETENSORS:
        for tensor in parse_header(partial(files.read, name), files.size(name), str(file.path)).tensors:
            chunk = Chunk(full_region(tensor.shape), name, tensor.begin, tensor.end - tensor.begin)
            yield TensorEntry(tensor.name, tensor.dtype, tensor.shape, (chunk,))
    else:
        reader = PickleReader(files, name, str(file.path), digests)
        for leaf in reader.leaves():
            parts = reader.read_tensor(".".join(leaf.path), leaf.value)
            if parts is not None and parts[1] is None:
                yield parts[0]


def _alter(tensor: _TensorBytes) -> None:
    """Alter elements of the first chunk of a tensor, if it has any that are normal numbers."""
    integer, mantissa_bits, exponent = _LAYOUTS[tensor.entry.dtype.name]
    chunk = tensor.entry.chunks[0]
    nbytes = min(chunk.nbytes, _MAX_READ_BYTES)
    with open(tensor.path, "r+b") as file:
        file.seek(chunk.offset)
        values = np.frombuffer(bytearray(file.read(nbytes)), integer)
        exponents = values & values.dtype.type(exponent)
        (normal,) = np.nonzero((exponents != 0) & (exponents != exponent))
        if not len(normal):
            return
        used = int(np.bitwise_or.reduce(values[normal])) | 1 << (mantissa_bits - _BF16_MANTISSA_BITS)
        bit = used & -used  # the lowest bit in use, at most that of bfloat16
        selected = normal[:: max(len(normal) // _MAX_ELEMENTS, 1)][:_MAX_ELEMENTS]
        values[selected] ^= values.dtype.type(bit)
        file.seek(chunk.offset)
        file.write(values.tobytes())
        if chunk.record is not None and chunk.record.crc is not None:
            _update_crc(file, chunk.record, tensor.archive_end)


def _update_crc(file: BinaryIO, record: Record, archive_end: int | None) -> None:
    """Replace the CRC-32 of a record in its data descriptor and in the directory of its archive.

    Args:
        file: File with the archive.
        record: Record whose bytes have changed, with its old CRC-32.
        archive_end: End of the archive, which has no other record of tensors; None for the end of the file.
    """
    assert record.crc is not None
    old_crc, crc, position, end = record.crc.to_bytes(4, "little"), 0, record.offset, record.offset + record.nbytes
    file.seek(position)
    while position < end:
        block = file.read(min(_MAX_READ_BYTES, end - position))
        crc, position = zlib.crc32(block, crc), position + len(block)
    spans = [(end, archive_end)] if archive_end is not None else [(end, end + _DESCRIPTOR_NBYTES)]
    if archive_end is None:
        with ZipFile(file) as archive:
            spans.append((archive.start_dir, file.seek(0, SEEK_END)))
    for first, last in spans:
        file.seek(first)
        changed = file.read(last - first).replace(old_crc, crc.to_bytes(4, "little"))
        file.seek(first)
        file.write(changed)
