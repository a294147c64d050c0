"""Values of every kind that a trainer can pickle, made from a seed; each with a key of its own.

A value is a tree of `Node`s. `built` makes the object, as often as it is asked to and each time in another way that
does not matter: other orders of dicts and sets, other memory, other strides, what is shared in one is two in another.
`key_of` says what it is, without looking at the object or at a pickle: two values are equal if and only if their keys
are. A protocol may lose something, which the keys lose, too.
"""

from __future__ import annotations

import collections
import copyreg
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import operator
import pathlib
import pickle
import random
import struct
import uuid
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

Key = Hashable


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Bits(enum.Flag):
    A = 1
    B = 2


class Pair(NamedTuple):
    x: Any
    y: Any


class OtherPair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    x: Any
    y: Any = None


class Thing:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class OtherThing(Thing):
    pass


class Slots:
    __slots__ = ("a", "b")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class HasState:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __getstate__(self) -> Any:
        return (self.value,)

    def __setstate__(self, state: Any) -> None:
        (self.value,) = state


class Keywords:
    def __new__(cls, **values: Any) -> Keywords:
        made = object.__new__(cls)
        made.values = values
        return made

    values: dict[str, Any]

    def __getnewargs_ex__(self) -> Any:
        return (), self.values

    def __getstate__(self) -> Any:
        return None


class Positions:
    values: tuple[Any, ...]

    def __new__(cls, *values: Any) -> Positions:
        made = object.__new__(cls)
        made.values = values
        return made

    def __getnewargs__(self) -> Any:
        return self.values

    def __getstate__(self) -> Any:
        return None


def set_state(made: Any, state: Any) -> None:
    made.value = state


def set_other_state(made: Any, state: Any) -> None:
    made.value, made.__class__ = state, SixOthers


class SixParts:
    """Has its state set by a function, the sixth part of what `__reduce__` gives."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return type(self), (), self.value, None, None, set_state


class SixOthers(SixParts):
    def __reduce__(self) -> Any:
        return SixParts, (), self.value, None, None, set_other_state


class Called:
    """What is built by a call with arguments."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __reduce__(self) -> Any:
        return Called, self.values


class ListOf(list[Any]):
    pass


class DictOf(dict[Any, Any]):
    pass


class StringOf(str):
    pass


class IntOf(int):
    pass


class TensorOf(torch.Tensor):
    pass


class Extended:
    """Has a code in copyreg's registry."""


copyreg.add_extension(Extended.__module__, "Extended", 0x4242)
NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
MINUS_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000000))[0]


def fresh(text: str) -> str:
    """An equal string that is another object."""
    return "".join(list(text)) if len(text) > 1 else text


class Leaf(NamedTuple):
    """A value without parts.

    Attributes:
        key: What it is; a function of the protocol where one loses something.
        make: Makes it; the argument chooses what does not matter.
        hashable: It may be a key of a dict and in a set.
        protocol: The lowest that can write it.
    """

    key: Any
    make: Callable[[Random], Any]
    hashable: bool = False
    protocol: int = 0


def plain(value: Any) -> Leaf:
    """A value of Python that is as it is written; its type and `repr` are its key."""
    return Leaf(("plain", type(value).__name__, repr(value)), lambda _: value, True)


def word(value: Any) -> Leaf:
    """A string, which is another object each time; or a number that is easily taken for one."""
    return Leaf(("str", value), lambda _: fresh(value), True) if type(value) is str else plain(value)


def same(key: Key, value: Any, hashable: bool = True, protocol: int = 0) -> Leaf:
    """A value that is made once."""
    return Leaf(key, lambda _: value, hashable, protocol)


def array(values: Any, dtype: Any) -> Leaf:
    """An array, in one of the layouts that numpy has."""
    given = np.array(values, dtype)

    def make(random: Random) -> Any:
        how = random.randrange(4)
        if how == 1 and given.ndim:
            return np.asfortranarray(given)
        if how == 2 and given.ndim and given.dtype != object:
            wide = np.zeros((*given.shape[:-1], 2 * given.shape[-1]), given.dtype)
            wide[..., ::2] = given
            return wide[..., ::2]
        if how == 3 and given.dtype != object:
            copy = given.copy()
            copy.setflags(write=False)
            return copy
        return given.copy()

    native = given if given.dtype.fields else given.astype(given.dtype.newbyteorder("<"))  # as numpy loads it
    content = repr(given.tolist()) if given.dtype == object else native.tobytes()
    return Leaf(("array", str(native.dtype.descr), native.dtype.str, given.shape, content), make)


