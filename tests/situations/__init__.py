"""Hostile situations: one module per area, each of which adds its rows to the table in `box`."""

from __future__ import annotations

import importlib
import pkgutil

# Modules that hold no rows.
_MACHINERY = frozenset({"box", "server"})


def load_all() -> None:
    """Import every module that adds situations, in the order of their names."""
    for module in sorted(each.name for each in pkgutil.iter_modules(__path__)):
        if module not in _MACHINERY and not module.startswith("test_"):
            importlib.import_module(f"{__name__}.{module}")
