"""Text of `forecast`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ckptx.report.forecast import forecast_text, forecast_verdict
from ckptx.report.forecast_phrases import batch_text, human_count, mesh_text, origin_text, peak_time_text, settings_text
from ckptx.untrusted.printable import escape_strings
from tests.report.made import COURSE, forecasted, largest, stage, too_large
from tests.report.test_html import EVIL

SCHEMA = Path(__file__).resolve().parent.parent.parent / "docs" / "report.schema.json"


def alone(**fields: Any) -> Any:
    """On one rank, one microbatch."""
    step = {**forecasted().settings, "microbatches": 1, "schedule": None, "param_dtype": None}
    made = {"layout": {"tp": 1, "pp": 1, "dp_shard": 1, "dp_replicate": 1}, "settings": step}
    return forecasted(**{**made, "by_pipeline_rank": [stage(0, COURSE)], **fields})


def hostile(text: str) -> Any:
    """With this name wherever a config or a model has one."""
    course = [[row[0], row[1], text, *row[3:]] for row in COURSE]
    row = stage(0, course, peak_tensor=largest(1, text), largest_tensors=[largest(1, text, op=text)])
    return forecasted(architecture=text, by_pipeline_rank=[row], assumptions=[text], notes=[text])


def test_a_block_for_each_stage_and_the_verdict_at_the_end() -> None:
    lines = forecast_text(forecasted(seconds=2.5)).splitlines()
    assert lines == [
        "SomeForCausalLM, 4,000,000 parameters, on tp 2 x pp 2, 4 ranks",
        "per data-parallel rank: batch 2 x 1,024 tokens in 2 microbatches (numbered from 0), 1f1b",
        "float32, gathered in bfloat16, adamw, loss on sharded logits, activation checkpointing full",
        *block("stage 0", 1),
        *block("stage 1", 2),
        "all ranks: 16 TFLOP per step, 25.0% recomputed",
        "assumptions:",
        "  bytes of tensors",
        "  no fragmentation",
        (
            "FITS: peak 40.00 MiB (stage 1) + reserve 24.00 MiB of 1.00 GiB GPU memory; 960.00 MiB free; "
            "float32 parameters and optimizer state, computed in bfloat16"
        ),
        "done in 2.5 s",
    ]


def block(name: str, times: int) -> list[str]:
    """Of a stage that takes so many times what `COURSE` says."""

    def row(kind: str, peak: int, between: int | None = None) -> str:
        said = (
            "0 B" if not each else f"{each * times}.00 MiB" for each in (peak, peak if between is None else between)
        )
        return f"  {kind:<12} {next(said):>13}  {next(said):>13}"

    return [
        f"{name}: peak {20 * times}.00 MiB, {12 * times}.00 MiB between steps, 2 layers checkpointed",
        "  peak during backward of microbatch 1, in lm_head: aten::exp allocates float32 [2, 3]",
        f"  {'':<12}   at the peak  between steps",
        row("parameters", 4), row("gradients", 4, 0), row("optimizer", 8), row("activations", 2, 0),
        row("temporaries", 2, 0),
        "  largest tensors at the peak",
        "       2.00 MiB  temporaries  float32 [2, 3] from aten::exp, in lm_head",
        "       1.00 MiB  temporaries  float32 [2, 3] from aten::exp, outside modules",
        "  per rank: 4 TFLOP per step, 25.0% recomputed; sent per step: 1.00 MiB in all-gather",
    ]  # fmt: skip


def test_what_does_not_fit_is_red_with_what_is_too_much() -> None:
    text = forecast_text(too_large(), lambda said: f"<{said}>")
    assert "stage 0: peak 20.00 MiB" in text and "stage 1: <peak 40.00 MiB>" in text
    said = "DOES NOT FIT: peak 40.00 MiB (stage 1) + reserve 24.00 MiB exceeds 50.00 MiB GPU memory by 14.00 MiB"
    said += "; float32 parameters and optimizer state, computed in bfloat16"
    assert f"<{said}>" in text
    assert forecast_verdict(too_large()) == said


def test_without_a_size_nothing_is_judged() -> None:
    said = forecast_verdict(forecasted(gpu_memory=None, fits=None))
    mixed = "float32 parameters and optimizer state, computed in bfloat16"
    assert said == f"PEAK: 40.00 MiB (stage 1), 24.00 MiB between steps; {mixed}"
    precision = "float32 parameters and optimizer state"
    verdict = f"PEAK: 20.00 MiB, 12.00 MiB between steps; {precision}"
    assert forecast_verdict(alone(gpu_memory=None, fits=None)) == verdict


def test_one_rank_and_one_microbatch_are_not_numbered() -> None:
    report = alone()
    assert mesh_text(report) == "1 rank"
    assert batch_text(report) == "batch 2 x 1,024 tokens"
    assert "each rank: peak 20.00 MiB" in forecast_text(report)
    assert peak_time_text(report, largest(1)) == "backward, outside modules"
    assert peak_time_text(report, largest(1, "a", is_recomputed=True)) == "backward, in a, recomputed"
    assert peak_time_text(report, largest(1, phase="optimizer")) == "optimizer step"


def test_settings_are_said() -> None:
    step = {
        **forecasted().settings, "images": 2, "optimizer": "none", "loss": "none", "ac_scope": "vision",
        "reduce_dtype": "float32", "batch": 1,
    }  # fmt: skip
    report = alone(settings=step)
    assert batch_text(report) == "batch 1 x 1,024 tokens with 2 images each in 2 microbatches (numbered from 0), 1f1b"
    assert settings_text(report) == (
        "float32, gathered in bfloat16, reduced in float32, no optimizer, no loss, "
        "activation checkpointing full (vision layers)"
    )


@pytest.mark.parametrize(("tp", "text"), [(1, "loss in float32"), (2, "loss on sharded logits")])
def test_logits_are_sharded_with_tp_only(tp: int, text: str) -> None:
    report = forecasted(layout={"tp": tp, "pp": 1, "dp_shard": 2, "dp_replicate": 1})
    assert settings_text(report) == f"float32, gathered in bfloat16, adamw, {text}, activation checkpointing full"


@pytest.mark.parametrize(("tp", "text"), [(1, "loss in float32"), (2, "loss in float32 on full logits")])
def test_logits_of_a_head_that_is_not_sharded_are_full(tp: int, text: str) -> None:
    settings = {**forecasted().settings, "has_sharded_logits": False}
    report = forecasted(layout={"tp": tp, "pp": 1, "dp_shard": 2, "dp_replicate": 1}, settings=settings)
    assert settings_text(report) == f"float32, gathered in bfloat16, adamw, {text}, activation checkpointing full"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "bfloat16"}, "bfloat16 parameters and optimizer state, no float32 master weights"),
        (
            {"dtype": "bfloat16", "param_dtype": "bfloat16"},
            "bfloat16 parameters and optimizer state, no float32 master",
        ),
        ({"dtype": "bfloat16", "optimizer": "sgd"}, "bfloat16 parameters, no float32 master weights"),
        ({"dtype": "float32"}, "float32 parameters and optimizer state"),
        ({"dtype": "float32", "param_dtype": "float16"}, "float32 parameters and optimizer state, computed in float16"),
        ({"dtype": "float32", "param_dtype": "bfloat16", "optimizer": "none"}, "float32 parameters, computed in bf"),
    ],
)
def test_the_precision_is_on_the_verdict_line(settings: dict[str, str], said: str) -> None:
    report = alone(settings={**alone().settings, **settings})
    assert forecast_verdict(report).partition("free; ")[2].startswith(said)
    assert ("master" in forecast_verdict(report)) is (settings["dtype"] != "float32")


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (None, "peak 600.00 MiB"),
        (1 << 30, "FITS: peak 600.00 MiB + reserve 24.00 MiB of 1.00 GiB GPU memory; 400.00 MiB free"),
        (512 << 20, "DOES NOT FIT: peak 600.00 MiB + reserve 24.00 MiB exceeds 512.00 MiB GPU memory by 112.00 MiB"),
    ],
)
def test_the_other_precision_is_below_the_verdict(memory: int | None, said: str) -> None:
    other = {
        "dtype": "float32", "param_dtype": "bfloat16", "reduce_dtype": "float32", "peak": 600 << 20,
        "reserved": 24 << 20, "fits": None,
    }  # fmt: skip
    settings = {**alone().settings, "dtype": "bfloat16"}
    lines = forecast_text(alone(gpu_memory=memory, other_precision=other, settings=settings)).splitlines()
    assert "master" in lines[-3]
    assert lines[-2] == (
        "other precision: float32 parameters and optimizer state, computed in bfloat16 "
        f"(--dtype fp32 --param-dtype bf16 --reduce-dtype fp32): {said}"
    )
    assert not any(line.startswith("with ") for line in forecast_text(alone()).splitlines())


def test_a_rank_may_have_several_stages() -> None:
    rows = [
        stage(0, COURSE, stages=[0, 2], sent_bytes={}, recomputed_flops=0, checkpointed_layers=0, peak_tensor=None),
        stage(1, COURSE),
    ]
    text = forecast_text(forecasted(by_pipeline_rank=rows))
    assert "stages 0, 2: peak 20.00 MiB, 12.00 MiB between steps\n  " in text
    assert "  per rank: 4 TFLOP per step, none recomputed\n" in text


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "0 "), (999, "999 "), (1500, "1.5 k"), (2.5e13, "25 T"), (999.4e12, "999 T"), (999.6e12, "1 P"),
        (2e18, "2 E"), (3e21, "3,000 E"),
    ],
)  # fmt: skip
def test_counts_have_prefixes(number: float, said: str) -> None:
    assert human_count(number) == said


@pytest.mark.parametrize("text", EVIL)
def test_no_name_starts_a_line_or_moves_the_cursor(text: str) -> None:
    said = forecast_text(escape_strings(hostile(text)))
    assert not {"\x1b", "\r", "\x00", "\u202e", "\ud800"} & set(said)
    assert len(said.splitlines()) == len(forecast_text(hostile("plain")).splitlines())


@pytest.mark.parametrize("made", [forecasted(), too_large(), alone(gpu_memory=None, fits=None), hostile("x")])
def test_documents_are_as_the_schema_says(made: Any) -> None:
    validator = Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert [error.message for error in validator.iter_errors(json.loads(made.to_json()))] == []


def test_a_tensor_names_its_parameter_or_else_its_origin() -> None:
    assert origin_text(largest(1, "loss")) == "from aten::exp, in the loss"
    assert origin_text(largest(1, parameter="lm_head.weight")) == "of lm_head.weight"


def test_gradients_have_a_row_if_there_are_none_at_the_peak() -> None:
    course = [["forward", 0, "", 4, 0, 0, 8, 9, 0, 0], ["backward", 0, "", 4, 0, 4, 8, 0, 0, 0]]
    lines = forecast_text(alone(by_pipeline_rank=[stage(0, course)])).splitlines()
    assert [line.split() for line in lines if line.startswith("  gradients")] == [["gradients", "0", "B", "4", "B"]]
    assert not any(line.startswith("  gathered") for line in lines)


def test_equal_rows_of_the_largest_tensors_are_one() -> None:
    row = stage(0, COURSE, largest_tensors=[largest(3, ""), largest(2, ""), largest(2, ""), largest(2, "a")])
    lines = forecast_text(forecasted(by_pipeline_rank=[row])).splitlines()
    begin = next(index for index, line in enumerate(lines) if "largest tensors" in line)
    found = [line.strip() for line in lines[begin + 1 : begin + 4]]
    assert [line.endswith("outside modules (2 of this size)") for line in found] == [False, True, False]
    assert found[2].endswith("in a")
