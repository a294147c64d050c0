"""`verify --run --dequantize`: a quantized checkpoint computes what its decoded weights compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ckptx
from ckptx.errors import UnsupportedError
from tests.support.checkpoint_writers import Value, write_hf
from tests.support.quantized import as_floats, float_value, rng_of
from tests.support.quantized_models import QuantizedModel, encode_model, make_model


def make_trained_model(label: str) -> QuantizedModel:
    """Return a quantized model whose values have the size of those of an initialized one."""
    model, rng = make_model(label), rng_of("run", label)
    values = {name: rng.normal(0, 0.05, each.truth.shape).astype(np.float32) for name, each in model.weights.items()}
    model = encode_model(label, model, values)
    plain: dict[str, Value] = {}
    for name, tensor in model.plain.items():
        numbers = np.ones(tensor[1]) if name.endswith("norm.weight") else rng.normal(0, 0.05, tensor[1])
        plain[name] = float_value(numbers, tensor[0])
    return replace(model, plain=plain, tensors=model.tensors | plain)


@pytest.mark.parametrize("label", ["qwen3_moe, fp8 blocks", "gpt_oss, mxfp4", "llama, int4 zero points"])
def test_equal_outputs(tmp_path: Path, label: str) -> None:
    model = make_trained_model(label)
    source = model.write(tmp_path / "source", shards=2)
    decoded = write_hf(tmp_path / "decoded", model.truth(), config=model.config)
    report = ckptx.verify(source, decoded, run=True, dequantize=True, backward=False)
    assert report.exit == 0, report
    name = list(model.weights)[-1]
    values = as_floats(model.truth()[name])
    wrong = model.truth() | {name: float_value(np.roll(values, 1, axis=-1), "BF16")}
    changed = write_hf(tmp_path / "changed", wrong, config=model.config)
    report = ckptx.verify(source, changed, run=True, dequantize=True, backward=False)
    assert report.exit == 1


def test_a_quantized_model_does_not_run_as_it_is(tmp_path: Path) -> None:
    source = make_trained_model("llama, fp8 blocks").write(tmp_path / "source")
    with pytest.raises(UnsupportedError, match="--dequantize"):
        ckptx.verify(source, source, run=True)
