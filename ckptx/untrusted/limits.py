"""Limits on the contents of a checkpoint.

Each limit is far above what real checkpoints have, and low enough that reaching it takes seconds rather than hours.
"""

from __future__ import annotations

import re
from math import prod

# Maximum sizes, in bytes, of files that are read whole. A DCP of a thousand ranks has a `.metadata` of some 200 MB.
MAX_CONFIG_BYTES = 64 << 20
MAX_INDEX_BYTES = 256 << 20
MAX_PLAN_BYTES = 16 << 20
MAX_METADATA_BYTES = 1 << 30
MAX_MANIFEST_BYTES = 256 << 20
MAX_PICKLE_BYTES = 256 << 20  # `data.pkl` of one archive

MAX_JSON_DEPTH = 64  # levels of nested objects and lists
MAX_JSON_NUMBER_BITS = 320  # some tokenizers write 1e30 for "no limit"

# Torch allows 64 dims, and 63 bits for element counts and strides.
MAX_DIMS = 64
MAX_NUMEL_BITS = 63
# The largest elements have 16 bytes, and positions in a file 63 bits.
MAX_STORED_NUMEL_BITS = 59

MAX_NAME_LENGTH = 4000  # characters; Python parses at most 4,300 digits, and a name may consist of digits
MAX_TENSORS = 1 << 20  # in one file or one `.metadata`
MAX_RANKS = 1 << 16  # in a mesh
MAX_LISTED_NAMES = 1 << 20  # in one directory
MAX_CACHED_NAMES = 1 << 18  # in all cached directory listings together
MAX_WORKERS = 1 << 10  # threads that a user may ask for
MAX_MEMORY_BYTES = 1 << 50  # that a user may allow
MAX_LAYERS = 1 << 16  # in one list of layers
# An index in a name: a component of at most nine digits, between dots or the ends of the name. The lookbehind is at the
# first digit, because searching for a digit is faster than searching for a position after a dot. Indices of module
# lists have no leading zero: "01" is another name than "1".
INDEX_IN_NAME = re.compile(r"[0-9](?<![^.][0-9])(?:(?<!0)[0-9]{0,8})?(?![^.])")


def find_shape_fault(shape: tuple[int, ...] | list[int]) -> str | None:
    """Return the reason why no tensor can have this shape, or None if one can.

    For the limit on elements, dims of size 0 count as 1, as they do in strides: torch requires valid strides even for a
    tensor without elements.

    Args:
        shape: Sizes, which must be integers.

    Example:
        [0, 2**64] has "a dim of 65 bits"; [4, 4] has no fault.
    """
    if len(shape) > MAX_DIMS:
        return f"{len(shape)} dims, more than {MAX_DIMS}"
    total = 1
    for size in shape:
        if size < 0:
            return "a negative dim"
        if size.bit_length() > MAX_NUMEL_BITS:
            return f"a dim of {size.bit_length()} bits, more than {MAX_NUMEL_BITS}"
        total *= size or 1
    if total.bit_length() > MAX_NUMEL_BITS:
        return f"more than 2**{MAX_NUMEL_BITS} elements"
    if prod(shape).bit_length() > MAX_STORED_NUMEL_BITS:
        return f"more than 2**{MAX_STORED_NUMEL_BITS} elements, too many for a file"
    return None
