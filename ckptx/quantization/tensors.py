"""Find the quantized weights of a checkpoint, each of which is stored as several tensors.

codes            tensor of the quantized values
companions       tensors for dequantizing them: scales, zero points, and the shape of the weight
decoded weight   the dequantized weight
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import Shape
from ckptx.errors import InputError, UnsupportedError
from ckptx.quantization.declared import DeclaredQuantization
from ckptx.quantization.schemes import (
    ACTIVATION_SCALES,
    EXPONENT_SCALES,
    FLOAT_SCALES,
    QUANTIZED_SUFFIXES,
    SCHEMES,
    UNSUPPORTED_SUFFIXES,
    Scheme,
)
from ckptx.wording import counted

_OTHER_FP8_DTYPES = frozenset({"F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
CODE_DTYPES = frozenset().union(*(scheme.code_dtypes for scheme in SCHEMES))
# Format of the codes and dtype of their tensor -> number of codes in one element of the tensor; 1 for others.
_CODES_PER_STORED_ELEMENT = {
    ("e2m1", "U8"): 2,
    ("e2m1", "I8"): 2,
    ("e2m1", "F4"): 1,
    ("int4", "I32"): 8,
    ("int8", "I32"): 4,
}
_GROUPS = {"row groups of 32": 32, "row groups of 16": 16}  # `Scheme.blocks` -> elements of a row that share a scale
_SHAPE_DTYPES = frozenset({"I64", "I32"})
Granularity = Literal["tensor", "matrix", "row", "column", "group", "block"]


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """One quantized weight.

    Attributes:
        name: Name of the decoded (dequantized) weight.
        scheme: Scheme of the weight.
        codes: Tensor of codes (quantized values).
        scale: Tensor of scales, also in `companions`.
        companions: Suffix as in `Scheme` -> tensor of scales or zero points, or of the stored shape; all of them are
            decoded into the weight.
        shape: Shape of the weight in codes, not in stored elements and without a dim for groups; that of the decoded
            weight unless decoding exchanges its last two dims.
        granularity: Unit that has one scale: the tensor, or each matrix, row, column, group or block of elements.
        block: Rows and columns of this unit; the last group of a row and the last blocks may be smaller.
    """

    name: str
    scheme: Scheme
    codes: TensorEntry
    scale: TensorEntry
    companions: Mapping[str, TensorEntry]
    shape: Shape
    granularity: Granularity
    block: tuple[int, int]

    @property
    def description(self) -> str:
        """Scheme, block and dtype of the scales: `fp8, blocks of 128 x 128, F32 scales`."""
        rows, columns = self.block
        if self.granularity == "group":
            block = f"groups of {columns}"
        elif self.granularity == "block":
            block = f"blocks of {rows} x {columns}"
        else:
            block = f"one scale per {self.granularity}"
        return f"{self.scheme.name}, {block}, {self.scale.dtype.name} scales"

    @property
    def nbytes(self) -> int:
        """Stored bytes of the codes and companions."""
        return self.codes.nbytes + sum(entry.nbytes for entry in self.companions.values())

    @property
    def decoded_shape(self) -> Shape:
        """Shape of the decoded weight."""
        if not self.scheme.is_transposed:
            return self.shape
        *leading_sizes, rows, columns = self.shape
        return (*leading_sizes, columns, rows)


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """All quantized weights of a checkpoint.

    Attributes:
        tensors: Quantized weights by the stored name of their codes, in the order of the checkpoint.
        activation_scales: Stored names of scales of activations and of the KV cache, which decoded weights do not need;
            empty if no weight is quantized.
    """

    tensors: Mapping[str, QuantizedTensor]
    activation_scales: tuple[str, ...] = ()

    @property
    def companion_names(self) -> dict[str, str]:
        """Stored name of each companion -> name of the weight that it is decoded into."""
        return {entry.name: tensor.name for tensor in self.tensors.values() for entry in tensor.companions.values()}


def find_quantized(
    entries: Mapping[str, TensorEntry], declared: DeclaredQuantization | None, root: str
) -> QuantizedTensors:
    """Find the quantized weights of a checkpoint by name and dtype, and check their companions.

    Args:
        entries: Tensors of the checkpoint by stored name.
        declared: Quantization that the config declares; None if it declares none.
        root: Location of the checkpoint, for messages.

    Raises:
        InputError: A companion is missing, has another shape or dtype, or belongs to no weight; or the config declares
            no quantization, or another than the tensors have.
        UnsupportedError: A tensor belongs to a quantization that ckptx does not decode, or may have two integer formats
            by its shape, and the config does not decide.
    """
    _refuse_unsupported(entries, root)
    found: dict[str, QuantizedTensor] = {}
    used: set[str] = set()
    for name, entry in entries.items():
        if entry.dtype.name not in CODE_DTYPES:
            continue
        scheme = find_scheme(name, entry, entries, declared)
        if scheme is not None:
            _check_declared(name, scheme, declared, root)
            tensor = _build_quantized_tensor(name, entry, scheme, entries, declared, root)
            found[name] = tensor
            used.update(each.name for each in tensor.companions.values())
    activation_scales = [name for name in entries if found and name.endswith(ACTIVATION_SCALES)]
    _refuse_leftovers(entries, {*found, *used, *activation_scales}, root)
    if not found and declared is not None:
        raise InputError(
            f"{declared.location} declares {declared.description}, but no tensor of {root} is quantized; remove the "
            "declaration from the config, or pass the checkpoint that it belongs to"
        )
    return QuantizedTensors(found, tuple(activation_scales))


def find_scheme(
    name: str, entry: TensorEntry, entries: Mapping[str, TensorEntry], declared: DeclaredQuantization | None
) -> Scheme | None:
    """Return the scheme of a tensor of codes by its name and dtype and those of its scales; None if no scheme matches.

    If several schemes match, the first of `SCHEMES` that the config declares is returned, else the first one.

    Raises:
        UnsupportedError: The tensor may have two integer formats by its shape, and the config does not decide.
    """
    matches = []
    for scheme in SCHEMES:
        if entry.dtype.name not in scheme.code_dtypes or not name.endswith(scheme.codes_suffix):
            continue
        if scheme.is_fused and (len(entry.shape) < 3 or name.endswith(".weight")):
            continue
        stem = _stem(name, scheme)
        scale = entries.get(stem + scheme.scale_suffix)
        if scale is None or scale.dtype.name not in scheme.scale_dtypes:
            continue
        if scheme.second_scale_suffix and stem + scheme.second_scale_suffix not in entries:
            continue
        integer_codes = declared.integer_codes if declared is not None else frozenset()
        if scheme.is_integer and integer_codes and scheme.code_format not in integer_codes:
            continue
        matches.append(scheme)
    if declared is not None:
        matches = [each for each in matches if set(each.methods) & set(declared.methods)] or matches
    if len(matches) > 1 and matches[0].is_integer:
        matches = _match_integer_widths(name, entry, entries, matches, declared) or matches
    return matches[0] if matches else None


def _match_integer_widths(
    name: str,
    entry: TensorEntry,
    entries: Mapping[str, TensorEntry],
    schemes: Sequence[Scheme],
    declared: DeclaredQuantization | None,
) -> list[Scheme]:
    """Return those of the integer `schemes` (4 or 8 bits) in which the shape of the codes matches that of the scales.

    Raises:
        UnsupportedError: Several schemes agree, and the config declares a quantization that does not decide.
    """
    matches = []
    for scheme in schemes:
        try:
            _find_block(
                name,
                scheme,
                _shape_in_codes(entry, scheme),
                entries[_stem(name, scheme) + scheme.scale_suffix],
                declared,
            )
        except InputError:
            continue
        matches.append(scheme)
    if len(matches) > 1 and declared is not None:
        raise UnsupportedError(
            f'{declared.location} does not decide the format of tensor "{name}", whose shape fits '
            f"{' and '.join(each.code_format for each in matches)}; start from the checkpoint that it was quantized "
            "from"
        )
    return matches


def _stem(name: str, scheme: Scheme) -> str:
    """Return the beginning of the name of a tensor of codes that the names of its companions share."""
    return name.removesuffix(scheme.codes_suffix) if scheme.codes_suffix else name


def _shape_in_codes(codes: TensorEntry, scheme: Scheme) -> Shape:
    """Return the shape of a tensor of codes, with the last dim in codes instead of stored elements."""
    codes_per_element = _CODES_PER_STORED_ELEMENT.get((scheme.code_format, codes.dtype.name), 1)
    return (*codes.shape[:-1], codes.shape[-1] * codes_per_element) if codes.shape else ()


def _build_quantized_tensor(
    name: str,
    codes: TensorEntry,
    scheme: Scheme,
    entries: Mapping[str, TensorEntry],
    declared: DeclaredQuantization | None,
    root: str,
) -> QuantizedTensor:
    """Return the quantized tensor with its companions.

    Raises:
        InputError: A shape or dtype does not match, or declared zero points are missing.
        UnsupportedError: A weight of more than two dims has zero points.
    """
    stem = _stem(name, scheme)
    suffixes = [
        scheme.scale_suffix,
        *([scheme.second_scale_suffix] if scheme.second_scale_suffix else []),
        *scheme.optional_suffixes,
    ]
    companions = {suffix: entries[stem + suffix] for suffix in suffixes if stem + suffix in entries}
    scale = companions[scheme.scale_suffix]
    where = f'{root}: tensor "{name}"'
    shape = codes.shape
    if len(shape) < 2:
        raise InputError(
            f"{where}: is quantized as {scheme.name} and has shape {list(shape)}; a quantized weight has two or more "
            "dims, restore the file from a copy"
        )
    if scheme.codes_suffix == "_blocks":
        *leading_sizes, groups, group_bytes = shape  # a byte has two codes, a group 32
        if group_bytes * 2 != 32 or len(shape) != 4:
            raise InputError(
                f"{where}: has shape {list(shape)}; mxfp4 blocks have shape [experts, rows, groups, 16], restore the "
                "file from a copy"
            )
        shape = (*leading_sizes, groups * group_bytes * 2)
    else:
        shape = _shape_in_codes(codes, scheme)
    granularity, block = _find_block(where, scheme, shape, scale, declared)
    if scheme.second_scale_suffix:
        _check_second_scale(where, companions[scheme.second_scale_suffix])
    _check_integer_companions(where, scheme, shape, companions, declared)
    return QuantizedTensor(stem + scheme.decoded_suffix, scheme, codes, scale, companions, shape, granularity, block)


def _check_second_scale(where: str, entry: TensorEntry) -> None:
    if entry.numel != 1 or entry.dtype.name not in FLOAT_SCALES:
        raise InputError(
            f'{where}: its companion "{entry.name}" is {entry.dtype.name} {list(entry.shape)}, but the scale of a '
            "whole tensor is one number in F32, BF16 or F16; restore the file from a copy"
        )


def _check_integer_companions(
    where: str,
    scheme: Scheme,
    shape: Shape,
    companions: Mapping[str, TensorEntry],
    declared: DeclaredQuantization | None,
) -> None:
    """Check the zero points and the stored shape of integer codes.

    Raises:
        InputError: Zero points are missing, or a shape or dtype does not match.
        UnsupportedError: A weight of more than two dims has zero points.
    """
    zero_point, stored_shape = companions.get(".weight_zero_point"), companions.get(".weight_shape")
    if stored_shape is not None and (stored_shape.numel != len(shape) or stored_shape.dtype.name not in _SHAPE_DTYPES):
        raise InputError(
            f'{where}: its stored shape "{stored_shape.name}" is {stored_shape.dtype.name} {list(stored_shape.shape)}, '
            f"but {counted(len(shape), 'size')} in I64 or I32 are required; restore the file from a copy"
        )
    if zero_point is None:
        if declared is not None and scheme.code_format in declared.codes_with_zero_points:
            raise InputError(
                f"{where}: has no zero points, but {declared.location} declares {scheme.code_format} values that are "
                "not symmetric; restore the missing file or tensor"
            )
        return
    if len(shape) != 2:
        raise UnsupportedError(
            f"{where}: has shape {list(shape)} and zero points; ckptx decodes zero points only for weights of two "
            "dims; start from the checkpoint that it was quantized from"
        )
    bits = int(scheme.code_format[3:])  # "int4" or "int8"
    # One zero point per scale; those of several rows are packed in one int32.
    expected = (-(-shape[0] * bits // 32), companions[scheme.scale_suffix].shape[1])
    if zero_point.dtype.name != "I32" or zero_point.shape != expected:
        raise InputError(
            f'{where}: its zero points "{zero_point.name}" are {zero_point.dtype.name} {list(zero_point.shape)}, '
            f"but I32 {list(expected)} is required; restore the file from a copy"
        )


def _find_block(
    where: str, scheme: Scheme, shape: Shape, scale: TensorEntry, declared: DeclaredQuantization | None
) -> tuple[Granularity, tuple[int, int]]:
    """Return the unit that has one scale, with its rows and columns.

    Args:
        where: Location and name of the weight, for messages.
        scheme: Scheme of the weight.
        shape: Shape of the codes, in codes.
        scale: Tensor of scales.
        declared: Quantization that the config declares; None if it declares none.

    Raises:
        InputError: The number of columns is no multiple of the group, the config gives no block size, or the scales
            have another shape than the weight and the declared block require.
    """
    *leading_sizes, rows, columns = shape
    group = _GROUPS.get(scheme.blocks)
    if group is not None and columns % group:
        raise InputError(
            f"{where}: has {columns} columns, but {scheme.name} requires a multiple of {group}; restore the file from "
            "a copy"
        )
    candidates: dict[Shape, tuple[Granularity, tuple[int, int]]] = {}  # shape of the scales -> unit that they are for
    if group is not None:
        candidates = {(*leading_sizes, rows, columns // group): ("group", (1, group))}
    elif declared is not None:
        for size in sorted(size for codes, size in declared.group_sizes if codes == scheme.code_format):
            candidates.setdefault((*leading_sizes, rows, -(-columns // size)), ("group", (1, size)))
        for block in sorted(declared.block_sizes) if scheme.code_format == "e4m3" else ():
            grid = (*leading_sizes, -(-rows // block[0]), -(-columns // block[1]))
            candidates.setdefault(grid, ("group" if block[0] == 1 else "block", block))
    # Shapes of scales that the error lists. It leaves out one scale per column or per matrix, which are rare.
    required_shapes = list(candidates)
    if group is None and (declared is None or scheme.code_format in declared.codes_with_broadcast_scales):
        candidates.setdefault((*leading_sizes, rows, 1), ("row", (1, columns)))
        required_shapes.append((*leading_sizes, rows, 1))
        if scheme.code_format == "e4m3":
            whole = rows, columns
            candidates.setdefault((*leading_sizes, 1, columns), ("column", (rows, 1)))
            if not leading_sizes:
                candidates[rows,] = "row", (1, columns)
            # Replaces the row entry of a weight of one row, whose scale per row and scale per tensor have the same
            # shape: it counts as one scale per tensor.
            candidates |= {(): ("tensor", whole), (1,): ("tensor", whole)}
            candidates |= {(*leading_sizes, 1, 1): ("matrix" if leading_sizes else "tensor", whole)}
            required_shapes.insert(0, (1,))
    if scale.shape in candidates:
        return candidates[scale.shape]
    found = f'{where}: has shape {list(shape)} and its scales "{scale.name}" have shape {list(scale.shape)}'
    if not required_shapes:
        raise InputError(
            f"{found}, but the config gives no block size; add it to quantization_config, or restore the config.json "
            "of this checkpoint"
        )
    raise InputError(
        f"{found}, but {' or '.join(str(list(each)) for each in required_shapes)} is required; restore the scales or "
        "the config from the checkpoint that the weight belongs to"
    )


def _refuse_unsupported(entries: Iterable[str], root: str) -> None:
    for name in entries:
        for suffix, method in UNSUPPORTED_SUFFIXES.items():
            if name.endswith(suffix) or "quant_state" in name:
                method = "bitsandbytes" if "quant_state" in name else method
                raise UnsupportedError(
                    f'{root}: tensor "{name}" belongs to {method}, which ckptx does not decode; start from the '
                    "checkpoint that it was quantized from"
                )


def _check_declared(name: str, scheme: Scheme, declared: DeclaredQuantization | None, root: str) -> None:
    """Refuse a weight whose quantization the config does not declare."""
    if declared is None:
        raise InputError(
            f'{root}: tensor "{name}" is quantized ({scheme.name}), but no config declares a quantization; restore '
            "quantization_config in config.json, which gives the block size"
        )
    if not set(scheme.methods) & set(declared.methods):
        raise InputError(
            f'{declared.location} declares {declared.description}, but tensor "{name}" is stored in the '
            f"{scheme.name} format of {' or '.join(scheme.methods)}; restore the config that belongs to this checkpoint"
        )
    group = _GROUPS.get(scheme.blocks)
    declared_groups = {size for code_format, size in declared.group_sizes if code_format == scheme.code_format}
    if group is not None and declared_groups and group not in declared_groups:
        raise InputError(
            f"{declared.location} declares groups of {' and '.join(map(str, sorted(declared_groups)))}, but tensor "
            f'"{name}" is stored in the {scheme.name} format, whose groups have {group} elements; restore the config '
            "that belongs to this checkpoint"
        )


def _refuse_leftovers(entries: Mapping[str, TensorEntry], known: set[str], root: str) -> None:
    """Refuse fp8 dtypes that ckptx does not decode, codes without scales, and companions without codes.

    Args:
        entries: Tensors of the checkpoint by stored name.
        known: Names of quantized weights, of their companions, and of scales of activations.
        root: Location of the checkpoint, for messages.

    Raises:
        InputError: A part of a quantized weight is missing.
        UnsupportedError: A tensor has an fp8 dtype that ckptx does not decode.
    """
    for name, entry in entries.items():
        if name in known:
            continue
        is_weight = entry.dtype.name == "F8_E4M3" or (name.endswith(".weight") and len(entry.shape) > 1)
        if entry.dtype.name in _OTHER_FP8_DTYPES:
            raise UnsupportedError(
                f'{root}: tensor "{name}" is {entry.dtype.name} {list(entry.shape)}, and ckptx decodes F8_E4M3 only; '
                "start from the checkpoint that it was quantized from"
            )
        if entry.dtype.name in CODE_DTYPES and is_weight and not name.endswith(QUANTIZED_SUFFIXES):
            raise InputError(
                f'{root}: tensor "{name}" is {entry.dtype.name} {list(entry.shape)}, but its scales are missing '
                "or have a dtype that ckptx does not decode; restore the missing file or tensor"
            )
        is_exponent = name.endswith(".scale") and entry.dtype.name in EXPONENT_SCALES
        if not is_exponent and not name.endswith(QUANTIZED_SUFFIXES):
            continue
        if entry.dtype.is_castable and name.endswith(("_blocks", "_scales")):
            continue  # ordinary float parameters with such a name; those of mxfp4 are integers
        raise InputError(
            f'{root}: tensor "{name}" ({entry.dtype.name} {list(entry.shape)}) belongs to a quantized weight, but the '
            "quantized values or scales of this weight are missing or have a dtype that ckptx does not decode; restore "
            "the missing file or tensor"
        )


def describe_schemes(tensors: Iterable[QuantizedTensor]) -> list[dict[str, object]]:
    """Return an entry of the report for each `QuantizedTensor.description`.

    Keys are `scheme` (the description), `tensors` (their number), `parameters` (decoded elements) and `bytes` (stored
    bytes of codes and companions).
    """
    totals: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        total = totals.setdefault(tensor.description, {"tensors": 0, "parameters": 0, "bytes": 0})
        total["tensors"] += 1
        total["parameters"] += prod(tensor.shape)
        total["bytes"] += tensor.nbytes
    return [{"scheme": description, **total} for description, total in totals.items()]
