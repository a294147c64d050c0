"""Decide from config.json and the generated files alone whether the runtime can run a checkpoint on a mesh.

`verify --run`, `forecast` and `robustness` refuse what `check_run_support` refuses, before they build a model;
`reshard` prints the same reason as a note, without torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import gcd
from typing import Any

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.correction_types import filter_by_class
from ckptx.architecture.corrections import corrections_of_class
from ckptx.architecture.plans import layer_overrides
from ckptx.errors import UnsupportedError
from ckptx.layout.styles import STYLES, StyleKind
from ckptx.layout.tensor_parallel_plan import Rule, TensorParallelPlan
from ckptx.wording import counted

GATHER_STYLES = ("colwise_gather_output", "colwise_rep")  # outputs are gathered, so shards may split heads
SPLIT_STYLES = ("rowwise_split_input", "rowwise_rep")  # inputs are split from whole ones, so shards may split heads
# Config key with a number of heads -> flag of the same config; the number is used only if the flag is true.
_FLAG_OF_HEAD_COUNT = {"num_global_key_value_heads": "attention_k_eq_v"}


def find_run_refusal(config: Mapping[str, Any], architecture: Architecture, tp: int, pp: int) -> str:
    """Return the message of the error that `check_run_support` raises; empty if it raises none."""
    try:
        check_run_support(config, architecture, tp, pp)
    except UnsupportedError as error:
        return str(error)
    return ""


def check_run_support(config: Mapping[str, Any], architecture: Architecture, tp: int, pp: int) -> None:
    """Refuse a checkpoint that the runtime cannot run on a mesh, before anything is built.

    Args:
        config: Contents of its `config.json`.
        architecture: Class of the model.
        tp: Number of TP ranks.
        pp: Number of pipeline ranks.

    Raises:
        UnsupportedError: The checkpoint is quantized, the class cannot run as pipeline stages, or a number of heads is
            not a multiple of `tp`.
    """
    if is_quantized(config):
        raise UnsupportedError(
            f"{architecture.class_name}: its config declares a quantization, and quantized weights cannot be run; "
            "pass --dequantize"
        )
    refusals = filter_by_class(corrections_of_class(architecture.class_name).no_stages, architecture.class_name)
    if pp > 1 and refusals:
        raise UnsupportedError(
            f"{architecture.class_name}: cannot run as {pp} pipeline stages: {refusals[0].reason}; leave out --pp"
        )
    check_heads(config, tp, architecture)


def find_head_refusal(config: Mapping[str, Any], architecture: Architecture, tp: int) -> str:
    """Return the message of the error that `check_heads` raises; empty if it raises none."""
    try:
        check_heads(config, tp, architecture)
    except UnsupportedError as error:
        return str(error)
    return ""


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Return True if a config declares quantized weights."""
    return bool(config.get("quantization_config"))


def check_heads(config: Mapping[str, Any], tp: int, architecture: Architecture) -> None:
    """Refuse a number of TP ranks that does not divide the numbers of attention heads, before anything is built.

    Only heads that the forward pass uses as shards count: a projection whose output is gathered may be split anywhere.

    Raises:
        UnsupportedError: A number of heads is not a multiple of `tp`.
    """
    if tp == 1:
        return
    counts = _head_counts(config, architecture)
    undivided = [f"{key}={count}" if key else counted(count, "attention head") for key, count in counts if count % tp]
    if undivided:
        divisor = gcd(*(count for _, count in counts))
        *sizes, largest = [str(size) for size in range(1, divisor + 1) if divisor % size == 0]
        raise UnsupportedError(
            f"{architecture.class_name}: tp={tp} does not divide {', '.join(undivided)}; each TP rank must hold whole "
            f"attention heads, choose tp {' or '.join([', '.join(sizes), largest] if sizes else [largest])}"
        )


def _head_counts(config: Mapping[str, Any], architecture: Architecture) -> list[tuple[str, int]]:
    """Return the numbers of heads that TP must divide, each with its config key, or "" if the config has none."""
    plan = architecture.tensor_parallel_plan(config)
    text = _text_config(config, architecture)
    matches = [match for match in map(plan.find_rule, plan.patterns()) if match is not None]
    corrections = filter_by_class(corrections_of_class(architecture.class_name).forward, architecture.class_name)
    runnable_patterns = next((each.runs for each in corrections if each.runs), ())
    counts = dict.fromkeys(
        (_find_head_count_key(text, count), count)
        for pattern, rule in matches
        if _requires_whole_heads(plan, pattern, rule, runnable_patterns)
        for count, _ in rule.heads
    )
    return [each for each in counts if each[0] not in _FLAG_OF_HEAD_COUNT or text.get(_FLAG_OF_HEAD_COUNT[each[0]])]


def is_valid_for_forward(plan: TensorParallelPlan, pattern: str, rule: Rule) -> bool:
    """Return True if the forward pass can run with a rule; other rules are for sharding files only.

    It can run with rules of the user and of the model's own plan, with overrides that have the style of the own plan,
    and with overrides for embeddings and output heads.
    """
    if rule.decided_by != "override":
        return True
    own_rule = plan.fallback.rules.get(pattern) if plan.fallback is not None else None
    is_vocabulary = rule.style in ("embedding_rowwise", *GATHER_STYLES)  # the output of the module is whole
    return (own_rule is not None and own_rule.style == rule.style) or is_vocabulary


def _requires_whole_heads(
    plan: TensorParallelPlan, pattern: str, rule: Rule, runnable_patterns: Collection[str]
) -> bool:
    """Return True if the forward pass runs with a rule and computes with shards that must hold whole heads."""
    kind = STYLES[rule.style]
    is_sharded = kind in (StyleKind.COLWISE, StyleKind.ROWWISE) and rule.style not in (*GATHER_STYLES, *SPLIT_STYLES)
    runs = pattern in runnable_patterns or is_valid_for_forward(plan, pattern, rule)
    return bool(rule.heads) and is_sharded and runs


def _text_config(config: Mapping[str, Any], architecture: Architecture) -> Mapping[str, Any]:
    """Return the config of the text model; the whole config if it has no such sub-config."""
    structure = architecture.structure
    text_config: Any = config
    for key in (*structure.root, *filter(None, structure.text_config_path.split("."))):
        text_config = text_config.get(key) if isinstance(text_config, Mapping) else None
    return text_config if isinstance(text_config, Mapping) else config


def _find_head_count_key(config: Mapping[str, Any], count: int) -> str:
    """Return the config key with this number of heads, the longest if several have it; "" if none has."""
    values = [*config.items(), *(item for layer in layer_overrides(config) for item in layer.items())]
    keys = [key for key, value in values if key.endswith(("heads", "n_head")) and value == count]
    return max(keys, key=lambda key: len(key), default="")
