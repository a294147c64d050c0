"""Megatron's names, as megatron-core 0.16 and Megatron-LM write them in the `torch_dist` format.

    decoder.layers.self_attention.linear_qkv.weight      [L, (heads + 2 kv heads) * head_dim, H]
        rows of one kv head after another: of the q heads in its group, of its k head, of its v head
    decoder.layers.mlp.linear_fc1.weight                 [L, 2 F, H]     rows of gate, then of up
    decoder.layers.mlp.experts.experts.linear_fc1.weight [L, E, 2 F, H]
    embedding.word_embeddings.weight                     [V padded, H]

L layers, hidden size H, MLP width F, E experts, vocabulary size V. In some checkpoints a tensor has all layers, with
the layer as its first dim (as above); in others there is one tensor for each layer, with the index of the layer in its
name (`decoder.layers.0.mlp...`). The tables have the names with an index. RoPE rotates halves of a head, as in Hugging
Face models, so rows move in whole heads. Disk names are those of the files on the Hub. The section `megatron` of the
corrections of a model type names the form of a class.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptx.architecture.configs import invalid_value_message
from ckptx.architecture.correction_types import expand_braces
from ckptx.architecture.trainer_naming.forms import find_form, list_classes
from ckptx.architecture.trainer_naming.megatron_prefixes import LAYERS
from ckptx.architecture.trainer_naming.megatron_tables import (
    COMMON,
    EXPERTS,
    FORMS,
    GATE_UP,
    GATE_UP_OF_EXPERTS,
    MTP_FORMS,
    MTP_LAYER,
    OLD_MTP_LAYER,
    QKV,
    SAME,
    VOCABULARY_ROWS,
)
from ckptx.architecture.trainer_naming.mtp import copies_in_mtp_layers, mtp_layers
from ckptx.catalog.region import Shape
from ckptx.errors import InputError, UnsupportedError
from ckptx.mapping.ops import Conversion, Op

TRAINER = "megatron"

_OPERATION_BY_NAME = {name: operation for rows in FORMS.values() for name, operation, _ in rows}
# Names below a layer. With TransformerEngine, the norm before experts is a module of its own; without, Megatron stores
# it under the name of the norm before a dense MLP.
ROUTER, EXPERT_NORM, MLP_NORM = "mlp.router.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"

# Names of the tensors whose rows from `vocab_size` on are padding: embedding and output head.
VOCABULARY = frozenset(name for name, operation, _ in COMMON if operation == VOCABULARY_ROWS)

_LAYER_NAME = re.compile(rf"{re.escape(LAYERS)}\.(?:(\d+)\.)?")
_MTP_LAYER_NAME = re.compile(rf"mtp\.layers\.\d+\.(?:{MTP_LAYER}|{OLD_MTP_LAYER})\.")


def layer_suffix(name: str) -> str | None:
    """Return the part of a name below the layers if the tensor has all layers.

    None for a tensor of one layer, and for one outside of the layers.
    """
    match = _LAYER_NAME.match(name)
    return name[match.end() :] if match is not None and match.group() == f"{LAYERS}." else None


def split_layer_name(name: str) -> tuple[int, str] | None:
    """Return the index of the layer, and the part of the name below it, for a tensor of one layer; else None."""
    match = _LAYER_NAME.match(name)
    return None if match is None or match[1] is None else (int(match[1]), name[match.end() :])


def split_module_name(name: str) -> tuple[str, str] | None:
    """Return the path of the decoder layer that a tensor is in, also inside an MTP layer, and the name below it.

    None for a tensor of all layers, and for one that is in no decoder layer.
    """
    match = _MTP_LAYER_NAME.match(name)
    if match is None:
        match = _LAYER_NAME.match(name)
        if match is None or match[1] is None:
            return None
    return name[: match.end() - 1], name[match.end() :]


def block_shape(name: str, shape: Shape) -> Shape:
    """Return the shape of the blocks in which Megatron stores a tensor without tensor parallelism.

    Layers and experts are separate blocks, and so are gate and up.

    Args:
        name: Name of a tensor of all layers, of one layer, or outside of the layers.
        shape: Shape of the tensor.
    """
    suffix = layer_suffix(name)
    module = split_module_name(name)
    below_layer = suffix if module is None else module[1]
    operation = _OPERATION_BY_NAME.get(name if below_layer is None else f"{LAYERS}.*.{below_layer}")
    sizes = list(shape)
    dim = 0
    for has_dim in (suffix is not None, operation in (EXPERTS, GATE_UP_OF_EXPERTS)):
        if has_dim:
            sizes[dim] = min(1, sizes[dim])
            dim += 1
    if operation in (GATE_UP, GATE_UP_OF_EXPERTS):
        sizes[dim] //= 2
    return tuple(sizes)


def known_classes() -> list[str]:
    """Return the names of all classes whose Megatron names are known, sorted."""
    return list_classes("megatron")


def form_of(class_name: str) -> str | None:
    """Return the form of the names of a class, a key of `FORMS`; None if they are unknown."""
    return find_form("megatron", class_name, FORMS)


def mtp_copies(class_name: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return name on the Hub -> name of the original, for tensors that Megatron's MTP layers share with the model.

    Args:
        class_name: Name as in `architectures` of `config.json`.
        config: Contents of `config.json`.

    Raises:
        InputError: The config has an invalid number of layers.
    """
    mtp = MTP_FORMS.get(form_of(class_name) or "")
    return copies_in_mtp_layers(config) if mtp is not None and mtp.has_copies else {}


