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
TABLES_VERSION = model_files.read_index()["transformers"]
IS_TABLES_VERSION = INSTALLED == TABLES_VERSION
PACKAGE = Path(str(find_spec("transformers").origin)).parent  # type: ignore[union-attr]  # found without importing it

# For tests that compare the files with transformers, because the files describe one version.
requires_tables_version = pytest.mark.skipif(
    not IS_TABLES_VERSION,
    reason=f"the files are generated from transformers {TABLES_VERSION}, and {INSTALLED} is installed",
)

# For features that transformers has since 5.20.
READS_SHARDED_FILES = (PACKAGE / "distributed" / "checkpoint.py").exists()
requires_sharded_file_loading = pytest.mark.skipif(
    not READS_SHARDED_FILES,
    reason=f"transformers {INSTALLED} cannot read per-rank files",
)


def has_model(model_type: str) -> bool:
    """Return True if the installed transformers has the model; the files may come from a newer version."""
    return (PACKAGE / "models" / model_type).is_dir()


def without_version_note(text: str) -> str:
    """Return the output of a command without the note about another transformers version."""
    return (
        text if IS_TABLES_VERSION else re.sub(r"^note: .* are those of transformers .*\n", "", text, flags=re.MULTILINE)
    )


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


def shard_with_transformers(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Return a model that transformers shards by its own plan, before it loads weights."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import ColwiseParallel, apply_tensor_parallelism

    sharded: nn.Module
    if hasattr(model, "_resolve_parallel_plans"):
        plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
        sharded = apply_tensor_parallelism(model, mesh, plan)
    else:
        # That version rejects a head with uneven shards, with which it cannot compute; this test does not compute.
        with patch.object(ColwiseParallel, "validate_param", lambda *arguments, **options: None):
            sharded = apply_tensor_parallelism(model, mesh)
    return sharded
