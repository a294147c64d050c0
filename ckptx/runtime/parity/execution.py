"""Running a model once, forward and backward, and keeping what can be compared."""

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
from ckptx.runtime.model.model_errors import brief, class_of, lack_of_memory
from ckptx.runtime.parallel.tensor_parallel.loss import causal_lm_loss
from ckptx.runtime.parity.inputs.batch import Inputs

_OUTPUTS = ("logits", "prediction_logits", "last_hidden_state")


@dataclass(slots=True)
class ForwardResult:
    """What a model computed.

    Attributes:
        logits: Of each batch, whole; (rows, length, vocabulary), or hidden states of a class without a head.
        loss: Mean over the batches.
        gradients: By canonical name, as the parameter holds them; empty without a backward pass.
    """

    logits: list[torch.Tensor] = field(default_factory=list)
    loss: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def run(
    model: nn.Module,
    batches: Sequence[Inputs],
    *,
    backward: bool,
    see: Callable[[str, torch.Tensor], None] | None = None,
) -> ForwardResult:
    """Runs the batches one after another, as microbatches of one step; gradients are those of the mean loss.

    Dropout is off. Parameters lose the gradients they had.

    Args:
        model: With storage.
        batches: What to run it on.
        backward: Compute gradients, too.
        see: Gets each gradient by canonical name as soon as it is complete. It is not kept then: the outcome has none.

    Raises:
        UnsupportedError: The class gives nothing that can be compared, or cannot run on these inputs.
        SpaceError: There is not enough memory.
    """
    model.eval()
    model.zero_grad(set_to_none=True)
    parameters = {canonical_name(name): each for name, each in model.named_parameters() if each.requires_grad}
    outcome = ForwardResult()
    for number, inputs in enumerate(batches, 1):
        with translate_model_errors(model):
            with torch.set_grad_enabled(backward):
                found = _forward(model, inputs)
                loss = loss_of(found, inputs) / len(batches)
            if backward:
                with gradient_hooks(parameters if see is not None and number == len(batches) else {}, see):
                    loss.backward()
        outcome.loss += float(loss.detach())
        outcome.logits.append(full_tensor(found.detach()))
    gradients = {
        canonical_name(name): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    if see is None:
        outcome.gradients = gradients
    else:  # of parameters that the last batch did not reach
        for name, gradient in gradients.items():
            see(name, gradient)
        model.zero_grad(set_to_none=True)
    return outcome


@contextmanager
def translate_model_errors(model: nn.Module) -> Iterator[None]:
    """What goes wrong in a kernel, in our words."""
    try:
        yield
    except CkptxError:
        raise
    except (RuntimeError, MemoryError) as error:  # a kernel that cannot have these shapes or dtypes, or no memory
        space = lack_of_memory(model, error, "use more ranks, or a smaller --reference-memory")
        raise space or UnsupportedError(
            f"{class_of(model)}: fails when it is run like this: {brief(error)}; use another layout or "
            "--compute-dtype, or compare the bytes without --run"
        ) from error


@contextmanager
def gradient_hooks(
    parameters: Mapping[str, nn.Parameter], see: Callable[[str, torch.Tensor], None] | None
) -> Iterator[None]:
    """Shows the gradient of each of these as it is accumulated, by the name given here, and drops it."""

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        def after(parameter: torch.Tensor) -> None:
            assert see is not None
            assert parameter.grad is not None
            see(name, parameter.grad)
            parameter.grad = None

        return after

    handles = [each.register_post_accumulate_grad_hook(hook(name)) for name, each in parameters.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tokens_used(model: nn.Module) -> frozenset[str]:
    """Ids of tokens in the config that the class computes with.

    RoBERTa counts positions from that of padding; a classifier takes the last token that is no padding, or the end.
    Elsewhere they say which row of the embedding is not trained, and what generating begins and ends with.
    """
    if "ForSequenceClassification" in class_of(model):
        return frozenset({"pad_token_id", "eos_token_id"})
    own = (
        type(each).__name__.endswith("Embeddings") and isinstance(getattr(each, "padding_idx", None), int)
        for each in model.modules()
    )
    return frozenset({"pad_token_id"} if any(own) else ())


class ModuleCall(NamedTuple):
    """One call of a module in a forward pass: layers that share one module call it many times.

    Attributes:
        module: Its canonical name.
        number: How often it was called before.
    """

    module: str
    number: int


See = Callable[[ModuleCall, torch.Tensor], None]


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of activations, gathered when it is sharded. Every rank that has a part must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def observed(model: nn.Module, inputs: Inputs, see: See) -> None:
    """Runs one batch forward and shows the first tensor each call of a module gives, in the order in which they end."""
    with module_hooks(model, see), torch.no_grad():
        _forward(model, inputs)


@contextmanager
def module_hooks(model: nn.Module, see: See, unless: Collection[str] = ()) -> Iterator[None]:
    """Shows what calls of modules give within the block.

    A wrapper and what is inside of it are one module.

    Args:
        model: What is called, itself not shown.
        see: Is shown each call, and the first tensor it gave.
        unless: Canonical names of modules that are not shown.
    """
    calls: Counter[str] = Counter()

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            call = ModuleCall(name, calls[name])
            calls[name] += 1
            first = _first_tensor(output)
            if first is not None and first.is_floating_point():
                see(call, first.detach())

        return after

    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules.setdefault(canonical_name(name), module)  # a wrapper comes before what is inside of it
    handles = [
        module.register_forward_hook(hook(name)) for name, module in modules.items() if name and name not in unless
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _forward(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    batch = arguments(model, inputs)
    try:
        output = model(**batch)
    except (TypeError, AttributeError, ValueError) as error:
        raise UnsupportedError(
            f"{class_of(model)}: cannot be run on {', '.join(batch)}: {type(error).__name__}: {brief(error)}; "
            "the bytes can be compared without --run"
        ) from error
    return logits_or_hidden_states(model, output)


def arguments(model: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
    """What to give a model, where it computes and in what it computes in."""
    device, dtype = _device_of(model), _dtype_of(model)
    return {
        name: tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
        for name, tensor in inputs.batch.items()
    }


def logits_or_hidden_states(model: nn.Module, output: Any) -> torch.Tensor:
    """What is compared of an output: logits, or hidden states of a class without a head.

    Raises:
        UnsupportedError: It has neither.
    """
    for name in _OUTPUTS:
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return found
    raise UnsupportedError(f"{class_of(model)}: gives none of {', '.join(_OUTPUTS)}; compare its bytes without --run")


def loss_of(found: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Cross entropy of the next token where there are logits for it, else something that every output enters."""
    if found.dim() == 3 and found.shape[:2] == inputs.labels.shape and found.shape[-1] > int(inputs.labels.max()):
        return causal_lm_loss(found, inputs.labels)
    return full_tensor(found).float().pow(2).mean()


def _first_tensor(output: Any) -> torch.Tensor | None:
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
