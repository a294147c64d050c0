"""Private names of other libraries: those of torch are used in one module, those of others are listed with a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ckptx

ROOT = Path(ckptx.__file__).parent
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py"))

TORCH = "runtime/torch_private.py"

# What is used elsewhere, and why it may be.
ALLOWED = {
    # The registries of `nn.Module`, the same in every torch: `register_*` and `state_dict` are defined by them, and a
    # parameter whose stand-in is no `nn.Parameter` can be set in no other way.
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    # What transformers has authors of models define.
    "_from_config",
    "_init_weights",
    "_keep_in_fp32_modules",
    "_keep_in_fp32_modules_strict",
    "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected",
    "_tp_plan",
    "_weight_conversions",
    # Documented in Python, in spite of the underscore.
    "_exit",
    "_fields",
    "_asdict",
    "_replace",
    # Python before 3.11 has it, and a later one is asked for it in vain.
    "_NormalAccessor",
    # The settings of a process of multiprocessing, which it has no public way to change.
    "_config",
}
_BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_in(tree: ast.AST) -> Iterator[str]:
    """Every name that a module gives to something, attributes of `self` included."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def is_self(node: ast.AST) -> bool:
    return ast.unparse(node) in ("self", "cls", "super()")


@cache
def defined_in_package() -> frozenset[str]:
    texts = ((ROOT / file).read_text(encoding="utf-8") for file in FILES)
    return frozenset(name for text in texts for name in defined_in(ast.parse(text)))


def of_torch(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")


def private_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if of_torch(name) and any(map(is_private, name.split("."))))


def imported_of_package(tree: ast.AST) -> Iterator[str]:
    """The names under which a module of ckptx is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "ckptx":
            yield from (alias.asname or alias.name for alias in node.names)


def private_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Find private attributes that the module did not define itself, read by dots or by `getattr`.

    Operators (`torch.ops.aten._softmax`) are named by a registry, not by an attribute.
    """
    own, imported = set(defined_in(tree)), set(imported_of_package(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, name, known = node.value, node.attr, own
            if is_self(owner):
                known = own | defined_in_package()
            elif ast.unparse(owner).startswith("torch.ops"):
                continue
            elif ast.unparse(owner) in imported:
                known = own | defined_in_package()
            elif ast.unparse(owner).partition(".")[0] in ("torch", "dist", "nn"):
                known = set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
            key = node.args[1] if len(node.args) > 1 else None
            if not isinstance(key, ast.Constant):
                continue
            name, known = str(key.value), set()
        else:
            continue
        if is_private(name) and name not in known | ALLOWED:
            yield node.lineno, ast.unparse(node)


def private_names(source: str, file: str) -> list[str]:
    """List the private names of libraries that a module uses."""
    if file == TORCH:
        return []
    tree = ast.parse(source)
    return [f"{file}:{line}: {said}" for line, said in (*private_imports(tree), *private_attributes(tree))]


@pytest.mark.parametrize(
    "source",
    [
        "from torch._subclasses.fake_tensor import FakeTensor",
        "import torch.utils._pytree as pytree",
        "from torch.distributed import _functional_collectives as functional",
        "from torch.nn.modules.dropout import _DropoutNd",
        "import torch\ndef f():\n    return torch._C._current_graph_task_id()",
        "def f(tensor):\n    return tensor._local_tensor",
        "def f(tensor):\n    return getattr(tensor, '_local_tensor', tensor)",
        "class A(Base):\n    def f(self):\n        return self._of_torch",
        "import torch\n_foreach_mul_ = torch._foreach_mul_",
    ],
)
def test_an_injected_name_is_found(source: str) -> None:
    assert private_names(source, "runtime/x.py")
    assert not private_names(source, TORCH)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.ops.aten._softmax",
        "class A:\n    def __init__(self):\n        self._x = 1\n    def f(self, other):\n        return other._x",
        "def f(module):\n    return module._parameters, module.__dict__",
        "from ckptx.runtime.torch_private import FakeTensor",
    ],
)
def test_a_permitted_name_is_not(source: str) -> None:
    assert private_names(source, "runtime/x.py") == []


def test_no_allowance_is_left_over() -> None:
    texts = [(ROOT / file).read_text(encoding="utf-8") for file in FILES]
    assert [name for name in sorted(ALLOWED) if not any(name in text for text in texts)] == []


@pytest.mark.parametrize("file", FILES)
def test_a_module_uses_private_names_of_torch_in_one_place(file: str) -> None:
    assert private_names((ROOT / file).read_text(encoding="utf-8"), file) == []
