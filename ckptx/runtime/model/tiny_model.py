"""Builds a small model with the layers of a large one, to run in place of it.

Pipeline stages run it to find the values that pass between layers, and recipes with `shrunk: true` take its widths.
Which values pass depends on the code of a class and on its config: on types of layers, shared tensors, windows and
positions, but not on widths. So the small model has every layer of the large one with small widths, and its structure
is compared with that of the large one before it is used.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization

from ckptx.errors import UnsupportedError
from ckptx.runtime.model.build import build_on_meta
from ckptx.runtime.model.shrink_config import ShrinkPolicy, find_token_ids, iter_configs, shrink_config

_MIB = 2**20
_SMALL_BYTES = 64 * _MIB  # a model of at most this size is used unchanged
_TARGET_BYTES = 256 * _MIB  # maximum size of the small model in the first round of attempts
_MAX_BYTES = 512 * _MIB  # maximum size in the second round

# A class may require a width that the first attempts reduce. So the later ones keep the widths of heads, their numbers,
# and finally both and the residual stream. A shortened vocabulary makes a model smaller if the whole one is too large.
_ATTEMPTS = (
    ShrinkPolicy(),
    ShrinkPolicy(shorten_vocabulary=True),
    ShrinkPolicy(min_head_dim=None),
    ShrinkPolicy(min_head_dim=None, shorten_vocabulary=True),
    ShrinkPolicy(reduce_heads=False, shorten_vocabulary=True),
    ShrinkPolicy(reduce_heads=False, min_head_dim=None, reduce_hidden=False, shorten_vocabulary=True),
)

_BATCH_SIZE, _SEQUENCE_LENGTH = 2, 12
_AUDIO_KEYS = ("num_mel_bins", "max_source_positions")  # height of a spectrogram, and half its length
_FIRST_TEXT_TOKEN = 3  # in most vocabularies the ids before it are padding, begin and end of a sequence
_SEED = 0
_STD = 0.3  # standard deviation of random weights
_WAYS_OUT = "leave out --pp or, in the recipe, shrunk: true"

# The index of an expert in a name: structures are equal even if their numbers of experts differ.
_EXPERT = re.compile(r"(?<=experts)\.(expert_)?\d+(?=\.|$)")


class _Structure(NamedTuple):
    """The structure of a model, independent of its widths.

    Attributes:
        modules: (path, class, first path of the same module) of each module; `*` for the index of an expert.
        tensors: (name, first name of the same tensor) of each parameter and buffer; `*` for the index of an expert.
        nbytes: Size of its parameters in float32.
    """

    modules: frozenset[tuple[str, str, str]]
    tensors: frozenset[tuple[str, str]]
    nbytes: int


def tiny_config(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> PreTrainedConfig:
    """Return a copy of a config with small widths: the same number and types of layers, with the same shared tensors.

    The config of a model with at most 64 MiB of float32 parameters keeps its widths. The copy has `use_cache=False`,
    and the default attention implementation.

    Args:
        config: Config of a model of any size.
        cls: Class of the model.

    Raises:
        UnsupportedError: The model cannot be built. Or it is larger than 64 MiB, and takes neither text nor audio, or
            no attempted config gives one that builds, has the same layers, fits into 512 MiB and runs.
    """
    return _find_config(config, cls)[0]


def tiny_model(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> nn.Module:
    """Return the model of `tiny_config` in float32 on the CPU; equal configs give equal random weights.

    Every floating-point or complex parameter and persistent buffer is random, so that results differ if pipeline stages
    leave out a norm or bias (its initial values may change nothing). Other buffers are computed by the class.

    Args:
        config: Config of a model of any size.
        cls: Class of the model.

    Raises:
        UnsupportedError: See `tiny_config`.
    """
    small_config, model = _find_config(config, cls)
    return _random_model(small_config, cls) if model is None else model


def _find_config(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> tuple[PreTrainedConfig, nn.Module | None]:
    """Return the first attempted config whose model has the same structure and runs, and that model.

    Returns:
        The config, and the model; None for the model if it is at most 64 MiB large, so that the config keeps its widths
        and nothing ran.

    Raises:
        UnsupportedError: See `tiny_config`.
    """
    base_config = _without_cache(config)
    try:
        large = _build_structure(base_config, cls)
    except Exception as error:  # a config or a model class may raise anything
        raise UnsupportedError(f"{cls.__name__}: cannot be built from its config: {_describe(error)}") from error
    if large.nbytes <= _SMALL_BYTES:
        return base_config, None
    _check_input(cls, base_config)
    failures: list[str] = []
    for max_bytes in (_TARGET_BYTES, _MAX_BYTES):
        for policy in _ATTEMPTS:
            try:
                candidate = shrink_config(base_config, policy)
                failure = _find_difference(large, _build_structure(candidate, cls), max_bytes)
                if not failure:
                    return candidate, _run_once(candidate, cls)
            except Exception as error:  # a config or a model class may raise anything
                failure = _describe(error)
            failures.append(f"with {policy}: {failure}")
    raise UnsupportedError(
        f"{cls.__name__}: cannot build a small model with the same layers, which --pp and recipes with shrunk: true "
        f"require; first attempt {failures[0]}; last attempt {failures[-1]}; {_WAYS_OUT}"
    )


def _without_cache(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy that disables the cache and uses the default attention implementation."""
    copied = copy.deepcopy(config)
    for nested_config in iter_configs(copied):
        values = vars(nested_config)
        if "use_cache" in values:
            values["use_cache"] = False
        values["_attn_implementation_internal"] = None
    return copied


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# -------------------------------------------------------------------------------------- comparison with the large model


