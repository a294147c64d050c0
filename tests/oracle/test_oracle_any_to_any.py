"""`convert to-hf` and `convert to-dcp` of every format, read by stock transformers, safetensors and torch.

An HF checkpoint goes to HF (completed, cast, in shards of another size), a DCP and sharded safetensors to a DCP.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ckptx
from ckptx.errors import UsageError
from tests.support import torch_dcp
from tests.support.slow import slow_but

NAMES = ("llama-tied", "llama-untied", "qwen3-moe")
HfOf = Callable[[str], Path]


def loaded(root: Path) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of a model, as `from_pretrained` loads it."""
    model = AutoModelForCausalLM.from_pretrained(root, dtype="auto")
    return dict(model.state_dict())


def stored(root: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the safetensors of a directory."""
    return {name: each for path in sorted(root.glob("*.safetensors")) for name, each in load_file(path).items()}


@pytest.mark.parametrize("name", slow_but(NAMES, NAMES[:1]))
def test_hf_in_shards_of_another_size_loads_to_the_same_model(hf_of: HfOf, tmp_path: Path, name: str) -> None:
    hf = hf_of(name)
    report = ckptx.convert("to-hf", hf, tmp_path / "small", max_shard_size="20KB")
    assert (report.command, report.exit) == ("convert to-hf", 0)
    files = [load_file(path).values() for path in (tmp_path / "small").glob("*.safetensors")]
    assert len(files) > 2
    assert all(len(tensors) == 1 or sum(each.nbytes for each in tensors) <= 20_000 for tensors in files)
    torch_dcp.assert_same_tensors(stored(tmp_path / "small"), stored(hf))
    torch_dcp.assert_same_tensors(loaded(tmp_path / "small"), loaded(hf))
    ckptx.convert("to-hf", tmp_path / "small", tmp_path / "one", index="always")
    assert (tmp_path / "one" / "model.safetensors.index.json").is_file()
    torch_dcp.assert_same_tensors(loaded(tmp_path / "one"), loaded(hf))


@pytest.mark.parametrize("name", slow_but(NAMES, NAMES[:1]))
def test_hf_is_cast(hf_of: HfOf, tmp_path: Path, name: str) -> None:
    ckptx.convert("to-hf", hf_of(name), tmp_path / "half", dtype="bf16")
    expected = {name: each.bfloat16() for name, each in stored(hf_of(name)).items()}
    torch_dcp.assert_same_tensors(stored(tmp_path / "half"), expected)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("direction", ["to-hf", "to-dcp", "hf2dcp"])
def test_hf_without_a_config_is_completed_from_a_base(hf_of: HfOf, tmp_path: Path, direction: str) -> None:
    hf, bare, out = hf_of("llama-tied"), tmp_path / "bare", tmp_path / "out"
    bare.mkdir()
    for path in hf.glob("*.safetensors*"):
        (bare / path.name).write_bytes(path.read_bytes())
    ckptx.convert(direction, bare, out, base=hf)  # type: ignore[call-overload]  # one of three words
    assert (out / "config.json").read_bytes() == (hf / "config.json").read_bytes()
    if direction == "to-hf":
        torch_dcp.assert_same_tensors(loaded(out), loaded(hf))
    assert ckptx.verify(hf, out).exit == 0


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("source", ["dcp", "sharded", "sharded DCP", "trained"])
def test_a_dcp_of_anything_is_read_by_torch(hf_of: HfOf, tmp_path: Path, source: str, tp: int) -> None:
    hf, src, out = hf_of("llama-untied"), tmp_path / "src", tmp_path / "out"
    expected = stored(hf)
    if source == "sharded":
        ckptx.reshard(hf, src, tp=2)
    elif source == "trained":
        moments = {f"optimizer.state.{name}.exp_avg": each + 1 for name, each in expected.items()}
        expected = {f"model.{name}": each for name, each in expected.items()} | moments
        torch.distributed.checkpoint.save(expected, checkpoint_id=src, no_dist=True)
    else:
        ckptx.convert("to-dcp", hf, src, tp=1 if source == "dcp" else 2, dp_shard=1 if source == "dcp" else 2)
    report = ckptx.convert("to-dcp", src, out, tp=tp, base=hf)
    assert report.exit == 0
    torch_dcp.assert_same_tensors(torch_dcp.load(out), expected)
    if source == "trained":
        ckptx.convert("to-dcp", src, tmp_path / "model", base=hf, optimizer="drop", dtype="bf16")
        kept = {name: each.bfloat16() for name, each in expected.items() if not name.startswith("optimizer.")}
        torch_dcp.assert_same_tensors(torch_dcp.load(tmp_path / "model"), kept)


def test_a_chain_through_every_format_comes_back_byte_for_byte(hf_of: HfOf, tmp_path: Path) -> None:
    hf = hf_of("llama-tied")
    ckptx.convert("to-dcp", hf, tmp_path / "1")
    ckptx.convert("to-dcp", tmp_path / "1", tmp_path / "2", tp=2)
    ckptx.reshard(tmp_path / "2", tmp_path / "3", to="safetensors", tp=2)
    ckptx.convert("to-dcp", tmp_path / "3", tmp_path / "4", dp_shard=3)
    ckptx.convert("to-hf", tmp_path / "4", tmp_path / "5")
    torch_dcp.assert_same_tensors(loaded(tmp_path / "5"), loaded(hf))
    ours = torch_dcp.file_bytes(tmp_path / "5")
    assert {name: data for name, data in ours.items() if name != "ckptx.json"} == torch_dcp.file_bytes(hf)


def test_a_prefix_is_added_to_names_of_hf_alone(hf_of: HfOf, tmp_path: Path) -> None:
    ckptx.convert("to-dcp", hf_of("llama-tied"), tmp_path / "dcp")
    for function in (lambda **o: ckptx.convert("to-dcp", **o), lambda **o: ckptx.reshard(to="dcp", **o)):
        with pytest.raises(UsageError, match=r"^--prefix .* use --source-prefix"):
            function(src=tmp_path / "dcp", dst=tmp_path / "out", prefix="app.")
    with pytest.raises(UsageError, match=r"^convert to-hf does not take --prefix; use --source-prefix"):
        ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "out", prefix="app.")  # type: ignore[call-overload]
