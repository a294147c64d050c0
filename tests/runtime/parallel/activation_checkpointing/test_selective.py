"""What a selectively checkpointed layer keeps, in eager mode and compiled."""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import functorch
import pytest
import torch
import torch.fx
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy

from ckptx.errors import EnvironmentProblem
from ckptx.runtime import torch_private
from ckptx.runtime.model.layers import layer_groups
from ckptx.runtime.parallel.activation_checkpointing import selective
from ckptx.runtime.parallel.activation_checkpointing.selective import SelectivePolicy, find_op_sets
from ckptx.runtime.parallel.activation_checkpointing.wrap import MODES, checkpoint_activations
from tests.support.activation_checkpointing import (
    Gradients,
    LiveBytes,
    OperationCounter,
    assert_equal_results,
    build_checkpointed,
    loss_of,
    train,
)
from tests.support.models import EVERY, VOCAB, build, tokens

aten = torch.ops.aten
LLAMA = "llama-fp32"


def kept_bytes(name: str, mode: str) -> int:
    model = build_checkpointed(name, mode)
    model.config.use_cache = False
    long = {"input_ids": torch.arange(96).reshape(2, 48) % VOCAB}
    with LiveBytes() as live:
        loss = loss_of(model, long)
        total = live.total()
    loss.backward()
    return total


def ops_of_backward(name: str, mode: str) -> Counter[Any]:
    loss = loss_of(build_checkpointed(name, mode), EVERY[name].inputs())
    with OperationCounter() as counting:
        loss.backward()
    return counting.ops


@contextmanager
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [LLAMA, "mixtral"])
def test_less_is_kept_the_more_is_checkpointed(name: str) -> None:
    kept = {mode: kept_bytes(name, mode) for mode in MODES}
    assert kept["none"] > kept["selective"] > kept["full"]
    assert kept["none"] > kept["submodule"] > kept["full"]


def test_selective_runs_attention_choice_of_experts_and_half_of_the_products_once() -> None:
    none, chosen, full = (ops_of_backward("mixtral", mode) for mode in ("none", "selective", "full"))
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert (none[attention], none[aten.topk.default]) == (0, 0)
    assert (full[attention], full[aten.topk.default]) == (2, 2)
    assert (chosen[attention], chosen[aten.topk.default]) == (0, 0)
    products = [sum(ops[op] for op in find_op_sets().alternating) for ops in (none, chosen, full)]
    assert products[0] < products[1] < products[2]


def test_a_router_that_scales_in_place_needs_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective, "_MUTATED_RESULT_OPS", ())
    loss = loss_of(build_checkpointed("mixtral", "selective"), tokens())
    with pytest.raises(RuntimeError, match="has been mutated"):
        loss.backward()


# The policy


def asked(policy: SelectivePolicy, ops: list[Any], is_recompute: bool) -> list[CheckpointPolicy]:
    context = SimpleNamespace(is_recompute=is_recompute)
    return [policy(context, op) for op in ops]


ODD_REGION = [aten.mm.default, aten.add.Tensor, aten.addmm.default, aten.mm.default]  # three products


def test_every_other_product_is_kept_and_both_passes_agree() -> None:
    policy = SelectivePolicy(find_op_sets())
    save, recompute = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    forward = asked(policy, ODD_REGION, False)
    assert forward == [save, recompute, recompute, save]
    assert asked(policy, ODD_REGION, True) == forward


def test_one_counter_for_both_passes_would_turn_the_answers_around() -> None:
    class OneCounter(dict[bool, int]):
        def __getitem__(self, is_recompute: bool) -> int:
            return super().__getitem__(False)

        def __setitem__(self, is_recompute: bool, count: int) -> None:
            super().__setitem__(False, count)

    policy = SelectivePolicy(find_op_sets(), product_counts=OneCounter({False: 0}))
    assert asked(policy, ODD_REGION, False) != asked(policy, ODD_REGION, True)


