"""`ckptx.runtime` offers what a training loop imports: every name, without torch until one is used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckptx import runtime

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", runtime.__all__)
def test_a_name_is_that_of_its_module(name: str) -> None:
    found = getattr(runtime, name)
    assert found.__name__ == name
    assert found.__module__ == runtime._MODULES_BY_NAME[name]


def test_a_type_checker_sees_the_same_names() -> None:
    tree = ast.parse(Path(runtime.__file__).read_text(encoding="utf-8"))
    declared = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckptx.")
        for alias in node.names
        if alias.name != "missing_package"
    }
    assert declared == runtime._MODULES_BY_NAME
    assert set(runtime.__all__) == set(declared)


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import sys, ckptx.runtime\nassert 'torch' not in sys.modules\nassert 'load' in dir(ckptx.runtime)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        runtime.lode  # noqa: B018


def test_documents_import_the_runtime_from_one_place() -> None:
    found = [
        f"{page.name}: {line}"
        for page in PAGES
        for line in re.findall(r"^from ckptx\.[\w.]+ import .*", page.read_text(encoding="utf-8"), re.MULTILINE)
        if line.startswith(("from ckptx.runtime.", "from ckptx.layout.", "from ckptx.formats."))
    ]
    assert found == []
