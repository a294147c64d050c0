"""What state of a checkpoint is, and the cause that is named for it: styles of names x states, one or two at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptx.robustness_suite.causes import likely_causes, rank_in_name
from ckptx.robustness_suite.item_names import kind_of_word
from ckptx.robustness_suite.item_oracles import StoredItem, oracles_of_items
from ckptx.robustness_suite.oracles import Items, compare
from ckptx.robustness_suite.stored_items import read_items
from tests.robustness_suite.naming_styles import CHANGES, ORACLES, SENTENCES, STYLES, states

PAIRS = [
    (style, changes) for style, each in STYLES.items() for count in (1, 2) for changes in combinations(each.has, count)
]


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Items]:
    """Items of a checkpoint of a style in which one state was changed, or none."""

    @cache
    def written(style: str, change: str | None = None) -> Items:
        folder, found = tmp_path_factory.mktemp("checkpoint"), states()
        if change is not None:
            CHANGES[change](found)
        STYLES[style].write(folder, found)
        return read_items(folder)

    return written


@pytest.mark.sampled(100)
@pytest.mark.parametrize(
    ("style", "changes"), PAIRS, ids=lambda each: each if isinstance(each, str) else "+".join(each)
)
def test_each_state_is_what_it_is_and_only_that_is_explained(
    items: Callable[..., Items], style: str, changes: tuple[str, ...]
) -> None:
    before = items(style)
    after = dict(before)
    for change in changes:
        changed = items(style, change)
        assert changed.keys() == before.keys()
        after.update({key: value for key, value in changed.items() if value != before[key]})
    verdicts = compare([before], [after])
    assert {each.oracle for each in verdicts if each.differences} == frozenset().union(*(ORACLES[c] for c in changes))
    causes = likely_causes(verdicts, before, after)
    check_sentences(style, changes, causes)


def check_sentences(style: str, changes: tuple[str, ...], causes: list[str]) -> None:
    """Each change has its sentence, each sentence is about a change, and none names what did not differ."""
    left = [*causes]
    kinds = set(changes)
    if {"rng", "python rng"} <= kinds:  # one kind of state, in one sentence
        kinds -= {"rng"}
    if {"sampler", "sampler epoch"} <= kinds:
        kinds -= {"sampler epoch"}
    for change in kinds:
        found = [each for each in left if re.match(SENTENCES[change], each)]
        assert len(found) == 1, (change, causes)
        if change in ("ema", "clock"):
            word = STYLES[style].second if change == "ema" else STYLES[style].unknown
            assert f'under "{word}"' in found[0]
        left.remove(found[0])
    assert not left
    said = " ".join(causes)
    may_be = {
        "RNG": {"rng", "python rng"},
        "EMA": {"ema"},
        "iter(loader)": {"rng"},
        "sampler": {"sampler", "sampler epoch"},
        "weight decay": {"weight decay"},
        "betas": set(),
        "learning rate": {"lr"},
        "param groups": {"lr", "weight decay"},
        "scheduler": {"scheduler"} if "scheduler" in STYLES[style].has else {"scheduler", "lr"},
        "optimizer": {"moments", "adam step", "master", "lr", "weight decay"},
        "parameter values": {"model"},
        "model was not loaded": set(),
    }
    names = re.sub(r"\([^()]*\)", "", re.sub(r"iter\(loader\)", "iter-loader", said)).replace(
        "iter-loader", "iter(loader)"
    )
    for word, kinds_of_word in may_be.items():
        assert word not in names or kinds_of_word & set(changes), (word, said)


@pytest.mark.parametrize("style", STYLES)
def test_nothing_is_said_where_nothing_differs(tmp_path: Path, items: Callable[..., Items], style: str) -> None:
    STYLES[style].write(tmp_path, states())
    before, after = items(style), read_items(tmp_path)
    assert before == after and likely_causes(compare([before], [after]), before, after) == []


# ------------------------------------------------------------------------------------------------------ look-alikes

SHAPES = {"a.weight": (3, 4), "a.bias": (3,), "b.0.weight": (2, 3), "b.1.weight": (2, 3)}


def tensors(root: str, end: str = "", shapes: Any = None, dtype: str = "F32") -> list[StoredItem]:
    """Items of a model below a root, or of what is kept for each of its parameters."""
    found = SHAPES if shapes is None else shapes
    return [StoredItem(f"{root}{name}{end}", "", True, shape, dtype) for name, shape in found.items()]


def numbered(root: str, end: str = "", shapes: Any = None) -> list[StoredItem]:
    """The same with numbers in the place of names."""
    found = SHAPES if shapes is None else shapes
    return [StoredItem(f"{root}{number}{end}", "", True, shape, "F32") for number, shape in enumerate(found.values())]


def values(*names: str) -> list[StoredItem]:
    """Items that are no tensors."""
    return [StoredItem(name) for name in names]


ADAM = tensors("x.state.", ".exp_avg")
BY_NUMBER = numbered("x.state.", ".exp_avg")
TWO_TOWERS = {f"{tower}.layers.{n}.weight": (4, 4) for tower in ("encoder", "decoder") for n in range(3)}
TRAINED = {"a.weight": (3, 4), "a.bias": (3,)}
ZEBRA = [*tensors("zebra."), StoredItem("zebra.buffer", "", True, (7,), "F32")]
U8_16, U8_CPU = (StoredItem(name, "", True, (size,), "U8") for name, size in (("q.absmax", 16), ("q.state", 5056)))


@pytest.mark.parametrize("optimizer", [ADAM, BY_NUMBER], ids=["by name", "by number"])
@pytest.mark.parametrize(
    ("items", "oracle"),
    [
        (tensors("zebra."), "model"),
        (tensors(""), "model"),
        ([*tensors(""), *tensors("polar.")][len(SHAPES) :], None),  # one copy alone is the model
        (tensors("generator."), "model"),  # a GAN's, not random numbers
        (tensors("sampler."), "model"),
        (tensors("data."), "model"),
        (tensors("model."), "model"),
        (tensors("run.model.module."), "model"),
    ],
)
def test_tensors_that_the_optimizer_knows_are_the_model(
    optimizer: list[StoredItem], items: list[StoredItem], oracle: str | None
) -> None:
    if items[0].name.startswith("sampler.") and optimizer is BY_NUMBER:
        items = [each for each in items if each.name.endswith(("weight", "bias"))]
    found = oracles_of_items([*items, *optimizer])[: len(items)]
    assert set(found) == {(oracle or "model",)}


@pytest.mark.parametrize(
    ("around", "items", "oracle"),
    [
        # copies of the model
        ([*ZEBRA, *ADAM], tensors("polar."), "second model"),
        ([*ZEBRA, *ADAM], tensors("polar.module."), "second model"),
        ([*ZEBRA, *ADAM], tensors("polar.", dtype="BF16"), "second model"),
        ([*tensors(""), *ADAM], tensors("polar."), "second model"),
        ([*tensors(""), *BY_NUMBER], tensors("polar."), "second model"),
        ([*tensors("model.")], tensors("polar."), "second model"),
        ([*tensors("model.model.")], tensors("ema."), "second model"),
        (
            [*tensors("model."), *tensors("x.state.", ".exp_avg", TRAINED)],
            tensors("polar.", "", TRAINED),
            "second model",
        ),
        ([*tensors("model."), *ADAM], numbered("polar.kept."), "second model"),
        ([*tensors("model.")], values("ema.decay", "ema.n_averaged"), "second model"),
        ([*tensors("model.")], tensors("polar.", shapes={n: (9, *s) for n, s in SHAPES.items()}), "not second model"),
        # two parts of one model are no copies of each other
        (tensors("x.state.", ".exp_avg", TWO_TOWERS), tensors("", "", TWO_TOWERS), "model"),
        (numbered("x.state.", ".exp_avg", TWO_TOWERS), tensors("", "", TWO_TOWERS), "model"),
        ([], tensors("", "", TWO_TOWERS), "model"),
        (
            [*tensors("d."), *tensors("x.state.", ".exp_avg"), *tensors("y.state.g.", ".exp_avg")],
            tensors("g."),
            "model",
        ),
        # frozen parameters are in no optimizer
        (tensors("x.state.", ".exp_avg", TRAINED), tensors(""), "model"),
        ([*tensors("x.state.", ".exp_avg", TRAINED)], tensors("zebra."), "model"),
        # optimizers
        (tensors("zebra."), tensors("x.state.", ".momentum_buffer"), "moments"),
        (tensors("zebra."), tensors("x.exp_avg_sq."), "moments"),
        (tensors("model."), [*tensors("x.m."), *tensors("x.v.")], "moments"),
        (tensors("model."), [*tensors("x.mu."), *tensors("x.nu.")], "moments"),
        (tensors("model."), [*numbered("x.m."), *numbered("x.v.")], "moments"),
        (tensors("model."), tensors("x.velocity."), "moments"),
        (tensors("model."), [*tensors("m."), *tensors("v.")], "moments"),
        ([*tensors("zebra."), *ADAM], tensors("x.state.", ".of_its_own"), "moments"),
        ([*tensors("zebra."), *ADAM], tensors("x.state.", ".master_param"), "master weights"),
        ([*tensors("zebra."), *ADAM], tensors("masters.main_master."), "master weights"),
        ([*tensors("zebra."), *ADAM], values("x.state.a.weight.step"), "adam step"),
        ([*tensors("zebra."), *ADAM], values("x.groups.0.lr", "x.groups.0.betas"), "param groups"),
        ([], values("knobs.0.initial_lr", "knobs.0.weight_decay"), "param groups"),
        ([*tensors("zebra."), *ADAM], values("optimizer.loss_scaler", "x.overflow"), "other"),
        # gradients are none of these
        ([*tensors("model."), *ADAM], tensors("grad_sums."), "not second model"),
        # random numbers
        ([*tensors("zebra."), *ADAM], [StoredItem("z", "", True, (5056,), "U8")], "rng"),
        ([*tensors("zebra."), *ADAM], [StoredItem("dice.0", "", True, (16,), "U8")], "rng"),
        ([*tensors("zebra."), *ADAM], [StoredItem("dice.a", "", is_rng_tuple=True)], "rng"),
        ([], values("dice.bit_generator", "dice.state.key", "dice.state.pos", "dice.has_gauss"), "rng"),
        ([], values("my_rng", "run.python_rng", "cuda_rng_state", "run.rng_state.0"), "rng"),
        (tensors("model."), [U8_16._replace(name=f"model.{U8_16.name}")], "model"),
        (tensors("model."), [U8_CPU._replace(name=f"model.{U8_CPU.name}")], "model"),
        ([StoredItem("q.weight", "", True, (4, 4), "F32")], [U8_16], "model"),
        # options, and progress with words of other states in it
        (tensors("model."), values("args.optimizer.name", "config.scheduler", "hyper_parameters.steps"), "other"),
        ([], values("loops.fit_loop.epoch_loop.optimizer_progress.optimizer.step.total.ready"), "step"),
        # schedules and data
        ([], values("slope.last_epoch", "slope._step_count", "slope.base_lrs"), "scheduler"),
        ([], values("trail._snapshot", "trail._steps_since_snapshot"), "batch"),
        ([], values("trail.epoch", "trail.offset"), "batch"),
        ([], values("run.sampler.epoch", "state.data_loader.step"), "batch"),
        # counters, and what is not one
        ([], values("epoch", "trainer_state.epoch", "tick.current_epoch"), "epoch"),
        ([], values("tick.global_step", "iteration"), "step"),
        ([], values("tick", "tock.lap", "tock.started"), "other"),
        (tensors("model."), [StoredItem("queue.steps", "", True, (64,), "F32")], "other"),
        (tensors("model."), [StoredItem("queue.tokens", "", True, (64, 8), "F32")], "other"),
    ],
)
def test_what_looks_alike_is_told_apart(around: list[StoredItem], items: list[StoredItem], oracle: str) -> None:
    """In front of the rest of a checkpoint or behind it."""
    for found in (
        oracles_of_items([*around, *items])[len(around) :],
        oracles_of_items([*items, *around])[: len(items)],
    ):
        if oracle.startswith("not "):
            assert (oracle[4:],) not in found
        else:
            assert {each[0] for each in found} == {oracle}


WORD = st.from_regex(r"[a-z]{4,9}", fullmatch=True).filter(lambda word: kind_of_word(word) is None)


@given(
    st.lists(WORD, min_size=5, max_size=5, unique=True),
    st.dictionaries(
        st.from_regex(r"[a-z]{1,3}(\.[0-9])?\.[a-z]{5}", fullmatch=True),
        st.sampled_from([(3,), (2, 3), (4, 4)]),
        min_size=1,
    ),
    st.booleans(),
    st.booleans(),
)
def test_kinds_do_not_depend_on_names(words: list[str], shapes: Any, is_by_number: bool, is_reversed: bool) -> None:
    """Whatever a trainer calls its objects; the copy of the model lacks a buffer."""
    model, optimizer, copy, dice, clock = words
    make = numbered if is_by_number else tensors
    parts = [
        ("model", [*tensors(f"{model}.", shapes=shapes), StoredItem(f"{model}.buffer", "", True, (7,), "F32")]),
        ("moments", make(f"{optimizer}.state.", ".exp_avg", shapes)),
        ("rng", [StoredItem(f"{dice}.cpu", "", True, (5056,), "U8")]),
        ("other", values(f"{clock}.lap")),
    ]
    parts.insert(1, ("second model", tensors(f"{copy}.", shapes=shapes)))
    parts = parts[::-1] if is_reversed else parts
    found = iter(oracles_of_items([each for _, items in parts for each in items]))
    assert [(oracle, next(found)) for oracle, items in parts for _ in items] == [
        (oracle, (oracle,)) for oracle, items in parts for _ in items
    ]


# ------------------------------------------------------------------------------------------------------------ causes


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("app.rng.rank_1.torch", 1), ("rng.rank 0.torch_cuda_manual_seed.3", 0), ("rank2/state: rng.torch", 2),
        ("rng.3.cpu", 3), ("dice.1", 1), ("rng.cuda.1", None), ("rng.torch", None), ("data.dp_rank_4", 4),
        ("rng_state_7", 7), ("own_rank5: torch", 5), ("rng.torch_cuda_manual_seed.2", None),
    ],
)  # fmt: skip
def test_the_rank_in_a_name(name: str, rank: int | None) -> None:
    assert rank_in_name(name) == rank


@pytest.mark.parametrize("world", range(2, 6))
@pytest.mark.parametrize(
    "form", ["app.rng.rank{}", "rng.rank {}.torch_manual_seed", "dice.{}.torch", "own_rank{}: torch"]
)
def test_ranks_that_differ_are_named(world: int, form: str) -> None:
    """Every set of ranks."""
    before = {("rng", form.format(rank)): f"U8 [5056] {rank:032x}" for rank in range(world)}
    for count in range(1, world + 1):
        for ranks in combinations(range(world), count):
            after = before | {("rng", form.format(rank)): f"U8 [5056] {rank + 99:032x}" for rank in ranks}
            (said,) = likely_causes(compare([before], [after]), before, after)
            assert named_ranks(said) == set(ranks)
            right = set(range(world)) - set(ranks)
            assert ("restored on rank" in said) == bool(right)


def named_ranks(said: str) -> set[int]:
    """The ranks in `... differs on ranks 0, 2-4 (...`."""
    found = re.search(r"differs on ranks? ([\d, -]+) \(", said)
    assert found is not None
    spans = [each.split("-") for each in found[1].split(", ")]
    return {rank for each in spans for rank in range(int(each[0]), int(each[-1]) + 1)}


@pytest.mark.parametrize("world", range(2, 6))
def test_the_state_of_another_rank_is_recognized(world: int) -> None:
    before = {("rng", f"dice.{rank}.torch"): f"U8 [5056] {rank:032x}" for rank in range(world)}
    for shift in range(1, world):
        after = {key: f"U8 [5056] {(rank + shift) % world:032x}" for rank, key in enumerate(before)}
        (said,) = likely_causes(compare([before], [after]), before, after)
        assert said.startswith("RNG state of another rank was restored")


TENSOR = "F32 [2, 3] " + "0" * 32


@pytest.mark.parametrize("oracle", ["model", "moments", "master weights"])
@pytest.mark.parametrize(
    ("after", "said", "not_said"),
    [
        ("F32 [2, 3] " + "1" * 32, "possible causes", "dtypes"),
        ("BF16 [2, 3] " + "1" * 32, "dtypes or shapes of", "restored"),
        ("F32 [3, 2] " + "1" * 32, "dtypes or shapes of", "restored"),
        (None, "missing after the resume", "possible causes"),
    ],
)
def test_how_tensors_differ(oracle: str, after: str | None, said: str, not_said: str) -> None:
    before = {(oracle, "x.exp_avg"): TENSOR, (oracle, "y.exp_avg"): TENSOR}
    later = {**before} if after is None else before | {(oracle, "x.exp_avg"): after}
    if after is None:
        del later[oracle, "x.exp_avg"]
    (found,) = likely_causes(compare([before], [later]), before, later)
    assert said in found and not_said not in found and "1 of 2" in found


def test_a_second_model_that_starts_again_from_the_first_is_recognized() -> None:
    before = {("model", "a"): TENSOR, ("second model", "ema.a"): TENSOR.replace("0" * 32, "1" * 32)}
    after = before | {("second model", "ema.a"): TENSOR}
    (said,) = likely_causes(compare([before], [after]), before, after)
    assert 'second model under "ema"' in said and "it restarts from the weights of the model" in said


@pytest.mark.parametrize("has_schedule", [False, True])
@pytest.mark.parametrize("schedule_differs", [False, True])
@pytest.mark.parametrize("key", ["lr", "initial_lr", "weight_decay", "betas", "eps", "momentum", "own_setting"])
def test_a_setting_of_a_group_is_named_alone(key: str, has_schedule: bool, schedule_differs: bool) -> None:
    """For each key, with a schedule that is stored or not, and differs or not."""
    settings = {
        "lr": "1",
        "initial_lr": "1",
        "weight_decay": "1",
        "betas": "1",
        "eps": "1",
        "momentum": "1",
        "own_setting": "1",
    }
    before = {("param groups", f"o.param_groups.0.{name}"): value for name, value in settings.items()}
    after = before | {("param groups", f"o.param_groups.0.{key}"): "2"}
    if has_schedule:
        before["scheduler", "s.last_epoch"] = "3"
        after["scheduler", "s.last_epoch"] = "0" if schedule_differs else "3"
    said = likely_causes(compare([before], [after]), before, after)
    (of_group,) = (each for each in said if not each.startswith("scheduler state"))
    words = {"lr": "learning rate", "initial_lr": "initial learning rate", "weight_decay": "weight decay"}
    assert of_group.startswith(f"{words.get(key, key)} differs (1 in the reference, 2 after the resume)")
    assert not any(words.get(other, other) in of_group for other in settings if other not in (key, "lr"))
    is_rate = key in ("lr", "initial_lr")
    may_be_schedule = is_rate and (not has_schedule or schedule_differs)
    assert ("scheduler" in of_group) == may_be_schedule


def test_a_file_is_described_once_and_tensors_of_adapters_are_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "notes.bin").write_bytes(b"12345")
    adapter = {"blocks.0.lora_A": torch.ones(2, 2), "blocks.0.lora_B": torch.ones(2, 2)}
    torch.save({"steps_so_far": 3, "adapter": adapter}, tmp_path / "anything.pt")
    found = read_items(tmp_path)
    assert found["other", "notes.bin"].startswith("file: 5 bytes ")
    assert {name.rpartition(".")[2] for oracle, name in found if oracle == "model"} == {"lora_A", "lora_B"}
