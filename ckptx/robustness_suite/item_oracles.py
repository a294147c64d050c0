"""Assign the items of a checkpoint to oracles by structure, so that names of custom trainers are recognized.

An item is a named value or tensor. Its oracle is the check that compares it, under the name that reports print (see
`oracles`). The structure identifies, in this order:

    param groups, learning rate   settings of param groups: a learning rate with weight decay, betas, ...
    moments          tensors that only optimizers have (`exp_avg`, `momentum_buffer`, ...), and other state next to them
    adam step        the step count of an optimizer, next to its moments; of any optimizer, not only Adam
    master weights   copies of the parameters in full precision
    second model     the names and shapes of the model below another root, such as an EMA
    model            the parameters that the optimizer names; if it numbers them, tensors of the same shapes
    rng              byte tensors of the size of torch's generator states; the tuples of Python and numpy
    scheduler        `last_epoch` next to other keys of torch's schedulers
    batch            the state that determines the next batch: the keys of torch's StatefulDataLoader; an epoch next to
                     a position

Known words in names are considered next (`item_names`); they also identify step, epoch and samples. An item that
neither identifies is "moments" within the optimizer, "model" if it can be a parameter, and "other" if not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ckptx.robustness_suite.item_names import (
    EPOCH_KEYS,
    LEARNING_RATE_KEYS,
    STEP_KEYS,
    inner_words,
    is_master,
    is_moment,
    kind_of_word,
    oracles_by_words,
    oracles_of_group,
)
from ckptx.robustness_suite.model_roots import NamedShape, Shape, Words, find_roots, has_root

_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_BYTE_DTYPES = frozenset({"U8", "I8"})
_CPU_GENERATOR_SHAPES = frozenset({(5056,), (5048,)})  # bytes of torch's CPU generator state, since and before 1.13
_DEVICE_GENERATOR_SHAPES = frozenset({(16,), (44,)})  # bytes of the states of CUDA (seed and offset) and MPS
_RNG_STATE_NAMES = frozenset(
    {"python", "py", "random", "numpy", "np", "torch", "cpu", "cuda", "gpu", "device", "xpu", "npu", "hip", "mps"}
)
_NUMPY_KEYS = frozenset({"bit_generator", "state"})
_MERSENNE_STATE_SIZE = 625  # integers in the state of Python's generator
_PARAM_GROUP_KEYS = frozenset({"betas", "weight_decay", "momentum", "eps", "nesterov", "amsgrad", "dampening", "alpha"})
_SCHEDULER_KEYS = frozenset({"_step_count", "base_lrs", "_last_lr", "lr_lambdas", "T_max", "total_steps"})
_LOADER_KEYS = frozenset(
    {
        "_snapshot", "_steps_since_snapshot", "_sampler_iter_yielded", "_num_yielded", "_iterator_finished",
        "sampler_iter_yielded", "samples_yielded", "dataset_state", "fetcher_state", "_sampler_iter_state",
    }
)  # fmt: skip
_POSITION_KEYS = frozenset(
    {
        "position",
        "pos",
        "offset",
        "cursor",
        "index",
        "seen",
        "consumed",
        "batch",
        "batch_idx",
        "yielded",
        "start_index",
        "drawn",
        "taken",
    }
)
_PARAMETER_NAMES = frozenset({"weight", "bias", "lora_A", "lora_B", "gamma", "beta", "running_mean", "running_var"})

ParentKey = tuple[str, Words]  # a file, and the words of the parent of an item in it


class StoredItem(NamedTuple):
    """The properties of an item that determine its oracle.

    Attributes:
        name: Name of the item, with dots.
        file: Label of the file or folder that contains the item.
        is_parameter_by_default: True for a tensor that may be a parameter although its name has no known word: one that
            the format of the checkpoint names. False for a tensor in a pickled object of a DCP.
        shape: Shape of a tensor; None for other values.
        dtype: Name of the dtype, such as "F32"; None for other values.
        is_rng_tuple: True if the value is an RNG state of Python or numpy, by the function `is_rng_tuple`.
    """

    name: str
    file: str = ""
    is_parameter_by_default: bool = False
    shape: Shape | None = None
    dtype: str | None = None
    is_rng_tuple: bool = False


def oracles_of_items(items: Sequence[StoredItem]) -> list[tuple[str, ...]]:
    """Return the oracles of each item of a checkpoint, in the order of the items.

    Args:
        items: All items of one checkpoint; the oracle of an item depends on the others.
    """
    classifier = _StateClassifier([*_make_entries(items)])
    return [classifier.oracles(each) for each in classifier.entries]


def is_rng_tuple(value: Any) -> bool:
    """Return True for a value of `random.getstate()` or `numpy.random.get_state()`, also if JSON made it a list."""
    if type(value) not in (list, tuple) or len(value) not in (3, 5):
        return False
    first, second = value[0], value[1]
    is_python = type(first) is int and type(second) in (list, tuple) and len(second) == _MERSENNE_STATE_SIZE
    return is_python or (type(first) is str and first == "MT19937")


class _Entry(NamedTuple):
    """An item, and the words of its name without containers.

    Attributes:
        item: Properties of the item.
        words: Words of its name, split at dots, without leading containers.
    """

    item: StoredItem
    words: Words

    @property
    def parent(self) -> ParentKey:
        """Return the file and the words of the parent, which are the same for siblings."""
        return self.item.file, self.words[:-1]

    @property
    def last_word(self) -> str:
        """Return the last word of the name in lower case."""
        return self.words[-1].lower()

    @property
    def is_float(self) -> bool:
        """Return True for a tensor of a floating-point dtype, which may be a parameter."""
        return self.item.dtype in _FLOAT_DTYPES

    @property
    def is_array(self) -> bool:
        """Return True for a tensor of several elements."""
        return self.item.shape is not None and any(size != 1 for size in self.item.shape)

    @property
    def is_optimizer_tensor(self) -> bool:
        """Return True for a tensor whose name has a word that only optimizers use."""
        return self.item.shape is not None and any(map(is_moment, self.words))


class _StateClassifier:
    """Classifier that finds the structure of a checkpoint, then assigns its items to oracles."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self.entries = entries
        self._siblings: dict[ParentKey, set[str]] = {}  # parent -> last words of its items
        for entry in entries:
            self._siblings.setdefault(entry.parent, set()).add(entry.last_word)
        # Each set has the parents whose items show that kind of state, such as the settings of a param group.
        self._param_group_parents = {
            parent
            for parent, names in self._siblings.items()
            if names & LEARNING_RATE_KEYS and names & _PARAM_GROUP_KEYS
        }
        self._scheduler_parents = {
            parent for parent, names in self._siblings.items() if "last_epoch" in names and len(names & _SCHEDULER_KEYS)
        }
        self._loader_parents = {parent for parent, names in self._siblings.items() if len(names & _LOADER_KEYS) > 1}
        self._sampler_parents = {
            parent
            for parent, names in self._siblings.items()
            if parent[1] and names & EPOCH_KEYS and names & _POSITION_KEYS
        }
        self._float_tensor_ancestors = {
            (entry.item.file, prefix) for entry in entries if entry.is_float for prefix in _prefixes(entry.words[:-1])
        }
        self._rng_state_parents = {entry.parent for entry in entries if self._is_whole_rng_state(entry)}
        self._numpy_parents = {parent for parent in self._siblings if self._is_numpy_state(parent)}
        self._optimizer_parents = {
            entry.parent for entry in entries if entry.is_optimizer_tensor and is_moment(entry.last_word)
        }
        shapes = [*self._named_shapes()]
        self._roots = find_roots(
            [shape for entry, shape in shapes if not entry.is_optimizer_tensor],
            [shape for entry, shape in shapes if entry.is_optimizer_tensor],
        )

    def oracles(self, entry: _Entry) -> tuple[str, ...]:
        """Return the oracles of one item."""
        return (
            self._oracles_of_optimizer(entry)
            or self._oracles_by_structure(entry)
            or self._oracles_by_words(entry)
            or self._default_oracles(entry)
        )

    def _named_shapes(self) -> Iterator[tuple[_Entry, NamedShape]]:
        """Yield the tensors that may be parameters, copies of them or moments."""
        for entry in self.entries:
            shape = entry.item.shape
            if shape is not None and not self._is_whole_rng_state(entry):
                is_optimizer_sibling = entry.parent in self._optimizer_parents and not is_moment(entry.last_word)
                if not is_optimizer_sibling:
                    yield entry, NamedShape(entry.words, shape, entry.is_float)

    def _oracles_of_optimizer(self, entry: _Entry) -> tuple[str, ...] | None:
        if "param_groups" in entry.words or (entry.parent in self._param_group_parents and entry.item.shape is None):
            return oracles_of_group(entry.last_word)
        if entry.is_optimizer_tensor:
            return ("moments",)
        if entry.parent in self._optimizer_parents and not self._is_in_model(entry):
            if entry.last_word in STEP_KEYS and not entry.is_array:
                return ("adam step",)
            return ("master weights",) if is_master(entry.last_word) else ("moments",)
        is_counter = entry.last_word in STEP_KEYS and not entry.is_array
        return ("adam step",) if is_counter and has_root(entry.words, self._roots.optimizer) else None

    def _oracles_by_structure(self, entry: _Entry) -> tuple[str, ...] | None:
        roots, words = self._roots, entry.words
        for oracle, copy_roots in (("moments", roots.moments), ("master weights", roots.master_weights)):
            if has_root(words, copy_roots):
                return (oracle,)
        if has_root(words, roots.second_model):
            return ("second model",)
        if self._is_in_model(entry):
            return ("model",)
        if kind_of_word(words[0]) in ("loader", "scheduler"):
            return None
        if self._belongs_to_rng_state(entry):
            return ("rng",)
        for oracle, parents in (("scheduler", self._scheduler_parents), ("batch", self._loader_parents)):
            if any((entry.item.file, prefix) in parents for prefix in _prefixes(words[:-1])):
                return (oracle,)
        is_in_data = entry.parent in self._sampler_parents and entry.last_word in EPOCH_KEYS | _POSITION_KEYS
        return ("batch",) if is_in_data and kind_of_word(words[0]) is None else None

    def _oracles_by_words(self, entry: _Entry) -> tuple[str, ...] | None:
        kind = kind_of_word(entry.words[0])
        if kind in ("rng", "loader") and entry.is_float and entry.is_array and entry.words[-1] in _PARAMETER_NAMES:
            return ("model",)  # a module may be called "generator" or "sampler"
        if kind == "model" and entry.item.shape is None:  # "model" is also the name of a file with everything in it
            inner_oracles = oracles_by_words(entry.words[1:]) if entry.words[1:] else None
            return inner_oracles or oracles_by_words(entry.words)
        return oracles_by_words(entry.words, entry.is_array)

    def _default_oracles(self, entry: _Entry) -> tuple[str, ...]:
        """Return the oracle of an item that neither words nor structure identify.

        State of an optimizer is "moments". A tensor is "model" if it may be a parameter: by the last word of its name
        or, if the names of the model are unknown, because it is an array or is next to or above floating-point tensors.
        """
        if has_root(entry.words, self._roots.optimizer):
            return ("moments",) if entry.is_array or "state" in entry.words else ("other",)
        if entry.item.shape is None or not (entry.item.is_parameter_by_default or entry.words[-1] in _PARAMETER_NAMES):
            return ("other",)
        if self._roots.model:
            return ("model",) if entry.words[-1] in _PARAMETER_NAMES else ("other",)
        return ("model",) if entry.is_array or entry.parent in self._float_tensor_ancestors else ("other",)

    def _is_in_model(self, entry: _Entry) -> bool:
        if entry.item.shape is None or not has_root(entry.words, self._roots.model):
            return False
        is_named_random = any(kind_of_word(word) == "rng" for word in entry.words)
        return not (is_named_random and self._is_whole_rng_state(entry))

    def _belongs_to_rng_state(self, entry: _Entry) -> bool:
        """Return True for a whole RNG state, for what is named as one next to it, and for a part of numpy's."""
        if self._is_whole_rng_state(entry) or (
            entry.parent in self._rng_state_parents and entry.last_word in _RNG_STATE_NAMES
        ):
            return True
        return any((entry.item.file, prefix) in self._numpy_parents for prefix in _prefixes(entry.words[:-1]))

    def _is_whole_rng_state(self, entry: _Entry) -> bool:
        """Return True for a single value that is the state of a generator: a tuple or a byte tensor."""
        if entry.item.is_rng_tuple:
            return True
        if entry.item.dtype not in _BYTE_DTYPES:
            return False
        if entry.item.shape in _CPU_GENERATOR_SHAPES:
            return True
        return entry.item.shape in _DEVICE_GENERATOR_SHAPES and entry.parent not in self._float_tensor_ancestors

    def _is_numpy_state(self, parent: ParentKey) -> bool:
        """Return True for a dict with an RNG state of numpy: the name of the generator and its numbers."""
        file, words = parent
        names = self._siblings[parent]
        return (
            bool(words)
            and "bit_generator" in names
            and (names >= _NUMPY_KEYS or (file, (*words, "state")) in self._siblings)
        )


