"""Read the pickles of DeepSpeed files with stand-ins, and check the values in them.

Optimizer states name a fixed list of classes. Model states also contain what the training script passed to
`save_checkpoint` as `client_state`, with objects of any class; `Opaque` stands in for all of them and keeps nothing.
"""

from __future__ import annotations

from typing import Any

from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.torch_bin import describe_value, is_utf8
from ckptx.formats.torch_archive.unpickle import (
    MEMBER_BY_NAME,
    TORCH_GLOBALS,
    EnumClass,
    Globals,
    ReadOnlyClass,
    is_shape,
    load_torch,
)
from ckptx.untrusted.limits import MAX_NAME_LENGTH, find_shape_fault

# Member of `ZeroStageEnum` -> its value.
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}


class Opaque(metaclass=ReadOnlyClass):
    """Stand-in for an object of any class: it accepts every change and keeps none."""

    __slots__ = ()

    def __new__(cls, *arguments: object) -> Opaque:
        """Drop the arguments without calling anything."""
        return super().__new__(cls)

    def __call__(self, *arguments: object) -> Opaque:
        return self

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, item: object) -> None:
        """Drop an item."""

    def extend(self, items: object) -> None:
        """Drop items."""

    def add(self, item: object) -> None:
        """Drop an item."""


def _stage(value: object) -> object:
    """Return the value of a member of `ZeroStageEnum`, which is pickled by name or by value."""
    return _STAGES.get(value) if isinstance(value, str) else value


_OPTIMIZER_GLOBALS: Globals = {
    **TORCH_GLOBALS,
    **MEMBER_BY_NAME,
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): EnumClass(_stage),
    **{
        ("deepspeed.runtime.fp16.loss_scaler", name): Opaque
        for name in ("LossScaler", "LossScalerBase", "DynamicLossScaler")
    },
    ("deepspeed.utils.tensor_fragment", "fragment_address"): Opaque,
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"): Opaque,
}


def load_model_states(data: bytes, where: str) -> Any:
    """Return the pickled model states of one rank; objects of unknown classes are `Opaque`.

    Raises:
        InputError: The pickle is damaged.
    """
    return load_torch(data, where, unknown=lambda *_: Opaque)


def load_optimizer_states(data: bytes, where: str) -> Any:
    """Return the pickled optimizer states of one rank.

    Raises:
        InputError: The pickle is damaged, or names a class or function that DeepSpeed does not write.
    """
    return load_torch(data, where, _OPTIMIZER_GLOBALS)


def damaged_error(where: str, problem: str) -> InputError:
    """Return the error for a value that DeepSpeed does not write."""
    return InputError(f"{where}: {problem}; the file is damaged, copy it again")


def require_dict(value: object, where: str) -> dict[Any, Any]:
    """Return a value that must be a dict.

    Raises:
        UnsupportedError: It is something else.
    """
    if not isinstance(value, dict):
        raise UnsupportedError(
            f"{where}: expected a dict of a DeepSpeed checkpoint, found {describe_value(value)}; pass one that "
            "DeepSpeed saved"
        )
    return value


def require_list(value: object, where: str, what: str) -> list[Any]:
    """Return a value that must be a list or tuple.

    Raises:
        InputError: It is something else.
    """
    if isinstance(value, list) or type(value) is tuple:
        return list(value)
    raise damaged_error(where, f"{what} is not a list")


def require_name(name: object, where: str) -> str:
    """Return a name of a tensor.

    Raises:
        InputError: It is not a string, too long or not encodable.
    """
    if type(name) is not str or len(name) > MAX_NAME_LENGTH or not is_utf8(name):
        raise damaged_error(where, "has a tensor name that is not a valid string")
    return name


def read_shapes(value: object, where: str) -> dict[str, tuple[int, ...]]:
    """Return a dict of parameter name -> shape whose names and shapes were checked.

    Raises:
        InputError: A name or shape is invalid.
    """
    if not isinstance(value, dict):
        raise damaged_error(where, "the shapes of the parameters are not a dict")
    shapes: dict[str, tuple[int, ...]] = {}
    for key, stored in value.items():
        name = require_name(key, where)
        shape = tuple(stored) if isinstance(stored, list) else stored
        if not is_shape(shape):
            raise damaged_error(where, f'"{name}" has no valid shape')
        fault = find_shape_fault(shape)
        if fault is not None:
            raise damaged_error(where, f'"{name}" has a shape of {fault}')
        shapes[name] = shape
    return shapes
