"""Imports of every rank: imported by the process that ranks are forked from, and by ranks in new interpreters.

What is imported stays. To search it for garbage takes a fifth of the time of importing it, and in forked processes
pages that they would share; so it is not searched, neither now nor after a task.
"""

import gc
import importlib

_MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.modeling_utils",
    "ckptx.robustness_suite.tasks",
)

gc.disable()
try:
    for name in _MODULES:
        importlib.import_module(name)
finally:
    gc.freeze()
    gc.enable()
