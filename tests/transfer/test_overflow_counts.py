"""Overflow and underflow of casts: counted around the border of each pair of dtypes, as torch rounds there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptx
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.errors import InputError
from ckptx.storage import open_file
from ckptx.transfer import cast as cast_module
from ckptx.transfer.cast import CastSink, cast
from ckptx.transfer.overflow_counts import OverflowCounts
from ckptx.transfer.stream import push
from tests.support.checkpoint_writers import LLAMA, Value, llama, names_in, write_dcp, write_hf
from tests.transfer.test_cast import EXPONENT, MANTISSA, NAMES, WORD

PAIRS = [pair for pair in product(NAMES, NAMES) if pair[0] != pair[1]]
TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SIGNED = {8: np.int64, 4: np.int32, 2: np.int16}
LARGEST = {name: float(torch.finfo(dtype).max) for name, dtype in TORCH.items()}
SMALLEST = {"F64": 5e-324, "F32": 2.0**-149, "F16": 2.0**-24, "BF16": 2.0**-133}


def as_torch(data: bytes, name: str) -> torch.Tensor:
    signed = np.frombuffer(data, SIGNED[DTYPES_BY_NAME[name].itemsize]).copy()
    return torch.from_numpy(signed).view(TORCH[name])


def expected(data: bytes, source: str, target: str) -> OverflowCounts:
    """What torch makes of the same numbers; a float64 goes through float32, as in a cast of ckptx."""
    before = as_torch(data, source)
    after = (before.float() if source == "F64" else before).to(TORCH[target])
    return OverflowCounts(
        int((torch.isfinite(before) & torch.isinf(after)).sum()), int(((before != 0) & (after == 0)).sum())
    )


def bits_of(number: float, name: str) -> int:
    tensor = torch.tensor([number], dtype=torch.float64).to(TORCH[name])
    width = DTYPES_BY_NAME[name].itemsize
    return int(tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[width])[0]) & ((1 << 8 * width) - 1)


@st.composite
def around_the_borders(draw: st.DrawFn, source: str, target: str) -> bytes:
    """Numbers of `source` close to the largest and the smallest number of `target`, and any others."""
    last = (1 << 8 * DTYPES_BY_NAME[source].itemsize) - 1
    sign = 1 << (EXPONENT[source] + MANTISSA[source])
    border = [
        LARGEST[target],
        SMALLEST[target],
        SMALLEST[target] / 2,
        LARGEST[target] * (1 + 2.0 ** -(MANTISSA[target] + 2)),
    ]
    anchors = [bits_of(min(number, LARGEST[source]), source) for number in border]
    near = st.tuples(st.sampled_from(anchors), st.integers(-40, 40), st.sampled_from([0, sign])).map(
        lambda found: ((found[0] + found[1]) & (sign - 1)) | found[2]
    )
    special = st.sampled_from([0, sign, ((1 << EXPONENT[source]) - 1) << MANTISSA[source], sign - 1, last])
    words = draw(st.lists(st.one_of(near, special, st.integers(0, last)), min_size=1, max_size=60))
    return np.array(words, WORD[source]).tobytes()


@pytest.mark.parametrize(("source", "target"), PAIRS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_losses_are_those_of_torch(source: str, target: str, data: st.DataObject) -> None:
    numbers = data.draw(around_the_borders(source, target))
    losses = OverflowCounts()
    cast(memoryview(numbers), DTYPES_BY_NAME[source], DTYPES_BY_NAME[target], losses)
    assert losses == expected(numbers, source, target)


@pytest.mark.parametrize(("source", "target"), PAIRS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_stream_in_odd_pieces_counts_like_the_whole(source: str, target: str, data: st.DataObject) -> None:
    numbers, losses = data.draw(around_the_borders(source, target)), OverflowCounts()

    class Drop:
        def space(self, nbytes: int) -> memoryview:
            return memoryview(bytearray(min(nbytes, 7)))

        def commit(self, view: memoryview) -> None:
            pass

    scratch = memoryview(bytearray(data.draw(st.integers(DTYPES_BY_NAME[source].itemsize, 40))))
    sink = CastSink(Drop(), DTYPES_BY_NAME[source], DTYPES_BY_NAME[target], scratch, losses)
    left = numbers
    while left:
        size = data.draw(st.integers(1, len(left)))
        push(sink, memoryview(left[:size]))
        left = left[size:]
    assert losses == expected(numbers, source, target)


def test_what_is_infinite_already_and_nan_are_no_overflow() -> None:
    for source, target in PAIRS:
        special = [((1 << EXPONENT[source]) - 1) << MANTISSA[source]]  # infinity
        special += [special[0] + 1, special[0] | (1 << MANTISSA[source]) - 1, 0]
        losses = OverflowCounts()
        cast(
            memoryview(np.array(special * 3, WORD[source]).tobytes()),
            DTYPES_BY_NAME[source],
            DTYPES_BY_NAME[target],
            losses,
        )
        assert losses == OverflowCounts(0, 0)


def test_the_comparison_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected defect: the border is a number too high."""
    kind, mask, infinity = cast_module._MAGNITUDES["F16"]
    monkeypatch.setitem(cast_module._MAGNITUDES, "F16", (kind, mask, infinity + 1))
    numbers = np.array([70000.0, 1.0], np.float32).tobytes()
    losses = OverflowCounts()
    cast(memoryview(numbers), DTYPES_BY_NAME["F32"], DTYPES_BY_NAME["F16"], losses)
    assert losses != expected(numbers, "F32", "F16")


