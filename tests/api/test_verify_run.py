"""`verify --run` as a command: which ranks are started with which options, and what is adopted of their report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.api import verify_run as running
from ckptx.api.verify_run import verify_models
from ckptx.errors import EnvironmentProblem, InternalError, PeerFailure, UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.model_view.sharder import read_plan
from ckptx.options.document import from_json
from ckptx.options.option import settings_of
from ckptx.options.verify import VerifyRunOptions
from ckptx.report.documents.verify_run import RunReport
from ckptx.report.report import Log
from ckptx.report.verify_run import run_verdict
from tests.support.checkpoint_writers import LLAMA, llama, write_hf

A, B = Path("a"), Path("b")


def report(**changes: Any) -> RunReport:
    made: dict[str, Any] = {
        "command": "verify", "exit": 0, "tensors": 4, "bytes_read": 7, "compared": 4, "world_size": 2,
        "layout": {"tp": 2, "pp": 1, "dp_shard": 1, "dp_replicate": 1}, "stages": 1, "inputs": ["text"],
        "checkpointed_layers": 0,
        "bubble_fraction": 0.0, "microbatches": 1, "reference_parts": 1,
        "distinct_tokens": 24, "vocabulary_size": 99, "attention_windows": {}, "without_gradient": [],
        "gathered_modules": [],
        "bytes_read_per_rank": [3, 4], "differing": [], "inconclusive": [], "compute_dtype": "float32", "max_abs": 0.5,
        "max_abs_tolerance": 1.0, "logits_std": 2.0, "kl": 0.0,
        "cosine": "nan", "loss": 1.0, "loss_reference": 1.0, "loss_tolerance": 0.0, "gradients": 4, "grad_max_abs": 0.0,
        "grad_closest_to_tolerance": ["x", 0.5], "first_divergence": None, "gradient_differences": [],
        "notes": ["said"], "peak_rss": 123456789, "seconds": 99.0,
    }  # fmt: skip
    return RunReport(**made | changes)


class Launched:
    """Instead of processes: remembers what would be started, and gives a report."""

    def __init__(self, **changes: Any) -> None:
        self.document: dict[str, Any] = json.loads(json.dumps(report().to_dict() | changes))
        self.order, self.world_size = "", 0

    def __call__(self, order: str, world_size: int, on_wait: Callable[[], None] = lambda: None) -> dict[str, Any]:
        self.order, self.world_size = order, world_size
        return self.document

    @property
    def given(self) -> dict[str, Any]:
        """The options that the ranks are given."""
        found: dict[str, Any] = json.loads(self.order)["options"]
        return found


def run(**options: Any) -> RunReport:
    """Run `verify --run` of two checkpoints."""
    return verify_models(VerifyRunOptions(A, B, run=True, **options))


@pytest.fixture(autouse=True)
def without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoints do not exist; a test that needs their configs writes them and calls the function itself."""
    monkeypatch.setattr(running, "_config_notes", lambda *_: [])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    made = Launched()
    monkeypatch.setattr(running, "launch", made)
    monkeypatch.setattr(running, "is_launched", lambda: False)
    return made


