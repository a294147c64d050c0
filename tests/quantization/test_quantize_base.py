"""`--quantize base`: unchanged weights get the bytes of the base, others those of an independent encoder."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptx
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import Region
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.quantization import quantize
from ckptx.storage.local import LocalSource
from tests.support.catalog_tensors import read_safetensors
from tests.support.checkpoint_writers import Value, names_in, tree_bytes, write_dcp
from tests.support.quantized import (
    SCHEMES,
    Fp8,
    Integer,
    Mxfp4,
    Nvfp4,
    PublishedScheme,
    QuantizedWeight,
    as_floats,
    float_value,
    fp8_config,
    rng_of,
    with_block,
    write_quantized,
)
from tests.support.quantized_models import MODELS, QuantizedModel, encode_model, make_model


def files_of(root: Path) -> dict[str, bytes]:
    """Return all files but the manifest."""
    return {name: data for name, data in tree_bytes(root).items() if name != "ckptx.json"}


def quantize_like(step: Path, base: Path, out: Path, **options: Any) -> Any:
    return ckptx.convert("to-hf", step, out, base=base, quantize="base", **options)


# ------------------------------------------------------------------------------------------------- round trips

ROUTES: dict[str, Any] = {
    "whole": lambda src, dst: ckptx.convert("to-dcp", src, dst, dequantize=True),
    "float32": lambda src, dst: ckptx.convert("to-dcp", src, dst, dequantize=True, dtype="fp32"),
    "tp2 x pp2": lambda src, dst: ckptx.reshard(src, dst, tp=2, pp=2, to="dcp", names="hf", dequantize=True),
    "model names": lambda src, dst: ckptx.reshard(src, dst, tp=2, to="dcp", names="model", dequantize=True),
    "torchtitan": lambda src, dst: ckptx.convert("to-dcp", src, dst, dequantize=True, names="torchtitan"),
}
ROUND_TRIPS = [
    (label, route)
    for label in MODELS
    for route in ROUTES
    # ckptx has names of torchtitan for these classes.
    if route != "torchtitan" or label.startswith(("llama", "qwen3_moe"))
]


@pytest.mark.sampled(36)
@pytest.mark.parametrize(("label", "route"), ROUND_TRIPS)
def test_a_round_trip_restores_every_file(tmp_path: Path, label: str, route: str) -> None:
    model = make_model(label)
    base = model.write(tmp_path / "base", shards=3)
    (base / "tokenizer.json").write_text("{}")
    ROUTES[route](base, tmp_path / "step")
    report = quantize_like(tmp_path / "step", base, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(base)
    assert (report.quantized["unchanged"], report.quantized["encoded"]) == (len(model.weights), [])
    assert sum(row["tensors"] for row in report.quantized["schemes"]) == len(model.weights)
    assert report.config_edits == []


def write_step(root: Path, model: QuantizedModel, changed: Mapping[str, np.ndarray[Any, Any]]) -> Path:
    """Write a DCP of the decoded model, with other values for some weights, in float32."""
    tensors = dict(model.truth()) | {name: float_value(values, "F32") for name, values in changed.items()}
    return write_dcp(root, tensors, config=None)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("label", MODELS)
def test_one_trained_weight(tmp_path: Path, label: str) -> None:
    """Only its codes and scales differ from those of the base, and not even the headers of the files."""
    model = make_model(label)
    base = model.write(tmp_path / "base", shards=2)
    name = list(model.weights)[len(model.weights) // 2]
    values = rng_of("trained", label).normal(0, 0.03, model.weights[name].truth.shape).astype(np.float32)
    report = quantize_like(write_step(tmp_path / "step", model, {name: values}), base, tmp_path / "out")
    assert report.quantized["encoded"] == [name]
    assert report.quantized["unchanged"] == len(model.weights) - 1
    found, before = read_safetensors(tmp_path / "out"), read_safetensors(base)
    assert {key for key in before if found[key] != before[key]} <= set(model.weights[name].parts)
    assert found == encode_model(label, model, {name: values}).tensors
    for file, data in files_of(base).items():
        assert len(files_of(tmp_path / "out")[file]) == len(data)


@pytest.mark.parametrize("label", MODELS)
def test_every_weight_is_encoded_like_the_independent_encoder(tmp_path: Path, label: str) -> None:
    model = make_model(label)
    base = model.write(tmp_path / "base")
    rng = rng_of("all", label)
    values = {name: rng.normal(0, 0.02, each.truth.shape).astype(np.float32) for name, each in model.weights.items()}
    report = quantize_like(write_step(tmp_path / "step", model, values), base, tmp_path / "out")
    assert sorted(report.quantized["encoded"]) == sorted(model.weights)
    expected = encode_model(label, model, values)
    found = read_safetensors(tmp_path / "out")
    assert sorted(found) == sorted(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert found[name] == tensor, name
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    # The output decodes to values within half a step of the input.
    ckptx.convert("to-hf", tmp_path / "out", tmp_path / "decoded", dequantize=True, dtype="fp32")
    decoded = read_safetensors(tmp_path / "decoded")
    for name, own in values.items():
        weight = expected.weights[name]
        assert decoded[name] == weight.stored_truth("F32")
        assert (np.abs(weight.truth - own) <= half_step(weight, own)).all()


def half_step(weight: QuantizedWeight, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return half the difference between the codes around each value."""
    codes = next(iter(weight.parts.values()))[0]
    units = np.abs(values) / weight.scales
    if codes == "F8_E4M3":
        half = np.maximum(units / 16, 2.0**-10)
    elif codes == "I32":
        half = np.full(values.shape, 0.5)
    else:
        half = np.maximum(units / 4, 0.25)
    return half * weight.scales * (1 + 2.0**-16)


