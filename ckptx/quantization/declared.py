"""The quantization that `config.json` or `hf_quant_config.json` declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.sidecars import MODELOPT_FILE
from ckptx.quantization.schemes import SCHEMES

_KEY = "quantization_config"
_METHODS = frozenset(method for scheme in SCHEMES for method in scheme.methods)
_MAX_SIZE = 1 << 20  # largest number of rows or columns of a block, or of elements of a group
_NVFP4_GROUP = 16  # elements of a row that share a scale
_RESTORE = "restore the file that was published with the checkpoint"
# Field of `DeclaredQuantization` -> key of the config, for fields that `description` leaves out.
_UNDESCRIBED_KEYS = {
    "integer_codes": "num_bits",
    "codes_with_zero_points": "symmetric",
    "codes_with_broadcast_scales": "strategy",
    "has_power_of_two_scales": "scale_fmt",
}


@dataclass(frozen=True, slots=True)
class DeclaredQuantization:
    """Quantization that a config declares.

    Attributes:
        location: File and key of the declaration, for messages.
        methods: Methods as in `Scheme.methods`; several if modules are quantized differently.
        block_sizes: Rows and columns of a block, for fp8 weights with a scale for each block; several if modules
            differ.
        group_sizes: Code format as in `Scheme.code_format`, and number of elements of a row that share a scale, for
            weights with a scale for each group.
        integer_codes: Code formats of integers that are declared: `int4`, `int8`, both or none.
        codes_with_zero_points: Those of `integer_codes` for which all declared weights have zero points.
        codes_with_broadcast_scales: Code formats whose weights may have one scale for the tensor, a row or a column.
        has_power_of_two_scales: True if float scales are powers of two (`scale_fmt: ue8m0`).
    """

    location: str
    methods: tuple[str, ...]
    block_sizes: frozenset[tuple[int, int]] = frozenset()
    group_sizes: frozenset[tuple[str, int]] = frozenset()
    integer_codes: frozenset[str] = frozenset()
    codes_with_zero_points: frozenset[str] = frozenset()
    codes_with_broadcast_scales: frozenset[str] = frozenset({"e4m3"})
    has_power_of_two_scales: bool = False

    @property
    def description(self) -> str:
        """Methods and sizes as messages print them: `compressed-tensors (pack-quantized) in groups of 32`."""
        split_methods = (method.partition(":") for method in self.methods)
        methods = ", ".join(f"{tool} ({name})" if name else tool for tool, _, name in split_methods)
        sizes = [f"blocks of {rows} x {columns}" for rows, columns in sorted(self.block_sizes)]
        sizes += [f"groups of {size}" for _, size in sorted(self.group_sizes)]
        return f"{methods} in {' and '.join(sizes)}" if sizes else methods


def read_declaration(
    config: Mapping[str, Any] | None, modelopt_config: Mapping[str, Any] | None, root: str
) -> DeclaredQuantization | None:
    """Return the quantization that a checkpoint declares; None if it declares none.

    Args:
        config: Contents of `config.json`; None without one.
        modelopt_config: Contents of `hf_quant_config.json`, which NVIDIA ModelOpt writes; None without one.
        root: Location of the checkpoint, for messages.

    Raises:
        InputError: A declaration is malformed, or two disagree.
        UnsupportedError: The method is one that ckptx does not decode.
    """
    declarations = [
        _parse(value, f"{root}/config.json, {key}") for key, value in _find_declarations(config or {}) if value
    ]
    if modelopt_config is not None:
        declarations.append(_parse(_unwrap_modelopt(modelopt_config), f"{root}/{MODELOPT_FILE}"))
    if not declarations:
        return None
    first, *others = declarations
    for other in others:
        if replace(other, location=first.location) != first:
            raise InputError(
                f"{first.location} declares {first.description}, but {other.location} declares "
                f"{_describe_difference(first, other)}; remove the declaration that does not belong to the checkpoint"
            )
    return first


def _describe_difference(first: DeclaredQuantization, other: DeclaredQuantization) -> str:
    """Return the description of `other`, or the keys in which it differs if both have the same description."""
    if other.description != first.description:
        return other.description
    keys = [key for name, key in _UNDESCRIBED_KEYS.items() if getattr(first, name) != getattr(other, name)]
    return f"the same with another {' and '.join(keys) or 'number format'}"


def _find_declarations(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of each `quantization_config` in a config and its sub-configs.

    Keys begin with `path`, which is empty or ends with a dot.
    """
    for key, value in config.items():
        if key == _KEY:
            yield f"{path}{key}", value
        elif isinstance(value, Mapping) and key.endswith("config"):
            yield from _find_declarations(value, f"{path}{key}.")


