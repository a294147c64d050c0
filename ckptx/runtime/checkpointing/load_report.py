"""What came of every tensor when a checkpoint was loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

# Why a tensor was left unread. Any other reason is one of `ckptx.architecture.extra_tensors`: it may be there.
NO_PLACE = "no place in this model"
UNKNOWN = "unknown to the class"
OPTIMIZER = "optimizer state"
OTHER_STATE = "not of the model"
LACKING = "of a layer that uses the tensors of another layer"


class LoadedTensor(NamedTuple):
    """One parameter or buffer that was read.

    Attributes:
        stored: The names on disk of what it is made of.
        nbytes: Bytes of it on this rank.
    """

    stored: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class LoadLedger:
    """What one rank loaded, and what it did not.

    Attributes:
        loaded: By name in the model. Of names that share a parameter, the first.
        tied: Other names of loaded parameters -> that first name; and names loaded through the name they are tied to,
            where the checkpoint has only that one -> its name in the model.
        initialised: Buffers that come from the config, not from the checkpoint.
        unread: Names on disk of tensors that were not needed, with the reason.
        bytes_read: Bytes read from the files. More than `nbytes` where rows are too short to be read one by one.
        unchecked: Bytes whose checksum was not looked at, as it speaks of bytes of other ranks too.
    """

    loaded: Mapping[str, LoadedTensor]
    tied: Mapping[str, str]
    initialised: tuple[str, ...]
    unread: Mapping[str, str]
    bytes_read: int
    unchecked: int

    @property
    def nbytes(self) -> int:
        """Bytes of everything loaded on this rank, what is shared counted once."""
        return sum(each.nbytes for each in self.loaded.values())
