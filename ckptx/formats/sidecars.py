"""Find the files that are copied along with the weights: config, tokenizer, chat template, processors, custom code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from ckptx.catalog.entry import Sidecar
from ckptx.formats.peft.detect import CONFIG_FILE
from ckptx.formats.unsupported import is_unsupported_weights
from ckptx.storage.files import changed_error
from ckptx.storage.interface import FileIdentity, Source
from ckptx.storage.listing import EntryKind, Listing
from ckptx.untrusted.file_name import find_name_fault
from ckptx.untrusted.limits import MAX_CONFIG_BYTES

MANIFEST = "ckptx.json"
# Files that ckptx writes itself, where an output has them, so that they are neither copied nor reported as dropped.
_OWN_FILES = frozenset({MANIFEST, ".metadata"})

# Weights in any format: those of the checkpoint are converted, others are not copied but reported.
_WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".onnx_data", ".ot", ".tflite",
    ".distcp", ".npz", ".pkl", ".nemo", ".mlmodel", ".engine",
)  # fmt: skip
_INDEX_SUFFIXES = (".safetensors.index.json", ".bin.index.json", ".h5.index.json", ".msgpack.index.json")
_MAX_DEPTH = 3  # levels of subdirectories that are searched for sidecars


# Files that are copied from subdirectories: custom code, templates, configs; not the logs of a trainer.
_TEXT_SUFFIXES = (".json", ".jinja", ".py", ".txt", ".model", ".tiktoken", ".md")
# Files that belong to a weight file even if its directory may contain unrelated files.
_MODEL_FILE = re.compile(
    r"(config|generation_config|(pre)?processor_config|image_processor_config|video_preprocessor_config|vocab|merges|"
    r"special_tokens_map|added_tokens|chat_template|sentencepiece\.bpe|spiece|modeling_\w+|configuration_\w+|"
    r"(tokenizer|tokenization)\w*)\.(json|txt|model|jinja|py)"
)


# Other files that are usual in model repositories.
_REPOSITORY_FILE = re.compile(
    r"README(\.\w+)?|LICEN[CS]E([-_.]\w+)*|NOTICE(\.\w+)?|USE_POLICY(\.\w+)?|\.gitattributes|modules\.json|"
    r"(config_sentence_transformers|sentence_bert_config|quantize_config|quantization_config|hf_quant_config|"
    r"adapter_config|params|recipe|video_processor|fqn_to_file_index_mapping)\.(json|yaml)|tekken\.json|"
    r"[\w.-]+\.tiktoken|(vocab|merges|sentencepiece|spiece|tokenizer)[\w.-]*\.(txt|model|json|vocab|bpe)"
)
# Files that trainers write in addition to weights: training state, markers such as `latest`, and scripts.
_TRAINER_STATE = re.compile(
    r"trainer_state\.json|training_args\.(bin|json)|optimizer(_\d+)?\.(pt|bin)|scheduler(_\d+)?\.(pt|bin)|"
    r"scaler(_\d+)?\.pt|rng_state(_\d+)?\.pth|random_states_\d+\.pkl|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin|"
    r"custom_checkpoint_\d+\.pkl|common\.pt|metadata\.json|latest|zero_to_(fp32|torch)\.py|train_state\.(pt|json)|"
    r"latest_checkpointed_iteration\.txt|run_config\.yaml|meta\.pt|rank\d+\.pt|step_scheduler\.pt|"
    r"(dataloader|rng|scheduler|lr_scheduler)(_dp_rank_\d+)?\.pt|losses\.json|\.metadata\.json"
)
# Those of these files from which accelerate, Trainer and NeMo AutoModel resume, in addition to the checkpoint.
_RESUMED_STATE = re.compile(
    r"(scheduler|sampler|dl_state_dict|scaler)(_\d+)?\.(pt|bin)|random_states_\d+\.pkl|rng_state(_\d+)?\.pth|"
    r"custom_checkpoint_\d+\.pkl|trainer_state\.json|step_scheduler\.pt|"
    r"(dataloader|rng|scheduler|lr_scheduler)(_dp_rank_\d+)?\.pt"
)
# Directories in which trainers store such state.
TRAINER_STATE_DIRECTORIES = frozenset({"rng", "dataloader", "scheduler", "lr_scheduler", "step_scheduler"})
# Quantization settings outside config.json, for vLLM and GPTQ tools.
MODELOPT_FILE = "hf_quant_config.json"
QUANTIZATION_FILES = frozenset({MODELOPT_FILE, "quantize_config.json", "quantization_config.json"})


_TOKENIZER_FILE = re.compile(
    r"(tokenizer|tokenization)[\w.-]*\.(json|model|txt|py)|(vocab|sentencepiece|spiece)[\w.-]*\.(txt|model|json|bpe)|"
    r"tekken\.json|[\w.-]+\.tiktoken"
)


def is_tokenizer_file(base_name: str) -> bool:
    """Return True if a file name (without directory) is that of a tokenizer."""
    return _TOKENIZER_FILE.fullmatch(base_name) is not None


def is_known_sidecar(base_name: str) -> bool:
    """Return True if a file name (without directory) is usual in model repositories."""
    return _MODEL_FILE.fullmatch(base_name) is not None or _REPOSITORY_FILE.fullmatch(base_name) is not None


def is_trainer_state_file(base_name: str) -> bool:
    """Return True if trainers store schedulers, random numbers or data positions in files of this name."""
    return _TRAINER_STATE.fullmatch(base_name) is not None


def is_resumed_state_file(base_name: str) -> bool:
    """Return True if a trainer loads training state from files of this name when it resumes."""
    return _RESUMED_STATE.fullmatch(base_name) is not None


class SidecarFiles(NamedTuple):
    """The files next to the weights of a checkpoint.

    Attributes:
        copied: Files that are copied along with the weights.
        dropped: Names of files that are not copied, sorted.
        identities: Identity of each file in `copied`.
    """

    copied: tuple[Sidecar, ...]
    dropped: tuple[str, ...]
    identities: Mapping[str, FileIdentity]


def list_sidecars(source: Source, used_files: frozenset[str]) -> SidecarFiles:
    """List the sidecars of a checkpoint.

    Files in a subdirectory with other weights (`onnx/`, `original/`) are dropped, unless `modules.json` of
    sentence-transformers lists it as a part of the model. The config of an adapter is dropped, too, and so are
    files whose names are not allowed in an output.

    Args:
        source: The directory of the checkpoint.
        used_files: Names of the weight files, indexes and other files that are converted, which are neither copied nor
            reported as dropped.

    Raises:
        InputError: A link is broken: an incomplete cache or copy would silently lose its tokenizer.
    """
    modules = _module_directories(source)
    weight_directories = {_parent(name) for name in used_files}
    copied: list[str] = []
    dropped: list[str] = []
    for directory, names in _walk_directories(source, source.listing(), 0):
        candidates = [name for name in names if name not in used_files and _base_name(name) not in _OWN_FILES]
        weights = [
            name
            for name in candidates
            if name.endswith(_WEIGHT_SUFFIXES + _INDEX_SUFFIXES) or is_unsupported_weights(_base_name(name))
        ]
        # Without the weights of the adapter, transformers cannot load a directory that has its config.
        weights += [name for name in candidates if _base_name(name) == CONFIG_FILE]
        if directory == ".":
            copied.extend(name for name in candidates if name not in weights)
            dropped.extend(weights)
        elif directory.partition("/")[0] in modules:
            copied.extend(candidates)
        elif weights or directory in weight_directories:
            dropped.extend(candidates)
        else:
            copied.extend(name for name in candidates if name.endswith(_TEXT_SUFFIXES))
            dropped.extend(name for name in candidates if not name.endswith(_TEXT_SUFFIXES))
    dropped.extend(name for name in copied if find_name_fault(name) is not None)
    return _make_sidecar_files(source, copied, tuple(sorted(dropped)))


def sidecars_of_file(source: Source) -> SidecarFiles:
    """List the sidecars of one weight file with a custom name, in a directory that may contain unrelated files."""
    listing = source.listing()
    names = [name for name in listing if _MODEL_FILE.fullmatch(name) and listing.is_file(name)]
    return _make_sidecar_files(source, names, ())


def list_trainer_files(source: Source) -> tuple[str, ...]:
    """Return the files and directories with training state next to a DCP, sorted; directories end with a slash."""
    listing = source.listing()
    files = [name for name in listing if is_trainer_state_file(name) and listing.is_file(name)]
    directories = [f"{name}/" for name in listing if name in TRAINER_STATE_DIRECTORIES and listing.is_directory(name)]
    return tuple(sorted(files + directories))


def _make_sidecar_files(source: Source, names: list[str], dropped: tuple[str, ...]) -> SidecarFiles:
    """Return the sidecars for names that are allowed in a manifest."""
    names = [name for name in sorted(names) if find_name_fault(name) is None]
    identities = source.read_identities(names)
    copied = (Sidecar(name, identities[name].nbytes if name in identities else source.size(name)) for name in names)
    return SidecarFiles(tuple(copied), dropped, identities)


def _walk_directories(source: Source, listing: Listing, depth: int, path: str = ".") -> Iterator[tuple[str, list[str]]]:
    """Iterate over directories and the files in them, as paths relative to the source; "." is the source itself.

    Args:
        source: The directory of the checkpoint.
        listing: Listing of the directory at `path`.
        depth: Level of that directory; 0 for the source.
        path: Path of that directory, relative to the source.

    Raises:
        InputError: A link is broken.
    """
    prefix = "" if path == "." else f"{path}/"
    names = [name for name in listing if name not in _OWN_FILES]
    for name in names:
        if listing.kind(name) is EntryKind.BROKEN_LINK:
            source.size(prefix + name)  # raises an error with the target of the link
            raise changed_error(source.location / (prefix + name))
    yield path, [prefix + name for name in names if listing.is_file(name)]
    if depth < _MAX_DEPTH:
        for name in names:
            if listing.is_directory(name) and not name.startswith("."):
                yield from _walk_directories(source, listing.subdirectory(name), depth + 1, prefix + name)


def _parent(name: str) -> str:
    return str(PurePosixPath(name).parent)


def _base_name(name: str) -> str:
    return name.rpartition("/")[2]


def _module_directories(source: Source) -> frozenset[str]:
    """Return the subdirectories that `modules.json` of sentence-transformers lists; empty without such a file."""
    if not source.listing().is_file("modules.json"):
        return frozenset()
    try:
        modules = json.loads(source.read_small("modules.json", MAX_CONFIG_BYTES).decode("utf-8"))
        return frozenset(module["path"].split("/")[0] for module in modules if module.get("path"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return frozenset()  # not the modules.json of sentence-transformers
