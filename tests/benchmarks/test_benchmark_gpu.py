"""The benchmark of one card runs on a CPU with tiny shapes, and says what is wrong instead of leaving it out."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PARTS = ["verify", "activation_checkpointing", "tensor_parallel"]

Row = dict[str, Any]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes."""
    directory = tmp_path_factory.mktemp("gpu") / "results"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--tiny", "--device", "cpu", "--results", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.fixture(scope="module")
def rows(written: Path) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = json.loads((written / "gpu.json").read_text())["parts"]
    return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module; its siblings are found as when it is run as a script."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    threads = torch.get_num_threads()
    yield import_module("gpu")
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_every_case_of_every_part_is_done_and_shown(written: Path, rows: dict[str, list[Row]]) -> None:
    assert list(rows) == PARTS
    assert [len(rows[part]) for part in PARTS] == [1, 8, 3]
    shown = (written / "gpu.md").read_text()
    for row in (row for part in rows.values() for row in part):
        assert row["status"] == "done"
        assert f"| {row['case']} |" in shown
    assert shown.count("| done |") == 12
    machine = json.loads((written / "gpu.json").read_text())["machine"]
    assert machine["torch"] == torch.__version__
    assert {"card", "transformers", "ckptx"} <= machine.keys()


@pytest.mark.slow
def test_a_converted_model_computes_what_its_source_does(rows: dict[str, list[Row]]) -> None:
    (row,) = rows["verify"]
    assert (row["exit"], row["max_abs"], row["grad_max_abs"]) == (0, 0, 0)
    assert row["gradients"] == 21  # 2 layers of 9 tensors, two embeddings and a norm
    assert row["loss"] == row["loss_reference"] > 0


@pytest.mark.slow
def test_every_layer_is_checkpointed_and_no_mode_changes_what_is_computed(rows: dict[str, list[Row]]) -> None:
    for model in ("tiny Llama", "tiny Gemma 4"):
        modes = {row["mode"]: row for row in rows["activation_checkpointing"] if row["model"] == model}
        assert list(modes) == ["none", "full", "submodule", "selective"]
        assert [row["wrapped"] for row in modes.values()] == [0, 2, 2, 2]
        assert {row["layers"] for row in modes.values()} == {2}
        assert len({row["loss"] for row in modes.values()}) == 1
        assert len({row["gradient_norm"] for row in modes.values()}) == 1
        peaks = {mode: row["step_gib"] for mode, row in modes.items()}
        assert peaks["full"] == min(peaks.values())
        assert peaks["none"] == max(peaks.values())


@pytest.mark.slow
def test_sharded_logits_take_less_memory_than_gathered_ones(rows: dict[str, list[Row]]) -> None:
    default, optimized, on_sequence = rows["tensor_parallel"]
    assert [row["logits"] for row in rows["tensor_parallel"]] == ["whole", "sharded", "sharded"]
    assert default["weights_gib"] == optimized["weights_gib"] == on_sequence["weights_gib"]
    whole = 128 * 1024 * 4  # bytes of the logits in fp32
    assert (default["peak_gib"] - optimized["peak_gib"]) * 2**30 > 0.75 * 2 * whole  # they, and their gradient


def test_a_mode_that_checkpoints_less_or_computes_otherwise_is_found(gpu: ModuleType) -> None:
    right = [
        {"case": mode, "model": "m", "mode": mode, "layers": 2, "loss": 1.5, "gradient_norm": 1.0,
         "wrapped": 0 if mode == "none" else 2}
        for mode in ("none", "full")
    ]  # fmt: skip
    assert gpu.wrong_checkpointing(right) == []
    none, full = right
    for change, said in (
        ({"wrapped": 1}, "1 layers are checkpointed, expected 2"),
        ({"loss": 1.25}, "loss 1.25, expected 1.5"),
        ({"loss": float("nan")}, "loss nan"),
        ({"gradient_norm": 0.0}, "gradient norm 0.0"),
        ({"gradient_norm": float("nan")}, "gradient norm nan"),
    ):
        (found,) = gpu.wrong_checkpointing([none, full | change])
        assert said in found
    assert "loss nan" in gpu.wrong_checkpointing([none | {"loss": float("nan")}])[0]


