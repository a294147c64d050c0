"""The same input gives the same bytes, however many threads make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptx
from tests.support.models import RECIPES, write
from tests.support.torch_dcp import file_bytes


def convert(direction: str, src: Path, dst: Path, **options: Any) -> dict[str, bytes]:
    ckptx.convert(direction, src, dst, **options)
    return file_bytes(dst)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", ["llama-tied", "gemma3-vlm", "t5-v1.1"])
@pytest.mark.parametrize("files", [None, 3])
def test_workers_do_not_change_the_output(recipe: str, files: int | None, tmp_path: Path) -> None:
    write(RECIPES[recipe], tmp_path / "hf")
    one = convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp-1", workers=1, files=files)
    four = convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp-4", workers=4, files=files)
    again = convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp-again", workers=4, files=files)
    assert one == four == again
    for manifest in (True, False):
        if not manifest:
            (tmp_path / "dcp-1" / "ckptx.json").unlink()
        size = {} if manifest else {"max_shard_size": "30KB"}
        one = convert("dcp2hf", tmp_path / "dcp-1", tmp_path / f"hf-1-{manifest}", workers=1, **size)
        four = convert("dcp2hf", tmp_path / "dcp-1", tmp_path / f"hf-4-{manifest}", workers=4, **size)
        assert one == four


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["auto", "bf16"])
def test_workers_that_share_one_large_tensor_do_not_change_the_output(dtype: str, tmp_path: Path) -> None:
    """Larger than a block of the digest, and of a length that no block divides."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{i}": torch.randn(rows, 1021, generator=generator) for i, rows in enumerate((9001, 17, 3))}
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    one = convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp-1", workers=1, dtype=dtype)
    four = convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp-4", workers=4, dtype=dtype, max_memory="8MiB")
    assert one == four
    ckptx_only = {"base": "none"}
    one = convert("dcp2hf", tmp_path / "dcp-1", tmp_path / "hf-1", workers=1, **ckptx_only)
    four = convert("dcp2hf", tmp_path / "dcp-4", tmp_path / "hf-4", workers=4, max_memory="8MiB", **ckptx_only)
    assert one == four
