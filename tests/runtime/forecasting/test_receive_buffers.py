"""A forecast runs the first step of a pipeline, and reports what each later step takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptx.runtime.forecasting.step import StepSpec
from ckptx.runtime.forecasting.timeline import Segment
from ckptx.runtime.memory.storage_ledger import StorageLedger
from ckptx.runtime.parallel.pipeline.schedules import SCHEDULES, can_split_backward
from tests.support.measured_steps import DEEP_CONFIGS, forecast_in_this_process, task_of

_FOUR_LAYERS = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip


def peaks_of(segments: Sequence[Segment]) -> list[int]:
    """Return the peak bytes of each segment."""
    return [sum(each.peak_by_kind) for each in segments]


@pytest.mark.parametrize("schedule", ["interleaved1f1b", "zbvzerobubble", "dualpipev"])
def test_the_first_step_takes_what_the_second_takes(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model passes keys, values and inputs of later layers through a stage.

    If the previous stage is on the same rank, it gets their gradients in the buffers that they were received in.
    """
    if SCHEDULES[schedule].splits_backward and not can_split_backward():
        pytest.skip("this torch cannot run schedules that split the backward pass")
    (tmp_path / "config.json").write_text(json.dumps(DEEP_CONFIGS["gemma4-8-layers"] | _FOUR_LAYERS))
    run = StepSpec.run

    def run_twice(step: StepSpec, ledger: StorageLedger) -> None:
        run(step, ledger)
        run(step, ledger)

    monkeypatch.setattr(StepSpec, "run", run_twice)
    for forecast in forecast_in_this_process(task_of(tmp_path, "pp2", "none", schedule=schedule, microbatches=4)):
        segments = forecast.timeline.segments
        count = len(segments) // 2  # the second step has one more, in which its batches are created
        first, second = segments[:count], segments[-count:]
        assert (first[0].phase, first[-1].phase) == (second[0].phase, second[-1].phase) == ("forward", "optimizer")
        assert peaks_of(first) == peaks_of(second)
