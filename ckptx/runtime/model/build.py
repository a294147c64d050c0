"""Builds a model of transformers without storage, from the `config.json` of a checkpoint, and then gives it storage.

Parameters come from the checkpoint. Values that the class computes from its config (rotary tables, embedding scales,
masks, position ids) do not, and are computed as in `from_pretrained`: by the class's own `_init_weights`.
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
from transformers import PreTrainedConfig, PreTrainedModel, initialization

from ckptx.architecture.configs import remote_reference
from ckptx.architecture.introspection.meta_model import find_class
from ckptx.architecture.lookup import find_architecture
from ckptx.catalog.object_ids import ObjectIds
from ckptx.errors import CkptxError, InputError, UnsupportedError, missing_package
from ckptx.formats.hf.reader import read_json
from ckptx.mapping.config_edits import dequantization_edits
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.torch_private import apply_to_tensors

_INITIALIZED_MARK = "_is_hf_initialized"  # transformers' mark of a tensor that `_init_weights` must not change
_FILL_BYTE = 0xA5  # new buffers are filled with this byte, to detect those that are never computed

_logger = logging.getLogger(__name__)


def build_model(
    config_dir: Path,
    *,
    dtype: torch.dtype | None = None,
    default_dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str = "sdpa",
    untied: Collection[str] = (),
    dequantize: bool = False,
    edit_config: Callable[[Any], None] | None = None,
) -> nn.Module:
    """Return the model of a `config.json`, on the meta device; names that its config ties are one parameter.

    Args:
        config_dir: Directory of `config.json`, and of the model's custom code, if it has any.
        dtype: Dtype of the parameters; None means that of the config. The class may keep some in float32.
        default_dtype: Dtype if the config has none, as in `from_pretrained` (see `OpenCheckpoint.dtype`); None means
            float32.
        trust_remote_code: Allow Python files in `config_dir` to be executed.
        attn_implementation: "eager" or "sdpa"; a class or tower without sdpa gets eager.
        untied: Names that the config ties but that get parameters of their own, for a checkpoint that stores different
            values for them (see `OpenCheckpoint.find_untied_names`).
        dequantize: Build the model with floating-point weights even if the config declares a quantization.
        edit_config: Changes the config, in place, before the model is built.

    Raises:
        InputError: There is no `config.json`, or it names no class.
        UnsupportedError: The class is unknown, or cannot be built, or the checkpoint is quantized.
        EnvironmentProblem: A package that the class requires is missing.
    """
    name, cls, config = read_config(config_dir, trust_remote_code=trust_remote_code, dequantize=dequantize)
    with translate_build_errors(name, config_dir):
        if edit_config is not None:
            edit_config(config)
        model = build_on_meta(
            cls, config, dtype or _config_dtype(config) or default_dtype or torch.float32, attn_implementation
        )
    model.config.architectures = [name]
    _keep_in_fp32(model)
    _untie(model, untied)
    _logger.info("%s built on meta in %s, attention %s", name, model.dtype, attn_implementation)
    return model


def read_config(
    config_dir: Path, *, trust_remote_code: bool = False, dequantize: bool = False
) -> tuple[str, type[PreTrainedModel], Any]:
    """Return the class name in a `config.json`, the class, and its config object.

    Args:
        config_dir: See `build_model`.
        trust_remote_code: See `build_model`.
        dequantize: See `build_model`.

    Raises:
        InputError, UnsupportedError, EnvironmentProblem: See `build_model`.
    """
    path = config_dir / "config.json"
    values = read_json(path)
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise InputError(f'{path}: "architectures" names no class; add one, e.g. ["LlamaForCausalLM"]')
    is_quantized = bool(dequantization_edits(values))
    if is_quantized and not dequantize:
        raise UnsupportedError(
            f"{path}: declares a quantization, and quantized weights cannot be run; pass --dequantize "
            "(dequantize=True) to decode the weights as they are read, or convert the checkpoint with --dequantize"
        )
    architecture = find_architecture(values)
    if architecture is not None:
        architecture.stacks(values)  # refuses an impossible number of layers before they are built
    with translate_build_errors(names[0], config_dir):
        cls, config = _find_class_and_config(names[0], values, config_dir, trust_remote_code)
    if is_quantized:
        _remove_quantization(config)
    return names[0], cls, config


def _remove_quantization(config: Any) -> None:
    """Remove the quantization from a config object and its sub-configs, in place."""
    for each in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        if hasattr(each, "quantization_config"):
            del each.quantization_config


@contextlib.contextmanager
def translate_build_errors(name: str, config_dir: Path) -> Iterator[None]:
    """Translate every error within the block, which calls transformers.

    Args:
        name: Name of the class.
        config_dir: Directory of its config.json.

    Raises:
        EnvironmentProblem: A package that the class requires is missing.
        UnsupportedError: The block raised any other exception that is not one of ckptx.
    """
    try:
        yield
    except ImportError as error:
        raise missing_package(f"{name}: building it", error) from error
    except CkptxError:
        raise
    except Exception as error:  # a config or a model class may raise anything
        first, *more = str(error).splitlines() or [""]
        reason = f"{first} {more[0].strip()}" if first.endswith(":") and more else first  # the reason follows the colon
        raise UnsupportedError(
            f"{name}: transformers {transformers.__version__} cannot build it from {config_dir / 'config.json'}: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _find_class_and_config(
    name: str, values: dict[str, Any], config_dir: Path, trust_remote_code: bool
) -> tuple[type[PreTrainedModel], Any]:
    """Return the model class of a name, and its config object.

    Args:
        name: Name of the class in `architectures`.
        values: Keys and values of config.json.
        config_dir: See `build_model`.
        trust_remote_code: See `build_model`. If True, the code that `auto_map` names precedes that of transformers.

    Raises:
        UnsupportedError: transformers has no such class.
    """
    reference = remote_reference(values, name)
    if reference is not None and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        cls = get_class_from_dynamic_module(reference, str(config_dir))
        config_reference = remote_reference(values, "AutoConfig")
        config_class = cls.config_class
        if config_reference is not None:
            config_class = get_class_from_dynamic_module(config_reference, str(config_dir))
        return cls, config_class.from_pretrained(str(config_dir))
    cls = find_class(name)
    if cls is None:
        advice = (
            f"pass --trust-remote-code to use its code, {reference} of auto_map"
            if reference
            else ('correct "architectures" in config.json, or install a transformers version that has this class')
        )
        raise UnsupportedError(f"{name}: transformers {transformers.__version__} has no such class; {advice}")
    return cls, cls.config_class.from_pretrained(str(config_dir))


def build_on_meta(
    cls: type[PreTrainedModel], config: Any, dtype: torch.dtype, attn_implementation: str
) -> PreTrainedModel:
    """Return a model without storage, in evaluation mode.

    Args:
        cls: Class of the model.
        config: Config of the model.
        dtype: Dtype of the parameters; `build_model` then converts some of them to float32.
        attn_implementation: See `build_model`.
    """
    # sdpa is the default of transformers. A tower without sdpa falls back to eager only if sdpa is not requested.
    attention = None if attn_implementation == "sdpa" else attn_implementation
    with torch.device("meta"), initialization.meta_device_safe_creation_ops():
        model: PreTrainedModel = cls._from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval()


def _config_dtype(config: Any) -> torch.dtype | None:
    """Return the dtype that a config object declares; None if it declares none."""
    value = getattr(config, "dtype", None)
    dtype: torch.dtype | None = getattr(torch, value) if isinstance(value, str) else value
    return dtype


def _keep_in_fp32(model: PreTrainedModel) -> None:
    """Convert to float32 what `from_pretrained` keeps in float32, as in transformers' `_get_dtype_plan`, in place."""
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
    """Replace tied parameters by parameters of their own, in place."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        shared = getattr(module, leaf)
        setattr(module, leaf, nn.Parameter(torch.empty_like(shared), shared.requires_grad))
        model.all_tied_weights_keys.pop(name, None)


# ----------------------------------------------------------------------------------------- storage


def materialize(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Give storage to everything on the meta device, and compute the buffers that checkpoints do not contain.

    A DTensor gets storage for its local shard only. Tied names stay tied, and FSDP still manages the modules that it
    sharded. Parameters have arbitrary values: `load` fills them, and refuses to leave one out.

    Args:
        model: Model from `build_model`; sharded by TP, wrapped, sharded by FSDP, or none of these.
        device: Device of the storage.

    Raises:
        UnsupportedError: The class does not define how to compute a buffer.
    """
    for buffer in allocate_storage(model, torch.device(device)):
        buffer.untyped_storage().fill_(_FILL_BYTE)
    uncomputed = _compute_buffers(model)
    _logger.info("%s has storage on %s, %d buffers constructed", type(model).__name__, device, len(uncomputed))
    if uncomputed:
        _construct_buffers(model, uncomputed)


