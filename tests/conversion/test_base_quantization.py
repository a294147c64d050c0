"""A step in floats under a base that is quantised: nothing that is written may speak of quantisation.

transformers 5 and vLLM build quantised layers for such a config, find no scales, and keep what they made at random.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptx.api.convert import convert
from ckptx.api.reshard import reshard
from ckptx.report.documents.conversion import ConversionReport
from tests.conversion.test_base_dtypes import SIZES
from tests.support.checkpoint_writers import LLAMA, Value, llama, value, write_dcp, write_hf

METHODS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"dtype": "int8"}}},
    "modelopt": {"quant_method": "modelopt"},
}
BESIDE = ("hf_quant_config.json", "quantize_config.json", "quantization_config.json")
CONFIG = {**LLAMA, **SIZES}
FLOAT = llama(layers=1)
MATRICES = [name for name, (_, shape, _) in FLOAT.items() if name.endswith("proj.weight")]
# One quantised weight is enough: mixed models are quantised.
QUANTISED: dict[str, Value] = {
    name: (value("I8", *tensor[1], seed=7) if name == MATRICES[0] else tensor) for name, tensor in FLOAT.items()
}
Command = Callable[[Path, Path, Path | None], ConversionReport]
COMMANDS: dict[str, Command] = {
    "dcp2hf": lambda src, dst, base: convert("dcp2hf", src, dst, **_base(base)),
    "reshard dcp": lambda src, dst, base: reshard(src, dst, tp=2, to="dcp", **_base(base)),
    "reshard safetensors": lambda src, dst, base: reshard(src, dst, tp=2, to="safetensors", **_base(base)),
}


def _base(base: Path | None) -> dict[str, Any]:
    return {} if base is None else {"base": str(base)}


def published(root: Path, method: dict[str, Any], tensors: dict[str, Value], *, nested: bool = False) -> Path:
    config = {**CONFIG, "vision_config" if nested else "quantization_config": {"a": 1}}
    if nested:
        config["vision_config"] = {"a": 1, "quantization_config": method}
    else:
        config["quantization_config"] = method
    write_hf(root, tensors, config=config)
    for name in BESIDE:
        (root / name).write_text("{}")
    return root


def speaks(root: Path) -> list[str]:
    """Every file of an output that says it is quantised."""
    found = [name for name in BESIDE if (root / name).exists()]
    return found + ["config.json"] * ("quantization_config" in (root / "config.json").read_text())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_step_in_floats_does_not_speak_of_quantisation(
    tmp_path: Path, method: str, command: str, nested: bool
) -> None:
    base = published(tmp_path / "base", METHODS[method], QUANTISED, nested=nested)
    step = write_dcp(tmp_path / "step", FLOAT)
    report = COMMANDS[command](step, tmp_path / "out", base)
    assert speaks(tmp_path / "out") == []
    key = "vision_config.quantization_config" if nested else "quantization_config"
    assert {"key": key, "before": METHODS[method], "after": None} in report.config_edits
    assert sum("not copied, it describes the quantization of the base" in line for line in report.notes) == len(BESIDE)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: config[name] for name in CONFIG} == CONFIG


@pytest.mark.parametrize("command", COMMANDS)
def test_a_quantised_step_keeps_it(tmp_path: Path, command: str) -> None:
    base = published(tmp_path / "base", METHODS["fp8"], QUANTISED)
    step = write_dcp(tmp_path / "step", QUANTISED)
    report = COMMANDS[command](step, tmp_path / "out", base)
    assert len(speaks(tmp_path / "out")) == 4
    assert all(edit["after"] is not None for edit in report.config_edits)


@pytest.mark.parametrize("command", ["reshard dcp", "reshard safetensors"])
def test_a_published_config_is_right_whatever_it_says(tmp_path: Path, command: str) -> None:
    source = published(tmp_path / "source", METHODS["fp8"], FLOAT)
    COMMANDS[command](source, tmp_path / "out", None)
    assert len(speaks(tmp_path / "out")) == 4


def test_a_step_beside_its_config_counts_as_trained(tmp_path: Path) -> None:
    step = write_dcp(tmp_path / "step", FLOAT, config={**CONFIG, "quantization_config": METHODS["fp8"]})
    convert("dcp2hf", step, tmp_path / "out")
    assert speaks(tmp_path / "out") == []
