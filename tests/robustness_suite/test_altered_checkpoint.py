"""An altered copy of a checkpoint differs in a few weights only, and torch loads it as it loads the original."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptx.errors import OutputError
from ckptx.robustness_suite.altered_checkpoint import copy_altered
from ckptx.robustness_suite.stored_items import read_items

torch = pytest.importorskip("torch")

# Stored dtype, and the dtype in which a trainer computes.
DTYPES = [
    (stored, computed)
    for stored, all_computed in {
        "float64": ("float64", "float32", "bfloat16", "float16"),
        "float32": ("float32", "bfloat16", "float16"),
        "bfloat16": ("bfloat16",),
        "float16": ("float16",),
    }.items()
    for computed in all_computed
]
Save = Callable[[Path, Mapping[str, Any]], object]


def save_dcp(folder: Path, tensors: Mapping[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp

    optimizer = {f"state.{name}.exp_avg": value + 1 for name, value in tensors.items()}
    dcp.save({"model": dict(tensors), "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)


def save_archive(folder: Path, tensors: Mapping[str, Any]) -> None:
    folder.mkdir()
    torch.save(dict(tensors), folder / "pytorch_model.bin")


def save_safetensors(folder: Path, tensors: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file as save_torch_file

    folder.mkdir()
    save_torch_file({name: value.clone() for name, value in tensors.items()}, folder / "model.safetensors")


def load(folder: Path, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The weights as a trainer loads them."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    if (folder / ".metadata").exists():
        state = {"model": {name: torch.zeros_like(value) for name, value in tensors.items()}}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        return state["model"]
    if (folder / "pytorch_model.bin").exists():
        return dict(torch.load(folder / "pytorch_model.bin", weights_only=True))
    return dict(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("save", [save_dcp, save_archive, save_safetensors])
@pytest.mark.parametrize(("dtype", "precision"), DTYPES)
def test_a_few_weights_differ_by_a_step_that_their_precision_has(
    tmp_path: Path, save: Save, dtype: str, precision: str
) -> None:
    """Weights are stored in `dtype`, but a trainer computes in `precision`."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{index}.weight": torch.randn(8, 16, generator=generator)
        .to(getattr(torch, precision))
        .to(getattr(torch, dtype))
        for index in range(6)
    }
    tensors["lm_head.weight"] = tensors["layers.5.weight"].clone()  # stored twice, as tied weights can be
    save(tmp_path / "step-2", tensors)
    items = read_items(tmp_path / "step-2")
    altered = copy_altered(tmp_path / "step-2", tmp_path / "copy" / "step-2", items)
    changed = {key for key, value in read_items(tmp_path / "copy" / "step-2").items() if items[key] != value}
    assert changed == altered.items.keys() and len(changed) == 4 and not altered.reason
    assert items == read_items(tmp_path / "step-2")
    assert not {"model.lm_head.weight", "model.layers.5.weight"} & {name for _, name in changed}
    loaded = load(tmp_path / "copy" / "step-2", tensors)
    for name, value in tensors.items():
        difference = (loaded[name].double() - value.double()).abs()
        count = int((difference != 0).sum())
        assert count == (16 if ("model", f"model.{name}") in changed else 0)
        assert torch.equal(loaded[name].to(getattr(torch, precision)).to(getattr(torch, dtype)), loaded[name])
        assert float((difference / value.double().abs()).max()) <= 1 / 128


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("model.npz", np.ones(3), "no weights were found in safetensors files"),
        ("model.safetensors", np.zeros(3), "all weights that can be altered are 0 or not finite"),
        ("model.safetensors", np.full(3, np.nan), "all weights that can be altered are 0 or not finite"),
        ("model.safetensors", np.ones(3, np.int64), "no weights were found"),
    ],
)
def test_what_cannot_be_altered_has_a_reason(tmp_path: Path, name: str, values: Any, reason: str) -> None:
    (tmp_path / "step").mkdir()
    if name.endswith(".npz"):
        np.savez(tmp_path / "step" / name, weight=values)
    else:
        save_file({"weight": values}, tmp_path / "step" / name)
    altered = copy_altered(tmp_path / "step", tmp_path / "copy" / "step", read_items(tmp_path / "step"))
    assert not altered.items and reason in altered.reason


def test_master_weights_are_a_reason(tmp_path: Path) -> None:
    altered = copy_altered(tmp_path, tmp_path / "copy" / "step", {("master weights", "w"): "1"})
    assert "the optimizer has master weights" in altered.reason and not (tmp_path / "copy").exists()


def test_a_copy_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written: No such file or directory"):
        copy_altered(tmp_path / "none", tmp_path / "copy" / "step", {})
