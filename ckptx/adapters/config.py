"""Parse `adapter_config.json` of PEFT: which adapter it is, and the scaling of each layer.

    merged = W + scaling * B A      scaling = alpha / rank, or alpha / sqrt(rank) with use_rslora

`rank_pattern` and `alpha_pattern` give other numbers to some layers. Settings that only matter while training, such as
dropout, are ignored; settings under which this formula does not hold are refused. Source: `LoraConfig` of PEFT 0.21.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, isfinite, log, sqrt
from typing import Any

from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.reader import read_json_object
from ckptx.formats.peft.detect import CONFIG_FILE
from ckptx.storage.interface import Source

_MAX_RANK = 1 << 20
MAX_MATCHED_NAME = 200  # characters of a module name that is matched with patterns
_MAX_PATTERN_LENGTH = 400
_MAX_LOG_MATCHES = log(5e6)  # of the ways in which a pattern may match a name of 100 characters
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_QUANTIFIER = re.compile(r"[*+{]")
_OPTIONAL = re.compile(r"(?<![(*+?])\?")
_QUANTIFIED_GROUP = re.compile(r"\)\s*[*+{]")
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x[a-zA-Z]*[-:)]")  # a comment can hide a quantifier
# Values of `init_lora_weights` that change the weights of the base, so that the adapter belongs to other weights.
_BASE_CHANGING_INITS = re.compile(r"pissa.*|olora|corda.*|loftq|lora_ga", re.IGNORECASE | re.DOTALL)
# Settings under which the merged weight has another formula, or none -> what they are.
_UNSUPPORTED_SETTINGS = {
    "alora_invocation_tokens": "activated LoRA, which applies to some tokens only",
    "arrow_config": "Arrow, which chooses among adapters for each token",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "layer_replication": "replicated layers",
    "megatron_config": "LoRA of Megatron's parallel layers",
    "trainable_token_indices": "trained rows of the embedding",
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Settings of a LoRA adapter.

    Attributes:
        path: Path of the config, for error messages.
        rank: Rank of layers that `rank_pattern` does not match.
        alpha: Alpha of layers that `alpha_pattern` does not match.
        rank_pattern: Regular expression for the end of a module name -> rank; the first that matches is used.
        alpha_pattern: Regular expression for the end of a module name -> alpha.
        use_rslora: True if alpha is divided by the square root of the rank, instead of the rank.
        use_dora: True for DoRA, which also trains the norm of each row.
        fan_in_fan_out: True if PEFT took the last target for a layer whose weight is stored as [in, out] (Conv1D).
        modules_to_save: Ends of the names of modules that were trained whole.
        target_modules: Names or pattern of the modules with an adapter, as stored; None if not recorded.
        target_parameters: Names of parameters with an adapter (experts in one tensor).
        keeps_ties: True if the two names of a tied weight have the same adapter (`ensure_weight_tying`).
        base_model: Name or path of the model that was trained; None if it is not recorded.
        revision: Revision of this model; None if it is not recorded.
    """

    path: str
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    modules_to_save: tuple[str, ...] = ()
    target_modules: tuple[str, ...] | str | None = None
    target_parameters: tuple[str, ...] = ()
    keeps_ties: bool = False
    base_model: str | None = None
    revision: str | None = None

    def layer_rank(self, module: str) -> int:
        """Return the rank of the layer with this module name."""
        return int(_match(self.rank_pattern, module, self.rank))

    def layer_alpha(self, module: str) -> float:
        """Return the alpha of the layer with this module name."""
        return float(_match(self.alpha_pattern, module, self.alpha))

    def scaling(self, module: str) -> float:
        """Return the factor of `B A` in the layer with this module name."""
        rank = self.layer_rank(module)
        return self.layer_alpha(module) / (sqrt(rank) if self.use_rslora else rank)


