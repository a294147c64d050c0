"""Numbers of one report agree: its text, its document and the files, over commands, forms, ties and training state."""

from __future__ import annotations

import copy
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptx
from ckptx.report.forecast_phrases import human_count
from ckptx.report.report import human_bytes
from ckptx.report.text import conversion_text
from tests.report.test_counting import EMBEDDING, HEAD, Source, source
from tests.support.checkpoint_writers import Value, value, write_dcp, write_hf
from tests.support.report_numbers import (
    Lines,
    check_conversion,
    check_difference,
    check_inspection,
    check_verification,
    is_size,
    read_contents,
    run,
)  # fmt: skip

# Options of a step; its source is HF or a DCP.
FROM_HF: dict[str, tuple[str, ...]] = {
    "to a DCP": ("convert", "hf2dcp"),
    "to a DCP in 3 files": ("convert", "hf2dcp", "--files", "3"),
    "to a DCP of fp32": ("convert", "hf2dcp", "--dtype", "fp32"),
    "to a DCP, tied names copied": ("convert", "hf2dcp", "--tied", "copy"),
    "to a DCP, tied names dropped": ("convert", "hf2dcp", "--tied", "drop"),
    "to a DCP for tp 2": ("convert", "hf2dcp", "--tp", "2"),
    "to a DCP for tp 2, pp 2, dp 2": ("reshard", "--to", "dcp", "--tp", "2", "--pp", "2", "--dp-shard", "2"),
    "to safetensors for tp 2, pp 2": ("reshard", "--to", "safetensors", "--tp", "2", "--pp", "2"),
    "to safetensors for tp 3": ("reshard", "--to", "safetensors", "--tp", "3"),
    "to safetensors for dp 4": ("reshard", "--to", "safetensors", "--dp-shard", "4"),
}
FROM_DCP: dict[str, tuple[str, ...]] = {
    "to HF": ("convert", "dcp2hf"),
    "to HF in small shards": ("convert", "dcp2hf", "--max-shard-size", "1KB"),
    "to HF, tied names copied": ("convert", "dcp2hf", "--tied", "copy"),
    "to HF, tied names dropped": ("convert", "dcp2hf", "--tied", "drop"),
    "to HF without a config": ("convert", "dcp2hf", "--base", "none"),
    "to a DCP for tp 2, with state": ("reshard", "--to", "dcp", "--tp", "2"),
    "to a DCP for pp 2, with state": ("reshard", "--to", "dcp", "--pp", "2"),
    "to a DCP for tp 2, without state": ("reshard", "--to", "dcp", "--tp", "2", "--optimizer", "drop"),
    "to safetensors for tp 2, pp 2": ("reshard", "--to", "safetensors", "--tp", "2", "--pp", "2"),
}
EXPERTS: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 8, "intermediate_size": 12,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2, "vocab_size": 16, "tie_word_embeddings": False,
}  # fmt: skip
TIES = ("tied", "both", "untied", "different")


def experts() -> Source:
    """A Mixtral, whose experts are tensors of their own on disk and one tensor in the model."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (16, 8), HEAD: (16, 8), "model.norm.weight": (8,)}
    for layer in range(2):
        lead = f"model.layers.{layer}."
        shapes |= {f"{lead}self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"}
        shapes |= {f"{lead}{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
        shapes[f"{lead}block_sparse_moe.gate.weight"] = (4, 8)
        for expert in range(4):
            at = f"{lead}block_sparse_moe.experts.{expert}."
            shapes |= {f"{at}w1.weight": (12, 8), f"{at}w2.weight": (8, 12), f"{at}w3.weight": (12, 8)}
    tensors = {name: value("BF16", *shape, seed=at) for at, (name, shape) in enumerate(shapes.items())}
    return Source(tensors, EXPERTS, sum(int(np.prod(shape)) for shape in shapes.values()))


SOURCES = {**dict.fromkeys(TIES, source), "experts": lambda _: experts()}


def state(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Moments and counters of an optimizer, each with bytes of its own; tied names have the state of one."""
    found: dict[str, Value] = {}
    for at, (name, (_, shape, _)) in enumerate(tensors.items()):
        seed = 1000 + at
        if name == HEAD and tensors[HEAD] == tensors[EMBEDDING]:
            seed = 1000 + list(tensors).index(EMBEDDING)
        found |= {
            f"optimizer.state.{name}.exp_avg": value("F32", *shape, seed=seed),
            f"optimizer.state.{name}.exp_avg_sq": value("F32", *shape, seed=seed + 5000),
        }
    return found | {"train_state.step": value("I64", 1)}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("step", FROM_HF)
