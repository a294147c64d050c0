"""What a comparison rests on: devices that give the same twice, and inputs that reach every part of a model."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptx.errors import CkptxError, UnsupportedError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.options.verify import RunOptions
from ckptx.report.report import Log
from ckptx.runtime.parallel.distributed import RankContext, mesh_of, process_group
from ckptx.runtime.parallel.parallelize import _find_other_dtype_modules
from ckptx.runtime.parity import forward, reference
from ckptx.runtime.parity.execution import StepResult
from ckptx.runtime.parity.inputs.batch import make_inputs
from tests.support.corrections import patched_corrections
from tests.support.models import EVERY, write
from tests.support.pool import GlooPool
from tests.support.transformers_version import INSTALLED, has_model
from tests.support.vision_models import tiny


def test_a_world_has_one_mesh_of_a_kind() -> None:
    """Groups have threads that end with the world alone, so a second run makes none."""
    made = []
    for _ in range(2):
        with process_group("cpu", "gloo"):
            meshes = [mesh_of(dims, "cpu") for dims in (ParallelDims(), ParallelDims(), ParallelDims(tp=1))]
            assert all(mesh is meshes[0] for mesh in meshes)
            made.append(meshes[0])
    assert made[0] is not made[1]


def gloo_threads() -> int:
    """How many threads wait for collectives."""
    names = (Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir())
    return sum(name.startswith("pt_gloo") for name in names)


def comes_true(condition: Callable[[], bool], within: float = 20.0) -> bool:
    """Threads name themselves, and end, a little later."""
    end = time.monotonic() + within
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_mesh_that_is_still_referred_to_keeps_no_threads() -> None:
    """One that drops a tensor while the interpreter ends would end the process with SIGABRT."""
    before = gloo_threads()
    with process_group("cpu", "gloo"):
        mesh = mesh_of(ParallelDims(), "cpu")
        assert comes_true(lambda: gloo_threads() > before)
    assert comes_true(lambda: gloo_threads() <= before)  # those of a test before may end only now
    assert mesh.mesh_dim_names == ("pp", "dp_shard", "tp")


def threads_of(rank: int, world_size: int, path: str, runs: int) -> list[int]:
    """How many threads this process has after each run."""
    counts = []
    for _ in range(runs):
        options = RunOptions(tp=world_size)
        assert forward.verify_run(Path(path), Path(path), options, Log()).exit == 0
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_runs_in_one_process_leave_no_threads(pool: GlooPool, tmp_path: Path) -> None:
    write(EVERY["llama-tied"], tmp_path / "hf")
    for counts in pool.run(threads_of, 2, str(tmp_path / "hf"), 5):
        assert len(set(counts)) == 1, counts


@pytest.mark.parametrize("is_reference", [True, False])
@pytest.mark.parametrize(
    "change",
    [{"num_attention_heads": "many"}, {"architectures": []}, {"architectures": None}, {"hidden_act": "unheard-of"},
     {"rope_parameters": {"rope_type": "unheard-of"}}, {"architectures": ["UnheardOfForCausalLM"]}],
    ids=str,
)  # fmt: skip
def test_a_config_that_makes_no_model_is_refused_on_either_side(
    tmp_path: Path, change: dict[str, Any], is_reference: bool
) -> None:
    """In one line, and never as a defect of ours."""
    for name in ("good", "bad"):
        write(EVERY["llama-untied"], tmp_path / name)
    file = tmp_path / "bad" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    names = ("bad", "good") if is_reference else ("good", "bad")
    with pytest.raises(CkptxError) as refused:
        forward.verify_run(*(tmp_path / name for name in names), RunOptions(), Log())
    assert refused.value.exit_code in (3, 4), refused.value
    assert "config.json" in str(refused.value) or "UnheardOfForCausalLM" in str(refused.value)


class Wandering:
    """Gives other results each time it is asked, as atomic additions on a GPU do."""

    def __init__(self, what: str, by: float) -> None:
        self.what, self.by, self.runs = what, by, 0

    def __call__(self, model: Any, batches: Any, *, backward: bool, on_gradient: Any = None) -> StepResult:
        self.runs += 1
        logits, loss, gradient = (self._number(what) for what in ("logits", "loss", "gradient"))
        gradients = {"weight": torch.full((3,), gradient)}
        for name, each in gradients.items() if on_gradient is not None else ():
            on_gradient(name, each)
        return StepResult([torch.full((1, 2, 3), logits)], loss, gradients if on_gradient is None else {})

    def _number(self, what: str) -> float:
        return 1 + self.by * self.runs * (what == self.what)


@pytest.mark.parametrize("what", ["logits", "loss", "gradient"])
@pytest.mark.parametrize(
    ("device", "by", "expected", "runs"),
    [("cuda", 0.0, True, 5), ("cuda", 1e-6, False, 5), ("cuda", float("nan"), False, 5), ("cpu", 1e-6, True, 4)],
)
def test_a_device_other_than_the_cpu_is_asked_twice(
    monkeypatch: pytest.MonkeyPatch, what: str, device: str, by: float, expected: bool, runs: int
) -> None:
    """NaN is equal to nothing: what gives it cannot be said to be repeatable."""
    asked = Wandering(what, by)
    monkeypatch.setattr(reference, "run_step", asked)
    made: Any = SimpleNamespace(load_whole=lambda rank_context: torch.nn.Linear(1, 1))
    found = reference.WholeReference(made, [], RankContext(0, 1, torch.device(device)), backward=True).forward()
    assert found.is_repeatable is expected
    assert asked.runs == runs


def test_inputs_say_what_they_lack() -> None:
    config = {"model_type": "unheard-of", "vocab_size": 50, "vision_config": {"hidden_size": 8}, "audio_config": None}
    found = make_inputs(config)
    assert (found.kinds, found.missing) == (("text",), ("images",))


def run_blind(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """`verify --run` by a ckptx that does not know what images of this class look like."""
    with patched_corrections("gemma3", inputs=()):
        return forward.verify_run(Path(path), Path(path), RunOptions(), Log()).to_dict()


def test_a_tower_that_gets_no_input_is_named(pool: GlooPool, tmp_path: Path) -> None:
    write(EVERY["gemma3-vlm"], tmp_path)
    (found,) = pool.run(run_blind, 1, str(tmp_path))
    assert found["exit"] == 0
    assert found["inputs"] == ["text"]
    said, unreached = found["notes"]
    assert "no gradient reaches model.multi_modal_projector" in unreached
    assert {row["name"].split(".")[1] for row in found["without_gradient"]} == {"multi_modal_projector", "vision_tower"}
    assert said == (
        "Gemma3ForConditionalGeneration: the inputs have no images, because ckptx does not know the input form of this "
        "class; the modules that take them were compared by their bytes only"
    )


def run_on_two(rank: int, world_size: int, path: str) -> dict[str, Any]:
    options = RunOptions(tp=world_size)
    return forward.verify_run(Path(path), Path(path), options, Log()).to_dict()


def test_every_gradient_and_every_rank_is_in_the_report(pool: GlooPool, tmp_path: Path) -> None:
    write(EVERY["llama-tied"], tmp_path)
    found, other = pool.run(run_on_two, 2, str(tmp_path))
    rows = found["gradient_differences"]
    assert rows == other["gradient_differences"]
    assert len(rows) == found["gradients"] == found["tensors"]
    assert max(row["max_abs"] for row in rows) == found["grad_max_abs"]
    assert all(row["max_abs"] <= row["tolerance"] for row in rows)
    assert {row["rank"] for row in found["ranks"]} == {0, 1}
    assert max(row["max_abs"] for row in found["ranks"]) == found["max_abs"]
    assert max(row["grad_max_abs"] for row in found["ranks"]) == found["grad_max_abs"]


def run_sharded(rank: int, world_size: int, path: str) -> dict[str, Any]:
    options = RunOptions(dp_shard=world_size)
    return forward.verify_run(Path(path), Path(path), options, Log()).to_dict()


@pytest.mark.skipif(not has_model("muse_spark"), reason=f"transformers {INSTALLED} has no Muse Spark")
def test_what_a_class_keeps_in_float32_is_sharded_by_itself(pool: GlooPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny("muse_spark").to(torch.bfloat16)  # gates of residuals and routers are loaded in float32
    model.save_pretrained(tmp_path)
    for found in pool.run(run_sharded, 2, str(tmp_path)):
        assert (found["exit"], found["compared"]) == (0, len(model.state_dict()))


def test_a_module_of_two_dtypes_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    assert _find_other_dtype_modules(model) == []
    model[1].half()
    model[0].weight.data = model[0].weight.data.double()
    model[0].bias.data = model[0].bias.data.double()
    assert _find_other_dtype_modules(model) == [model[1]]
    model[1].bias.data = model[1].bias.data.float()
    model[1].bias.requires_grad_(False)
    assert _find_other_dtype_modules(model) == [model[1]]
    model[1].bias.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"cannot shard 1, which has parameters of torch\.float16 and torch\.fl"):
        _find_other_dtype_modules(model)
