"""Pairs of pickled values, and whether they are compared as the generator says; for tests and for the fuzzer."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from torch.distributed.checkpoint.api import CheckpointException

from ckptx.robustness_suite.stored_items import read_items
from tests.robustness_suite.pickle_values import (
    Node,
    Thing,
    built,
    changed,
    generated,
    key_of,
    lowest_protocol,
    protocol_of,
    reloaded,
    write,
)

# Where in a checkpoint a value is: all of it, under a name, in an object, in a list.
PLACES: tuple[Callable[[Any], Any], ...] = (
    lambda value: {"state": value},
    lambda value: value,
    lambda value: Thing(state=value),
    lambda value: {"state": [value, {"step": 1}]},
)
_OF_DCP = 12  # one in so many pairs of a mixed sample: a DCP takes longer than the others


class Outcome(NamedTuple):
    """What became of a pair.

    Attributes:
        are_equal: As the generator says; None of a pair that could not be written.
        fault: What is wrong, in words; None where nothing is.
    """

    are_equal: bool | None
    fault: str | None


def pair_of(seed: int) -> tuple[Node, Node, str]:
    """Two values, and a format.

    The second is the first, or differs from it in some places; in a few pairs it is another one.
    """
    random = Random(seed)
    first = generated(random)
    second = generated(random) if random.random() < 0.1 else first
    for _ in range(random.choice((0, 0, 1, 1, 1, 2))):
        second = changed(second, random)
    forms = ["zip", "legacy", *(f"pickle {protocol}" for protocol in range(6))]
    form = "dcp" if random.randrange(_OF_DCP) == 0 else random.choice(forms)
    return first, second, form


def outcome_of(seed: int, folder: Path, pair: tuple[Node, Node, str] | None = None) -> Outcome:
    """Writes a pair, compares it, and says what is wrong."""
    first, second, form = pair or pair_of(seed)
    random, protocol = Random(seed), protocol_of(form)
    if max(lowest_protocol(first), lowest_protocol(second)) > protocol:
        return Outcome(None, None)
    place = random.choice(PLACES)
    paths = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, node in enumerate((first, second)):
            shutil.rmtree(folder / str(number), ignore_errors=True)
            try:
                value = built(node, Random(seed + number))
                value = reloaded(value, form) if random.random() < 0.3 else value
                paths.append(write(place(value), folder / str(number), form))
            except (TypeError, AttributeError, CheckpointException):  # what torch does not write in this format
                return Outcome(None, None)
    are_equal = key_of(first, protocol) == key_of(second, protocol)
    try:
        found = [read_items(path) for path in paths]
    except Exception as error:  # whatever it is, it is a fault
        return Outcome(are_equal, f"{form}: {type(error).__name__}: {error}")
    if (found[0] == found[1]) == are_equal:
        return Outcome(are_equal, None)
    return Outcome(are_equal, f"{form}: {'equal' if are_equal else 'unequal'} values are compared as the contrary")
