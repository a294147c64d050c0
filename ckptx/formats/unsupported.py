"""Checkpoints that ckptx recognises by the names of their files and does not read, each with what to do instead.

Only names are looked at. Weights that ckptx reads win over what lies beside them: the table answers when nothing else
did, and says which files next to real weights are another framework's weights and stay behind.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from typing import NamedTuple

from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.fsdp.file_names import STATE_FILES
from ckptx.storage.interface import Location, Source

_SHOWN = 2


class UnsupportedKind(NamedTuple):
    """A kind of checkpoint that is known by name.

    Attributes:
        names: What its files or directories are called, as a regular expression over whole names.
        what: What it is, as the subject of "is not read".
        next_step: How its weights come into a form that is.
        whole_alone: True when one such file without others of its kind may be a whole state dict. Given as SRC, a lone
            one is opened as any `.pt` file.
    """

    names: str
    what: str
    next_step: str
    whole_alone: bool = False


# In the order in which they are asked: what a framework alone writes comes before suffixes that many use.
FOREIGN_KINDS = (
    UnsupportedKind(
        r"__\d+\.metadata",
        "a DCP saved without collectives, one .metadata per rank,",
        "save it with use_collectives=True",
    ),
    UnsupportedKind(
        r"adapter_config\.json|adapter_.+\.safetensors|adapter_model\..+",
        "an adapter (LoRA or similar)",
        "merge it into its base first",
    ),
    UnsupportedKind(
        r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_(model|optim)_states\.pt"
        r"|mp_rank_\d+_model_states\.pt"
        r"|layer_\d+-model_\d+-model_states\.pt"
        r"|(expert|layer_\d+_expert)_\d+(_expert_\d+)?_mp_rank_\d+_(model|optim)_states\.pt"
        r"|latest_universal|global_step\d+_universal",
        "a DeepSpeed checkpoint",
        "run the zero_to_fp32.py beside it with --safe_serialization and pass the directory it writes",
    ),
    UnsupportedKind(
        r"exp_avg_sq\.pt|exp_avg\.pt|fp32\.pt",
        "a parameter of a DeepSpeed universal checkpoint",
        "run zero_to_fp32.py on the checkpoint it was made of, with --safe_serialization, and pass what that writes",
    ),
    UnsupportedKind(
        STATE_FILES,
        "the optimizer or trainer state of FSDP ranks, as verl writes it,",
        "pass the directory that has the model_world_size_* files",
    ),
    UnsupportedKind(
        r"model_optim_rng\.pt|model_rng\.pt|distrib_optim\.pt|mp_rank_\d\d(_\d\d\d)*",
        "a Megatron checkpoint of the legacy format, one directory for each rank,",
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
        "unpack it with `tar -xf` and pass the directory in it that holds .metadata, or export it to safetensors",
    ),
    UnsupportedKind(
        r"model(-pp-\d+-tp-\d+|-rank-\d+)-part-\d+\.safetensors",
        "a sharded_state of vLLM or SGLang, fused and padded for one engine,",
        "start from the checkpoint it was made of",
    ),
    UnsupportedKind(
        r"tp\d+_sharded_checkpoint\.safetensors|rank\d+\.safetensors|model\d+-mp\d+\.safetensors",
        "a checkpoint cut for the ranks of one engine, without a record of how,",
        "start from the checkpoint it was made of",
    ),
    UnsupportedKind(
        r"(.+[-_.])?rank_?\d+\.(bin|pt|pth|ckpt)",
        "a state dict of one rank",
        "save it with FSDP's SHARDED_STATE_DICT (a DCP) or FULL_STATE_DICT (one pytorch_model.bin)",
    ),
    UnsupportedKind(
        r"checkpoint_\d+\.pt",
        "a checkpoint of torch.distributed.checkpoint._experimental, one file for each rank,",
        "save it with torch.distributed.checkpoint.save; saved by one rank alone, pass the file",
        whole_alone=True,
    ),
    UnsupportedKind(
        r"consolidated\.\d\d\.pth",
        "a checkpoint in Meta's own layout, one file for each tensor parallel rank,",
        "convert it with the convert_*_weights_to_hf script of transformers; of one rank alone, pass the file",
        whole_alone=True,
    ),
    UnsupportedKind(
        r"_CHECKPOINT_METADATA|manifest\.ocdbt|ocdbt\.process_\d+|_METADATA|_sharding|checkpoint_metadata\.orbax.*",
        "a JAX checkpoint of orbax",
        "restore it there and save the parameters as safetensors",
    ),
    UnsupportedKind(
        r".*\.ckpt\.(index|meta|data-\d+-of-\d+)|.*\.data-\d+-of-\d+|saved_model\.pb",
        "a TensorFlow checkpoint",
        "load it with from_tf in a transformers 4 and call save_pretrained, then pass what that writes",
    ),
    UnsupportedKind(
        r".*\.(h5|hdf5|keras)|.*\.h5\.index\.json",
        "a Keras or TensorFlow file (HDF5)",
        "load it with from_tf in a transformers 4 and call save_pretrained, then pass what that writes",
    ),
    UnsupportedKind(
        r".*\.msgpack|.*\.msgpack\.index\.json",
        "a Flax file (msgpack)",
        "load it with from_flax in a transformers 4 and call save_pretrained, then pass what that writes",
    ),
    UnsupportedKind(r".*\.(onnx|onnx_data|ort)", "ONNX", "start from the checkpoint it was exported from"),
    UnsupportedKind(r".*\.(gguf|ggml|ggjt)", "GGUF", "start from the safetensors it was made of"),
    UnsupportedKind(
        r".*\.(tflite|mlmodel|mlpackage|engine|plan|pt2|pte|ot)|openvino_model\.(xml|bin)",
        "a model compiled for one engine",
        "start from the checkpoint it was made of",
    ),
    UnsupportedKind(r".*\.npz", "a NumPy archive", "save its arrays as safetensors"),
    UnsupportedKind(
        r".*\.(pkl|pickle)", "a plain pickle", "load it where it is trusted and save its tensors as safetensors"
    ),
    UnsupportedKind(
        r".*\.ckpt",
        "a checkpoint of a whole trainer (.ckpt)",
        "save its state_dict with safetensors, or as pytorch_model.bin",
    ),
)  # fmt: skip


@cache
def _compiled() -> list[tuple[re.Pattern[str], UnsupportedKind]]:
    """Return the pattern of each kind; most checkpoints have no file that is asked about."""
    return [(re.compile(kind.names), kind) for kind in FOREIGN_KINDS]


def kind_of_name(name: str) -> UnsupportedKind | None:
    """The kind that a file or directory of this name belongs to, or None."""
    return next((kind for pattern, kind in _compiled() if pattern.fullmatch(name)), None)


def is_unsupported_weights(name: str) -> bool:
    """True for weights, or their index, of a kind that is not read: beside weights that are, they stay behind."""
    is_config = name.endswith(".json") and not name.endswith(".index.json")
    return not is_config and kind_of_name(name) is not None


def kind_among(names: Collection[str]) -> tuple[UnsupportedKind, list[str]] | None:
    """The kind that the names in one directory belong to, and which of them say so.

    Returns:
        None when no name is known.
    """
    for pattern, kind in _compiled():
        found = sorted(name for name in names if pattern.fullmatch(name))
        if found:
            return kind, found
    return None


def refuse_file(source: Source, name: str) -> None:
    """Refuses a file that is known by its name to be no checkpoint ckptx reads.

    A file that may be whole by itself is let through when no other of its kind lies beside it.

    Raises:
        UnsupportedError: It is of a foreign kind.
    """
    kind = kind_of_name(name)
    if kind is None:
        return
    if kind.whole_alone and [each for each in source.listing() if kind_of_name(each) is kind] == [name]:
        return
    raise UnsupportedError(f"{source.location / name}: {kind.what} is not read; {kind.next_step}")


def refuse_directory(path: Location, names: Collection[str]) -> None:
    """Refuses a directory in which a name is known, and says which.

    Raises:
        UnsupportedError: It is of a foreign kind.
    """
    known = kind_among(names)
    if known is None:
        return
    kind, found = known
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise UnsupportedError(
        f"{path}: {kind.what} is not read (found {', '.join(found[:_SHOWN])}{more}); {kind.next_step}"
    )


def refuse_below(source: Source, depth: int) -> None:
    """Refuses a directory when it, or one at most `depth` below, is of a foreign kind; the nearest one is named.

    Raises:
        UnsupportedError: One of them is.
    """
    level = [source.location]
    for _ in range(depth + 1):
        below: list[Location] = []
        for directory in level:
            try:
                listing = source.at(directory).listing()
            except InputError:
                continue  # what cannot be listed tells nothing
            refuse_directory(directory, listing.names)
            below += [directory / name for name in listing.directories() if not name.startswith(".")]
        level = below
