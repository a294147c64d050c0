"""What goes wrong in the code of a model when it runs, told apart from what goes wrong in ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import nn

from ckptx.errors import CkptxError, SpaceError, UnsupportedError

_NO_MEMORY = "can't allocate memory"  # as the allocator of CPUs says it
_OF_MODELS = ("transformers", "transformers_modules")
_OURS = ("ckptx", "torch.distributed.distributed_c10d")  # who calls the second lost another rank


def class_of(model: nn.Module) -> str:
    """The class in the config: FSDP2 gives a model another one."""
    config = getattr(model, "config", None)
    return str((getattr(config, "architectures", None) or [type(model).__name__])[0])


@contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """Around a forward and backward pass.

    Raises:
        UnsupportedError: The code of the model raised something, as for a config that contradicts itself.
        SpaceError: There is not enough memory.
    """
    try:
        yield
    except CkptxError:
        raise
    except Exception as error:  # a model class may raise anything
        cause = _first_cause(error)
        space = lack_of_memory(model, cause, "use more ranks, or fewer rows at a time")
        if space is not None:
            raise space from error
        if not _is_raised_by_a_model(cause.__traceback__):
            raise
        raise UnsupportedError(
            f"{class_of(model)}: its code fails when it runs: {type(cause).__name__}: {brief(cause)}; look at its "
            "config, or use another layout"
        ) from error


def lack_of_memory(model: nn.Module, error: BaseException, advice: str) -> SpaceError | None:
    """The refusal for an error that says that memory is not enough, of a GPU or of the machine; None for any other."""
    of_cpu = isinstance(error, RuntimeError) and _NO_MEMORY in str(error)
    if of_cpu or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return SpaceError(f"{class_of(model)}: {brief(error)}; {advice}")
    return None


def brief(error: BaseException) -> str:
    """Its first line, or its class where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _first_cause(error: BaseException) -> BaseException:
    """Pipelines of torch put words of their own before it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_raised_by_a_model(trace: TracebackType | None) -> bool:
    """Whether the last of all callers that are known was code of transformers, or code that came with a checkpoint."""
    is_of_model = False
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        is_of_model = name.partition(".")[0] in _OF_MODELS or (is_of_model and not name.startswith(_OURS))
        trace = trace.tb_next
    return is_of_model
