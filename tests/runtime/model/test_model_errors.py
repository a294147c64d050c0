"""What goes wrong in the code of a model is said of the model; what goes wrong in ours stays a defect."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from ckptx.errors import InputError, SpaceError, UnsupportedError
from ckptx.runtime.model import model_errors
from ckptx.runtime.model.model_errors import translate_runtime_errors

IDS = torch.zeros(1, 3, dtype=torch.long)


@pytest.fixture
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rigged(model: LlamaForCausalLM, error: Exception, module: str) -> None:
    """Makes a layer raise `error` from code of that module."""
    space = {"__name__": module, "error": error}
    exec("def forward(*args, **named):\n    raise error", space)
    model.model.layers[0].mlp.forward = space["forward"]


@pytest.mark.parametrize(
    "module", [modeling_llama.__name__, "transformers_modules.mine.modeling", "torch.nn.functional"]
)
@pytest.mark.parametrize("kind", [RuntimeError, IndexError, KeyError, TypeError, AttributeError, ZeroDivisionError])
def test_a_model_that_fails_is_unsupported(model: LlamaForCausalLM, module: str, kind: type[Exception]) -> None:
    rigged(model, kind("index 9 out of range\nat line 3"), module)
    with pytest.raises(UnsupportedError) as caught, translate_runtime_errors(model):
        model(IDS)
    said = str(caught.value)
    assert said.startswith(f"LlamaForCausalLM: the code of the model failed: {kind.__name__}: ")
    assert "index 9 out of range" in said and "\n" not in said


def test_what_torch_says_of_a_stage_is_not_the_cause(model: LlamaForCausalLM) -> None:
    rigged(model, RuntimeError("the cause"), modeling_llama.__name__)
    with (
        pytest.raises(UnsupportedError, match="RuntimeError: the cause; check its config"),
        translate_runtime_errors(model),
    ):
        try:
            model(IDS)
        except RuntimeError as error:
            raise RuntimeError("failed to run a stage") from error


@pytest.mark.parametrize("module", [model_errors.__name__, distributed_c10d.__name__])
def test_what_is_ours_or_of_another_rank_stays_what_it_is(model: LlamaForCausalLM, module: str) -> None:
    rigged(model, RuntimeError("Connection closed by peer"), module)
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"), translate_runtime_errors(model):
        model(IDS)
    with pytest.raises(KeyError, match="mine"), translate_runtime_errors(nn.Module()):
        raise KeyError("mine")


def test_refusals_pass_and_memory_is_space(model: LlamaForCausalLM) -> None:
    rigged(model, InputError("a: damaged"), modeling_llama.__name__)
    with pytest.raises(InputError, match=r"^a: damaged$"), translate_runtime_errors(model):
        model(IDS)
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried"),
        MemoryError("no more"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ):
        rigged(model, error, modeling_llama.__name__)
        with pytest.raises(SpaceError) as caught, translate_runtime_errors(model):
            model(IDS)
        assert str(caught.value) == f"LlamaForCausalLM: {error}; use more ranks, or a smaller batch size"


@pytest.mark.parametrize(
    ("message", "expected"),
    [("", "ValueError"), (" \n", "ValueError"), ("\nsecond\nthird", "second"), ("a" * 300, "a" * 200)],
)
def test_first_line_skips_empty_lines(message: str, expected: str) -> None:
    assert model_errors.first_line(ValueError(message)) == expected
