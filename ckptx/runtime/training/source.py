"""Prepare the checkpoint that a run starts from, pretrained or random, in a directory that transformers can read."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ckptx.errors import CkptxError, InputError, UsageError
from ckptx.formats.hf.hub import resolve_source
from ckptx.formats.hf.reader import read_json
from ckptx.runtime.model.build import read_config, translate_build_errors
from ckptx.runtime.model.shrink_config import iter_configs
from ckptx.runtime.training.dropout_config import find_dropout_keys, set_dropout
from ckptx.runtime.training.recipe import ModelBlock, Recipe
from ckptx.runtime.training.recipe_schema import unknown_name_error
from ckptx.runtime.training.shrinking import reduce_layers, shrink_widths
from ckptx.runtime.training.source_tokenizer import make_tokenizer

_CONFIG = "config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # endings of files that are linked and not copied
_MAX_SHARD_SIZE = "2GB"
_NOISE_STD = 0.1  # standard deviation of noise on tensors that a class sets to a constant: norms, biases, scales
_FINITE_BOUND = 8.0  # in place of an infinite bound
# Functions of torch.Tensor and torch.nn.init that draw values, and one (erfinv_) that a truncated normal uses.
_RANDOM_FUNCTIONS = ("normal_", "uniform_", "kaiming_uniform_", "kaiming_normal_", "trunc_normal_", "erfinv_")
# Config keys that every class accepts.
_COMMON_KEYS = ("attn_implementation", "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters", "auto_map")

Values = dict[str, Any]  # keys and values of a config.json


def prepare_source(recipe: Recipe, directory: Path) -> Path:
    """Return the directory of the checkpoint that a run starts from, and write it if necessary; only one rank calls it.

    A pretrained checkpoint without changes is used in place. If the recipe changes its config, `directory` gets the new
    config, copies of small files and links to the weights. Random weights depend on the recipe only. To write them, the
    whole model is built in memory, in the dtype of the recipe.

    Args:
        recipe: Recipe that names the model.
        directory: Directory to write to; created if necessary.

    Returns:
        Directory to read the checkpoint from.

    Raises:
        InputError: The checkpoint does not exist, or has no config.
        UsageError: The recipe names no model, or keys that its class does not have, or `directory` is the checkpoint of
            `model.pretrained`.
        UnsupportedError: The class is unknown, cannot be built, or cannot be shrunk.
        EnvironmentProblem: A package that the class or the tokenizer requires is missing.
    """
    model, dropout = recipe.model, recipe.training.dropout
    if model.pretrained is not None and not model.shrunk:
        root = resolve_source(model.pretrained, revision=model.revision)
        if not model.config and dropout is None and model.attn_implementation is None:
            return root
        values = merge_config(read_json(root / _CONFIG), model.config)
        with _name_recipe_in_errors(directory):
            return _link_checkpoint(root, directory, values, recipe)
    values = _read_initial_config(model)
    directory.mkdir(parents=True, exist_ok=True)
    with _name_recipe_in_errors(directory):
        config, cls, name = _make_random_config(values, directory, recipe)
        tokenizer = make_tokenizer(config)
        with translate_build_errors(name, directory):
            random_model = make_random_model(cls, config, getattr(torch, model.dtype), recipe.training.seed)
    random_model.config.architectures = [name]
    with _hide_progress_bar():
        random_model.save_pretrained(directory, max_shard_size=_MAX_SHARD_SIZE)
    tokenizer.save_pretrained(directory)
    _write_config(directory, _add_attn_implementation(read_json(directory / _CONFIG), model))
    return directory


def write_shrunk_config(recipe: Recipe, directory: Path) -> Path:
    """Write the config.json of the small model that a recipe with `shrunk: true` trains, without its weights.

    Args:
        recipe: Recipe with `model.shrunk`.
        directory: Directory to write to; created if necessary.

    Returns:
        The directory.

    Raises:
        CkptxError: See `prepare_source`.
    """
    values = _read_initial_config(recipe.model)
    directory.mkdir(parents=True, exist_ok=True)
    with _name_recipe_in_errors(directory):
        config, _, name = _make_random_config(values, directory, recipe)
        make_tokenizer(config)  # sets ids of special tokens that the config lacks
    config.architectures = [name]
    for each in iter_configs(config):
        each.dtype = recipe.model.dtype
    config.save_pretrained(directory)
    _write_config(directory, _add_attn_implementation(read_json(directory / _CONFIG), recipe.model))
    return directory


@contextlib.contextmanager
def _name_recipe_in_errors(directory: Path) -> Iterator[None]:
    """Let errors about the generated config.json, a temporary file, name `model.config` of the recipe instead."""
    config_path = re.escape(str(directory / _CONFIG))
    try:
        yield
    except CkptxError as error:
        message = re.sub(rf"{config_path}|(?<![\w./-]){re.escape(_CONFIG)}", "model.config of the recipe", str(error))
        if message == str(error):
            raise
        raise type(error)(message) from error


@contextlib.contextmanager
def _hide_progress_bar() -> Iterator[None]:
    """Hide the progress bar of transformers while the generated model is written."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def merge_config(values: Mapping[str, Any], changes: Mapping[str, Any]) -> Values:
    """Return a config with some keys overridden; mappings are merged key by key, other values replaced."""
    result = dict(values)
    for key, change in changes.items():
        nested = result.get(key)
        are_mappings = isinstance(nested, Mapping) and isinstance(change, Mapping)
        result[key] = merge_config(nested, change) if are_mappings else change  # type: ignore[arg-type]  # both are mappings
    return result