def test_a_plan_that_gathers_and_a_model_that_differs_are_found(gpu: ModuleType) -> None:
    row = {"case": "optimized plan", "expected_logits": "sharded", "logits": "sharded"}
    assert gpu.wrong_logits([row]) == []
    assert "are whole, expected sharded" in gpu.wrong_logits([row | {"logits": "whole"}])[0]
    assert gpu.wrong_outcomes([{"case": "c", "exit": 0}]) == []
    assert "exited with 1, expected 0" in gpu.wrong_outcomes([{"case": "c", "exit": 1}])[0]


def test_a_case_that_fails_frees_its_memory_and_loses_no_other(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def failing() -> Row:
        tensor = torch.ones(3)
        held.append(weakref.ref(tensor))
        raise RuntimeError("CUDA out of memory,\n  or so")

    def working() -> Row:
        return {"figure": float("inf"), "is_free": held[0]() is None}

    def part(*cases: Any) -> Any:
        columns = {"figure": lambda row: f"{row['figure']}"}
        return lambda settings: gpu.Part("Title", list(cases), columns, lambda rows: [])

    bad, good = gpu.Case("bad", failing), gpu.Case("good", working)
    monkeypatch.setattr(gpu, "PARTS", {"first": part(bad, good), "second": part(good)})
    assert gpu.main(["--tiny", "--device", "cpu", "--results", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    first, second = found["parts"].values()
    assert [row["status"] for row in (*first, *second)] == ["failed", "done", "done"]
    assert first[0]["reason"] == "RuntimeError: CUDA out of memory, or so"
    assert first[1]["is_free"]
    assert second[0]["figure"] == "inf"
    assert found["findings"] == ["first: bad: RuntimeError: CUDA out of memory, or so"]
    assert "| bad |  | failed: RuntimeError: CUDA out of memory, or so |" in (tmp_path / "gpu.md").read_text()


def test_cases_without_time_are_listed_with_the_reason(gpu: ModuleType, tmp_path: Path) -> None:
    assert gpu.main(["--tiny", "--device", "cpu", "--results", str(tmp_path), "--limit", "0"]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert list(found) == PARTS
    for row in (row for part in found.values() for row in part):
        assert row["status"] == "not run"
        assert row["reason"].endswith("cases start only within 0 s")


_HANGING = """
import sys, time
sys.path.insert(0, sys.argv[1])
import gpu

def hanging():
    time.sleep(100)

def part(settings):
    (settings.work / "large").write_text("")
    print(settings.work, flush=True)
    cases = [gpu.Case("hanging", hanging), gpu.Case("next", hanging)]
    return gpu.Part("Title", cases, {}, lambda rows: [])

gpu.PARTS = {"part": part}
gpu.GRACE = 0.5
raise SystemExit(gpu.main(["--tiny", "--device", "cpu", "--results", sys.argv[2], "--limit", "0.5"]))
"""


@pytest.mark.slow
def test_a_case_that_never_ends_is_ended_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HANGING, str(BENCHMARKS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1, done.stderr
    hanging, following = json.loads((tmp_path / "gpu.json").read_text())["parts"]["part"]
    assert (hanging["status"], hanging["reason"]) == ("failed", "was still running when the time limit ended")
    assert following["status"] == "not run"
    assert not Path(done.stdout.strip()).exists()


def test_what_cannot_be_measured_is_refused(gpu: ModuleType, tmp_path: Path) -> None:
    for arguments in (["--device", "cpu"], ["--tiny", "--device", "cpu", "--parts", "verify,nothing"]):
        with pytest.raises(SystemExit) as refused:
            gpu.main([*arguments, "--results", str(tmp_path)])
        assert refused.value.code == 2
    if not torch.cuda.is_available():
        assert gpu.main(["--results", str(tmp_path)]) == 7
    assert not list(tmp_path.iterdir())


def test_shapes_are_those_of_the_models_they_name(gpu: ModuleType) -> None:
    step = import_module("training_step")
    with torch.device("meta"):
        model = step.AutoModelForCausalLM.from_config(step.llama_8b(1, is_tiny=False).config)
    assert sum(each.numel() for each in model.parameters()) == 8_030_261_248  # as its card says


def test_as_many_layers_are_taken_as_fit(gpu: ModuleType) -> None:
    step = import_module("training_step")
    llama, gemma = step.llama_8b(1, is_tiny=False), step.gemma4_31b(is_tiny=False)
    assert step.max_layers(llama, 110e9) == 32
    assert 8 < step.max_layers(llama, 40e9) < 32
    assert step.max_layers(llama, 0) == 1
    some = step.max_layers(gemma, 110e9)
    assert some % 6 == 0
    assert 6 < some < 60
    assert step.max_layers(gemma, 0) == 6
