"""Text of `forecast --search`."""

from __future__ import annotations

import pytest

from ckptx.report.forecast_search import _RULES, layout_options, search_text, search_verdict
from ckptx.untrusted.printable import escape_strings
from tests.report.made import searched

PRECISION = "float32 parameters and optimizer state, computed in bfloat16"


def test_a_table_of_what_fits_and_why_the_rest_does_not() -> None:
    kept = "tp 2 x dp_shard 4  none     2 x 1 sequence   600.00 MiB  400.00 MiB"
    assert search_text(searched(seconds=12.4)).splitlines() == [
        "SomeForCausalLM, 4,000,000 parameters, on 8 GPUs of 1.00 GiB",
        "per step, over all GPUs: batch 8 x 1,024 tokens",
        "float32, gathered in bfloat16, adamw, loss on sharded logits with TP",
        (
            "layout             AC mode  microbatches     peak        free        recomputed  idle  sent per rank"
        ),
        f"{kept}  none        none  4.00 MiB       fully evaluated",
        "pp 2 x dp_shard 4  full     1 x 2 sequences  600.00 MiB  400.00 MiB  25.0%       20%   4.00 MiB",
        *(f"  {each}" for each in _RULES),
        "too large with every mode of activation checkpointing (smallest peak, without the reserve):",
        "  dp_shard 8: 2.00 GiB",
        "not supported:",
        "  tp 8: tp 8 of 4 heads",
        "assumptions:",
        "  bytes of tensors",
        f"BEST: --tp 2 --dp-shard 4 --batch 2 --microbatches 2; {PRECISION}",
        "done in 12 s, 9 steps evaluated",
    ]  # fmt: skip


@pytest.mark.parametrize(("tp", "text"), [(1, "loss in float32"), (4, "loss on sharded logits")])
def test_layouts_with_one_number_of_tp_ranks(tp: int, text: str) -> None:
    layouts = [{**each, "layout": {**each["layout"], "tp": tp}} for each in searched().layouts]
    assert f", adamw, {text}\n" in search_text(searched(layouts=layouts, layouts_too_large=[]))


def test_nothing_fits() -> None:
    report = searched(layouts=[], exit=1)
    said = f"NOTHING FITS on 8 GPUs of 1.00 GiB; the smallest peak is 2.00 GiB (dp_shard 8); {PRECISION}"
    assert search_verdict(report) == said
    text = search_text(report, lambda each: f"<{each}>")
    assert f"<{said}>" in text and "microbatches" not in text
    assert (
        search_verdict(searched(layouts=[], layouts_too_large=[])) == f"NOTHING FITS on 8 GPUs of 1.00 GiB; {PRECISION}"
    )


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_verdict_names_the_precision_and_the_peak_of_the_other(fits: bool, dtype: str, optimizer: str) -> None:
    settings = {**searched().settings, "dtype": dtype, "param_dtype": None, "optimizer": optimizer}
    other = {
        "dtype": "float32", "param_dtype": "bfloat16", "reduce_dtype": "float32", "peak": 900 << 20,
        "reserved": 24 << 20, "fits": True,
    }  # fmt: skip
    report = searched(settings=settings, other_precision=other, **({} if fits else {"layouts": [], "exit": 1}))
    verdict, beside = search_text(report).splitlines()[-3:-1]
    assert verdict == search_verdict(report) and verdict.startswith("BEST: " if fits else "NOTHING FITS")
    states = "parameters" + (" and optimizer state" if optimizer == "adamw" else "")
    master = "" if dtype == "float32" else ", no float32 master weights"
    assert verdict.endswith(f"; {dtype} {states}{master}")
    assert beside == (
        f"other precision: float32 {states}, computed in bfloat16 "
        "(--dtype fp32 --param-dtype bf16 --reduce-dtype fp32): "
        "FITS: peak 900.00 MiB + reserve 24.00 MiB of 1.00 GiB GPU memory; 100.00 MiB free"
    )


def test_the_options_of_a_row_are_those_of_a_forecast() -> None:
    first, second = searched().layouts
    assert layout_options(first) == "--tp 2 --dp-shard 4 --batch 2 --microbatches 2"
    assert layout_options(second) == "--pp 2 --dp-shard 4 --batch 2 --microbatches 1 --activation-checkpointing full"


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\nb", "\u202egnp"])
def test_what_a_config_says_is_printed_safely(text: str) -> None:
    report = searched(architecture=text, unsupported_layouts=[{"layout": {"tp": 2}, "reason": text}])
    said = search_text(escape_strings(report))
    assert text not in said
    assert len(said.splitlines()) == len(search_text(searched()).splitlines())