# -------------------------------------------------------------------------------------------------------- pretrained


def _link_checkpoint(root: Path, directory: Path, values: Values, recipe: Recipe) -> Path:
    """Create a directory with the config of the recipe, copies of small files and links to the weights in `root`."""
    if directory.resolve() == root.resolve():
        raise UsageError(
            f"{directory}: is the checkpoint of model.pretrained, which must not be changed; choose another --out"
        )
    directory.mkdir(parents=True, exist_ok=True)
    for each in sorted(root.iterdir()):
        target = directory / each.name
        if each.name == _CONFIG or not each.is_file():
            continue
        target.unlink(missing_ok=True)
        if each.name.endswith(_WEIGHTS):
            os.symlink(each.resolve(), target)
        else:
            shutil.copyfile(each, target)
    _write_config(directory, values)
    name, _, config = read_config(directory, trust_remote_code=recipe.model.trust_remote_code)
    _refuse_other_type(recipe.model.config, name, config)
    _refuse_unknown(recipe.model.config, config)
    if recipe.training.dropout is not None:
        for path, key in find_dropout_keys(config):
            nested_values = values
            for nested_key in path:
                nested_values = nested_values.setdefault(nested_key, {})
            nested_values[key] = recipe.training.dropout
    _write_config(directory, _add_attn_implementation(values, recipe.model))
    return directory


