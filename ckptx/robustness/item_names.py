"""Which oracle speaks of something in a checkpoint, from its name and the file it is in.

Trainers agree on words, not on their places: `optimizer.state.<name>.exp_avg` (torchtitan), `app.optim.state.<name>...`
(a script with one stateful object around all), `optimizer.pt` (transformers), `random_states_1.pkl` (accelerate). So a
name is read from its front: what holds everything is passed over, the first word that is known decides, and the last
one refines. What no word is known for is a parameter if it is a tensor outside of pickled state, and "other" if not.
"""

from __future__ import annotations

import re

_CONTAINERS = frozenset({"app", "state", "checkpoint", "training", "training_state", "trainer_state", "extra_state"})
_MODEL = frozenset({"model", "models", "module", "state_dict", "model_state_dict", "model_state", "weights", "ema"})
_OPTIMIZER = frozenset({"optim", "optims", "optimizer", "optimizers", "optimizer_state_dict", "optimizer_states"})
_SCHEDULER = frozenset({"scheduler", "schedulers", "lr_scheduler", "lr_schedulers", "sched", "scheduler_state_dict"})
_LOADER = frozenset(
    {
        "dataloader", "dataloaders", "data_loader", "loader", "train_dataloader", "train_loader", "sampler", "batches",
        "data",
    }
)  # fmt: skip
_RNG = re.compile(r"rng|rngs|.*rng_states?.*|random_states?|random|.*_manual_seed|numpy_random_seed|generators?")
_STEP = frozenset({"step", "steps", "global_step", "iteration", "iter", "current_step", "epoch", "epochs"})
_SAMPLES = re.compile(r"(.+_)?(samples|tokens|seen)(_.+)?|seen|sample_count|n?tokens_seen")
_RATES = frozenset({"lr", "initial_lr"})

# The file of a state, by what its trainer calls it -> the word for it. Numbers at the end are ranks or further objects.
_FILES = (
    (r"(model|pytorch_model|pytorch_model_fsdp|weights)([_-].*)?", "model"),
    (r"optim(izer)?(_states?)?(_\d+)?", "optimizer"),
    (r"(lr_)?scheduler(_\d+)?", "scheduler"),
    (r"scaler(_\d+)?", "scaler"),
    (r"rng(_state)?(_\d+)?|random_states?(_\d+)?", "rng"),
    (r"sampler(_\d+)?|dl_state_dict(_\d+)?|dataloader(_.*)?", "dataloader"),
    (r"trainer_state", "trainer_state"),
)


def word_of_file(stem: str) -> str | None:
    """What a file or folder holds by its name without ending, as a name in a checkpoint would begin; None if unknown.

    Example:
        optimizer_0 -> optimizer.0, random_states_1 -> rng.rank 1
    """
    for pattern, word in _FILES:
        if re.fullmatch(pattern, stem):
            number = re.search(r"_(\d+)$", stem)
            if number is None or word == "model" or (word != "rng" and number[1] == "0"):
                return word
            return f"{word}.{'rank ' if word == 'rng' else ''}{number[1]}"
    return None


def oracles_of(name: str, is_tensor: bool) -> tuple[str, ...]:
    """The oracles that speak of an item: one, or two for a learning rate in the groups of an optimizer.

    Args:
        name: Its path in the checkpoint, with dots.
        is_tensor: It is a tensor that the format itself names, not one inside a pickled object.

    Example:
        app.optim.state.model.norm.weight.exp_avg -> moments; optimizer.param_groups.0.lr -> group and rate
    """
    words = name.lower().split(".")
    while len(words) > 1 and words[0] in _CONTAINERS and not (words[0] == "state" and words[1].isdigit()):
        words = words[1:]
    first, last = words[0], words[-1]
    if first in _OPTIMIZER:
        return _of_optimizer(words[1:] or [""])
    if first in _SCHEDULER:
        return ("scheduler",)
    if first in _LOADER:
        return ("batch",)
    if first in _MODEL:
        return ("model",)
    if _RNG.fullmatch(first):
        return ("step",) if last in _STEP else ("rng",)
    if last in _STEP:
        return ("step",)
    if _SAMPLES.fullmatch(last):
        return ("samples",)
    for word in words[1:]:
        if word in _SCHEDULER:
            return ("scheduler",)
        if word in _OPTIMIZER:
            return _of_optimizer(words[words.index(word) + 1 :] or [""])
        if word in _LOADER:
            return ("batch",)
        if _RNG.fullmatch(word):
            return ("rng",)
    return ("model",) if is_tensor else ("other",)


def _of_optimizer(words: list[str]) -> tuple[str, ...]:
    last = words[-1]
    if "param_groups" in words:
        return ("group", "rate") if last in _RATES else ("group",)
    if last in _STEP:
        return ("adam step",)
    return ("moments",)
