"""What tests of the generated files begin with."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from ckptx.architecture.spec import Architecture
from ckptx.architecture.table import lookup

ROOT = Path(__file__).parent.parent.parent


def known(class_name: str) -> Architecture:
    """The architecture of a class that the files answer for."""
    found = lookup(class_name)
    assert found is not None, class_name
    return found


def build_tables_tool() -> ModuleType:
    """`tools/build_tables.py` as a module."""
    spec = importlib.util.spec_from_file_location("build_tables", ROOT / "tools" / "build_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_tables"] = module
    spec.loader.exec_module(module)
    return module