def tensor(values: Any, dtype: torch.dtype = torch.float32, **how: Any) -> Leaf:
    """A tensor, in one of the layouts that torch has."""
    given = torch.tensor(values, dtype=dtype)

    def make(random: Random) -> Any:
        made, layout = given.clone(), random.randrange(4)
        if layout == 1 and given.ndim > 1:
            made = given.t().contiguous().t()
        elif layout == 2 and given.ndim:
            made = torch.cat([given, given])[: len(given)]
        elif layout == 3 and given.ndim == 1 and len(given) > 1:
            made = torch.stack([given, given], 1)[:, 1]
        if how.get("grad"):
            made.requires_grad_()
        if how.get("parameter"):
            made = torch.nn.Parameter(made.detach(), requires_grad=how["parameter"] == "grad")
        if how.get("subclass"):
            made = made.as_subclass(TensorOf)
        if "attribute" in how:
            made.note = how["attribute"]
        return made

    data = bytes(given.reshape(-1).view(torch.uint8).numpy()) if given.numel() and given.ndim else repr(given)
    return Leaf(("tensor", str(dtype), tuple(given.shape), data, tuple(sorted(how.items()))), make, False, 2)


def storage(values: Any, dtype: torch.dtype, typed: bool) -> Leaf:
    """The storage of a tensor."""

    def make(_: Random) -> Any:
        given = torch.tensor(values, dtype=dtype)
        return given.storage() if typed else given.untyped_storage()

    content = bytes(torch.tensor(values, dtype=dtype).view(torch.uint8).numpy())
    return Leaf(("storage", str(dtype) if typed else None, content), make, False, 2)


def sparse(values: Any) -> Leaf:
    """A sparse tensor."""
    return Leaf(
        ("sparse", tuple(values)),
        lambda _: torch.sparse_coo_tensor([[0, 2]], values, (4,), check_invariants=False),
        protocol=2,
    )


def generator(seed: int) -> Any:
    """A generator of torch."""
    return torch.Generator().manual_seed(seed)


def with_attribute(value: Any) -> Any:
    """An ordered dict with an attribute."""
    made: Any = collections.OrderedDict()
    made.note = value
    return made


def nan_key(bits: int) -> Callable[[int], Key]:
    """Protocol 0 writes a float as its `repr`."""
    return lambda protocol: ("nan", bits if protocol else None)


