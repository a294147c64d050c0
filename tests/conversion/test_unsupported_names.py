"""`--names` for a class with unknown names or a conversion that ckptx lacks: an error tells which names to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import ckptx
from ckptx.errors import UnsupportedError
from tests.conversion.steps import CONFIG
from tests.support.checkpoint_writers import llama, value, write_hf

ERNIE = {"architectures": ["Ernie4_5_VLMoeForConditionalGeneration"], "model_type": "ernie4_5_vl_moe"}
EXPERTS = {
    f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight": value("BF16", 4, 4, seed=expert)
    for expert in range(2)
    for name in ("gate", "up", "down")
}
KEEPS = "; pass --names hf to keep the names"


def run(command: str, source: Path, out: Path, names: str | None) -> Any:
    options: dict[str, Any] = {"names": names, "allow_config_mismatch": True}
    if command == "to-dcp":
        return ckptx.convert("to-dcp", source, out, **options)
    return ckptx.reshard(source, out, tp=2, to=command, **options)


@pytest.mark.parametrize("names", [None, "model", "hf"])
@pytest.mark.parametrize("command", ["to-dcp", "dcp", "safetensors"])
def test_a_conversion_that_ckptx_lacks_is_refused(tmp_path: Path, command: str, names: str | None) -> None:
    """Sharded safetensors have model names by default, and the error says how to choose others."""
    source = write_hf(tmp_path / "hf", EXPERTS, config=ERNIE)
    if names == "hf" or (names is None and command != "safetensors"):
        assert run(command, source, tmp_path / "out", names).tensors == len(EXPERTS)
        return
    with pytest.raises(UnsupportedError) as caught:
        run(command, source, tmp_path / "out", names)
    assert "produced by ErnieFuseAndSplitTextVisionExperts of transformers" in str(caught.value)
    assert str(caught.value).endswith(KEEPS) == (names is None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", [None, "model", "hf", "torchtitan"])
@pytest.mark.parametrize("command", ["to-dcp", "dcp", "safetensors"])
def test_names_of_an_unknown_class_are_kept(tmp_path: Path, command: str, names: str | None) -> None:
    source = write_hf(tmp_path / "hf", llama(), config={**CONFIG, "architectures": ["NobodyForCausalLM"]})
    if names is not None:
        with pytest.raises(UnsupportedError) as caught:
            run(command, source, tmp_path / "out", names)
        assert str(caught.value) == f"--names {names}: the naming of this class is unknown; leave out --names"
        return
    report = run(command, source, tmp_path / "out", names)
    assert report.names is None and report.tensors == len(llama())
    if command == "safetensors":
        for path in (tmp_path / "out").glob("*.safetensors"):
            with safe_open(path, "np") as file:
                assert {*file.keys()} == llama().keys()
