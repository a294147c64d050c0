"""Run a model once, forward and backward, and keep the results that can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckptx.errors import CkptxError, UnsupportedError
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.model.model_errors import first_line, model_class_name, out_of_memory_error
from ckptx.runtime.parallel.tensor_parallel.loss import causal_lm_loss
from ckptx.runtime.parity.inputs.batch import Inputs

_OUTPUT_NAMES = ("logits", "prediction_logits", "last_hidden_state")


@dataclass(slots=True)
class StepResult:
    """Results of one step of a model.

    Attributes:
        logits: Full logits of each batch, (batch, length, vocabulary), or hidden states of a class without a head;
            empty on a rank without the last pipeline stage.
        loss: Mean over the batches; NaN on a rank without the last pipeline stage.
        gradients: Gradients by canonical name, as the parameters store them (of a sharded parameter a DTensor); empty
            without a backward pass, if they were passed to a callback, and for pipeline stages.
    """

    logits: list[torch.Tensor] = field(default_factory=list)
    loss: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def run_step(
    model: nn.Module,
    batches: Sequence[Inputs],
    *,
    backward: bool,
    on_gradient: Callable[[str, torch.Tensor], None] | None = None,
) -> StepResult:
    """Run the batches one after another, as microbatches of one step; gradients are those of the mean loss.

    Dropout is off. Existing gradients of the parameters are dropped.

    Args:
        model: Model with storage.
        batches: Microbatches to run.
        backward: Also compute gradients.
        on_gradient: Called with the canonical name and each gradient as soon as it is complete. The gradient is then
            released, and the result has none. With None, the result has all gradients.

    Raises:
        UnsupportedError: The class returns nothing that can be compared, or cannot run on these inputs.
        SpaceError: There is not enough memory.
    """
    model.eval()
    model.zero_grad(set_to_none=True)
    parameters = {canonical_name(name): each for name, each in model.named_parameters() if each.requires_grad}
    result = StepResult()
    for number, inputs in enumerate(batches, 1):
        with translate_model_errors(model):
            with torch.set_grad_enabled(backward):
                logits = _forward(model, inputs)
                loss = compute_loss(logits, inputs) / len(batches)
            if backward:
                with gradient_hooks(
                    parameters if on_gradient is not None and number == len(batches) else {}, on_gradient
                ):
                    loss.backward()
        result.loss += float(loss.detach())
        result.logits.append(full_tensor(logits.detach()))
    gradients = {
        canonical_name(name): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    if on_gradient is None:
        result.gradients = gradients
    else:  # gradients of parameters that the last batch did not reach
        for name, gradient in gradients.items():
            on_gradient(name, gradient)
        model.zero_grad(set_to_none=True)
    return result


@contextmanager
def translate_model_errors(model: nn.Module) -> Iterator[None]:
    """Turn errors of kernels into errors of ckptx that name the class and a next step."""
    try:
        yield
    except CkptxError:
        raise
    except (RuntimeError, MemoryError) as error:  # a kernel that cannot have these shapes or dtypes, or no memory
        memory_error = out_of_memory_error(model, error, "use more ranks, or a smaller --reference-memory")
        raise memory_error or UnsupportedError(
            f"{model_class_name(model)}: this run fails: {first_line(error)}; use another layout or --compute-dtype, "
            "or compare the bytes without --run"
        ) from error


@contextmanager
def gradient_hooks(
    parameters: Mapping[str, nn.Parameter], on_gradient: Callable[[str, torch.Tensor], None] | None
) -> Iterator[None]:
    """Pass the gradient of each parameter to a callback as soon as it is accumulated, and drop it.

    Args:
        parameters: Name for the callback -> parameter.
        on_gradient: Called with the name and the gradient; None only if there are no parameters.
    """

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        def after(parameter: torch.Tensor) -> None:
            assert on_gradient is not None
            assert parameter.grad is not None
            on_gradient(name, parameter.grad)
            parameter.grad = None

        return after

    handles = [each.register_post_accumulate_grad_hook(hook(name)) for name, each in parameters.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_used_token_keys(model: nn.Module) -> frozenset[str]:
    """Return the config keys of special tokens that affect what the class computes.

    RoBERTa counts positions from the padding token; a classifier takes the last token before padding, or the end token.
    In other classes these keys name an embedding that is not trained, and the tokens that begin and end generation.
    """
    if "ForSequenceClassification" in model_class_name(model):
        return frozenset({"pad_token_id", "eos_token_id"})
    has_padding = (
        type(each).__name__.endswith("Embeddings") and isinstance(getattr(each, "padding_idx", None), int)
        for each in model.modules()
    )
    return frozenset({"pad_token_id"} if any(has_padding) else ())


class ModuleCall(NamedTuple):
    """One call of a module in a forward pass: layers that share one module call it many times.

    Attributes:
        module: Canonical name of the module.
        number: Number of earlier calls of this module.
    """

    module: str
    number: int


OnOutput = Callable[[ModuleCall, torch.Tensor], None]


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return an activation; a DTensor is gathered, and every rank that has a shard of it must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def module_hooks(model: nn.Module, on_output: OnOutput, excluded: Collection[str] = ()) -> Iterator[None]:
    """Pass the outputs of module calls to a callback within the block.

    A wrapper and the module that it wraps count as one module.

    Args:
        model: Model whose modules are hooked; its own output is not passed.
        on_output: Called with each call and the first tensor that it returned; not called if that is not
            floating-point, or if there is none.
        excluded: Canonical names of modules without a hook.
    """
    calls: Counter[str] = Counter()

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            call = ModuleCall(name, calls[name])
            calls[name] += 1
            first = _first_tensor(output)
            if first is not None and first.is_floating_point():
                on_output(call, first.detach())

        return after

    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules.setdefault(canonical_name(name), module)  # a wrapper comes before the wrapped module
    handles = [
        module.register_forward_hook(hook(name)) for name, module in modules.items() if name and name not in excluded
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _forward(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    batch = make_forward_arguments(model, inputs)
    try:
        output = model(**batch)
    except (TypeError, AttributeError, ValueError) as error:
        raise UnsupportedError(
            f"{model_class_name(model)}: fails on inputs {', '.join(batch)}: {type(error).__name__}: "
            f"{first_line(error)}; compare the bytes without --run"
        ) from error
    return logits_or_hidden_states(model, output)


def make_forward_arguments(model: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return the arguments of `forward`, on the device and in the dtype of the model."""
    device, dtype = _device_of(model), _dtype_of(model)
    return {
        name: tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
        for name, tensor in inputs.batch.items()
    }


def logits_or_hidden_states(model: nn.Module, output: Any) -> torch.Tensor:
    """Return the output that is compared: logits, or hidden states of a class without a head.

    Raises:
        UnsupportedError: The output has neither.
    """
    for name in _OUTPUT_NAMES:
        output_value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(output_value, torch.Tensor):
            return output_value
    raise UnsupportedError(
        f"{model_class_name(model)}: the output has none of {', '.join(_OUTPUT_NAMES)}; compare the bytes without --run"
    )


def compute_loss(logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return a loss: next-token cross entropy for logits (batch, length, vocabulary), else the mean square."""
    if logits.dim() == 3 and logits.shape[:2] == inputs.labels.shape and logits.shape[-1] > int(inputs.labels.max()):
        return causal_lm_loss(logits, inputs.labels)
    return full_tensor(logits).float().pow(2).mean()


def _first_tensor(output: Any) -> torch.Tensor | None:
    """Return the first tensor in the output of a module, without searching nested containers; None if it has none."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        output = tuple(output.values())
    return (
        next((each for each in output if isinstance(each, torch.Tensor)), None) if isinstance(output, tuple) else None
    )


def _device_of(model: nn.Module) -> torch.device:
    return next(iter(model.parameters())).device


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
