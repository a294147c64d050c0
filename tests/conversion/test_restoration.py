"""Original files come back only if the source still is what its manifest describes, which proves nothing alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.architecture.tied import TieDecision
from ckptx.conversion.steps.restoration import (
    Restoration,
    _tie_groups,
    record_original,
    restore_original,
    usable_manifest,
)
from ckptx.errors import InputError
from tests.conversion.steps import CONFIG, TIED, decided, source
from tests.conversion.test_renamed_tensors import CONFIG as ROPE_CONFIG
from tests.conversion.test_renamed_tensors import both_spellings
from tests.support.checkpoint_writers import llama, value, write_hf

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
EXTRA = "extra.weight"
OTHER_TENSORS = ("ckptx.json records files with other tensors; writing new files",)
GATE, DOWN = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"


def edit_manifest(root: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((root / "ckptx.json").read_text())
    edit(manifest)
    (root / "ckptx.json").write_text(json.dumps(manifest))


DTYPES = [(GATE, "F16"), (NORM, "I16"), (EMBED, "F8_E4M3")]
SHAPES = [(GATE, [8, 24]), (NORM, [8, 1]), (NORM, [2, 4]), (DOWN, [8, 8, 3])]


@pytest.mark.parametrize(
    ("to", "name", "key", "stored"),
    [
        *((to, name, "dtype", dtype) for to in ("dcp", "safetensors") for name, dtype in DTYPES),
        *(("dcp", name, "shape", shape) for name, shape in SHAPES),  # the reader of shards refuses them
        *((to, None, "", None) for to in ("dcp", "safetensors")),
    ],
)
def test_a_manifest_of_other_dtypes_or_shapes_restores_nothing(
    tmp_path: Path, to: str, name: str | None, key: str, stored: Any
) -> None:
    """Each value has as many bytes as the tensor, or fewer, so that the manifest does not contradict itself."""
    write_hf(tmp_path / "hf", llama(), config=CONFIG)
    ckptx.reshard(tmp_path / "hf", tmp_path / "made", to=to)
    if name is not None:
        edit_manifest(tmp_path / "made", lambda manifest: manifest["tensors"][name].update({key: stored}))
    notes: list[str] = []
    with source(tmp_path / "made") as ready:
        view, ties = decided(ready)
        manifest = usable_manifest(view, notes)
        found = restore_original(view, ties.decisions, None)
        recorded = record_original(view)
    is_unchanged = name is None
    assert (manifest is not None, found.files is not None, recorded.original is not None) == (is_unchanged,) * 3
    note = (
        "ckptx.json does not describe these tensors (names, dtypes or shapes differ), so the original files cannot "
        "be restored from them; nothing to do if the tensors were changed on purpose"
    )
    assert notes == ([] if is_unchanged else [note])


@pytest.mark.parametrize("names", ["hf", "torchtitan"])
def test_only_tensors_with_the_bytes_of_the_files_have_a_digest_of_the_files(tmp_path: Path, names: str) -> None:
    """Rows that torchtitan reorders are other bytes; their digest is that of the source."""
    write_hf(tmp_path / "hf", both_spellings()[0], config=ROPE_CONFIG)
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp", names=names)
    with source(tmp_path / "dcp", "dcp2hf") as ready:
        view, ties = decided(ready)
        files = restore_original(view, ties.decisions, None).files
    assert files is not None
    recorded = json.loads((tmp_path / "dcp" / "ckptx.json").read_text())["tensors"]
    expected = {name: row["digest"] for name, row in json_digests(tmp_path).items()}
    assert files.digests == {name: expected[name] for name in files.digests}
    reordered = [name for name in expected if "q_proj.weight" in name or "k_proj.weight" in name]
    assert (set(expected) - set(files.digests)) == (set(reordered) if names == "torchtitan" else set())
    assert len(files.reordered_digests) == (len(reordered) if names == "torchtitan" else 0)
    assert set(files.reordered_digests.values()) <= {row["digest"] for row in recorded.values()}


def json_digests(root: Path) -> dict[str, Any]:
    """Rows of a manifest of the tensors under the names of the files."""
    ckptx.convert("hf2dcp", root / "hf", root / "plain")
    return dict(json.loads((root / "plain" / "ckptx.json").read_text())["tensors"])


# Ties. The original files lack the head; the DCP has it as a second name of the embedding.


def restored_ties(
    root: Path,
    change: Callable[[TieDecision], list[TieDecision]],
    edit: Callable[[dict[str, Any]], object] | None = None,
) -> Restoration:
    tensors = llama()
    stored = {**tensors, EXTRA: value("BF16", *tensors[EMBED][1], seed=99)}
    write_hf(root / "hf", {name: each for name, each in stored.items() if name != HEAD}, config=TIED)
    ckptx.convert("hf2dcp", root / "hf", root / "dcp")
    if edit is not None:
        edit_manifest(root / "dcp", edit)
    with source(root / "dcp", "dcp2hf") as ready:
        view, ties = decided(ready)
        (decision,) = ties.decisions
        assert (decision.target, decision.source, decision.stored, decision.declared) == (HEAD, EMBED, "equal", True)
        return restore_original(view, change(decision), None)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("stored", ["equal", "different", "mismatched", "undeclared", "missing"])
def test_a_tied_name_is_dropped_only_if_the_config_ties_it_and_its_bytes_are_equal(
    tmp_path: Path, stored: Any, declared: bool
) -> None:
    def restored() -> Restoration:
        return restored_ties(tmp_path, lambda each: [replace(each, stored=stored, declared=declared)])

    if declared and stored != "equal":
        with pytest.raises(InputError, match=r'tied_to: is "model.embed_tokens.weight", whose bytes differ'):
            restored()
        return
    found = restored()
    assert (found.files is not None) is declared
    if found.files is None:
        assert found.notes == OTHER_TENSORS
    else:
        assert HEAD not in found.files.named_target.target.tensors
        assert found.files.named_target.target.tied_stored_names == {HEAD}
        assert found.files.digests.keys() == found.files.named_target.target.tensors.keys()
        assert found.files.reordered_digests == {}


def test_a_tied_name_that_no_decision_is_about_is_not_dropped(tmp_path: Path) -> None:
    found = restored_ties(tmp_path, lambda each: [])
    assert (found.files, found.notes) == (None, OTHER_TENSORS)


def test_a_name_that_the_manifest_ties_to_another_group_is_not_dropped(tmp_path: Path) -> None:
    """The manifest contradicts the config, though both names are tied to something."""

    def edit(manifest: dict[str, Any]) -> None:
        rows = manifest["tensors"]
        rows[HEAD]["tied_to"] = EXTRA
        rows[EXTRA]["digest"] = rows[HEAD]["digest"]

    def decisions(each: TieDecision) -> list[TieDecision]:
        return [each, replace(each, target=EXTRA, source=NORM)]

    changed = restored_ties(tmp_path / "changed", decisions, edit)
    assert (changed.files, changed.notes) == (None, OTHER_TENSORS)
    assert restored_ties(tmp_path / "unchanged", decisions).files is not None


@pytest.mark.parametrize("are_both_dropped", [False, True])
def test_a_name_that_the_manifest_does_not_tie_to_a_tensor_of_the_files_is_not_dropped(
    tmp_path: Path, are_both_dropped: bool
) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        if are_both_dropped:  # the files lack both, and each is tied to the other
            manifest["tensors"][EMBED]["tied_to"] = HEAD
            manifest["origin"]["tensors"].pop(EMBED)
        else:
            del manifest["tensors"][HEAD]["tied_to"]

    found = restored_ties(tmp_path, lambda each: [each], edit)
    assert (found.files, found.notes) == (None, OTHER_TENSORS)


def test_files_with_a_tensor_that_the_source_lacks_are_not_restored(tmp_path: Path) -> None:
    found = restored_ties(
        tmp_path, lambda each: [each], lambda manifest: manifest["origin"]["tensors"].update({"lost.weight": 0})
    )
    assert (found.files, found.notes) == (None, OTHER_TENSORS)


def test_ties_of_several_names_are_one_group(tmp_path: Path) -> None:
    """A chain of pairs in any order, of which one pair may differ: names beyond it are not dropped."""
    pairs = [("a", "b"), ("b", "c"), ("c", "d")]
    for broken, order in product((None, 0, 1, 2), ((0, 1, 2), (2, 1, 0), (0, 2, 1))):
        decisions = [
            TieDecision(*pairs[at], "different" if at == broken else "equal", "alias", None, True, "") for at in order
        ]
        groups = _tie_groups(decisions)
        for first, second in product("abcd", repeat=2):
            low, high = sorted(("abcd".index(first), "abcd".index(second)))
            is_one = broken is None or not low <= broken < high
            assert (groups.get(first, first) == groups.get(second, second)) is is_one, (broken, order, first, second)


@pytest.mark.parametrize("is_known", [False, True])
def test_the_note_on_files_of_an_unknown_class_advises_its_code(tmp_path: Path, is_known: bool) -> None:
    write_hf(tmp_path / "hf", llama(head=False), config=TIED)
    ckptx.convert("to-dcp", tmp_path / "hf", tmp_path / "dcp")
    unknown = {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}
    (tmp_path / "dcp" / "config.json").write_text(json.dumps({**CONFIG, **({} if is_known else unknown)}))
    notes = ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "out").notes
    advice = (
        f", because it is unknown whether NobodyForCausalLM ties {HEAD}; to restore the original files, pass "
        "--trust-remote-code, with the code of the class next to config.json"
    )
    (note,) = [note for note in notes if note.startswith(OTHER_TENSORS)]
    assert note == OTHER_TENSORS[0] + ("" if is_known else advice)
