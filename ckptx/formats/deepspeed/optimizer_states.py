"""Read the optimizer states of one data rank: its part of the fp32 masters and of the optimizer's tensors.

                            stages 1 and 2                          stage 3
    fp32 masters            single_partition_of_fp32_groups[g]      fp32_flat_groups[g]
    state of group g        base_optimizer_state.state[g]           optimizer_state_dict.state[g]

All under the key `optimizer_state_dict`. In stages 1 and 2, g counts parameter groups, in stage 3 sub-groups. With
`elastic_checkpoint`, `base_optimizer_state` is a list of the states of the groups. `zero_stage` is absent if the
optimizer is a `BF16_Optimizer`, which is stage 1.

Source: `state_dict` in `deepspeed/runtime/zero/stage_1_and_2.py`, `stage3.py` and `runtime/bf16_optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from ckptx.catalog.entry import Record
from ckptx.errors import UnsupportedError
from ckptx.formats.deepspeed.flat_chunks import FlatPart
from ckptx.formats.deepspeed.pickles import damaged_error, load_optimizer_states, require_dict, require_list
from ckptx.formats.hf.torch_bin import is_utf8
from ckptx.formats.torch_archive.archive import locate_tensor, open_archive
from ckptx.formats.torch_archive.unpickle import TensorRef, UnsupportedObject
from ckptx.storage.interface import SourceFiles
from ckptx.untrusted.limits import MAX_NAME_LENGTH

_OPTIMIZER = "optimizer_state_dict"
_MASTERS, _MASTERS_OF_STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
ZERO_TO_FP32 = "run the zero_to_fp32.py next to it without --safe_serialization and pass the directory it writes"


class GroupState(NamedTuple):
    """The tensors of one group on one rank.

    Attributes:
        masters: Flat tensor of the fp32 masters.
        flat: Flat tensors of the optimizer, such as `exp_avg`, by name.
        scalars: Tensors of one element of the optimizer, such as `step`, by name.
        others: Names of values that are not converted: numbers, and tensors of other forms.
    """

    masters: FlatPart
    flat: Mapping[str, FlatPart]
    scalars: Mapping[str, FlatPart]
    others: tuple[str, ...]


class RankState(NamedTuple):
    """The optimizer states of one rank.

    Attributes:
        stage: 3, or 2 for stages 1 and 2, which have the same format.
        partition_counts: Number of ranks over which each group is partitioned; one number in stage 3, and empty if the
            file does not record them.
        alignment_paddings: Elements after each parameter of each group in stages 1 and 2; None if not recorded.
        groups: The groups.
    """

    stage: int
    partition_counts: tuple[int, ...]
    alignment_paddings: tuple[tuple[int, ...], ...] | None
    groups: tuple[GroupState, ...]


def read_rank_state(files: SourceFiles, name: str) -> RankState:
    """Read the pickle of one file of optimizer states.

    Raises:
        InputError: The file is damaged.
        UnsupportedError: It is not of ZeRO, or its tensors were not in memory when it was saved.
    """
    where = f"{files.root / name}"
    archive = open_archive(partial(files.read, name), 0, files.size(name), where, load_optimizer_states)
    return _RankReader(name, where, archive.records).read(require_dict(archive.tree, where))


class _RankReader:
    """Reads the values in one file of optimizer states; its methods raise the errors of `read_rank_state`."""

    def __init__(self, file: str, where: str, records: dict[str, Record]) -> None:
        self.file, self.where, self.records = file, where, records

    def read(self, tree: Mapping[Any, Any]) -> RankState:
        state = require_dict(tree.get(_OPTIMIZER), self.where)
        stage = state.get("zero_stage")
        if _MASTERS_OF_STAGE_3 in state:
            if stage not in (3, None):
                raise damaged_error(self.where, f"has {_MASTERS_OF_STAGE_3}, but zero_stage is not 3")
            base = state.get(_OPTIMIZER)
            masters = require_list(state[_MASTERS_OF_STAGE_3], self.where, _MASTERS_OF_STAGE_3)
            is_stage_3 = True
        elif _MASTERS in state:
            if stage not in (1, 2, None):
                raise damaged_error(self.where, f"has {_MASTERS}, but zero_stage is not 1 or 2")
            base = state.get("base_optimizer_state")
            masters = require_list(state[_MASTERS], self.where, _MASTERS)
            is_stage_3 = False
        else:
            raise UnsupportedError(
                f"{self.where}: has neither {_MASTERS} nor {_MASTERS_OF_STAGE_3}, so it is not of ZeRO or of an old "
                f"DeepSpeed; {ZERO_TO_FP32}"
            )
        if not masters:
            raise UnsupportedError(
                f"{self.where}: has no fp32 masters, as with offload to NVMe; save the checkpoint without it"
            )
        groups = tuple(
            self._read_group(value, self._state_of(base, index), f"{self.where}: group {index}")
            for index, value in enumerate(masters)
        )
        return RankState(
            3 if is_stage_3 else 2, self._counts(state.get("partition_count")), self._paddings(state), groups
        )

    def _counts(self, value: object) -> tuple[int, ...]:
        if value is None:
            return ()
        counts = require_list([value] if type(value) is int else value, self.where, "partition_count")
        if not all(type(count) is int and count > 0 for count in counts):
            raise damaged_error(self.where, "partition_count is not a number of ranks")
        return tuple(counts)

    def _paddings(self, state: Mapping[Any, Any]) -> tuple[tuple[int, ...], ...] | None:
        """Return `alignment_paddings`, see `RankState`."""
        key = "param_alignment_paddings"
        if state.get(key) is None:
            return None
        paddings = tuple(
            tuple(require_list(group, self.where, key)) for group in require_list(state[key], self.where, key)
        )
        if not all(type(padding) is int and 0 <= padding < 1 << 16 for group in paddings for padding in group):
            raise damaged_error(self.where, f"{key} has a value that is not a number of elements")
        return paddings

    def _state_of(self, base: object, index: int) -> Mapping[Any, Any]:
        """Return the state of one group; empty if the optimizer has none."""
        if isinstance(base, list):
            state = base[index] if index < len(base) else None
        elif isinstance(base, dict):
            states = base.get("state")
            state = states.get(index) if isinstance(states, dict) else None
        else:
            state = None
        if state is None:
            return {}
        if not isinstance(state, dict):
            raise damaged_error(self.where, "the state of an optimizer group is not a dict")
        return state

    def _read_group(self, masters: object, state: Mapping[Any, Any], where: str) -> GroupState:
        """Divide the state of a group into flat tensors (1-d), scalars (0-d), and others, see `GroupState`."""
        flat: dict[str, FlatPart] = {}
        scalars: dict[str, FlatPart] = {}
        others: list[str] = []
        for key, value in state.items():
            if type(key) is not str or len(key) > MAX_NAME_LENGTH or not is_utf8(key):
                raise damaged_error(where, "has optimizer state whose name is not a valid string")
            if not isinstance(value, TensorRef):
                others.append(key)
                continue
            part = self._locate(value, f"{where}: {key}")
            if len(value.shape) == 1 and part is not None:
                flat[key] = part
            elif not value.shape and part is not None:
                scalars[key] = part
            else:
                others.append(key)
        return GroupState(self._require_flat(masters, f"{where}: fp32 masters"), flat, scalars, tuple(others))

    def _require_flat(self, value: object, where: str) -> FlatPart:
        if not isinstance(value, TensorRef | UnsupportedObject):
            raise damaged_error(where, "not a tensor")
        part = self._locate(value, where)
        if part is None or (isinstance(value, TensorRef) and len(value.shape) != 1):
            raise damaged_error(where, "not a flat tensor")
        return part

    def _locate(self, value: TensorRef | UnsupportedObject, where: str) -> FlatPart | None:
        """Return the position of a row-major tensor; None for one with gaps or of a packed dtype."""
        payload = locate_tensor(value, self.records, where)
        if payload.strides is not None or payload.dtype.pack > 1:
            return None
        numel = payload.torch_shape[0] if payload.torch_shape else 1
        return FlatPart(payload.dtype, numel, self.file, payload.data_offset, payload.record)
