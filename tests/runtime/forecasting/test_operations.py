"""Operations that take other memory on tensors without storage than on real ones, unless somebody sees to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives

from ckptx.errors import UnsupportedError
from ckptx.options.forecast import ForecastOptions
from ckptx.processes.fork import run_in_child
from ckptx.runtime.forecasting.counting import OpCounter, sum_op_counts
from ckptx.runtime.forecasting.fake_process_group import fake_process_group
from ckptx.runtime.forecasting.ranks import forecast_ranks
from ckptx.runtime.forecasting.run import RankForecast
from ckptx.runtime.forecasting.task import ForecastTask, task_from_options
from ckptx.runtime.forecasting.timeline import classify_storage
from ckptx.runtime.memory.shape_tensors import ShapeTensors
from ckptx.runtime.memory.storage_ledger import KINDS, OPTIMIZER, PARAMETERS, PIPELINE_P2P, StepPhase, StorageLedger
from ckptx.runtime.model.model_errors import translate_runtime_errors
from tests.support.measured_steps import SEQ, forecast_in_this_process, task_of, write_config

_LARGE = (1024, 2048)
_NBYTES = 1024 * 2048 * 4


def most_of(ledger: StorageLedger) -> int:
    """The most bytes that lived at once."""
    now = most = 0
    for life, is_birth in ledger.events:
        now += life.nbytes if is_birth else -life.nbytes
        most = max(most, now)
    return most


@pytest.mark.parametrize(("is_contiguous", "tensors"), [(True, 2), (False, 3)])
def test_softmax_copies_what_is_not_contiguous(is_contiguous: bool, tensors: int) -> None:
    ledger = StorageLedger()
    with ShapeTensors(ledger.record_operation):
        x = torch.empty(*_LARGE)
        y = torch.log_softmax(x if is_contiguous else x.t(), -1)
    assert most_of(ledger) == tensors * _NBYTES
    assert y.shape == (_LARGE if is_contiguous else _LARGE[::-1])
    assert ledger.nbytes == 2 * _NBYTES


def test_waiting_for_a_collective_makes_nothing() -> None:
    ledger = StorageLedger()
    with ShapeTensors(ledger.record_operation):
        x = torch.empty(*_LARGE)
        y = torch.ops._c10d_functional.wait_tensor(x)
    assert y is x
    assert most_of(ledger) == _NBYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_groups_of_rows_in_every_dtype(dtype: torch.dtype) -> None:
    """As the experts of a model are computed, forward and backward."""
    groups, rows, inner, outer = 4, 64, 32, 16
    with ShapeTensors():
        x = torch.empty(rows, inner, dtype=dtype, requires_grad=True)
        weight = torch.empty(groups, outer, inner, dtype=dtype, requires_grad=True)
        ends = torch.arange(1, groups + 1, dtype=torch.int32) * (rows // groups)
        y = torch.nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
        y.square().sum().backward()
    assert (y.shape, y.dtype) == ((rows, outer), dtype)
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)


def test_what_ranks_agree_on_is_what_this_one_says() -> None:
    found = [None] * 4
    with fake_process_group(1, 4), ShapeTensors():
        dist.all_gather_object(found, "a state")
    assert found == ["a state"] * 4


@pytest.mark.parametrize(
    ("schedule", "exchanges"),
    [
        ("gpipe", 1),
        ("interleaved1f1b", 3),  # one rank: from 0 to 1, from 1 to 2, from 2 to 3
    ],
)
def test_stages_keep_what_they_exchange_until_the_step_ends(schedule: str, exchanges: int, tmp_path: Path) -> None:
    """Each sent or received activation and gradient, as the works of sends are kept, and receive buffers always."""
    microbatches, payload = 4, SEQ * 256 * 4
    task = task_of(write_config("llama", tmp_path), "pp2", "full", schedule=schedule, microbatches=microbatches)
    number = KINDS.index(PIPELINE_P2P)
    for rank in forecast_in_this_process(task):
        last = [each for each in rank.timeline.segments if each.phase == "backward"][-1]
        assert last.peak_by_kind[number] == pytest.approx(2 * exchanges * microbatches * payload, rel=1e-3)


def test_what_gets_no_gradient_has_no_state(tmp_path: Path) -> None:
    """A tower that rows of text do not reach: neither moments nor counts of steps, which the optimizer makes late."""
    model = forecast_in_this_process(task_of(write_config("qwen2.5-vl", tmp_path), "dp1", "none"))[0]
    between = dict(zip(KINDS, model.timeline.between_steps_by_kind, strict=True))
    text = forecast_in_this_process(task_of(write_config("llama", tmp_path), "dp1", "none"))[0]
    state = dict(zip(KINDS, text.timeline.between_steps_by_kind, strict=True))
    tower = between[PARAMETERS] - state[PARAMETERS]
    assert tower > 0
    assert between[OPTIMIZER] == pytest.approx(state[OPTIMIZER], rel=1e-3)  # biases of its attention


def _operations(x: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Results of one and of several tensors, of lists, of real and fake arguments, and of values."""
    weight = torch.empty(x.shape[-1], dtype=x.dtype)
    values, places = x.topk(2, -1)
    parts = x.split(x.shape[-1] // 2, -1)
    return [
        x @ x.t(), torch.cat([x, x.t().reshape(x.shape)], 0), torch.stack([x, x]), values, places, *parts,
        *torch.native_layer_norm(x, [x.shape[-1]], weight, weight, 1e-5), torch.where(mask, x, 0.0), x[mask], x.t() + 1,
        torch.ops._c10d_functional.all_gather_into_tensor(x, 2, "0"), x.masked_fill(mask, 1.0), x.sum(-1), x[:, 1:] * 2,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 8), (8, 6), (16, 32)])