def allocate_storage(model: nn.Module, device: torch.device) -> list[Tensor]:
    """Give storage without values, as in `materialize`; return the buffers that had none before."""
    allocated: dict[int, Tensor] = {}
    ids = ObjectIds()

    def allocate(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        key = ids(tensor)
        if key not in allocated:
            allocated[key] = torch.empty_like(tensor, device=device)
        return allocated[key]

    shared = _shared_parameters(model)
    with torch.no_grad():
        apply_to_tensors(model, allocate)  # FSDP overrides this to update its own references
    for first, *others in shared:
        parameter = first[0]._parameters[first[1]]
        for module, leaf in others:
            module._parameters[leaf] = parameter
    fresh = {id(each) for each in allocated.values()}
    return [buffer for buffer in model.buffers() if id(buffer) in fresh]


def _shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return, for each parameter that has several names, (module, attribute) of each name."""
    owners_by_id: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                owners_by_id.setdefault(id(parameter), []).append((module, leaf))
    return [each for each in owners_by_id.values() if len(each) > 1]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _is_uncomputed(buffer: Tensor) -> bool:
    """Return True if a buffer still has the fill value of `materialize`."""
    return bool(buffer.numel()) and bool((_bytes_of(buffer) == _FILL_BYTE).all())


def _compute_buffers(model: nn.Module) -> list[str]:
    """Let each class compute the buffers of its modules.

    Returns:
        Names of the non-persistent buffers that no class computed. Persistent ones are loaded from the checkpoint.
    """
    for parameter in model.parameters():
        setattr(parameter, _INITIALIZED_MARK, True)
    guard = getattr(initialization, "guard_torch_init_functions", contextlib.nullcontext)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), guard():
            for owner, name, module in _modules_with_owners(model):
                if not any(_is_uncomputed(buffer) for buffer in module.buffers(recurse=False)):
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
            delattr(parameter, _INITIALIZED_MARK)
    return [
        f"{name}.{leaf}" if name else leaf
        for name, module in model.named_modules()
        for leaf, buffer in module._buffers.items()
        if buffer is not None and leaf in module._non_persistent_buffers_set and _is_uncomputed(buffer)
    ]


def _modules_with_owners(model: nn.Module) -> Iterator[tuple[PreTrainedModel, str, nn.Module]]:
    """Yield (innermost model around a module, name of the module, module): a tower initializes its own modules.

    Modules outside of all transformers models are left out.
    """
    owners: dict[str, PreTrainedModel] = {}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        owner = module if isinstance(module, PreTrainedModel) else owners.get(parent)
        if owner is not None:
            owners[name] = owner
            yield owner, name, module


def _construct_buffers(model: nn.Module, names: Collection[str]) -> None:
    """Fill buffers from a second instance, whose buffers are real and whose parameters have no storage.

    This is for classes, mostly custom code, whose `_init_weights` leaves buffers out. Only buffers that the second
    instance has in the same shape can be filled.

    Raises:
        UnsupportedError: The second instance lacks a buffer, or has it in another shape or without values.
    """
    root = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    constructed_buffers: dict[str, Tensor] = {}
    if root is not None:
        # FSDP2 derives a class from that of the model, and gives it a name with this prefix.
        cls: Any = next(each for each in type(root).__mro__ if not each.__name__.startswith("FSDP"))
        with _parameters_on_meta(), initialization.no_init_weights():
            instance = cls._from_config(copy.deepcopy(root.config), dtype=_config_dtype(root.config))
        constructed_buffers = dict(instance.named_buffers())
    for name in names:
        module = model.get_submodule(name.rpartition(".")[0])
        buffer = getattr(module, name.rpartition(".")[2])
        value = constructed_buffers.get(canonical_name(name))
        if value is None or value.is_meta or value.shape != buffer.shape:
            raise UnsupportedError(
                f"{type(root).__name__}: neither _init_weights nor the constructor computes its buffer {name}; compute "
                "it in _init_weights of the class"
            )
        buffer.copy_(value)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move every parameter to the meta device when a module registers it; buffers stay on their device."""
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
