"""The unpickler: what it lets through, what it refuses, and that nothing a pickle does can hurt."""

from __future__ import annotations

import gc
import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.errors import CkptxError, InputError
from ckptx.formats.torch_archive.unpickle import (
    StorageRef,
    Symbol,
    TensorRef,
    UnsupportedObject,
    _Peekable,
    load,
    load_torch,
)
from tests.formats.stock_goldens import GOLDENS


def data_pkl(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as archive:
        return archive.read("archive/data.pkl")


def test_plain_values_pass() -> None:
    value = {"a": [1, 2.5, None, True], "b": ("y" * 300, -7, 1 << 40), "c": {3: "d"}}
    assert load(pickle.dumps(b"bytes", 4), {}, "x") == b"bytes"
    for protocol in (2, 3, 4, 5):
        assert load(pickle.dumps(value, protocol), {}, "x") == value


def test_a_tensor_becomes_a_reference() -> None:
    base = torch.zeros(6, 4, dtype=torch.bfloat16)
    tree = load_torch(data_pkl({"w": base[1:].t(), "p": torch.nn.Parameter(base)}), "x")
    storage = StorageRef("0", DTYPES_BY_NAME["BF16"], 24)
    assert tree["w"] == TensorRef(storage, DTYPES_BY_NAME["BF16"], 4, (4, 5), (1, 4), ())
    assert tree["p"] == TensorRef(storage, DTYPES_BY_NAME["BF16"], 0, (6, 4), (4, 1), ())


def test_an_untyped_storage_counts_bytes() -> None:
    tree = load_torch(data_pkl(torch.zeros(3, dtype=torch.uint16)), "x")
    assert tree == TensorRef(StorageRef("0", None, 6), DTYPES_BY_NAME["U16"], 0, (3,), (1,), ())
    assert tree.storage.nbytes == 6


def test_attributes_of_tensors_and_state_dicts_are_dropped() -> None:
    tensor = torch.zeros(2)
    tensor.note = "x"  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.note = "y"  # type: ignore[attr-defined]
    tree = load_torch(data_pkl({"t": tensor, "p": parameter, "m": torch.nn.Linear(1, 1).state_dict()}), "x")
    assert [tree[name].shape for name in "tp"] == [(2,), (2,)]
    assert list(tree["m"]) == ["weight", "bias"]


def test_a_view_flag_is_kept() -> None:
    assert load_torch(data_pkl(torch.zeros(2, dtype=torch.complex64).conj()), "x").flags == ("conj",)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse tensor"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized tensor"),
        (lambda: torch.ones(2, device="meta"), "meta tensor without bytes"),
    ],
)
def test_other_layouts_are_named(make: Callable[[], torch.Tensor], kind: str) -> None:
    assert load_torch(data_pkl(make()), "x") == UnsupportedObject(kind)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_named_in_a_pickle_runs(protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"x: refers to posix\.mkdir.*nothing was executed"):
        load(pickle.dumps(Evil(), protocol), {}, "x")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", [b"builtins\neval", b"os\nsystem", b"torch\nload", b"torch._utils\nos.system"])
def test_globals_are_refused_by_name(name: bytes) -> None:
    with pytest.raises(InputError, match="which is not allowed in a checkpoint"):
        load_torch(b"\x80\x02c" + name + b"\n.", "x")


