"""Build any model class on the meta device from its config (a meta model), and read its architecture.

Building needs no weights and no network. This module imports torch and transformers, which takes about two seconds, so
it is imported only where it is used. ``tools/build_tables.py`` uses it on every class of transformers to write the
table of classes that ckptx ships.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, initialization

from ckptx.architecture.architecture import NEVER_TIED, Architecture, TieFlag, TiePair
from ckptx.architecture.configs import TIE_FLAG, remote_reference, structural_config, without_tie_flag
from ckptx.architecture.introspection.meta_model_names import (
    disk_names_by_scheme,
    function_to_model_name,
    functions_to_disk_names,
    load_conversions,
    name_patterns,
)
from ckptx.architecture.introspection.meta_model_structure import read_structure
from ckptx.architecture.namings import loadable_name_pairs
from ckptx.architecture.patterns import patterns_of, regex_for_patterns
from ckptx.architecture.structure import Structure
from ckptx.architecture.tie_declarations import existing_pairs, flatten_chains, ties_from_list
from ckptx.architecture.tie_flags import (
    UnmeasurableFlagError,
    config_tree,
    find_config_path,
    flag_config_paths,
    measure_flag,
)
from ckptx.errors import UnsupportedError, missing_package

VERSION: str = transformers.__version__

ConfigBuilder = Callable[[dict[str, Any]], Any]


class MetaModelNames(NamedTuple):
    """Tensor names and structure of a class built on the meta device, for one config or for several.

    Attributes:
        patterns: Patterns of all persistent tensors, see `Architecture.name_patterns`.
        ignored: Regular expressions of names that the class does not load, see `Architecture.ignored`.
        structure: TP plan, lists of layers, heads and conversions, see `Architecture.structure`.
    """

    patterns: frozenset[str]
    ignored: frozenset[str]
    structure: Structure

    @classmethod
    def from_architecture(cls, architecture: Architecture) -> MetaModelNames:
        """Return the names and structure of one architecture."""
        return cls(architecture.name_patterns, frozenset(architecture.ignored), architecture.structure)

    def applied_to(self, architecture: Architecture) -> Architecture:
        """Return the architecture with these names and this structure in place of its own."""
        return dataclasses.replace(
            architecture, name_patterns=self.patterns, ignored=tuple(sorted(self.ignored)), structure=self.structure
        )


def find_class(class_name: str) -> type[PreTrainedModel] | None:
    """Return the class of this name in the installed transformers, or None."""
    found = getattr(transformers, class_name, None)
    return found if inspect.isclass(found) and issubclass(found, PreTrainedModel) else None


def introspect(
    config: Mapping[str, Any],
    *,
    config_dir: Path | None = None,
    trust_remote_code: bool = False,
) -> Architecture | None:
    """Build the class that ``config["architectures"]`` names and derive its architecture.

    Args:
        config: The contents of ``config.json``; ``architectures`` names at least one class, and the first is used.
        config_dir: Directory of the config, from which remote code is loaded; None to run none.
        trust_remote_code: Allow Python files next to the config to be executed.

    Returns:
        The architecture, or None if neither transformers nor trusted remote code has the class.

    Raises:
        EnvironmentProblem: The class needs a package that is not installed.
        UnsupportedError: The class exists but cannot be built from this config.
    """
    class_name = config["architectures"][0]
    cls = find_class(class_name)
    if trust_remote_code and config_dir is not None and remote_reference(config, class_name):
        cls = _remote_class(config, class_name, config_dir)
    if cls is None:
        return None
    base_config = structural_config(config)
    nested = base_config.get("text_config")
    if isinstance(nested, dict) and getattr(cls.config_class, "model_type", None) == nested.get("model_type"):
        base_config = nested  # a text-only class over the config of its composite
    try:
        return derive_architecture(cls, _config_builder(cls, config, config_dir, trust_remote_code), base_config)
    except ImportError as error:
        raise missing_package(f"{class_name}: building it", error) from error
    except UnmeasurableFlagError as error:
        raise UnsupportedError(f"{class_name}: {error}") from error
    except Exception as error:  # a config or model class may raise anything
        raise UnsupportedError(
            f"{class_name}: transformers {VERSION} cannot build it from this config.json: "
            f"{type(error).__name__}: {_first_line(error)}"
        ) from error


def derive_architecture(
    cls: type[PreTrainedModel],
    build_config: ConfigBuilder,
    base_config: Mapping[str, Any],
    known_from: str = "meta model",
) -> Architecture:
    """Return the architecture of a class under a config.

    Args:
        cls: Model class.
        build_config: Function that builds a config of the class from a dict.
        base_config: The config as a dict; empty for the defaults of the class.
        known_from: Value for `Architecture.known_from` of the result.

    Raises:
        UnmeasurableFlagError: See `measure_flag`.
        Exception: Whatever the class raises if it cannot be built.
    """
    config = build_config(copy.deepcopy(dict(base_config)))
    model = build_with_tie_flags_set(cls, config)
    shapes = {name: value.shape for name, value in model.state_dict(keep_vars=True).items()}
    ties = _find_ties(model, shapes, build_config, base_config)
    disk_names = disk_names_by_scheme(model)
    return Architecture(
        class_name=cls.__name__,
        model_type=str(config.model_type),
        ties=ties,
        name_patterns=name_patterns(model, disk_names) | _opaque_patterns(model),
        base_prefix=str(model.base_model_prefix),
        keep_in_fp32=tuple(sorted(model._keep_in_fp32_modules or ())),
        keep_in_fp32_strict=tuple(sorted(model._keep_in_fp32_modules_strict or ())),
        ties_flag_editable=_is_flag_editable(model, ties, build_config, base_config),
        has_output_embeddings=_output_embeddings(model) is not None,
        known_from=known_from,
        transformers_version=VERSION,
        ignored=tuple(sorted(_ignored_patterns(model))),
        structure=read_structure(model, load_conversions(model, disk_names)),
    )


def merge_names(names: MetaModelNames, model: PreTrainedModel) -> MetaModelNames:
    """Return `names` merged with those of `model`, which has another config; cheap if the model has no new names."""
    patterns, ignored, structure = names.patterns, names.ignored | _ignored_patterns(model), names.structure
    if not patterns_of(model.state_dict(keep_vars=True)) <= patterns:
        disk_names = disk_names_by_scheme(model)
        patterns |= name_patterns(model, disk_names) | _opaque_patterns(model)
        structure = structure.merged_with(read_structure(model, load_conversions(model, disk_names)))
    return MetaModelNames(patterns, ignored, structure)


def build_with_tie_flags_set(cls: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """Return an instance on the meta device that declares all ties; its parameters themselves are not tied.

    This modifies `config`: its tie flag and those of its sub-configs become true.
    """
    _enable_all_ties(config)
    return build_on_meta(cls, config)


def build_on_meta(cls: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """Return an instance on the meta device, with names and shapes; nothing is tied or initialized."""
    with (
        torch.device("meta"),
        initialization.meta_device_safe_creation_ops(),
        initialization.no_tie_weights(),
        _support_list_ties(),
        _allow_missing_towers(),
    ):
        return cls(config)


class OpaqueTower(nn.Module):  # type: ignore[misc]  # torch types it as Any
    """Placeholder of a sub-model whose package is not installed, so that its names are unknown."""


@contextlib.contextmanager
def _allow_missing_towers() -> Iterator[None]:
    """Allow building a composite while the package of one tower (timm, Pillow) is missing.

    An `OpaqueTower` replaces the tower, which has no tied weights.
    """
    auto_model: Any = transformers.AutoModel
    original = auto_model.from_config

    def from_config(_: Any, /, config: Any, **kwargs: Any) -> Any:
        try:
            return original(config, **kwargs)
        except ImportError:
            return OpaqueTower()

    auto_model.from_config = classmethod(from_config)
    try:
        yield
    finally:
        del auto_model.from_config  # uncovers the inherited method


# ------------------------------------------------------------------------------------------- ties


def _find_ties(
    model: PreTrainedModel, shapes: Mapping[str, Any], build_config: ConfigBuilder, base_config: Mapping[str, Any]
) -> tuple[TiePair, ...]:
    """Return all pairs that the class can tie, in every naming, each with the rule for when it does.

    Args:
        model: Result of `build_with_tie_flags_set`.
        shapes: Shape of each persistent tensor of the model, by model name.
        build_config: See `derive_architecture`.
        base_config: See `derive_architecture`.
    """
    declared = {
        target: source
        for target, source in existing_pairs(model.all_tied_weights_keys, shapes).items()
        if shapes[target] == shapes[source]
    }
    pairs = flatten_chains(declared)
    config_paths = _flag_config_paths(model, shapes)
    prefix = str(model.base_model_prefix)
    name_pair = functools.partial(
        loadable_name_pairs,
        to_disk_names=functions_to_disk_names(model),
        to_model_name=function_to_model_name(model),
        prefix=prefix,
    )
    flags: dict[tuple[str, ...], TieFlag] = {}
    unforced_config = build_config(copy.deepcopy(dict(base_config)))  # the model's own config has its flags forced
    embedding_names = {_weight_name(model, _output_embeddings(model)), _weight_name(model, _input_embeddings(model))}
    result = []
    for target, source in pairs.items():
        config_path = config_paths.get(target, ())
        if config_path not in flags:
            nested_paths = flag_config_paths(unforced_config, config_path)
            flags[config_path] = measure_flag(build_config, base_config, config_path, nested_paths)
        is_primary = (
            bool({target, source} & embedding_names) or _is_embedding(model, source) or _is_embedding(model, target)
        )
        result.append(TiePair(name_pair(target, source), flags[config_path], is_primary))
    result += _undeclared_pairs(model, shapes, pairs, name_pair)
    return tuple(result)


def _undeclared_pairs(
    model: PreTrainedModel, shapes: Mapping[str, Any], pairs: Mapping[str, str], name_pair: Callable[..., Any]
) -> list[TiePair]:
    """Return the pair of output and input embedding if they have equal shapes and the class never ties them.

    Args:
        model: Model on the meta device.
        shapes: Shape of each persistent tensor, by model name.
        pairs: Target -> source of the pairs that the class declares.
        name_pair: Function that returns the names of a pair in every naming.

    Returns:
        The pair, or an empty list.
    """
    target = _weight_name(model, _output_embeddings(model))
    source = _weight_name(model, _input_embeddings(model))
    if target is None or source is None or target == source or shapes.get(target) != shapes.get(source):
        return []
    if target in pairs or source in pairs:
        return []
    return [TiePair(name_pair(target, source), NEVER_TIED, True)]


def _flag_config_paths(model: PreTrainedModel, names: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return, for each target of a declared pair, the attribute path of the config from which its tie flag is read."""
    tree = list(config_tree(model.config))
    config_paths: dict[str, tuple[str, ...]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, PreTrainedModel):
            continue
        dotted_prefix = f"{prefix}." if prefix else ""
        expanded = module.get_expanded_tied_weights_keys()
        targets = existing_pairs(
            {dotted_prefix + target: dotted_prefix + source for target, source in expanded.items()}, names
        )
        for target in targets:
            # parents come first: the outermost sub-model that declares the pair determines its flag
            config_paths.setdefault(target, find_config_path(module.config, tree))
    return config_paths


