"""Checkpoints with several models, wrappers, state and second names, generated: what is published is what was meant."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import ckptx
from ckptx.errors import CkptxError, InputError, UsageError
from ckptx.mapping.names import WRAPPERS
from tests.support.checkpoint_writers import INDEX, LLAMA, SINGLE, Value, llama, value, write_dcp, write_hf

MODEL = llama(layers=1, hidden=4, vocab=6, inner=8)
CONFIG = LLAMA | {"num_hidden_layers": 1}
PREFIXES = ["", "model.", "ema.", "state.model.", "state.ema.", "ref_policy.", "critic.", "a.b.c.", "x.0.", "a.b.c.d."]
FOUND = [each for each in PREFIXES if each not in ("x.0.", "a.b.c.d.")]
"""Those that are looked for without --source-prefix."""


@dataclass
class Made:
    """A generated checkpoint and what it was made of.

    Attributes:
        tensors: By name on disk.
        models: Prefix -> name in the model -> name on disk, of complete models and of parts.
        complete: Prefixes of complete models.
        state: Names of optimizer state.
        trainer: Names of other training state.
        second: Second name of a tensor -> its prefix, name in the model, and whether the bytes are equal.
    """

    tensors: dict[str, Value] = field(default_factory=dict)
    models: dict[str, dict[str, str]] = field(default_factory=dict)
    complete: list[str] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    trainer: list[str] = field(default_factory=list)
    second: dict[str, tuple[str, str, bool]] = field(default_factory=dict)


def wrapped(draw: Any, name: str, wrapper: str) -> str:
    parts = name.split(".")
    at = draw(st.integers(0, len(parts) - 1))
    return ".".join([*parts[:at], wrapper, *parts[at:]])


@st.composite
def checkpoints(draw: Any) -> Made:
    made = Made()
    prefixes = draw(st.lists(st.sampled_from(PREFIXES), min_size=1, max_size=3, unique=True))
    is_complete = [True, *(draw(st.booleans()) for _ in prefixes[1:])]
    wrapper = draw(st.sampled_from([None, None, *sorted(WRAPPERS)]))
    if not any(prefix in FOUND for prefix, complete in zip(prefixes, is_complete, strict=True) if complete):
        prefixes[0] = "model." if "model." not in prefixes else "teacher."
    for number, (prefix, complete) in enumerate(zip(prefixes, is_complete, strict=True)):
        names = list(MODEL) if complete else draw(st.lists(st.sampled_from(sorted(MODEL)[2:]), min_size=1, unique=True))
        held = made.models[prefix] = {}
        for at, name in enumerate(names):
            disk = prefix + name
            if wrapper is not None and draw(st.booleans()):
                disk = wrapped(draw, disk, wrapper)
            held[name] = disk
            made.tensors[disk] = value(MODEL[name][0], *MODEL[name][1], seed=1000 * number + at)
        made.complete += [prefix] if complete else []
    for root in draw(st.lists(st.sampled_from(["optimizer.state.{}.exp_avg", "exp_avg.{}", "optim.{}"]), unique=True)):
        for at, name in enumerate(MODEL):
            made.state.append(root.format(prefixes[0] + name))
            made.tensors[made.state[-1]] = value("F32", *MODEL[name][1], seed=9000 + at)
    if draw(st.booleans()):
        made.trainer.append("train_state.step")
        made.tensors["train_state.step"] = value("I64", 1)
    for prefix, name in draw(
        st.lists(st.tuples(st.sampled_from(prefixes), st.sampled_from(sorted(MODEL))), max_size=2, unique=True)
    ):
        if name in made.models[prefix]:
            disk = made.models[prefix][name]
            again = wrapped(draw, disk, draw(st.sampled_from(sorted(WRAPPERS))))
            if again not in made.tensors:
                equal = draw(st.booleans())
                made.second[again] = prefix, name, equal
                seed = 5000 + len(made.second)
                made.tensors[again] = made.tensors[disk] if equal else value(MODEL[name][0], *MODEL[name][1], seed=seed)
    order = draw(st.permutations(sorted(made.tensors)))
    made.tensors = {name: made.tensors[name] for name in order}
    return made


def published(root: Path) -> dict[str, Value]:
    """The tensors in a directory of safetensors, read from the format's description."""
    files = [SINGLE]
    if (root / INDEX).is_file():
        files = sorted({*json.loads((root / INDEX).read_text())["weight_map"].values()})
    tensors = {}
    for file in files:
        data = (root / file).read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, row in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + each for each in row["data_offsets"])
                tensors[name] = row["dtype"], tuple(row["shape"]), data[begin:end]
    return tensors


def stays_inside(prefix: str, meant: str) -> bool:
    """True for a part of a model that counts as further tensors of the model, as heads for further tokens do."""
    return prefix != meant and prefix.startswith(meant)


