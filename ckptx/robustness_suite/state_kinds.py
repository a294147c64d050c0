"""Kinds of state in a checkpoint, found from all items together: a trainer's own names are recognized by structure.

    optimizer      tensors that only optimizers keep (`exp_avg`, `momentum_buffer`, ...), the counter beside them, and
                   settings that are together in every param group: a learning rate with weight decay, betas, ...
    model          what the optimizer names as its parameters; if it numbers them, tensors of the same shapes
    second model   the names and shapes of the model once more below another root, as an EMA has them
    rng            byte tensors as long as a state of torch's generators; the tuples of Python's and numpy's
    scheduler      `last_epoch` with what torch's schedulers have beside it
    batch          what torch's StatefulDataLoader has beside a position; an epoch with a position in it

What a known word says comes after that, and what neither says is "other", by its own name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ckptx.robustness_suite.item_names import (
    EPOCHS,
    RATES,
    STEPS,
    inner_words,
    is_master,
    is_moment,
    kind_of_word,
    oracles_by_words,
    oracles_of_group,
)
from ckptx.robustness_suite.model_roots import NamedShape, Shape, Words, find_roots, is_below

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_BYTES = frozenset({"U8", "I8"})
_CPU_GENERATOR = frozenset({(5056,), (5048,)})  # bytes of torch's state of an mt19937; the second before torch 1.13
_DEVICE_GENERATOR = frozenset({(16,), (44,)})  # bytes of a state of CUDA (seed and offset), and of MPS
_OF_GENERATORS = frozenset(
    {"python", "py", "random", "numpy", "np", "torch", "cpu", "cuda", "gpu", "device", "xpu", "npu", "hip", "mps"}
)
_NUMPY = frozenset({"bit_generator", "state"})
_MERSENNE = 625  # numbers in the state of Python's generator
_OF_GROUPS = frozenset({"betas", "weight_decay", "momentum", "eps", "nesterov", "amsgrad", "dampening", "alpha"})
_OF_SCHEDULERS = frozenset({"_step_count", "base_lrs", "_last_lr", "lr_lambdas", "T_max", "total_steps"})
_OF_LOADERS = frozenset(
    {
        "_snapshot", "_steps_since_snapshot", "_sampler_iter_yielded", "_num_yielded", "_iterator_finished",
        "sampler_iter_yielded", "samples_yielded", "dataset_state", "fetcher_state", "_sampler_iter_state",
    }
)  # fmt: skip
_POSITIONS = frozenset(
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
_PARAMETERS = frozenset({"weight", "bias", "lora_A", "lora_B", "gamma", "beta", "running_mean", "running_var"})

Holder = tuple[str, Words]  # a file, and the words of a name in it that have something below them


class StoredItem(NamedTuple):
    """One item of a checkpoint, as far as its kind depends on it.

    Attributes:
        name: Path in the checkpoint, with dots.
        file: File or folder that holds it.
        is_tensor: The format itself names this tensor; a tensor inside a pickled object is none of those.
        shape: Shape of a tensor, None for other values.
        dtype: Name of its dtype, None for other values.
        is_generator: The value is a state of the generator of Python or numpy.
    """

    name: str
    file: str = ""
    is_tensor: bool = False
    shape: Shape | None = None
    dtype: str | None = None
    is_generator: bool = False


def oracles_of_items(items: Sequence[StoredItem]) -> list[tuple[str, ...]]:
    """Return the oracles of each item of a checkpoint, in the order of the items.

    Args:
        items: All items of one checkpoint; what one is depends on the others.
    """
    checkpoint = _Checkpoint([*_entries(items)])
    return [checkpoint.oracles(each) for each in checkpoint.entries]


def is_generator_state(value: Any) -> bool:
    """Return True for what `random.getstate()` or `numpy.random.get_state()` return, also when it was JSON."""
    if type(value) not in (list, tuple) or len(value) not in (3, 5):
        return False
    first, second = value[0], value[1]
    is_python = type(first) is int and type(second) in (list, tuple) and len(second) == _MERSENNE
    return is_python or (type(first) is str and first == "MT19937")


class _Entry(NamedTuple):
    """An item, and the words of its name that say what it is."""

    item: StoredItem
    words: Words

    @property
    def holder(self) -> Holder:
        """The file and parent that hold it: the same for siblings."""
        return self.item.file, self.words[:-1]

    @property
    def last(self) -> str:
        """Its last word in lower case."""
        return self.words[-1].lower()

    @property
    def is_float(self) -> bool:
        """It is a tensor that could be a parameter."""
        return self.item.dtype in _FLOATS

    @property
    def is_array(self) -> bool:
        """It is a tensor, and no single number."""
        return self.item.shape is not None and any(size != 1 for size in self.item.shape)

    @property
    def is_kept_for_parameter(self) -> bool:
        """It is a tensor, and its name has a word that only optimizers use."""
        return self.item.shape is not None and any(map(is_moment, self.words))


class _Checkpoint:
    """All items, and what they say of each other."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self.entries = entries
        self._beside: dict[Holder, set[str]] = {}
        for entry in entries:
            self._beside.setdefault(entry.holder, set()).add(entry.last)
        self._groups = {holder for holder, names in self._beside.items() if names & RATES and names & _OF_GROUPS}
        self._schedulers = {
            holder for holder, names in self._beside.items() if "last_epoch" in names and len(names & _OF_SCHEDULERS)
        }
        self._loaders = {holder for holder, names in self._beside.items() if len(names & _OF_LOADERS) > 1}
        self._samplers = {
            holder for holder, names in self._beside.items() if holder[1] and names & EPOCHS and names & _POSITIONS
        }
        self._with_floats = {
            (entry.item.file, above) for entry in entries if entry.is_float for above in _starts(entry.words[:-1])
        }
        self._generators = {entry.holder for entry in entries if self._is_generator(entry)}
        self._numpy = {holder for holder in self._beside if self._is_of_numpy(holder)}
        self._parameters = {entry.holder for entry in entries if entry.is_kept_for_parameter and is_moment(entry.last)}
        shapes = [*self._named_shapes()]
        self._roots = find_roots(
            [shape for entry, shape in shapes if not entry.is_kept_for_parameter],
            [shape for entry, shape in shapes if entry.is_kept_for_parameter],
        )

    def oracles(self, entry: _Entry) -> tuple[str, ...]:
        """Return the oracles of one item."""
        return self._of_optimizer(entry) or self._by_structure(entry) or self._by_words(entry) or self._rest(entry)

    def _named_shapes(self) -> Iterator[tuple[_Entry, NamedShape]]:
        for entry in self.entries:
            shape = entry.item.shape
            if shape is not None and not self._is_generator(entry):
                is_beside = entry.holder in self._parameters and not is_moment(entry.last)
                if not is_beside:
                    yield entry, NamedShape(entry.words, shape, entry.is_float)

    def _of_optimizer(self, entry: _Entry) -> tuple[str, ...] | None:
        if "param_groups" in entry.words or (entry.holder in self._groups and entry.item.shape is None):
            return oracles_of_group(entry.last)
        if entry.is_kept_for_parameter:
            return ("moments",)
        if entry.holder in self._parameters and not self._is_of_model(entry):
            if entry.last in STEPS and not entry.is_array:
                return ("adam step",)
            return ("master weights",) if is_master(entry.last) else ("moments",)
        is_counter = entry.last in STEPS and not entry.is_array
        return ("adam step",) if is_counter and is_below(entry.words, self._roots.optimizer) else None

    def _by_structure(self, entry: _Entry) -> tuple[str, ...] | None:
        roots, words = self._roots, entry.words
        for oracle, below in (("moments", roots.moments), ("master weights", roots.masters)):
            if is_below(words, below):
                return (oracle,)
        if is_below(words, roots.second):
            return ("second model",)
        if self._is_of_model(entry):
            return ("model",)
        if kind_of_word(words[0]) in ("loader", "scheduler"):
            return None
        if self._is_random(entry):
            return ("rng",)
        for oracle, holders in (("scheduler", self._schedulers), ("batch", self._loaders)):
            if any((entry.item.file, above) in holders for above in _starts(words[:-1])):
                return (oracle,)
        is_in_data = entry.holder in self._samplers and entry.last in EPOCHS | _POSITIONS
        return ("batch",) if is_in_data and kind_of_word(words[0]) is None else None

    def _by_words(self, entry: _Entry) -> tuple[str, ...] | None:
        kind = kind_of_word(entry.words[0])
        if kind in ("rng", "loader") and entry.is_float and entry.is_array and entry.words[-1] in _PARAMETERS:
            return ("model",)  # a module may be called "generator" or "sampler"
        if kind == "model" and entry.item.shape is None:  # "model" is also the name of a file with everything in it
            inside = oracles_by_words(entry.words[1:]) if entry.words[1:] else None
            return inside or oracles_by_words(entry.words)
        return oracles_by_words(entry.words, entry.is_array)

    def _rest(self, entry: _Entry) -> tuple[str, ...]:
        """Return the oracle of an item with a name that no word and no structure explains."""
        if is_below(entry.words, self._roots.optimizer):
            return ("moments",) if entry.is_array or "state" in entry.words else ("other",)
        if entry.item.shape is None or not (entry.item.is_tensor or entry.last in _PARAMETERS):
            return ("other",)
        if self._roots.model:
            return ("model",) if entry.words[-1] in _PARAMETERS else ("other",)
        return ("model",) if entry.is_array or entry.holder in self._with_floats else ("other",)

    def _is_of_model(self, entry: _Entry) -> bool:
        if entry.item.shape is None or not is_below(entry.words, self._roots.model):
            return False
        is_named_random = any(kind_of_word(word) == "rng" for word in entry.words)
        return not (is_named_random and self._is_generator(entry))

    def _is_random(self, entry: _Entry) -> bool:
        if self._is_generator(entry) or (entry.holder in self._generators and entry.last in _OF_GENERATORS):
            return True
        return any((entry.item.file, above) in self._numpy for above in _starts(entry.words[:-1]))

    def _is_generator(self, entry: _Entry) -> bool:
        if entry.item.is_generator:
            return True
        if entry.item.dtype not in _BYTES:
            return False
        if entry.item.shape in _CPU_GENERATOR:
            return True
        return entry.item.shape in _DEVICE_GENERATOR and entry.holder not in self._with_floats

    def _is_of_numpy(self, holder: Holder) -> bool:
        """Return True for a dict with an RNG state of numpy: the name of the generator and its numbers."""
        file, words = holder
        names = self._beside[holder]
        return (
            bool(words) and "bit_generator" in names and (names >= _NUMPY or (file, (*words, "state")) in self._beside)
        )