# ------------------------------------------------------------------------------------- through the commands

CASTS = [("F32", "fp16", "F16"), ("F32", "bf16", "BF16"), ("BF16", "fp16", "F16"), ("F64", "fp16", "F16"),
         ("F64", "bf16", "BF16"), ("F64", "fp32", "F32")]  # fmt: skip
COMMANDS = ("hf2dcp", "hf2dcp tp", "dcp2hf", "reshard dcp", "reshard safetensors")
SPOILED = {"model.layers.1.mlp.up_proj.weight": 3, "lm_head.weight": 1}
NUMPY: dict[str, Any] = {"F64": np.float64, "F32": np.float32}


def encoded(values: np.ndarray[Any, Any], dtype: str) -> bytes:
    if dtype == "BF16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(NUMPY[dtype]).tobytes()


def model(dtype: str, target: str, kind: str) -> dict[str, Value]:
    """Ones, and in two tensors some numbers that are too large or too small for `target`, infinite or no numbers."""
    found: dict[str, Value] = {}
    with np.errstate(over="ignore"):
        odd = {"overflow": LARGEST[target] * 1.5, "underflow": SMALLEST[target] / 8, "inf": np.inf, "nan": np.nan,
               "sound": 0.5}[kind]  # fmt: skip
    for name, (_, shape, _) in llama(hidden=16).items():
        values = np.ones(shape, np.float64)
        values.reshape(-1)[: SPOILED.get(name, 0)] = odd
        found[name] = dtype, shape, encoded(values, dtype)
    return found


def run(command: str, source: Path, dst: Path, **options: Any) -> Any:
    if command.startswith("reshard"):
        return ckptx.reshard(source, dst, to=command.split()[1], tp=2, **options)  # type: ignore[arg-type]
    direction, *cut = command.split()
    return ckptx.convert(direction, source, dst, **({"tp": 2} if cut else {}), **options)


def write(root: Path, command: str, tensors: Mapping[str, Value]) -> Path:
    return write_dcp(root, tensors, config=LLAMA) if command == "dcp2hf" else write_hf(root, tensors, shards=2)


def is_possible(dtype: str, kind: str, target: str) -> bool:
    """False where the dtype of the source has no such number."""
    if kind == "overflow":
        return LARGEST[target] * 1.5 < LARGEST[dtype]
    return kind != "underflow" or SMALLEST[target] / 8 >= SMALLEST[dtype]


