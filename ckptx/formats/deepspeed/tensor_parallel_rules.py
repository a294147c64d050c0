"""Read `universal_checkpoint_info`, which states how the shards of the tensor parallel ranks make up each parameter.

    tp_replicated_parameter_patterns           every rank has the parameter
    parameter_to_average_patterns              every rank has a copy, and the copies may differ
    parameter_with_2_sub_params_cat_dim_0      two parts along dim 0, each of which is sharded, as gate and up of SwiGLU
    parameter_with_sub_params                  several parts along `partition_dim`, each of which is sharded, as q, k, v
    sub_param_shard_widths                     size of each part on each rank, from version 0.4 on; else they are equal
    parameter_with_row_parallelism_patterns    sharded along dim 1
    (none of these)                            sharded along dim 0
    vocabulary_parameter_patterns              rows after `original_vocab_size` are padding
    autotp_unsupported_parameter_patterns      sharded in a way that DeepSpeed cannot describe
    affine_map                                 for some parameters, the position of each shard; takes precedence

The patterns are regular expressions. Megatron-DeepSpeed states them for its model, and AutoTP for each parameter.

Source: `merge_tp_slices` in `deepspeed/checkpoint/ds_to_universal.py`, and `collect_autotp_universal_checkpoint_info`
in `deepspeed/module_inject/layers.py` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.deepspeed.affine_map import read_affine_map
from ckptx.formats.deepspeed.name_patterns import NamePatterns, UnsupportedPattern
from ckptx.formats.deepspeed.pickles import damaged_error, require_dict, require_list
from ckptx.formats.deepspeed.shard_ranges import (
    Join,
    MergedDim,
    Shapes,
    ShardFault,
    concatenated_ranges,
    join_ranges,
    join_replicas,
    merge_dims,
)
from ckptx.formats.unsupported import SAVE_WHERE_TRAINED

KEY = "universal_checkpoint_info"
_REPLICATED, _AVERAGED = "tp_replicated_parameter_patterns", "parameter_to_average_patterns"
_TWO_PARTS, _ROW = "parameter_with_2_sub_params_cat_dim_0", "parameter_with_row_parallelism_patterns"
_PARTS, _WIDTHS = "parameter_with_sub_params", "sub_param_shard_widths"
_VOCABULARY, _VOCABULARY_SIZE = "vocabulary_parameter_patterns", "original_vocab_size"
_UNDESCRIBED, _AFFINE = "autotp_unsupported_parameter_patterns", "affine_map"
_PATTERN_LISTS = (_REPLICATED, _AVERAGED, _TWO_PARTS, _ROW, _VOCABULARY)
_AFFINE_VERSION = 1
_VERSION_OF_WIDTHS = 0.4
_MAX_LISTED, _MAX_PARTS = 4, 1 << 12


class _Parts(NamedTuple):
    """An entry of `parameter_with_sub_params`.

    Attributes:
        shape: Size of each dim of the whole parameter, whose first dims may be merged in the file; -1 is any size. The
            value at `dim` is a list of the sizes of the parts. A number there is the size of the only part if the
            checkpoint has `sub_param_shard_widths`, else the number of equal parts.
        dim: Index in `shape` of the dim along which the parts are concatenated.
    """

    shape: tuple[Any, ...]
    dim: int


class TensorParallelRules:
    """The rules of one checkpoint."""

    def __init__(self, info: object, ranks: int, where: str) -> None:
        """Read `universal_checkpoint_info`.

        Args:
            info: Its value in the model states of rank 0; None if there is none.
            ranks: Number of tensor parallel ranks.
            where: The file, for error messages.

        Raises:
            InputError: It is damaged.
            UnsupportedError: There is none, it is of a newer DeepSpeed, or has a pattern that is not evaluated.
        """
        if info is None or (isinstance(info, dict) and not info.keys() & {*_PATTERN_LISTS, _PARTS, _AFFINE}):
            raise UnsupportedError(
                f"{where}: tensor parallelism of {ranks} ranks without {KEY}, which states how to join their shards; "
                f"{SAVE_WHERE_TRAINED}"
            )
        self.ranks, self.where = ranks, where
        self._info = require_dict(info, f"{where}: {KEY}")
        self._lists = {key: self._patterns(self._info.get(key), key) for key in _PATTERN_LISTS}
        undescribed = self._dict(_UNDESCRIBED)
        self._undescribed = self._patterns(list(undescribed), _UNDESCRIBED)
        self._widths = self._dict(_WIDTHS)
        self._parts: dict[str, _Parts] = {}
        for value in self._list(_PARTS):
            entry = require_dict(value, f"{where}: {_PARTS}")
            shape, dim = entry.get("shape"), entry.get("partition_dim")
            if not isinstance(shape, list | tuple) or type(dim) is not int or not 0 <= dim < len(shape):
                raise damaged_error(where, f"{_PARTS} has no valid shape and partition_dim")
            for pattern in require_list(entry.get("patterns"), where, f"patterns of {_PARTS}"):
                self._parts.setdefault(self._text(pattern, _PARTS), _Parts(tuple(shape), dim))
        self._parts_patterns = self._patterns(list(self._parts), _PARTS)
        affine = self._dict(_AFFINE)
        version = affine.get("version", _AFFINE_VERSION)
        if version != _AFFINE_VERSION:
            raise UnsupportedError(
                f"{where}: {_AFFINE} of version {version!s:.20}, as of a DeepSpeed after 0.19, the supported version "
                f"is {_AFFINE_VERSION}; {SAVE_WHERE_TRAINED}"
            )
        self._maps = require_dict(affine.get("params", {}), f"{where}: {_AFFINE}")
        self._map_patterns = self._patterns(list(self._maps), _AFFINE)
        version = self._info.get("universal_checkpoint_version", 0.0)
        self._has_widths = type(version) in (int, float) and version >= _VERSION_OF_WIDTHS

    # ------------------------------------------------------------------------------------------------- rules by name

    def join(self, name: str, shapes: Shapes) -> Join:
        """Return the positions of the shards of one parameter.

        Args:
            name: Name of the parameter.
            shapes: Shape of its shard on each rank.

        Raises:
            InputError: The shards do not have the shapes that the rule requires.
            UnsupportedError: DeepSpeed does not describe the shards, or not as ranges along one dim.
        """
        if self._undescribed.matching(name):
            raise UnsupportedError(
                f'{self.where}: tensor "{name}": {_UNDESCRIBED} lists it, so DeepSpeed cannot describe its shards; '
                f"{SAVE_WHERE_TRAINED}"
            )
        try:
            map_pattern = self._only(self._map_patterns, name, _AFFINE)
            if map_pattern is not None:
                return self._join_by_map(name, shapes, self._maps[map_pattern])
            join = self._join_by_patterns(name, shapes)
        except ShardFault as fault:
            raise self._shape_error(name, shapes, f"{fault}") from None
        if self._only(self._lists[_VOCABULARY], name, _VOCABULARY) is None:
            return join
        rows = self._info.get(_VOCABULARY_SIZE)
        if type(rows) is not int or rows < 1 or not join.shape:
            raise damaged_error(self.where, f'{_VOCABULARY} lists "{name}", but {_VOCABULARY_SIZE} is not a number')
        return join.without_rows_after(rows)

    def join_buffer(self, name: str, shapes: Shapes) -> Join:
        """Return the positions of a buffer, which no rule names: every rank has it.

        Raises:
            InputError: The shapes differ.
        """
        try:
            return join_replicas(shapes)
        except ShardFault as fault:
            raise self._shape_error(name, shapes, f"{fault}") from None

    def has_rule(self, name: str) -> bool:
        """Return True if a rule names this tensor."""
        lists = (*self._lists.values(), self._parts_patterns, self._map_patterns, self._undescribed)
        return any(patterns.matching(name) for patterns in lists)

    def _join_by_patterns(self, name: str, shapes: Shapes) -> Join:
        if self._only(self._lists[_REPLICATED], name, _REPLICATED) is not None:
            return join_replicas(shapes)
        if self._only(self._lists[_AVERAGED], name, _AVERAGED) is not None:
            return join_replicas(shapes, is_averaged=True)
        if self._only(self._lists[_TWO_PARTS], name, _TWO_PARTS) is not None:
            if any(not shape or shape[0] % 2 for shape in shapes):
                raise ShardFault("have no even dim 0, as required for two parts")
            halves = [shape[0] // 2 for shape in shapes]
            return _concatenate(shapes, MergedDim(0), (halves, halves))
        patterns = self._parts_patterns.matching(name)
        if patterns:
            first = next(pattern for pattern in self._parts if pattern in patterns)
            return self._join_parts(name, shapes, self._parts[first], first)
        dim = 0 if self._only(self._lists[_ROW], name, _ROW) is None else 1
        if any(len(shape) <= dim for shape in shapes):
            raise ShardFault(f"have no dim {dim}, along which the rules join them")
        return _concatenate(shapes, MergedDim(dim), ([shape[dim] for shape in shapes],))

    def _join_parts(self, name: str, shapes: Shapes, parts: _Parts, pattern: str) -> Join:
        """Return the join of a tensor of concatenated parts, each of which is sharded separately."""
        spec = parts.shape[parts.dim]
        if self._has_widths:
            if pattern not in self._widths:
                raise damaged_error(self.where, f'{_WIDTHS} lacks "{name}", which {_PARTS} lists')
            sizes = self._sizes(spec if isinstance(spec, list | tuple) else [spec])
            widths = [self._sizes(each) for each in require_list(self._widths[pattern], self.where, _WIDTHS)]
        elif isinstance(spec, list | tuple):
            sizes = self._sizes(spec)
            widths = [[size // self.ranks] * self.ranks for size in sizes]
        else:
            widths = self._equal_widths(shapes, parts)
            sizes = [sum(each) for each in widths]
        if any(len(each) != self.ranks for each in widths) or [sum(each) for each in widths] != sizes or not sizes:
            raise damaged_error(self.where, f'the sizes of the parts of "{name}" are not those of {self.ranks} ranks')
        whole = (*parts.shape[: parts.dim], sum(sizes), *parts.shape[parts.dim + 1 :])
        merged = merge_dims(whole, parts.dim, shapes)
        local_sizes = [sum(each[rank] for each in widths) for rank in range(self.ranks)]
        if merged is None or any(
            shape[merged.dim] != merged.outer * size * merged.inner
            for shape, size in zip(shapes, local_sizes, strict=True)
        ):
            raise ShardFault(f"do not have parts of {sizes} along dim {parts.dim} of {list(parts.shape)}")
        return _concatenate(shapes, merged, widths)

    def _equal_widths(self, shapes: Shapes, parts: _Parts) -> list[list[int]]:
        """Return the sizes of parts of equal size, whose number an older DeepSpeed states as the size of the dim."""
        count = parts.shape[parts.dim]
        if type(count) is not int or count < 1 or any(len(shape) != len(parts.shape) for shape in shapes):
            raise ShardFault(f"do not have the dims of {list(parts.shape)}")
        total = sum(shape[parts.dim] for shape in shapes)
        if total % (count * self.ranks) or count > _MAX_PARTS:
            raise ShardFault(f"do not have {count} equal parts along dim {parts.dim}")
        return [[total // count // self.ranks] * self.ranks for _ in range(min(count, total))]

    def _join_by_map(self, name: str, shapes: Shapes, value: object) -> Join:
        """Return the join that an affine map states."""
        found = read_affine_map(value, self.ranks, f'{self.where}: {_AFFINE} of "{name}"')
        if not found.shape:
            return join_replicas(shapes)
        merged = merge_dims(found.shape, found.dim, shapes)
        if merged is None or any(
            prod(shape) != prod(local) or shape[merged.dim] != merged.outer * local[found.dim] * merged.inner
            for shape, local in zip(shapes, found.local_shapes, strict=True)
        ):
            raise ShardFault(f"are not those of {_AFFINE}, {found.local_shapes}")
        return join_ranges(shapes, merged, found.shape[found.dim], found.ranges)

    # -------------------------------------------------------------------------------------------------------- values

    def _only(self, patterns: NamePatterns, name: str, key: str) -> str | None:
        """Return the pattern of a list that matches a name, or None.

        Raises:
            InputError: Several match.
        """
        found = patterns.matching(name)
        if len(found) > 1:
            raise damaged_error(self.where, f'{len(found)} patterns of {key} match "{name}"')
        return found[0] if found else None

    def _patterns(self, value: object, key: str) -> NamePatterns:
        texts = [self._text(each, key) for each in require_list([] if value is None else value, self.where, key)]
        try:
            return NamePatterns(texts)
        except UnsupportedPattern as error:
            raise UnsupportedError(f"{self.where}: a pattern in {key} of {KEY} {error}; {SAVE_WHERE_TRAINED}") from None

    def _text(self, value: object, key: str) -> str:
        if type(value) is not str:
            raise damaged_error(self.where, f"{key} has a pattern that is not a string")
        return value

    def _dict(self, key: str) -> dict[Any, Any]:
        value = self._info.get(key)
        return {} if value is None else require_dict(value, f"{self.where}: {key}")

    def _list(self, key: str) -> list[Any]:
        value = self._info.get(key)
        return [] if value is None else require_list(value, self.where, key)

    def _sizes(self, value: object) -> list[int]:
        sizes = require_list(value, self.where, _WIDTHS)
        if not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
            raise damaged_error(self.where, f"{_WIDTHS} or {_PARTS} has a size that is not a number")
        return sizes

    def _shape_error(self, name: str, shapes: Shapes, problem: str) -> InputError:
        listed = ", ".join(str(list(shape)) for shape in shapes[:_MAX_LISTED])
        more = ", ..." if len(shapes) > _MAX_LISTED else ""
        return InputError(
            f'{self.where}: tensor "{name}": the shapes {listed}{more} of the tensor parallel ranks {problem:.200}; '
            "the files are damaged or of different saves, copy them again"
        )


def _concatenate(shapes: Shapes, merged: MergedDim, widths: Sequence[Sequence[int]]) -> Join:
    """Return the join of a tensor of concatenated parts; `widths` has for each part its size on each rank."""
    ranges, size = concatenated_ranges(widths)
    return join_ranges(shapes, merged, size, ranges)
