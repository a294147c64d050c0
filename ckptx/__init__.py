"""ckptx: convert and reshard checkpoints of large language models, and verify the result.

The functions `convert`, `diff`, `forecast`, `inspect`, `merge`, `reshard`, `robustness` and `verify` are the commands
of the command line: their parameters are named like the options, they raise a subclass of `ckptx.errors.CkptxError` for
each exit code from 2 to 7, and they return the report that `--json` prints. `open_checkpoint` returns the catalog of a
checkpoint: names, dtypes, shapes and file positions of its tensors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ckptx.processes.imports import import_lock
from ckptx.version import __version__

if TYPE_CHECKING:
    from ckptx import errors
    from ckptx.api.convert import convert
    from ckptx.api.forecast import forecast
    from ckptx.api.inspect import inspect
    from ckptx.api.merge import merge
    from ckptx.api.reshard import reshard
    from ckptx.api.verify import verify
    from ckptx.comparison.headers import diff
    from ckptx.formats.registry import open_checkpoint
    from ckptx.robustness_suite import robustness

__all__ = [
    "__version__", "convert", "diff", "errors", "forecast", "inspect", "merge", "open_checkpoint",
    "reshard", "robustness", "verify",
]  # fmt: skip

# Public name that is no command -> its module, or "module:attribute".
_NOT_COMMANDS = {"errors": "ckptx.errors", "open_checkpoint": "ckptx.formats.registry:open_checkpoint"}


if not TYPE_CHECKING:  # type checkers use the imports above; with `__getattr__` they would accept any name

    def __getattr__(name: str) -> object:
        """Import a public function or module on first access, so that `import ckptx` is fast."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with import_lock:
            from ckptx.options.commands import COMMANDS

            functions = {each.function.partition(":")[2]: each.function for each in COMMANDS.values()}
            module_name, _, attribute = {**functions, **_NOT_COMMANDS}[name].partition(":")
            module = import_module(module_name)
        return getattr(module, attribute) if attribute else module


def __dir__() -> list[str]:
    """Return the public names, imported or not, and the module attributes, without the helpers of this file."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__") and name.endswith("__"))})
