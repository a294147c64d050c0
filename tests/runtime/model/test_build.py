"""Models without storage, then with it: what is not in a checkpoint must be what `from_pretrained` computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ckptx.errors import InputError, UnsupportedError, UsageError
from ckptx.runtime.checkpointing.reading import open_source
from ckptx.runtime.model.build import build_model, materialize, translate_build_errors
from tests.support.load_ranks import load_with_transformers
from tests.support.models import EVERY, write
from tests.support.slow import slow_but

# Rotary tables of every kind, embedding scales, position ids, masks, towers, none at all.
FAST = ("llama-tied", "gemma3-vlm", "gemma4-vlm", "gpt2", "bert-mlm", "mamba", "deepseek-v3", "qwen2.5-vl")


def computed(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that no checkpoint holds."""
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def fault(model: nn.Module, expected: nn.Module) -> str | None:
    """The first buffer that is not computed as `expected` has it, or parameter of another dtype or shape."""
    mine, theirs = computed(model), computed(expected)
    if mine.keys() != theirs.keys():
        return f"names {mine.keys() ^ theirs.keys()}"
    for name, buffer in mine.items():
        if buffer.dtype is not theirs[name].dtype or not torch.equal(buffer, theirs[name]):
            return name
    held = expected.state_dict()
    return next(
        (
            name
            for name, tensor in model.state_dict().items()
            if (tensor.dtype, tensor.shape) != (held[name].dtype, held[name].shape)
        ),
        None,
    )


@pytest.mark.parametrize("recipe", slow_but(EVERY, FAST))
def test_buffers_are_those_of_transformers(recipe: str, tmp_path: Path) -> None:
    write(EVERY[recipe], tmp_path)
    model = build_model(tmp_path)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    materialize(model)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert fault(model, load_with_transformers(tmp_path)) is None


def test_the_comparison_notices_a_buffer(llama: Path) -> None:
    model = build_model(llama)
    materialize(model)
    model.get_buffer("model.rotary_emb.inv_freq")[1] *= 1.001
    assert fault(model, load_with_transformers(llama)) == "model.rotary_emb.inv_freq"


def test_without_a_dtype_in_the_config_it_is_what_is_stored(tmp_path: Path) -> None:
    write(EVERY["qwen2"], tmp_path)  # in bfloat16
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: config[key] for key in config.keys() - {"dtype"}}))
    expected = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path)
    with open_source(tmp_path) as source:
        model = build_model(tmp_path, default_dtype=source.dtype)
    assert {each.dtype for each in model.parameters()} == {each.dtype for each in expected.parameters()}
    assert model.dtype is torch.bfloat16
    assert build_model(tmp_path).dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_transformers_keeps_in_float32_is_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    write(EVERY["t5"], tmp_path)
    expected = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
    model = build_model(tmp_path, dtype=dtype)
    materialize(model)
    assert fault(model, expected) is None
    assert (model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype is dtype) == (dtype is not torch.float16)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write(EVERY["llama-tied"], tmp_path / "llama")
    return tmp_path / "llama"


def test_tied_names_share_a_parameter_before_and_after(llama: Path) -> None:
    model = build_model(llama)
    for _ in range(2):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        materialize(model)
    assert (
        sum(1 for name, _ in model.named_parameters() if name in ("lm_head.weight", "model.embed_tokens.weight")) == 1
    )


def test_names_that_shall_not_be_tied_are_two_parameters(llama: Path) -> None:
    model = build_model(llama, untied=["lm_head.weight"])
    materialize(model)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert "lm_head.weight" not in model.all_tied_weights_keys


def test_the_class_attention_and_dtype_are_those_asked_for(llama: Path) -> None:
    model = build_model(llama, dtype=torch.float16, attn_implementation="eager")
    assert type(model) is transformers.LlamaForCausalLM and not model.training
    assert model.config._attn_implementation == "eager" and model.dtype is torch.float16
    assert build_model(llama).config._attn_implementation == "sdpa"
    assert torch.get_default_dtype() is torch.float32


