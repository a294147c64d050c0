"""Distinguishes errors in the code of a model from errors of ckptx."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import nn

from ckptx.errors import CkptxError, SpaceError, UnsupportedError

_CPU_MEMORY_MESSAGE = "can't allocate memory"  # message of the CPU allocator
_MODEL_PACKAGES = ("transformers", "transformers_modules")
# Prefixes of modules whose errors are not errors of the model. One from `distributed_c10d` means that a rank is lost.
_OWN_MODULES = ("ckptx", "torch.distributed.distributed_c10d")
_OPERATION_MODULE = "ckptx.runtime.memory.shape_tensors"


def model_class_name(model: nn.Module) -> str:
    """Return the class name in the config, because FSDP2 changes the class; without one, the name of the class."""
    config = getattr(model, "config", None)
    return str((getattr(config, "architectures", None) or [type(model).__name__])[0])


@contextmanager
def translate_runtime_errors(model: nn.Module) -> Iterator[None]:
    """Translate errors of a forward and backward pass within the block.

    Raises:
        UnsupportedError: The code of the model raised an error, e.g. because its config contradicts itself.
        SpaceError: There is not enough memory.
        Exception: Any other error, unchanged.
    """
    try:
        yield
    except CkptxError:
        raise
    except Exception as error:  # a model class may raise anything
        cause = _first_cause(error)
        memory_error = out_of_memory_error(model, cause, "use more ranks, or a smaller batch size")
        if memory_error is not None:
            raise memory_error from error
        if not _is_raised_by_a_model(cause.__traceback__):
            raise
        raise UnsupportedError(
            f"{model_class_name(model)}: the code of the model failed: {type(cause).__name__}: {first_line(cause)}; "
            "check its config, or use another layout"
        ) from error


def out_of_memory_error(model: nn.Module, error: BaseException, advice: str) -> SpaceError | None:
    """Return the `SpaceError` for an out-of-memory error of a GPU or of the machine; None for any other error.

    Args:
        model: Model that ran, which the message names.
        error: Any error.
        advice: Next step, the end of the message.
    """
    is_cpu_error = isinstance(error, RuntimeError) and _CPU_MEMORY_MESSAGE in str(error)
    if is_cpu_error or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return SpaceError(f"{model_class_name(model)}: {first_line(error)}; {advice}")
    return None


def first_line(error: BaseException) -> str:
    """Return the first non-blank line of an error, truncated to 200 characters; its class name if it has none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def _first_cause(error: BaseException) -> BaseException:
    """Return the original error, around which torch's pipelines raise their own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_raised_by_a_model(trace: TracebackType | None) -> bool:
    """Return True if transformers or custom code of a checkpoint raised an error, or a library that such code called.

    Errors of ckptx and of lost ranks do not count, even if the model called the code that raised them, as it calls
    hooks. A forecast computes the operations of the model in `_OPERATION_MODULE`, which passes on their errors.
    """
    is_of_model, name = False, ""
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        is_own = name.startswith(_OWN_MODULES) and name != _OPERATION_MODULE
        is_of_model = name.partition(".")[0] in _MODEL_PACKAGES or (is_of_model and not is_own)
        trace = trace.tb_next
    return is_of_model and name != _OPERATION_MODULE
