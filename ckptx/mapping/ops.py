"""Conversions of tensors between two namings of a checkpoint, as data, and their application to catalog entries.

experts.0.gate [I, H] --+                         target[0, 0:I, :]   chunk of experts.0.gate
experts.0.up   [I, H] --+- merge(0), concat(1) -> target[0, I:2I, :]  chunk of experts.0.up
experts.1.gate [I, H] --+                         target[1, 0:I, :]   chunk of experts.1.gate
...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import Shape
from ckptx.errors import InputError, InternalError, UnsupportedError
from ckptx.mapping.rewrite import (
    KEEP_NAMES,
    concat,
    deinterleave,
    join_groups,
    merge,
    pad,
    permute_rope,
    split,
    split_groups,
    transpose,
    truncate,
    unmerge,
)
from ckptx.wording import counted

UNSUPPORTED_PREFIX = "unsupported:"
# A conversion that changes the numbers of layers; unlike other unsupported kinds, it is not a class of transformers.
RENUMBERING = "unsupported:Renumbering"
_KINDS_THAT_KEEP_SHAPES = frozenset({"same", "interleave", "permute_rope"})
# Kind -> kind of its inverse, where the inverse has the same arguments; `Op.inverse` has the others.
_INVERSE = {
    "merge": "unmerge", "unmerge": "merge", "concat": "chunk", "split_groups": "join_groups",
    "join_groups": "split_groups",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Op:
    """One step of a conversion.

    Attributes:
        kind: Operation, from disk names to model names, as `from_pretrained` applies it:
            "merge": stack the tensors of a module list along a new dim; "unmerge": the inverse.
            "concat": concatenate tensors along a dim; "chunk": split as `torch.chunk` does, so that the last part may
            be smaller; "split": split into parts of given sizes.
            "transpose": exchange two dims. "same": no change.
            "interleave": along a dim, reorder a0 b0 a1 b1 to a0 a1 b0 b1, or the inverse.
            "permute_rope": reorder the rows of each head from rotary pairs to halves, or the inverse.
            "split_groups": split each of several groups along a dim into parts, and concatenate equal parts of all
            groups; "join_groups": the inverse. "truncate": keep the first elements along a dim; "pad": append zeros
            along it.
            "unsupported:<Class>": an operation that ckptx lacks.
        dim: Dim of the operation; for merge the new dim.
        other_dim: Second dim of "transpose".
        args: "split": sizes of the parts. "concat": sizes for the inverse; empty if they are equal. "chunk": number of
            parts; empty for one part per target. "transpose": empty, or (1,) if checkpoints store it either way: only
            a tensor without the shape of the model is transposed; with a second number, its size along `other_dim`.
            "interleave": (1,) for the inverse. "permute_rope": (heads,) or (heads, 1 for the inverse, indices of the
            permuted tensors...), without indices for all. "split_groups":
            (groups, sizes of the parts of a group...), as for "join_groups". "truncate": (size, size before), without
            the second if it is unknown, which leaves it without an inverse; "pad": (size, size before).
    """

    kind: str
    dim: int = 0
    other_dim: int = 0
    args: tuple[int, ...] = ()

    @property
    def inverse(self) -> Op:
        """Return the inverse; that of a "transpose" with arguments is "same", which keeps the layout of the model."""
        if self.kind in ("chunk", "split"):
            return Op("concat", self.dim, args=self.args if self.kind == "split" else ())
        if self.kind == "concat" and self.args:
            return Op("split", self.dim, args=self.args)
        if self.kind == "transpose" and self.args:
            return Op("same")
        if self.kind in ("truncate", "pad"):
            if len(self.args) == 1:
                return Op(f"{UNSUPPORTED_PREFIX}{self.kind}")
            return Op("pad" if self.kind == "truncate" else "truncate", self.dim, args=(self.args[1], self.args[0]))
        if self.kind == "interleave":
            return Op("interleave", self.dim, args=() if self.args[:1] == (1,) else (1,))
        if self.kind == "permute_rope":
            heads, is_inverse, indices = self.rope_args
            return Op("permute_rope", self.dim, args=(heads, int(not is_inverse), *indices))
        return Op(_INVERSE.get(self.kind, self.kind), self.dim, self.other_dim, self.args)

    @property
    def rope_args(self) -> tuple[int, bool, tuple[int, ...]]:
        """Return the arguments of "permute_rope": heads, True for the inverse, indices of the permuted tensors."""
        heads, is_inverse, *indices = (*self.args, 0) if len(self.args) == 1 else self.args
        return heads, is_inverse == 1, tuple(indices)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Conversion of tensors of one naming to tensors of another.

    Patterns are whole names, with `*` for an index between dots; they may contain concrete indices. If one side is a
    module list, its patterns have one more `*` than the other side, the last one.

    Attributes:
        sources: Patterns of the first naming, in the order of the first op.
        targets: Patterns of the second naming.
        ops: Operations in order; empty for a renaming.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    ops: tuple[Op, ...] = ()

    @property
    def inverse(self) -> Conversion:
        """Return the inverse conversion."""
        return Conversion(self.targets, self.sources, tuple(op.inverse for op in reversed(self.ops)))

    @property
    def unsupported_op(self) -> str:
        """Return the transformers operation that ckptx lacks; empty if it has all."""
        return next(
            (op.kind.removeprefix(UNSUPPORTED_PREFIX) for op in self.ops if op.kind.startswith(UNSUPPORTED_PREFIX)), ""
        )


Columns = list[list[TensorEntry]]  # for each pattern its tensors: those of a module list in order, else one


def convert(conversion: Conversion, columns: Columns, shapes: Sequence[Shape | None]) -> Columns:
    """Apply the ops of a conversion.

    Args:
        conversion: Conversion to apply.
        columns: Tensors of each source pattern.
        shapes: Expected shape of each target pattern; None if unknown. Only the last op that changes shapes uses them.

    Returns:
        The tensors of each target pattern, with the name of one of their sources.

    Raises:
        InputError: The tensors do not match.
        UnsupportedError: An op is unknown to ckptx, requires an unknown shape, or would split a byte of a packed dtype.
        InternalError: The ops do not give one column for each target pattern.
    """
    for number, op in enumerate(conversion.ops, 1):
        has_target_shapes = all(each.kind in _KINDS_THAT_KEEP_SHAPES for each in conversion.ops[number:])
        result_shapes = shapes if has_target_shapes else [None] * len(shapes)
        columns = _apply_op(op, columns, len(conversion.targets), result_shapes)
    if len(columns) != len(conversion.targets):
        raise InternalError(
            f"{conversion}: its ops give {counted(len(columns), 'target')} instead of {len(conversion.targets)}; "
            "please report this"
        )
    return columns


def _apply_op(op: Op, columns: Columns, count: int, shapes: Sequence[Shape | None]) -> Columns:
    """Apply one op to `columns`.

    Args:
        op: Op to apply.
        columns: Tensors that it is applied to.
        count: Number of target patterns of the conversion.
        shapes: Shape of each result of the op; None if unknown.

    Raises:
        InputError, UnsupportedError: See `convert`.
    """
    if op.kind == "same":
        return columns
    if op.kind == "merge":
        return [[merge(column, op.dim)] for column in columns]
    if op.kind == "unmerge":
        return [unmerge(column[0], op.dim) for column in columns]
    if op.kind == "concat":
        return [[concat([entry for column in columns for entry in column], op.dim)]]
    if op.kind in ("chunk", "split"):
        entry = columns[0][0]
        sizes = _part_sizes(op, entry, count, shapes)
        parts = split(entry, op.dim, sizes)
        return [parts] if count == 1 else [[part] for part in parts]  # one target pattern is that of a module list
    if op.kind == "split_groups":
        return [[part] for part in split_groups(columns[0][0], op.dim, op.args[0], op.args[1:])]
    if op.kind == "join_groups":
        return [[join_groups([column[0] for column in columns], op.dim, op.args[0], op.args[1:])]]
    if op.kind in ("truncate", "pad"):
        change = truncate if op.kind == "truncate" else pad
        return [[change(entry, op.dim, op.args[0]) for entry in column] for column in columns]
    if op.kind == "transpose":
        return [
            [_transpose(entry, op, shape) for entry in column]
            for column, shape in zip(columns, _match_length(shapes, len(columns)), strict=True)
        ]
    if op.kind == "interleave":
        return [[deinterleave(entry, op.dim, inverse=op.args[:1] == (1,)) for entry in column] for column in columns]
    if op.kind == "permute_rope":
        heads, is_inverse, indices = op.rope_args
        return [
            [permute_rope(entry, heads, is_inverse) for entry in column] if not indices or i in indices else column
            for i, column in enumerate(columns)
        ]
    if op.kind == RENUMBERING:
        raise UnsupportedError(
            f'tensor "{columns[0][0].name}": the model numbers its layers otherwise, which ckptx does not support; '
            + KEEP_NAMES
        )
    name = op.kind.removeprefix(UNSUPPORTED_PREFIX)
    raise UnsupportedError(
        f'tensor "{columns[0][0].name}": the model stores it in another form, produced by {name} of transformers, '
        f"which ckptx does not support; {KEEP_NAMES}"
    )


def _match_length(shapes: Sequence[Shape | None], count: int) -> Sequence[Shape | None]:
    """Return the shapes of `count` results; each is None (unknown) if there are not as many results as targets."""
    return shapes if len(shapes) == count else (None,) * count


def _part_sizes(op: Op, entry: TensorEntry, count: int, shapes: Sequence[Shape | None]) -> tuple[int, ...]:
    """Return the sizes along `op.dim` of the parts into which "chunk" or "split" divides a tensor.

    Args:
        op: Op of one of these kinds.
        entry: Tensor to divide.
        count: Number of target patterns, that of the parts if the op has no arguments.
        shapes: Shape of each part; None if unknown.

    Raises:
        InputError: "chunk" would give an empty part, or fewer than two parts.
        UnsupportedError: The sizes of the parts are unknown.
    """
    if op.kind == "split":
        known = [shape[op.dim] for shape in shapes if shape is not None]
        sizes = op.args or tuple(known)
        if len(sizes) != (len(op.args) or count):
            raise UnsupportedError(
                f'tensor "{entry.name}": the model splits it into {counted(count, "part")} of unknown sizes; '
                + KEEP_NAMES
            )
        return sizes
    size, parts = entry.shape[op.dim], op.args[0] if op.args else count
    step = -(-size // parts)
    is_last_empty = step * (parts - 1) >= size > 0
    if is_last_empty or parts < 2:
        raise InputError(
            f'tensor "{entry.name}": shape {list(entry.shape)} does not split into {parts} parts along dim '
            f"{op.dim}; use the config that belongs to this checkpoint"
        )
    return tuple(min(step, size - i * step) for i in range(parts))


def _transpose(entry: TensorEntry, op: Op, expected_shape: Shape | None) -> TensorEntry:
    """Apply "transpose", see `Op.args`; a tensor that may be stored either way is not changed if it has the shape.

    Raises:
        InputError: See `transpose`.
        UnsupportedError: See `transpose`; or the tensor may be stored either way, and its shape is unknown.
    """
    if op.args[:1] == (1,):
        if expected_shape is None:
            raise UnsupportedError(
                f'tensor "{entry.name}": may be stored transposed, and the expected shape is unknown; ' + KEEP_NAMES
            )
        if entry.shape == expected_shape:
            return entry
    return transpose(entry, op.dim, op.other_dim)