def _build_structure(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> _Structure:
    """Build a model on the meta device and return its structure."""
    model = build_on_meta(cls, copy.deepcopy(config), torch.float32, "sdpa")
    module_names: dict[int, str] = {}  # first name by id
    tensor_names: dict[int, str] = {}
    modules = frozenset(
        (
            _without_expert_indices(name),
            type(module).__name__,
            _without_expert_indices(module_names.setdefault(id(module), name)),
        )
        for name, module in model.named_modules(remove_duplicate=False)
    )
    tensors = frozenset(
        (_without_expert_indices(name), _without_expert_indices(tensor_names.setdefault(id(tensor), name)))
        for name, tensor in _named_tensors(model)
    )
    return _Structure(modules, tensors, 4 * sum(each.numel() for each in model.parameters()))


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _without_expert_indices(name: str) -> str:
    return _EXPERT.sub(".*", name)


def _find_difference(large: _Structure, small: _Structure, max_bytes: int) -> str:
    """Describe the first structural difference, or the size of a model above `max_bytes`; empty if there is neither."""
    for first, second, verb in ((small, large, "lacks"), (large, small, "has in addition")):
        missing_modules = sorted(second.modules - first.modules)
        if missing_modules:
            path, class_name, first_path = missing_modules[0]
            shared = "" if first_path == path else f", shared with {first_path}"
            return f"it {verb} {path or 'the model'} (class {class_name}{shared})"
        missing_tensors = sorted(second.tensors - first.tensors)
        if missing_tensors:
            name, first_name = missing_tensors[0]
            return f"it {verb} {name} ({'separate' if first_name == name else f'tied to {first_name}'})"
    if small.nbytes > max_bytes:
        return f"it has {small.nbytes // _MIB} MiB of parameters, limit {max_bytes // _MIB} MiB"
    return ""


# ---------------------------------------------------------------------------------------------------- building, running


def _random_model(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> nn.Module:
    """Return the model of a config with random weights, in float32, on the CPU and in evaluation mode."""
    # constructed with storage, a class computes its buffers
    with torch.random.fork_rng(devices=[]), initialization.no_init_weights():
        model: PreTrainedModel = cls._from_config(copy.deepcopy(config), dtype=torch.float32)
    model.tie_weights()  # part of the initialization that was skipped
    _randomize(model)
    return model.eval()


def _randomize(model: nn.Module) -> None:
    """Draw every floating-point or complex parameter and persistent buffer, in place; tied ones stay tied."""
    generator = torch.Generator().manual_seed(_SEED)
    randomized_ids: set[int] = set()
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) in randomized_ids or not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            randomized_ids.add(id(tensor))
            tensor.normal_(0, _STD, generator=generator)
            if name.endswith(("running_var", "input_max", "output_max")):  # a variance, and upper bounds of a clamp
                tensor.abs_().add_(1)
            elif name.endswith(("input_min", "output_min")):
                tensor.abs_().add_(1).neg_()


def _run_once(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> nn.Module:
    """Return the model with random weights after one forward pass on `make_text_batch`."""
    model = _random_model(config, cls)
    with torch.no_grad():
        model(**make_text_batch(model))
    return model


def _check_input(cls: type[PreTrainedModel], config: Any) -> None:
    """Check that an input for the model can be made.

    Raises:
        UnsupportedError: The model is neither a text model nor an encoder-decoder for audio of a length that its
            config gives.
    """
    mel_bins, length = (getattr(config, key, None) for key in _AUDIO_KEYS)
    takes_audio = config.is_encoder_decoder and cls.main_input_name == "input_features" and mel_bins and length
    if not takes_audio and not _takes_input_ids(cls):
        raise UnsupportedError(
            f"{cls.__name__}: its input is {cls.main_input_name}; --pp and recipes with shrunk: true require a text "
            f"model or an audio encoder-decoder; {_WAYS_OUT}"
        )


def _takes_input_ids(cls: type[nn.Module]) -> bool:
    return "input_ids" in inspect.signature(cls.forward).parameters


def make_text_batch(model: Any) -> dict[str, torch.Tensor]:
    """Return the arguments of a model for a batch of 2 sequences of 12 tokens, by name.

    A text model gets `input_ids`, and an encoder-decoder `decoder_input_ids` too. An audio encoder-decoder gets audio
    of the length that its encoder requires in place of `input_ids`. The batch has the device and dtype of the model,
    and is the same for every model with the same config.
    """
    like = next(model.parameters())
    ids = _token_batch(model.config).to(like.device)
    batch = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    if _takes_input_ids(type(model)):
        return {"input_ids": ids, **batch}
    mel_bins, length = (getattr(model.config, key) for key in _AUDIO_KEYS)
    audio = torch.linspace(-1, 1, 2 * length, dtype=like.dtype, device=like.device)
    return {"input_features": audio.expand(_BATCH_SIZE, mel_bins, -1).contiguous(), **batch}


def _token_batch(config: Any) -> torch.Tensor:
    """Return random token ids (2, 12) without special tokens, the same for equal configs."""
    size = int(config.get_text_config(decoder=True).vocab_size)
    special_ids = find_token_ids(config)
    allowed = torch.tensor([each for each in range(min(_FIRST_TEXT_TOKEN, size - 1), size) if each not in special_ids])
    generator = torch.Generator().manual_seed(_SEED)
    return allowed[torch.randint(len(allowed), (_BATCH_SIZE, _SEQUENCE_LENGTH), generator=generator)]