@pytest.fixture(autouse=True)
def _any_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "resolve_source", lambda path, **_: Path(path))
    monkeypatch.setattr(running, "_with_recorded_layout", lambda options, checkpoint, log: options)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is run in this process."""
    from ckptx.runtime.parity import forward

    calls: list[Any] = []

    def run(*given: Any) -> RunReport:
        calls.append(given)
        return report()

    monkeypatch.setattr(forward, "verify_run", run)
    return calls


PLAN = {"model.layers.*.mlp.up_proj": "colwise"}


@pytest.mark.parametrize(("tp", "dp_shard", "pp", "replicas"), [(2, 1, 1, 1), (1, 3, 1, 1), (2, 2, 1, 2), (1, 1, 3, 2)])
def test_as_many_ranks_are_started_as_the_mesh_has(
    launched: Launched, tp: int, dp_shard: int, pp: int, replicas: int
) -> None:
    run(tp=tp, dp_shard=dp_shard, pp=pp, dp_replicate=replicas)
    assert launched.world_size == tp * dp_shard * pp * replicas
    assert json.loads(launched.order)["command"] == "verify --run"
    assert launched.given == {
        "reference": "a", "checkpoint": "b", "run": True, "tp": tp, "pp": pp, "dp_shard": dp_shard,
        "dp_replicate": replicas,
    }  # fmt: skip


def test_ranks_read_the_options_that_they_are_given(launched: Launched, tmp_path: Path) -> None:
    """One process hands its options to another one, none of them lost or changed; hooks stay behind."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(PLAN))
    given: dict[str, Any] = {
        "tp": 2, "pp": 2, "pp_split": "1,3", "schedule": "gpipe", "microbatches": 5, "dp_replicate": 2,
        "dp_shard": 3, "tp_plan": plan, "device": "cpu", "backend": "gloo", "compute_dtype": "fp16",
        "activation_checkpointing": "selective", "ac_scope": "vision", "compile": True, "backward": False,
        "trust_remote_code": True, "dequantize": True, "strict": True, "reference_memory": "8GB",
        "source_prefix": "auto", "revision": "v1", "token": "secret", "cache_dir": tmp_path, "log": Log(),
    }  # fmt: skip
    run(**given)
    heard = from_json(launched.order, VerifyRunOptions)
    hooks_and_paths = {"log": None, "tp_plan": str(plan), "cache_dir": str(tmp_path)}
    assert {name: getattr(heard, name) for name in given} == given | hooks_and_paths
    options = {name for name, each in settings_of(VerifyRunOptions).items() if each.option is not None}
    assert options - given.keys() == {"run", "gpu_memory", "gpu"}, "give the new option a value here"