def _starts(words: Words) -> Iterator[Words]:
    yield from (words[:length] for length in range(len(words) + 1))


def _entries(items: Sequence[StoredItem]) -> Iterator[_Entry]:
    """Yield each item with the words of its name that say what it is, without those that stand around everything."""
    words = [tuple(inner_words(each.name)) for each in items]
    wrapped = _files_with_everything(items, words)
    words = [
        tuple(inner_words(".".join(each[1:]))) if item.file in wrapped and len(each) > 1 else each
        for item, each in zip(items, words, strict=True)
    ]
    while len(words) > 1 and _is_around(words):
        words = [each[1:] or each for each in words]  # the word itself may be an item: the kind of the object
    yield from (_Entry(item, each) for item, each in zip(items, words, strict=True))


def _files_with_everything(items: Sequence[StoredItem], words: Sequence[Words]) -> set[str]:
    """Return the files that are called as those of a model, and hold an optimizer or a second model, too."""
    found = set()
    for item, each in zip(items, words, strict=True):
        if len(each) < 3 or each[0] != "model":
            continue
        kind = kind_of_word(each[1])
        is_schedule = kind == "scheduler" and item.shape is None
        if is_schedule or kind in ("optimizer", "second model") or "param_groups" in each:
            found.add(item.file)
    return found


def _is_around(words: Sequence[Words]) -> bool:
    """Return True where all names begin with one word that says nothing, and several kinds of state are below it."""
    first = words[0][0]
    if kind_of_word(first) is not None or any(each[0] != first for each in words):
        return False
    return len({each[1] for each in words if len(each) > 2}) > 1
