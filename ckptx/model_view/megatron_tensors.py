"""Convert a model with disk names to Megatron's names and layout, the inverse of `megatron_names`.

    model.layers.0.mlp.gate_proj.weight [F, H]  ->  decoder.layers.mlp.linear_fc1.weight [L, 2 F, H]
    model.layers.0.mlp.up_proj.weight   [F, H]
    ...

The entries of the result refer to the same bytes. Chunks of rows that pad the vocabulary refer to `ZEROS_FILE`, a file
of zeros that exists in memory only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from ckptx.architecture.trainer_naming import megatron
from ckptx.architecture.trainer_naming.megatron_prefixes import LAYERS
from ckptx.catalog.entry import Block, TensorEntry
from ckptx.catalog.region import Region, Shape
from ckptx.errors import InputError, UnsupportedError
from ckptx.mapping.name_index import NameIndex
from ckptx.mapping.ops import Conversion
from ckptx.mapping.rewrite import merge
from ckptx.mapping.rules import RenamedTensors, TrainerRules
from ckptx.wording import first_of

Layers = Literal["stacked", "separate"]

# Buffers of old checkpoints that transformers and Megatron compute from the config.
_COMPUTED_SUFFIX = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class MegatronTensors:
    """The tensors of a model in Megatron's layout.

    Attributes:
        tensors: Tensors by Megatron name, with the dtypes of the source.
        sources: Megatron name -> disk names of the tensors that it is made of.
        aliases: Second Megatron name of a tensor -> its name in `tensors`.
        computed: Disk names of buffers that Megatron computes; `tensors` has nothing of them.
        copies: Disk name -> disk name of the original, for tensors of MTP layers that Megatron shares with the model;
            `tensors` has only the original, and the caller checks that the bytes of both are equal.
        conversions: Conversions from Megatron's names, with an index for each layer, to disk names.
        layers: "stacked" if one tensor holds all layers, "separate" if there is one for each layer.
        vocabulary_rows: Rows of the vocabulary before padding, the larger number of the embedding and the output head.
        padded_rows: Rows of the embedding and the output head with padding.
    """

    tensors: Mapping[str, TensorEntry]
    sources: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, str]
    computed: tuple[str, ...]
    copies: Mapping[str, str]
    conversions: tuple[Conversion, ...]
    layers: Layers
    vocabulary_rows: int
    padded_rows: int


def make_megatron_tensors(
    tensors: Mapping[str, TensorEntry],
    class_name: str,
    config: Mapping[str, Any],
    *,
    layers: Layers | None,
    vocabulary_multiple: int,
) -> MegatronTensors:
    """Return the tensors of a model in Megatron's layout.

    Args:
        tensors: All tensors of the model by disk name, with located chunks.
        class_name: Name as in `architectures` of `config.json`.
        config: Contents of `config.json`.
        layers: Form of the layers; None for stacked layers if all have the same tensors, else separate ones.
        vocabulary_multiple: Positive number; the rows of embedding and output head are padded to a multiple of it.

    Raises:
        UnsupportedError: Megatron's names of the class or of a tensor are unknown, or `layers` is "stacked" and the
            layers have different tensors.
        InputError: Tensors do not match each other or the config, or the embedding is missing.
    """
    if megatron.form_of(class_name) is None:
        raise UnsupportedError(
            f"{class_name}: its tensors have no Megatron names in ckptx, which has those of "
            f"{', '.join(megatron.known_classes())}; convert it with convert to-dcp or convert to-hf"
        )
    computed = tuple(name for name in tensors if name.endswith(_COMPUTED_SUFFIX))
    copies = {
        name: original
        for name, original in megatron.mtp_copies(class_name, config).items()
        if name in tensors and original in tensors
    }
    stored = {name: entry for name, entry in tensors.items() if name not in computed and name not in copies}
    rows = _vocabulary_rows(stored, megatron.conversions(class_name, config))
    padded_rows = -(-rows // vocabulary_multiple) * vocabulary_multiple
    conversions = megatron.conversions(class_name, config, padded_rows)
    _refuse_unknown(stored, conversions, class_name)
    renamed = TrainerRules(conversions).to_trainer(stored)
    _refuse_later_layers(renamed, megatron.read_size(config, "num_hidden_layers"), class_name)
    converted_names, aliases = _name_expert_norms(renamed)
    sources = {name: renamed.sources[converted] for name, converted in converted_names.items()}
    made = {name: renamed.tensors[converted].with_name(name) for name, converted in converted_names.items()}
    layer_form = layers or ("stacked" if _different_layers(made) is None else "separate")
    if layer_form == "stacked":
        _refuse_different_layers(made)
        made, sources = _stack(made, sources)
        aliases = {_stacked_name(name): _stacked_name(kept) for name, kept in aliases.items()}
    return MegatronTensors(made, sources, aliases, computed, copies, conversions, layer_form, rows, padded_rows)


def blocks_of(name: str, shape: Shape) -> tuple[Block, ...]:
    """Return the blocks in which a tensor is stored: one for each layer, each expert, and each of gate and up.

    All are blocks of rank 0. A loader then reads the layers and experts of its rank instead of the whole tensor.

    Args:
        name: Megatron's name of the tensor.
        shape: Shape of the tensor.
    """
    sizes = megatron.block_shape(name, shape)
    starts = product(*(range(0, total, size) if size else (0,) for total, size in zip(shape, sizes, strict=True)))
    return tuple(Block(0, Region(offsets, sizes)) for offsets in starts)


def _vocabulary_rows(tensors: Mapping[str, TensorEntry], conversions: Collection[Conversion]) -> int:
    """Return the largest number of rows of embedding and output head.

    Raises:
        InputError: There is neither.
    """
    names = [each.targets[0] for each in conversions if each.sources[0] in megatron.VOCABULARY]
    rows = [tensors[name].shape[0] for name in names if name in tensors and tensors[name].shape]
    if not rows:
        raise InputError(f'tensor "{names[0]}": is missing; Megatron requires the embedding, pass the whole model')
    return max(rows)


def _refuse_unknown(tensors: Mapping[str, TensorEntry], conversions: Collection[Conversion], class_name: str) -> None:
    """Refuse tensors that have no Megatron name, such as biases and quantization scales.

    Raises:
        UnsupportedError: There are some.
    """
    index = NameIndex(each.targets for each in conversions)
    unknown = [name for name in tensors if next(index.find(name), None) is None]
    if not unknown:
        return
    quantized = next((name for name, entry in tensors.items() if not entry.dtype.is_castable), None)
    if quantized is not None:
        raise UnsupportedError(
            f'tensor "{quantized}": is quantized ({tensors[quantized].dtype}), and Megatron has no names for scales '
            f"such as {first_of(unknown)}; pass --dequantize"
        )
    others = f" (and {len(unknown) - 1:,} more)" if len(unknown) > 1 else ""
    raise UnsupportedError(
        f'tensor "{unknown[0]}": has no counterpart in the Megatron model of {class_name}{others}; remove it from the '
        "checkpoint if the model does not need it, or convert it with convert to-dcp or convert to-hf"
    )


def _refuse_later_layers(renamed: RenamedTensors, layer_count: int, class_name: str) -> None:
    """Refuse layers after the last one of the config, such as MTP layers of a class whose names have none.

    Raises:
        UnsupportedError: There are some.
    """
    for name in renamed.tensors:
        layer_name = megatron.split_layer_name(name)
        if layer_name is not None and layer_name[0] >= layer_count:
            raise UnsupportedError(
                f'tensor "{renamed.sources[name][0]}": belongs to layer {layer_name[0]}, but config.json has '
                f"num_hidden_layers {layer_count}, and {class_name} has no Megatron names for further layers; correct "
                "the config, or remove the layer"
            )


def _name_expert_norms(renamed: RenamedTensors) -> tuple[dict[str, str], dict[str, str]]:
    """Return new name -> converted name, and alias -> new name, for the norms of layers with experts.

    Megatron looks for `EXPERT_NORM` with TransformerEngine and for `MLP_NORM` without, so both names are given.
    """
    new_names: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for name in renamed.tensors:
        module, suffix = megatron.split_module_name(name) or ("", name)
        new_name = name
        if suffix == megatron.MLP_NORM and f"{module}.{megatron.ROUTER}" in renamed.tensors:
            new_name = f"{module}.{megatron.EXPERT_NORM}"
            aliases[name] = new_name
        new_names[new_name] = name
    return new_names, aliases


def _suffixes_by_layer(names: Collection[str]) -> dict[int, set[str]]:
    """Return layer -> names of its tensors below the layer."""
    suffixes: dict[int, set[str]] = {}
    for name in names:
        layer_name = megatron.split_layer_name(name)
        if layer_name is not None:
            suffixes.setdefault(layer_name[0], set()).add(layer_name[1])
    return suffixes


def _different_layers(names: Collection[str]) -> tuple[int, int, str] | None:
    """Return the indices of two layers with different tensors, and a name below the layer that one of them lacks.

    None if all layers, without gaps in their indices, have the same tensors.
    """
    suffixes = _suffixes_by_layer(names)
    if not suffixes:
        return None
    first = min(suffixes)
    for layer in range(max(suffixes) + 1):
        difference = suffixes[first] ^ suffixes.get(layer, set())
        if difference:
            return first, layer, min(difference)
    return None


def _refuse_different_layers(names: Collection[str]) -> None:
    """Refuse to stack layers that have different tensors.

    Raises:
        UnsupportedError: There are some.
    """
    different = _different_layers(names)
    if different is not None:
        first, layer, suffix = different
        raise UnsupportedError(
            f'--layers stacked: layers {first} and {layer} have different tensors: only one of them has "{suffix}"; '
            "use --layers separate"
        )


def _stacked_name(name: str) -> str:
    layer_name = megatron.split_layer_name(name)
    return name if layer_name is None else f"{LAYERS}.{layer_name[1]}"


def _stack(
    tensors: Mapping[str, TensorEntry], sources: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, TensorEntry], dict[str, tuple[str, ...]]]:
    """Merge the tensors of each layer into tensors of all layers; others do not change.

    Args:
        tensors: Tensors by Megatron name; all layers must have the same tensors.
        sources: Megatron name -> disk names of the tensors that it is made of.

    Returns:
        Both mappings for the merged tensors.
    """
    members: dict[str, list[tuple[int, str]]] = {}
    for name in tensors:
        layer_name = megatron.split_layer_name(name)
        members.setdefault(_stacked_name(name), []).append((-1 if layer_name is None else layer_name[0], name))
    stacked: dict[str, TensorEntry] = {}
    stacked_sources: dict[str, tuple[str, ...]] = {}
    for new_name, layers in members.items():
        names = [name for _, name in sorted(layers)]
        entry = tensors[names[0]] if names == [new_name] else merge([tensors[name] for name in names], 0)
        stacked[new_name] = entry.with_name(new_name)
        stacked_sources[new_name] = tuple(source for name in names for source in sources[name])
    return stacked, stacked_sources
