"""Hooks that read and change the arguments of a model's layers, and of the modules around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ckptx.layout.stages import StageMap
from ckptx.runtime.model.layers import find_submodule
from ckptx.runtime.parallel.pipeline.boundary_slots import Arguments
from ckptx.runtime.parallel.pipeline.stage import modules_on_layer_path
from ckptx.runtime.torch_private import compiled_call, set_compiled_call

Call = tuple[str, int]  # canonical name of a module, number of its earlier calls in this forward pass
BeforeCall = Callable[[Call, Arguments], None]  # gets the arguments, which it may change in place
AfterCall = Callable[[Call, Any], None]  # gets the output of the call


def find_hooked_modules(model: nn.Module, stages: StageMap) -> dict[str, nn.Module]:
    """Return the modules to hook, by canonical name.

    These are the modules around the layers (not the model itself), the layers, and those right before and after them.
    Modules that the model lacks are left out. For a wrapped module, the outermost wrapper is returned.
    """
    layer_lists = {stack.path for stack in stages.stacks}
    names = [name for name in modules_on_layer_path(stages) if name and name not in layer_lists]
    for stack in stages.stacks:
        names += [*stack.before, *(f"{stack.path}.{index}" for index in range(stack.count)), *stack.after]
    modules = {name: find_submodule(model, name) for name in names}
    return {name: module for name, module in modules.items() if module is not None}


class CallHooks:
    """Hooks on the modules of `find_hooked_modules`; they do nothing outside of `activate`.

    They run before the hooks of wrappers, and not again when activations are recomputed. A compiled module runs its own
    hooks inside the compiled graph, which must not depend on the callbacks; there the hooks wrap the compiled call.
    """

    def __init__(self, model: nn.Module, stages: StageMap) -> None:
        self._calls: Counter[str] = Counter()  # module -> number of its calls in this forward pass
        self._current_call: dict[str, int] = {}  # module -> index of its call that is running, from 0
        self._before_call: BeforeCall | None = None
        self._after_call: AfterCall | None = None
        self._handles: list[Any] = []
        for name, module in find_hooked_modules(model, stages).items():
            pre_hook, post_hook = self._make_pre_hook(name), self._make_post_hook(name)
            compiled = compiled_call(module)
            if compiled is not None:
                self._handles.append(_CompiledCallHooks(module, compiled, pre_hook, post_hook))
                continue
            self._handles.append(module.register_forward_pre_hook(pre_hook, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(post_hook))

    @contextmanager
    def activate(self, before_call: BeforeCall, after_call: AfterCall | None = None) -> Iterator[None]:
        """Call the callbacks during one forward pass.

        Args:
            before_call: Called with the arguments of each call; may change them in place.
            after_call: Called with the output of each call; None for no callback.
        """
        self._calls.clear()
        self._before_call, self._after_call = before_call, after_call
        try:
            yield
        finally:
            self._before_call = self._after_call = None

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _make_pre_hook(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._before_call is None:
                return None
            self._current_call[name] = self._calls[name]
            self._calls[name] += 1
            arguments: Arguments = {**dict(enumerate(args)), **kwargs}
            self._before_call((name, self._current_call[name]), arguments)
            return tuple(arguments.pop(index) for index in range(len(args))), arguments

        return hook

    def _make_post_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._after_call is not None:
                self._after_call((name, self._current_call[name]), output)

        return hook


class _CompiledCallHooks:
    """Hooks around the call of a module that `nn.Module.compile` compiled."""

    def __init__(
        self,
        module: nn.Module,
        compiled: Callable[..., Any],
        pre_hook: Callable[..., Any],
        post_hook: Callable[..., None],
    ) -> None:
        self._module, self._compiled = module, compiled

        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = pre_hook(module, args, kwargs) or (args, kwargs)
            output = compiled(*args, **kwargs)
            post_hook(module, args, output)
            return output

        set_compiled_call(module, call)

    def remove(self) -> None:
        """Restore the compiled call."""
        set_compiled_call(self._module, self._compiled)
