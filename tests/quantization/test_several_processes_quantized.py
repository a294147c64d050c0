"""Several processes that decode or encode one output: the bytes that one process writes."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptx
from tests.quantization.test_quantize_base import quantize_like, write_step
from tests.support.checkpoint_writers import names_in, tree_bytes
from tests.support.quantized import rng_of
from tests.support.quantized_models import make_model
from tests.support.ranks import finish, start

CONVERT = "import sys\nfrom ckptx.cli.main import run\nsys.argv[1] = 'convert'\nrun()"


@pytest.mark.parametrize("label", ["qwen3_moe, nvfp4", pytest.param("gpt_oss, mxfp4", marks=pytest.mark.slow)])
def test_dequantize(tmp_path: Path, label: str) -> None:
    source = make_model(label).write(tmp_path / "in" / "source", shards=3)
    dst = tmp_path / "out" / "made"
    arguments: list[object] = [source, dst, "--to", "dcp", "--tp", 2, "--pp", 2, "--dequantize"]
    assert [code for code, _ in finish(start(arguments, arguments))] == [0, 0]
    ckptx.reshard(source, tmp_path / "one", to="dcp", tp=2, pp=2, dequantize=True)
    assert tree_bytes(dst) == tree_bytes(tmp_path / "one")
    assert names_in(dst.parent) == ["made"]


def test_quantize(tmp_path: Path) -> None:
    model = make_model("llama, nvfp4")
    base = model.write(tmp_path / "in" / "base", shards=3)
    rng = rng_of("processes")
    changed = list(model.weights)[::2]
    values = {name: rng.normal(0, 0.03, model.weights[name].truth.shape).astype("f4") for name in changed}
    step = write_step(tmp_path / "in" / "step", model, values)
    dst = tmp_path / "out" / "made"
    arguments: list[object] = ["to-hf", step, dst, "--base", base, "--quantize", "base"]
    codes = dict.fromkeys(range(2), CONVERT)
    assert [code for code, _ in finish(start(arguments, arguments, codes=codes))] == [0, 0]
    quantize_like(step, base, tmp_path / "one")
    assert tree_bytes(dst) == tree_bytes(tmp_path / "one")
