"""The transformers that is installed beside the one that the generated files were made from: what tests may ask it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from ckptx.architecture import model_files

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

INSTALLED = version("transformers")
ASKED = model_files.read_index()["transformers"]
IS_ASKED = INSTALLED == ASKED
PACKAGE = Path(str(find_spec("transformers").origin)).parent  # type: ignore[union-attr]  # not imported to be looked at

# For a test that compares the files with transformers itself: they hold what one version says of its classes.
compares_the_files = pytest.mark.skipif(
    not IS_ASKED, reason=f"compares the files, made from transformers {ASKED}, with the {INSTALLED} that is installed"
)

# What transformers has since 5.20.
READS_SHARDED_FILES = (PACKAGE / "distributed" / "checkpoint.py").exists()
reads_sharded_files = pytest.mark.skipif(
    not READS_SHARDED_FILES,
    reason=f"transformers {INSTALLED} has nothing that reads the files of many ranks",
)


def has_model(model_type: str) -> bool:
    """Whether the installed transformers knows the model; one that the files know may be younger."""
    return (PACKAGE / "models" / model_type).is_dir()


def without_version_note(text: str) -> str:
    """What a command of another process said, without the note that another transformers is installed."""
    return text if IS_ASKED else re.sub(r"^note: .* are those of transformers .*\n", "", text, flags=re.MULTILINE)


def _distributed(name: str) -> Any:
    """A module of `transformers.distributed`; None in a version that has its content in another."""
    try:
        return importlib.import_module(f"transformers.distributed.{name}")
    except ModuleNotFoundError:
        return None


def style_of(parameter: str, plan: Mapping[str, str]) -> str | None:
    """The style that transformers gives a parameter by a plan."""
    parallel, tensor_parallel = _distributed("parallel_utils"), _distributed("tensor_parallel")
    find = parallel._get_parameter_plan if parallel else tensor_parallel._get_parameter_tp_plan
    found: str | None = find(parameter, dict(plan))
    return found


def parallel_styles() -> list[str]:
    """The names of all styles."""
    _distributed("expert_parallel")  # registers its styles, and imports those of TP
    return sorted((_distributed("parallel_utils") or _distributed("tensor_parallel")).ALL_PARALLEL_STYLES)


def cut_for_tensor_parallelism(model: Any, mesh: DeviceMesh) -> nn.Module:
    """A model as `from_pretrained` cuts it by its own plan, before it reads a weight."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import ColwiseParallel, apply_tensor_parallelism

    cut: nn.Module
    if hasattr(model, "_resolve_parallel_plans"):
        plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
        cut = apply_tensor_parallelism(model, mesh, plan)
    else:
        # That version refuses a head whose rows do not divide, as it cannot compute with it; nothing is computed here.
        with patch.object(ColwiseParallel, "validate_param", lambda *arguments, **options: None):
            cut = apply_tensor_parallelism(model, mesh)
    return cut