@contextlib.contextmanager
def _support_list_ties() -> Iterator[None]:
    """Allow building classes written for transformers 4 (``_tied_weights_keys = ["lm_head.weight"]``).

    In transformers 4, every listed name is a target, and its source is the input embedding. transformers 5 requires a
    dict, and fails in ``__init__`` of a tied model otherwise.
    """
    base: Any = PreTrainedModel
    original = base.get_expanded_tied_weights_keys

    def expand(self: Any, all_submodels: bool = False) -> Any:
        if isinstance(self._tied_weights_keys, (list, tuple, set, frozenset)):
            shapes = {name: value.shape for name, value in self.named_parameters(remove_duplicate=False)}
            source = _weight_name(self, _input_embeddings(self))
            self._tied_weights_keys = ties_from_list(self._tied_weights_keys, source, shapes)
        return original(self, all_submodels=all_submodels)

    base.get_expanded_tied_weights_keys = expand
    try:
        yield
    finally:
        base.get_expanded_tied_weights_keys = original


# ------------------------------------------------------------------------------------------ names


def _opaque_patterns(model: PreTrainedModel) -> frozenset[str]:
    return frozenset(f"{name}.**" for name, module in model.named_modules() if isinstance(module, OpaqueTower))


def _ignored_patterns(model: PreTrainedModel) -> frozenset[str]:
    """Return regular expressions for the patterns that transformers drops without a warning.

    This is the rule of ``_adjust_missing_and_unexpected_keys`` in transformers.
    """
    declared = {each for each in model._keys_to_ignore_on_load_unexpected or () if isinstance(each, str)}
    for name, _ in model.named_buffers():
        if name.endswith("rotary_emb.inv_freq"):
            declared.add(r"rotary_emb\.inv_freq")
        if name.endswith("position_ids"):
            declared.add(r"(^|\.)position_ids$")
    own = patterns_of(model.state_dict(keep_vars=True))
    regexes = {each: regex_for_patterns(each) for each in declared}
    # An ignore rule for one layer, such as k_proj of a layer that reuses the keys of another, would match all layers
    # with `*` for its index. It is left out.
    used_by_model = {
        each for each, regex in regexes.items() if each != regex and any(re.search(regex, name) for name in own)
    }
    return frozenset(regex for each, regex in regexes.items() if each not in used_by_model)


