"""Several models or names in one checkpoint, seen by every command that looks for a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import InputError, UsageError
from ckptx.mapping.names import WRAPPERS
from tests.support.checkpoint_writers import LLAMA, Value, llama, value, write_dcp, write_hf, write_safetensors

MODEL = llama(layers=1, hidden=4, vocab=6, inner=8)
NORM = "model.norm.weight"
CONFIG = LLAMA | {
    "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 4, "intermediate_size": 8, "vocab_size": 6,
}  # fmt: skip
PAIRS = [("model.", "ema."), ("", "ema."), ("state.model.", "state.ema."), ("generator.", "discriminator.")]
COMMANDS: dict[str, Callable[[Path, Path, Path, str | None], Any]] = {
    "dcp2hf": lambda hf, dcp, out, name: ckptx.convert("dcp2hf", dcp, out, source_prefix=name),
    "dcp2hf --dry-run": lambda hf, dcp, out, name: ckptx.convert("dcp2hf", dcp, out, source_prefix=name, dry_run=True),
    "reshard": lambda hf, dcp, out, name: ckptx.reshard(dcp, out, source_prefix=name, tp=2),
    "reshard --optimizer drop": lambda _, dcp, out, name: ckptx.reshard(dcp, out, source_prefix=name, optimizer="drop"),
    "reshard --to safetensors": lambda _, dcp, out, name: ckptx.reshard(dcp, out, source_prefix=name, to="safetensors"),
    "diff": lambda hf, dcp, out, prefix: ckptx.diff(hf, dcp, source_prefix=prefix),
    "diff, swapped": lambda hf, dcp, out, prefix: ckptx.diff(dcp, hf, source_prefix=prefix),
    "verify": lambda hf, dcp, out, prefix: ckptx.verify(hf, dcp, source_prefix=prefix),
    "verify, swapped": lambda hf, dcp, out, prefix: ckptx.verify(dcp, hf, source_prefix=prefix),
}


def under(prefix: str, seed: int = 0) -> dict[str, Value]:
    """The model below a prefix, with bytes of its own for each seed but 0."""
    return {
        prefix + name: tensor if not seed else value(tensor[0], *tensor[1], seed=seed + at)
        for at, (name, tensor) in enumerate(MODEL.items())
    }


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("prefixes", PAIRS)
@pytest.mark.parametrize("meant", [0, 1])
def test_every_command_asks_which_model_is_meant(
    command: str, prefixes: tuple[str, str], meant: int, tmp_path: Path
) -> None:
    hf = write_hf(tmp_path / "hf", MODEL, config=CONFIG)
    tensors = under(prefixes[meant]) | under(prefixes[1 - meant], seed=100)
    saved = write_dcp(tmp_path / "dcp", tensors, config=CONFIG)
    with pytest.raises(InputError, match=r"holds 2 complete models.*choose one with --source-prefix"):
        COMMANDS[command](hf, saved, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()
    report = COMMANDS[command](hf, saved, tmp_path / "out", prefixes[meant])
    assert report.exit == 0
    if "reshard" not in command or "drop" in command or "safetensors" in command:
        assert any(f'--source-prefix "{prefixes[1 - meant]}"' in note for note in report.notes)
    if (tmp_path / "out").exists():
        kept = command == "reshard"
        assert ckptx.verify(hf, tmp_path / "out", source_prefix=prefixes[meant] if kept else None).exit == 0
        assert report.ledger["dropped"] == (0 if kept else len(MODEL))
    other = COMMANDS["verify"](hf, saved, tmp_path, prefixes[1 - meant])
    assert (other.exit, len(other.differing)) == (1, len(MODEL))


def test_a_prefix_counts_for_the_checkpoint_that_has_a_model_under_it(tmp_path: Path) -> None:
    two = write_dcp(tmp_path / "two", under("model.") | under("ema.", seed=100), config=CONFIG)
    for prefix in ("", "app."):
        one = write_dcp(tmp_path / f"one{prefix}", under(prefix), config=CONFIG)
        for a, b in ((one, two), (two, one)):
            for command in (ckptx.verify, ckptx.diff):
                assert command(a, b, source_prefix="model.").exit == 0
            assert ckptx.verify(a, b, source_prefix="ema.").exit == 1
    with pytest.raises(InputError, match=r'--source-prefix "teacher\."'):
        ckptx.verify(tmp_path / "one", tmp_path / "oneapp.", source_prefix="teacher.")


@pytest.mark.parametrize("names_class", [True, False])
@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_all_models_are_listed(count: int, names_class: bool, tmp_path: Path) -> None:
    prefixes = [f"m{number:02d}." for number in range(count)]
    saved = write_dcp(
        tmp_path / "dcp",
        {name: each for at, prefix in enumerate(prefixes) for name, each in under(prefix, seed=100 * at).items()},
        config={key: each for key, each in CONFIG.items() if names_class or key != "architectures"},
    )
    with pytest.raises(InputError, match=f"holds {count} complete models") as refused:
        ckptx.convert("dcp2hf", saved, tmp_path / "out")
    assert sum(prefix in str(refused.value) for prefix in prefixes) == min(count, 8)
    for prefix in (prefixes[0], prefixes[-1]):
        report = ckptx.convert("dcp2hf", saved, tmp_path / prefix, source_prefix=prefix)
        reasons = {row["reason"] for row in report.dropped}
        assert reasons == {f'second model under "{each}", not converted' for each in prefixes if each != prefix}


def test_inspect_describes_one_and_names_the_others(tmp_path: Path) -> None:
    saved = write_dcp(tmp_path / "dcp", under("model.") | under("ema.", seed=100), config=CONFIG)
    report = ckptx.inspect(saved)
    assert report.exit == 0 and any("holds 2 complete models" in note for note in report.notes)
    for prefix, other in (("model.", "ema."), ("ema.", "model.")):
        report = ckptx.inspect(saved, source_prefix=prefix)
        assert report.prefix == prefix and not report.unknown_tensors
        assert any(f'second model under "{other}"' in note for note in report.notes)
        assert sorted(report.other_tensors) == sorted(other + name for name in MODEL)
    with pytest.raises(UsageError, match="--source-prefix"):
        ckptx.inspect(write_hf(tmp_path / "hf", MODEL), source_prefix="model.")


def test_a_layer_beyond_those_of_the_config_is_no_reason_to_take_the_larger_model(tmp_path: Path) -> None:
    teacher = llama(layers=3, hidden=4, vocab=6, inner=8)
    student = under("student.")
    saved = write_dcp(tmp_path / "dcp", student | {f"teacher.{k}": v for k, v in teacher.items()}, config=CONFIG)
    with pytest.raises(InputError, match="holds 2 complete models"):
        ckptx.convert("dcp2hf", saved, tmp_path / "out")
    assert ckptx.convert("dcp2hf", saved, tmp_path / "out", source_prefix="student.").exit == 0


def test_a_tied_head_that_one_model_lacks_makes_it_no_part(tmp_path: Path) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = under("model.") | under("ema.", seed=100)
    tensors["model.lm_head.weight"] = tensors["model.model.embed_tokens.weight"]
    del tensors["ema.lm_head.weight"]
    with pytest.raises(InputError, match="holds 2 complete models"):
        ckptx.convert("dcp2hf", write_dcp(tmp_path / "dcp", tensors, config=config), tmp_path / "out")


@pytest.mark.parametrize("root", ["exp_avg.", "optim.exp_avg.", "state.exp_avg_sq.", "momentum_buffer.", "opt_state."])
@pytest.mark.parametrize("prefix", ["", "model.", "state.model."])
def test_moments_that_have_the_names_of_the_model_are_optimizer_state(root: str, prefix: str, tmp_path: Path) -> None:
    tensors = under(prefix) | under(root, seed=100) | under(f"{root}again.", seed=300)
    report = ckptx.convert("dcp2hf", write_dcp(tmp_path / "dcp", tensors, config=CONFIG), tmp_path / "out")
    assert (report.prefix or "") == prefix
    assert {row["reason"] for row in report.dropped} == {"optimizer state is not converted to HF"}
    assert ckptx.verify(write_hf(tmp_path / "hf", MODEL, config=CONFIG), tmp_path / "out").exit == 0


@pytest.mark.parametrize("base", [None, "none"])
def test_models_of_an_unknown_class_are_noted(base: str | None, tmp_path: Path) -> None:
    tensors = {f"{each}.layers.{at}.w": value("F32", 2, seed=at) for each in ("model", "ema") for at in range(3)}
    tensors |= {f"{each}.out.w": value("F32", 3) for each in ("model", "ema")}
    config = {"architectures": ["NobodyKnows"]} if base is None else None
    saved = write_dcp(tmp_path / "dcp", tensors, config=config)
    report = ckptx.convert("dcp2hf", saved, tmp_path / "out", base=base)
    assert any('the same names under "ema.", "model."' in note for note in report.notes)
    assert report.ledger["written"] == len(tensors)
    assert any("the same names" in note for note in ckptx.inspect(saved).notes)
    report = ckptx.convert("dcp2hf", saved, tmp_path / "one", base=base, source_prefix="model.")
    assert {row["reason"] for row in report.dropped} == {'second model under "ema.", not converted'}


@pytest.mark.parametrize("names", [["a.weight", "b.weight"], ["encoder.0.w", "decoder.1.w.x"], ["q.w", "k.w", "v.w"]])
def test_modules_of_one_model_are_no_models(names: list[str], tmp_path: Path) -> None:
    saved = write_dcp(tmp_path / "dcp", {name: value("F32", 2) for name in names})
    report = ckptx.convert("dcp2hf", saved, tmp_path / "out", base="none")
    assert not any("the same names" in note for note in report.notes)


# -------------------------------------------------------------------------------------- two names for one tensor

SECONDS = [
    *(f"{wrapper}.{NORM}" for wrapper in sorted(WRAPPERS)),
    *(f"model.{wrapper}.norm.weight" for wrapper in sorted(WRAPPERS)),
    *(f"model.norm.{a}.{b}.weight" for a, b in itertools.permutations(sorted(WRAPPERS), 2)),
    "norm.weight",
    "model.model.norm.weight",
]
CHANGES: dict[str, Callable[[Value], Value]] = {
    "equal": lambda tensor: tensor,
    "bytes": lambda tensor: (*tensor[:2], bytes([tensor[2][0] ^ 1, *tensor[2][1:]])),
    "last byte": lambda tensor: (*tensor[:2], bytes([*tensor[2][:-1], tensor[2][-1] ^ 0x80])),
    "dtype": lambda tensor: ("F16", *tensor[1:]),
    "shape": lambda tensor: (tensor[0], (1, *tensor[1]), tensor[2]),
}


@pytest.mark.sampled(50)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("second", SECONDS)
@pytest.mark.parametrize("order", [1, -1])
def test_two_names_of_one_tensor(second: str, change: str, order: int, tmp_path: Path) -> None:
    tensors = MODEL | {second: CHANGES[change](MODEL[NORM])}
    saved = write_dcp(tmp_path / "dcp", dict(list(tensors.items())[::order]), config=CONFIG)
    hf = write_hf(tmp_path / "hf", MODEL, config=CONFIG)
    runs = [
        lambda: ckptx.convert("dcp2hf", saved, tmp_path / "out"),
        lambda: ckptx.reshard(saved, tmp_path / "cut", tp=2),
        lambda: ckptx.reshard(saved, tmp_path / "st", to="safetensors"),
        lambda: ckptx.verify(hf, saved),
        lambda: ckptx.verify(saved, hf),
    ]
    for run in runs:
        if change == "equal":
            report = run()
            assert report.exit == 0
            assert any("two names" in note for note in report.notes)
        else:
            with pytest.raises(InputError, match="one parameter under two names") as refused:
                run()
            assert f'"{NORM}"' in str(refused.value) and f'"{second}"' in str(refused.value)
    assert any(second in note for note in ckptx.diff(hf, saved).notes)
    if change == "equal":
        for out in ("out", "cut", "st"):
            assert ckptx.verify(hf, tmp_path / out).exit == 0


@pytest.mark.parametrize("kind", ["file", "bin", "shards"])
@pytest.mark.parametrize("change", ["equal", "bytes"])
@pytest.mark.parametrize("leaf", ["gamma", "beta"])
def test_an_old_name_beside_the_new_one(kind: str, change: str, leaf: str, tmp_path: Path) -> None:
    new = "bert.embeddings.LayerNorm." + {"gamma": "weight", "beta": "bias"}[leaf]
    old = f"bert.embeddings.LayerNorm.{leaf}"
    tensors = {
        "bert.embeddings.word_embeddings.weight": value("F32", 4, 2),
        new: value("F32", 2, seed=3),
        old: CHANGES[change](value("F32", 2, seed=3)),
    }
    config = {"architectures": ["BertModel"], "model_type": "bert"}
    if kind == "bin":
        torch = pytest.importorskip("torch")
        source = tmp_path / "bin"
        write_hf(source, {}, config=config)
        (source / "model.safetensors").unlink()
        data = {
            name: torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)
            for name, (_, shape, data) in tensors.items()
        }
        torch.save(data, source / "pytorch_model.bin")
    else:
        source = write_hf(tmp_path / "hf", tensors, 2 if kind == "shards" else 1, config=config)
    if change == "equal":
        report = ckptx.convert("hf2dcp", source, tmp_path / "out", allow_config_mismatch=True)
        assert any("two names" in note and old in note for note in report.notes)
        assert report.ledger["source"] == report.ledger["written"] + report.ledger["tied"] == 3
        assert ckptx.verify(source, tmp_path / "out").exit == 0
    else:
        with pytest.raises(InputError, match=f'"{new}" and "{old}"'):
            ckptx.convert("hf2dcp", source, tmp_path / "out", allow_config_mismatch=True)


@pytest.mark.parametrize("prefix", ["ema.", "module.ema.", "x.0."])
def test_a_second_model_in_safetensors_is_noted_and_kept(prefix: str, tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", under("") | under(prefix, seed=100), config=CONFIG)
    report = ckptx.convert("hf2dcp", source, tmp_path / "out")
    assert any("second complete model" in note and prefix in note for note in report.notes)
    assert report.ledger["written"] == 2 * len(MODEL)
    assert ckptx.verify(source, tmp_path / "out").exit == 0
    back = ckptx.convert("dcp2hf", tmp_path / "out", tmp_path / "back")
    assert back.ledger["written"] == 2 * len(MODEL)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_two_models_below_prefixes_in_safetensors_do_not_fit(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", under("student.") | under("teacher.", seed=100), config=CONFIG)
    with pytest.raises(InputError, match="does not match its config"):
        ckptx.convert("hf2dcp", source, tmp_path / "out")


def test_a_pair_of_directories_with_two_models(tmp_path: Path) -> None:
    write_dcp(tmp_path / "step" / "model", under("model.") | under("ema.", seed=100))
    moments = {f"state.model.{name}.exp_avg": value("F32", *MODEL[name][1]) for name in MODEL}
    write_dcp(tmp_path / "step" / "optim", moments)
    write_safetensors(tmp_path / "ignored" / "x.safetensors", MODEL)
    hf = write_hf(tmp_path / "hf", MODEL, config=CONFIG)
    with pytest.raises(InputError, match="holds 2 complete models"):
        ckptx.convert("dcp2hf", tmp_path / "step", tmp_path / "out", base=str(hf))
    report = ckptx.convert("dcp2hf", tmp_path / "step", tmp_path / "out", base=str(hf), source_prefix="model.")
    assert {row["reason"] for row in report.dropped} == {
        'second model under "ema.", not converted',
        "optimizer state is not converted to HF",
    }
    assert ckptx.verify(hf, tmp_path / "out").exit == 0
