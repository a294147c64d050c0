"""`verify --run --dequantize`: a quantized checkpoint computes what its decoded weights compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptx
from ckptx.errors import UnsupportedError
from tests.support.checkpoint_writers import write_hf
from tests.support.quantized import as_floats, float_value
from tests.support.quantized_models import make_trained_model

MODELS_OF_HUB = [
    "qwen3_moe, fp8 blocks",
    "deepseek, fp8 blocks of published sizes",
    "deepseek, int4 experts",
    "gpt_oss, mxfp4",
    "llama, nvfp4 and fp8",
]


def load_transformers(path: Path, **options: Any) -> Any:
    """Load a model with transformers in the stored dtype, and check that no weight is missing."""
    import torch
    from transformers import AutoModelForCausalLM

    model, notes = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, output_loading_info=True, experts_implementation="eager", **options
    )
    assert not notes["missing_keys"] and not notes["mismatched_keys"]
    return model.eval()


def compute_logits(model: Any) -> bytes:
    import torch

    from tests.support.torch_dcp import raw

    tokens = torch.randint(0, model.config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return raw(model(tokens).logits)


def train(model: Any, steps: int = 10) -> list[float]:
    """Return the loss of each of a few AdamW steps on fixed tokens."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, model.config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(2))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize("label", MODELS_OF_HUB)
def test_logits_and_training_steps_of_transformers(tmp_path: Path, label: str) -> None:
    """Decoded files, and a DCP for TP 4 x PP 2 read by stock torch, compute and train like the formula's weights."""
    import torch
    import torch.distributed.checkpoint as dcp

    model = make_trained_model(label)
    source = model.write(tmp_path / "source", shards=2)
    expected_model = load_transformers(write_hf(tmp_path / "formula", model.truth(), config=model.config))
    expected = compute_logits(expected_model)
    ckptx.convert("to-hf", source, tmp_path / "hf", dequantize=True)
    assert compute_logits(load_transformers(tmp_path / "hf")) == expected
    ckptx.convert("to-dcp", source, tmp_path / "dcp", dequantize=True, tp=4, pp=2, names="model")
    loaded = load_transformers(tmp_path / "hf")
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.fill_(torch.nan)
    state = {name: tensor for name, tensor in loaded.state_dict().items() if not name.endswith("inv_freq")}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert compute_logits(loaded) == expected
    losses = train(loaded)
    assert losses == train(expected_model) and losses[-1] < losses[0]


@pytest.mark.parametrize("label", ["qwen3_moe, fp8 blocks", "gpt_oss, mxfp4"])
def test_transformers_decodes_to_the_same_logits(tmp_path: Path, label: str) -> None:
    """transformers decodes these two schemes itself, and is right if the blocks divide the weights."""
    from transformers import FineGrainedFP8Config, Mxfp4Config

    model = make_trained_model(label)
    source = model.write(tmp_path / "source")
    ckptx.convert("to-hf", source, tmp_path / "hf", dequantize=True)
    how = Mxfp4Config(dequantize=True) if "mxfp4" in label else FineGrainedFP8Config(dequantize=True)
    decoded = load_transformers(source, quantization_config=how)
    assert compute_logits(load_transformers(tmp_path / "hf")) == compute_logits(decoded)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("label", MODELS_OF_HUB)
def test_a_sharded_dcp_runs_under_tp(tmp_path: Path, label: str) -> None:
    source = make_trained_model(label).write(tmp_path / "source", shards=2)
    ckptx.convert("to-dcp", source, tmp_path / "dcp", dequantize=True, tp=4, pp=2)
    report = ckptx.verify(source, tmp_path / "dcp", run=True, dequantize=True, tp=2)
    assert report.exit == 0, report


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