def test_values_in_bfloat16(tmp_path: Path) -> None:
    model = make_model("llama, fp8 blocks")
    base = model.write(tmp_path / "base")
    rng = rng_of("bf16")
    values = {name: float_value(rng.normal(0, 0.02, each.truth.shape), "BF16") for name, each in model.weights.items()}
    step = write_dcp(tmp_path / "step", {**model.truth(), **values})
    quantize_like(step, base, tmp_path / "out")
    expected = encode_model("llama, fp8 blocks", model, {name: as_floats(each) for name, each in values.items()})
    assert read_safetensors(tmp_path / "out") == expected.tensors


@pytest.mark.parametrize("dtype", ["F16", "F64"])
def test_values_in_other_floats(tmp_path: Path, dtype: str) -> None:
    model = make_model("llama, int4")
    base = model.write(tmp_path / "base")
    name = next(iter(model.weights))
    values = rng_of(dtype).normal(0, 0.02, model.weights[name].truth.shape).astype(np.float16)
    stored: Value = (dtype, values.shape, values.astype(np.float64).tobytes() if dtype == "F64" else values.tobytes())
    step = write_dcp(tmp_path / "step", {**model.truth(), name: stored})
    quantize_like(step, base, tmp_path / "out")
    assert (
        read_safetensors(tmp_path / "out")
        == encode_model("llama, int4", model, {name: values.astype(np.float32)}).tensors
    )


# ------------------------------------------------------------------------------------------------- values and shapes

FLOAT_SCALES = {"fp8 tensor": "BF16", "int4 zero points": "F16"}


def encode_one(
    tmp_path: Path,
    scheme: PublishedScheme,
    shape: tuple[int, ...],
    values: np.ndarray[Any, Any],
    name: str,
    **options: Any,
) -> dict[str, Value]:
    """Return the parts of one weight that is quantized like a base with random codes."""
    weight = scheme.coder.make(name, shape, rng_of("base", shape))
    base = write_quantized(tmp_path / "base", weight.parts, scheme)
    step = write_dcp(tmp_path / "step", {name: float_value(values, "F32")})
    quantize_like(step, base, tmp_path / "out", **options)
    return read_safetensors(tmp_path / "out")


def is_activation_scale(name: str) -> bool:
    return name.endswith((".input_scale", ".activation_scale", ".input_global_scale"))


def codes_and_scales(parts: Mapping[str, Value]) -> dict[str, Value]:
    return {name: each for name, each in parts.items() if not is_activation_scale(name)}