def test_each_pass_over_a_region_has_a_policy_of_its_own() -> None:
    make = selective.make_context_factory()
    first, second = make(), make()
    assert len({id(context._inner) for context in (*first, *second)}) == 4
    assert first[0]._inner.policy_fn is not second[0]._inner.policy_fn


@pytest.mark.parametrize(
    ("op", "kept"),
    [
        (aten._scaled_dot_product_flash_attention.default, True),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, True),
        (aten._scaled_dot_product_efficient_attention.default, True),
        (aten._scaled_dot_product_cudnn_attention.default, True),
        (aten._scaled_mm.default, True),
        (aten.convolution.default, True),
        (aten.topk.default, True),
        (aten.max.dim, True),
        (torch.ops.higher_order.flex_attention, True),
        (torch.ops._c10d_functional.all_reduce.default, True),
        (torch.ops._c10d_functional.reduce_scatter_tensor.default, True),
        (torch.ops._c10d_functional.all_to_all_single.default, True),
        (torch.ops._c10d_functional.all_gather_into_tensor.default, False),
        (torch.ops.c10d._reduce_scatter_base_.default, False),  # writes into its arguments
        (aten.topk.values, False),  # `out=`, also of a product
        (aten.mm.out, False),
        (aten.gelu.default, False),
        (aten.native_layer_norm.default, False),
    ],
)
def test_what_is_kept(op: Any, kept: bool) -> None:
    policy = SelectivePolicy(find_op_sets())
    for is_recompute in (False, True):
        wanted = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
        assert asked(policy, [op, op], is_recompute) == [wanted, wanted]


def test_what_torch_itself_would_not_compute_twice_is_kept() -> None:
    partitioners = pytest.importorskip("torch._functorch.partitioners")
    ops = find_op_sets()
    for packet in partitioners.get_default_op_list().compute_intensive_ops:
        assert packet.default in ops.saved | ops.alternating


@pytest.mark.parametrize(("source", "target", "kept"), [("meta", "cpu", True), ("cpu", "cpu", False)])
def test_a_copy_to_the_host_is_kept(source: str, target: str, kept: bool) -> None:
    policy = SelectivePolicy(find_op_sets())
    context = SimpleNamespace(is_recompute=False)
    found = policy(context, aten._to_copy.default, torch.empty(1, device=source), device=torch.device(target))
    assert (found is CheckpointPolicy.MUST_SAVE) is kept
    cast = policy(context, aten._to_copy.default, torch.empty(1, device=source), dtype=torch.bfloat16)
    assert cast is CheckpointPolicy.PREFER_RECOMPUTE


def test_what_fsdp_does_ahead_of_time_is_not_counted() -> None:
    selective.ignore_uncounted_ops()
    assert torch.ops.fsdp.all_gather_copy_in.default in SAC_IGNORED_OPS
    assert torch.ops.profiler._record_function_enter_new.default in SAC_IGNORED_OPS
    assert aten.mm.default not in SAC_IGNORED_OPS


def test_a_trace_names_each_operation_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CKPTX_SELECTIVE_AC_TRACE", "1")
    model = build_checkpointed("mixtral", "selective")
    with caplog.at_level(logging.INFO, logger="ckptx.runtime.parallel.activation_checkpointing.selective"):
        loss = loss_of(model, tokens())
        said = [record.getMessage() for record in caplog.records]
        loss.backward()
        loss_of(model, tokens()).backward()
    assert [record.getMessage() for record in caplog.records] == said  # the backward says nothing new
    assert "selective activation checkpointing: aten.topk.default: saved" in said
    assert "selective activation checkpointing: aten.mm.default: every second one saved" in said
    assert len({line.split(": ")[1] for line in said}) == len(said) > 10


@pytest.mark.parametrize("value", ["", "0", None])
def test_no_trace_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("CKPTX_SELECTIVE_AC_TRACE", raising=False)
    if value is not None:
        monkeypatch.setenv("CKPTX_SELECTIVE_AC_TRACE", value)
    assert selective.make_log_from_environment() is None