def _write_config(directory: Path, values: Values) -> None:
    (directory / _CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _add_attn_implementation(values: Values, model: ModelBlock) -> Values:
    """Add `attn_implementation`, which transformers reads from config.json whenever the model is built."""
    if model.attn_implementation is None:
        return values
    return {**values, "attn_implementation": model.attn_implementation}


# ---------------------------------------------------------------------------------------------------- random weights


def _read_initial_config(model: ModelBlock) -> Values:
    """Return the keys and values of config.json that the recipe gives, before the model is shrunk."""
    if model.shrunk and model.shrunk_from:
        return merge_config(model.shrunk_from, model.config)
    if model.pretrained is not None:
        try:
            root = resolve_source(model.pretrained, revision=model.revision)
        except InputError as error:
            raise InputError(f"{error}; or set model.shrunk_from to keys of a config.json") from error
        return merge_config(read_json(root / _CONFIG), model.config)
    if not model.config:
        raise UsageError(
            "model: has neither pretrained nor config; set model.pretrained to a checkpoint, or model.config to keys "
            "of a config.json with architectures"
        )
    return dict(model.config)


def _make_random_config(values: Values, directory: Path, recipe: Recipe) -> tuple[Any, type[PreTrainedModel], str]:
    """Return the config of a model with random weights, its class, and the name of the class.

    A config.json is written to `directory` on the way, because transformers reads configs and custom code from files.
    """
    trust_remote_code = recipe.model.trust_remote_code
    _write_config(directory, values)
    name, cls, config = read_config(directory, trust_remote_code=trust_remote_code)
    _refuse_other_type(recipe.model.config, name, config)
    _refuse_unknown(recipe.model.config, config)
    if recipe.model.shrunk:
        _write_config(directory, reduce_layers(values, config, recipe.model.config))
        name, cls, config = read_config(directory, trust_remote_code=trust_remote_code)
        config = shrink_widths(config, cls)
    if recipe.training.dropout is not None:
        set_dropout(config, recipe.training.dropout)
    return config, cls, name


def _refuse_other_type(user_keys: Mapping[str, Any], name: str, config: PreTrainedConfig) -> None:
    """Refuse a model type that differs from that of the class.

    Args:
        user_keys: `model.config` of the recipe.
        name: Name of the class.
        config: Config object of the class.

    Raises:
        UsageError: The types differ.
    """
    expected = type(config).model_type
    found = user_keys.get("model_type", expected)
    if found != expected:
        raise UsageError(
            f'model.config.model_type is "{found}", but that of {name} is "{expected}"; leave it out, or name another '
            "class in model.config.architectures"
        )


def _refuse_unknown(user_keys: Mapping[str, Any], config: Any, path: str = "model.config") -> None:
    """Refuse keys that the class does not read, and that transformers would ignore.

    A class may read keys that it does not declare: keys mentioned in its code are accepted, too. If its code is not
    available, every key is accepted.

    Args:
        user_keys: Keys set by the user.
        config: Config object that they belong to.
        path: Path of the keys in the recipe.

    Raises:
        UsageError: A key is unknown.
    """
    config_class = type(config)
    declared = {
        key for each in config_class.__mro__ for key in getattr(each, "__annotations__", {}) if not key.startswith("_")
    }
    known = {*declared, *config_class.attribute_map, *_COMMON_KEYS}
    identifiers = set(
        re.findall(
            r"\w+",
            "".join(map(_read_source_code, (config_class.__module__, _find_modeling_module(config_class.__module__)))),
        )
    )
    for key, value in user_keys.items():
        if identifiers and key not in known and key not in identifiers:
            raise unknown_name_error(
                key, sorted(known), f"{path}.{key}", f"{config_class.__name__} has no such key; leave it out"
            )
        nested_config = vars(config).get(key)
        if isinstance(value, Mapping) and isinstance(nested_config, PreTrainedConfig):
            _refuse_unknown(value, nested_config, f"{path}.{key}")


def _find_modeling_module(module: str) -> str:
    """Return the name of the module with the model classes, given that of the module with the config classes."""
    package, _, name = module.rpartition(".")
    return f"{package}.{name.replace('configuration_', 'modeling_')}"


def _read_source_code(module: str) -> str:
    """Return the source code of a module; empty if it is unavailable."""
    try:
        return inspect.getsource(importlib.import_module(module))
    except (ImportError, OSError, TypeError):
        return ""


def make_random_model(cls: type[PreTrainedModel], config: Any, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Return a model with random weights, none of which is all zeros, all ones or infinite; tied names stay tied.

    Parameters with two or more dims (linear layers, convolutions, embeddings) are drawn with a standard deviation of
    1/sqrt(n), where n is the size of the last dim, or with 4 dims or more the number of elements per index of the first
    dim. Other parameters, such as norms and biases, and persistent buffers keep the values that the class sets, with
    some noise added, so that a test notices if one is not saved.

    Args:
        cls: Class of the model.
        config: Config of the model.
        dtype: Dtype of the parameters.
        seed: Seed of the weights.
    """
    with torch.random.fork_rng(devices=[]), _SkipWeightInit():
        torch.manual_seed(seed)
        model: PreTrainedModel = cls._from_config(copy.deepcopy(config), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    drawn_ids: set[int] = set()
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in drawn_ids and tensor.is_floating_point():
                drawn_ids.add(id(tensor))
                _draw_values(name, tensor, generator)
    return model.eval()


class _SkipWeightInit(TorchFunctionMode):  # type: ignore[misc]  # torch types it as Any
    """Sets parameters to zero in place of initializing them, if `_draw_values` overwrites them anyway."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in _RANDOM_FUNCTIONS:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Parameter) and _is_drawn_in_full(tensor):
                with torch.no_grad():
                    return tensor.zero_()
        return function(*args, **kwargs)


def _is_drawn_in_full(tensor: Tensor) -> bool:
    """Return True if `_draw_values` replaces the whole tensor, so that earlier values do not matter."""
    return isinstance(tensor, Parameter) and tensor.dim() >= 2 and tensor.is_floating_point()


def _draw_values(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Draw random values, in place; see `make_random_model`."""
    if _is_drawn_in_full(tensor):
        fan_in = tensor.shape[-1] if tensor.dim() < 4 else tensor[0].numel()
        tensor.normal_(0, fan_in**-0.5, generator=generator)
        return
    noise = torch.empty_like(tensor).normal_(0, _NOISE_STD, generator=generator)
    tensor.nan_to_num_(0.0, _FINITE_BOUND, -_FINITE_BOUND)
    tensor.add_(noise.abs() if name.endswith("running_var") else noise)
