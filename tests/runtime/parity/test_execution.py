"""Running a model once: what is kept, held against numbers computed by hand; what cannot be run is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckptx.errors import CkptxError, SpaceError, UnsupportedError
from ckptx.runtime.parity.execution import ModuleCall, make_forward_arguments, module_hooks, run_step
from ckptx.runtime.parity.inputs.batch import Inputs
from tests.support.small_modules import Looped, Scaled, inputs_of

FOUR = [[0, 1], [2, 3]]  # labels of two hidden states that are no logits, so that the loss is a mean square


def ones(*names: str) -> Any:
    return {name: torch.full((2, 2, 2), float(at)) for at, name in enumerate(names, start=1)}


class Gives(nn.Module):
    """Gives what it was made with, once for each call, and remembers what it was given."""

    def __init__(self, *outputs: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))
        self.outputs, self.given = list(outputs), dict[str, torch.Tensor]()

    def forward(self, **given: torch.Tensor) -> Any:
        self.given = given
        output = self.outputs.pop(0)
        if isinstance(output, BaseException):
            raise output
        return output


# ------------------------------------------------------------------------------------------- numbers


def test_the_loss_without_a_head_is_the_mean_square() -> None:
    """Outputs are 3 * 4; the gradient of the mean of (e * s)^2 over 8 numbers, four for each scale."""
    model = Scaled()
    found = run_step(model, [inputs_of(FOUR)], backward=True)
    assert found.loss == 144
    assert [each.tolist() for each in found.logits] == [[[[12.0, 12.0]] * 2] * 2]
    assert found.gradients.keys() == {"embed.weight", "scale"}
    assert found.gradients["scale"].tolist() == [4 * 2 * 12 * 3 / 8] * 2
    assert found.gradients["embed.weight"].tolist() == [[2 * 12 * 4 / 8] * 2] * 4 + [[0.0] * 2] * 4


def test_batches_are_microbatches_of_one_step() -> None:
    """Loss and gradients of the mean: 144 of one batch, and 4 times that where each embedding is doubled."""
    model = Scaled()
    with torch.no_grad():
        model.embed.weight[4:] *= 2
    first, second = inputs_of(FOUR), inputs_of([[4, 5], [6, 7]])
    found = run_step(model, [first, second], backward=True)
    assert found.loss == (144 + 576) / 2
    assert [float(each.max()) for each in found.logits] == [12, 24]
    assert found.gradients["scale"].tolist() == [(36 + 144) / 2] * 2
    assert found.gradients["embed.weight"].tolist() == [[6.0] * 2] * 4 + [[12.0] * 2] * 4
    apart = [run_step(model, [each], backward=True) for each in (second, first)]
    assert found.loss == sum(each.loss for each in apart) / 2


def test_the_loss_of_logits_is_the_cross_entropy_of_the_next_token() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 5)).astype(np.float32)
    ids = np.array([[4, 0, 1], [2, 3, 3]])
    labels = np.array([[4, 0, -100], [2, 3, 3]])
    powers = np.exp(logits.astype(np.float64))
    chances = powers / powers.sum(-1, keepdims=True)
    counted = [(row, at) for row in range(2) for at in (1, 2) if labels[row, at] >= 0]
    expected = -np.mean([np.log(chances[row, at - 1, labels[row, at]]) for row, at in counted])
    inputs = Inputs({"input_ids": torch.tensor(ids)}, torch.tensor(labels), ("text",), ())
    found = run_step(Gives({"logits": torch.tensor(logits)}), [inputs], backward=False)
    assert found.loss == pytest.approx(expected, rel=1e-6)


def test_what_is_not_trained_has_no_gradient_and_older_ones_are_dropped() -> None:
    model = Scaled()
    model.embed.weight.requires_grad_(False)
    model.scale.grad = torch.full((2,), 1e9)
    assert run_step(model, [inputs_of(FOUR)], backward=True).gradients.keys() == {"scale"}
    assert model.scale.grad is not None and model.scale.grad.tolist() == [36.0, 36.0]
    found = run_step(model, [inputs_of(FOUR)], backward=False)
    assert (found.loss, found.gradients, model.scale.grad) == (144, {}, None)


def test_dropout_is_off_and_nothing_is_in_a_graph() -> None:
    model = Scaled()
    model.embed.register_forward_hook(lambda module, args, output: nn.functional.dropout(output, 0.5, module.training))
    graphs = []
    model.register_forward_hook(lambda module, args, output: graphs.append(torch.is_grad_enabled()))
    model.train()
    for backward in (True, False):
        found = run_step(model, [inputs_of(FOUR)], backward=backward)
        assert found.loss == 144
        assert not found.logits[0].requires_grad
    assert graphs == [True, False]  # what nobody goes back through is not kept


def test_gradients_have_the_names_of_the_state_dict() -> None:
    model = nn.Module()
    model.layer = checkpoint_wrapper(Scaled())
    model.forward = lambda input_ids: model.layer(input_ids)  # type: ignore[method-assign]  # no class for one line
    assert "layer._checkpoint_wrapped_module.scale" in dict(model.named_parameters())
    found = run_step(model, [inputs_of(FOUR)], backward=True)
    assert found.gradients.keys() == {"layer.embed.weight", "layer.scale"}


# ------------------------------------------------------------------------------------------- what goes in and comes out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_floats_come_in_the_dtype_of_the_model_and_numbers_as_they_are(dtype: torch.dtype) -> None:
    model = Gives(ones("logits"), dtype=dtype)
    mask = torch.ones(2, 2, dtype=torch.bool)
    run_step(model, [inputs_of(FOUR, pixel_values=torch.ones(2, 3), mask=mask)], backward=False)
    assert {name: each.dtype for name, each in model.given.items()} == {
        "input_ids": torch.int64, "pixel_values": dtype, "mask": torch.bool,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("logits", "last_hidden_state"), "logits"),
        (("last_hidden_state", "seq_relationship_logits", "prediction_logits"), "prediction_logits"),
        (("hidden_states", "last_hidden_state"), "last_hidden_state"),
    ],
)
@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_logits_come_first_then_hidden_states(kind: Any, names: tuple[str, ...], expected: str) -> None:
    given = ones(*names)
    (found,) = run_step(Gives(kind(**given)), [inputs_of(FOUR)], backward=False).logits
    assert torch.equal(found, given[expected])


def test_logits_that_are_none_are_passed_over() -> None:
    (found,) = run_step(Gives({"logits": None} | ones("last_hidden_state")), [inputs_of(FOUR)], backward=False).logits
    assert float(found[0, 0, 0]) == 1


@pytest.mark.parametrize("config", [None, SimpleNamespace(architectures=["RealForCausalLM"])])
@pytest.mark.parametrize(
    ("output", "kind", "said"),
    [
        (TypeError("got an unexpected keyword"), UnsupportedError, ("input_ids", "TypeError", "got an unexpected")),
        (AttributeError("no such thing"), UnsupportedError, ("input_ids", "no such thing")),
        (ValueError("size 8, needed 16\nmore"), UnsupportedError, ("input_ids", "size 8, needed 16")),
        (RuntimeError("mat1 and mat2"), UnsupportedError, ("mat1 and mat2", "--compute-dtype", "--run")),
        (RuntimeError(), UnsupportedError, ("RuntimeError",)),
        (torch.OutOfMemoryError("tried 9 GiB"), SpaceError, ("tried 9 GiB", "ranks")),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), SpaceError, ("can't allocate", "ranks")),
        (ones("scores"), UnsupportedError, ("logits", "last_hidden_state", "--run")),
        (SimpleNamespace(), UnsupportedError, ("logits", "last_hidden_state", "--run")),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    output: Any, kind: type[CkptxError], said: tuple[str, ...], config: Any
) -> None:
    model = Gives(output)
    name = "Gives" if config is None else "RealForCausalLM"  # FSDP2 gives a model another class
    if config is not None:
        model.config = config
    with pytest.raises(kind) as error:
        run_step(model, [inputs_of(FOUR)], backward=False)
    message = str(error.value)
    assert message.startswith(f"{name}: ")
    assert all(word in message for word in said)
    assert "\n" not in message and "more" not in message.split("; ")[0]


def test_a_defect_of_ours_is_not_called_a_limit_of_the_class() -> None:
    with pytest.raises(KeyError):
        run_step(Gives(KeyError("x")), [inputs_of(FOUR)], backward=False)


def test_a_gradient_that_is_shown_is_not_kept() -> None:
    """Each once, complete, also where a batch does not reach it or a parameter has two names."""
    model, batches = Looped(), [inputs_of([[0, 1]]), inputs_of([[2, 3]])]
    expected = {name: each.clone() for name, each in run_step(model, batches, backward=True).gradients.items()}
    shown: dict[str, Any] = {}

    def see(name: str, gradient: torch.Tensor) -> None:
        assert name not in shown
        shown[name] = gradient.clone()

    outcome = run_step(model, batches, backward=True, on_gradient=see)
    assert (outcome.gradients, shown.keys()) == ({}, expected.keys())
    assert all(torch.equal(shown[name], each) for name, each in expected.items())
    assert all(parameter.grad is None for parameter in model.parameters())


# ------------------------------------------------------------------------------------------- modules that are watched


def watched(model: nn.Module, inputs: Inputs | None = None) -> dict[ModuleCall, list[Any]]:
    found: dict[ModuleCall, list[Any]] = {}
    with module_hooks(model, lambda call, output: found.__setitem__(call, output.tolist())), torch.no_grad():
        model(**make_forward_arguments(model, inputs or inputs_of([[0, 1]])))
    return found


def test_every_call_of_a_module_is_seen_in_order() -> None:
    """Embeddings 1..4; the shared layer exchanges two numbers and doubles them."""
    found = watched(Looped())
    assert list(found) == [
        ModuleCall("embed", 0),
        ModuleCall("shared", 0),
        ModuleCall("shared", 1),
        ModuleCall("last", 0),
    ]
    assert [each[0] for each in found.values()] == [
        [[1, 2], [3, 4]], [[4, 2], [8, 6]], [[4, 8], [12, 16]], [[4, 8], [12, 16]],
    ]  # fmt: skip


def test_a_wrapper_is_not_another_call() -> None:
    plain, wrapped = Looped(), Looped()
    wrapped.shared = checkpoint_wrapper(wrapped.shared)
    assert watched(wrapped) == watched(plain)


class Mixed(nn.Module):
    """Gives what its parts are made of: tuples, mappings, whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({
            "pair": Gives((None, torch.ones(1), torch.zeros(1))),
            "mapping": Gives({"a": torch.ones(2), "b": torch.zeros(2)}),
            "ids": Gives(torch.ones(3, dtype=torch.long)),
            "ids_first": Gives((torch.ones(3, dtype=torch.long), torch.ones(3))),
            "nothing": Gives(None),
            "graph": Gives(torch.ones(4, requires_grad=True) * 2),
        })  # fmt: skip

    def forward(self, **given: torch.Tensor) -> Any:
        for part in self.parts.values():
            part()
        return {"logits": torch.ones(1)}


def test_the_first_tensor_is_seen_where_it_is_one_of_floats() -> None:
    found = watched(Mixed())
    assert {call.module: each for call, each in found.items()} == {
        "parts.pair": [1], "parts.mapping": [1, 1], "parts.graph": [2] * 4,
    }  # fmt: skip


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_nobody_watches_afterwards(error: Exception | None) -> None:
    model = Looped()
    model.embed.register_forward_hook(lambda *_: None)
    if error is not None:

        def fails(*_: Any) -> None:
            raise error

        model.last.register_forward_pre_hook(fails)
        with pytest.raises(ValueError, match=r"^no$"):
            watched(model)
    else:
        watched(model)
    assert [len(each._forward_hooks) for each in model.modules()] == [0, 1, 0, 0]