def test_a_trace_goes_to_stderr_where_nobody_set_up_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.Logger("alone")
    stream = io.StringIO()
    monkeypatch.setattr(selective, "_logger", logger)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("CKPTX_SELECTIVE_AC_TRACE", "1")
    for _ in range(2):
        trace = selective.make_log_from_environment()
        assert trace is not None
    trace.log_once(aten.mm.default, "saved")
    assert stream.getvalue() == "selective activation checkpointing: aten.mm.default: saved\n"


# With a compiler


def compiled_run(mode: str, backend: str) -> tuple[list[float], Gradients]:
    model = build_checkpointed("mixtral", mode).float()
    model.config.use_cache = False
    for layer in layer_groups(model)["language"]:
        layer.module.compile(backend=backend)
    return train(model, EVERY["mixtral"])


@pytest.mark.slow
def test_compiled_layers_ask_the_policy_and_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CKPTX_SELECTIVE_AC_TRACE", "1")
    with compiler(), caplog.at_level(logging.INFO, logger="ckptx.runtime.parallel.activation_checkpointing.selective"):
        wanted = compiled_run("none", "aot_eager")
        assert not [record for record in caplog.records if record.name.startswith("ckptx")]
        for mode in ("full", "selective"):
            assert_equal_results(compiled_run(mode, "aot_eager"), wanted)
    assert "selective activation checkpointing: aten.topk.default: saved" in [
        record.getMessage() for record in caplog.records
    ]


def kept_by_graph(mode: str) -> list[str]:
    """Operations of the first layer, compiled, whose results its forward graph hands to its backward graph."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs = []

    def forward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return functorch.compile.make_boxed_func(graph.forward)

    def backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return functorch.compile.make_boxed_func(graph.forward)

    model = build_checkpointed(LLAMA, mode)
    model.config.use_cache = False
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition)
    with compiler():
        model.model.layers[0].compile(backend=backend)
        loss_of(model, tokens()).backward()
    (results,) = graphs[0].graph.find_nodes(op="output")[0].args
    return [str(node.target) for node in results[1:] if node is not None and node.op == "call_function"]


def test_a_compiled_layer_keeps_what_the_policy_says() -> None:
    none, chosen, full = (kept_by_graph(mode) for mode in ("none", "selective", "full"))
    assert len(none) > len(chosen) > len(full)
    assert full.count("aten.mm.default") == 0
    assert chosen.count("aten.mm.default") == 3  # q, v and gate; k, o and up again; no backward needs that of down
    assert chosen.count("<built-in function getitem>") == 2  # of attention: its output, and the sums of its rows


def test_dynamo_is_told_to_take_the_first_graph_for_selective_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    eval_frame = pytest.importorskip("torch._C._dynamo").eval_frame
    monkeypatch.setattr(eval_frame, "_set_lru_cache", said.append)
    monkeypatch.setattr(torch_private, "_find", torch_private._find.__wrapped__)  # it remembers what torch had before
    checkpoint_activations(build(EVERY[LLAMA]), "full", compile=True)
    checkpoint_activations(build(EVERY[LLAMA]), "selective")
    assert said == []
    checkpoint_activations(build(EVERY[LLAMA]), "selective", compile=True)
    assert said == [False]
    monkeypatch.delattr(eval_frame, "_set_lru_cache")
    with pytest.raises(EnvironmentProblem, match=r"has no torch\._C\._dynamo\.eval_frame\._set_lru_cache, which"):
        checkpoint_activations(build(EVERY[LLAMA]), "selective", compile=True)


@pytest.mark.slow
def test_layers_compiled_by_inductor_compute_nearly_the_same() -> None:
    with compiler():
        losses, gradients = train(build_checkpointed("mixtral", "none").float(), EVERY["mixtral"])
        for mode in ("full", "selective"):
            found, others = compiled_run(mode, "inductor")
            assert found == pytest.approx(losses, rel=1e-6)
            for name, gradient in gradients.items():  # inductor adds in another order
                torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6)