def conversions(class_name: str, config: Mapping[str, Any], padded_rows: int | None = None) -> tuple[Conversion, ...]:
    """Return the conversions from Megatron's names, without a prefix and with an index for each layer, to disk names.

    Args:
        class_name: Name as in `architectures` of `config.json`.
        config: Contents of `config.json`.
        padded_rows: Rows of the embedding and the output head, padding included; None if unknown, so that those
            conversions have no inverse.

    Raises:
        UnsupportedError: The Megatron names of the class are unknown.
        InputError: The config lacks a size that a conversion needs.
    """
    form = form_of(class_name)
    if form is None:
        known = ", ".join(known_classes())
        raise UnsupportedError(
            f"{class_name}: the tensors have Megatron's names, which are mapped for {known} only; "
            "pass --base none to keep the names"
        )
    model_conversions = _conversions_of(FORMS[form], config, padded_rows)
    # On the Hub, MTP layers are often layers after the last one, whose names the conversions of the model match, too.
    # So those of MTP layers come first: in reverse, the first conversion that matches is used.
    return (*(_mtp_conversions(form, config) if form in MTP_FORMS else ()), *model_conversions)


def _conversions_of(
    table: Iterable[tuple[str, str, str]], config: Mapping[str, Any], padded_rows: int | None = None
) -> tuple[Conversion, ...]:
    return tuple(
        Conversion((name,), tuple(expand_braces(disk_name)), _ops(operation, config, padded_rows))
        for name, operation, disk_name in table
    )


def _mtp_conversions(form: str, config: Mapping[str, Any]) -> Iterator[Conversion]:
    """Yield the conversions of MTP layers, see `MtpForm`.

    Raises:
        InputError: See `mtp_layers`.
    """
    mtp = MTP_FORMS[form]
    decoder = _conversions_of(mtp.decoder or FORMS[form], config)
    for index, layer in enumerate(mtp_layers(config)[: mtp.max_count]):
        for name, hub in mtp.modules.items():
            disk_name = f"{hub}.weight".replace(".L.", f".{layer}.")
            yield Conversion((f"mtp.layers.{index}.{name}.weight",), (disk_name,))
        disk_layer = f"{mtp.layer}.".replace(".L.", f".{layer}.").replace(".K.", f".{index}.")
        for module in (MTP_LAYER, OLD_MTP_LAYER):
            for each in decoder:
                if each.sources[0].startswith(f"{LAYERS}.*."):
                    yield Conversion(
                        (each.sources[0].replace(f"{LAYERS}.*", f"mtp.layers.{index}.{module}", 1),),
                        tuple(target.replace("model.layers.*.", disk_layer, 1) for target in each.targets),
                        each.ops,
                    )


def _ops(operation: str, config: Mapping[str, Any], padded_rows: int | None) -> tuple[Op, ...]:
    """Return the ops of an operation of the tables.

    Args:
        operation: Operation of a row of the tables, such as `GATE_UP`.
        config: Contents of `config.json`.
        padded_rows: See `conversions`.
    """
    if operation == VOCABULARY_ROWS:
        size = read_size(config, "vocab_size")
        return (Op("truncate", args=(size,) if padded_rows is None else (size, padded_rows)),)
    if operation == QKV:
        heads, kv_heads, head_dim = head_counts(config)
        return (Op("split_groups", args=(kv_heads, heads // kv_heads * head_dim, head_dim, head_dim)),)
    return {
        SAME: (),
        GATE_UP: (Op("chunk"),),
        EXPERTS: (Op("unmerge"),),
        GATE_UP_OF_EXPERTS: (Op("chunk", 1), Op("unmerge")),
    }[operation]


def head_counts(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the number of attention heads, the number of key-value heads, and the size of a head in elements.

    Args:
        config: Contents of `config.json`.

    Raises:
        InputError: One is missing or invalid, or the heads do not form groups of equal size.
    """
    heads = read_size(config, "num_attention_heads")
    kv_heads = heads if config.get("num_key_value_heads") is None else read_size(config, "num_key_value_heads")
    if heads % kv_heads:
        raise InputError(
            f"config.json: num_attention_heads is {heads}, which is not a multiple of num_key_value_heads "
            f"({kv_heads}); correct it"
        )
    head_dim = (
        read_size(config, "hidden_size") // heads if config.get("head_dim") is None else read_size(config, "head_dim")
    )
    return heads, kv_heads, head_dim


def read_size(config: Mapping[str, Any], key: str) -> int:
    """Return a size in `config.json`.

    Raises:
        InputError: It is missing, or not a positive integer.
    """
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(
            invalid_value_message(
                (key,), value, "a positive integer, which the layout of Megatron's tensors depends on"
            )
        )
    return value
