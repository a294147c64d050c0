"""A quantized checkpoint as one of plain floats: its tensors, files and config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.errors import InputError
from ckptx.formats.hf.reader import read_json_object
from ckptx.formats.sidecars import MODELOPT_FILE
from ckptx.mapping.config_edits import apply_edits, dequantization_edits
from ckptx.storage.interface import SourceFiles

if TYPE_CHECKING:  # imported for quantized checkpoints only
    from ckptx.quantization.computed_files import ComputedFiles
    from ckptx.quantization.declared import DeclaredQuantization
    from ckptx.quantization.dequantize import DecodedTensors
    from ckptx.quantization.tensors import QuantizedTensors


@dataclass(frozen=True, slots=True)
class DequantizedCheckpoint:
    """A quantized checkpoint as one of plain floats.

    Attributes:
        catalog: Catalog with decoded weights in place of codes and scales.
        files: Files of the checkpoint, and computed files of the decoded weights.
        config: Config without the quantization; None if there is no config.
        edits: Changes that were made to the config, as `apply_edits` takes them: `key` (dotted), `before`, `after`.
        decoded: Decoded weights with their decoders.
    """

    catalog: Catalog
    files: ComputedFiles
    config: dict[str, Any] | None
    edits: tuple[dict[str, Any], ...]
    decoded: DecodedTensors


def read_declared_quantization(catalog: Catalog, config: Mapping[str, Any] | None) -> DeclaredQuantization | None:
    """Return the quantization that a checkpoint declares, in `config` or in `hf_quant_config.json`; None for none.

    Raises:
        InputError, UnsupportedError: See `read_declaration`.
    """
    source = catalog.source
    modelopt_config = read_json_object(source, MODELOPT_FILE) if source.listing().is_file(MODELOPT_FILE) else None
    if modelopt_config is None and not dequantization_edits(config or {}):
        return None
    from ckptx.quantization.declared import read_declaration

    return read_declaration(config, modelopt_config, str(catalog.root))


def find_quantized_tensors(catalog: Catalog, config: Mapping[str, Any] | None = None) -> QuantizedTensors:
    """Find the quantized weights of a checkpoint.

    Args:
        catalog: Catalog of the checkpoint.
        config: Config that declares the quantization; None for that of the checkpoint.

    Raises:
        InputError, UnsupportedError: See `read_declaration` and `find_quantized`.
    """
    from ckptx.quantization.tensors import find_quantized

    declared = read_declared_quantization(catalog, catalog.config if config is None else config)
    return find_quantized(catalog.tensors, declared, str(catalog.location))


def dequantize(
    catalog: Catalog, files: SourceFiles, dtype: str = "BF16", config: dict[str, Any] | None = None
) -> DequantizedCheckpoint:
    """Return a quantized checkpoint as one of plain floats, without reading its weights.

    Args:
        catalog: Catalog of the checkpoint.
        files: Its files; they must stay open while the result is used.
        dtype: Dtype of the decoded weights, `BF16` or `F32`.
        config: Config that declares the quantization; None for that of the checkpoint.

    Raises:
        InputError: No tensor is quantized, or see `read_declaration`, `find_quantized` and `decode_catalog`.
        UnsupportedError: See `read_declaration` and `find_quantized`.
    """
    from ckptx.quantization.computed_files import ComputedFiles
    from ckptx.quantization.dequantize import decode_catalog

    config = catalog.config if config is None else config
    quantized = find_quantized_tensors(catalog, config)
    if not quantized.tensors:
        raise InputError(f"{catalog.location}: no tensor is quantized; leave out --dequantize")
    decoded = decode_catalog(*_locate_chunks(catalog, quantized, files), DTYPES_BY_NAME[dtype])
    edits = tuple(dequantization_edits(config or {}))
    return DequantizedCheckpoint(
        decoded.catalog,
        ComputedFiles(files, decoded.decoder_by_file),
        None if config is None else apply_edits(config, edits),
        edits,
        decoded,
    )


def open_dequantized(catalog: Catalog, dtype: str = "BF16") -> Catalog:
    """Return a quantized checkpoint as one of plain floats, whose `source` opens files with decoded weights.

    Args:
        catalog: Catalog of the checkpoint. One that neither declares a quantization nor has codes is returned as it is.
        dtype: Dtype of the decoded weights, `BF16` or `F32`.

    Raises:
        InputError, UnsupportedError: See `dequantize`.
    """
    if not is_quantized(catalog):
        return catalog
    from ckptx.quantization.computed_files import ComputedSource

    with catalog.source.open(catalog.identities) as files:
        checkpoint = dequantize(catalog, files, dtype)
    return replace(
        checkpoint.catalog,
        config=checkpoint.config,
        opened_source=ComputedSource(catalog.source, checkpoint.decoded.decoder_by_file),
    )


def is_quantized(catalog: Catalog) -> bool:
    """Return True if a checkpoint declares a quantization, or has codes with scales.

    Raises:
        InputError, UnsupportedError: See `read_declaration`.
    """
    if read_declared_quantization(catalog, catalog.config) is not None:
        return True
    if all(entry.dtype.is_castable for entry in catalog.tensors.values()):  # plain floats, which are no codes
        return False
    from ckptx.quantization.tensors import CODE_DTYPES, find_scheme

    return any(
        entry.dtype.name in CODE_DTYPES and find_scheme(name, entry, catalog.tensors, None) is not None
        for name, entry in catalog.tensors.items()
    )


def _locate_chunks(
    catalog: Catalog, quantized: QuantizedTensors, files: SourceFiles
) -> tuple[Catalog, QuantizedTensors]:
    """Return the catalog and its quantized weights with chunks that are those of the elements.

    The torch archives of a DCP are parsed for this; other formats have such chunks already.
    """
    if not catalog.traits.has_archives:
        return catalog, quantized
    from ckptx.formats.dcp.reader import locate_payloads

    names = {*quantized.tensors, *quantized.companion_names}
    located = locate_payloads(replace(catalog, tensors={name: catalog.tensors[name] for name in names}), files).tensors
    tensors = {
        name: replace(
            tensor,
            codes=located[name],
            scale=located[tensor.scale.name],
            companions={suffix: located[entry.name] for suffix, entry in tensor.companions.items()},
        )
        for name, tensor in quantized.tensors.items()
    }
    return replace(catalog, tensors=catalog.tensors | located), replace(quantized, tensors=tensors)