def _unwrap_modelopt(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return `hf_quant_config.json` in the form of a `quantization_config`."""
    inner = document.get("quantization")
    return {"quant_method": "modelopt", **(inner if isinstance(inner, Mapping) else document)}


def _parse(value: Any, location: str) -> DeclaredQuantization:
    if not isinstance(value, Mapping):
        raise InputError(f"{location}: is a {type(value).__name__}, but must be an object; {_RESTORE}")
    method = value.get("quant_method")
    if not isinstance(method, str):
        raise InputError(f"{location}: has no quant_method, which names the quantization; {_RESTORE}")
    if method == "compressed-tensors":
        return _parse_compressed_tensors(value, location)
    if method == "modelopt":
        return _parse_modelopt(value, location)
    if method not in _METHODS:
        raise UnsupportedError(
            f"{location}: the model is quantized with {method}, which ckptx does not decode; start from the "
            "checkpoint that it was quantized from"
        )
    block = value.get("weight_block_size")
    blocks = frozenset[tuple[int, int]]() if block is None else frozenset({_parse_block(block, location)})
    return DeclaredQuantization(
        location,
        (method,),
        blocks,
        codes_with_broadcast_scales=frozenset() if blocks else frozenset({"e4m3"}),
        has_power_of_two_scales=value.get("scale_fmt") == "ue8m0",
    )


def _parse_block(block: Any, location: str) -> tuple[int, int]:
    if not (isinstance(block, (list, tuple)) and len(block) == 2 and all(map(_is_size, block))):
        raise InputError(
            f"{location}: has the block size {block!r}, but two positive sizes of at most {_MAX_SIZE} are required; "
            f"{_RESTORE}"
        )
    return block[0], block[1]


def _is_size(size: Any) -> bool:
    return type(size) is int and 0 < size <= _MAX_SIZE


def _parse_compressed_tensors(value: Mapping[str, Any], location: str) -> DeclaredQuantization:
    groups = value.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise InputError(f"{location}: has no config_groups, which name the quantization; {_RESTORE}")
    methods: dict[str, None] = {}
    block_sizes: set[tuple[int, int]] = set()
    group_sizes: set[tuple[str, int]] = set()
    codes_with_broadcast_scales: set[str] = set()
    # Code format of integers -> True for config groups with zero points, False for those without.
    zero_points: dict[str, set[bool]] = {}
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        format_name = group.get("format") or value.get("format")
        method = f"compressed-tensors:{format_name}"
        if method not in _METHODS:
            raise UnsupportedError(
                f"{location}: group {name} has format {format_name}, which ckptx does not decode; start from the "
                "checkpoint that it was quantized from"
            )
        methods[method] = None
        if weights.get("actorder") not in (None, False, "static", "weight"):
            raise UnsupportedError(
                f"{location}: group {name} has actorder {weights['actorder']!r}, which permutes the groups of a row; "
                "ckptx decodes groups in order; start from the checkpoint that it was quantized from"
            )
        code_format = _parse_code_format(weights, format_name, f"{location}: group {name}")
        if code_format.startswith("int"):
            zero_points.setdefault(code_format, set()).add(weights.get("symmetric") is False)
        strategy = weights.get("strategy")
        if strategy == "block":
            block_sizes.add(_parse_block(weights.get("block_structure"), location))
        elif strategy in ("group", "tensor_group"):
            size: Any = weights.get("group_size")
            if not _is_size(size):
                raise InputError(
                    f"{location}: group {name} has group_size {size!r}, but a positive size of at most {_MAX_SIZE} is "
                    f"required; {_RESTORE}"
                )
            group_sizes.add((code_format, size))
        else:
            codes_with_broadcast_scales.add(code_format)
    if not methods:
        raise InputError(f"{location}: has config_groups, but none with weights; {_RESTORE}")
    return DeclaredQuantization(
        location,
        tuple(methods),
        frozenset(block_sizes),
        frozenset(group_sizes),
        frozenset(zero_points),
        frozenset(code_format for code_format, has_zero_points in zero_points.items() if has_zero_points == {True}),
        frozenset(codes_with_broadcast_scales),
    )


def _parse_code_format(weights: Mapping[str, Any], format_name: object, where: str) -> str:
    """Return the code format of a config group of compressed-tensors, as in `Scheme.code_format`.

    Args:
        weights: Entry `weights` of the group.
        format_name: Entry `format` of the group, one that ckptx decodes.
        where: File, key and group, for messages.

    Raises:
        InputError: The number of bits is missing.
        UnsupportedError: ckptx does not decode integers of this width.
    """
    if format_name != "pack-quantized":
        return "e2m1" if format_name in ("mxfp4-pack-quantized", "nvfp4-pack-quantized") else "e4m3"
    bits = weights.get("num_bits")
    if type(bits) is not int:
        raise InputError(
            f"{where} has num_bits {bits!r}, but the number of bits of a quantized value is required; {_RESTORE}"
        )
    if bits not in (4, 8):
        raise UnsupportedError(
            f"{where} has {bits} bits per quantized value, and ckptx decodes 4 and 8; start from the checkpoint that "
            "it was quantized from"
        )
    return f"int{bits}"


def _parse_modelopt(value: Mapping[str, Any], location: str) -> DeclaredQuantization:
    layers = value.get("quantized_layers")
    entries: list[Mapping[str, Any]] = [value]
    if value.get("quant_algo") == "MIXED_PRECISION" and isinstance(layers, Mapping):
        entries = [layer for layer in layers.values() if isinstance(layer, Mapping)]
    algorithms = [each.get("quant_algo") for each in entries]
    if not algorithms:
        raise InputError(f"{location}: has quant_algo MIXED_PRECISION, but no quantized_layers; {_RESTORE}")
    methods = tuple(dict.fromkeys(f"modelopt:{algorithm}" for algorithm in algorithms))
    for method in methods:
        if method == "modelopt:None":
            raise UnsupportedError(
                f"{location}: has no quant_algo, which names the quantization of weights; start from the checkpoint "
                "that it was quantized from"
            )
        if method not in _METHODS:
            raise UnsupportedError(
                f"{location}: has quant_algo {method.partition(':')[2]}, which ckptx does not decode; start from the "
                "checkpoint that it was quantized from"
            )
    for each in entries:
        size = each.get("group_size")
        if each.get("quant_algo") == "NVFP4" and size not in (None, _NVFP4_GROUP):
            raise InputError(f"{location}: has group_size {size!r}, but NVFP4 has groups of {_NVFP4_GROUP}; {_RESTORE}")
    return DeclaredQuantization(location, methods)
