"""A small model with the layers of a large one, to run in place of it.

Which values layers hand on is decided by the code of a class and by its config: by types of layers, by what layers
share, by windows and positions. None of it depends on how wide a layer is. So the small model has every layer of the
large one and a few numbers in each, and is compared with it before it is taken.
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
from ckptx.runtime.model.build import on_meta
from ckptx.runtime.model.shrink_config import ShrinkPolicy, parts, shrink_config, token_ids

_MIB = 2**20
_SMALL = 64 * _MIB  # a model of no more is taken as it is
_AIM = 256 * _MIB
_MOST = 512 * _MIB

# From narrow to less narrow: a class may want what the first of them takes from it.
_ATTEMPTS = (
    ShrinkPolicy(),
    ShrinkPolicy(cut_vocabulary=True),
    ShrinkPolicy(head_dim=None),
    ShrinkPolicy(head_dim=None, cut_vocabulary=True),
    ShrinkPolicy(few_heads=False, cut_vocabulary=True),
    ShrinkPolicy(few_heads=False, head_dim=None, narrow_hidden=False, cut_vocabulary=True),
)

_ROWS, _LENGTH = 2, 12
_SOUND = ("num_mel_bins", "max_source_positions")  # keys of how high a sound is, and of half its length
_FIRST_WORD = 3  # the ids before are those of padding, begin and end in most vocabularies
_SEED = 0
_SPREAD = 0.3

# One of several experts; how many there are is no matter.
_EXPERT = re.compile(r"(?<=experts)\.(expert_)?\d+(?=\.|$)")


class _Shape(NamedTuple):
    """What a model has whatever its widths are.

    Attributes:
        modules: Path -> class, and the path under which the same module came first; experts without their number.
        tensors: The names of parameters and buffers, and the name under which the same tensor came first.
        nbytes: Of its parameters in float32.
    """

    modules: frozenset[tuple[str, str, str]]
    tensors: frozenset[tuple[str, str]]
    nbytes: int


def tiny_config(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> PreTrainedConfig:
    """A copy of a config with narrow layers: as many as before, of the same types, that share the same things.

    A config of at most 64 MiB of float32 parameters comes back as it is. The copy uses no cache.

    Args:
        config: Of a model of any size.
        cls: The class of the model.

    Raises:
        UnsupportedError: No such config can be built, has the same layers, fits into 512 MiB and runs.
    """
    return _found(config, cls)[0]


def tiny_model(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> nn.Module:
    """The model of `tiny_config` in float32 on the CPU, with random weights: the same ones for the same config.

    Every parameter and persistent buffer of floating point is random, so that a norm or a bias left out is seen. Other
    buffers are what the class computes.

    Args:
        config: Of a model of any size.
        cls: The class of the model.

    Raises:
        UnsupportedError: As `tiny_config`.
    """
    found, model = _found(config, cls)
    return _filled(found, cls) if model is None else model


def _found(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> tuple[PreTrainedConfig, nn.Module | None]:
    """The first config that passes, with the model that it was tried with."""
    plain = _plain(config)
    try:
        large = _shape_of(plain, cls)
    except Exception as error:  # a config or a model class may raise anything
        raise UnsupportedError(f"{cls.__name__}: it cannot be built from its config: {_said(error)}") from error
    if large.nbytes <= _SMALL:
        return plain, None
    _check_input(cls, plain)
    faults: list[str] = []
    for most in (_AIM, _MOST):
        for how in _ATTEMPTS:
            try:
                tried = shrink_config(plain, how)
                fault = _difference(large, _shape_of(tried, cls), most)
                if not fault:
                    return tried, _run(tried, cls)
            except Exception as error:  # a config or a model class may raise anything
                fault = _said(error)
            faults.append(f"with {how}: {fault}")
    raise UnsupportedError(
        f"{cls.__name__}: no small model with its layers can be made, by which is found what stages hand on; "
        f"first tried {faults[0]}; last tried {faults[-1]}"
    )


def _plain(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy without a cache, and without a choice of attention."""
    copied = copy.deepcopy(config)
    for part in parts(copied):
        values = vars(part)
        if "use_cache" in values:
            values["use_cache"] = False
        values["_attn_implementation_internal"] = None
    return copied


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# -------------------------------------------------------------------------------------------- comparison with the large