# ------------------------------------------------------------------------------- flag, embeddings


def _enable_all_ties(config: Any) -> None:
    """Set the tie flag of a config and of its sub-configs, so that the model declares every pair that it can tie."""
    for _, each in config_tree(config):
        with contextlib.suppress(AttributeError):
            setattr(each, TIE_FLAG, True)


def _is_flag_editable(
    model: PreTrainedModel, ties: tuple[TiePair, ...], build_config: ConfigBuilder, base_config: Mapping[str, Any]
) -> bool:
    """Return True if setting the flag to false unties the pairs, and changes nothing else."""
    declared = [pair.flag for pair in ties if pair.flag != NEVER_TIED]
    if not declared or all(flag.is_constant for flag in declared):
        return False
    module_classes: set[Any] = {type(module) for module in model.modules()}
    if any(_forward_reads_flag(each) for each in module_classes):
        return False
    try:
        on, off = (build_config({**copy.deepcopy(dict(base_config)), TIE_FLAG: value}) for value in (True, False))
    except Exception:  # the config class refuses one of the values
        return False
    return bool(without_tie_flag(on.to_dict()) == without_tie_flag(off.to_dict()))


@functools.cache
def _forward_reads_flag(module_class: Any) -> bool:
    try:
        source = str(inspect.getsource(module_class.forward))
    except (OSError, TypeError):
        return False
    return TIE_FLAG in source


