"""Make a pipeline stage of a model: the same model, without the parameters of other stages.

    layer, embedding, tower, norm or head of another stage      returns NaN in the structure of the original output
    the list of layers                                          keeps its length, so that indices stay correct
    other parameter of another stage                            is NaN, expanded from one stored element
    everything else                                             is unchanged, and runs on every stage

Values that a stage lacks are injected into the arguments of the calls that need them: see `boundaries`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ckptx.errors import UnsupportedError
from ckptx.layout.stages import StageMap
from ckptx.runtime.model.layers import is_layer_list

_MAX_CACHED_OUTPUTS = 64  # outputs that a stub caches, one for each set of input shapes

# The structure of a module's output: tuples, lists and dicts with LIKE_FIRST_INPUT in the place of tensors.
OutputStructure = Any


class FirstInputShape:
    """Marks a tensor in an `OutputStructure`: it has the shape and dtype of the first tensor that the module gets."""


LIKE_FIRST_INPUT = FirstInputShape()


class Stub(nn.Module):  # type: ignore[misc]
    """A placeholder for a module of another stage that returns NaN in the structure of its output.

    Attributes of the original can be read, as models read the attention type of a layer; tensors among them are NaN.
    """

    def __init__(self, original: nn.Module, output_structure: OutputStructure, device: torch.device | str) -> None:
        """Create a stub.

        Args:
            original: Module of another stage, on the meta device.
            output_structure: Structure of its output, from `describe_output`; None to run the original on the meta
                device whenever the input shapes are new.
            device: Device of the NaN tensors that stand for attributes of the original.
        """
        super().__init__()
        # Not registered as a submodule, so that `parameters()`, `state_dict()` and `to()` do not include the original.
        object.__setattr__(self, "_original", original)
        self._output_structure = output_structure
        self._device = device
        self._cached_outputs: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(self.__dict__["_original"], name)
        return _make_nan(value.shape, value.dtype, self._device) if isinstance(value, Tensor) else value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        if first is None:
            raise UnsupportedError(
                f"{type(self.__dict__['_original']).__name__}: gets no tensor, so no pipeline stage can replace it by "
                "a placeholder; leave out --pp"
            )
        output_structure = (
            self._output_structure if self._output_structure is not None else self._run_on_meta(args, kwargs)
        )
        return _fill_with_nan(output_structure, first)

    def _run_on_meta(self, args: Any, kwargs: Any) -> Any:
        """Return the output of the original on the meta device, cached by the shapes and dtypes of its inputs."""
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        key = tuple((tuple(each.shape), each.dtype) for each in tensors)
        if key not in self._cached_outputs:
            if len(self._cached_outputs) >= _MAX_CACHED_OUTPUTS:
                self._cached_outputs.clear()
            with torch.no_grad():
                self._cached_outputs[key] = self.__dict__["_original"](*_to_meta(args), **_to_meta(kwargs))
        return self._cached_outputs[key]


def make_stage(
    model: nn.Module,
    stages: StageMap,
    stage: int,
    output_structures: Mapping[str, OutputStructure],
    device: torch.device | str = "cpu",
) -> None:
    """Turn a model into one of its stages, in place: modules and parameters of other stages become stubs and NaN.

    Args:
        model: Model without wrappers, on any device; modules of other stages are moved to the meta device.
        stages: Assignment of layers to stages.
        stage: Number of the stage to make.
        output_structures: For each layer and each module after the last layer, by name: the structure of its output,
            see `describe_output`.
        device: Device that the model will be on.

    Raises:
        UnsupportedError: A module other than a layer belongs to several stages.
    """
    path_modules = set(modules_on_layer_path(stages))
    names_after_layers = {name for stack in stages.stacks for name in stack.after}  # modules or parameters

    def strip(module: nn.Module, path: str) -> None:
        prefix = f"{path}." if path else ""
        for key, child in module._modules.items():
            name = f"{prefix}{key}"
            if child is None:
                continue
            if name in path_modules or is_layer_list(child):
                strip(child, name)
                continue
            owners = {stages.stage_of(f"{name}.{each}") for each in _stored_names(child)}
            if len(owners) > 1:
                raise UnsupportedError(
                    f"{type(model).__name__}: {name} would be on several pipeline stages "
                    f"({', '.join(map(str, sorted(owners)))}), must be on one; leave out --pp"
                )
            if owners and stage not in owners:
                module._modules[key] = Stub(child.to("meta"), output_structures.get(name), device)
        stored = set(module.state_dict(keep_vars=True))
        for tensors in (module._parameters, module._buffers):
            for key, tensor in list(tensors.items()):
                if tensor is not None and key in stored and stages.stage_of(f"{prefix}{key}") != stage:
                    del tensors[key]
                    # A parameter that is used after the last layer, such as a final bias, becomes a scalar. The module
                    # before it is a stub here, whose output has the shape of its input instead of its usual shape; a
                    # scalar broadcasts to any shape.
                    shape = () if f"{prefix}{key}" in names_after_layers else tensor.shape
                    # A plain attribute, which is in neither `parameters()` nor `state_dict()`.
                    object.__setattr__(module, key, _make_nan(shape, tensor.dtype, device))

    strip(model, "")


def modules_on_layer_path(stages: StageMap) -> list[str]:
    """Return the paths of the model (""), of the modules around the layers, and of the layer lists; outermost first."""
    paths = {"": None}
    for stack in stages.stacks:
        parts = stack.path.split(".")
        paths |= {".".join(parts[:end]): None for end in range(1, len(parts) + 1)}
    return sorted(paths, key=lambda path: path.count(".") + bool(path))


def describe_output(output: Any) -> OutputStructure:
    """Return the structure of an output: tensors become `LIKE_FIRST_INPUT`, other values are kept."""
    if isinstance(output, Tensor):
        return LIKE_FIRST_INPUT
    if isinstance(output, Mapping):
        mapping_type: Any = type(output)
        return mapping_type({key: describe_output(item) for key, item in output.items()})
    if type(output) in (tuple, list):
        return type(output)(describe_output(item) for item in output)
    return output


def _stored_names(module: nn.Module) -> list[str]:
    """Return the names of parameters and persistent buffers; a tied parameter is listed under each of its names."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return names + [name for name in module.state_dict(keep_vars=True) if name not in set(names)]


def _make_nan(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return a tensor of NaN, or of zeros for a dtype without NaN, expanded from one element."""
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, Mapping):
        return {key: _to_meta(item) for key, item in value.items()}
    return type(value)(map(_to_meta, value)) if type(value) in (tuple, list) else value


def _fill_with_nan(output_structure: OutputStructure, first: Tensor) -> Any:
    """Return an output of this structure whose tensors are NaN, or zeros for a dtype without NaN.

    Args:
        output_structure: From `describe_output`, or an output on the meta device.
        first: First tensor among the inputs of the module.
    """
    if isinstance(output_structure, (FirstInputShape, Tensor)):
        like = first if isinstance(output_structure, FirstInputShape) else output_structure
        return _make_nan(like.shape, like.dtype, first.device).contiguous()  # the model may change it in place
    if isinstance(output_structure, Mapping):
        mapping_type: Any = type(output_structure)
        return mapping_type({key: _fill_with_nan(item, first) for key, item in output_structure.items()})
    if type(output_structure) in (tuple, list):
        return type(output_structure)(_fill_with_nan(item, first) for item in output_structure)
    return output_structure
