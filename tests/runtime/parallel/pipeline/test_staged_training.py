"""The program of docs/training.md under pipeline stages, run as it is written, against the model in one piece."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ckptx
from ckptx.runtime.checkpointing.save import load_optimizer
from ckptx.runtime.parallel.pipeline.pipeline import Pipeline
from ckptx.runtime.parallel.tensor_parallel.loss import causal_lm_loss
from tests.support import torch_dcp
from tests.support.import_tool import ROOT
from tests.support.models import load
from tests.support.pool import GlooPool, WorkerError
from tests.support.staged_models import build_deep_model

STEPS, COUNT = 4, 4  # the program takes ten steps, and saves the fifth; here it saves the second and the last
HALF, WRITTEN = STEPS // 2, 10
MOST = 0.25  # what gradients are clipped to; less than any norm
CLIPPED = ("clip_grad_norm(1.0)", f"clip_grad_norm({MOST})")
MESH = 'ParallelDims(pp=2, tp=2), "1f1b"'
PP2, PP2_TP2, PP2_DP2 = "ParallelDims(pp=2)", "ParallelDims(pp=2, tp=2)", "ParallelDims(pp=2, dp_shard=2)"
Changes = tuple[tuple[str, str], ...]


def program(changes: Changes = (), steps: int = STEPS) -> str:
    """As a reader copies it, but for some words, and fewer steps at the rates of ten."""
    text = (ROOT / "docs" / "training.md").read_text()
    found = re.search(r"cat > stages\.py << 'END'\n(.*?)^END$", text, re.S | re.M)
    assert found is not None
    source = found[1]
    if steps != WRITTEN:
        fewer = ("while step < 10", f"while step < {steps}"), ("step % 5 == 0", f"step % {steps // 2} == 0")
        changes = (*changes, *fewer)
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    return source


def on(dims: str, schedule: str = "1f1b") -> tuple[str, str]:
    return MESH, f'{dims}, "{schedule}"'


def run(
    rank: int, world_size: int, directory: Path, arguments: list[str], changes: Changes, steps: int = STEPS
) -> tuple[list[str], str]:
    """The program on one rank; the losses of its steps, exactly, and what was printed."""
    losses: list[str] = []
    step = Pipeline.step

    def noting(self: Pipeline, *args: Any) -> list[Tensor]:
        found = step(self, *args)
        if found:
            losses.append(float(sum(found)).hex())
        return found

    before, printed = Path.cwd(), io.StringIO()
    try:
        os.chdir(directory)
        with (
            mock.patch.object(Pipeline, "step", noting),
            mock.patch.object(sys, "argv", ["stages.py", *arguments]),
            contextlib.redirect_stdout(printed),
        ):
            exec(compile(program(changes, steps), "stages.py", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
    return losses, printed.getvalue()


def write_model(directory: Path, name: str, **settings: Any) -> None:
    """The MODEL of the page: one of six layers."""
    model = build_deep_model(name)
    for key, value in settings.items():
        assert hasattr(model.config, key)
        setattr(model.config, key, value)
    model.save_pretrained(directory / "MODEL")


def in_one_piece(
    directory: Path, dp: int, most: float = MOST, steps: int = STEPS
) -> tuple[list[list[float]], nn.Module]:
    """The losses of each data rank step by step, and the model that stock transformers and torch make of MODEL."""
    names: dict[str, Any] = {}
    exec(program().split("root, out")[0], names)
    data = [names["Batches"](index) for index in range(dp)]
    model = load(directory / "MODEL", torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, WRITTEN)
    found = []
    for _ in range(steps):
        batches = [[next(each) for _ in range(COUNT)] for each in data]
        items = sum((labels[:, 1:] != -100).sum() for rank in batches for _, labels in rank) / dp
        losses = []
        for rank in batches:
            own = [
                causal_lm_loss(model(input_ids=ids).logits, labels, num_items_in_batch=items) for ids, labels in rank
            ]
            for each in own:
                (each / dp).backward()
            losses.append(float(sum(each.detach() for each in own)))
        nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append(losses)
    return found, model


def assert_learned(directory: Path, wanted: nn.Module, out: str, most: float, steps: int = STEPS) -> None:
    """What was saved last is what the model in one piece became."""
    stored = torch_dcp.load(directory / out / f"step-{steps}")
    initial = load(directory / "MODEL", torch.float32).state_dict()
    for name, parameter in wanted.named_parameters(remove_duplicate=False):
        assert float((initial[name] - parameter.detach()).abs().max()) > 1e-3, "four steps of 1e-3 at most"
        away = float((stored[f"model.{name}"] - parameter.detach()).abs().max())
        assert away <= most, f"{name}: {away}"
    if wanted.config.tie_word_embeddings:
        assert torch.equal(stored["model.model.embed_tokens.weight"], stored["model.lm_head.weight"])
        for moment in ("exp_avg", "exp_avg_sq"):
            names = (f"optim.state.{each}.{moment}" for each in ("model.embed_tokens.weight", "lm_head.weight"))
            first, last = (stored[name] for name in names)
            assert torch.equal(first, last)
            assert bool(first.any())


@pytest.mark.parametrize(
    ("name", "dims", "schedule", "ranks", "dp", "steps"),
    [
        ("llama-tied", PP2_TP2, "1f1b", 4, 1, STEPS),
        *(
            pytest.param(*each, WRITTEN, marks=pytest.mark.slow)
            for each in (
                ("llama-tied", PP2_TP2, "1f1b", 4, 1),
                ("llama-tied", PP2, "1f1b", 2, 1),
                ("llama-tied", PP2_DP2, "1f1b", 4, 2),
                ("llama-tied", PP2, "zbvzerobubble", 2, 1),
                ("llama-tied", PP2_TP2, "interleaved1f1b", 4, 1),
                ("llama-untied", PP2_DP2, "interleaved1f1b", 4, 2),
                ("mixtral", PP2_TP2, "1f1b", 4, 1),
                ("gemma4-shared-kv", PP2, "gpipe", 2, 1),
            )
        ),
    ],
)
def test_its_steps_are_those_of_the_model_in_one_piece(
    pool: GlooPool, tmp_path: Path, name: str, dims: str, schedule: str, ranks: int, dp: int, steps: int
) -> None:
    write_model(tmp_path, name)
    wanted, model = in_one_piece(tmp_path, dp, steps=steps)
    found = pool.run(run, ranks, tmp_path, ["run"], (on(dims, schedule), CLIPPED), steps)
    last = [[float.fromhex(each) for each in losses] for losses, _ in found if losses]
    assert len(last) == (2 if ranks == 4 else 1), "the last stage alone has losses"
    for index, losses in enumerate(last):
        expected = [each[index if dp > 1 else 0] for each in wanted]
        assert losses == pytest.approx(expected, rel=1e-6), "float32, added in another order"
    norms = [float(norm) for _, said in found for norm in re.findall(r"norm (\S+)", said)]
    assert len(norms) == len(last) * steps
    assert min(norms) > MOST, "every step was clipped"
    assert_learned(tmp_path, model, "run", 2e-5, steps)
    ckptx.convert("dcp2hf", tmp_path / "run" / f"step-{steps}", tmp_path / "back", base=tmp_path / "MODEL")
    load(tmp_path / "back")


def test_without_a_tie_the_steps_are_the_same_to_the_last_bit(pool: GlooPool, tmp_path: Path) -> None:
    """Where nothing is clipped: the norm is added in another order."""
    write_model(tmp_path, "llama-untied")
    wanted, model = in_one_piece(tmp_path, 1, 1e9)
    changes = (on(PP2), ("clip_grad_norm(1.0)", "clip_grad_norm(1e9)"))
    found = pool.run(run, 2, tmp_path, ["run"], changes)
    assert [float.fromhex(each) for each in found[1][0]] == [each for (each,) in wanted]
    assert_learned(tmp_path, model, "run", 0.0)


def test_a_loss_that_is_divided_by_microbatch_would_be_seen(pool: GlooPool, tmp_path: Path) -> None:
    """An injected defect: the mean of the means of microbatches."""
    write_model(tmp_path, "llama-tied")
    wanted, _ = in_one_piece(tmp_path, 1)
    mean = "lambda output, index: make_loss(labels, (labels[index][:, 1:] != -100).sum())(output, index) / 4"
    found = pool.run(run, 2, tmp_path, ["run"], (on(PP2), CLIPPED, ("make_loss(labels, divisor)", mean)))
    losses = [float.fromhex(each) for each in found[1][0]]
    assert max(abs(a - b) for a, (b,) in zip(losses, wanted, strict=True)) > 1e-3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("Batches(data_index(mesh))", "Batches(context.rank)"),
            "the microbatches differ between ranks of one pipeline",
        ),
        (
            ('[{"input_ids": ids}', '[{"input_ids": ids, "labels": ids}'),
            "the inputs, which every stage gets, contain labels",
        ),
    ],
)
def test_inputs_that_would_be_learned_wrongly_are_refused(
    pool: GlooPool, tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    write_model(tmp_path, "llama-untied")
    with pytest.raises(WorkerError, match="UsageError") as caught:
        pool.run(run, 2, tmp_path, ["run"], (on(PP2), change))
    assert str(caught.value).count(f"UsageError: Pipeline.step: {said}") == 2


@pytest.mark.parametrize(
    ("dims", "schedule", "ranks", "steps"),
    [
        (PP2, "1f1b", 2, STEPS),
        *(
            pytest.param(*each, WRITTEN, marks=pytest.mark.slow)
            for each in (
                (PP2, "1f1b", 2),
                (PP2_TP2, "1f1b", 4),
                (PP2, "zbvzerobubble", 2),
                (PP2_DP2, "1f1b", 4),
                (PP2_TP2, "interleaved1f1b", 4),
            )
        ),
    ],
)
def test_what_goes_on_is_what_never_stopped(
    pool: GlooPool, tmp_path: Path, dims: str, schedule: str, ranks: int, steps: int
) -> None:
    write_model(tmp_path, "llama-tied", attention_dropout=0.1)
    half = steps // 2
    first = pool.run(run, ranks, tmp_path, ["run"], (on(dims, schedule),), steps)
    pool.stop()  # fresh processes
    again = pool.run(run, ranks, tmp_path, ["again", f"run/step-{half}"], (on(dims, schedule),), steps)
    assert sum(len(losses) for losses, _ in first) >= steps
    for (losses, said), (later, later_said) in zip(first, again, strict=True):
        assert later == losses[half:]
        assert later_said.splitlines() == said.splitlines()[half:]
    last, other = (torch_dcp.load(tmp_path / out / f"step-{steps}") for out in ("run", "again"))
    torch_dcp.assert_same_tensors(other, last)


def test_an_optimizer_that_is_not_restored_would_be_seen(pool: GlooPool, tmp_path: Path) -> None:
    write_model(tmp_path, "llama-tied")
    change = ("load_optimizer(optimizer, stages, resumed, layout=tp_layout)", "pass")
    first = pool.run(run, 2, tmp_path, ["run"], (on(PP2), change))
    again = pool.run(run, 2, tmp_path, ["again", f"run/step-{HALF}"], (on(PP2), change))
    assert again[1][0][0] == first[1][0][HALF], "the model itself was"
    assert again[1][0][1:] != first[1][0][HALF + 1 :]


@pytest.mark.slow
def test_stages_go_on_under_another_layout(pool: GlooPool, tmp_path: Path) -> None:
    write_model(tmp_path, "llama-tied")
    first = pool.run(run, 2, tmp_path, ["run"], (on(PP2),))
    again = pool.run(run, 4, tmp_path, ["again", f"run/step-{HALF}"], (on(PP2_TP2),))
    found, wanted = ([float.fromhex(each) for each in losses] for losses in (again[3][0], first[1][0][HALF:]))
    assert found == pytest.approx(wanted, rel=1e-6), "float32, added in another order"


def test_what_an_optimizer_of_stages_knew_one_of_the_whole_model_knows(pool: GlooPool, tmp_path: Path) -> None:
    write_model(tmp_path, "llama-tied")
    pool.run(run, 2, tmp_path, ["run"], (on(PP2, "interleaved1f1b"),))
    stored = torch_dcp.load(tmp_path / "run" / f"step-{STEPS}")
    model = load(tmp_path / "MODEL", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    load_optimizer(optimizer, model, tmp_path / "run" / f"step-{STEPS}")
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert float(state["step"]) == STEPS
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[moment], stored[f"optim.state.{name}.{moment}"])
            assert bool(state[moment].any())
