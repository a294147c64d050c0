"""`reshard` prints a note if `verify --run` cannot run the layout that it writes, and none otherwise."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import PeerFailure, UnsupportedError
from tests.support.checkpoint_writers import LLAMA, value, write_hf

CONFIG = {
    **LLAMA, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16,
    "intermediate_size": 24, "vocab_size": 32, "head_dim": 4,
}  # fmt: skip
NOTE = "verify --run and forecast cannot run this layout: "


def model(path: Path, *, tied: bool = False, **changes: Any) -> Path:
    """Write a sound HF checkpoint of a tiny Llama."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (16, 16), f"{at}.self_attn.k_proj.weight": (8, 16),
            f"{at}.self_attn.v_proj.weight": (8, 16), f"{at}.self_attn.o_proj.weight": (16, 16),
            f"{at}.mlp.gate_proj.weight": (24, 16), f"{at}.mlp.up_proj.weight": (24, 16),
            f"{at}.mlp.down_proj.weight": (16, 24), f"{at}.input_layernorm.weight": (16,),
            f"{at}.post_attention_layernorm.weight": (16,),
        }  # fmt: skip
    if not tied:
        shapes["lm_head.weight"] = (32, 16)
    tensors = {name: value("F32", *shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    return write_hf(path, tensors, config={**CONFIG, "tie_word_embeddings": tied, **changes})


def notes(source: Path, tmp_path: Path, **options: Any) -> list[str]:
    """Return what `reshard` says about running."""
    report = ckptx.reshard(source, tmp_path / "out", dry_run=True, **options)
    return [each for each in report.notes if "cannot run" in each]


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("pp", [1, 2])
def test_tp_that_does_not_divide_the_heads(tmp_path: Path, to: str, tp: int, pp: int) -> None:
    found = notes(model(tmp_path / "hf"), tmp_path, tp=tp, pp=pp, to=to)
    if tp <= 2:
        assert found == []
        return
    (note,) = found
    assert note.startswith(f"{NOTE}LlamaForCausalLM: tp={tp} does not divide ")
    assert note.endswith("each TP rank must hold whole attention heads, choose tp 1 or 2")


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"dp_shard": 2}])
def test_a_quantized_checkpoint(tmp_path: Path, mesh: dict[str, int]) -> None:
    source = model(tmp_path / "hf", quantization_config={"quant_method": "compressed-tensors"})
    reason = (
        "LlamaForCausalLM: its config declares a quantization, and quantized weights cannot be run; pass --dequantize"
    )
    assert notes(source, tmp_path, **mesh) == [NOTE + reason]


STYLES = ("colwise_rep", "embedding_rowwise", "replicate")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("styles", [*itertools.product((None, *STYLES), repeat=2)])
def test_rules_that_shard_copies_of_a_tied_weight_differently(
    tmp_path: Path, styles: tuple[str | None, str | None], pp: int, tied: bool
) -> None:
    """The defaults and the first two styles shard the vocabulary, `replicate` nothing."""
    modules = ("model.embed_tokens", "lm_head")
    plan = {module: style for module, style in zip(modules, styles, strict=True) if style is not None}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    options = {"tp_plan": tmp_path / "plan.json"} if plan else {}
    found = notes(model(tmp_path / "hf", tied=tied), tmp_path, tp=2, pp=pp, to="dcp", **options)
    differ = (styles[0] == "replicate") != (styles[1] == "replicate")
    assert bool(found) == (tied and pp == 2 and differ)
    for note in found:
        assert note.startswith("verify --run cannot run this layout: model.embed_tokens.weight and lm_head.weight are")


@pytest.mark.slow
def test_verify_run_refuses_tied_copies_that_are_sharded_differently(tmp_path: Path) -> None:
    source = model(tmp_path / "hf", tied=True)
    (tmp_path / "plan.json").write_text('{"lm_head": "replicate"}')
    with pytest.raises(PeerFailure, match="are sharded differently") as refused:
        ckptx.verify(source, source, run=True, tp=2, pp=2, tp_plan=tmp_path / "plan.json")
    assert refused.value.exit_code == UnsupportedError.exit_code


def test_the_note_needs_no_torch_and_keeps_the_exit_code(tmp_path: Path) -> None:
    code = (
        "import sys; from ckptx.cli.main import main; import ckptx\n"
        f"report = ckptx.reshard({str(model(tmp_path / 'hf'))!r}, {str(tmp_path / 'out')!r}, tp=3)\n"
        "print(report.exit, 'torch' in sys.modules, *report.notes, sep='|')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("0|False|") and NOTE in result.stdout