@pytest.fixture(scope="module")
def resharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers, and the same with the layout of a user: rules, and stages of one and two layers."""
    root = tmp_path_factory.mktemp("layouts")
    config = LLAMA | {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 3}
    write_hf(root / "hf", llama(layers=3), config=config)
    (root / "plan.json").write_text(json.dumps(PLAN))
    ckptx.reshard(root / "hf", root / "own", tp=2, pp=2, tp_plan=root / "plan.json", pp_split="1,2")
    ckptx.reshard(root / "hf", root / "even", tp=2, pp=2)
    return root


@pytest.mark.parametrize(
    ("name", "options", "has_plan", "split"),
    [
        ("own", {"tp": 2, "pp": 2}, True, "1,2"),
        ("own", {"tp": 2, "pp": 2, "schedule": "gpipe"}, True, "1,2"),
        ("own", {"tp": 2}, True, "even"),
        ("own", {"pp": 2}, False, "1,2"),
        ("own", {"pp": 3}, False, "even"),
        ("own", {"pp": 2, "pp_split": "2,1"}, False, "2,1"),
        ("own", {"pp": 2, "schedule": "interleaved1f1b"}, False, "even"),
        ("own", {"dp_shard": 2}, False, "even"),
        ("even", {"tp": 2, "pp": 2}, False, "even"),
        ("hf", {"tp": 2, "pp": 2}, False, "even"),
    ],
)
def test_the_layout_that_the_manifest_records_is_used(
    monkeypatch: pytest.MonkeyPatch, resharded: Path, name: str, options: dict[str, Any], has_plan: bool, split: str
) -> None:
    monkeypatch.undo()
    log = Log()
    given = VerifyRunOptions(resharded / "hf", resharded / name, run=True, **options)
    found = running._with_recorded_layout(given, resharded / name, log)
    manifest = str(resharded / name / "ckptx.json")
    assert (found.tp_plan, found.pp_split) == (manifest if has_plan else None, split)
    assert dict(read_plan(manifest)) == PLAN if has_plan else True
    expected = [f"using the tensor-parallel rules of {manifest}; pass --tp-plan to use others"] * has_plan
    expected += [f"using the stages of {manifest}: --pp-split 1,2"] * (split == "1,2")
    assert list(log.notes) == expected


def test_given_rules_take_precedence_and_a_manifest_without_rules_is_refused(
    monkeypatch: pytest.MonkeyPatch, resharded: Path
) -> None:
    monkeypatch.undo()
    plan = str(resharded / "plan.json")
    given = VerifyRunOptions(resharded / "hf", resharded / "own", run=True, tp=2, tp_plan=plan)
    assert running._with_recorded_layout(given, resharded / "own", Log()).tp_plan == plan
    with pytest.raises(UsageError, match=r"--tp-plan: .*ckptx\.json: records no tensor-parallel rules; pass a file"):
        read_plan(str(resharded / "even" / "ckptx.json"))
    (resharded / "own" / "directory" / "ckptx.json").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"^--tp-plan: \S+ckptx\.json: expected a regular file, found a directory"):
        read_plan(str(resharded / "own" / "directory" / "ckptx.json"))
    (resharded / "own" / "copy").mkdir()
    (resharded / "own" / "copy" / "ckptx.json").write_text("{}")
    with pytest.raises(UsageError, match=r"--tp-plan: .*not a valid manifest"):
        read_plan(str(resharded / "own" / "copy" / "ckptx.json"))


def test_rules_survive_a_chain_of_meshes(resharded: Path, tmp_path: Path) -> None:
    ckptx.reshard(
        resharded / "hf", tmp_path / "again", tp=2, pp=2, tp_plan=resharded / "own" / "ckptx.json", pp_split="1,2"
    )
    assert (tmp_path / "again" / "ckptx.json").read_bytes() == (resharded / "own" / "ckptx.json").read_bytes()


def test_a_document_of_another_command_is_a_defect(launched: Launched) -> None:
    run(tp=2)
    with pytest.raises(InternalError, match="those of verify --run are required"):
        from_json(launched.order.replace("--run", ""), VerifyRunOptions)
    with pytest.raises(InternalError, match="'tensor_parallel'"):
        from_json(launched.order.replace('"tp"', '"tensor_parallel"'), VerifyRunOptions)


def test_the_report_of_rank_0_is_adopted_and_the_time_is_our_own(launched: Launched) -> None:
    log = Log()
    found = run(tp=2, log=log)
    theirs = launched.document
    assert (found.peak_rss_rank_0, theirs["peak_rss"]) == (123456789, 123456789)
    assert (found.peak_rss, found.peak_rss_of) == (123456789, "largest rank") and found.seconds < 99
    ours = json.loads(json.dumps(found.to_dict()))
    assert {name for name in theirs if ours[name] != theirs[name]} <= {"seconds", "peak_rss_of", "peak_rss_rank_0"}
    assert list(log.notes) == ["said"]


@pytest.mark.parametrize("code", [3, 4, 7])
def test_an_error_of_rank_0_is_raised_with_its_exit(launched: Launched, code: int) -> None:
    launched.document |= {"error": "a: no config.json", "exit": code}
    log = Log()
    with pytest.raises(PeerFailure, match=r"^a: no config\.json$") as error:
        run(tp=2, log=log)
    assert (error.value.exit_code, error.value.is_reported) == (code, False)
    assert list(log.notes) == ["said"]


def test_one_rank_is_run_here(launched: Launched, asked: list[Any]) -> None:
    log = Log()
    run(device="cpu", compute_dtype="bf16", backward=False, compile=True, log=log)
    assert launched.world_size == 0
    ((reference, checkpoint, options, said),) = asked
    assert (reference, checkpoint, said) == (A, B, log)
    assert options.dims == ParallelDims()
    assert (options.device, options.compute_dtype, options.backward, options.compile) == ("cpu", "bf16", False, True)
    assert (options.backend, options.checkpointing_mode, options.ac_scope) == ("auto", "none", "all")
    assert (options.tp_plan, options.trust_remote_code) == (None, False)


def test_a_rank_that_was_started_starts_no_others(
    launched: Launched, asked: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(running, "is_launched", lambda: True)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    given = {"activation_checkpointing": "full", "ac_scope": "audio", "backend": "gloo", "trust_remote_code": True}
    run(tp=2, dp_shard=2, tp_plan=str(tmp_path / "plan.json"), **given)
    assert launched.world_size == 0
    options = asked[0][2]
    assert (options.dims, options.tp_plan) == (ParallelDims(tp=2, dp_shard=2), str(tmp_path / "plan.json"))
    assert (options.checkpointing_mode, options.ac_scope) == ("full", "audio")
    assert (options.backend, options.trust_remote_code) == ("gloo", True)


def test_without_torch_the_package_is_named(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ckptx.runtime.parity.forward", None)
    with pytest.raises(EnvironmentProblem, match="--run"):
        run()
    assert asked == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device": "tpu"}, ("--device", '"tpu"', "cpu", "cuda")),
        ({"backend": "mpi"}, ("--backend", '"mpi"', "gloo", "nccl")),
        ({"compute_dtype": "int8"}, ("--compute-dtype", '"int8"', "bf16", "fp16", "fp32")),
        ({"activation_checkpointing": "some"}, ("--activation-checkpointing", '"some"', "submodule")),
        ({"ac_scope": "text"}, ("--ac-scope", '"text"', "language", "vision", "audio")),
        ({"ac_scope": "vision"}, ("--ac-scope", "--activation-checkpointing")),
        ({"tp_plan": "gone.json"}, ("--tp-plan", "--tp 2")),
        ({"tp_plan": "gone.json", "dp_shard": 2}, ("--tp-plan", "--tp 2")),
        ({"tp_plan": "gone.json", "tp": 2}, ("gone.json",)),
        ({"tp": 0}, ("--tp", "0")),
        ({"pp": 0}, ("pp", "0")),
        ({"pp_split": "1,1"}, ("--pp-split", "--pp 2")),
        ({"schedule": "gpipe"}, ("--schedule", "--pp 2")),
        ({"microbatches": 2}, ("--microbatches", "--pp 2")),
        ({"pp": 2, "microbatches": 0}, ("--microbatches", "0", "between 1 and")),
        ({"pp": 2, "microbatches": 10**9}, ("--microbatches", "1000000000", "between 1 and")),
        ({"pp": 2, "schedule": "zigzag"}, ("--schedule", '"zigzag"', "zbvzerobubble")),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anything_starts(
    launched: Launched, asked: list[Any], given: dict[str, Any], said: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as error:
        run(**given)
    assert all(word in str(error.value) for word in said)
    assert (launched.world_size, asked) == (0, [])


def test_ranks_that_are_started_measure_what_was_forecast(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def peak(*given: Any, **how: Any) -> int:
        asked.append((given, how))
        return 2**30

    monkeypatch.setattr(running, "check_memory_fit", peak)
    found = run(tp=2, gpu_memory="80GB", compute_dtype="bf16", activation_checkpointing="full")
    ((given, how),) = asked
    (reference, checkpoint, options, memory), _ = given, how
    assert (reference, checkpoint, memory) == (A, B, 80 << 30)
    assert (options.dims, options.compute_dtype, options.checkpointing_mode) == (ParallelDims(tp=2), "bf16", "full")
    assert launched.given["gpu_memory"] == "80GB"
    assert found.forecast_peak == 2**30


@pytest.mark.parametrize(
    "variables", [{"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "2", "CKPTX_LAUNCHED": "1"}]
)
def test_one_process_asks_for_the_forecast(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(running, "check_memory_fit", lambda *_, **__: pytest.fail("it was asked again"))
    run(tp=2, gpu_memory="80GB")
    ((_, _, options, _),) = asked
    assert options.measures_memory


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "EQUAL: config, tensor bytes, gradients; within tolerance: logits/loss"),
        (
            {"gradient_differences": [{"name": "x", "max_abs": 0.0, "tolerance": 0.1}]},
            "EQUAL: config, tensor bytes; within tolerance: logits/loss, gradients",
        ),
        ({"max_abs_tolerance": 0.0}, "EQUAL: config, tensor bytes, logits/loss, gradients"),
        (
            {"inconclusive": [{"level": "forward", "name": "logits", "tolerance": 9.0, "magnitude": 1.0}]},
            "EQUAL: config, tensor bytes, gradients; INCONCLUSIVE: logits/loss",
        ),
        (
            {"differing": [{"level": "forward", "name": "logits", "rank": 0, "max_abs": 2.0, "tolerance": 1.0}]},
            "DIFFERENT: logits/loss; logits: max abs difference 2, tolerance 1 (rank 0)",
        ),
    ],
)
def test_what_is_within_a_tolerance_is_not_called_equal(changes: dict[str, Any], verdict: str) -> None:
    assert run_verdict(report(**changes)) == verdict