def test_the_stand_ins_cannot_be_changed() -> None:
    attacks = [
        b"ccollections\nOrderedDict\nN}X\x04\0\0\0itemsNs\x86b.",
        b"ctorch._utils\n_rebuild_tensor_v2\nN}X\x09\0\0\0_functionNs\x86b.",
        b"ctorch\nFloatStorage\nN}X\x04\0\0\0nameNs\x86b.",
        b"ctorch\nSize\nN}X\x04\0\0\0nameNs\x86b.",
        b"ctorch\nbfloat16\n}X\x04\0\0\0nameNsb.",
    ]
    for attack in attacks:
        with pytest.raises(InputError, match="damaged pickle"):
            load_torch(b"\x80\x02" + attack, "x")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x02N",
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # a memo index that would take 32 GiB
        b"\x80\x02Np999999999\n.",
        b"\x80\x02X\xff\xff\xff\xff.",
        b"\x80\x02B\xff\xff\xff\x7f.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x0f.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\x00\x00.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x02\x8a\xff.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
        b"\x80\x02j\xff\xff\xff\xff.",
        b"\x80\x02\x82\x01.",  # extension registry
        b"\x80\x02(ios\nsystem\n.",
        b"\x80\x02N2\x86.",
        b"I1\n.",
        b"\x80\x02ctorch",
        b"\x80\xff.",
        b"\x80\x02(NNt",
        b"\x80\x02]NNsN.",
        b"\x80\x02}]Ns.",
        b"\x80\x02Q.",
        b"\x80\x02NQ.",
    ],
)
def test_damaged_pickles_are_input_errors(data: bytes) -> None:
    with pytest.raises(InputError):
        load_torch(data, "x")
    with pytest.raises(InputError):
        load(data, {}, "x")


def test_deep_nesting_does_not_recurse() -> None:
    depth = 200_000
    assert isinstance(load(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".", {}, "x"), list)
    assert isinstance(load(b"\x80\x02)" + b"\x85" * depth + b".", {}, "x"), tuple)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        (b"K\0K\2\x85K\1\x85", None),
        (b"K\0K\2\x85K\1K\1\x86", "1 dims and 2 strides"),
        (b"J\xff\xff\xff\xffK\2\x85K\1\x85", "wrong type"),
        (b"NK\2\x85K\1\x85", "wrong type"),
        (b"K\0N\x85K\1\x85", "wrong type"),
        (b"K\0K\2K\1", "wrong type"),
    ],
)
def test_senseless_tensors_are_refused(numbers: bytes, reason: str | None) -> None:
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0000X\3\0\0\0cpuK\2tQ"
    data = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + numbers + b"\x89NtR."
    if reason is None:
        assert load_torch(data, "x").shape == (2,)
    else:
        with pytest.raises(InputError, match=reason):
            load_torch(data, "x")


def test_an_unknown_dtype_is_a_symbol() -> None:
    assert load(b"\x80\x02ctorch\nfloat6_e9\n.", {}, "x") == Symbol("torch.float6_e9")


@pytest.mark.parametrize("data", [pickle.dumps([1]), b"\x80\x02Q."])
def test_garbage_collection_is_restored(data: bytes) -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        with suppress(InputError):
            load(data, {}, "x")
        assert gc.isenabled() is enabled
    gc.enable()


SAMPLES = [
    data_pkl(OrderedDict(w=torch.zeros(3, 4), s=torch.zeros(2, dtype=torch.float8_e5m2), n={"k": [1, 2.0, "x"]})),
    pickle.dumps({str(i): (i, [None, b"x"]) for i in range(300)}, 2),
]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damage_never_escapes_as_another_error(data: st.DataObject) -> None:
    sample = bytearray(data.draw(st.sampled_from(SAMPLES)))
    for _ in range(data.draw(st.integers(1, 4))):
        sample[data.draw(st.integers(0, len(sample) - 1))] = data.draw(st.integers(0, 255))
    with suppress(CkptxError):
        load_torch(bytes(sample), "x")


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_never_escape_as_another_error(data: bytes) -> None:
    with suppress(CkptxError):
        load_torch(b"\x80\x02" + data + b".", "x")


def test_every_cut_of_a_pickle_is_refused() -> None:
    sample = SAMPLES[0]
    for size in range(len(sample)):
        with pytest.raises(InputError):
            load_torch(sample[:size], "x")


def test_goldens_exist() -> None:
    assert len(list(GOLDENS.glob("*/.metadata"))) >= 10


def test_reading_ahead_takes_nothing_away() -> None:
    data = _Peekable(b"abcd")
    assert data.read(1) == b"a"
    assert (data.peek(2), data.peek(1 << 40)) == (b"bc", b"bcd")
    assert data.read() == b"bcd"
