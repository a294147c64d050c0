"""Layers: a module imports from lower layers only, files form no cycle, torch stays in a few packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import ckptx
from ckptx.architecture import model_files

ROOT = Path(ckptx.__file__).parent

DOCUMENT = ROOT.parent / "docs" / "architecture.md"


def layers_of(text: str) -> dict[str, int]:
    """Read the layer of each package from the table in docs/architecture.md, the only place that lists them."""
    layers: dict[str, int] = {}
    layer = 0
    for line in text[text.index("| layer |") : text.index("## One conversion")].splitlines()[2:]:
        if line.startswith("|"):
            number, packages = (cell.strip() for cell in line.split("|")[1:3])
            layer = int(number or layer)
            layers |= {package.strip("`"): layer for package in packages.split(", ")}
    return layers


LAYER = {**layers_of(DOCUMENT.read_text(encoding="utf-8"))}
LAYER["__main__"] = LAYER["cli"]

# Packages that may import from their own layer.
MEETINGS = {("__main__", "cli")}

HEAVY = {"torch", "transformers", "accelerate", "peft"}
MAY_BE_HEAVY = ("architecture/introspection/", "processes/", "robustness_suite/", "runtime/")


class Import(NamedTuple):
    """One import statement: where it is, and the full name of what it imports."""

    file: str
    line: int
    name: str


@lru_cache(maxsize=1)  # every rule looks at one file before the next
def nodes_of(source: str) -> list[ast.AST]:
    """Everything in a module."""
    return list(ast.walk(ast.parse(source)))


def imports_of(source: str, file: str) -> Iterator[Import]:
    """Every import in a module, also inside functions and under TYPE_CHECKING."""
    package = ["ckptx", *Path(file).parent.parts]
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from (Import(file, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "ckptx":
                yield from (Import(file, node.lineno, f"ckptx.{alias.name}") for alias in node.names)
            else:
                yield Import(file, node.lineno, module)


def package_of(file: str) -> str:
    """catalog/region.py -> catalog, errors.py -> errors; packages of the runtime have layers of their own."""
    parts = Path(file).parts
    if parts[0] == "runtime" and parts[1] != "__init__.py":
        return f"runtime/{parts[1].removesuffix('.py')}"
    return parts[0].removesuffix(".py")


def package_of_module(name: str) -> str:
    """ckptx.catalog.region -> catalog, ckptx.runtime.model.build -> runtime/model."""
    parts = name.split(".")[1:]
    if not parts or parts[0] == "__version__":
        return "__init__"
    is_part = len(parts) > 1 and any((ROOT / "runtime" / name).exists() for name in (parts[1], f"{parts[1]}.py"))
    return f"runtime/{parts[1]}" if parts[0] == "runtime" and is_part else parts[0]


def faults_of(source: str, file: str) -> list[str]:
    """What a module imports and must not."""
    here = package_of(file)
    faults = []
    if here not in LAYER:
        return [f"{file}: is in no layer"]
    for found in imports_of(source, file):
        top = found.name.partition(".")[0]
        if top in HEAVY and not file.startswith(MAY_BE_HEAVY):
            faults.append(f"{file}:{found.line}: imports {top}")
        if top != "ckptx":
            continue
        there = package_of_module(found.name)
        if there not in LAYER:
            faults.append(f"{file}:{found.line}: imports ckptx.{there}, which is in no layer")
        elif there != here and LAYER[there] >= LAYER[here] and (here, there) not in MEETINGS:
            faults.append(f"{file}:{found.line}: {here} (layer {LAYER[here]}) imports {there} (layer {LAYER[there]})")
    return faults


FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py"))


def test_only_who_injects_faults_knows_them() -> None:
    """Oracles and phases that knew a fault would prove nothing by naming it."""
    known = {
        file
        for file in FILES
        for each in imports_of((ROOT / file).read_text(encoding="utf-8"), file)
        if each.name.startswith("ckptx.robustness_suite.faults")
    }
    assert known == {"robustness_suite/run.py"}


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("storage/x.py", "from ckptx.cli.main import main", "storage (layer 3) imports cli (layer 16)"),
        ("formats/x.py", "import ckptx.transfer.plan", "formats (layer 6) imports transfer (layer 6)"),
        ("formats/x.py", "def f():\n    from ckptx.architecture import find", "x.py:2: formats"),
        ("storage/x.py", "from ckptx.catalog.entry import Chunk", "imports catalog"),
        ("storage/x.py", "from ckptx.publishing.staging import Staging", "imports publishing"),
        ("catalog/x.py", "from ckptx import publishing", "imports publishing"),
        ("catalog/x.py", "from ..formats import dcp", "imports formats"),
        ("catalog/x.py", "from ckptx import inspect", "ckptx.inspect, which is in no layer"),
        ("comparison/x.py", "from ckptx.runtime.parity.model_loaders import Side", "imports runtime/parity"),
        (
            "transfer/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ckptx.model_view.view",
            "imports model_view",
        ),
        ("formats/x.py", "import torch", "imports torch"),
        ("cli/x.py", "def f():\n    from transformers.models import llama", "imports transformers"),
        ("architecture/class_table.py", "import torch.nn as nn", "imports torch"),
        ("comparison/contents.py", "import torch", "imports torch"),
        ("helpers.py", "", "is in no layer"),
    ],
)
def test_an_injected_import_is_found(file: str, source: str, fault: str) -> None:
    (found,) = faults_of(source, file)
    assert fault in found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "formats/x.py",
            "from ckptx.formats.dcp.reader import open_dcp\nfrom . import dcp\nfrom .dcp.reader import open_dcp",
        ),
        ("publishing/x.py", "from ckptx.storage.files import write_at"),
        ("comparison/contents.py", "from ckptx.comparison.headers import diff"),
        ("architecture/introspection/meta_model.py", "import torch\nfrom transformers import AutoConfig"),
        ("cli/x.py", "from ckptx.api.convert import convert\nimport os, numpy"),
    ],
)
def test_a_permitted_import_is_not(file: str, source: str) -> None:
    assert faults_of(source, file) == []


def neighbours(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Which modules each module imports: by full name, from the texts of files."""
    modules = {
        "ckptx." + file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in sources
    }
    found: dict[str, set[str]] = {}
    for name, file in modules.items():
        imported = found[name] = set()
        for node in nodes_of(sources[file]):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
                imported |= {each for each in names if each in modules}
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names if alias.name in modules}
    return found


