"""A model of transformers without storage, from the `config.json` of a checkpoint, and then with storage.

Parameters come from the checkpoint; what the class computes from its config (rotary tables, embedding scales, masks,
position ids) does not, and is computed as `from_pretrained` does it: by the class's own `_init_weights`.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization

from ckptx.architecture.configs import remote_reference
from ckptx.architecture.find import find_architecture
from ckptx.architecture.introspection.meta_model import known_class
from ckptx.catalog.object_ids import ObjectIds
from ckptx.errors import InputError, UnsupportedError, missing_package
from ckptx.formats.hf.reader import read_json
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.torch_private import apply_to_tensors

_DONE = "_is_hf_initialized"  # transformers' mark of a tensor that `_init_weights` must leave alone
_UNTOUCHED = 0xA5  # what fresh buffers are filled with, to see which of them nobody computes

_logger = logging.getLogger(__name__)


def build_model(
    config_dir: Path,
    *,
    dtype: torch.dtype | None = None,
    stored: torch.dtype | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str = "sdpa",
    untied: Collection[str] = (),
    edit: Callable[[Any], None] | None = None,
) -> nn.Module:
    """The model that a `config.json` describes, on the meta device; names that its config ties are one parameter.

    Args:
        config_dir: Directory of `config.json`, and of the code of a model that brings its own.
        dtype: Of the parameters; None takes the one in the config. The class may keep some in float32.
        stored: Taken where the config names no dtype, as `from_pretrained` does (`OpenCheckpoint.dtype` says
            which); float32 when left out.
        trust_remote_code: Whether Python files in `config_dir` may be executed.
        attn_implementation: "eager" or "sdpa"; a class or tower without sdpa gets eager.
        untied: Names tied by the config that get parameters of their own all the same, as a checkpoint that stores
            both with different values needs it (`OpenCheckpoint.untied` says which).
        edit: Changes the config, in place, before the model is built.

    Raises:
        InputError: There is no `config.json`, or it names no class.
        UnsupportedError: The class is unknown, or cannot be built, or the checkpoint is quantized.
        EnvironmentProblem: A package that the class needs is missing.
    """
    name, cls, config = read_config(config_dir, trust_remote_code=trust_remote_code)
    with building(name, config_dir):
        if edit is not None:
            edit(config)
        model = on_meta(cls, config, dtype or _dtype_of(config) or stored or torch.float32, attn_implementation)
    model.config.architectures = [name]
    _keep_in_fp32(model)
    _untie(model, untied)
    _logger.info("%s built on meta in %s, attention %s", name, model.dtype, attn_implementation)
    return model


def read_config(config_dir: Path, *, trust_remote_code: bool = False) -> tuple[str, type[PreTrainedModel], Any]:
    """The name of the class that a `config.json` describes, the class, and what its config class makes of the file.

    Args:
        config_dir: As in `build_model`.
        trust_remote_code: As in `build_model`.

    Raises:
        InputError, UnsupportedError, EnvironmentProblem: As `build_model`.
    """
    path = config_dir / "config.json"
    values = read_json(path)
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise InputError(f'{path}: "architectures" names no class, needed one; add it, as ["LlamaForCausalLM"]')
    if values.get("quantization_config"):
        raise UnsupportedError(f"{path}: the checkpoint is quantized, needed plain weights; dequantize it first")
    architecture = find_architecture(values)
    if architecture is not None:
        architecture.stacks(values)  # a number of layers that cannot be would be found out by building them
    with building(names[0], config_dir):
        return names[0], *_class_and_config(names[0], values, config_dir, trust_remote_code)


@contextlib.contextmanager
def building(name: str, config_dir: Path) -> Iterator[None]:
    """Around what transformers builds: what goes wrong there, in our words.

    Args:
        name: Of the class.
        config_dir: Where its config.json is.

    Raises:
        UnsupportedError: It raised anything.
        EnvironmentProblem: It needs a package that is not there.
    """
    try:
        yield
    except ImportError as error:
        raise missing_package(f"{name}: building it", error) from error
    except UnsupportedError:
        raise
    except Exception as error:  # a config or a model class may raise anything
        first, *more = str(error).splitlines() or [""]
        said = f"{first} {more[0].strip()}" if first.endswith(":") and more else first  # what comes after is the reason
        raise UnsupportedError(
            f"{name}: transformers {transformers.__version__} cannot build it from {config_dir / 'config.json'}: "
            f"{type(error).__name__}: {said}"
        ) from error


def _class_and_config(
    name: str, values: dict[str, Any], config_dir: Path, trust_remote_code: bool
) -> tuple[type[PreTrainedModel], Any]:
    reference = remote_reference(values, name)
    if reference is not None and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        cls = get_class_from_dynamic_module(reference, str(config_dir))
        config_reference = remote_reference(values, "AutoConfig")
        config_class = cls.config_class
        if config_reference is not None:
            config_class = get_class_from_dynamic_module(config_reference, str(config_dir))
        return cls, config_class.from_pretrained(str(config_dir))
    known = known_class(name)
    if known is None:
        code = (
            f"its code is {reference} of auto_map, pass --trust-remote-code"
            if reference
            else ("correct architectures in config.json, or install a transformers that has it")
        )
        raise UnsupportedError(f"{name}: transformers {transformers.__version__} has no such class; {code}")
    return known, known.config_class.from_pretrained(str(config_dir))


def on_meta(cls: type[PreTrainedModel], config: Any, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    """A model of a class without storage, with the attention that `build_model` describes, in evaluation mode."""
    # sdpa is what transformers takes by itself, and only so it takes eager for a tower without it
    attention = None if attn_implementation == "sdpa" else attn_implementation
    with torch.device("meta"), initialization.meta_device_safe_creation_ops():
        model: PreTrainedModel = cls._from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval()


def _dtype_of(config: Any) -> torch.dtype | None:
    found = getattr(config, "dtype", None)
    dtype: torch.dtype | None = getattr(torch, found) if isinstance(found, str) else found
    return dtype


def _keep_in_fp32(model: PreTrainedModel) -> None:
    """Makes float32 what `from_pretrained` keeps in it; the rule is that of transformers' `_get_dtype_plan`."""
    patterns = (
        set(model._keep_in_fp32_modules_strict or ()) if model.dtype in (torch.float16, torch.bfloat16) else set()
    )
    if model.dtype is torch.float16:
        patterns |= set(model._keep_in_fp32_modules or ())
    if not patterns:
        return
    regex = re.compile("|".join(f"(?:{pattern.replace('*', '.*')})" for pattern in patterns))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and regex.search(name):
            tensor.data = tensor.data.to(torch.float32)


