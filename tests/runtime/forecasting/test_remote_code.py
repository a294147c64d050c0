"""Forecasts of a class whose code comes with the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckptx
from ckptx.errors import UnsupportedError
from tests.support.remote_model import write_remote_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


PLAN = {"model.layers.*.q_proj": "colwise", "model.layers.*.o_proj": "rowwise", "lm_head": "colwise_gather_output"}


def test_modules_that_a_plan_shards_are_noted_as_gathered(model: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    report = ckptx.forecast(model, seq=16, tp=2, tp_plan=tmp_path / "plan.json", trust_remote_code=True)
    (note,) = [each for each in report.notes if each.startswith("modules run with gathered parameters")]
    assert "model.layers.*.q_proj" in note
    text = "\n".join(report.assumptions)
    assert "its part of the vocabulary" not in text and "under TP on full logits" in text


@pytest.mark.parametrize(("tp", "noted"), [(1, False), (2, True)])
def test_a_plan_that_shards_nothing_is_noted(tp: int, noted: bool, model: Path) -> None:
    report = ckptx.forecast(model, seq=16, tp=tp, trust_remote_code=True)
    notes = [each for each in report.notes if "shards no parameter of RemoteForCausalLM" in each]
    assert bool(notes) is noted and all("pass --tp-plan FILE" in each for each in notes)
    assert report.settings["has_sharded_logits"] is False


def test_a_known_class_runs_on_its_shards(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = ckptx.forecast(tmp_path, seq=16, tp=2)
    assert report.settings["has_sharded_logits"]
    assert not report.notes and any("its part of the vocabulary" in each for each in report.assumptions)
