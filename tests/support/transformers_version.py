"""Differences between the installed transformers and the version that the generated files come from."""

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

# For tests that compare the files with transformers, because the files describe one version.
compares_the_files = pytest.mark.skipif(
    not IS_ASKED, reason=f"the files are generated from transformers {ASKED}, and {INSTALLED} is installed"
)

# For features that transformers has since 5.20.
READS_SHARDED_FILES = (PACKAGE / "distributed" / "checkpoint.py").exists()
reads_sharded_files = pytest.mark.skipif(
    not READS_SHARDED_FILES,
    reason=f"transformers {INSTALLED} cannot read per-rank files",
)


def has_model(model_type: str) -> bool:
    """Return True if the installed transformers has the model; the files may come from a newer version."""
    return (PACKAGE / "models" / model_type).is_dir()


def without_version_note(text: str) -> str:
    """Return the output of a command without the note about another transformers version."""
    return text if IS_ASKED else re.sub(r"^note: .* are those of transformers .*\n", "", text, flags=re.MULTILINE)


def _distributed(name: str) -> Any:
    """Return a module of `transformers.distributed`; None if this version does not have it."""
    try:
        return importlib.import_module(f"transformers.distributed.{name}")
    except ModuleNotFoundError:
        return None


def style_of(parameter: str, plan: Mapping[str, str]) -> str | None:
    """Return the TP style of a parameter in a plan of transformers."""
    parallel, tensor_parallel = _distributed("parallel_utils"), _distributed("tensor_parallel")
    find = parallel._get_parameter_plan if parallel else tensor_parallel._get_parameter_tp_plan
    found: str | None = find(parameter, dict(plan))
    return found


def parallel_styles() -> list[str]:
    """Return the names of all TP styles."""
    _distributed("expert_parallel")  # registers its styles and the TP styles
    return sorted((_distributed("parallel_utils") or _distributed("tensor_parallel")).ALL_PARALLEL_STYLES)


def cut_for_tensor_parallelism(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Return a model that transformers shards by its own plan, before it loads weights."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import ColwiseParallel, apply_tensor_parallelism

    cut: nn.Module
    if hasattr(model, "_resolve_parallel_plans"):
        plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
        cut = apply_tensor_parallelism(model, mesh, plan)
    else:
        # That version rejects a head with uneven shards, with which it cannot compute; this test does not compute.
        with patch.object(ColwiseParallel, "validate_param", lambda *arguments, **options: None):
            cut = apply_tensor_parallelism(model, mesh)
    return cut