CONVERSIONS = [
    (dtype, wanted, target, command, kind, allowed)
    for (dtype, wanted, target), command, kind, allowed in product(
        CASTS, COMMANDS, ("overflow", "underflow", "inf", "nan", "sound"), (False, True)
    )
    if is_possible(dtype, kind, target)
]


@pytest.mark.sampled(40)
@pytest.mark.parametrize(("dtype", "wanted", "target", "command", "kind", "allowed"), CONVERSIONS)
def test_every_conversion_counts_and_refuses(
    tmp_path: Path, dtype: str, wanted: str, target: str, command: str, kind: str, allowed: bool
) -> None:
    source = write(tmp_path / "in" / "source", command, model(dtype, target, kind))
    (tmp_path / "out").mkdir()
    rows = [{"name": name, "count": SPOILED[name]} for name in sorted(SPOILED)]
    options = {"dtype": wanted, "allow_overflow": allowed or None}
    if kind == "overflow" and not allowed:
        with pytest.raises(InputError, match=r'4 numbers in 2 tensors \("lm_head.weight", ...\) are too large') as e:
            run(command, source, tmp_path / "out" / "made", **options)
        assert "--allow-overflow" in str(e.value) and e.value.exit_code == 3
        assert names_in(tmp_path / "out") == []
        return
    report = run(command, source, tmp_path / "out" / "made", **options)
    document = json.loads(json.dumps(report.to_dict()))
    assert document.get("overflows") == (rows if kind == "overflow" else None)
    assert document.get("underflows") == (rows if kind == "underflow" else None)
    assert any("4 numbers in 2 tensors" in note for note in report.notes) == (kind in ("overflow", "underflow"))
    checked = ckptx.verify(source, tmp_path / "out" / "made", dtype=wanted)
    assert checked.exit == 0
    assert any("became infinite" in note for note in checked.notes) == (kind == "overflow")


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_dtype_base_refuses_as_well(tmp_path: Path, dtype: str) -> None:
    base = write_hf(tmp_path / "base", llama(hidden=16, dtype="F16"))
    step = write_dcp(tmp_path / "step", model(dtype, "F16", "overflow"))
    with pytest.raises(InputError, match="4 numbers in 2 tensors"):
        ckptx.convert("dcp2hf", step, tmp_path / "out", base=str(base), dtype="base")
    report = ckptx.convert("dcp2hf", step, tmp_path / "out", base=str(base), dtype="base", allow_overflow=True)
    assert [row["count"] for row in report.overflows or ()] == [1, 3]


@given(st.integers(0, 40), st.booleans(), st.sampled_from(["hf2dcp", "hf2dcp tp"]))
@settings(max_examples=25, deadline=None)
def test_a_resumed_run_counts_what_it_takes_over(
    tmp_path_factory: pytest.TempPathFactory, after: int, allowed: bool, command: str
) -> None:
    """Interrupted after some writes; the counts are those of an undisturbed run, also of tensors written before."""
    tmp_path = tmp_path_factory.mktemp("resumed")
    source = write(tmp_path / "source", command, model("F32", "F16", "overflow"))
    options: dict[str, Any] = {"dtype": "fp16", "allow_overflow": allowed or None}
    left, real = [after], open_file.write_at

    def failing(descriptor: int, data: memoryview | bytes, offset: int, path: Path) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(descriptor, data, offset, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_file, "write_at", failing)
        with suppress(KeyboardInterrupt, InputError):
            run(command, source, tmp_path / "out", workers=1, **options)
    if not allowed:
        with pytest.raises(InputError, match="4 numbers in 2 tensors"):
            run(command, source, tmp_path / "out", resume=True, **options)
        return
    report = run(command, source, tmp_path / "out", resume=True, **options)
    assert [row["count"] for row in report.overflows or ()] == [1, 3]
    again = run(command, source, tmp_path / "out", resume=True, **options)
    assert [row["count"] for row in again.overflows or ()] == [1, 3], "of an output that is already complete"
    with pytest.raises(InputError, match="4 numbers in 2 tensors"):
        run(command, source, tmp_path / "out", resume=True, dtype="fp16")
