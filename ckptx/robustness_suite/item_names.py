"""Assign items of a checkpoint to oracles, by their names and files; an oracle is the check of one kind of state.

Trainers use the same words at different places: `optimizer.state.<name>.exp_avg` (torchtitan),
`app.optim.state.<name>...` (a script with one stateful object for all state), `optimizer.pt` (transformers),
`random_states_1.pkl` (accelerate). So a name is matched from its start: words for containers are skipped, the first
known word determines the kind of state, and the last word refines it. An item without a known word is a parameter if it
is a tensor outside of pickled state, otherwise "other".

Names of custom trainers are recognized by `item_oracles`, which considers all items of a checkpoint together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

StateKind = Literal["model", "second model", "optimizer", "scheduler", "loader", "rng", "options", "progress"]

_CONTAINER_WORDS = frozenset(
    {"app", "state", "checkpoint", "training", "training_state", "trainer_state", "extra_state"}
)
_RANK = re.compile(r"rank[ _-]?\d+")
_SECOND_MODEL = re.compile(r"(.+[_-])?(ema|swa|shadow|polyak|averaged)([_-].+)?")
_OPTIMIZER = re.compile(r"opt(im|imizer)?s?(_states?(_dict)?)?|base_optimizer_state")
_RNG = re.compile(
    r"(.+[_-])?rngs?([_-].+|\d+)?|random_states?|random|.*_manual_seed|numpy_random_seed|generators?|.*random_state"
)
_WORDS_BY_KIND: tuple[tuple[StateKind, frozenset[str]], ...] = (
    (
        "model",
        frozenset({"model", "models", "module", "net", "network", "weights"})
        | {"state_dict", "model_state_dict", "model_state", "model_states"},
    ),
    (
        "scheduler",
        frozenset({"scheduler", "schedulers", "lr_scheduler", "lr_schedulers", "sched", "scheduler_state_dict"})
        | {"opt_param_scheduler", "lr_scheduler_state_dict", "scheduler_state"},
    ),
    (
        "loader",
        frozenset({"dataloader", "dataloaders", "data_loader", "loader", "train_dataloader", "train_loader"})
        | {"sampler", "batches", "data", "data_sampler", "combined_loader", "dataloader_state_dict", "data_state"},
    ),
    (
        "options",
        frozenset({"args", "config", "cfg", "hparams", "options", "ds_config"})
        | {"hyper_parameters", "hyperparameters", "datamodule_hyper_parameters"},
    ),
    ("progress", frozenset({"loops"})),  # progress of each loop of Lightning
)
_KIND_BY_WORD: dict[str, StateKind] = {word: kind for kind, words in _WORDS_BY_KIND for word in words}
STEP_KEYS = frozenset(
    {"step", "steps", "global_step", "global_steps", "iteration", "iter", "current_step", "skipped_steps"}
)
EPOCH_KEYS = frozenset({"epoch", "epochs", "current_epoch"})
_SAMPLES = re.compile(r"(.+_)?(samples|tokens|seen)(_.+)?|seen|sample_count|n?tokens_seen")
LEARNING_RATE_KEYS = frozenset({"lr", "initial_lr"})
_MASTER = re.compile(r"(.+_)?master(_.+)?|fp32|(.+_)?fp32_(.+_)?(params?|groups|flat)(_.+)?")
_MOMENT = re.compile(
    r"(max_)?exp_(avg|inf)(_.+)?|momentum_buffer|square_avg|grad_avg|acc_(delta|grad)|row_var|col_var|step_sizes?"
    r"|state[12]|absmax[12]|(first|second)_moments?|moment[12]|shampoo_.+|row_momentum|col_momentum"
)

# Pattern of a file name -> prefix for its items. A number at the end is a rank, or the index of an object.
_FILE_PREFIXES = (
    (r"(.+[_-])?(ema|swa)([_-].+)?", "ema"),
    (r"(model|pytorch_model|pytorch_model_fsdp|weights)([_-].*)?", "model"),
    (r"optim(izer)?(_states?)?(_\d+)?", "optimizer"),
    (r"(lr_)?scheduler(_\d+)?", "scheduler"),
    (r"scaler(_\d+)?", "scaler"),
    (r"rngs?([_-]states?)?([_-]?(rank[_-]?)?\d+)?|random_states?(_\d+)?", "rng"),
    (r"sampler(_\d+)?|dl_state_dict(_\d+)?|dataloader(_.*)?", "dataloader"),
    (r"trainer_state", "trainer_state"),
)


def prefix_of_file(stem: str) -> str | None:
    """Return the name prefix for the contents of a file or folder, from its name without suffix; None if unknown.

    Example:
        optimizer_0 -> optimizer, optimizer_1 -> optimizer.1, random_states_1 -> rng.rank 1
    """
    for pattern, word in _FILE_PREFIXES:
        if re.fullmatch(pattern, stem):
            number = re.search(r"(\d+)$" if word == "rng" else r"_(\d+)$", stem)
            if number is None or word in ("model", "ema") or (word != "rng" and number[1] == "0"):
                return word
            return f"{word}.{'rank ' if word == 'rng' else ''}{number[1]}"
    return None


def oracles_of(name: str, is_parameter_by_default: bool) -> tuple[str, ...]:
    """Return the oracles of an item: one, or two for a learning rate in the groups of an optimizer.

    Args:
        name: Path in the checkpoint, with dots.
        is_parameter_by_default: True for a tensor that is taken for a parameter if no word of its name is known.

    Example:
        app.optim.state.model.norm.weight.exp_avg -> moments; optimizer.param_groups.0.lr -> param groups, learning rate
    """
    return oracles_by_words(inner_words(name)) or (("model",) if is_parameter_by_default else ("other",))


def inner_words(name: str) -> list[str]:
    """Split a name at its dots, without leading words for containers or ranks."""
    words = name.split(".")
    while len(words) > 1 and _is_container(words[0].lower(), words[1]):
        words = words[1:]
    return words


def kind_of_word(word: str) -> StateKind | None:
    """Return the kind of state that a word denotes; None for an unknown word."""
    word = word.lower()
    if word in _KIND_BY_WORD:
        return _KIND_BY_WORD[word]
    if _OPTIMIZER.fullmatch(word):
        return "optimizer"
    if _SECOND_MODEL.fullmatch(word):
        return "second model"
    return "rng" if _RNG.fullmatch(word) else None


def oracles_by_words(words: Sequence[str], is_array: bool = False) -> tuple[str, ...] | None:
    """Return the oracles of an item that its words name, or None if no word is known.

    Args:
        words: Words of the name, from `inner_words`.
        is_array: True for a tensor of several elements. It cannot be a counter, and apart from "param_groups" only
            its first word is considered, as a module of a model may be called "sampler" or "generator".
    """
    lower = [word.lower() for word in words]
    if "param_groups" in lower:
        return oracles_of_group(lower[-1])
    kind = kind_of_word(lower[0])
    if kind is not None:
        return _oracles_of_kind(kind, lower, is_array)
    if is_array:
        return None
    for index, word in enumerate(lower[1:-1], start=1):
        kind = kind_of_word(word)
        if kind is not None and kind not in ("model", "options", "progress"):
            return _oracles_of_kind(kind, lower[index:], is_array)
    return oracles_of_counter(lower[-1]) or _oracles_of_last_word(lower)


def oracles_of_counter(word: str) -> tuple[str, ...] | None:
    """Return the oracle of a number that counts steps, epochs or samples; None for any other word."""
    if word in STEP_KEYS:
        return ("step",)
    if word in EPOCH_KEYS:
        return ("epoch",)
    return ("samples",) if _SAMPLES.fullmatch(word) else None


def oracles_of_group(key: str) -> tuple[str, ...]:
    """Return the oracles of a setting of a param group."""
    return ("param groups", "learning rate") if key in LEARNING_RATE_KEYS else ("param groups",)


def is_master(word: str) -> bool:
    """Return True for a word that denotes master weights: a copy of the parameters in full precision."""
    return _MASTER.fullmatch(word.lower()) is not None


def is_moment(word: str) -> bool:
    """Return True for a name that only optimizers use for a state tensor of a parameter, such as `exp_avg`."""
    return _MOMENT.fullmatch(word.lower()) is not None


def _is_container(word: str, next_word: str) -> bool:
    if word == "state" and next_word.isdigit():  # state of an optimizer that is a file of its own
        return False
    return word in _CONTAINER_WORDS or _RANK.fullmatch(word) is not None


def _oracles_of_last_word(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the oracle of a last word that is the state itself, as in `run.python_rng`."""
    kind = kind_of_word(words[-1]) if len(words) > 1 else None
    return _oracles_of_kind(kind, words[-1:], False) if kind in ("scheduler", "loader", "rng") else None


def _oracles_of_kind(kind: StateKind, words: Sequence[str], is_array: bool) -> tuple[str, ...]:
    """Return the oracles of an item, given the words of its name from the one that denotes `kind`, in lower case."""
    last = words[-1]
    if kind == "optimizer":
        return _oracles_of_optimizer(words[1:] or [""], is_array)
    if kind == "rng":
        return ("step",) if last in STEP_KEYS else ("rng",)
    if kind == "progress":
        if any(kind_of_word(word) == "loader" for word in words):
            return ("batch",)
        return ("epoch",) if "epoch_progress" in words else ("step",)
    oracle_by_kind = {"model": "model", "second model": "second model", "scheduler": "scheduler", "loader": "batch"}
    return (oracle_by_kind.get(kind, "other"),)


def _oracles_of_optimizer(words: Sequence[str], is_array: bool) -> tuple[str, ...]:
    if words[-1] in STEP_KEYS and not is_array:
        return ("adam step",)
    if any(map(is_master, words)):
        return ("master weights",)
    is_state = is_array or "state" in words or any(map(is_moment, words))
    return ("moments",) if is_state else ("other",)