def test_known_layouts_are_those_that_torch_computes(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """A second run takes layouts from the first, and allocates the same storages."""
    runs = []
    with fake_process_group(0, 2):
        for _ in range(2):
            ledger = StorageLedger()
            with ShapeTensors(ledger.record_operation):
                mask = torch.zeros(shape, dtype=torch.bool)
                mask[0] = True
                found = [
                    (
                        tuple(each.shape),
                        each.stride(),
                        each.dtype,
                        each.storage_offset(),
                        each.untyped_storage().nbytes(),
                    )
                    for each in _operations(torch.empty(shape, dtype=dtype), mask)
                ]
            runs.append((found, [(life.nbytes, life.operation, is_birth) for life, is_birth in ledger.events]))
    assert runs[0] == runs[1]


def test_the_number_of_chosen_rows_is_that_of_the_mask() -> None:
    """Masks of one shape choose different numbers of elements, so that no layout is known from an earlier mask."""
    with ShapeTensors():
        x = torch.empty(8, 4096)
        for count in (1, 3, 8):
            mask = torch.arange(8) < count
            assert x[mask].shape == (count, 4096)


def test_ranks_run_one_after_another_in_this_process(tmp_path: Path) -> None:
    """Each rank has process groups with other names, which DTensor must not take from its cache."""
    options = ForecastOptions(write_config("llama", tmp_path), tp=2, pp=2, seq=256, dtype="fp32")
    task = task_from_options(Path(options.model), options, 2)
    here = forecast_ranks(task, all_layers=True, in_process=True)
    assert [each.stages for each in here] == [(0,), (1,)]
    assert facts(here) == facts(forecast_ranks(task, all_layers=True))


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"dp_shard": 4}, {"tp": 2, "dp_shard": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("dtypes", [{}, {"param_dtype": "bf16", "reduce_dtype": "fp32"}], ids=["fp32", "mixed"])
def test_a_second_run_in_a_process_says_the_same(options: Any, dtypes: Any, tmp_path: Path) -> None:
    """To the byte: nothing of the mesh and the tensors of an earlier run counts."""
    made = ForecastOptions(write_config("llama", tmp_path), seq=256, dtype="fp32", **options, **dtypes)
    task = task_from_options(Path(made.model), made, made.dims.pp)
    first, second = (run_in_child(forecast_times, task, times) for times in (1, 2))
    assert first == second


def forecast_times(task: ForecastTask, times: int) -> list[Any]:
    """Forecast a task several times in this process, and return the facts of the last."""
    for _ in range(times):
        found = facts(forecast_in_this_process(task))
    return found


def facts(ranks: list[RankForecast]) -> list[Any]:
    """Return what a forecast says of each rank, in numbers."""
    return [
        (
            [(each.phase, each.pass_index, each.peak_by_kind, each.end_by_kind) for each in rank.timeline.segments],
            rank.timeline.between_steps_by_kind,
            rank.op_counts_by_pass,
        )
        for rank in ranks
    ]


def test_tensors_name_their_parameter_or_the_loss(tmp_path: Path) -> None:
    (rank,) = forecast_in_this_process(task_of(write_config("llama", tmp_path), "dp1", "none"))
    segment = rank.timeline.peak_segment
    assert segment.peak_storage is not None and segment.peak_storage.alloc_phase.module == "loss"
    found = {(classify_storage(each), each.parameter) for each in segment.largest_storages}
    names = ("model.embed_tokens.weight", "lm_head.weight")
    assert found == {(kind, name) for kind in (PARAMETERS, OPTIMIZER) for name in names}


def test_a_tied_head_on_the_last_stage_has_its_own_name(tmp_path: Path) -> None:
    model = write_config("llama", tmp_path)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))
    first, last = forecast_in_this_process(task_from_options(model, ForecastOptions(model, pp=2, seq=16), 2))
    names = [{each.parameter for each in rank.timeline.peak_segment.largest_storages} for rank in (first, last)]
    assert "model.embed_tokens.weight" in names[0] and "lm_head.weight" not in names[0]
    assert "lm_head.weight" in names[1] and "model.embed_tokens.weight" not in names[1]