STRUCTURED = [("a", "<i4"), ("b", "<f8")]
TEXTS = (
    "0", 0, "1", 1, "1.0", 1.0, "True", True, "None", None, "", ".", "a.b.c", "a.b", "a", "b", "1 (int)", "x" * 80,
    "x" * 79 + "y", "\ud800", "\n", "\x1b[31m", "é", "state", "[1, 2]", "list of 1", "torch.float32", "'a'", "-1", "01",
)  # fmt: skip
NUMBERS = (
    None, False, 0, 0.0, -0.0, 0j, complex(0, -0.0), True, 1, 1.0, 1 + 0j, 1 + 1j, -1, 2, 255, 256, 65536, 1 << 31,
    -(1 << 31), 1 << 63, 1 << 100, (1 << 100) + 1, 1 << 3000, 0.1, 1e300, float("inf"), float("-inf"),
)  # fmt: skip
LEAVES: tuple[Leaf, ...] = (
    *map(plain, NUMBERS),
    *map(word, TEXTS),
    *(
        Leaf(("bytes", data), lambda _, data=data: bytes(bytearray(data)), True)  # type: ignore[misc]
        for data in (b"", b"a", b"1", b"\x80\x04x.", b"\xff" * 70, b"\xff" * 69 + b"\xfe", pickle.dumps(1) + b"x.")
    ),
    *(Leaf(("bytearray", data), lambda _, data=data: bytearray(data)) for data in (b"", b"a", b"1", b"\xff" * 70)),  # type: ignore[misc]
    same(nan_key(0), float("nan"), False),
    same(nan_key(1), NAN, False),
    same(nan_key(2), MINUS_NAN, False),
    *map(plain, (decimal.Decimal("1"), decimal.Decimal("1.0"), decimal.Decimal("-0"))),
    *map(plain, (fractions.Fraction(1), fractions.Fraction(1, 2))),
    *map(plain, (dt.datetime(2020, 1, 1), dt.datetime(2020, 1, 2), dt.date(2020, 1, 1))),
    *map(plain, (dt.timedelta(1), dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc))),
    *map(plain, (range(3), range(0, 3, 2), range(4))),
    *(Leaf(("slice", stop), lambda _, stop=stop: slice(stop)) for stop in (1, 2)),  # type: ignore[misc]
    *map(plain, (pathlib.PurePosixPath("a/b"), pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("a"))),
    *map(plain, (uuid.UUID(int=1), uuid.UUID(int=2))),
    *map(plain, (Color.RED, Color.BLUE, Bits.A, Bits.A | Bits.B, Bits(0))),
    *(same(("level", each.name), each) for each in Level),
    *(same(("class", each.__qualname__), each) for each in (Color, Thing, OtherThing, int, str, dict, list)),
    same("len", len), same("operator.add", operator.add), same("torch.add", torch.nn.functional.relu),
    same("ellipsis", ...), same("not implemented", NotImplemented),
    same("string of a", StringOf("a")), same("int of 1", IntOf(1)),
    *(same(("partial", repr(args)), functools.partial(operator.add, *args), False) for args in ((1,), (2,), (1.0,))),
    same("partial by name", functools.partial(dict, a=1), False),
    same("partial by another", functools.partial(dict, b=1), False),
    *(same(("torch", str(each)), each) for each in (torch.float32, torch.float16, torch.bfloat16, torch.int8)),
    *(same(("torch", str(each)), each) for each in (torch.strided, torch.sparse_coo)),
    *(same(("device", str(each)), each) for each in map(torch.device, ("cpu", "cuda:0", "cuda:1", "meta"))),
    *(same(("size", sizes), torch.Size(sizes), True) for sizes in ((), (1,), (1, 2), (2, 1))),
    *(Leaf(("generator", seed), lambda _, seed=seed: generator(seed), False, 2) for seed in (1, 2)),  # type: ignore[misc]
    *(Leaf(("python", seed), lambda _, seed=seed: random.Random(seed).getstate(), True) for seed in (1, 2)),  # type: ignore[misc]
    *(Leaf(("Random", seed), lambda _, seed=seed: random.Random(seed), False, 2) for seed in (1, 2)),  # type: ignore[misc]
    *(Leaf(("numpy state", seed), lambda _, seed=seed: np.random.RandomState(seed).get_state()) for seed in (1, 2)),  # type: ignore[misc]
    *(Leaf(("RandomState", seed), lambda _, seed=seed: np.random.RandomState(seed)) for seed in (1, 2)),  # type: ignore[misc]
    *(Leaf(("Generator", seed), lambda _, seed=seed: np.random.default_rng(seed)) for seed in (1, 2)),  # type: ignore[misc]
    *(Leaf(("Philox", seed), lambda _, seed=seed: np.random.Philox(seed)) for seed in (1, 2)),  # type: ignore[misc]
    *(array([0, 1, 1, 0], dtype) for dtype in ("?", "i1", "u1", "<i2", "<i4", "<i8", "<u8", "<f2", "<f4", "<f8")),
    *(array([0, 1, 1, 0], dtype) for dtype in (">i4", ">f8", "<c8", "<c16", "S1", "S2", "U1")),
    *(array([first, b"ba"], "V2") for first in (b"ab", b"ac")),
    *(array([[0, 1, 2], [3, 4, 5]], dtype) for dtype in ("<i8", ">i8", "<f4")),
    *(array(values, "<i8") for values in ([[0, 1], [2, 3], [4, 5]], [], [[]], 3, [3], [[[1]]])),
    *(array(values, "<f8") for values in ([0.0], [-0.0], [float("nan")], [NAN])),
    *(array([(1, value)], STRUCTURED) for value in (2.0, 3.0)),
    array([(1, 2.0)], [("a", "<i4"), ("c", "<f8")]),
    array([1, "a"], object), array([1, "b"], object), array([[1, 2], [3, 4]], object),
    *(array(["2020-01-01"], f"M8[{unit}]") for unit in ("D", "s")),
    *(same(("scalar", kind.__name__), kind(1), False) for kind in (np.int8, np.int64, np.float32, np.float64)),
    *(same(("scalar", kind.__name__), kind(1), False) for kind in (np.int32, np.bool_, np.complex64, np.str_)),
    same(("scalar", "2"), np.float64(2)),
    *(same(("dtype", each), np.dtype(each)) for each in ("<f4", "<f8", ">f8", "<i4")),
    same("dtype of parts", np.dtype(STRUCTURED)),
    *(tensor([0, 1, 1, 0], dtype) for dtype in (torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64)),
    *(tensor([0, 1, 1, 0], dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    *(tensor([0, 1, 1, 0], dtype) for dtype in (torch.complex64, torch.uint16, torch.float8_e4m3fn)),
    *(tensor(values) for values in ([[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [], [[]], 1.0, [1.0], -0.0, 0.0)),
    *(tensor(value, torch.float64) for value in (1.0, float("nan"))),
    Leaf(("tensor", "nan"), lambda _: torch.tensor(NAN, dtype=torch.float64), protocol=2),
    tensor(True, torch.bool), tensor(False, torch.bool), tensor(1, torch.int64), tensor(2, torch.int64),
    tensor([1, 2], grad=True), tensor([1, 2]), tensor([1, 3]), tensor([1, 2], parameter="grad"),
    tensor([1, 2], parameter="frozen"), tensor([1, 2], subclass=True),
    tensor([1, 2], attribute=1), tensor([1, 2], attribute=2), tensor([1, 2], attribute="1"),
    tensor([1, 2], parameter="grad", attribute=1), tensor([1, 2], subclass=True, attribute=1),
    *(storage(values, dtype, typed) for values in ([1, 2], [1, 3]) for dtype in (torch.float32, torch.int64)
      for typed in (True, False)),
    sparse([1.0, 2.0]), sparse([1.0, 3.0]),
    *(Leaf(("with attribute", value), lambda _, value=value: with_attribute(value)) for value in (1, 2)),  # type: ignore[misc]
    *(Leaf(("counter", items), lambda _, items=items: collections.Counter(items)) for items in ("ab", "aab", "")),  # type: ignore[misc]
    Leaf(("object",), lambda _: Extended(), False, 2),
    *(same(("error", repr(each)), each, False) for each in (ValueError(1), ValueError(2), KeyError(1))),
)  # fmt: skip
_USUAL = {*(("str", text) for text in ("a", "b", "a.b", "state", "0", "1")), *(("plain", "int", each) for each in "01")}
USUAL_KEYS = [*{each.key: each for each in LEAVES if not callable(each.key) and each.key in _USUAL}.values()]
HASHABLE = tuple(each for each in LEAVES if each.hashable)


@dataclass(frozen=True)
class Node:
    """A value with parts.

    Attributes:
        kind: How it is built; "leaf" of one without parts.
        parts: In order; keys and values in turn for those with keys.
        detail: What else there is: the leaf itself, a name, a length.
    """

    kind: str
    parts: tuple[Node, ...] = ()
    detail: Any = None


ORDERED = (
    "list", "tuple", "deque", "list of", "pair", "other pair", "record", "thing", "other thing", "slots", "has state",
    "keywords", "positions", "six parts", "six others", "called", "partial", "pickled", "circle", "list circle",
)  # fmt: skip
KEYED = ("dict", "ordered", "default", "default of list", "dict of")
GROUPS = ("set", "frozenset")
# Kinds that take the same parts, so that one may be put in the place of another.
ALIKE = (
    ("list", "tuple", "list of", "called", "positions", "deque"),
    ("pair", "other pair", "record", "slots"),
    ("thing", "other thing", "keywords"),
    ("has state", "six parts", "six others", "partial", "pickled", "circle", "list circle"),
    ("dict", "ordered", "default", "default of list", "dict of"),
    GROUPS,
)
_LENGTHS = {
    "pair": 2, "other pair": 2, "record": 2, "slots": 2, "has state": 1, "six parts": 1, "six others": 1, "partial": 1,
    "pickled": 1, "circle": 1, "list circle": 1,
}  # fmt: skip
_LOWEST = {"slots": 2, "keywords": 2, "positions": 2}


def generated(random: Random, depth: int = 3, hashable: bool = False) -> Node:
    """A value of any kind."""
    if depth == 0 or random.random() < 0.35:
        return Node("leaf", (), random.choice(HASHABLE if hashable else LEAVES))
    if hashable:
        kind = random.choice(("tuple", "pair", "frozenset"))
    else:
        kind = random.choice((*ORDERED, *KEYED, *KEYED, *GROUPS))
    if kind in KEYED:
        return Node(kind, _keyed(random, depth))
    if kind in GROUPS:
        return Node(kind, _distinct([generated(random, depth - 2 if depth > 1 else 0, True) for _ in range(3)]))
    count = _LENGTHS.get(kind, random.randrange(4))
    parts = tuple(generated(random, depth - 1, hashable) for _ in range(count))
    detail = random.choice((None, 5)) if kind == "deque" else None
    return Node(kind, parts, detail)


def _keyed(random: Random, depth: int) -> tuple[Node, ...]:
    keys = _distinct([generated(random, random.choice((0, 0, 0, 1)), True) for _ in range(random.randrange(4))])
    if random.random() < 0.5:  # as most are
        keys = tuple(Node("leaf", (), each) for each in random.sample(USUAL_KEYS, random.randrange(4)))
    return tuple(each for key in keys for each in (key, generated(random, depth - 1)))


def _distinct(nodes: list[Node]) -> tuple[Node, ...]:
    """Those that are no equal keys to Python, as 1 and True are."""
    found: dict[Any, Node] = {}
    for node in nodes:
        found.setdefault(built(node, Random(0)), node)
    return tuple(found.values())


def lowest_protocol(node: Node) -> int:
    """The lowest protocol that can write a value."""
    own = node.detail.protocol if node.kind == "leaf" else _LOWEST.get(node.kind, 0)
    return max([own, *map(lowest_protocol, node.parts)])


def key_of(node: Node, protocol: int) -> Key:
    """What a value is."""
    if node.kind == "leaf":
        key = node.detail.key
        return key(protocol) if callable(key) else key
    parts = tuple(key_of(each, protocol) for each in node.parts)
    if node.kind == "pickled":  # by a protocol of its own
        return ("pickled", key_of(node.parts[0], 4))
    if node.kind in KEYED:
        kind = "dict" if node.kind == "ordered" else node.kind
        return (kind, frozenset(zip(parts[::2], parts[1::2], strict=True)))
    if node.kind in GROUPS:
        return (node.kind, frozenset(parts))
    if node.kind == "deque":
        return ("deque", node.detail, parts)
    return (node.kind, parts)


def built(node: Node, random: Random) -> Any:
    """An object that is the value; another each time."""
    if node.kind == "leaf":
        return node.detail.make(random)
    if node.kind in KEYED:
        return _built_with_keys(node, random)
    known: dict[int, Any] = {}
    parts = []
    for part in node.parts:
        if id(part) in known and random.random() < 0.5:
            parts.append(known[id(part)])  # one object twice
        else:
            known[id(part)] = built(part, random)
            parts.append(known[id(part)])
    if node.kind in GROUPS:
        random.shuffle(parts)
        return set(parts) if node.kind == "set" else frozenset(parts)
    return _BUILD[node.kind](parts, node)


def _built_with_keys(node: Node, random: Random) -> Any:
    pairs = [(built(key, random), built(value, random)) for key, value in zip(*[iter(node.parts)] * 2, strict=True)]
    random.shuffle(pairs)
    if node.kind == "default":
        return collections.defaultdict(int, pairs)
    if node.kind == "default of list":
        return collections.defaultdict(list, pairs)
    return {"dict": dict, "ordered": collections.OrderedDict, "dict of": DictOf}[node.kind](pairs)


def _circle(parts: list[Any]) -> Any:
    made = Thing(value=parts[0])
    made.me = made
    return made


def _list_circle(parts: list[Any]) -> Any:
    made = [*parts]
    made.append({"up": made})
    return made


_BUILD: dict[str, Callable[[list[Any], Node], Any]] = {
    "list": lambda parts, _: parts,
    "tuple": lambda parts, _: tuple(parts),
    "deque": lambda parts, node: collections.deque(parts, node.detail),
    "list of": lambda parts, _: ListOf(parts),
    "pair": lambda parts, _: Pair(*parts),
    "other pair": lambda parts, _: OtherPair(*parts),
    "record": lambda parts, _: Record(*parts),
    "thing": lambda parts, _: Thing(**{f"x{at}": part for at, part in enumerate(parts)}),
    "other thing": lambda parts, _: OtherThing(**{f"x{at}": part for at, part in enumerate(parts)}),
    "slots": lambda parts, _: Slots(*parts),
    "has state": lambda parts, _: HasState(*parts),
    "keywords": lambda parts, _: Keywords(**{f"x{at}": part for at, part in enumerate(parts)}),
    "positions": lambda parts, _: Positions(*parts),
    "six parts": lambda parts, _: SixParts(parts[0]),
    "six others": lambda parts, _: SixOthers(parts[0]),
    "called": lambda parts, _: Called(*parts),
    "partial": lambda parts, _: functools.partial(Called, *parts),
    "pickled": lambda parts, _: pickle.dumps(parts[0], 4),
    "circle": lambda parts, _: _circle(parts),
    "list circle": lambda parts, _: _list_circle(parts),
}


def changed(node: Node, random: Random) -> Node:
    """A value that differs in one place: another leaf, another kind, a part more, less, or at another place."""
    if node.kind == "leaf":
        return _other_leaf(node, random)
    choice = random.random()
    if node.parts and choice < 0.6:
        step = 2 if node.kind in KEYED else 1
        at = random.randrange(len(node.parts))
        if node.kind in GROUPS or (step == 2 and at % 2 == 0):
            key = node.parts[at]
            new = _with(node.parts, at, _other_leaf(key, random) if key.kind == "leaf" else generated(random, 0, True))
            hashed = new if step == 1 else new[::2]
            return Node(node.kind, new, node.detail) if len(_distinct([*hashed])) == len(hashed) else node
        if _must_be_hashable(node.parts[at]):
            return Node(node.kind, _with(node.parts, at, generated(random, 0, True)), node.detail)
        return Node(node.kind, _with(node.parts, at, changed(node.parts[at], random)), node.detail)
    if choice < 0.8:
        alike = next(each for each in ALIKE if node.kind in each)
        kind = random.choice(alike)
        return Node(kind, node.parts, node.detail if kind == node.kind else None)
    if len(node.parts) > 1 and node.kind in ORDERED:
        return Node(node.kind, (*node.parts[1:], node.parts[0]), node.detail)
    if node.kind not in _LENGTHS and node.parts:
        return Node(node.kind, node.parts[: -2 if node.kind in KEYED else -1], node.detail)
    if node.kind == "deque":
        return Node(node.kind, node.parts, 5 if node.detail is None else None)
    return node


def _other_leaf(node: Node, random: Random) -> Node:
    """Another leaf, half of the time one that is listed beside it, because it is easily taken for it."""
    leaves = HASHABLE if node.detail.hashable else LEAVES
    at = next((at for at, each in enumerate(leaves) if each is node.detail), None)
    if at is None or random.random() < 0.5:
        return Node("leaf", (), random.choice(leaves))
    return Node("leaf", (), leaves[(at + random.choice((-2, -1, 1, 2))) % len(leaves)])


def _must_be_hashable(node: Node) -> bool:
    """True of a value that may be a part of a key."""
    if node.kind == "leaf":
        return bool(node.detail.hashable)
    return node.kind in ("tuple", "pair", "frozenset")


def _with(parts: tuple[Node, ...], at: int, part: Node) -> tuple[Node, ...]:
    return (*parts[:at], part, *parts[at + 1 :])


# ------------------------------------------------------------------------------------------------------------- files

PROTOCOLS = (0, 1, 2, 3, 4, 5)
FORMATS = (*(f"pickle {protocol}" for protocol in PROTOCOLS), "zip", "legacy", "dcp")


def protocol_of(form: str) -> int:
    """The protocol of a format; torch writes protocol 2."""
    return int(form.split()[1]) if form.startswith("pickle") else 2


def write(value: Any, folder: Path, form: str) -> Path:
    """Writes a value as a trainer does; gives what is to be compared."""
    folder.mkdir(exist_ok=True)
    path = folder / ("state.pkl" if form.startswith("pickle") else "state.pt")
    if form.startswith("pickle"):
        path.write_bytes(pickle.dumps(value, protocol_of(form)))
    elif form == "dcp":
        import torch.distributed.checkpoint as dcp

        dcp.save({"object": Thing(value=value)}, checkpoint_id=folder, no_dist=True)
        return folder
    else:
        torch.save(value, path, _use_new_zipfile_serialization=form == "zip")
    return path


def reloaded(value: Any, form: str) -> Any:
    """The value after it was saved and loaded again, as by a trainer that is resumed."""
    if form.startswith("pickle"):
        return pickle.loads(pickle.dumps(value, protocol_of(form)))
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)
