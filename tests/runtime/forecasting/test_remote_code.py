"""Forecasts of a class whose code comes with the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptx
from ckptx.errors import UnsupportedError
from tests.support.remote_model import write_remote_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return write_remote_model(tmp_path / "remote")


def test_without_trust_it_is_refused_by_name(model: Path) -> None:
    with pytest.raises(UnsupportedError, match="pass --trust-remote-code"):
        ckptx.forecast(model, seq=16)


@pytest.mark.parametrize(
    ("options", "ranks"),
    [({}, 1), ({"pp": 2}, 2), ({"pp": 2, "schedule": "interleaved1f1b"}, 2), ({"pp": 2, "pp_split": "1,3"}, 2),
     ({"pp": 4, "activation_checkpointing": "full"}, 4)],
)  # fmt: skip
def test_its_stages_hold_all_of_its_parameters(model: Path, options: dict[str, object], ranks: int) -> None:
    """Each parameter is on one stage, so that the bytes of all stages are those of the model."""
    report = ckptx.forecast(model, seq=16, trust_remote_code=True, **options)  # type: ignore[call-overload]
    parameters = 2 * 64 * 16 + 2 * 16 + 4 * (4 * 16 * 16 + 2 * 4 * 16 * 16 + 2 * 16)
    assert report.parameters == parameters
    rows = report.by_pipeline_rank
    assert len(rows) == ranks
    assert sum(row["by_kind"]["parameters"] for row in rows) == 4 * parameters