def _shape_of(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> _Shape:
    model = on_meta(cls, copy.deepcopy(config), torch.float32, "sdpa")
    modules: dict[int, str] = {}
    tensors: dict[int, str] = {}
    module_rows = frozenset(
        (_without_experts(name), type(module).__name__, _without_experts(modules.setdefault(id(module), name)))
        for name, module in model.named_modules(remove_duplicate=False)
    )
    tensor_rows = frozenset(
        (_without_experts(name), _without_experts(tensors.setdefault(id(tensor), name)))
        for name, tensor in _named_tensors(model)
    )
    return _Shape(module_rows, tensor_rows, 4 * sum(each.numel() for each in model.parameters()))


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _without_experts(name: str) -> str:
    return _EXPERT.sub(".*", name)


def _difference(large: _Shape, small: _Shape, most: int) -> str:
    """What the small model has and the large one has not, or lacks, or that it is not small; empty when it is right."""
    for lacks, has, which in ((small, large, "lacks"), (large, small, "has in addition")):
        for those, these in ((lacks.modules, has.modules), (lacks.tensors, has.tensors)):
            missing = sorted(these - those)
            if missing:
                return f"it {which} {missing[0][0]}, {missing[0][1]}"
    if small.nbytes > most:
        return f"it has {small.nbytes // _MIB} MiB of parameters, needed at most {most // _MIB} MiB"
    return ""


# ---------------------------------------------------------------------------------------------------- building, running


def _filled(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> nn.Module:
    """The model with random weights."""
    # constructed with storage, a class computes its buffers by itself
    with torch.random.fork_rng(devices=[]), initialization.no_init_weights():
        model: PreTrainedModel = cls._from_config(copy.deepcopy(config), dtype=torch.float32)
    model.tie_weights()  # which goes with the initialization that was left out
    _randomise(model)
    return model.eval()


def _randomise(model: nn.Module) -> None:
    """Gives every parameter and persistent buffer of floating point random values, in place; tied ones stay tied."""
    generator = torch.Generator().manual_seed(_SEED)
    done: set[int] = set()
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) in done or not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            done.add(id(tensor))
            tensor.normal_(0, _SPREAD, generator=generator)
            if name.endswith(("running_var", "input_max", "output_max")):  # a variance, and bounds of a clamp
                tensor.abs_().add_(1)
            elif name.endswith(("input_min", "output_min")):
                tensor.abs_().add_(1).neg_()


def _run(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> nn.Module:
    """The model with random weights, after it has read a text."""
    model = _filled(config, cls)
    with torch.no_grad():
        model(**text_for(model))
    return model


def _check_input(cls: type[PreTrainedModel], config: Any) -> None:
    """Whether there is something to run a model on.

    Raises:
        UnsupportedError: It neither reads text nor listens to sounds of a length that its config says.
    """
    bands, length = (getattr(config, key, None) for key in _SOUND)
    listens = config.is_encoder_decoder and cls.main_input_name == "input_features" and bands and length
    if not listens and not _reads(cls):
        raise UnsupportedError(
            f"{cls.__name__}: its input is {cls.main_input_name}, needed a model that reads text, or an "
            "encoder-decoder that listens; a small model of it cannot be tried, use it without pipeline stages"
        )


def _reads(cls: type[nn.Module]) -> bool:
    return "input_ids" in inspect.signature(cls.forward).parameters


def text_for(model: Any) -> dict[str, torch.Tensor]:
    """A text of 2 rows of 12 tokens; for an encoder that listens, a sound as long as it takes them for each.

    On the device of the model, which has a config, and in its dtype; the same for every model of that config.
    """
    like = next(model.parameters())
    ids = _words(model.config).to(like.device)
    batch = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    if _reads(type(model)):
        return {"input_ids": ids, **batch}
    bands, length = (getattr(model.config, key) for key in _SOUND)
    sound = torch.linspace(-1, 1, 2 * length, dtype=like.dtype, device=like.device)
    return {"input_features": sound.expand(_ROWS, bands, -1).contiguous(), **batch}


def _words(config: Any) -> torch.Tensor:
    """Tokens that stand for nothing but themselves, (rows, length)."""
    size = int(config.get_text_config(decoder=True).vocab_size)
    named = token_ids(config)
    allowed = torch.tensor([each for each in range(min(_FIRST_WORD, size - 1), size) if each not in named])
    generator = torch.Generator().manual_seed(_SEED)
    return allowed[torch.randint(len(allowed), (_ROWS, _LENGTH), generator=generator)]
