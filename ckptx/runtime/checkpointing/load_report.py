"""The report of a load: which tensors were read, tied, computed or left unread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

# Reasons for unread tensors. Other reasons are those of allowed extra tensors, from `ckptx.architecture.extra_tensors`,
# and descriptions of other models in the same checkpoint.
NOT_IN_MODEL = "no place in this model"
UNKNOWN_TO_CLASS = "unknown to the class"
OPTIMIZER_STATE = "optimizer state"
OTHER_STATE = "not part of the model"
FROM_OTHER_LAYER = "of a layer that uses the tensors of another layer"


class LoadedTensor(NamedTuple):
    """A parameter or buffer that was read.

    Attributes:
        stored_names: Names on disk of the tensors that it is made of.
        nbytes: Bytes on this rank.
    """

    stored_names: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The tensors that one rank loaded and those that it did not.

    Attributes:
        loaded_tensors: Loaded tensors by model name; a tied parameter has its first name.
        tied_names: Name -> name that it is tied to: for the other names of a loaded parameter its first name, and for a
            parameter that the checkpoint stores only under the name of another one, that name.
        initialized_buffers: Names of buffers that were computed from the config, not read from the checkpoint.
        unread_names: Name on disk of a tensor or other value that was not read -> reason.
        bytes_read: Bytes read from the files. They differ from `nbytes` if the stored dtype is another one, if tied
            names are stored separately and compared, or if rows are too short to be read one by one.
        unverified_bytes: Bytes whose checksum was not verified because it also covers bytes of other ranks.
    """

    loaded_tensors: Mapping[str, LoadedTensor]
    tied_names: Mapping[str, str]
    initialized_buffers: tuple[str, ...]
    unread_names: Mapping[str, str]
    bytes_read: int
    unverified_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all loaded tensors on this rank; shared ones count once."""
        return sum(each.nbytes for each in self.loaded_tensors.values())