def _untie(model: PreTrainedModel, names: Collection[str]) -> None:
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        tied = getattr(module, leaf)
        setattr(module, leaf, nn.Parameter(torch.empty_like(tied), tied.requires_grad))
        model.all_tied_weights_keys.pop(name, None)


# ----------------------------------------------------------------------------------------- storage


def materialize(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Gives storage to everything on the meta device, and computes the buffers that no checkpoint holds.

    A DTensor gets that of its local shard alone. Names that share a parameter share it afterwards; so do modules that
    FSDP manages. The values of parameters are whatever was in memory: `load` fills them, and refuses to leave one.

    Args:
        model: Built by `build_model`; cut by TP, wrapped, sharded by FSDP, or none of it.
        device: Where to.

    Raises:
        UnsupportedError: The class does not say how to compute a buffer.
    """
    for buffer in give_storage(model, torch.device(device)):
        buffer.untyped_storage().fill_(_UNTOUCHED)
    left = _compute_buffers(model)
    _logger.info("%s has storage on %s, %d buffers constructed", type(model).__name__, device, len(left))
    if left:
        _construct_buffers(model, left)


def give_storage(model: nn.Module, device: torch.device) -> list[Tensor]:
    """`materialize` without values; gives the buffers that have storage now and had none."""
    made: dict[int, Tensor] = {}
    ids = ObjectIds()

    def with_storage(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        key = ids(tensor)
        if key not in made:
            made[key] = torch.empty_like(tensor, device=device)
        return made[key]

    shared = _shared_parameters(model)
    with torch.no_grad():
        apply_to_tensors(model, with_storage)  # FSDP listens here: it keeps references of its own
    for first, *others in shared:
        parameter = first[0]._parameters[first[1]]
        for module, leaf in others:
            module._parameters[leaf] = parameter
    fresh = {id(each) for each in made.values()}
    return [buffer for buffer in model.buffers() if id(buffer) in fresh]


def _shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each parameter that has several."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, leaf))
    return [each for each in places.values() if len(each) > 1]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _is_untouched(buffer: Tensor) -> bool:
    """True for a buffer that still holds what `materialize` put there."""
    return bool(buffer.numel()) and bool((_bytes_of(buffer) == _UNTOUCHED).all())


def _compute_buffers(model: nn.Module) -> list[str]:
    """Lets each class compute the buffers of its modules; returns the non-persistent ones that none of them did."""
    for parameter in model.parameters():
        setattr(parameter, _DONE, True)
    guard = getattr(initialization, "guard_torch_init_functions", contextlib.nullcontext)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), guard():
            for owner, name, module in _with_owners(model):
                if not any(_is_untouched(buffer) for buffer in module.buffers(recurse=False)):
                    continue
                try:
                    owner._init_weights(module)
                except Exception as error:  # a model class may raise anything
                    raise UnsupportedError(
                        f"{type(owner).__name__}: its buffers at {name or 'the root'} cannot be computed: "
                        f"{type(error).__name__}: {error}"
                    ) from error
    finally:
        for parameter in model.parameters():
            delattr(parameter, _DONE)
    return [
        f"{name}.{leaf}" if name else leaf
        for name, module in model.named_modules()
        for leaf, buffer in module._buffers.items()
        if buffer is not None and leaf in module._non_persistent_buffers_set and _is_untouched(buffer)
    ]


def _with_owners(model: nn.Module) -> Iterator[tuple[PreTrainedModel, str, nn.Module]]:
    """Every module with the innermost model around it: a tower initialises its own modules."""
    owners: dict[str, PreTrainedModel] = {}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        owner = module if isinstance(module, PreTrainedModel) else owners.get(parent)
        if owner is not None:
            owners[name] = owner
            yield owner, name, module


def _construct_buffers(model: nn.Module, names: Collection[str]) -> None:
    """Fills buffers from a second instance, whose buffers are real and whose parameters have no storage.

    For classes, mostly remote code, whose `_init_weights` leaves buffers out. Only names that the second instance has
    in the same shape can be filled.

    Raises:
        UnsupportedError: One is not there, or is not computed by the constructor either.
    """
    root = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    twin: dict[str, Tensor] = {}
    if root is not None:
        cls: Any = next(each for each in type(root).__mro__ if not each.__name__.startswith("FSDP"))
        with _parameters_on_meta(), initialization.no_init_weights():
            built = cls._from_config(copy.deepcopy(root.config), dtype=_dtype_of(root.config))
        twin = dict(built.named_buffers())
    for name in names:
        module = model.get_submodule(name.rpartition(".")[0])
        buffer = getattr(module, name.rpartition(".")[2])
        value = twin.get(canonical_name(name))
        if value is None or value.is_meta or value.shape != buffer.shape:
            raise UnsupportedError(f"{type(root).__name__}: nothing says how to compute its buffer {name}")
        buffer.copy_(value)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter goes to the meta device when a module registers it; buffers stay where they are made."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
