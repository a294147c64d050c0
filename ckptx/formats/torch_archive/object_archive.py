"""Write a `torch.save` archive of plain values: a zip file whose members are stored, with no tensor.

`torch.load` reads it with `weights_only=True`, because the pickle names no class.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from io import BytesIO

PlainValue = None | bool | int | float | str | Mapping[str, "PlainValue"]

_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest time of a zip file, so that equal values give equal bytes


def object_archive(value: PlainValue) -> bytes:
    """Return the bytes of an archive with one value.

    Args:
        value: Plain value; mappings must be dicts with string keys.
    """
    buffer = BytesIO()
    members = {"data.pkl": pickle.dumps(value, protocol=2), "byteorder": b"little", "version": b"3\n"}
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}", _TIME), data)
    return buffer.getvalue()