@pytest.mark.parametrize("made", SOURCES)
def test_a_conversion_of_hf(tmp_path: Path, made: str, step: str) -> None:
    found = SOURCES[made](made)
    src = write_hf(tmp_path / "src", found.tensors, shards=3, config=found.config)
    _convert_and_check(tmp_path, src, FROM_HF[step], found)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("step", FROM_DCP)
@pytest.mark.parametrize("has_state", [False, True], ids=["model alone", "with optimizer"])
@pytest.mark.parametrize("made", SOURCES)
def test_a_conversion_of_a_dcp(tmp_path: Path, made: str, has_state: bool, step: str) -> None:
    found = SOURCES[made](made)
    tensors = found.tensors | (state(found.tensors) if has_state else {})
    src = write_dcp(tmp_path / "src", tensors, config=found.config, files=2)
    _convert_and_check(tmp_path, src, FROM_DCP[step], found)


def _convert_and_check(tmp_path: Path, src: Path, words: tuple[str, ...], made: Source) -> None:
    """A dry run, the run, a run that finds it complete, `inspect`, `verify` and `diff`."""
    dst, report = tmp_path / "dst", tmp_path / "report.json"
    verb, options = (words[:2], words[2:]) if words[0] == "convert" else (words[:1], words[1:])
    before = read_contents(src)
    heads = {made.tensors[name] for name in (HEAD, EMBEDDING) if name in made.tensors}
    if options[:2] == ("--tied", "drop") and made.config["tie_word_embeddings"] and len(heads) > 1:
        return  # refused: one of two tensors would be lost
    planned = run(report, *verb, src, dst, *options, "--dry-run")
    check_conversion(planned, before, None, dst=dst)
    done = run(report, *verb, src, dst, *options)
    after = read_contents(dst)
    check_conversion(done, before, after, dst=dst)
    names = {row["name"] for row in planned.document["files"]}
    assert names == after.files.keys()
    again = run(report, *verb, src, dst, *options, "--resume")
    check_conversion(again, before, after, dst=dst)
    for key in ("tensors", "aliases", "ties", "dropped", "dtypes", "ledger", "parameters", "output_bytes"):
        assert planned.document[key] == done.document[key] == again.document[key], key
    assert done.document["bytes_written"] == after.size and again.document["bytes_written"] == 0
    is_whole = "none" not in options  # without a config no name is tied
    check_inspection(run(report, "inspect", dst), after, made.parameters if is_whole else None)
    check_inspection(run(report, "inspect", src), before, made.parameters)
    if is_whole and "fp32" not in options:
        verified = run(report, "verify", src, dst)
        check_verification(verified, verified.document["compared"], 0, verified.document["compared"])
        assert verified.document["compared"] >= len({*made.tensors}) or "experts" in str(made.config)
    compared = run(report, "diff", src, src)
    common = compared.document["compared"]
    check_difference(compared, common)
    assert common == sum(not name.startswith(("optimizer.", "train_state.")) for name in before.dtypes)


@pytest.mark.parametrize("change", ["content", "missing", "shape", "dtype", "every tensor", "every shape"])
@pytest.mark.parametrize("made", ["untied", "tied"])
def test_what_differs_is_counted_by_tensor(tmp_path: Path, made: str, change: str) -> None:
    found = source(made)
    other = copy.copy(found.tensors)
    names, total = list(other), len(other)
    spoiled = {name for name in names if change.startswith("every") or name == "model.norm.weight"}
    for at, name in enumerate(sorted(spoiled)):
        dtype, shape, data = other[name]
        if change in ("content", "every tensor"):
            other[name] = dtype, shape, bytes(byte ^ 1 for byte in data)
        elif change == "missing":
            del other[name]
        elif change == "dtype":
            other[name] = value("F32", *shape, seed=at)
        else:
            other[name] = value(dtype, *(n + 1 for n in shape), seed=at)
    a = write_hf(tmp_path / "a", found.tensors, config=None)
    b = write_hf(tmp_path / "b", other, config=None)
    same_headers = change in ("content", "every tensor")
    compared = total if same_headers else total - len(spoiled)
    check_verification(run(tmp_path / "r.json", "verify", a, b), compared, len(spoiled), total)
    check_difference(run(tmp_path / "r.json", "diff", a, b), len(found.tensors.keys() & other.keys()))


