"""Per-rank FSDP files: ranks that are missing, copied or of another save, and shardings that cannot be."""

from __future__ import annotations

from typing import Any

from tests.formats.test_fsdp_files import MALFORMED, UNSUPPORTED
from tests.situations.box import Box, situation

for _exit, _table in ((3, MALFORMED), (4, UNSUPPORTED)):
    for _name, (_make, _message) in _table.items():

        @situation("per-rank FSDP files", _name, _exit, _message)
        def _(box: Box, make: Any = _make) -> Any:
            root = box.root / "actor"
            root.mkdir()
            make(root)
            return ("convert", "to-hf", root, box.dst, "--base", "none")
