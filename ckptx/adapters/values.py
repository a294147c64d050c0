"""Check the values of an adapter before it is merged: they are finite, and some of them change the model."""

from __future__ import annotations

import numpy as np

from ckptx.adapters.adapter import Adapter
from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import Region
from ckptx.errors import InputError
from ckptx.quantization.dequantize import read_region, stored_to_float32
from ckptx.storage.interface import SourceFiles
from ckptx.transfer.stream import TensorReader
from ckptx.wording import counted, first_of

_PART_NBYTES = 16 << 20


def check_values(adapter: Adapter, files: SourceFiles) -> list[str]:
    """Read all tensors of an adapter, some rows at a time.

    Args:
        adapter: The adapter.
        files: Its files.

    Returns:
        Notes for the user: modules that the adapter does not change, because B (or A) is zero.

    Raises:
        InputError: A value is NaN or infinite, or the adapter changes nothing.
    """
    reader = TensorReader(files)
    zero = []
    for layer in adapter.layers.values():
        is_nonzero = [_is_nonzero(reader, entry, adapter) for entry in layer.entries]
        if not (is_nonzero[0] and is_nonzero[1]):
            zero.append(layer.module)
    for module, pairs in adapter.parameters.items():
        for pair in pairs:
            is_nonzero = [_is_nonzero(reader, entry, adapter) for entry in pair]
            if not all(is_nonzero):
                zero.append(module)
    for entry in adapter.replaced.values():
        _is_nonzero(reader, entry, adapter)
    if not zero:
        return []
    total = len(adapter.layers) + sum(map(len, adapter.parameters.values()))
    if len(zero) == total and not adapter.replaced:
        raise InputError(
            f"{adapter.catalog.location}: B is zero in every module, so that the adapter changes nothing; it was saved "
            "before training or incompletely, save it again"
        )
    note = (
        f"{adapter.catalog.location}: B is zero in {len(zero):,} of {counted(total, 'module')}, which the "
        f"adapter does not change: {first_of(zero)}"
    )
    return [note]


def _is_nonzero(reader: TensorReader, entry: TensorEntry, adapter: Adapter) -> bool:
    """Return True if a tensor has a value other than zero.

    Raises:
        InputError: A value is NaN or infinite.
    """
    row_nbytes = max(1, entry.nbytes // max(1, entry.shape[0] if entry.shape else 1))
    step = max(1, _PART_NBYTES // row_nbytes)
    is_nonzero = False
    for first in range(0, entry.shape[0] if entry.shape else 1, step):
        region = Region((), ())
        if entry.shape:
            count = min(step, entry.shape[0] - first)
            region = Region((first, *(0 for _ in entry.shape[1:])), (count, *entry.shape[1:]))
        data = read_region(reader, entry, region)
        values = data.view("<f8") if entry.dtype.name == "F64" else stored_to_float32(data, entry.dtype)
        if not np.isfinite(values).all():
            raise InputError(
                f'{adapter.catalog.location}: tensor "{entry.name}" has values that are NaN or infinite; the training '
                "diverged or the file is damaged, pass another step"
            )
        is_nonzero = is_nonzero or bool(values.any())
    return is_nonzero
