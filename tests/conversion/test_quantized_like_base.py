"""`--quantize base` and `--dequantize`: values, counts, notes, byte counts and files of the report and the output."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptx
from ckptx.errors import InputError, UnsupportedError, UsageError
from tests.support.catalog_tensors import read_safetensors
from tests.support.checkpoint_writers import INDEX, Value, names_in, value, write_dcp
from tests.support.quantized import float_value, rng_of
from tests.support.quantized_models import QuantizedModel, encode_model, make_model

LABELS = ["llama, fp8 blocks", "llama, fp8 tensor, ModelOpt", "llama, nvfp4", "llama, int4"]
BLOCKS, WITH_ACTIVATIONS = LABELS[:2]


def nbytes(tensors: dict[str, Value]) -> int:
    return sum(len(data) for _, _, data in tensors.values())


def trained(model: QuantizedModel) -> tuple[str, np.ndarray[Any, Any]]:
    """Return the name of one quantized weight, and other values for it."""
    name = list(model.weights)[3]
    return name, rng_of("trained").normal(0, 0.03, model.weights[name].truth.shape).astype(np.float32)


def quantize(source: Path, base: Path, out: Path, **options: Any) -> Any:
    return ckptx.convert("to-hf", source, out, base=base, quantize="base", **options)


# `--quantize base`


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("label", LABELS)
def test_weights_are_quantized_like_the_base(tmp_path: Path, label: str, is_trained: bool) -> None:
    model = make_model(label)
    base = model.write(tmp_path / "base", shards=3)
    name, values = trained(model)
    changed = {name: values} if is_trained else {}
    floats = {**model.truth(), **{each: float_value(data, "F32") for each, data in changed.items()}}
    source = write_dcp(tmp_path / "step", floats)
    report = quantize(source, base, tmp_path / "out")
    expected = encode_model(label, model, changed).tensors if is_trained else model.tensors
    assert read_safetensors(tmp_path / "out") == expected
    assert report.quantized["unchanged"] == len(model.weights) - len(changed)
    assert report.quantized["encoded"] == [*changed]
    assert sum(row["tensors"] for row in report.quantized["schemes"]) == len(model.weights)
    assert report.ledger["written"] == report.ledger["source"] == len(floats)
    assert report.tensors == report.ledger["target"]["tensors"] == len(model.tensors)
    files = [file for file in names_in(base) if file.startswith("model")]
    assert [file for file in names_in(tmp_path / "out") if file.startswith("model")] == files and INDEX in files
    sizes = [(tmp_path / "out" / file).stat().st_size for file in files]
    assert sizes == [(base / file).stat().st_size for file in files]
    weight_by_part = {part: each for each, weight in model.weights.items() for part in weight.parts}
    before = Counter(
        model.tensors[part][0] if part in model.activation_scales else floats[weight_by_part.get(part, part)][0]
        for part in model.tensors
    )
    assert report.dtypes["before"] == before
    assert report.dtypes["after"] == Counter(dtype for dtype, _, _ in model.tensors.values())


def test_scales_of_activations_are_copied_and_noted(tmp_path: Path) -> None:
    model = make_model(WITH_ACTIVATIONS)
    base = model.write(tmp_path / "base")
    report = quantize(write_dcp(tmp_path / "step", model.truth()), base, tmp_path / "out")
    count = len(model.activation_scales)
    assert count == len(model.weights)
    first = next(name for name in sorted(model.activation_scales))
    (note,) = [note for note in report.notes if note.startswith("copied from the base")]
    assert re.fullmatch(
        rf'copied from the base: {count} scales of activations or of the KV cache, "[\w.]+\.input_scale", \.\.\.', note
    )
    assert first in read_safetensors(tmp_path / "out")


@pytest.mark.parametrize("missing", [1, 2])
def test_weights_that_the_source_lacks_are_noted(tmp_path: Path, missing: int) -> None:
    model = make_model(BLOCKS)
    base = model.write(tmp_path / "base")
    names = [name for name in model.weights if "layers.1.mlp" in name][:missing]
    floats = {name: each for name, each in model.truth().items() if name not in names}
    report = quantize(write_dcp(tmp_path / "step", floats), base, tmp_path / "out", allow_config_mismatch=True)
    (note,) = [note for note in report.notes if note.startswith("quantized in the base, but not in the source")]
    first = f'"{min(names)}"' + (", ..." if missing > 1 else "")
    count = f"{missing} weight" + ("s" if missing > 1 else "")
    assert note == f"quantized in the base, but not in the source: {count}, {first}"
    parts = {part for name in names for part in model.weights[name].parts}
    assert read_safetensors(tmp_path / "out").keys() == model.tensors.keys() - parts
    assert report.quantized["unchanged"] == len(model.weights) - missing


@pytest.mark.parametrize("options", [{"max_shard_size": "1GB"}, {}], ids=str)
def test_a_size_of_files_goes_before_the_files_of_the_base(tmp_path: Path, options: dict[str, Any]) -> None:
    model = make_model(BLOCKS)
    base = model.write(tmp_path / "base", shards=3)
    quantize(write_dcp(tmp_path / "step", model.truth()), base, tmp_path / "out", **options)
    assert len([*(tmp_path / "out").glob("*.safetensors")]) == (1 if options else 3)
    assert read_safetensors(tmp_path / "out") == model.tensors


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_dry_run_counts_the_bytes_to_quantize(tmp_path: Path, is_trained: bool) -> None:
    """The number is a lower bound, because some bytes are read twice."""
    model = make_model(BLOCKS)
    base = model.write(tmp_path / "base")
    name, values = trained(model)
    floats = {**model.truth(), **({name: float_value(values, "BF16")} if is_trained else {})}
    source = write_dcp(tmp_path / "step", floats)
    planned = quantize(source, base, tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    written = quantize(source, base, tmp_path / "out")
    assert planned.bytes_written == planned.output_bytes == written.output_bytes
    assert planned.output_bytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    quantized = {part for weight in model.weights.values() for part in weight.parts}
    base_bytes = nbytes({part: model.tensors[part] for part in quantized})
    assert planned.bytes_read == nbytes(floats) + base_bytes
    assert written.bytes_read >= planned.bytes_read


# What cannot be quantized like the base


def test_a_base_without_quantized_weights_is_refused(tmp_path: Path) -> None:
    model = make_model(BLOCKS)
    base = model.write(tmp_path / "quantized")
    ckptx.convert("to-hf", base, tmp_path / "base", dequantize=True)
    source = write_dcp(tmp_path / "step", model.truth())
    with pytest.raises(InputError) as caught:
        quantize(source, tmp_path / "base", tmp_path / "out")
    assert str(caught.value) == f"{tmp_path / 'base'}: no tensor is quantized; leave out --quantize"


def test_a_source_with_none_of_the_weights_of_the_base_is_refused(tmp_path: Path) -> None:
    model = make_model(BLOCKS)
    base = model.write(tmp_path / "base")
    source = write_dcp(tmp_path / "step", model.plain)
    with pytest.raises(InputError) as caught:
        quantize(source, base, tmp_path / "out", allow_config_mismatch=True)
    assert str(caught.value) == (
        f"{source}: has none of the weights that are quantized in {base}, such as "
        f'"{next(iter(model.weights))}"; pass the base that the model was trained from'
    )


def test_a_source_with_other_names_is_refused(tmp_path: Path) -> None:
    model = make_model(BLOCKS)
    base = model.write(tmp_path / "base")
    name = next(iter(model.weights))
    floats = {("another.weight" if each == name else each): data for each, data in model.truth().items()}
    with pytest.raises(InputError) as caught:
        quantize(write_dcp(tmp_path / "step", floats), base, tmp_path / "out", allow_config_mismatch=True)
    assert f'has no "{name}", which is quantized in {base}, but has "another.weight" instead' in str(caught.value)


def test_a_source_that_is_quantized_already_is_refused(tmp_path: Path) -> None:
    model = make_model(BLOCKS)
    base = model.write(tmp_path / "base")
    scale = next(iter(model.decoded))
    source = write_dcp(tmp_path / "step", {**model.truth(), scale: value("F32", 2, 2)})
    with pytest.raises(UnsupportedError) as caught:
        quantize(source, base, tmp_path / "out", allow_config_mismatch=True)
    assert f'tensor "{scale}" has the name of a scale in the base; is the checkpoint quantized already?' in str(
        caught.value
    )


# `--dequantize`


@pytest.mark.parametrize("dtype", ["auto", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("label", LABELS[:2])
def test_a_dry_run_counts_the_bytes_that_decoding_reads(tmp_path: Path, label: str, dtype: str) -> None:
    model = make_model(label)
    source = model.write(tmp_path / "hf")
    options: dict[str, Any] = {"dequantize": True, "dtype": dtype, "allow_overflow": dtype != "auto"}
    planned = ckptx.convert("to-hf", source, tmp_path / "out", dry_run=True, **options)
    written = ckptx.convert("to-hf", source, tmp_path / "out", **options)
    read = nbytes({name: each for name, each in model.tensors.items() if name not in model.activation_scales})
    assert planned.bytes_read == written.bytes_read == read
    assert planned.output_bytes == written.output_bytes
    reason = "scale of activations or of the KV cache, which weights in floating point do not have"
    assert {row["name"]: row["reason"] for row in written.dropped} == dict.fromkeys(model.activation_scales, reason)
    assert written.dequantized["decoded"] == model.decoded
    assert written.ledger["decoded"] == len(model.decoded) and written.ledger["dropped"] == len(model.activation_scales)
    codes = next(iter(next(iter(model.weights.values())).parts.values()))[0]
    assert written.dtypes["before"] == {"BF16": len(model.plain), codes: len(model.weights)}
    kind = {"auto": "BF16", "bf16": "BF16", "fp32": "F32", "fp16": "F16"}[dtype]
    assert written.dtypes["after"] == {kind: len(model.plain) + len(model.weights)}
    if dtype in ("auto", "fp32"):
        found = read_safetensors(tmp_path / "out")
        for name, weight in model.weights.items():
            assert found[name] == weight.stored_truth(kind)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.parametrize("dtype", ["auto", "base", "bf16", "fp16", "fp32"])
def test_a_cast_of_quantized_weights_requires_dequantize(tmp_path: Path, dtype: str) -> None:
    model = make_model(BLOCKS)
    source = model.write(tmp_path / "hf")
    base = {"base": source} if dtype == "base" else {}
    if dtype in ("auto", "base"):
        ckptx.convert("to-hf", source, tmp_path / "out", dtype=dtype, **base)
        assert read_safetensors(tmp_path / "out") == model.tensors
        return
    with pytest.raises(UsageError) as caught:
        ckptx.convert("to-hf", source, tmp_path / "out", dtype=dtype)
    assert str(caught.value) == (
        f'--dtype {dtype}: "{next(iter(model.weights))}" of {source} is quantized (F8_E4M3), and --dtype does not cast '
        "quantized weights; add --dequantize to decode them"
    )
