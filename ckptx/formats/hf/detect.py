"""Find HF weights: safetensors first, then `.bin` files, and an index before a single file of either kind.

Files of other names come last: the only other index, or safetensors files. A safetensors file of any name may contain
shards of tensors; the header decides, and is read if the name does not tell.
"""

from __future__ import annotations

from ckptx.errors import InputError
from ckptx.formats.hf.reader import INDEX_FILE, SINGLE_FILE, open_huggingface, parse_index, read_text
from ckptx.formats.located_checkpoint import LocatedCheckpoint
from ckptx.formats.rank_files import ShapeReader, complete_files
from ckptx.formats.sharding_info import files_with_sharding_info
from ckptx.formats.unsupported import kind_of_name
from ckptx.storage.interface import Source
from ckptx.untrusted.limits import MAX_INDEX_BYTES

_BIN_INDEX, _BIN = "pytorch_model.bin.index.json", "pytorch_model.bin"
_FSDP_BIN = "pytorch_model_fsdp.bin"  # the whole state dict, as accelerate saves it with FULL_STATE_DICT
WHOLE_CHECKPOINT_NAMES = frozenset({SINGLE_FILE, _BIN, _FSDP_BIN})  # files that are a whole checkpoint


def detect_weights(source: Source, read_shapes: ShapeReader) -> LocatedCheckpoint | None:
    """Find the HF weights of a directory.

    Args:
        source: The directory.
        read_shapes: Reads the shapes of the tensors in a file, to distinguish one rank's part from a whole model.

    Returns:
        The weights: format "huggingface", "bin" or "sharded"; None if the directory has none.

    Raises:
        InputError: There are several checkpoints in the directory.
        UnsupportedError: The files are parts of one checkpoint, written per rank.
    """
    listing = source.listing()
    has_single_file, has_index = listing.has(SINGLE_FILE), listing.has(INDEX_FILE)
    if (
        has_single_file
        and has_index
        and SINGLE_FILE not in source.read_small(INDEX_FILE, MAX_INDEX_BYTES).decode("utf-8", "replace")
    ):
        raise InputError(
            f"{source.location}: has both {SINGLE_FILE} and {INDEX_FILE}, which does not list it, and loaders disagree "
            "on which to use; pass one of them as SRC"
        )
    if has_index:
        return LocatedCheckpoint(source, "huggingface", (INDEX_FILE,))
    if has_single_file:
        return locate_by_header(source, SINGLE_FILE)
    for name in (_BIN_INDEX, _BIN, _FSDP_BIN):
        if listing.has(name):
            return LocatedCheckpoint(source, "bin", (name,))
    indexes = [name for name in listing if name.endswith(".safetensors.index.json")]
    if len(indexes) == 1:
        return LocatedCheckpoint(source, "huggingface", (indexes[0],))
    files = [name for name in listing if name.endswith(".safetensors")]
    if not indexes and files_with_sharding_info(source, files):
        return LocatedCheckpoint(source, "sharded", (".",))
    candidates = indexes or [name for name in files if kind_of_name(name) is None]
    if not candidates:
        return None
    if len(candidates) > 1:
        candidates = complete_files(source, candidates, read_shapes)
        raise InputError(
            f"{source.location}: no model.safetensors or index, but {', '.join(candidates[:8])}; choose one "
            "and pass it as SRC"
        )
    return LocatedCheckpoint(source, "huggingface", (candidates[0],))


def locate_by_header(source: Source, weights: str) -> LocatedCheckpoint:
    """Locate the checkpoint of one weight file or index: the file alone, or all sharded files of its directory.

    An index is taken alone, and so is a file whose header records no offsets of shards. A file that records offsets may
    still contain whole tensors. It is taken alone if a valid index lists it, or if it is model.safetensors and no other
    file of the directory records offsets.

    Raises:
        InputError: An index of the directory, or a file that it lists, is damaged.
    """
    single_file = LocatedCheckpoint(source, "huggingface", (weights,))
    if weights.endswith(".json") or not files_with_sharding_info(source, [weights]):
        return single_file
    other_names = [name for name in source.listing() if name != weights]
    for index in other_names:
        if index.endswith(".safetensors.index.json"):
            listed = parse_index(read_text(source, index, MAX_INDEX_BYTES), source.location / index).values()
            if weights in listed and open_huggingface(source, index) is not None:
                return single_file
    if weights != SINGLE_FILE or files_with_sharding_info(
        source, [name for name in other_names if name.endswith(".safetensors")]
    ):
        return LocatedCheckpoint(source, "sharded", (".",))
    return single_file