def _match(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module name, after a dot or the beginning."""
    for pattern, value in patterns.items():
        if _compile(pattern).match(module):
            return value
    return default


@lru_cache(maxsize=1 << 14)  # `re` keeps 512, and the adapter of a large model may have a pattern for each layer
def _compile(pattern: str) -> re.Pattern[str]:
    """Return the regular expression for a whole module name with which PEFT uses a pattern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about syntax that a later version of Python may read in another way
        return re.compile(rf"(.*\.)?({pattern})$")


def _log_matches(pattern: str) -> float:
    """Return the logarithm of an upper bound of the ways in which a pattern can match a name of 100 characters."""
    if len(pattern) > _MAX_PATTERN_LENGTH:
        return inf
    plain = _ESCAPE.sub("x", pattern)
    if _QUANTIFIED_GROUP.search(plain) or _VERBOSE.search(plain):
        return inf
    groups = plain.count("(") + 1
    return (
        len(_QUANTIFIER.findall(plain)) * log(101)
        + len(_OPTIONAL.findall(plain)) * log(2)
        # The product of the numbers of alternatives is largest if all groups have as many.
        + groups * log((plain.count("|") + groups) / groups)
    )


def read_adapter_config(source: Source) -> AdapterConfig:
    """Read `adapter_config.json`.

    Args:
        source: Directory of the adapter.

    Raises:
        InputError: The file is missing or no JSON object, or a value is missing, has a wrong type or is out of range.
        UnsupportedError: The adapter is not a LoRA, or is of a kind whose weights ckptx cannot compute.
    """
    return parse_adapter_config(read_json_object(source, CONFIG_FILE), str(source.location / CONFIG_FILE))


def parse_adapter_config(values: Mapping[str, Any], path: str) -> AdapterConfig:
    """Parse the contents of an adapter config.

    Args:
        values: Contents of `adapter_config.json`.
        path: Path of the file, for error messages.

    Raises:
        InputError, UnsupportedError: See `read_adapter_config`.
    """
    reader = _ConfigReader(values, path)
    kind = values.get("peft_type")
    if kind != "LORA":
        found = "has no peft_type" if kind is None else f"peft_type is {kind!r:.80}"
        raise UnsupportedError(f"{path}: {found}, and ckptx reads LoRA adapters only (LORA); merge it with PEFT")
    for key, description in _UNSUPPORTED_SETTINGS.items():
        if values.get(key):
            raise UnsupportedError(f"{path}: {key} ({description}) is not supported; use the adapter with PEFT")
    init = values.get("init_lora_weights")
    if isinstance(init, str) and _BASE_CHANGING_INITS.fullmatch(init):
        raise UnsupportedError(
            f'{path}: init_lora_weights is "{init:.40}", which changes the weights of the base before training, so '
            "that the adapter does not fit the published ones; save it with save_pretrained and "
            "path_initial_model_for_weight_conversion"
        )
    if values.get("target_parameters") and "unsloth" in str(values.get("auto_mapping")).lower():
        raise UnsupportedError(
            f"{path}: Unsloth trained adapters of experts with another order of the elements of B than PEFT, and the "
            "file does not tell which order it has; merge it with Unsloth"
        )
    rank, alpha = reader.rank("r", values.get("r")), reader.alpha("lora_alpha", values.get("lora_alpha"))
    bias = values.get("bias", "none")
    if bias not in (None, "none", "all", "lora_only"):
        raise InputError(f'{path}: bias is {bias!r:.40}, but "none", "all" or "lora_only" is required')
    targets = values.get("target_modules")
    return AdapterConfig(
        path=path,
        rank=rank,
        alpha=alpha,
        rank_pattern={
            reader.pattern("rank_pattern", key): reader.rank(f"rank_pattern[{key!r:.80}]", value)
            for key, value in reader.mapping("rank_pattern").items()
        },
        alpha_pattern={
            reader.pattern("alpha_pattern", key): reader.alpha(f"alpha_pattern[{key!r:.80}]", value)
            for key, value in reader.mapping("alpha_pattern").items()
        },
        use_rslora=reader.flag("use_rslora"),
        use_dora=reader.flag("use_dora"),
        fan_in_fan_out=reader.flag("fan_in_fan_out"),
        modules_to_save=reader.names("modules_to_save"),
        target_modules=targets if isinstance(targets, str) or targets is None else reader.names("target_modules"),
        target_parameters=reader.names("target_parameters"),
        keeps_ties=reader.flag("ensure_weight_tying"),
        base_model=reader.text("base_model_name_or_path"),
        revision=reader.text("revision"),
    )


class _ConfigReader:
    """Values of an adapter config, with errors that name file and key."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values, self._path = values, path

    def rank(self, key: str, value: Any) -> int:
        if type(value) is not int or not 0 < value <= _MAX_RANK:
            raise self._error(key, value, f"a rank, an integer from 1 to {_MAX_RANK:,},")
        return value

    def alpha(self, key: str, value: Any) -> float:
        if type(value) not in (int, float) or not isfinite(value) or not value:
            raise self._error(key, value, "a finite number other than 0 (the scaling is alpha / rank)")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return bool(value)

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._error(key, value, "a string")
        return value or None

    def names(self, key: str) -> tuple[str, ...]:
        value = self._values.get(key) or ()
        if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
            raise self._error(key, value, "a list of names")
        return tuple(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self._values.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._error(key, value, "an object")
        return value

    def pattern(self, key: str, pattern: str) -> str:
        """Return a regular expression that cannot take long to match.

        Raises:
            InputError: It is none.
            UnsupportedError: Matching it could take long: it repeats a group, or has many repetitions.
        """
        if _log_matches(pattern) > _MAX_LOG_MATCHES:
            raise UnsupportedError(
                f"{self._path}: {key}: the pattern {pattern!r:.80} could take very long to match; write the module "
                "names out, or use at most 3 repetitions such as .* and none of a group"
            )
        try:
            _compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise InputError(
                f"{self._path}: {key}: {pattern!r:.80} cannot be used as a regular expression: "
                f"{str(error).partition(chr(10))[0]:.200}; correct the file"
            ) from error
        return pattern

    def _error(self, key: str, value: Any, required: str) -> InputError:
        found = "is missing" if value is None else f"is {value!r:.80}"
        return InputError(f"{self._path}: {key} {found}, but {required} is required; correct the file")
