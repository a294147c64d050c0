"""Pickles that are small and would take for ever, or all memory, or the C stack: each ends at once, refused by name.

The cases are put together from parts: something that is dear to look at, and a place where a reader would look at it.
Every case runs in a process of its own, as the old answer to some was a crash.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import product

import pytest

from ckptx.errors import InputError
from ckptx.formats.torch_archive.unpickle import load, load_torch

MODULUS = (1 << 61) - 1  # of the hash of a number


def number(value: int) -> bytes:
    data = pickle.encode_long(value)
    return b"\x8a%c" % len(data) + data


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


# Each leaves one value on the stack.
DEAR = {
    "itself twice, 200 times over": b"K\x01\x85q\x010" + b"h\x01h\x01\x86q\x010" * 200 + b"h\x01",
    "itself three times, 60 times over": b"K\x01\x85q\x010" + b"h\x01h\x01h\x01\x87q\x010" * 60 + b"h\x01",
    "a list of itself twice": b"](K\x01eq\x010" + b"](h\x01h\x01eq\x010" * 60 + b"h\x01\x85",
    "nested 300,000 deep": b")" + b"\x85" * 300_000,
    "lists nested 300,000 deep": b"]" * 300_000 + b"a" * 299_999 + b"\x85",
    "a text of 5 MB": text("x" * 5_000_000),
}
# Each puts it where something might hash, compare, print or copy it.
PLACES: dict[str, Callable[[bytes], bytes]] = {
    "value": lambda value: value,
    "key": lambda value: b"}" + value + b"Ns",
    "keys": lambda value: b"}(" + value + b"N" + value + b"Nu",
    "member of a set": lambda value: b"\x8f(" + value + b"\x90",
    "member of a frozen set": lambda value: b"(" + value + b"\x91",
    "key of an ordered dict": lambda value: b"ccollections\nOrderedDict\n)R" + value + b"Ns",
    "pair of an ordered dict": lambda value: b"ccollections\nOrderedDict\n]" + value + b"N\x86a\x85R",
    "attribute": lambda value: b"ccollections\nOrderedDict\n)R}" + text("a") + value + b"sb",
    "size": lambda value: b"ctorch\nSize\n" + value + b"\x85R",
    "layout": lambda value: b"ctorch.serialization\n_get_layout\n" + value + b"\x85R",
    "storage": lambda value: value + b"Q",
    "key of a storage": lambda value: text("storage") + b"ctorch\nFloatStorage\n" + value + b"\x87Q",
    "shape": lambda value: (
        b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
        + b"K\x01tQK\0" + value + value + b"\x89}tR"
    ),
    "flags": lambda value: (
        b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
        + b"K\x01tQK\0))\x89N}" + value + b"\x88stR"
    ),
    "dtype": lambda value: b"ctorch._utils\n_rebuild_tensor_v3\n(NK\0))\x89N" + value + b"tR",
    "subclass": lambda value: b"ctorch._tensor\n_rebuild_from_type_v2\n(" + value + value + value + value + b"tR",
}  # fmt: skip

_CHILD = """
import sys, time
from ckptx.errors import CkptxError
from ckptx.formats.dcp.metadata import parse_metadata
from ckptx.formats.torch_archive.archive import locate_tensor
from ckptx.formats.torch_archive.unpickle import load_torch
import resource
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
for line in sys.stdin.buffer:
    data = bytes.fromhex(line.decode())
    began = time.monotonic()
    for read in (load_torch, parse_metadata):
        try:
            read(data, "x")
        except CkptxError as error:
            assert error.exit_code in (3, 4) and len(str(error)) < 500, str(error)[:500]
    print(round(time.monotonic() - began, 1), flush=True)
"""


def seconds(cases: list[bytes]) -> list[float]:
    """How long each takes, in one process that must survive them all."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=b"\n".join(data.hex().encode() for data in cases),
        capture_output=True,
        timeout=100,
    )
    assert done.returncode == 0, (done.returncode, done.stdout[-300:], done.stderr[-2000:])
    return [float(line) for line in done.stdout.split()]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_dear_to_look_at_is_not_looked_at(place: str) -> None:
    found = seconds([b"\x80\x04" + PLACES[place](value) + b"." for value in DEAR.values()])
    assert len(found) == len(DEAR)
    assert max(found) < 10, dict(zip(DEAR, found, strict=True))


