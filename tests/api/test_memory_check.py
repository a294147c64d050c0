"""Whether a run fits GPUs, asked of a forecast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptx.api.memory_check import check_memory_fit
from ckptx.api.verify_run import verify_models
from ckptx.errors import SpaceError
from ckptx.options.verify import RunOptions, VerifyRunOptions
from tests.support.models import llama

GIB = 2**30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fitting") / "HF"
    llama().save_pretrained(path)
    return path


def test_ranks_that_share_take_less(checkpoint: Path) -> None:
    alone, shared = (check_memory_fit(checkpoint, checkpoint, RunOptions(tp=tp), 80 * GIB) for tp in (1, 2))
    assert 0 < shared < alone


def test_what_cannot_fit_is_refused(checkpoint: Path) -> None:
    with pytest.raises(
        SpaceError, match=r"--gpu-memory: a run of .* requires .* a GPU has 1\.00 GiB; multiplying .* by up to 64"
    ):
        check_memory_fit(checkpoint, checkpoint, RunOptions(), GIB)


def test_a_process_that_has_trained_asks_too(checkpoint: Path) -> None:
    torch.ones(2, requires_grad=True).sum().backward()
    options = VerifyRunOptions(checkpoint, checkpoint, run=True, gpu_memory="80GB", device="cpu")
    report = verify_models(options)
    assert report.ok
    assert report.forecast_peak is not None and report.measured_peak is not None
    assert 0.8 < report.measured_peak / report.forecast_peak < 1.3