def gather(small: torch.Tensor, large: torch.Tensor) -> None:
    dist.all_gather_into_tensor(large, small)


def gather_list(small: torch.Tensor, large: torch.Tensor) -> None:
    dist.all_gather([*large.chunk(4)], small)


def reduce_scatter(small: torch.Tensor, large: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(small, large)


def functional_gather(small: torch.Tensor, large: torch.Tensor) -> None:
    functional_collectives.all_gather_tensor(small, 0, dist.group.WORLD)


def functional_scatter(small: torch.Tensor, large: torch.Tensor) -> None:
    functional_collectives.reduce_scatter_tensor(large, "sum", 0, dist.group.WORLD)


def reduce(small: torch.Tensor, large: torch.Tensor) -> None:
    dist.all_reduce(large)


def broadcast(small: torch.Tensor, large: torch.Tensor) -> None:
    dist.broadcast(large, 0)


def exchange(small: torch.Tensor, large: torch.Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(large), large)


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (gather, "all-gather"), (gather_list, "all-gather"), (functional_gather, "all-gather"),
        (reduce_scatter, "reduce-scatter"), (functional_scatter, "reduce-scatter"), (reduce, "all-reduce"),
        (broadcast, "broadcast"), (exchange, "all-to-all"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)  # fmt: skip
def test_the_bytes_of_a_collective_are_those_of_its_larger_tensor(
    run: Callable[[torch.Tensor, torch.Tensor], None], kind: str
) -> None:
    """Each rank of four has 400 bytes, and all of them together 1,600; the output may be an argument."""
    assert run_in_child(sent_bytes_of, run) == {kind: 1600}


def sent_bytes_of(run: Callable[[torch.Tensor, torch.Tensor], None]) -> dict[str, int]:
    counter = OpCounter()

    def record(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        counter.record_operation(
            lambda: StepPhase("forward", 0, is_recompute=False, module=""), func, args, kwargs, out
        )

    with fake_process_group(0, 4), ShapeTensors(record):
        run(torch.empty(100), torch.empty(400))
    return dict(sum_op_counts(counter.op_counts_by_pass.values()).sent_bytes)


def mismatched() -> torch.nn.Module:
    """A module of a model whose code adds shapes that do not fit, as with shards that its code does not expect."""
    space: dict[str, Any] = {"__name__": "transformers_modules.mine", "torch": torch}
    exec("class Mismatched(torch.nn.Module):\n    def forward(self, x):\n        return x + torch.ones(3)", space)
    found: torch.nn.Module = space["Mismatched"]()
    return found


def test_an_operation_that_fails_is_an_error_of_the_model(capfd: pytest.CaptureFixture[str]) -> None:
    """The mode that computes shapes is between the code of the model and torch, and is not to blame."""
    model = mismatched()
    with (
        pytest.raises(UnsupportedError, match=r"the code of the model failed: RuntimeError: .*32"),
        translate_runtime_errors(model),
        ShapeTensors(),
    ):
        model(torch.ones(2, 32))
    assert "Traceback" not in capfd.readouterr().err, "torch logs nothing"


def test_a_callback_that_fails_stays_a_defect_of_ckptx() -> None:
    def fail(*arguments: object) -> None:
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"), translate_runtime_errors(mismatched()), ShapeTensors(fail):
        torch.ones(2) + 1