def shape_for(label: str, shape: tuple[int, int]) -> tuple[str, tuple[int, ...]]:
    """Return name and shape of a weight of a scheme."""
    columns = -(-shape[1] // SCHEMES[label].columns) * SCHEMES[label].columns
    return (
        ("experts.down_proj", (3, columns, shape[0])) if label == "mxfp4 blocks" else ("a.weight", (shape[0], columns))
    )


@pytest.mark.sampled(40)
@pytest.mark.parametrize("label", SCHEMES)
@pytest.mark.parametrize("magnitude", [0.0, 1e-44, 1e-39, 1e-30, 1e-7, 1.0, 1e30])
@pytest.mark.parametrize("shape", [(37, 136), (130, 72), (1, 64)])
def test_magnitudes_and_ragged_shapes(tmp_path: Path, shape: tuple[int, int], magnitude: float, label: str) -> None:
    scheme = with_block(SCHEMES[label], (32, 48))
    name, sizes = shape_for(label, shape)
    values = rng_of("values", label, shape).normal(0, 1, sizes) * magnitude
    values = values.astype(np.float32)
    values[..., : sizes[-1] // 3] *= np.float32(2.0**-12)
    values[..., -5:] = 0
    has_half_scales = isinstance(scheme.coder, Fp8 | Integer) and scheme.coder.scale_dtype == "F16"
    if has_half_scales and magnitude == 1e30:
        with pytest.raises(InputError, match="beyond the range of F16"):
            encode_one(tmp_path, scheme, sizes, values, name)
        assert not (tmp_path / "out").exists()
        return
    found = encode_one(tmp_path, scheme, sizes, values, name)
    expected = scheme.coder.encode(name, values)
    assert codes_and_scales(found) == codes_and_scales(expected.parts)
    assert np.isfinite(expected.truth).all()


@pytest.mark.parametrize("label", SCHEMES)
def test_many_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    """Batches of a few rows, smaller than blocks, and threads that start in the middle of a tensor."""
    monkeypatch.setattr(quantize, "_BATCH_NBYTES", 3000)
    scheme = with_block(SCHEMES[label], (32, 48))
    name, sizes = shape_for(label, (150, 96))
    values = rng_of("batches", label).normal(0, 1, sizes).astype(np.float32)
    found = encode_one(tmp_path, scheme, sizes, values, name, workers=3, max_memory="8MB")
    assert codes_and_scales(found) == codes_and_scales(scheme.coder.encode(name, values).parts)


FUSED = {
    "blocks": (Fp8(block=(24, 40)), fp8_config((24, 40))),
    "one row of blocks": (Fp8(block=(128, 128)), fp8_config((128, 128))),
    "whole": (Fp8("_scale_inv", "BF16", None, ()), {"quant_method": "fp8", "weight_block_size": None}),
    "rows": (Fp8("_scale", "BF16", None, ("rows", 1)), {"quant_method": "fbgemm_fp8"}),
}


@pytest.mark.parametrize("shape", [(3, 60, 80), (2, 128, 200), (1, 16, 16)])
@pytest.mark.parametrize("kind", FUSED)
def test_fused_experts(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    coder, config = FUSED[kind]
    values = rng_of("fused", kind, shape).normal(0, 1, shape).astype(np.float32)
    name = "layers.0.experts.gate_up_proj"
    found = encode_one(tmp_path, PublishedScheme(coder, config), shape, values, name)
    assert found == coder.encode(name, values).parts


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
@pytest.mark.parametrize("label", ["fp8 tensor", "fp8 rows", "int4 zero points"])
def test_empty_weights_get_the_scales_of_the_base(tmp_path: Path, label: str, shape: tuple[int, ...]) -> None:
    scheme = SCHEMES[label]
    found = encode_one(tmp_path, scheme, shape, np.zeros(shape, np.float32), "a.weight")
    assert found == read_safetensors(tmp_path / "base")


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_second_scales_in_other_floats(tmp_path: Path, dtype: str) -> None:
    coder, name = Nvfp4(), "a.weight"
    parts = dict(coder.make(name, (32, 64), rng_of("second")).parts)
    second = "a.weight_scale_2"
    parts[second] = float_value(np.float32(2.0**-9), dtype)
    base = write_quantized(tmp_path / "base", parts, SCHEMES["nvfp4"])
    values = rng_of("values").normal(0, 1, (32, 64)).astype(np.float32)
    quantize_like(write_dcp(tmp_path / "step", {name: float_value(values, "F32")}), base, tmp_path / "out")
    found = read_safetensors(tmp_path / "out")
    expected = float_value(np.abs(values).max() / np.float32(2688), dtype)
    assert found[second] == expected
    ckptx.convert("to-hf", tmp_path / "out", tmp_path / "decoded", dequantize=True, dtype="fp32")
    decoded = as_floats(read_safetensors(tmp_path / "decoded")[name])
    assert np.abs(decoded - values).max() < np.abs(values).max() / 4


@pytest.mark.parametrize("coder", [Fp8(), Mxfp4("packed"), Nvfp4(), Integer()])
def test_ties_go_to_even_codes(tmp_path: Path, coder: Any) -> None:
    """Values exactly between two codes, with a scale of one."""
    label = {Fp8: "fp8 blocks", Mxfp4: "mxfp4 packed", Nvfp4: "nvfp4", Integer: "int4 rows"}[type(coder)]
    scheme = SCHEMES[label]
    row = {
        "fp8 blocks": [448, 17, 19, -17, 2.0**-10, 3 * 2.0**-10, 0.0, -0.0, 15 * 2.0**-10, 240, 232, 104],
        "mxfp4 packed": [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.0, -5, 0],
        "nvfp4": [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.0, -5, 0],
        "int4 rows": [7, 0.5, 1.5, 2.5, -0.5, -6.5, -5.5, -7, 0, 0, 6.5, 3.5],
    }[label]
    values = np.zeros((16, 128), np.float32)
    values[:, :12] = row
    found = encode_one(tmp_path, scheme, values.shape, values, "a.weight")
    assert codes_and_scales(found) == codes_and_scales(scheme.coder.encode("a.weight", values).parts)


# ------------------------------------------------------------------------------------------------- reading, memory


def test_bytes_read(tmp_path: Path) -> None:
    model = make_model("llama, fp8 tensor")
    base = model.write(tmp_path / "base")
    ckptx.convert("to-dcp", base, tmp_path / "step", dequantize=True)
    plain = sum(len(data) for _, _, data in model.plain.values())
    floats = sum(each.truth.size * 2 for each in model.weights.values())
    parts = sum(len(model.tensors[name][2]) for name in model.tensors) - plain
    dry = quantize_like(tmp_path / "step", base, tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    report = quantize_like(tmp_path / "step", base, tmp_path / "out")
    assert dry.bytes_read == plain + floats + parts
    # The bytes of the base are read to compare, and once more to copy; scales of activations are only copied.
    activations = sum(len(model.tensors[name][2]) for name in model.activation_scales)
    assert report.bytes_read == plain + floats + 2 * parts - activations
    assert {row["name"]: row["bytes"] for row in dry.files} == {
        name: len(data) for name, data in tree_bytes(tmp_path / "out").items()
    }


def test_encoded_batches_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory while the last of many weights is encoded is that of the first ones."""
    coder, sizes = Fp8(block=(128, 128)), []
    scheme = PublishedScheme(coder, fp8_config((128, 128)))
    rng = rng_of("memory")
    one = coder.make("a.weight", (256, 512), rng)
    values = float_value(rng.normal(0, 1, (256, 512)), "BF16")
    parts = {f"{i}.{name}": each for i in range(40) for name, each in one.parts.items()}
    base = write_quantized(tmp_path / "base", parts, scheme)
    step = write_dcp(tmp_path / "step", {f"{i}.a.weight": values for i in range(40)})
    encode_e4m3 = quantize.encode.encode_e4m3

    def encode_and_measure(own: np.ndarray[Any, Any]) -> Any:
        sizes.append(tracemalloc.get_traced_memory()[0])
        return encode_e4m3(own)

    monkeypatch.setattr(quantize.encode, "encode_e4m3", encode_and_measure)
    tracemalloc.start()
    quantize_like(step, base, tmp_path / "out", workers=1)
    tracemalloc.stop()
    assert len(sizes) == 40
    assert sizes[-1] - sizes[3] < 5 * 256 * 512, sizes


def interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    model = make_model("llama, nvfp4")
    base = model.write(tmp_path / "in" / "base", shards=3)
    name = next(iter(model.weights))
    values = rng_of("resume").normal(0, 0.03, model.weights[name].truth.shape).astype(np.float32)
    step = write_step(tmp_path / "in" / "step", model, {name: values})
    with pytest.raises(KeyboardInterrupt):
        quantize_like(step, base, tmp_path / "out" / "made", workers=1, on_progress=interrupt)
    report = quantize_like(step, base, tmp_path / "out" / "made", workers=1, resume=True)
    whole = quantize_like(step, base, tmp_path / "whole")
    assert report.bytes_written <= whole.bytes_written
    assert tree_bytes(tmp_path / "out" / "made") == tree_bytes(tmp_path / "whole")


@pytest.mark.parametrize("how", ["during the run", "before it is resumed"])
def test_a_base_that_changes(tmp_path: Path, how: str) -> None:
    """A run with another base is refused, or starts from the beginning."""
    model, other = make_model("llama, fp8 blocks"), make_model("llama, fp8 blocks", seed=1)
    base = model.write(tmp_path / "in" / "base", shards=3)
    step = write_step(tmp_path / "in" / "step", model, {})
    if how == "during the run":
        with pytest.raises(InputError, match="changed while it was being read"):
            quantize_like(
                step,
                base,
                tmp_path / "out",
                workers=1,
                on_progress=lambda done, total: bool(other.write(base, shards=3)),
            )
        assert not (tmp_path / "out").exists()
        return
    with pytest.raises(KeyboardInterrupt):
        quantize_like(step, base, tmp_path / "out", workers=1, on_progress=interrupt)
    other.write(base, shards=3)
    quantize_like(step, base, tmp_path / "out", workers=1, resume=True)
    quantize_like(step, base, tmp_path / "whole")
    assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "whole")


# ------------------------------------------------------------------------------------------------- refusals


def refused(step: Path, base: Path, out: Path, error: type[CkptxError], words: str) -> None:
    with pytest.raises(error, match=words) as failure:
        quantize_like(step, base, out / "made")
    assert "\n" not in str(failure.value)
    assert not out.exists() or names_in(out) == []


@pytest.mark.parametrize("scale_dims", [(1, "columns"), (1, 1)])
def test_scales_for_columns_and_matrices(tmp_path: Path, scale_dims: tuple[Any, ...]) -> None:
    coder = Fp8("_scale", "F32", None, scale_dims)
    scheme = PublishedScheme(coder, {"quant_method": "fbgemm_fp8"})
    weight = coder.make("experts.gate_up_proj", (2, 16, 24), rng_of("columns"))
    base = write_quantized(tmp_path / "base", weight.parts, scheme)
    step = write_dcp(tmp_path / "step", {weight.name: weight.stored_truth()})
    refused(step, base, tmp_path / "out", UnsupportedError, "one scale per (column|matrix)")


def test_a_base_that_is_not_quantized(tmp_path: Path) -> None:
    model = make_model("llama, fp8 blocks")
    ckptx.convert("to-hf", model.write(tmp_path / "source"), tmp_path / "base", dequantize=True)
    step = write_step(tmp_path / "step", model, {})
    refused(step, tmp_path / "base", tmp_path / "out", InputError, "no tensor is quantized; leave out --quantize")


def test_a_base_of_another_model(tmp_path: Path) -> None:
    model = make_model("llama, fp8 blocks")
    base = model.write(tmp_path / "base")
    other = {f"{name}.other": each for name, each in model.truth().items()}
    with pytest.raises(CkptxError):
        quantize_like(write_dcp(tmp_path / "step", other), base, tmp_path / "out" / "made")
    assert not (tmp_path / "out").exists()


def test_a_weight_of_another_shape(tmp_path: Path) -> None:
    coder = Fp8(block=(32, 32))
    weight = coder.make("a.weight", (64, 96), rng_of("shape"))
    base = write_quantized(tmp_path / "base", weight.parts, PublishedScheme(coder, fp8_config((32, 32))))
    step = write_dcp(tmp_path / "step", {"a.weight": float_value(weight.truth.T.copy(), "F32")})
    refused(step, base, tmp_path / "out", InputError, r"has shape \[96, 64\], but \[64, 96\] in the base")


@pytest.mark.parametrize("label", ["llama, fp8 blocks", "llama, nvfp4", "llama, int4", "gpt_oss, mxfp4"])
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_infinity_and_nan(tmp_path: Path, number: float, label: str) -> None:
    model = make_model(label)
    base = model.write(tmp_path / "in" / "base")
    name = list(model.weights)[1]
    values = model.weights[name].truth.copy()
    values[..., -1, -1] = number
    step = write_step(tmp_path / "in" / "step", model, {name: values})
    refused(step, base, tmp_path / "out", InputError, f'"{name}": holds infinity or NaN')


def test_a_step_that_is_quantized_already(tmp_path: Path) -> None:
    model = make_model("llama, fp8 blocks")
    base = model.write(tmp_path / "base")
    ckptx.convert("to-dcp", base, tmp_path / "step")
    refused(tmp_path / "step", base, tmp_path / "out", UnsupportedError, "F8_E4M3|quantized already")


def test_a_base_with_other_names(tmp_path: Path) -> None:
    """Experts that the base has fused would be written in floating point under a config that declares fp8."""
    model = make_model("qwen3_moe, fp8 blocks")
    scheme = model.scheme
    rng = rng_of("fused")
    tensors = {name: each for name, each in model.tensors.items() if ".experts." not in name}
    for layer in range(2):
        for name, shape in (("gate_up_proj", (4, 64, 64)), ("down_proj", (4, 64, 32))):
            tensors |= scheme.coder.make(f"model.layers.{layer}.mlp.experts.{name}", shape, rng).parts
    base = write_quantized(tmp_path / "base", tensors, scheme, model.config)
    ckptx.convert("to-dcp", base, tmp_path / "step", dequantize=True)
    message = (
        'experts.gate_up_proj", which is quantized in .*, but has ".*" instead, .*; pass a base in which each expert'
    )
    refused(tmp_path / "step", base, tmp_path / "out", InputError, message)


def test_a_base_with_another_name(tmp_path: Path) -> None:
    """Names that differ in anything but experts give no advice on experts."""
    coder = Fp8(block=(32, 32))
    a, b = (coder.make(f"{name}.weight", (64, 96), rng_of(name)) for name in "ab")
    base = write_quantized(tmp_path / "base", {**a.parts, **b.parts}, PublishedScheme(coder, fp8_config((32, 32))))
    step = write_dcp(tmp_path / "step", {"a.weight": a.stored_truth(), "c.weight": b.stored_truth()})
    message = 'has no "b.weight", .*, but has "c.weight" instead, .*; pass the base that the model was trained from$'
    refused(step, base, tmp_path / "out", InputError, message)


def test_a_part_of_the_model(tmp_path: Path) -> None:
    """Weights that are quantized in the base and that the step lacks are named."""
    coder = Fp8(block=(32, 32))
    scheme = PublishedScheme(coder, fp8_config((32, 32)))
    a, b = (coder.make(f"{name}.weight", (64, 96), rng_of(name)) for name in "ab")
    base = write_quantized(tmp_path / "base", {**a.parts, **b.parts}, scheme)
    step = write_dcp(tmp_path / "step", {"a.weight": a.stored_truth()})
    report = quantize_like(step, base, tmp_path / "out")
    assert read_safetensors(tmp_path / "out") == a.parts
    assert any('not in the source: 1 weight, "b.weight"' in note for note in report.notes)


def test_bytes_read_from_a_base_whose_tensor_has_several_chunks(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(range(16)))
    chunks = (Chunk(Region((0,), (6,)), "data", 10, 6), Chunk(Region((6,), (4,)), "data", 2, 4))
    entry = TensorEntry("scales", DTYPES_BY_NAME["U8"], (10,), chunks)
    with LocalSource(tmp_path).open() as files:
        contents = quantize.BaseContents(files)
        copied = bytearray(3)
        contents.copy(entry, 5, memoryview(copied))
    assert list(copied) == [15, 2, 3] and contents.bytes_read == 10
