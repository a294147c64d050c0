"""How much of anything a checkpoint may hold before it is refused.

Each limit lies far above what real checkpoints have, and low enough that reaching it costs seconds and not hours.
"""

from __future__ import annotations

import re
from math import prod

# Bytes of small files, which are read whole. A DCP of a thousand ranks has a `.metadata` of some 200 MB.
CONFIG_BYTES = 64 << 20
INDEX_BYTES = 256 << 20
PLAN_BYTES = 16 << 20
METADATA_BYTES = 1 << 30
MANIFEST_BYTES = 256 << 20
PICKLE_BYTES = 256 << 20  # `data.pkl` of one archive

JSON_DEPTH = 64
JSON_BITS = 320  # of a number; some tokenizers write 1e30 for "no limit"

# Torch allows 64 dims, and counts elements and strides in 63 bits.
DIMS = 64
ELEMENT_BITS = 63
# The largest elements have 16 bytes, and positions in a file 63 bits.
STORED_BITS = 59

NAME_LENGTH = 4000  # characters; Python reads no number of more than 4,300 digits, and a name may be all digits
TENSORS = 1 << 20  # of one file or one `.metadata`
RANKS = 1 << 16
LISTED_NAMES = 1 << 20  # in one directory
REMEMBERED_NAMES = 1 << 18  # of all directories listed to find a checkpoint
WORKERS = 1 << 10
MEMORY_BYTES = 1 << 50
LAYERS = 1 << 16
# An index in a name: a component of digits alone, nothing but a dot, or an end, on either side. What stands before it
# is asked for at its first digit: a name is searched faster for a digit than for a place behind a dot. No module list
# has an index with a zero in front: "01" is a name of its own, and not another spelling of 1.
INDEX = re.compile(r"[0-9](?<![^.][0-9])(?:(?<!0)[0-9]{0,8})?(?![^.])")


def shape_fault(shape: tuple[int, ...] | list[int]) -> str | None:
    """Why no tensor can have this shape, or None when one can.

    Dims of size 0 count as 1, as they do in strides: a tensor without elements still has to be described.

    Args:
        shape: Sizes that are known to be whole numbers.

    Example:
        [0, 2**64] has "a dim of 65 bits"; [4, 4] has no fault.
    """
    if len(shape) > DIMS:
        return f"{len(shape)} dims, allowed at most {DIMS}"
    total = 1
    for size in shape:
        if size < 0:
            return "a negative dim"
        if size.bit_length() > ELEMENT_BITS:
            return f"a dim of {size.bit_length()} bits, allowed at most {ELEMENT_BITS}"
        total *= size or 1
    if total.bit_length() > ELEMENT_BITS:
        return f"more than 2**{ELEMENT_BITS} elements"
    if prod(shape).bit_length() > STORED_BITS:
        return f"more than 2**{STORED_BITS} elements, whose bytes no file can hold"
    return None
