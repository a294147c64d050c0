"""Limits on the contents of a checkpoint.

Each limit is far above what real checkpoints have, and low enough that reaching it takes seconds rather than hours.
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

# Torch allows 64 dims, and 63 bits for element counts and strides.
DIMS = 64
ELEMENT_BITS = 63
# The largest elements have 16 bytes, and positions in a file 63 bits.
STORED_BITS = 59

NAME_LENGTH = 4000  # characters; Python parses at most 4,300 digits, and a name may consist of digits
TENSORS = 1 << 20  # of one file or one `.metadata`
RANKS = 1 << 16
LISTED_NAMES = 1 << 20  # in one directory
REMEMBERED_NAMES = 1 << 18  # of all directories listed to find a checkpoint
WORKERS = 1 << 10
MEMORY_BYTES = 1 << 50
LAYERS = 1 << 16
# An index in a name: a component of only digits, between dots or the ends of the name. The lookbehind is at the first
# digit, because searching for a digit is faster than searching for a position after a dot. Indices of module lists have
# no leading zero: "01" is another name than "1".
INDEX = re.compile(r"[0-9](?<![^.][0-9])(?:(?<!0)[0-9]{0,8})?(?![^.])")


def shape_fault(shape: tuple[int, ...] | list[int]) -> str | None:
    """Return the reason why no tensor can have this shape, or None if one can.

    Dims of size 0 count as 1, as in strides: the strides of a tensor without elements must still be valid.

    Args:
        shape: Sizes, which must be integers.

    Example:
        [0, 2**64] has "a dim of 65 bits"; [4, 4] has no fault.
    """
    if len(shape) > DIMS:
        return f"{len(shape)} dims, more than {DIMS}"
    total = 1
    for size in shape:
        if size < 0:
            return "a negative dim"
        if size.bit_length() > ELEMENT_BITS:
            return f"a dim of {size.bit_length()} bits, more than {ELEMENT_BITS}"
        total *= size or 1
    if total.bit_length() > ELEMENT_BITS:
        return f"more than 2**{ELEMENT_BITS} elements"
    if prod(shape).bit_length() > STORED_BITS:
        return f"more than 2**{STORED_BITS} elements, too many for a file"
    return None