def _input_embeddings(model: Any) -> Any:
    try:
        return model.get_input_embeddings()
    except Exception:  # vision and audio models raise different exceptions here
        return None


def _output_embeddings(model: Any) -> Any:
    try:
        return model.get_output_embeddings()
    except Exception:  # the same reason as above
        return None


def _weight_name(model: nn.Module, module: nn.Module | None) -> str | None:
    weight = getattr(module, "weight", None)
    if weight is None:
        return None
    named = model.named_parameters(remove_duplicate=False)
    return next((name for name, value in named if value is weight), None)


def _is_embedding(model: PreTrainedModel, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)


# ---------------------------------------------------------------------------------------- configs


def default_config_builder(cls: Any) -> ConfigBuilder:
    """Return a function that builds the config of ``cls`` from a dict."""
    return lambda values: cls.config_class(**values)


def _config_builder(
    cls: Any, config: Mapping[str, Any], config_dir: Path | None, trust_remote_code: bool
) -> ConfigBuilder:
    """Return a function that builds a config from a dict, with remote code if the config has it and it is trusted."""
    reference = remote_reference(config, "AutoConfig")
    if trust_remote_code and config_dir is not None and reference:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        config_class: Any = get_class_from_dynamic_module(reference, str(config_dir))
    else:
        config_class = cls.config_class
    from_dict: ConfigBuilder = config_class.from_dict
    return from_dict


def _remote_class(config: Mapping[str, Any], class_name: str, config_dir: Path) -> type[PreTrainedModel]:
    """Return a class from the remote code to which `auto_map` refers; this runs the code.

    Raises:
        EnvironmentProblem: The code needs a package that is not installed.
        UnsupportedError: The Python file is missing.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    reference = remote_reference(config, class_name)
    assert reference is not None
    try:
        found: type[PreTrainedModel] = get_class_from_dynamic_module(reference, str(config_dir))
    except ImportError as error:
        raise missing_package(f"{class_name}: its remote code", error) from error
    except OSError as error:
        raise UnsupportedError(
            f"{class_name}: {reference} of auto_map is not in {config_dir.name}; put the Python file next to "
            "config.json"
        ) from error
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
