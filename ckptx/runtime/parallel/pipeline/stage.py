"""Makes a pipeline stage of a model: the same model, with storage for its own parameters alone.

    a layer, an embedding, a tower, a norm, a head of another stage     answers NaN in the form of the original
    the list of layers                                                  keeps its length, so that indices stay right
    a parameter of another stage beside them                            is NaN, and takes no memory
    everything else                                                     is the model's own, and runs on every stage

What a stage lacks to compute is put among the arguments of the calls where it is missing: see `boundaries`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ckptx.errors import UnsupportedError
from ckptx.layout.stages import StageMap
from ckptx.runtime.model.layers import is_container

_MOST_FORMS = 64  # kept by a stub, of different shapes of what it is asked

# What a module answers: LIKE for a tensor of the shape of the first that it is given, in tuples, lists and dicts.
Form = Any


class FirstInputShape:
    """Stands for a tensor of the shape of the first that a module is given."""


LIKE = FirstInputShape()


class Stub(nn.Module):  # type: ignore[misc]
    """Stands in for a module of another stage, and answers NaN in its form.

    Attributes of the original can be read, as models read the type of attention of a layer; tensors among them are NaN.
    """

    def __init__(self, original: nn.Module, form: Form, device: torch.device | str) -> None:
        """Without a form, the original is asked on the meta device what it would answer."""
        super().__init__()
        object.__setattr__(self, "_original", original)
        self._form = form
        self._device = device
        self._forms: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["_original"], name)
        return _nan(found.shape, found.dtype, self._device) if isinstance(found, Tensor) else found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        if first is None:
            raise UnsupportedError(
                f"{type(self.__dict__['_original']).__name__}: is given no tensor, needed one to stand in for it on a "
                "pipeline stage; leave out --pp"
            )
        form = self._form if self._form is not None else self._asked(args, kwargs)
        return _filled(form, first)

    def _asked(self, args: Any, kwargs: Any) -> Any:
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        key = tuple((tuple(each.shape), each.dtype) for each in given)
        if key not in self._forms:
            if len(self._forms) >= _MOST_FORMS:
                self._forms.clear()
            with torch.no_grad():
                self._forms[key] = self.__dict__["_original"](*_to_meta(args), **_to_meta(kwargs))
        return self._forms[key]


def make_stage(
    model: nn.Module, stages: StageMap, stage: int, forms: Mapping[str, Form], device: torch.device | str = "cpu"
) -> None:
    """Takes from a model what other stages have, in place.

    Args:
        model: Without wrappers, on the meta device or anywhere else; what is taken from it goes to the meta device.
        stages: Says who has what.
        stage: Which one to make.
        forms: What layers, and modules after the last of them, answer; see `form_of`.
        device: Where the model will be.

    Raises:
        UnsupportedError: A module beside the layers belongs to several stages.
    """
    on_the_way = set(modules_on_the_path(stages))
    last = {name for stack in stages.stacks for name in stack.after}

    def strip(module: nn.Module, path: str) -> None:
        lead = f"{path}." if path else ""
        for key, child in module._modules.items():
            name = f"{lead}{key}"
            if child is None:
                continue
            if name in on_the_way or is_container(child):
                strip(child, name)
                continue
            owners = {stages.stage_of(f"{name}.{each}") for each in _stored_names(child)}
            if len(owners) > 1:
                raise UnsupportedError(
                    f"{type(model).__name__}: {name} would be on the pipeline stages "
                    f"{', '.join(map(str, sorted(owners)))}, needed one; leave out --pp"
                )
            if owners and stage not in owners:
                module._modules[key] = Stub(child.to("meta"), forms.get(name), device)
        stored = set(module.state_dict(keep_vars=True))
        for tensors in (module._parameters, module._buffers):
            for key, tensor in list(tensors.items()):
                if tensor is not None and key in stored and stages.stage_of(f"{lead}{key}") != stage:
                    del tensors[key]
                    shape = () if f"{lead}{key}" in last else tensor.shape  # what it is added to is like an input
                    object.__setattr__(module, key, _nan(shape, tensor.dtype, device))

    strip(model, "")


def modules_on_the_path(stages: StageMap) -> list[str]:
    """The modules on the way to the layers, the lists of layers included, and "" for the model; outermost first."""
    found = {"": None}
    for stack in stages.stacks:
        parts = stack.path.split(".")
        found |= {".".join(parts[:end]): None for end in range(1, len(parts) + 1)}
    return sorted(found, key=lambda path: path.count(".") + bool(path))


def form_of(output: Any) -> Form:
    """What a stub has to answer where a module gave `output`."""
    if isinstance(output, Tensor):
        return LIKE
    if isinstance(output, Mapping):
        kind: Any = type(output)
        return kind({key: form_of(item) for key, item in output.items()})
    if type(output) in (tuple, list):
        return type(output)(form_of(item) for item in output)
    return output


def _stored_names(module: nn.Module) -> list[str]:
    """Names of parameters and of buffers that are stored, each under every name that it has."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return names + [name for name in module.state_dict(keep_vars=True) if name not in set(names)]


def _nan(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """NaN, or zeros where nothing can be; takes no memory."""
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, Mapping):
        return {key: _to_meta(item) for key, item in value.items()}
    return type(value)(map(_to_meta, value)) if type(value) in (tuple, list) else value


def _filled(form: Form, first: Tensor) -> Any:
    """NaN in this form; where nothing can be NaN, zeros."""
    if isinstance(form, (FirstInputShape, Tensor)):
        like = first if isinstance(form, FirstInputShape) else form
        return _nan(like.shape, like.dtype, first.device).contiguous()  # it may be changed in place
    if isinstance(form, Mapping):
        kind: Any = type(form)
        return kind({key: _filled(item, first) for key, item in form.items()})
    if type(form) in (tuple, list):
        return type(form)(_filled(item, first) for item in form)
    return form