def _prefixes(words: Words) -> Iterator[Words]:
    """Yield all prefixes of words, from the empty one to all words."""
    yield from (words[:length] for length in range(len(words) + 1))


def _make_entries(items: Sequence[StoredItem]) -> Iterator[_Entry]:
    """Yield each item with the words of its name, without containers that all items share."""
    words = [tuple(inner_words(each.name)) for each in items]
    combined_files = _files_with_all_state(items, words)
    words = [
        tuple(inner_words(".".join(each[1:]))) if item.file in combined_files and len(each) > 1 else each
        for item, each in zip(items, words, strict=True)
    ]
    while len(words) > 1 and _is_common_container(words):
        words = [each[1:] or each for each in words]  # the container itself may be an item: its description
    yield from (_Entry(item, each) for item, each in zip(items, words, strict=True))


def _files_with_all_state(items: Sequence[StoredItem], words: Sequence[Words]) -> set[str]:
    """Return the files that are named like a model file, but also contain an optimizer, scheduler or second model."""
    files = set()
    for item, each in zip(items, words, strict=True):
        if len(each) < 3 or each[0] != "model":
            continue
        kind = kind_of_word(each[1])
        is_schedule = kind == "scheduler" and item.shape is None
        if is_schedule or kind in ("optimizer", "second model") or "param_groups" in each:
            files.add(item.file)
    return files


def _is_common_container(words: Sequence[Words]) -> bool:
    """Return True if all names begin with one unknown word, with several names below it."""
    first = words[0][0]
    if kind_of_word(first) is not None or any(each[0] != first for each in words):
        return False
    return len({each[1] for each in words if len(each) > 2}) > 1
