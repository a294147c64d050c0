"""Random changes to configs and headers of quantized checkpoints: a result or one clear error, no other exception."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import CkptxError, InternalError
from tests.support.checkpoint_writers import BITS, Value, names_in, value, write_hf
from tests.support.quantized import SCHEMES, Rng, config_of, rng_of

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 4, 8, 16, 32, 128, 10**12, 1.5, "", "fp8", "int", "float", "group", "channel",
    "block", "tensor", "mxfp4", "NVFP4", "FP8", "pack-quantized", "float-quantized", "modelopt", "compressed-tensors",
    [], [32, 32], [1, 32], [0], {}, {"weights": {}}, {"quant_method": "fp8"}, "ue8m0", "\x1b[31m\n", "static",
]  # fmt: skip
SUFFIXES = (
    ".weight", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale", ".weight_packed",
    ".weight_zero_point", ".weight_shape", ".scale", "_blocks", "_scales", "_scale", "_scale_inv", ".input_scale",
)  # fmt: skip


def mutate_json(node: Any, rng: Rng) -> None:
    """Change one value somewhere in a config."""
    places = []

    def collect(each: Any) -> None:
        for key in each if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ():
            places.append((each, key))
            collect(each[key])

    collect(node)
    if places:
        parent, key = places[int(rng.integers(len(places)))]
        if isinstance(parent, dict) and rng.random() < 0.2:
            del parent[key]
        else:
            parent[key] = VALUES[int(rng.integers(len(VALUES)))]


def mutate_tensors(tensors: dict[str, Value], rng: Rng) -> None:
    """Remove, rename, copy, retype or reshape one tensor."""
    name = list(tensors)[int(rng.integers(len(tensors)))]
    dtype, shape, _ = tensors[name]
    what = int(rng.integers(5))
    if what == 0 and len(tensors) > 1:
        del tensors[name]
    elif what == 1:
        stem = name.removesuffix(max((each for each in SUFFIXES if name.endswith(each)), key=len, default=""))
        tensors[stem + SUFFIXES[int(rng.integers(len(SUFFIXES)))]] = tensors[name]
    elif what == 2:
        other = sorted(BITS)[int(rng.integers(len(BITS)))]
        if BITS[other] >= 8 or (shape and shape[-1] % 2 == 0):
            tensors[name] = value(other, *shape)
    else:
        sizes = [int(rng.choice([0, 1, size, size + 1, size * 2, 2])) for size in shape]
        if what == 3 and sizes and rng.random() < 0.5:
            sizes.pop(int(rng.integers(len(sizes))))
        elif rng.random() < 0.3:
            sizes.insert(0, 2)
        if BITS[dtype] >= 8 or (sizes and sizes[-1] % 2 == 0):
            tensors[name] = value(dtype, *sizes)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("seed", range(1200))
def test_a_result_or_one_clear_error(tmp_path: Path, seed: int) -> None:
    rng = rng_of("mutations", seed)
    label = list(SCHEMES)[seed % len(SCHEMES)]
    scheme = SCHEMES[label]
    name, shape = (
        ("layers.0.experts.up_proj", (2, 64, 8)) if label == "mxfp4 blocks" else ("layers.0.up_proj.weight", (24, 64))
    )
    tensors: dict[str, Value] = {"norm.weight": value("BF16", 8), **scheme.coder.make(name, shape, rng).parts}
    config = json.loads(json.dumps(config_of(scheme)))
    document = json.loads(json.dumps(scheme.document))
    for _ in range(int(rng.integers(1, 4))):
        which = rng.random()
        if which < 0.5:
            mutate_tensors(tensors, rng)
        elif document is not None and which < 0.6:
            mutate_json(document, rng)
        else:
            mutate_json(config, rng)
    source = write_hf(tmp_path / "source", tensors, config=config)
    if document is not None:
        (source / "hf_quant_config.json").write_text(json.dumps(document))
    ckptx.inspect(source)
    try:
        report = ckptx.convert("to-dcp", source, tmp_path / "out" / "made", dequantize=True)
    except CkptxError as error:
        assert error.exit_code in (3, 4) and not isinstance(error, InternalError), error
        assert "\n" not in str(error).replace("\x1b[31m\n", "") and len(str(error)) < 1000
        assert not (tmp_path / "out").exists() or names_in(tmp_path / "out") == []
    else:
        assert report.ledger["source"] == len(tensors)
        assert ckptx.verify(source, tmp_path / "out" / "made", dequantize=True).exit == 0
        # What is decoded is also encoded, or refused.
        try:
            ckptx.convert("to-hf", tmp_path / "out" / "made", tmp_path / "back", base=source, quantize="base")
        except CkptxError as error:
            assert error.exit_code in (3, 4) and not isinstance(error, InternalError), error
