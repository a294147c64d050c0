"""Recognize unsupported checkpoint formats by file name, each with a way to convert it to a supported one.

Only names are examined. Supported weights in the same directory take precedence: the table is used if nothing else was
found, and to identify weights of other frameworks among the files next to supported weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from typing import NamedTuple

from ckptx.errors import InputError, StorageFailure, UnsupportedError
from ckptx.formats.fsdp.file_names import STATE_FILE_PATTERN
from ckptx.storage.interface import Location, Source

_MAX_LISTED = 2  # names in an error message


class UnsupportedKind(NamedTuple):
    """An unsupported format that is recognized by name.

    Attributes:
        names: Regular expression for the whole name of its files or directories.
        description: Noun phrase that precedes "is not supported" in the error.
        next_step: Way to convert its weights to a supported format.
        is_whole_if_single: True if the only file of this kind in a directory may be a whole state dict; passed as SRC,
            it is opened like any `.pt` file.
    """

    names: str
    description: str
    next_step: str
    is_whole_if_single: bool = False


# The next step of DeepSpeed kinds only: `is_unsupported_deepspeed` recognizes these kinds by it.
SAVE_WHERE_TRAINED = "save its weights with save_pretrained or save_16bit_model where it was trained"

# In the order of precedence: names of one framework before suffixes that many frameworks use.
UNSUPPORTED_KINDS = (
    UnsupportedKind(
        r"__\d+\.metadata",
        "a DCP saved without collectives, one .metadata per rank,",
        "save it with use_collectives=True",
    ),
    UnsupportedKind(
        r"adapter_config\.json|adapter_.+\.safetensors|adapter_model\..+",
        "an adapter (LoRA or similar) without both adapter_config.json and adapter_model.safetensors (or .bin)",
        "save it with PEFT's save_pretrained",
    ),
    UnsupportedKind(
        r"layer_\d+-model_\d+-model_states\.pt",
        "a DeepSpeed checkpoint of pipeline stages",
        SAVE_WHERE_TRAINED,
    ),
    UnsupportedKind(
        r"(expert|layer_\d+_expert)_\d+(_expert_\d+)?_mp_rank_\d+_(model|optim)_states\.pt"
        r"|expp_rank_\d+_mp_rank_\d+_optim_states\.pt",
        "a DeepSpeed checkpoint of a mixture of experts",
        SAVE_WHERE_TRAINED,
    ),
    UnsupportedKind(
        r"latest_universal|global_step\d+_universal",
        "a DeepSpeed universal checkpoint without its *_model_states.pt files",
        "copy them from the machine that wrote it",
    ),
    UnsupportedKind(
        r"exp_avg_sq\.pt|exp_avg\.pt|fp32\.pt",
        "a parameter of a DeepSpeed universal checkpoint",
        "pass the directory with zero/ and the *_model_states.pt files",
    ),
    UnsupportedKind(
        STATE_FILE_PATTERN,
        "the optimizer or trainer state of FSDP ranks (verl)",
        "pass the directory that has the model_world_size_* files",
    ),
    UnsupportedKind(
        r"model_optim_rng\.pt|model_rng\.pt|distrib_optim\.pt|mp_rank_\d\d(_\d\d\d)*",
        "a Megatron checkpoint in the legacy format, with one directory per rank,",
        "save it with --ckpt-format torch_dist and pass the iter_* directory",
    ),
    UnsupportedKind(
        r"\.zarray|\.zattrs|\.zgroup|zarr\.json",
        "a checkpoint in zarr arrays",
        "save it with --ckpt-format torch_dist, or export it to safetensors",
    ),
    UnsupportedKind(
        r".*\.nemo",
        "a NeMo archive",
        "unpack it with `tar -xf` and pass the directory with .metadata, or export it to safetensors",
    ),
    UnsupportedKind(
        r"model(-pp-\d+-tp-\d+|-rank-\d+)-part-\d+\.safetensors",
        "a sharded_state of vLLM or SGLang, fused and padded for one engine,",
        "start from the checkpoint it was made from",
    ),
    UnsupportedKind(
        r"tp\d+_sharded_checkpoint\.safetensors|rank\d+\.safetensors|model\d+-mp\d+\.safetensors",
        "a checkpoint sharded for the ranks of one engine, without sharding metadata,",
        "start from the checkpoint it was made from",
    ),
    UnsupportedKind(
        r"(.+[-_.])?rank_?\d+\.(bin|pt|pth|ckpt)",
        "a state dict of one rank",
        "save it with FSDP's SHARDED_STATE_DICT (a DCP) or FULL_STATE_DICT (one pytorch_model.bin)",
    ),
    UnsupportedKind(
        r"checkpoint_\d+\.pt",
        "a checkpoint of torch.distributed.checkpoint._experimental, one file per rank,",
        "save it with torch.distributed.checkpoint.save; if a single rank saved it, pass the file",
        is_whole_if_single=True,
    ),
    UnsupportedKind(
        r"consolidated\.\d\d\.pth",
        "a checkpoint in Meta's own layout, one file per tensor parallel rank,",
        "convert it with the convert_*_weights_to_hf script of transformers; if there is a single rank, pass the file",
        is_whole_if_single=True,
    ),
    UnsupportedKind(
        r"_CHECKPOINT_METADATA|manifest\.ocdbt|ocdbt\.process_\d+|_METADATA|_sharding|checkpoint_metadata\.orbax.*",
        "a JAX checkpoint of orbax",
        "restore it with orbax and save the parameters as safetensors",
    ),
    UnsupportedKind(
        r".*\.ckpt\.(index|meta|data-\d+-of-\d+)|.*\.data-\d+-of-\d+|saved_model\.pb",
        "a TensorFlow checkpoint",
        "load it with from_tf in transformers 4, call save_pretrained, and pass its output",
    ),
    UnsupportedKind(
        r".*\.(h5|hdf5|keras)|.*\.h5\.index\.json",
        "a Keras or TensorFlow file (HDF5)",
        "load it with from_tf in transformers 4, call save_pretrained, and pass its output",
    ),
    UnsupportedKind(
        r".*\.msgpack|.*\.msgpack\.index\.json",
        "a Flax file (msgpack)",
        "load it with from_flax in transformers 4, call save_pretrained, and pass its output",
    ),
    UnsupportedKind(r".*\.(onnx|onnx_data|ort)", "ONNX", "start from the checkpoint it was exported from"),
    UnsupportedKind(r".*\.(gguf|ggml|ggjt)", "GGUF", "start from the safetensors it was made from"),
    UnsupportedKind(
        r".*\.(tflite|mlmodel|mlpackage|engine|plan|pt2|pte|ot)|openvino_model\.(xml|bin)",
        "a model compiled for one engine",
        "start from the checkpoint it was made from",
    ),
    UnsupportedKind(r".*\.npz", "a NumPy archive", "save its arrays as safetensors"),
    UnsupportedKind(
        r".*\.(pkl|pickle)", "a plain pickle", "if you trust it, load it and save its tensors as safetensors"
    ),
    UnsupportedKind(
        r".*\.ckpt",
        "a checkpoint of a whole trainer (.ckpt)",
        "save its state_dict with safetensors, or as pytorch_model.bin",
    ),
)  # fmt: skip


@cache
def _compiled_kinds() -> list[tuple[re.Pattern[str], UnsupportedKind]]:
    """Return the compiled pattern of each kind, lazily because most checkpoints need none."""
    return [(re.compile(kind.names), kind) for kind in UNSUPPORTED_KINDS]


def kind_of_name(name: str) -> UnsupportedKind | None:
    """Return the unsupported format of a file or directory name, or None."""
    return next((kind for pattern, kind in _compiled_kinds() if pattern.fullmatch(name)), None)


def is_unsupported_deepspeed(name: str) -> bool:
    """Return True if a name is that of a DeepSpeed file that makes the directory an unsupported checkpoint."""
    kind = kind_of_name(name)
    return kind is not None and kind.next_step is SAVE_WHERE_TRAINED


def is_unsupported_weights(name: str) -> bool:
    """Return True if a name is that of weights, or their index, in an unsupported format."""
    is_config = name.endswith(".json") and not name.endswith(".index.json")
    return not is_config and kind_of_name(name) is not None


def kind_of_names(names: Collection[str]) -> tuple[UnsupportedKind, list[str]] | None:
    """Return the unsupported format of the names in a directory, and the names that match it; None if none matches."""
    for pattern, kind in _compiled_kinds():
        found = sorted(name for name in names if pattern.fullmatch(name))
        if found:
            return kind, found
    return None


def refuse_file(source: Source, name: str) -> None:
    """Refuse a file whose name is that of an unsupported format.

    A file that may be a whole state dict is accepted if it is the only one of its kind in the directory.

    Raises:
        UnsupportedError: The format is unsupported.
    """
    kind = kind_of_name(name)
    if kind is None:
        return
    if kind.is_whole_if_single and [each for each in source.listing() if kind_of_name(each) is kind] == [name]:
        return
    raise UnsupportedError(f"{source.location / name}: {kind.description} is not supported; {kind.next_step}")


def refuse_directory(path: Location, names: Collection[str]) -> None:
    """Refuse a directory with a name of an unsupported format; the error lists the names.

    Raises:
        UnsupportedError: The format is unsupported.
    """
    known = kind_of_names(names)
    if known is None:
        return
    kind, found = known
    more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    raise UnsupportedError(
        f"{path}: {kind.description} is not supported (found {', '.join(found[:_MAX_LISTED])}{more}); {kind.next_step}"
    )


def refuse_in_tree(source: Source, depth: int) -> None:
    """Refuse a directory if it or a subdirectory down to `depth` levels has an unsupported format, nearest first.

    Raises:
        UnsupportedError: A directory has one.
    """
    level = [source.location]
    for _ in range(depth + 1):
        next_level: list[Location] = []
        for directory in level:
            try:
                listing = source.with_location(directory).listing()
            except StorageFailure:
                raise
            except InputError:
                continue  # not a directory, not accessible, or with too many names
            refuse_directory(directory, listing.names)
            next_level += [directory / name for name in listing.directories() if not name.startswith(".")]
        level = next_level
