"""Every dtype and every memory layout stock torch writes, and `--dtype`: torch says what the bytes are."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import deserialize, safe_open
from safetensors.torch import save_file

import ckptx
from ckptx.errors import InputError, UnsupportedError
from tests.support.models import RECIPES, Recipe, assert_same_outputs, load, outputs, read_file, read_hf, write
from tests.support.torch_dcp import assert_same_tensors, metadata, raw
from tests.support.torch_dcp import load as stock_load

GOLDENS = Path(__file__).resolve().parents[2] / "fixtures" / "dcp"

Parsed = dict[str, tuple[str, tuple[int, ...], bytes]]


def parse(file: Path) -> Parsed:
    """Dtype, shape and row-major bytes by name, by the safetensors library."""
    found = deserialize(file.read_bytes())
    return {name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in found}


# What stock torch saved

# Tensors of the goldens that are not the model; ckptx must name them and leave them out.
_NOT_MODEL = {"objects": ("rng.",), "trainer": ("optim.",)}
_GOLDEN_NAMES = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir())


def test_goldens_are_there() -> None:
    wanted = {"transposed", "channels_last", "sliced", "expanded", "fp8", "kinds", "empty", "objects", "trainer"}
    assert wanted | {"sharded", "two_files"} <= set(_GOLDEN_NAMES)


@pytest.mark.parametrize("name", _GOLDEN_NAMES)
def test_golden_dcp_becomes_the_same_tensors(name: str, tmp_path: Path) -> None:
    expected = parse(GOLDENS / f"{name}.safetensors")
    left = {tensor for tensor in expected if tensor.startswith(_NOT_MODEL.get(name, ("\0",)))}
    report = ckptx.convert("dcp2hf", GOLDENS / name, tmp_path / "out", base="none")
    assert {row["name"] for row in report.dropped} == left
    found: Parsed = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= parse(file)
    assert found == {tensor: value for tensor, value in expected.items() if tensor not in left}


@pytest.mark.parametrize("name", _GOLDEN_NAMES)
def test_golden_files_become_a_dcp_that_stock_torch_loads(name: str, tmp_path: Path) -> None:
    file = GOLDENS / f"{name}.safetensors"
    ckptx.convert("hf2dcp", file, tmp_path / "dcp")
    assert_same_tensors(stock_load(tmp_path / "dcp"), read_file(file))


def test_fp4_written_by_stock_torch_becomes_safetensors(tmp_path: Path) -> None:
    tensor = torch.arange(24, dtype=torch.uint8).mul(11).reshape(4, 6).view(torch.float4_e2m1fn_x2)
    dcp.save({"w": tensor}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", base="none")
    assert parse(tmp_path / "out" / "model.safetensors") == {"w": ("F4", (4, 12), raw(tensor))}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32])
def test_dtype_that_safetensors_lacks_is_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {"fine": torch.ones(2), "strange": torch.zeros(2, 2, dtype=dtype)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    with pytest.raises(UnsupportedError, match="strange"):
        ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", base="none")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("view", [torch.conj, lambda t: torch.imag(torch.conj(t))], ids=["conj", "neg"])
def test_conjugated_and_negated_views_are_not_taken_for_their_memory(view: Any, tmp_path: Path) -> None:
    tensor = torch.randn(3, 4, dtype=torch.complex64)
    dcp.save({"z": view(tensor)}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    loaded = stock_load(tmp_path / "dcp")["z"].resolve_conj().resolve_neg()
    assert torch.equal(loaded, view(tensor).resolve_conj().resolve_neg())
    try:
        ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", base="none")
    except UnsupportedError as error:
        assert "z" in str(error)
        return
    assert raw(read_hf(tmp_path / "out")["z"]) == raw(loaded)


# What safetensors holds

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8, "F4": 4,
}  # fmt: skip
_SHAPES = [(3, 6), (2, 1, 4), (0, 4), (1, 2)]


def write_every_dtype(path: Path) -> None:
    """A safetensors file by hand: no library writes all of them."""
    rows: dict[str, Any] = {}
    data = b""
    generator = torch.Generator().manual_seed(3)
    for dtype, bits in sorted(_BITS.items(), key=lambda item: -item[1]):
        for shape in [*_SHAPES, *([()] if bits >= 8 else [])]:
            nbytes = prod(shape) * bits // 8
            high = 2 if dtype == "BOOL" else 256
            block = bytes(torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator).tolist())
            name = f"{dtype}.{'x'.join(map(str, shape)) or 'scalar'}"
            rows[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + nbytes]}
            data += block
    header = json.dumps({"__metadata__": {"format": "pt"}, **rows}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_every_dtype_loads_in_stock_torch_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    file = tmp_path / "hf" / "model.safetensors"
    write_every_dtype(file)
    parsed = parse(file)
    assert {dtype for dtype, _, _ in parsed.values()} == set(_BITS)
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp", files=4)
    loaded = stock_load(tmp_path / "dcp")
    assert {name: raw(tensor) for name, tensor in loaded.items()} == {name: row[2] for name, row in parsed.items()}
    with safe_open(file, "pt") as opened:
        for name, tensor in loaded.items():
            same = opened.get_tensor(name)
            assert (tensor.dtype, tensor.shape) == (same.dtype, same.shape), name
    (tmp_path / "dcp" / "ckptx.json").unlink()
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", base="none")
    assert parse(tmp_path / "out" / "model.safetensors") == parsed
    assert ckptx.verify(tmp_path / "hf", tmp_path / "dcp").exit == 0
    assert ckptx.diff(tmp_path / "hf", tmp_path / "out").exit == 0


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_dtype_that_torch_lacks_is_refused_by_name(dtype: str, tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": dtype, "shape": [4, 4], "data_offsets": [0, 12]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    with pytest.raises(UnsupportedError, match=dtype):
        ckptx.convert("hf2dcp", tmp_path / "model.safetensors", tmp_path / "dcp")


# --dtype

_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def read_config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


@pytest.fixture(params=["llama-fp32", "t5", "deepseek-v3", "gemma3-vlm", "bert-mlm", "mamba"])
def fp32(request: pytest.FixtureRequest, tmp_path: Path) -> Recipe:
    """A model in float32, at `tmp_path/hf`."""
    plain = RECIPES[request.param]
    recipe = Recipe(plain.model, plain.inputs, torch.float32, plain.aliases)
    write(recipe, tmp_path / "hf")
    return recipe


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_cast_is_what_transformers_loads_in_that_dtype(fp32: Recipe, dtype: str, tmp_path: Path) -> None:
    """`from_pretrained(dtype=...)` of the original says which tensors stay float32."""
    hf = tmp_path / "hf"
    wanted = _TORCH[dtype]
    stock = load(hf, wanted)
    stock.save_pretrained(tmp_path / "stock")
    expected = read_hf(tmp_path / "stock")
    there = ckptx.convert("hf2dcp", hf, tmp_path / "cast", dtype=dtype)
    ckptx.convert("hf2dcp", hf, tmp_path / "dcp")
    back = ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", dtype=dtype)
    assert_same_tensors(stock_load(tmp_path / "cast", expected), expected)
    assert_same_tensors(read_hf(tmp_path / "out"), expected)
    before, after = read_config(hf), read_config(tmp_path / "out")
    assert read_config(tmp_path / "cast") == after
    name = str(wanted).removeprefix("torch.")
    for report in (there, back):
        edits = {edit["key"]: (edit["before"], edit["after"]) for edit in report.config_edits}
        assert edits["dtype"] == ("float32", name)
        assert set(edits.values()) == {("float32", name)}
    assert json.loads(json.dumps(before).replace('"float32"', f'"{name}"')) == after
    assert_same_outputs(outputs(load(tmp_path / "out", wanted), fp32.inputs()), outputs(stock, fp32.inputs()))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_verify_casts_the_reference_when_asked(fp32: Recipe, dtype: str, tmp_path: Path) -> None:
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "cast", dtype=dtype)
    assert ckptx.verify(tmp_path / "hf", tmp_path / "cast", dtype=dtype).exit == 0
    plain = ckptx.verify(tmp_path / "hf", tmp_path / "cast")
    assert plain.exit == 1
    rows = {row["name"]: row["what"] for row in plain.differing}
    on_disk = read_hf(tmp_path / "hf")
    assert rows
    for name, what in rows.items():
        assert what == "dtype"
        assert name in on_disk or name in fp32.aliases
    other = "fp16" if dtype == "bf16" else "bf16"
    assert ckptx.verify(tmp_path / "hf", tmp_path / "cast", dtype=other).exit == 1
    assert ckptx.diff(tmp_path / "hf", tmp_path / "cast").exit == 1


@pytest.mark.parametrize(
    ("recipe", "dtype", "kept"),
    [
        ("t5", "fp16", ".wo.weight"),
        ("t5", "bf16", None),
        ("deepseek-v3", "fp16", "e_score_correction_bias"),
        ("deepseek-v3", "bf16", "e_score_correction_bias"),
    ],
)
def test_tensors_kept_in_float32_are_the_ones_transformers_keeps(
    recipe: str, dtype: str, kept: str | None, tmp_path: Path
) -> None:
    write(Recipe(RECIPES[recipe].model, RECIPES[recipe].inputs, torch.float32), tmp_path / "hf")
    report = ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp", dtype=dtype)
    found = metadata(tmp_path / "dcp")
    still = {name for name, entry in found.items() if entry.properties.dtype is torch.float32}
    assert still == {name for name in found if kept is not None and name.endswith(kept)}
    assert set(report.dtype_unchanged or ()) == still


def test_cast_of_every_kind_of_float_is_that_of_torch(tmp_path: Path) -> None:
    """Infinities, NaN, subnormals, ties of rounding and overflow, from and to every float; integers are left alone."""
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (50_000,), generator=torch.Generator().manual_seed(0))
    wide = torch.cat([bits.to(torch.int32).view(torch.float32), _edges()])
    tensors = {
        "f64": torch.cat([wide.double(), wide.double() * (1 + 2**-30)]),
        "f32": wide,
        "f16": torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.float16),
        "bf16": torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.bfloat16),
        "i64": torch.arange(9) - 4,
        "u8": torch.arange(256).to(torch.uint8),
        "bool": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for dtype, wanted in _TORCH.items():
        source, made = tmp_path / "model.safetensors", tmp_path / dtype
        report = ckptx.convert("hf2dcp", source, made, dtype=dtype, allow_overflow=True)
        floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        infinite = {name: int((each.isfinite() & each.to(wanted).isinf()).sum()) for name, each in floats.items()}
        zero = {name: int(((each != 0) & (each.to(wanted) == 0)).sum()) for name, each in floats.items()}
        for rows, counts in ((report.overflows, infinite), (report.underflows, zero)):
            assert {row["name"]: row["count"] for row in rows or ()} == {n: c for n, c in counts.items() if c}
        if any(infinite.values()):
            with pytest.raises(InputError, match="--allow-overflow"):
                ckptx.convert("hf2dcp", source, tmp_path / f"refused {dtype}", dtype=dtype)
        found = stock_load(tmp_path / dtype)
        for name, tensor in tensors.items():
            expected = tensor.to(wanted) if tensor.is_floating_point() else tensor
            assert found[name].dtype is expected.dtype, name
            assert torch.equal(found[name].isnan(), expected.isnan()), (dtype, name)
            numbers = ~expected.isnan()
            assert raw(found[name][numbers]) == raw(expected[numbers]), (dtype, name)
            if tensor.dtype is expected.dtype:
                assert raw(found[name]) == raw(tensor)
        assert ckptx.verify(tmp_path / "model.safetensors", tmp_path / dtype, dtype=dtype).exit == 0


def _edges() -> torch.Tensor:
    """Halfway cases of bf16 and fp16, and the ends of their ranges."""
    near = torch.tensor([1.0, 1.00390625, 1.01171875, 65504.0, 65519.996, 65520.0, 3.38953139e38, 3.4e38, 6e-8, 2.9e-8])
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 1.17e-38, 9.2e-41])
    return torch.cat([near, -near, special])
