"""`reshard` prints a note if TP shards nothing, few bytes of the model, or few bytes of its layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckptx
from tests.conversion.steps import CONFIG, TIED
from tests.support.checkpoint_writers import llama, write_hf

LAYER = [f"model.layers.*.self_attn.{name}_proj" for name in "qkvo"]
LAYER += [f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up", "down")]
VOCABULARY = ["model.embed_tokens", "lm_head"]
NBYTES = {name: len(data) for name, (_, _, data) in llama().items()}


def is_matrix_of(name: str, patterns: list[str]) -> bool:
    module = name.removesuffix(".weight")
    parts = module.split(".")
    return any(module == each or ".".join([*parts[:2], "*", *parts[3:]]) == each for each in patterns)


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp_shard": 2}], ids=str)
def test_nothing_is_replicated_without_tp(tmp_path: Path, mesh: dict[str, int], to: str) -> None:
    report = ckptx.reshard(write_hf(tmp_path / "hf", llama(), config=CONFIG), tmp_path / "out", to=to, **mesh)
    assert report.replicated is None
    assert not any("and replicates" in note for note in report.notes)


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
@pytest.mark.parametrize(
    ("replicated", "reason"),
    [
        ([], None),
        (VOCABULARY, None),
        (LAYER[:3], None),
        (LAYER, "TP rules of LlamaForCausalLM match few"),
        (LAYER + VOCABULARY, "no TP rule matches a tensor of LlamaForCausalLM"),
        (LAYER[4:], "TP rules of LlamaForCausalLM match few"),
    ],
    ids=["default", "vocabulary", "some of the layers", "layers", "all", "mlp"],
)
def test_a_note_lists_what_is_replicated(tmp_path: Path, replicated: list[str], reason: str | None, to: str) -> None:
    plan: dict[str, Any] = {}
    if replicated:
        (tmp_path / "plan.json").write_text(json.dumps(dict.fromkeys(replicated, "replicate")))
        plan = {"tp_plan": tmp_path / "plan.json"}
    source = write_hf(tmp_path / "hf", llama(), config=CONFIG)
    report = ckptx.reshard(source, tmp_path / "out", to=to, tp=2, **plan)
    notes = [note for note in report.notes if "and replicates" in note]
    whole = {name: size for name, size in NBYTES.items() if "norm" in name or is_matrix_of(name, replicated)}
    total, nbytes = sum(NBYTES.values()), sum(whole.values())
    assert report.replicated == {"tensors": len(whole), "bytes": nbytes, "share": round(nbytes / total, 6)}
    assert (reason is not None) == (nbytes / total > 0.5)
    if reason is None:
        assert notes == []
        return
    stored = total + (nbytes if to == "safetensors" else 0)
    ratio = f"({stored / total:.1f}x)" if to == "safetensors" else "but every TP rank has to load the replicated"
    (note,) = notes
    assert note.startswith(
        f"--tp 2 shards {len(NBYTES) - len(whole)} tensors and replicates {len(whole)} tensors, "
        f"{nbytes / total:.0%} of the parameter bytes: {reason}; "
    )
    assert ratio in note and note.endswith("pass --tp-plan FILE with rules for them, or a smaller --tp")


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_layers_that_stay_replicated_are_noted_if_the_vocabulary_is_sharded(tmp_path: Path, to: str) -> None:
    config = {**CONFIG, "vocab_size": 512}
    tensors = llama(vocab=512)
    source = write_hf(tmp_path / "hf", tensors, config=config)
    (tmp_path / "plan.json").write_text(json.dumps(dict.fromkeys(LAYER, "replicate")))
    report = ckptx.reshard(source, tmp_path / "out", to=to, tp=2, tp_plan=tmp_path / "plan.json")
    whole = [name for name in tensors if name not in ("model.embed_tokens.weight", "lm_head.weight")]
    share = sum(len(tensors[name][2]) for name in whole) / sum(len(data) for _, _, data in tensors.values())
    assert share < 0.5
    (note,) = [note for note in report.notes if "and replicates" in note]
    assert note.startswith(
        f"--tp 2 shards 2 tensors and replicates {len(whole)} tensors, {share:.0%} of the parameter bytes: TP rules of "
        "LlamaForCausalLM leave its layers replicated; "
    )


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_both_names_of_a_tied_weight_count_and_its_bytes_once(tmp_path: Path, to: str, pp: int) -> None:
    source = write_hf(tmp_path / "hf", llama(head=False), config=TIED)
    (tmp_path / "plan.json").write_text(json.dumps(dict.fromkeys(LAYER, "replicate")))
    report = ckptx.reshard(source, tmp_path / "out", to=to, tp=2, pp=pp, tp_plan=tmp_path / "plan.json")
    embedding = NBYTES["model.embed_tokens.weight"]
    total = sum(size for name, size in NBYTES.items() if name != "lm_head.weight")
    assert report.replicated == {
        "tensors": len(NBYTES) - 2, "bytes": total - embedding, "share": round(1 - embedding / total, 6),
    }  # fmt: skip
    (note,) = [note for note in report.notes if "and replicates" in note]
    assert note.startswith(f"--tp 2 shards 2 tensors and replicates {len(NBYTES) - 2} tensors, ")
