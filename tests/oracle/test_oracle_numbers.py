"""Numbers of one report agree for real classes, and memory is that of the largest process that the kernel saw."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptx.errors import UnsupportedError
from tests.support.models import RECIPES, write
from tests.support.report_numbers import (
    NUMBER,
    SIZE,
    Lines,
    check_conversion,
    check_inspection,
    is_size,
    parse_count,
    read_contents,
    run,
)
from tests.support.slow import slow_but

FAST = ("llama-tied", "gpt2", "mixtral", "t5")
STEPS: dict[str, tuple[str, ...]] = {
    "to a DCP": ("convert", "hf2dcp"),
    "to a DCP for tp 2": ("reshard", "--to", "dcp", "--tp", "2"),
    "to safetensors for tp 3": ("reshard", "--to", "safetensors", "--tp", "3"),
    "to safetensors for pp 2": ("reshard", "--to", "safetensors", "--pp", "2"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", slow_but(RECIPES, FAST))
def test_every_class_there_and_back(tmp_path: Path, name: str, step: str) -> None:
    report, src, dst, back = (tmp_path / each for each in ("report.json", "src", "dst", "back"))
    write(RECIPES[name], src)
    verb = STEPS[step][: 2 if STEPS[step][0] == "convert" else 1]
    words = [*verb, src, dst, *STEPS[step][len(verb) :]]
    before = read_contents(src)
    try:
        done = run(report, *words)
    except AssertionError as error:
        assert isinstance(error.args[0], UnsupportedError) and "pipeline stages" in str(error)
        return
    after = read_contents(dst)
    check_conversion(done, before, after, dst=dst)
    check_inspection(run(report, "inspect", dst), after, done.document["parameters"])
    check_conversion(run(report, "convert", "dcp2hf", dst, back), after, read_contents(back), dst=back)


# ------------------------------------------------------------------------------------------------------------- memory

# Runs ckptx, and prints the largest peak of every process below it that was waited for, as the kernel counts it.
_WATCH = """
import json, resource, subprocess, sys
done = subprocess.run([sys.executable, "-m", "ckptx", *sys.argv[1:]], capture_output=True, text=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps({"exit": done.returncode, "out": done.stdout, "err": done.stderr, "peak": peak}))
"""


def watched(*words: object) -> dict[str, Any]:
    """How a command ended, and the peak of its largest process."""
    done = subprocess.run(
        [sys.executable, "-c", _WATCH, *map(str, words)], capture_output=True, text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CI": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def peak_line(text: str) -> tuple[str, str]:
    """Of what process the summary gives the memory, and how much."""
    (found,) = re.findall(rf"peak memory(?: of the ([a-z ]+))? ({SIZE})$", text, re.MULTILINE)
    return found[0] or "this process", found[1]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [("--tp", "2"), ("--dp-shard", "2"), ()], ids=["tp 2", "dp 2", "one rank"])
def test_verify_run_reports_the_memory_of_the_largest_rank(tmp_path: Path, mesh: tuple[str, ...]) -> None:
    hf, report = tmp_path / "hf", tmp_path / "report.json"
    write(RECIPES["llama-tied"], hf)
    found = watched("verify", hf, hf, "--run", *mesh, "--no-backward", "--report", report)
    assert found["exit"] == 0, found["err"]
    document = json.loads(report.read_text())
    of, size = peak_line(found["out"])
    assert document["peak_rss"] >= found["peak"] * 0.98, "VmHWM and ru_maxrss are counted apart by a few pages"
    assert of == document["peak_rss_of"] == ("largest rank" if mesh else "this process")
    assert is_size(size, document["peak_rss"]) and document["peak_rss"] > 100 << 20
    assert len(document["ranks"]) == document["world_size"]
    assert max(row["peak_rss"] for row in document["ranks"]) <= document["peak_rss"]
    ran = re.search(
        rf"ran on .*, tp (\d+) x dp_shard (\d+) \(({NUMBER}) ranks?\); ({NUMBER}) tensors per rank", found["out"]
    )
    assert ran and int(ran[1]) * int(ran[2]) == parse_count(ran[3]) == document["world_size"]
    assert parse_count(ran[4]) == document["tensors"] == document["compared"]
    assert sum(document["bytes_read_per_rank"]) == document["bytes_read"]
    assert document["gathered_modules"] == [] or mesh == ("--tp", "2")


@pytest.mark.slow
def test_modules_that_ran_gathered_are_named(tmp_path: Path) -> None:
    """GPT-2 has no forward pass on shards of its fused projections."""
    hf, report = tmp_path / "hf", tmp_path / "report.json"
    write(RECIPES["gpt2"], hf)
    found = watched("verify", hf, hf, "--run", "--tp", "2", "--no-backward", "--report", report)
    assert found["exit"] == 0, found["err"]
    rows = {row["pattern"]: row for row in json.loads(report.read_text())["gathered_modules"]}
    layers = json.loads((hf / "config.json").read_text())["n_layer"]
    attention = rows["transformer.h.*.attn"]
    assert (attention["modules"], attention["what"]) == (layers, "parameters")
    count = sum(row["modules"] for row in rows.values() if row["what"] == "parameters")
    assert f"warning: {count} modules ran with gathered parameters" in found["out"]
    assert f"transformer.h.*.attn ({layers})" in found["out"]


@pytest.mark.slow
def test_a_run_under_tp_that_shards_nothing_says_so(tmp_path: Path) -> None:
    hf, plan = tmp_path / "hf", tmp_path / "plan.json"
    write(RECIPES["llama-tied"], hf)
    names = [f"model.layers.*.self_attn.{each}_proj" for each in "qkvo"]
    names += [f"model.layers.*.mlp.{each}_proj" for each in ("gate", "up", "down")]
    plan.write_text(json.dumps(dict.fromkeys([*names, "model.embed_tokens", "lm_head"], "replicate")))
    found = watched("verify", hf, hf, "--run", "--tp", "2", "--no-backward", "--tp-plan", plan)
    assert found["exit"] == 0, found["err"]
    assert "--tp 2 shards no parameter of LlamaForCausalLM" in found["err"]


@pytest.mark.slow
def test_robustness_reports_the_memory_of_the_largest_rank(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    found = watched("robustness", "llama_tiny", "--phases", "0", "--report", report)
    document = json.loads(report.read_text())
    assert found["exit"] == 0, found["err"]
    of, size = peak_line(found["out"])
    assert of == document["peak_rss_of"] == "largest rank" and is_size(size, document["peak_rss"])
    assert document["peak_rss"] >= found["peak"] * 0.9


@pytest.mark.slow
def test_forecast_counts_what_it_shows(tmp_path: Path) -> None:
    """Every size of the text stands in the document, and what a peak is made of adds up to it."""
    write(RECIPES["llama-tied"], tmp_path / "hf")
    words = ("forecast", tmp_path / "hf", "--tp", "2", "--seq", "16")
    text = watched(*words)["out"]
    document = json.loads(watched(*words, "--json")["out"])
    lines = Lines(text)
    (row,) = document["by_pipeline_rank"]
    peak = lines.one(rf"each rank: peak ({SIZE}), ({SIZE}) between steps.*")
    assert is_size(peak[1], row["peak"]) and is_size(peak[2], row["between_steps"])
    assert sum(row["by_kind"].values()) == row["peak"]
    assert sum(row["between_steps_by_kind"].values()) == row["between_steps"]
    kinds = lines.every(rf"  (\w+) +({SIZE}) +({SIZE})")
    shown_kinds = [match[1] for match in kinds]  # those that occur at any time of the step
    assert shown_kinds == [kind for kind in document["memory_kinds"] if kind in shown_kinds]
    assert {kind for kind, nbytes in row["by_kind"].items() if nbytes} <= set(shown_kinds)
    assert {kind for kind, nbytes in row["between_steps_by_kind"].items() if nbytes} <= set(shown_kinds)
    for match in kinds:
        assert is_size(match[2], row["by_kind"][match[1]]) and is_size(match[3], row["between_steps_by_kind"][match[1]])
    rows = re.findall(rf"^ +({SIZE})  [\w ]+? +\w+ \[.*?(?:\((\d+) of this size\))?$", text, re.MULTILINE)
    shown = [size for size, count in rows for _ in range(int(count or 1))]
    assert len(shown) == len(row["largest_tensors"])
    assert all(is_size(size, each["bytes"]) for size, each in zip(shown, row["largest_tensors"], strict=True))
    assert parse_count(re.findall(rf"({NUMBER}) parameters", text)[0]) == document["parameters"]
    assert document["peak_rss_of"] in ("this process", "largest process")
    assert document["peak_rss"] > 100 << 20