def test_random_numbers_are_not_used_up(llama: Path) -> None:
    write(EVERY["mamba"], llama.parent / "mamba")
    before = torch.get_rng_state()
    materialize(build_model(llama.parent / "mamba"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stage_without_some_layers_gets_storage(llama: Path) -> None:
    expected = computed(load_with_transformers(llama))
    model = build_model(llama)
    model.model.layers = nn.ModuleDict({"1": model.model.layers[1]})
    model.lm_head = None
    materialize(model)
    assert not model.model.layers["1"].mlp.up_proj.weight.is_meta
    assert all(torch.equal(buffer, expected[name]) for name, buffer in computed(model).items())


# ------------------------------------------------------------------ buffers that the class forgets


def test_buffers_that_no_class_initialises_come_from_the_constructor(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.PreTrainedModel, "_init_weights", lambda self, module: None)
    model = build_model(llama)
    materialize(model)
    config = transformers.LlamaConfig.from_pretrained(llama)
    assert fault(model, transformers.LlamaForCausalLM._from_config(config, dtype=config.dtype)) is None


def test_a_buffer_that_nothing_computes_is_refused(llama: Path) -> None:
    model = build_model(llama)
    model.model.register_buffer("extra", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(
        UnsupportedError,
        match=r"LlamaForCausalLM: neither _init_weights nor the constructor computes its buffer model\.extra",
    ):
        materialize(model)


def test_a_class_that_fails_to_compute_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, module: nn.Module) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(transformers.PreTrainedModel, "_init_weights", fail)
    with pytest.raises(UnsupportedError, match=r"buffers at model\.rotary_emb cannot be computed: ZeroDivisionError"):
        materialize(build_model(llama))


# ------------------------------------------------------------------------------- remote code

REMOTE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class FarConfig(PretrainedConfig):
    model_type = "far"
    def __init__(self, width=4, **kwargs):
        self.width = width
        super().__init__(**kwargs)

class FarModel(PreTrainedModel):
    config_class = FarConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(8, config.width)
        self.register_buffer("powers", 2.0 ** torch.arange(config.width), persistent=False)
        self.post_init()
"""


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A class of its own, that computes a buffer in its constructor alone."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = tmp_path / "far"
    path.mkdir()
    (path / "modeling_far.py").write_text(REMOTE)
    code = {"AutoConfig": "modeling_far.FarConfig", "AutoModel": "modeling_far.FarModel"}
    (path / "config.json").write_text(
        json.dumps({"architectures": ["FarModel"], "auto_map": code, "model_type": "far", "width": 5})
    )
    return path


def test_remote_code_is_built_when_trusted_with_buffers_that_it_forgets(far: Path) -> None:
    model = build_model(far, trust_remote_code=True)
    materialize(model)
    assert model.powers.tolist() == [1, 2, 4, 8, 16]
    assert model.embed.weight.shape == (8, 5)


def test_remote_code_is_not_run_unless_trusted(far: Path) -> None:
    (far / "modeling_far.py").write_text("raise SystemExit('executed')")
    with pytest.raises(
        UnsupportedError, match=r"FarModel: .*has no such class; pass --trust-remote-code to use its code"
    ):
        build_model(far)


# ------------------------------------------------------------------------------- refusals


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        build_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"architectures": None}, InputError, r'"architectures" names no class'),
        ({"architectures": []}, InputError, r'"architectures" names no class'),
        ({"architectures": ["FutureForCausalLM"]}, UnsupportedError, "FutureForCausalLM: .* has no such class"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedError, "declares a quantization"),
        ({"num_hidden_layers": -3}, InputError, "num_hidden_layers is -3 and must be between 0 and"),
        ({"num_hidden_layers": 2**30}, InputError, "num_hidden_layers is 1073741824 and must be between 0 and"),
        ({"num_attention_heads": 0}, UnsupportedError, "LlamaForCausalLM: transformers .* cannot build it"),
        (
            {"num_attention_heads": 7},
            UnsupportedError,
            r"cannot build it .*Error: .*[^:]$",
        ),  # with the reason, not its lead
    ],
)
def test_a_config_that_cannot_be_built_is_refused(
    llama: Path, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(error, match=words):
        build_model(llama)


def test_an_error_of_ckptx_keeps_its_exit_code(tmp_path: Path) -> None:
    """A change of the config that the user asked for, and that the model has no setting for, is a usage error."""
    with pytest.raises(UsageError, match="no such setting"), translate_build_errors("LlamaForCausalLM", tmp_path):
        raise UsageError("no such setting")
    with (
        pytest.raises(UnsupportedError, match="ValueError: odd"),
        translate_build_errors("A", tmp_path),
    ):
        raise ValueError("odd")
