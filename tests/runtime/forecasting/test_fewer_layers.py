"""What a few layers say of all of them is what all of them say."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from ckptx.runtime.forecasting import ranks as ranks_module
from ckptx.runtime.forecasting.extrapolation import ShortModelForecast, extrapolate
from ckptx.runtime.forecasting.ranks import forecast_ranks
from ckptx.runtime.forecasting.repeated_layers import (
    RepeatedLayers,
    collect_per_layer_values,
    find_repeat,
    to_config_form,
)
from ckptx.runtime.forecasting.run import BoundaryCache, RankForecast, run_rank
from ckptx.runtime.forecasting.short_models import plan_shortening, shorten
from ckptx.runtime.forecasting.task import ForecastTask
from tests.support.measured_steps import CONFIGS, task_of
from tests.support.slow import slow_but

# ----------------------------------------------------------------------------------------------------- which are alike


@pytest.mark.parametrize(
    ("kinds", "left"),
    [
        ("aaaaaaaaaaaaaaaa", "aaa"),
        ("ddd" + "a" * 20, "dddaaa"),
        ("aaaaaaaaaaaaaaaz", "aaaz"),
        ("sf" * 12, "sfsf"),
        ("ssssf" * 12, "ssssfssssf"),
        ("ssssf" * 12 + "ss", "ssssfssssfss"),
        ("d" + "ssf" * 14 + "f", "dssfssff"),
    ],
)
def test_periods_are_left_out(kinds: str, left: str) -> None:
    repeat = find_repeat("layers", kinds, 0, len(kinds), 3)
    assert repeat is not None
    out = repeat.removed_layers(0)
    assert "".join(kind for number, kind in enumerate(kinds) if number not in out) == left
    with_one = [number for number in range(len(kinds)) if number not in repeat.removed_layers(1)]
    assert len(with_one) == len(left) + repeat.period
    # What is left is a row in which the same pattern goes on, whatever is left out of it.
    assert kinds[repeat.first : repeat.first + repeat.period] == kinds[repeat.stop - repeat.period : repeat.stop]


@pytest.mark.parametrize("kinds", ["", "aaaa", "aaaaaaaaaaaa", "abcdefghijklmnopqrst", "aabbbcccc" + "d" * 8])
def test_nothing_is_left_out_where_it_would_save_nothing(kinds: str) -> None:
    assert find_repeat("layers", kinds, 0, len(kinds), 3) is None


def test_a_repeat_stays_within_its_stage() -> None:
    repeat = find_repeat("layers", "a" * 60, 20, 40, 3)
    assert repeat == RepeatedLayers("layers", 22, 1, 17)


def test_what_a_config_says_of_layers() -> None:
    part = {
        "layer_types": ["s", "f", "s", "f"], "per_layer": {1: {"heads": 2}, "3": {"heads": 4}}, "sparse_layers": [0, 3],
        "id2label": {0: "a", 1: "b"}, "rope": {"theta": 1}, "eos": [7, 9], "full_indexes": [9], "name": "x",
    }  # fmt: skip
    said = collect_per_layer_values(part, 4)
    assert set(said) == {"layer_types", "per_layer", "sparse_layers"}
    kept = [0, 3]
    shorter = {key: to_config_form(part[key], [each[number] for number in kept], 4) for key, each in said.items()}
    assert shorter == {"layer_types": ["s", "f"], "per_layer": {1: {"heads": 4}}, "sparse_layers": [0, 1]}


# ------------------------------------------------------------------------------------------------- what few of them say


def deep(model: str, directory: Path, layers: int = 20) -> Path:
    """A config with many layers."""
    config: dict[str, Any] = copy.deepcopy(dict(CONFIGS[model]))
    text = config.get("text_config", config)
    text["n_layer" if "n_layer" in text else "num_hidden_layers"] = layers
    if "layer_types" in text:
        text["layer_types"] = [text["layer_types"][number % 2] for number in range(layers)]
    if "vision_config" in config:
        config["vision_config"] |= {"depth": 14, "fullatt_block_indexes": []}
    path = directory / model
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def assert_same(few: RankForecast, every: RankForecast) -> None:
    """Each part of the step, in bytes of each kind; what is computed and sent; what is told of the peak."""
    one, other = few.timeline.segments, every.timeline.segments
    assert [(each.phase, each.pass_index, each.layer, each.peak_by_kind, each.end_by_kind) for each in one] == [
        (each.phase, each.pass_index, each.layer, each.peak_by_kind, each.end_by_kind) for each in other
    ]
    assert few.op_counts_by_pass == every.op_counts_by_pass
    told = ("omitted_layers", "timeline", "op_counts_by_pass")
    assert all(
        getattr(few, each.name) == getattr(every, each.name)
        for each in dataclasses.fields(few)
        if each.name not in told
    )
    worst, expected = few.timeline.peak_segment, every.timeline.peak_segment
    assert [each.nbytes for each in worst.largest_storages] == [each.nbytes for each in expected.largest_storages]
    assert worst.peak_storage is not None and expected.peak_storage is not None
    assert (worst.peak_storage.operation, worst.peak_storage.shape, worst.peak_storage.alloc_phase) == (
        expected.peak_storage.operation, expected.peak_storage.shape, expected.peak_storage.alloc_phase,
    )  # fmt: skip
    assert few.timeline.between_steps_by_kind == every.timeline.between_steps_by_kind


_CASES = [
    *((model, layout, mode) for model in CONFIGS for layout in ("dp4", "tp2 x dp2") for mode in ("none", "selective")),
    ("llama", "dp1", "full"), ("llama", "tp4", "submodule"), ("qwen2.5-vl", "dp1", "full"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout", "mode"), slow_but(_CASES, [("llama", "tp2 x dp2", "selective")]))
def test_few_layers_say_what_all_do(model: str, layout: str, mode: str, tmp_path: Path) -> None:
    task = task_of(deep(model, tmp_path), layout, mode)
    (few,), (every,) = forecast_ranks(task), forecast_ranks(task, all_layers=True)
    assert few.omitted_layers > 0 == every.omitted_layers
    assert_same(few, every)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved1f1b"])
def test_few_layers_of_each_stage(schedule: str, tmp_path: Path) -> None:
    source = deep("llama", tmp_path, 52)
    task = task_of(source, "pp2", "none")
    layout = structs.replace(task.recipe.layout, schedule=schedule)
    training = structs.replace(task.recipe.training, local_batch=4, global_batch=4, microbatch=1)
    task = dataclasses.replace(task, recipe=structs.replace(task.recipe, layout=layout, training=training))
    for few, every in zip(forecast_ranks(task), forecast_ranks(task, all_layers=True), strict=True):
        assert few.omitted_layers > 0
        assert_same(few, every)


def test_layers_that_share_or_differ_all_run(tmp_path: Path) -> None:
    """Half of the layers of Gemma 3n take keys and values from others: no config with fewer has the same ones."""
    config = {
        "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text", "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 20, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 256, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 10, "laurel_rank": 8, "altup_num_inputs": 2, "sliding_window": 16,
        "layer_types": ["full_attention"] * 20, "activation_sparsity_pattern": [0.0] * 20,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    task = task_of(tmp_path, "dp1", "none")
    plan = plan_shortening(task, 3)
    tried = None if plan is None else shorten(task, plan, [0] * len(plan.axes), tmp_path / "short")
    assert tried is None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RepeatedLayers, list[ShortModelForecast]]:
    """Steps of a model with three, four and five of its layers."""
    directory = tmp_path_factory.mktemp("runs")
    task = task_of(deep("llama", directory), "dp1", "none")
    plan = plan_shortening(task, 3)
    assert plan is not None
    found = []
    for extra in range(3):
        short = shorten(task, plan, [extra], directory / str(extra))
        assert short is not None
        found.append(ShortModelForecast(run_rank(short, 0, BoundaryCache())[0], plan.remaining_layers([extra])))
    return plan.axes[0][0], found


def test_a_third_step_is_held_against_the_first_two(runs: tuple[RepeatedLayers, list[ShortModelForecast]]) -> None:
    repeat, (base, grown, third) = runs
    assert extrapolate([repeat], base, [grown], third) is not None
    segment = third.forecast.timeline.segments[7]
    for key in ("peak_by_kind", "end_by_kind"):
        other = tuple(size + (2**20 if number == 4 else 0) for number, size in enumerate(getattr(segment, key)))
        changed = list(third.forecast.timeline.segments)
        changed[7] = dataclasses.replace(segment, **{key: other})
        timeline = dataclasses.replace(third.forecast.timeline, segments=tuple(changed))
        spoiled = dataclasses.replace(third, forecast=dataclasses.replace(third.forecast, timeline=timeline))
        assert extrapolate([repeat], base, [grown], spoiled) is None


@pytest.mark.parametrize("what", ["op_counts_by_pass", "checkpointed_layers"])
def test_so_is_what_it_computes(what: str, runs: tuple[RepeatedLayers, list[ShortModelForecast]]) -> None:
    repeat, (base, grown, third) = runs
    other: Any = {} if what == "op_counts_by_pass" else 7
    spoiled = dataclasses.replace(third, forecast=dataclasses.replace(third.forecast, **{what: other}))
    assert extrapolate([repeat], base, [grown], spoiled) is None


def test_where_they_do_not_agree_all_layers_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "extrapolate", lambda *_: None)
    task: ForecastTask = task_of(deep("llama", tmp_path, 13), "dp1", "none")
    (found,) = forecast_ranks(task)
    assert found.omitted_layers == 0
    assert len({each.layer for each in found.timeline.segments}) == 14