def refusals(made: Made, prefix: str | None) -> list[list[str]]:
    """Why the checkpoint must be refused: for each reason the texts that the message has to hold, one of them each."""
    if prefix is None and len(made.complete) > 1:
        return [[f'under "{each}"' if each else "without a prefix" for each in made.complete]]
    meant = made.complete[0] if prefix is None else prefix
    names: dict[str, set[str]] = {}  # name of a parameter -> names on disk that mean it

    def add(of: str, name: str, *on_disk: str) -> None:
        # The class takes names with its base prefix once more, as transformers does.
        once = name if of == meant else (of + name).removeprefix(meant).removeprefix("model.")
        names.setdefault(meant + once if once in made.models[meant] else of + name, set()).update(on_disk)

    for again, (of, name, _) in made.second.items():
        if of == meant or (of not in made.complete and stays_inside(of, meant)):
            add(of, name, again, made.models[of][name])
    for other, held in made.models.items():
        for name, disk in held.items():
            if other not in made.complete and stays_inside(other, meant):
                once = (other + name).removeprefix(meant).removeprefix("model.")
                if once in made.models[meant]:
                    add(meant, once, disk, made.models[meant][once])
            elif (
                prefix is None
                and other != meant
                and not stays_inside(other, meant)
                and other + name in made.models[meant]
            ):
                # The name on disk, without wrappers, is the name of a tensor of the model without the prefix.
                add(meant, other + name, disk, made.models[meant][other + name])
    pairs = (pair for several in names.values() for pair in combinations(sorted(several), 2))
    return [[a, b] for a, b in pairs if made.tensors[a] != made.tensors[b]]


@given(checkpoints(), st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_what_is_published_is_the_model_that_was_meant(made: Made, data: st.DataObject) -> None:
    prefix = data.draw(st.sampled_from([None, *made.complete]))
    if prefix is None:
        assume(made.complete[0] in FOUND or len(made.complete) > 1)
    with tempfile.TemporaryDirectory() as here:
        saved = write_dcp(Path(here, "dcp"), made.tensors, config=CONFIG)
        wanted = refusals(made, prefix)
        try:
            report = ckptx.convert("dcp2hf", saved, Path(here, "out"), source_prefix=prefix)
        except InputError as error:
            assert wanted, f"refused without a reason: {error}"
            assert any(all(text in str(error) for text in texts) for texts in wanted), str(error)
            assert not Path(here, "out").exists()
            for look in (ckptx.diff, ckptx.verify):
                if prefix is None and len(made.complete) > 1:
                    with pytest.raises(InputError, match="complete models"):
                        look(saved, saved)
            assert ckptx.inspect(saved).exit == 0
            return
        assert not wanted, f"published although {wanted}"
        check(made, made.complete[0] if prefix is None else prefix, report, published(Path(here, "out")))


def check(made: Made, meant: str, report: Any, tensors: dict[str, Value]) -> None:
    """Compares the published tensors with those that were meant, and the ledger with the names on disk."""
    inside = {
        other: held for other, held in made.models.items() if other not in made.complete and stays_inside(other, meant)
    }
    expected = {name: made.tensors[disk] for name, disk in made.models[meant].items()}
    for other, held in inside.items():
        expected |= {(other + name).removeprefix(meant): made.tensors[disk] for name, disk in held.items()}
    assert tensors == expected
    reasons = {row["name"]: row["reason"] for row in report.dropped}
    seconds = {again for again, (of, _, _) in made.second.items() if of == meant or of in inside}
    gone = {}
    for other, held in made.models.items():
        if other != meant and other not in inside:
            said = f'under "{other}"' if other else "without a prefix"
            kind = "second model" if other in made.complete else "part of a second model"
            gone |= dict.fromkeys(held.values(), f"{kind} {said}, not converted")
            gone |= {again: f"{kind} {said}, not converted" for again, (of, _, _) in made.second.items() if of == other}
    gone |= dict.fromkeys(made.state, "optimizer state is not converted to HF")
    gone |= dict.fromkeys(made.trainer, "training state is not converted to HF")
    assert reasons == gone
    ledger = report.ledger
    assert ledger["source"] == len(made.tensors) == ledger["written"] + ledger["tied"] + ledger["dropped"]
    assert ledger["tied"] == len(seconds)
    for other in made.models:
        if other != meant and other not in inside:
            assert any(f'--source-prefix "{other}"' in note for note in report.notes)


# ---------------------------------------------------------------------------------------- prefixes that are added

COMPONENTS = [
    "model", "ema", "app", "optimizer", "optim", "exp_avg", "module", "_orig_mod", "0", "12", "state", "step", "layers",
    "lm_head", "norm", "grads", "main_params", "", "x y", "é", "*", "a", "b", "scaler", "weight",
]  # fmt: skip


@given(st.lists(st.sampled_from(COMPONENTS), min_size=1, max_size=5), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_prefix_is_accepted_where_the_model_is_found_again(parts: list[str], ends: bool, cut: bool) -> None:
    """Both ways: what is accepted verifies, and what is refused would not have been found in a DCP with these names."""
    prefix = ".".join(parts) + "." * ends
    assume(prefix)
    with tempfile.TemporaryDirectory() as here:
        source, out = write_hf(Path(here, "hf"), MODEL, config=CONFIG), Path(here, "out")
        try:
            if cut:
                ckptx.reshard(source, out, to="dcp", prefix=prefix)
            else:
                ckptx.convert("hf2dcp", source, out, prefix=prefix)
        except UsageError as error:
            assert error.exit_code == 2 and str(error).startswith(f'--prefix "{prefix}"')
            assert not out.exists()
            by_hand = {prefix + name: tensor for name, tensor in MODEL.items()}
            assert not is_found(source, write_dcp(Path(here, "by_hand"), by_hand, config=CONFIG), prefix)
        else:
            assert is_found(source, out, prefix)


def is_found(source: Path, saved: Path, prefix: str) -> bool:
    try:
        return ckptx.verify(source, saved).exit == 0 and ckptx.inspect(saved).prefix == prefix
    except CkptxError:
        return False
