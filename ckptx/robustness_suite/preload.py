"""Imports of every rank: imported by the process that ranks are forked from, and by ranks in new interpreters.

The imported objects live as long as the process. Garbage collection is disabled during the imports, which saves a fifth
of their time, and the objects are then frozen: collecting them later would copy pages that forked processes share.
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