def test_numbers_whose_hashes_collide_are_refused() -> None:
    colliding = b"".join(number(1 + i * MODULUS) + b"N" for i in range(1, 40_000))
    tuples = b"".join(number(i * MODULUS) + b"K\x01\x86N" for i in range(1, 4))
    assert max(seconds([b"\x80\x02}(" + colliding + b"u.", b"\x80\x02}(" + tuples + b"u."])) < 10
    with pytest.raises(InputError, match="damaged pickle"):
        load(b"\x80\x02}(" + colliding + b"u.", {}, "x")
    with pytest.raises(InputError, match="a tuple as a dict key"):
        load(b"\x80\x02}(" + tuples + b"u.", {}, "x")


def in_the_way(size: int, many: int) -> list[int]:
    """Numbers that lie where a dict of `size` places looks for the number `size`, and then that number again and again.

    CPython looks at `hash % size`, and goes on at 5 times that place + 1 + what is left of the hash, shifted by 5 bits.
    """
    place, rest, path = 0, size, []
    while len(path) < many:
        path.append(place)
        rest >>= 5
        place = (place * 5 + rest + 1) % size
    return [*dict.fromkeys(path), *[size] * many]


@pytest.mark.parametrize("size", [1 << 15, 1 << 16, 1 << 17])
def test_numbers_that_lie_in_the_way_cost_what_others_do(size: int) -> None:
    many = size // 3
    chosen, others = in_the_way(size, many), range(2 * many)
    taken = []
    for keys in (others, chosen):
        data = b"\x80\x02}(" + b"".join(number(key) + b"N" for key in keys) + b"u."
        began = time.process_time()
        with suppress(InputError):
            load(data, {}, "x")
        taken.append(time.process_time() - began)
    assert taken[1] < 20 * taken[0] + 0.5
    with pytest.raises(InputError, match=rf"duplicate dict key {size}\)"):
        load(data, {}, "x")


def test_only_a_small_dict_has_large_numbers() -> None:
    with pytest.raises(InputError, match="more than 1000 keys and large numbers among them"):
        load(pickled_keys(range(1 << 61, (1 << 61) + 1100)), {}, "x")


def pickled_keys(keys: Iterable[int]) -> bytes:
    return pickle.dumps(dict.fromkeys(keys), 2)


@pytest.mark.parametrize("keys", [range(100_000), range(1 << 62, (1 << 62) + 900), range(-5, 1 << 12)])
def test_numbers_that_writers_use_as_keys_pass(keys: range) -> None:
    assert list(load(pickled_keys(keys), {}, "x")) == list(keys)


@pytest.mark.parametrize("opcode", [b"}", b"]", b"\x8f"])
def test_a_byte_does_not_become_seventy(opcode: bytes) -> None:
    with pytest.raises(InputError, match=r"5,000,0\d\d containers in"):
        load(b"\x80\x04](" + opcode * 5_000_000 + b"e.", {}, "x")


@pytest.mark.parametrize("value", [0, 255, 1 << 31, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1])
def test_numbers_of_64_bits_pass(value: int) -> None:
    assert load(pickle.dumps({"a": value}, 2), {}, "x") == {"a": value}


@pytest.mark.parametrize("value", [1 << 64, -(1 << 64), 1 << 2000])
def test_longer_numbers_do_not(value: int) -> None:
    with pytest.raises(InputError, match="number of"):
        load(pickle.dumps({"a": value}, 2), {}, "x")


def test_dicts_and_sets_are_found_wherever_their_opcode_could_hide() -> None:
    """The byte of an opcode may be an argument, a number, or a letter; only the opcode is one."""
    hiding = [0x7D, 0x8F, 0x91, 0x7D7D, 0x7D7D7D7D, 0x8F8F8F8F, -0x7D7D, 0x7D7D7D7D7D7D7D]
    for protocol, value in product((2, 3, 4, 5), hiding):
        tree = {"}": value, "a": [value, {"\x7d": -value}, (value,)], "b": "}}", "c": float(value)}
        found = load(pickle.dumps(tree, protocol), {}, "x")
        assert found == tree
    many = [[{} for _ in range(600)], "}"]  # so many memo numbers that one of them is the byte
    assert load(pickle.dumps(many, 4), {}, "x") == many
    assert load(pickle.dumps(many, 2), {}, "x") == many
    assert list(load(pickle.dumps({"a", "}"}, 4), {}, "x")) in (["a", "}"], ["}", "a"])
    assert sorted(load(pickle.dumps(frozenset({"a", "}"}), 4), {}, "x")) == ["a", "}"]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (b"(" + b"K\x01" * 65 + b"t", "wrong type"),
        (number(1 << 40) * 2 + b"\x86", "elements"),
        (b"K\0" + number((1 << 63) - 1) * 2 + b"\x87", "elements"),
    ],
)
def test_shapes_that_no_tensor_has(sizes: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_torch(b"\x80\x02" + PLACES["shape"](sizes) + b".", "x")
