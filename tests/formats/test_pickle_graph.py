"""The interpreter of pickles that keeps everything and runs nothing: against CPython's own, and against damage."""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
import time
from collections import OrderedDict, deque
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptx.errors import InputError
from ckptx.formats.torch_archive.pickle_graph import read_graph
from ckptx.formats.torch_archive.pickle_machine import CallResult, GlobalName, PickledDict, PickledSet
from tests.formats.test_pickle_budgets import DEAR, PLACES

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 200), 1 << 200), st.floats(allow_nan=False), st.text(), st.binary()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=4),
        st.sets(st.one_of(st.text(), st.integers()), max_size=4),
        st.frozensets(st.integers(), max_size=4),
    ),
    max_leaves=20,
)


def plain(value: Any) -> Any:
    """A graph of plain values as Python has them."""
    if isinstance(value, PickledDict):
        return {key: plain(item) for key, item in value.items}
    if isinstance(value, PickledSet):
        return (set if value.kind == "set" else frozenset)(map(plain, value.items))
    if isinstance(value, CallResult):
        assert isinstance(value.function, GlobalName)
        arguments = [*map(plain, value.arguments)]
        if value.function == GlobalName("_codecs", "encode"):
            return arguments[0].encode(arguments[1])
        assert value.function.module == "builtins" and value.function.name in ("set", "frozenset", "bytes")
        return {"set": set, "frozenset": frozenset, "bytes": bytes}[value.function.name](*arguments)
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value


@given(VALUES, st.integers(0, 5))
def test_plain_values_are_those_that_pickle_reads(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    graph = read_graph(data + b"more", "x")
    assert graph.end == len(data) and graph.dropped == ()
    assert plain(graph.value) == pickle.loads(data)


SAMPLES = [
    {"a": [1, 2.5, "x", b"y", None, True, {3, 4}, (5,), bytearray(b"z"), 1 << 80]},
    OrderedDict(a=deque([1, 2], 3), b=partial(int, "3", base=4), c=datetime(2020, 1, 1)),
    np.arange(6).reshape(2, 3),
    np.random.default_rng(1),
]


@given(st.data())
def test_damage_never_escapes_as_another_error(data: st.DataObject) -> None:
    sample = bytearray(pickle.dumps(data.draw(st.sampled_from(SAMPLES)), data.draw(st.integers(0, 5))))
    for _ in range(data.draw(st.integers(1, 4))):
        sample[data.draw(st.integers(0, len(sample) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_graph(bytes(sample[: data.draw(st.integers(0, len(sample)))]), "x")
    except InputError as error:
        assert "\n" not in str(error)


@given(st.binary(max_size=60))
def test_random_opcodes_never_escape_as_another_error(data: bytes) -> None:
    try:
        read_graph(data + b".", "x")
    except InputError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("protocol", range(6))
def test_every_cut_is_refused(protocol: int) -> None:
    data = pickle.dumps(SAMPLES[0], protocol)
    for end in range(len(data)):
        with pytest.raises(InputError, match="ends before its end mark"):
            read_graph(data[:end], "x")


class Runs:
    """Runs a command where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_imported_or_run(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps([Runs(tmp_path / "mark")], protocol)
    named = data.replace(b"system", b"sysetm").replace(b"posix", b"posxi")  # which nobody could import
    for each in (data, named):
        assert isinstance(read_graph(each, "x").value[0], CallResult)
    assert not (tmp_path / "mark").exists()


_CHILD = """
import resource, sys, time
from pathlib import Path
from ckptx.errors import CkptxError
from ckptx.robustness_suite.stored_items import read_items
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
path = Path(sys.argv[1]) / "state.pkl"
for line in sys.stdin.buffer:
    path.write_bytes(bytes.fromhex(line.decode()))
    began = time.process_time()
    try:
        read_items(path)
    except CkptxError as error:
        assert error.exit_code in (3, 4) and len(str(error)) < 600, str(error)[:500]
    print(round(time.process_time() - began, 1), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_what_is_dear_to_look_at_takes_seconds(place: str, tmp_path: Path) -> None:
    """Shared values without end, depth, and long strings, wherever a reader may look at them."""
    cases = [b"\x80\x04" + PLACES[place](value) + b"." for value in DEAR.values()]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path)],
        input=b"\n".join(data.hex().encode() for data in cases),
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.returncode, done.stdout[-300:], done.stderr[-2000:])
    assert max(map(float, done.stdout.split())) < 30


@pytest.mark.slow
def test_calls_inside_calls_without_end(tmp_path: Path) -> None:
    from ckptx.robustness_suite.stored_items import read_items

    depth = 50_000
    for name in (b"torch._utils\n_rebuild_parameter\n", b"builtins\nbytearray\n", b"collections\nOrderedDict\n"):
        middle = b"c" + name
        (tmp_path / "state.pkl").write_bytes(b"\x80\x02" + middle * depth + b"N" + b"\x85R" * depth + b".")
        assert read_items(tmp_path)
    began = time.process_time()
    (tmp_path / "state.pkl").write_bytes(b"\x80\x02" + b"]" * 3_000_000 + b".")
    with pytest.raises(InputError, match="containers"):
        read_items(tmp_path)
    assert time.process_time() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 << 20
