"""`verify` of bytes: where the first difference is said to be, for every dtype; casts, ties, threads, refusals."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptx
from ckptx.api.verify import verify
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import Region
from ckptx.comparison import contents as bits
from ckptx.errors import InputError, UsageError
from ckptx.transfer.digest import LEAF_NBYTES
from ckptx.wording import first_of
from tests.support.checkpoint_writers import (
    LLAMA,
    Value,
    array,
    llama,
    part,
    value,
    write_dcp,
    write_hf,
    write_safetensors,
)


def located(dtype: str, shape: tuple[int, ...], a: bytes, b: bytes, block: int = 0) -> dict[str, Any]:
    entry = TensorEntry("x", DTYPES_BY_NAME[dtype], shape, ())
    pair = bits._Pair("x", entry, entry, entry.dtype)
    return bits._locate_difference(pair, block, bytearray(a), bytearray(b))


def elements_of(dtype: str, count: int, data: bytes) -> list[int]:
    """Each element as a whole number: the bytes are one long number, the first element in its lowest bits."""
    number, width = int.from_bytes(data, "little"), DTYPES_BY_NAME[dtype].bits
    return [number >> at * width & (1 << width) - 1 for at in range(count)]


# ------------------------------------------------------------------------------------------- where a difference is


@st.composite
def spoiled(draw: st.DrawFn) -> tuple[str, tuple[int, ...], bytes, bytes]:
    """A dtype, a shape, and the bytes of two tensors that differ in some bits."""
    dtype = draw(st.sampled_from(sorted(DTYPES_BY_NAME)))
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    width = DTYPES_BY_NAME[dtype].bits
    nbytes = DTYPES_BY_NAME[dtype].nbytes(prod(shape))
    data = draw(st.binary(min_size=nbytes, max_size=nbytes))
    flips = draw(st.sets(st.integers(0, prod(shape) * width - 1), min_size=1, max_size=4))
    other = int.from_bytes(data, "little") ^ sum(1 << bit for bit in flips)
    return dtype, shape, data, other.to_bytes(nbytes, "little")


@settings(max_examples=50, deadline=None)
@given(spoiled())
def test_the_first_element_that_differs_is_named(case: tuple[str, tuple[int, ...], bytes, bytes]) -> None:
    dtype, shape, a, b = case
    first, second = (elements_of(dtype, prod(shape), data) for data in (a, b))
    different = [at for at, (x, y) in enumerate(zip(first, second, strict=True)) if x != y]
    found = located(dtype, shape, a, b)
    assert tuple(found["index"]) == np.unravel_index(different[0], shape or (1,))[: len(shape)]
    assert found["differing_count"] == len(different)
    assert found["differing_elements"] == (
        "1 element differs" if len(different) == 1 else f"{len(different)} elements differ"
    )
    if DTYPES_BY_NAME[dtype].bits >= 8:
        assert (int(found["a"], 16), int(found["b"], 16)) == (first[different[0]], second[different[0]])


@settings(max_examples=50, deadline=None)
@given(spoiled())
def test_exchanged_sides_differ_at_the_same_place(case: tuple[str, tuple[int, ...], bytes, bytes]) -> None:
    dtype, shape, a, b = case
    there, back = located(dtype, shape, a, b), located(dtype, shape, b, a)
    assert (there["a"], there["b"]) == (back["b"], back["a"])
    assert {**there, "a": 0, "b": 0} == {**back, "a": 0, "b": 0}


def test_a_difference_behind_the_first_block_is_found(tmp_path: Path) -> None:
    data = np.zeros(LEAF_NBYTES // 4 + 5, np.float32)
    a = write_safetensors(tmp_path / "a.safetensors", {"x": array(data), "y": array(data[:4])})
    data[-3], data[-1] = 1, 2
    b = write_safetensors(tmp_path / "b.safetensors", {"x": array(data), "y": array(data[:4])})
    (row,) = verify(a, b, workers=2).differing
    assert row["index"] == [LEAF_NBYTES // 4 + 2]
    assert (row["name"], row["what"], row["a"], row["b"]) == ("x", "content", "00000000", "3f800000")
    assert row["differing_count"] == 2
    assert row["differing_elements"] == "2 elements differ in the first 16 MiB block with a difference"
    data[7] = 3
    b = write_safetensors(tmp_path / "b.safetensors", {"x": array(data), "y": array(data[:4])})
    (row,) = verify(a, b).differing
    assert row["index"] == [7]
    assert row["differing_elements"] == "1 element differs in the first 16 MiB block with a difference"


# ------------------------------------------------------------------------------------------- what is compared


def rows_of(found: bits.VerifyReport) -> dict[str, str]:
    return {row["name"]: row["what"] for row in found.differing}


def changed(tensor: Value, at: int) -> Value:
    """The tensor with another byte."""
    dtype, shape, data = tensor
    return dtype, shape, data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_how_it_is_cut_and_who_compares_it_is_no_difference(tmp_path: Path, workers: int) -> None:
    tensors = llama()
    hf = write_hf(tmp_path / "hf", tensors, shards=3)
    cuts = {"model.embed_tokens.weight": [Region((0, 0), (5, 8)), Region((5, 0), (11, 8))]}
    dcp = write_dcp(tmp_path / "dcp", tensors, cuts, files=2, config=LLAMA)
    found = verify(hf, dcp, workers=workers)
    assert (found.exit, found.differing, found.compared) == (0, [], len(tensors))
    nbytes = sum(len(data) for _, _, data in tensors.values())
    assert found.bytes_read >= 2 * nbytes
    assert found.parameters == nbytes // 2

    names = ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"]
    spoiled = {name: changed(each, 16 * 3) if name in names[1:] else each for name, each in tensors.items()}
    spoiled[names[0]] = changed(tensors[names[0]], 2)
    found = verify(hf, write_dcp(tmp_path / "spoiled", spoiled, cuts, files=2, config=LLAMA), workers=workers)
    assert found.exit == 1
    assert [(row["name"], row["index"]) for row in found.differing] == [
        (name, [1] if name == names[0] else [3, 0]) for name in tensors if name in names
    ]


def test_what_headers_tell_apart_is_not_read(tmp_path: Path) -> None:
    a = {"same": value("F32", 4), "short": value("F32", 4), "narrow": value("F32", 4), "gone": value("F32", 4)}
    b = {"same": a["same"], "short": value("F32", 2, 2), "narrow": value("I32", 4), "new": value("F32", 4)}
    roots = [write_hf(tmp_path / name, each, config=None) for name, each in (("a", a), ("b", b))]
    found = verify(*roots)
    assert rows_of(found) == {"short": "shape", "narrow": "dtype", "gone": "missing", "new": "missing"}
    assert (found.exit, found.compared, found.tensors) == (1, 1, 4)
    back = verify(*reversed(roots))
    assert rows_of(back) == rows_of(found)
    sides = {row["name"]: (row["a"], row["b"]) for row in found.differing}
    assert sides == {row["name"]: (row["b"], row["a"]) for row in back.differing}
    assert sides["gone"][1] is None and sides["new"][0] is None


def test_nothing_in_common_is_no_equality(tmp_path: Path) -> None:
    """As of optimizer state alone, and of two checkpoints none of which has a name of the other."""
    moments = {f"optim.state.w.{name}": value("F32", 2) for name in ("exp_avg", "exp_avg_sq")}
    counted = {f"optim.state.0.{name}": value("F32", 2) for name in ("exp_avg", "exp_avg_sq")}
    found = verify(write_dcp(tmp_path / "a", moments), write_dcp(tmp_path / "b", counted))
    assert (found.exit, found.compared, found.differing) == (1, 0, [])


NAMES = ["a", "b", "c.weight", "d"]


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(NAMES), spoiled=st.sets(st.sampled_from(NAMES)))
def test_the_order_in_a_file_is_no_difference(
    tmp_path_factory: pytest.TempPathFactory, order: list[str], spoiled: set[str]
) -> None:
    root = tmp_path_factory.mktemp("order")
    tensors = {name: value("F32", 3, 2, seed=at) for at, name in enumerate(NAMES)}
    other = {name: changed(tensors[name], 9) if name in spoiled else tensors[name] for name in order}
    found = verify(write_safetensors(root / "a.safetensors", tensors), write_safetensors(root / "b.safetensors", other))
    assert [row["name"] for row in found.differing] == sorted(spoiled)
    assert found.exit == bool(spoiled)
    assert all(row["index"] == [1, 0] for row in found.differing)


# ------------------------------------------------------------------------------------------- casts and ties


def rounded(data: np.ndarray[Any, Any]) -> Value:
    """Float32 as bfloat16, to the nearest, to the even one of two that are as near."""
    number = data.view(np.uint32)
    kept = (number + 0x7FFF + (number >> 16 & 1) >> 16).astype(np.uint16)
    return "BF16", data.shape, kept.tobytes()


def test_a_cast_is_made_before_comparing(tmp_path: Path) -> None:
    data = np.array([1, 1.00390625, 1.01171875, -3.14159, 0, 65504.0], np.float32)
    a = write_safetensors(tmp_path / "a.safetensors", {"x": array(data), "n": array(np.arange(3))})
    counted = array(np.arange(3))
    b = write_safetensors(tmp_path / "b.safetensors", {"x": rounded(data), "n": counted})
    half = write_safetensors(tmp_path / "half.safetensors", {"x": array(data.astype(np.float16)), "n": counted})
    assert rows_of(verify(a, b)) == {"x": "dtype"}
    assert verify(a, b, dtype="bf16").exit == 0
    assert verify(a, half, dtype="fp16").exit == 0
    assert rows_of(verify(a, half, dtype="bf16")) == {"x": "dtype"}
    cut_off = ("BF16", data.shape, (data.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    b = write_safetensors(tmp_path / "b.safetensors", {"x": cut_off, "n": counted})
    (row,) = verify(a, b, dtype="bf16").differing
    assert (row["index"], row["a"], row["b"]) == ([2], "3f82", "3f81")


@settings(deadline=None, max_examples=30)
@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.lists(st.sampled_from([0.0, 1.0, 65504.0, 1e6, -7e4]), max_size=5), min_size=1
    )
)
def test_numbers_that_a_cast_makes_infinite_are_noted(
    tmp_path_factory: pytest.TempPathFactory, numbers: dict[str, list[float]]
) -> None:
    root = tmp_path_factory.mktemp("pair")
    with np.errstate(over="ignore"):
        full = {name: np.array(data, np.float32) for name, data in numbers.items()}
        half = {name: data.astype(np.float16) for name, data in full.items()}
    paths = [
        write_safetensors(root / f"{stem}.safetensors", {name: array(data) for name, data in tensors.items()})
        for stem, tensors in {"full": full, "half": half}.items()
    ]
    infinite = {name: int(np.isinf(data).sum()) for name, data in sorted(half.items()) if np.isinf(data).any()}
    notes = [note for note in verify(*paths, dtype="fp16").notes if "infinite" in note]
    if not infinite:
        assert not notes
    else:
        (note,) = notes
        total = sum(infinite.values())
        assert note.startswith(f"--dtype fp16: {total} value{'s' * (total > 1)} of the reference")
        assert note.endswith(f"({first_of(list(infinite))})")


@settings(deadline=None)
@given(st.binary(min_size=40, max_size=70), st.integers(0, 4), st.lists(st.integers(1, 50), min_size=1))
def test_one_leaf_is_kept_in_whatever_parts_it_comes(data: bytes, leaf: int, requests: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bits, "LEAF_NBYTES", 16)
        patch.setattr(bits, "_BUFFER", 12)
        sink = bits._LeafSink(leaf)
        position = step = 0
        while position < len(data):
            view = sink.space(min(requests[step % len(requests)], len(data) - position))
            assert 0 < len(view) <= 12
            view[:] = data[position : position + len(view)]
            sink.commit(view)
            position, step = position + len(view), step + 1
        assert sink.leaf_bytes == data[16 * leaf : 16 * leaf + 16]


TIED = {**LLAMA, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("head", "what"),
    [("same", None), ("other", "content"), ("narrow", "shape"), ("wide", "dtype")],
)
def test_a_tied_name_is_held_against_its_partner(tmp_path: Path, head: str, what: str | None) -> None:
    tensors = llama(head=False)
    embedding = tensors["model.embed_tokens.weight"]
    heads = {
        "same": embedding,
        "other": changed(embedding, 0),
        "narrow": part(embedding, Region((0, 0), (15, 8))),
        "wide": value("F64", 16, 8),
    }
    a = write_hf(tmp_path / "a", tensors, config=TIED)
    b = write_hf(tmp_path / "b", {**tensors, "lm_head.weight": heads[head]}, config=TIED)
    for pair in ((a, b), (b, a)):
        found = verify(*pair)
        assert rows_of(found) == ({} if what is None else {"lm_head.weight": what})
        assert found.exit == (what is not None)
        assert (found.compared, found.total) == (len(tensors) + (what in (None, "content")), len(tensors) + 1)
        headers = ckptx.diff(*pair)
        assert rows_of(headers) == ({} if what is None else {"lm_head.weight": "tie" if what == "content" else what})
        assert (headers.compared, headers.total) == (len(tensors) + 1, len(tensors) + 1)


@pytest.mark.parametrize(
    ("dtype", "casts"),
    [("F16", ("fp16", "bf16")), ("F32", ("fp32", "bf16")), ("F64", (None, "bf16")), ("I8", (None, None))],
)
def test_a_tied_name_of_another_dtype_is_one_of_the_tensors_of_that_dtype(
    tmp_path: Path, dtype: str, casts: tuple[str | None, str | None]
) -> None:
    """Every count of the report, and the note, has it; and the cast that the note advises reaches it."""
    aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    a = write_hf(tmp_path / "a", llama(head=False), config=TIED)
    b = write_dcp(tmp_path / "b", llama(head=False, dtype=dtype), aliases=aliases, config=TIED)
    names = {*llama(head=False), *aliases}
    for pair, to in zip(((a, b), (b, a)), casts, strict=True):
        found = verify(*pair)
        assert rows_of(found) == rows_of(ckptx.diff(*pair)) == dict.fromkeys(names, "dtype")
        assert (found.compared, found.total) == (0, len(names))
        (note,) = (each for each in found.notes if each.startswith("dtype: "))
        assert f"{len(names)} tensors with a dtype other than in the reference" in note
        assert note.endswith(f"pass --dtype {to} to cast the reference first, as convert --dtype does") == bool(to)
        if to:
            assert "dtype" not in rows_of(verify(*pair, dtype=to)).values()


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("stored", ["alias", "copy"])
def test_bytes_that_names_share_are_read_once(tmp_path: Path, stored: str, workers: int) -> None:
    tensors = llama(head=False)
    embedding = tensors["model.embed_tokens.weight"]
    a = write_hf(tmp_path / "a", tensors, config=TIED)
    nbytes, twice = sum(len(data) for _, _, data in tensors.values()), len(embedding[2])
    if stored == "alias":
        aliases = {"lm_head.weight": "model.embed_tokens.weight"}
        b, expected = write_dcp(tmp_path / "b", tensors, aliases=aliases, config=TIED), 2 * nbytes
    else:
        b = write_hf(tmp_path / "b", {**tensors, "lm_head.weight": embedding}, config=TIED)
        expected = 2 * nbytes + twice
    for pair in ((a, b), (b, a)):
        found = verify(*pair, workers=workers)
        assert (found.exit, found.compared) == (0, len(tensors) + 1)
        assert expected <= found.bytes_read < expected + twice  # an archive also has a frame


def test_a_difference_in_shared_bytes_is_shown_for_each_name(tmp_path: Path) -> None:
    tensors = llama(head=False)
    other = {**tensors, "model.embed_tokens.weight": changed(tensors["model.embed_tokens.weight"], 5)}
    aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    a = write_dcp(tmp_path / "a", tensors, aliases=aliases, config=TIED)
    b = write_dcp(tmp_path / "b", other, aliases=aliases, config=TIED)
    rows = verify(a, b).differing
    assert rows_of(verify(a, b)) == {"lm_head.weight": "content", "model.embed_tokens.weight": "content"}
    assert {**rows[0], "name": ""} == {**rows[1], "name": ""}


# ------------------------------------------------------------------------------------------- what is in the way


def test_a_dtype_that_is_none_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        verify(tmp_path / "gone", tmp_path / "gone", dtype="int4")
    assert all(word in str(error.value) for word in ("--dtype", '"int4"', "bf16", "fp16", "fp32"))


@pytest.mark.parametrize("workers", [1, 3])
def test_what_one_thread_meets_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """And ends the others, as soon as they have done what they are at."""
    seen: list[str] = []

    def fails(pair: Any, *others: Any) -> None:
        seen.append(pair.name)
        if pair.name == seen[0]:
            raise InputError(f"{pair.name}: found no bytes")
        time.sleep(0.2)

    monkeypatch.setattr(bits, "_compare", fails)
    hf = write_hf(tmp_path / "hf", llama())
    with pytest.raises(InputError, match="found no bytes"):
        verify(hf, hf, workers=workers)
    assert 1 <= len(seen) <= workers
    assert seen[0].endswith(("gate_proj.weight", "up_proj.weight"))  # the largest first


def test_progress_is_never_more_than_there_is(tmp_path: Path) -> None:
    hf = write_hf(tmp_path / "hf", llama())
    said: list[tuple[int, int]] = []
    verify(hf, hf, on_progress=lambda done, total: said.append((done, total)))
    nbytes = sum(len(data) for _, _, data in llama().values())
    assert all(0 <= done <= total == nbytes for done, total in said)


def test_progress_counts_the_bytes_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_turn(work: Callable[[int], None], count: int, *, on_wait: Callable[[], None], **_: object) -> None:
        on_wait()
        for number in range(count):
            work(number)
        on_wait()

    monkeypatch.setattr(bits, "run_threads", in_turn)
    hf = write_hf(tmp_path / "hf", llama())
    said: list[tuple[int, int]] = []
    verify(hf, hf, on_progress=lambda done, total: said.append((done, total)))
    nbytes = sum(len(data) for _, _, data in llama().values())
    assert said == [(0, nbytes), (nbytes, nbytes)]