def circle_in(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other around a circle; empty when there is none."""
    try:
        tuple(TopologicalSorter(imports).static_order())
    except CycleError as error:
        return sorted(set(error.args[1]))
    return []


def test_no_files_form_a_circle() -> None:
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in FILES if file != "__init__.py"}
    assert circle_in(neighbours(sources)) == []


def test_an_injected_circle_is_found() -> None:
    sources = {
        "transfer/a.py": "from ckptx.transfer.b import B",
        "transfer/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ckptx.transfer import c",
        "transfer/c.py": "def f():\n    import ckptx.transfer.a",
        "transfer/d.py": "from ckptx.transfer.a import A",
    }
    assert circle_in(neighbours(sources)) == [f"ckptx.transfer.{each}" for each in "abc"]
    assert circle_in(neighbours({**sources, "transfer/c.py": ""})) == []


def test_every_package_is_checked() -> None:
    assert {"catalog", "formats", "transfer", "cli", "storage", "__init__"} <= {package_of(file) for file in FILES}


POSITIONAL = {"pread", "preadv", "pwrite", "pwritev", "sendfile", "copy_file_range", "readv", "writev"}


def calls_beside_storage(source: str, file: str) -> list[str]:
    """Where a module outside of the seam to storage reads or writes bytes at a position itself."""
    if file.startswith("storage/"):
        return []
    found = [
        node
        for node in nodes_of(source)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
    ]
    return [f"{file}:{node.lineno}: os.{node.attr}" for node in found if node.attr in POSITIONAL]


def test_an_injected_call_is_found() -> None:
    source = "import os\ndef f(fd):\n    return os.pread(fd, 1, 0)"
    assert calls_beside_storage(source, "transfer/x.py") == ["transfer/x.py:3: os.pread"]
    assert calls_beside_storage(source, "storage/x.py") == []


# What reads checkpoints asks a `Source`; these are the edges at which a path of the user becomes one.
NO_DISK = ("catalog/", "formats/", "layout/", "mapping/", "transfer/")
EDGES = ("catalog/manifest_parser.py", "formats/hf/hf_metadata.py", "formats/hf/hub.py", "formats/hf/reader.py",
         "formats/registry.py")  # fmt: skip


def looks_at_a_disk(source: str, file: str) -> list[str]:
    """Return the imports of the local file system in a module that reads through a `Source`."""
    if not file.startswith(NO_DISK) or file in EDGES:
        return []
    found = []
    for node in nodes_of(source):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            found += [f"{file}:{node.lineno}: imports {name}" for name in names if name in ("os", "shutil", "glob")]
        elif isinstance(node, ast.ImportFrom) and node.module == "pathlib" and "Path" in names:
            found.append(f"{file}:{node.lineno}: imports Path")
    return found


def test_an_injected_look_at_a_disk_is_found() -> None:
    assert looks_at_a_disk("import os", "formats/x/reader.py") == ["formats/x/reader.py:1: imports os"]
    assert looks_at_a_disk("from pathlib import Path", "transfer/x.py") == ["transfer/x.py:1: imports Path"]
    assert looks_at_a_disk("from pathlib import PurePosixPath", "formats/x.py") == []
    assert looks_at_a_disk("import os", "publishing/staging.py") == []


def test_the_document_lists_every_package_once_and_no_other() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert set(LAYER) == {package_of(file) for file in FILES}
    steps = text[text.index("## One conversion") : text.index("## Model tables")]
    for name in set(re.findall(r"`(\w+(?:/\w+)*\.py)`", steps)):
        assert (ROOT / name).is_file() or (ROOT / "conversion" / name).is_file(), name


def comparisons_of_format(source: str, file: str) -> list[str]:
    """Where a module outside of `formats/` asks which format a checkpoint has, in place of what follows from it."""
    if file.startswith("formats/"):
        return []
    return [
        f"{file}:{node.lineno}"
        for node in nodes_of(source)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Attribute) and side.attr == "format"
    ]


def test_an_injected_comparison_is_found() -> None:
    for text in ('x = c.format == "dcp"', 'x = c.format in ("dcp", "bin")', 'x = "dcp" != view.catalog.format'):
        assert comparisons_of_format(text, "view.py") == ["view.py:1"]
    assert comparisons_of_format('x = c.format == "dcp"', "formats/x.py") == []


# Model types that are words of other things, too: a module in a layer, a part of the name of a list.
NO_MODELS = {"mamba", "vit"}


@lru_cache
def model_words() -> frozenset[str]:
    """The classes and model types of transformers."""
    known = model_files.read_index()["classes"]
    return frozenset(known) | frozenset(known.values()) - {""} - NO_MODELS


def names_of_models(source: str, file: str) -> list[str]:
    """Where a module has the name of a class or a model type of transformers in it: facts of models are data."""
    names = model_words()
    return [
        f'{file}:{node.lineno}: "{node.value}"'
        for node in nodes_of(source)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    ]


def test_an_injected_name_of_a_model_is_found() -> None:
    for text in ('x = kind == "pixtral"', 'T = {"LlamaForCausalLM": 1}', 'x = kind in ("qwen2_vl", "other")'):
        (found,) = names_of_models(text, "view.py")
        assert found.startswith("view.py:1: ")
    assert names_of_models('raise ValueError("add it, as [LlamaForCausalLM]")', "view.py") == []


# The package itself

RULES = (faults_of, calls_beside_storage, looks_at_a_disk, comparisons_of_format, names_of_models)


@pytest.mark.parametrize("file", FILES)
def test_a_module_keeps_every_rule(file: str) -> None:
    """Lower layers only, bytes through storage, formats told apart in one package, no names of models."""
    source = (ROOT / file).read_text(encoding="utf-8")
    assert [fault for rule in RULES for fault in rule(source, file)] == []
