"""Recognize a DCP of VeOmni whose experts are stored in another order.

With its option `muon_expert_zero_comm`, VeOmni shards experts along dim 0 twice: by expert parallelism, then by FSDP.
It records the FSDP rank as the outer of both, so that the DCP states wrong offsets. With 8 experts, EP 2 and FSDP 2:

    rank                    0       1       2       3
    experts that it holds   0, 1    4, 5    2, 3    6, 7
    as stated in the DCP    0, 1    2, 3    4, 5    6, 7

Source: `restore_extra_parallel_dim` in veomni/checkpoint/dcp_checkpointer.py, whose docstring states it (August 2026).
"""

from __future__ import annotations

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import TensorEntry
from ckptx.errors import UnsupportedError
from ckptx.layout.expert_parallel import find_position
from ckptx.mapping.names import is_optimizer

_EXTRA_STATE = "extra_state"  # directory that VeOmni writes next to `.metadata`
_MUON_STATE = ".momentum_buffer"


def refuse_reordered_experts(catalog: Catalog) -> None:
    """Refuse a DCP of VeOmni with experts and the state of Muon in the layout of `muon_expert_zero_comm`.

    The layout of such a run without expert parallelism, whose experts are in order, is the same, and refused, too.

    Raises:
        UnsupportedError: The experts may be in another order than the DCP states.
    """
    if catalog.format != "dcp" or _EXTRA_STATE not in catalog.source.listing().names:
        return
    state = [name for name in catalog.tensors if is_optimizer(name) and name.endswith(_MUON_STATE)]
    for name in state:
        parameter = name.removesuffix(_MUON_STATE)
        entry = catalog.tensors[name]
        position = find_position(parameter, entry.shape)
        if position is not None and position.expert is None and _is_divided_along_dim_0_only(entry):
            raise UnsupportedError(
                f'{catalog.location}: "{name}" is state of Muon in a checkpoint of VeOmni, which with '
                "muon_expert_zero_comm stores experts in another order than the DCP states; save the weights with "
                "VeOmni in Hugging Face format, or, if the run had no expert parallelism, move the directory "
                f"{_EXTRA_STATE} away"
            )


def _is_divided_along_dim_0_only(entry: TensorEntry) -> bool:
    """Return True if a tensor has several chunks, and each is whole along all dims but the first."""
    chunks = list(entry.chunks)
    return len(chunks) > 1 and all(chunk.region.sizes[1:] == entry.shape[1:] for chunk in chunks)