@pytest.mark.parametrize("made", ["tied", "untied"])
@pytest.mark.parametrize("direction", ["hf2dcp", "dcp2hf"])
def test_an_interrupted_run_that_is_resumed(tmp_path: Path, direction: str, made: str) -> None:
    """`output_bytes` is what lies there, `bytes_written` what the second run added."""
    found = source(made)
    larger = {
        name: value("BF16", *(n * 64 for n in shape), seed=at)
        for at, (name, (_, shape, _)) in enumerate(found.tensors.items())
    }
    keys = ("hidden_size", "intermediate_size", "vocab_size")
    config = found.config | {key: found.config[key] * 64 for key in keys}
    src = write_hf(tmp_path / "hf", larger, shards=3, config=config)
    if direction == "dcp2hf":
        ckptx.convert("hf2dcp", src, tmp_path / "dcp", files=3)
        src = tmp_path / "dcp"
    dst = tmp_path / "dst"

    def interrupt(done: int, total: int) -> None:
        if done > total // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckptx.convert(direction, src, dst, on_progress=interrupt, workers=1, max_memory=4 << 20)
    report = ckptx.convert(direction, src, dst, resume=True)
    after = read_contents(dst)
    assert report.output_bytes == after.size
    assert 0 < report.bytes_written <= report.output_bytes
    head = conversion_text(report).splitlines()[0]
    earlier = report.output_bytes - report.bytes_written
    assert (f"{human_bytes(earlier)} of it by an earlier, interrupted run" in head) is (earlier > 0)


def test_a_number_that_no_pattern_reads_is_told() -> None:
    lines = Lines("3 tensors\nno number\n7 others")
    assert lines.one(r"(\d) tensors")[1] == "3"
    with pytest.raises(AssertionError):
        lines.end()
    assert not is_size("1.00 KiB", 1100) and is_size("1.00 KiB", 1025) and is_size("512 B", 512)


@pytest.mark.parametrize("spoil", ["tensors", "output_bytes", "peak_rss", "written", "stored", "dtypes", "action"])
def test_a_report_whose_numbers_contradict_each_other_is_found(tmp_path: Path, spoil: str) -> None:
    """An injected defect in the document of a sound run: the text was made of the other number."""
    found = source("tied")
    src = write_hf(tmp_path / "src", found.tensors, config=found.config)
    dst = tmp_path / "dst"
    said = run(tmp_path / "r.json", "convert", "hf2dcp", src, dst)
    before, after = read_contents(src), read_contents(dst)
    check_conversion(said, before, after, dst=dst)
    document = said.document
    if spoil in ("tensors", "output_bytes"):
        document[spoil] += 1 if spoil == "tensors" else 1 << 20
    elif spoil == "peak_rss":
        document[spoil] *= 2
    elif spoil == "written":
        document["ledger"]["written"] -= 1
    elif spoil == "stored":
        document["ledger"]["target"]["stored"] -= 1
    elif spoil == "dtypes":
        document["dtypes"]["after"]["BF16"] -= 1
    else:
        document["ties"][0]["action"] = "copy"
    with pytest.raises(AssertionError):
        check_conversion(said, before, after, dst=dst)


_BAR = """
import time
from ckptx.cli.output import Output
output = Output()
for done in (0, 300 << 20, 1200 << 20):
    output.progress(done, 1200 << 20)
    time.sleep(0.2)
"""


def test_the_progress_bar_has_the_units_of_the_summary() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    hidden = ("CI", "HF_HUB_DISABLE_PROGRESS_BARS", "RANK")
    environment = {name: each for name, each in os.environ.items() if name not in hidden}
    done = subprocess.Popen([sys.executable, "-c", _BAR], stderr=theirs, env=environment)
    done.wait()
    seen = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    assert "300.00 MiB of 1.17 GiB" in seen and "1.17 GiB of 1.17 GiB" in seen
    assert re.search(r"\d MiB/s|\d GiB/s", seen) and not re.search(r"\d[kMG]?B/s", seen)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(1023, "1023 B"), (1024, "1.00 KiB"), ((1 << 20) - 1, "1.00 MiB"), ((1 << 20) - 6, "1023.99 KiB"),
     ((1 << 30) - 1, "1.00 GiB"), ((1 << 40) - 1, "1.00 TiB"), (-(1 << 20) + 1, "-1.00 MiB")],
)  # fmt: skip
def test_sizes_next_to_the_next_unit(nbytes: int, text: str) -> None:
    assert human_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(999, "999 "), (999.4, "999 "), (999.6, "1 k"), (999_600, "1 M"), (999.6e12, "1 P"), (1e18, "1 E")],
)
def test_counts_next_to_the_next_prefix(number: float, text: str) -> None:
    assert human_count(number) == text
