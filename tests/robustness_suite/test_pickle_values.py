"""Pickled state, value by value: no two unequal values are compared as equal, and no two equal ones as different."""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ckptx.errors import InputError
from ckptx.robustness_suite import pickle_normalizer, pickle_reader, value_digests
from ckptx.robustness_suite.stored_items import read_items
from tests.robustness_suite.pickle_pairs import outcome_of
from tests.robustness_suite.pickle_values import (
    ALIKE,
    FORMATS,
    LEAVES,
    Leaf,
    Node,
    Thing,
    built,
    fresh,
    key_of,
    lowest_protocol,
    protocol_of,
    reloaded,
    write,
)

PAIRS = 250  # in a part of the sample; the fuzzer runs more
PARTS = 4
NEVER_WRITTEN = 12  # leaves that torch does not write outside of archives

pytestmark = pytest.mark.filterwarnings("ignore")


def leaf(value: Any) -> Node:
    """A value that is as it is given, with its type and `repr` for a key."""
    made = fresh(value) if type(value) is str else value
    return Node("leaf", (), Leaf((type(value).__name__, repr(value)), lambda _: made, True))


def items_by_key(nodes: list[Node], folder: Path, form: str) -> dict[Any, set[frozenset[Any]]]:
    """The items of each value, written in several ways, by its key."""
    found: defaultdict[Any, set[frozenset[Any]]] = defaultdict(set)
    protocol, unwritten = protocol_of(form), 0
    for at, node in enumerate(nodes):
        if lowest_protocol(node) > protocol:
            continue
        for way in range(2 if form == "dcp" else 4):
            try:
                value = built(node, Random(1000 * at + way))
                value = reloaded(value, form) if way == 1 else value
                path = write({"v": value}, folder / f"{at}-{way}", form)
            except (TypeError, AttributeError):
                unwritten += 1
                break
            found[key_of(node, protocol)].add(frozenset(read_items(path).items()))
    assert unwritten <= NEVER_WRITTEN
    return found


def check(found: dict[Any, set[frozenset[Any]]]) -> None:
    """Each value has one form, and no two have the same."""
    assert {key: forms for key, forms in found.items() if len(forms) > 1} == {}
    by_items = defaultdict(list)
    for key, (form,) in found.items():
        by_items[form].append(key)
    assert [keys for keys in by_items.values() if len(keys) > 1] == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMATS)
def test_every_kind_of_value_has_a_form_of_its_own(form: str, tmp_path: Path) -> None:
    """All pairs of 250 values, as they were made, in other layouts, and loaded again."""
    nodes = [Node("leaf", (), each) for each in LEAVES]
    found = items_by_key(nodes[::6] if form == "dcp" else nodes, tmp_path, form)
    assert len(found) > (30 if form == "dcp" else 150)
    check(found)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", [each for each in FORMATS if each != "dcp"])
def test_every_constructor_has_a_form_of_its_own(form: str, tmp_path: Path) -> None:
    """The same parts in every kind that takes as many: all pairs of 30 kinds, with 0 to 2 parts."""
    word, number = leaf("ab"), leaf(3)
    lists = [
        Node(kind, parts, detail)
        for kinds in (ALIKE[0], ALIKE[2])
        for kind in kinds
        for parts in ((), (word,), (number,), (word, number), (number, word))
        for detail in ((None, 5) if kind == "deque" else (None,))
    ]
    pairs = [Node(kind, parts) for kind in ALIKE[1] for parts in ((word, number), (number, word))]
    single = [Node(kind, (part,)) for kind in ALIKE[3] for part in (word, number, Node("list", (word,)))]
    keyed = [
        Node(kind, parts)
        for kind in ALIKE[4]
        for parts in ((), (word, number), (number, word), (word, number, leaf("c"), word))
    ]
    groups = [Node(kind, parts) for kind in ALIKE[5] for parts in ((), (word,), (number, word))]
    check(items_by_key([*lists, *pairs, *single, *keyed, *groups], tmp_path, form))


KEYS = (1, "1", True, "True", 1.5, "1.5", None, "None", b"1", "b'1'", "1 (int)", "a", "a.b", "", ".", (1,), ("1",), -1)


@pytest.mark.parametrize("form", ["pickle 0", "pickle 2", "pickle 5", "zip"])
def test_every_kind_of_key_has_a_name_of_its_own(form: str, tmp_path: Path) -> None:
    """Also as a list or a tuple, and nested, where the joined words are the same."""
    leaves = {key: leaf(key) for key in KEYS}
    value, inner = leaf("x"), Node("dict", (leaf("b"), leaf("x")))
    nodes = [Node("dict", (key, value)) for key in leaves.values()]
    nodes += [
        Node("dict", (leaves[1], value, leaves["1"], leaf("y"))),
        Node("dict", (leaves["1"], value, leaves[1], leaf("y"))),
    ]
    nodes += [Node("dict", (leaves["a"], inner)), Node("dict", (leaves["a"], inner, leaves["a.b"], leaf("y")))]
    nodes += [Node("dict", (leaves["a"], Node("dict", (leaf("b"), leaf("y"))), leaves["a.b"], value))]
    nodes += [Node(kind, (inner, inner)) for kind in ("list", "tuple")]
    nodes += [Node("dict", (leaf(0), inner, leaf(1), inner)), Node("dict", (leaf("0"), inner, leaf("1"), inner))]
    nodes += [Node("dict", (leaves[""], Node("dict", (leaves[""], value)))), Node("pickled", (inner,)), inner]
    nodes += [Node("default", inner.parts), Node("default of list", inner.parts), Node("dict of", inner.parts)]
    check(items_by_key(nodes, tmp_path, form))


