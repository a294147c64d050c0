"""Import the modules that most functions of the pool need, without garbage collection and without starting threads."""

import gc
import importlib

_NEEDED = (
    "pytest",  # test files import it
    "torch._functorch.partitioners",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.masking_utils",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.processing_utils",
)

gc.disable()
try:
    for name in _NEEDED:
        importlib.import_module(name)
finally:
    gc.freeze()
    gc.enable()