def test_a_usual_name_is_as_it_was(tmp_path: Path) -> None:
    state = {"state": {0: {"step": 1.0}}, "param_groups": [{"lr": 0.1}]}
    (tmp_path / "optimizer.pkl").write_bytes(pickle.dumps(state))
    assert set(read_items(tmp_path)) == {
        ("adam step", "optimizer.state.0.step"),
        ("param groups", "optimizer.param_groups"),  # that it is a list
        ("param groups", "optimizer.param_groups.0.lr"),
        ("learning rate", "optimizer.param_groups.0.lr"),
    }
    (tmp_path / "optimizer.pkl").write_bytes(pickle.dumps({"state": {0: 1, "0": 2, b"0": 3, None: 4}}))
    assert {name for _, name in read_items(tmp_path)} == {
        "optimizer.state",
        "optimizer.state.0",
        'optimizer.state."0"',
        "optimizer.state.b'0' (bytes)",
        "optimizer.state.None (NoneType)",
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", range(PARTS))
def test_pairs_are_compared_as_they_were_made(part: int, tmp_path: Path) -> None:
    outcomes = {seed: outcome_of(seed, tmp_path) for seed in range(PAIRS * part, PAIRS * (part + 1))}
    assert {seed: each.fault for seed, each in outcomes.items() if each.fault} == {}
    known = [each.are_equal for each in outcomes.values()]
    assert min(known.count(True), known.count(False)) > PAIRS // 5


def scalar_without_bits(value: Any) -> bytes | None:
    """Floats by their `repr`."""
    return repr(value).encode() if type(value) is float else SCALAR(value)


def scalar_of_numbers(value: Any) -> bytes | None:
    """True is 1."""
    return SCALAR(int(value)) if type(value) is bool else SCALAR(value)


SCALAR = value_digests._encode_scalar
PARTS_OF = value_digests.ValueDigests._split_value


def without(change: Any) -> Any:
    """The parts of a value, of which one does not count."""
    return lambda self, value: change(PARTS_OF(self, value), value)


DEFECTS = {
    "floats by repr": (value_digests, "_encode_scalar", scalar_without_bits),
    "true is one": (value_digests, "_encode_scalar", scalar_of_numbers),
    "keys by str": (pickle_reader, "_is_plain_key", lambda key: True),
    "kinds of lists": (pickle_reader.PickleReader, "_describe_container", lambda self, node: iter(())),
    "sixth part": (
        value_digests.ValueDigests, "_split_value",
        without(lambda parts, value: parts if not getattr(value, "setters", ()) else parts._replace(ordered=())),
    ),
    "order of lists": (
        value_digests.ValueDigests, "_split_value",
        without(lambda parts, value: parts._replace(ordered=(), unordered=[(each,) for each in parts.ordered])
                if type(value) is list else parts),
    ),
    "order of dicts": (
        value_digests.ValueDigests, "_split_value",
        without(lambda parts, value: parts._replace(ordered=[*sum(parts.unordered, ())], unordered=())
                if isinstance(value, pickle_normalizer.Dictionary) else parts),
    ),
    "storages by length": (
        pickle_reader.PickleReader, "_describe_contents", lambda self, value: str(getattr(value, "ref", None)),
    ),
    "order of arrays": (pickle_normalizer, "_to_row_major", lambda content, shape: content),
    "attributes of tensors": (
        pickle_normalizer.PickleNormalizer, "_add_attributes", lambda self, tensor, *attributes: tensor,
    ),
    "pickles in bytes": (pickle_reader.PickleReader, "_read_embedded", lambda self, data: data),
    "circles": (value_digests.ValueDigests, "_encode_cyclic", lambda self, root, waiting, parts: b"#"),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_the_comparison_is_found(defect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*DEFECTS[defect])
    inside = [Node("thing", (Node("leaf", (), each),)) for each in LEAVES]
    neighbors = [(first, second, "pickle 5") for first, second in itertools.pairwise(inside)]
    for seed, pair in enumerate([*neighbors, *[None] * (2 * PAIRS * PARTS)]):
        if outcome_of(seed, tmp_path, pair).fault is not None:
            return
    pytest.fail("no pair shows it")


def test_a_persistent_id_of_another_writer_is_compared(tmp_path: Path) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("weights", value.name) if isinstance(value, Thing) and hasattr(value, "name") else None

    found = []
    for at, name in enumerate(("a", "b", "a")):
        folder = tmp_path / str(at)
        folder.mkdir()
        with open(folder / "state.pkl", "wb") as file:
            Pickler(file).dump({"x": [Thing(name=name)]})
        found.append(read_items(folder))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("at", range(1, 30))
def test_a_pickle_that_is_cut_is_refused(at: int, tmp_path: Path) -> None:
    data = pickle.dumps({"a": [1, 2.0, "x", {"b": (None, True)}]}, 4)
    (tmp_path / "state.pkl").write_bytes(data[:-at])
    with pytest.raises(InputError, match=r"state\.pkl"):
        read_items(tmp_path)
