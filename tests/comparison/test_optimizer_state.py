"""`verify` of what trainers keep beside the model: moments that were cut again, renamed, shared, spoiled and lost."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptx
from ckptx.api.verify import verify
from ckptx.catalog.entry import BytesEntry
from ckptx.comparison.optimizer_state import find_uncompared_objects
from ckptx.report.documents.comparison import VerifyReport
from ckptx.report.text import diff_text, verify_verdict
from tests.support import models
from tests.support.checkpoint_writers import LLAMA, Value, llama, value, write_dcp, write_hf
from tests.support.torch_dcp import raw

CONFIG = {**LLAMA, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 8, "vocab_size": 16}
TIED = {**CONFIG, "tie_word_embeddings": True}
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def state_of(model: Mapping[str, Value], before: str = "optim.state.") -> dict[str, Value]:
    """Two moments and a counter for each parameter, and a tensor that belongs to none."""
    found = {"dataloader.position": value("I64", 1, seed=7)}
    for seed, (name, (_, shape, _)) in enumerate(model.items()):
        found[f"{before}{name}.exp_avg"] = value("F32", *shape, seed=100 + seed)
        found[f"{before}{name}.exp_avg_sq"] = value("F32", *shape, seed=200 + seed)
        found[f"{before}{name}.step"] = value("F32", seed=300 + seed)
    return found


def trained(root: Path, *, config: Mapping[str, Any] = CONFIG, changes: Mapping[str, Value] | None = None) -> Path:
    """A step of a trainer."""
    model = llama(head=not config.get("tie_word_embeddings"))
    tensors = {**{f"model.{name}": each for name, each in model.items()}, **state_of(model), **(changes or {})}
    return write_dcp(root, tensors, objects=["optim.param_groups"], config=config)


def differing(found: VerifyReport) -> dict[str, str]:
    return {row["name"]: row["what"] for row in found.differing}


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"tp": 4, "dp_shard": 2}])
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_what_was_cut_again_is_equal(tmp_path: Path, mesh: dict[str, int], config: dict[str, Any]) -> None:
    """Under pp the head of a tied model lies on a stage of its own, with a copy of its moments."""
    step = trained(tmp_path / "step", config=config)
    ckptx.reshard(step, tmp_path / "cut", **mesh)
    for there in (verify(step, tmp_path / "cut"), verify(tmp_path / "cut", step)):
        assert (there.exit, differing(there)) == (0, {})
        assert there.compared >= there.tensors >= 4 * len(llama(head=False)) + 1
        assert not any("compared" in note or "judged" in note for note in there.notes)


@pytest.mark.parametrize("with_state", [True, False])
def test_another_model_is_compared_with_the_state_and_only_then(tmp_path: Path, with_state: bool) -> None:
    copies = {f"ema.{name}": value(each[0], *each[1], seed=500) for name, each in llama().items()}
    first = trained(tmp_path / "first", changes=copies)
    second = trained(tmp_path / "second", changes={**copies, f"ema.{NORM}": value("BF16", 8, seed=900)})
    if not with_state:
        write_hf(second := tmp_path / "hf", llama(), config=CONFIG)
    found = verify(first, second, source_prefix="model.")
    assert any("ema" in name for name in differing(found)) is with_state
    assert any("not compared" in note and "ema." in note for note in found.notes) is not with_state


@pytest.mark.parametrize("mesh", [{}, {"tp": 2, "pp": 2}])
@pytest.mark.parametrize("name", [f"optim.state.{NORM}.exp_avg_sq", f"optim.state.{EMBED}.step", "dataloader.position"])
@pytest.mark.parametrize("what", ["content", "shape", "dtype", "missing"])
def test_state_that_differs_is_named(tmp_path: Path, mesh: dict[str, int], name: str, what: str) -> None:
    step = trained(tmp_path / "step")
    dtype, shape, data = state_of(llama())[name]
    other: Value = {
        "content": (dtype, shape, bytes([data[0] ^ 1]) + data[1:]),
        "shape": (dtype, (*shape, 1), data),
        "dtype": ("I32" if dtype == "F32" else "F64", shape, data),
        "missing": (dtype, shape, data),
    }[what]
    spoiled = trained(tmp_path / "spoiled", changes={name: other})
    if what == "missing":
        model = llama()
        tensors = {**{f"model.{each}": tensor for each, tensor in model.items()}, **state_of(model)}
        del tensors[name]
        spoiled = write_dcp(tmp_path / "lost", tensors, objects=["optim.param_groups"], config=CONFIG)
    if mesh:
        ckptx.reshard(spoiled, tmp_path / "cut", **mesh)
        spoiled = tmp_path / "cut"
    for found in (verify(step, spoiled), verify(spoiled, step)):
        assert (found.exit, differing(found)) == (1, {name: what})


def test_a_prefix_is_no_difference(tmp_path: Path) -> None:
    """Some trainers write names of the model with a prefix, and those of its state without, or with another one."""
    model = llama()
    tensors = {f"state.model.{name}": each for name, each in model.items()}
    other = write_dcp(tmp_path / "other", {**tensors, **state_of(model)}, config=CONFIG)
    found = verify(trained(tmp_path / "step"), other)
    assert (found.exit, found.compared) == (0, 4 * len(model) + 1)
    assert [note for note in found.notes if "pickled object" in note] == [
        'not compared: 1 pickled object in only one checkpoint: "optim.param_groups"'
    ]


def test_published_names_and_those_of_the_model_are_one(tmp_path: Path) -> None:
    """Which name is which, stock transformers says: tensors of random bytes are known by them."""
    recipe = models.EVERY["llava"]
    model = models.build(recipe)
    model.save_pretrained(tmp_path / "hf")
    held = model.state_dict()
    known = {raw(tensor): name for name, tensor in held.items()}
    names = {known[raw(tensor)]: name for name, tensor in models.read_hf(tmp_path / "hf").items()}
    assert len(names) == len(held) and any(new != old for new, old in names.items())
    last = list(names)[-1]

    def step(root: Path, called: Mapping[str, str], factor: float) -> Path:
        moments = {f"optim.state.{called[name]}.exp_avg": tensor.float() * 2 for name, tensor in held.items()}
        moments[f"optim.state.{called[last]}.exp_avg"] *= factor
        tensors = {f"model.{called[name]}": tensor for name, tensor in held.items()}
        dcp.save({**tensors, **moments}, checkpoint_id=root, no_dist=True)
        shutil.copy(tmp_path / "hf" / "config.json", root)
        return root

    published, own = (
        step(tmp_path / "published", names, 1),
        step(tmp_path / "own", dict(zip(held, held, strict=True)), 1),
    )
    for found in (verify(published, own), verify(own, published)):
        assert (found.exit, found.compared, found.differing) == (0, 2 * len(held), [])
    other = step(tmp_path / "other", names, 1.5)
    assert differing(verify(own, other)) == {f"optim.state.{last}.exp_avg": "content"}


def test_state_of_one_side_alone_is_said(tmp_path: Path) -> None:
    hf, step = write_hf(tmp_path / "hf", llama(), config=CONFIG), trained(tmp_path / "step")
    found = verify(hf, step)
    assert (found.exit, found.compared) == (0, len(llama()))
    count = 3 * len(llama())
    assert f"{step}: not compared: {count} optimizer tensors, 1 other tensor" in found.notes
    step = write_dcp(tmp_path / "counter", llama() | {"step": value("I64")}, config=CONFIG)
    assert f"{step}: not compared: 1 other tensor" in verify(hf, step).notes


def test_a_step_without_its_optimizer_state_is_incomplete(tmp_path: Path) -> None:
    step = trained(tmp_path / "step")
    lost = write_dcp(tmp_path / "lost", {f"model.{name}": each for name, each in llama().items()}, config=CONFIG)
    counts = {"optimizer": 3 * len(llama()), "other": 1, "objects": 1}
    lack = f"{counts['optimizer']} optimizer tensors, 1 other tensor, 1 pickled object not compared"
    for sides in ((step, lost), (lost, step)):
        found, strict = verify(*sides), verify(*sides, strict=True)
        assert (found.exit, strict.exit) == (0, 1)
        assert found.not_compared == strict.not_compared == counts
        assert found.total == found.compared == len(llama()), "total does not count what was not compared"
        assert verify_verdict(found).endswith(f"from both checkpoints; {lack}")
        assert verify_verdict(strict) == f"INCOMPLETE: {lack}; {len(llama())} tensors are equal"
    assert verify(step, step, strict=True).exit == verify(lost, lost, strict=True).exit == 0
    assert not any(verify(step, step).not_compared.values())


def test_state_that_has_no_name_in_common_is_not_compared(tmp_path: Path) -> None:
    model = {f"model.{name}": each for name, each in llama().items()}
    a = write_dcp(tmp_path / "a", model | {"step": value("I64")}, config=CONFIG)
    b = write_dcp(tmp_path / "b", model | {"dataloader.position": value("I64")}, config=CONFIG)
    found = verify(a, b, strict=True)
    assert (found.exit, found.differing) == (1, [])
    assert found.not_compared == {"optimizer": 0, "other": 2, "objects": 0}
    assert found.notes[-2:] == [f"{each}: not compared: 1 other tensor" for each in (a, b)]


def test_diff_lists_the_state_that_it_does_not_compare(tmp_path: Path) -> None:
    step, lost = trained(tmp_path / "step"), write_hf(tmp_path / "lost", llama(), config=CONFIG)
    found = ckptx.diff(step, lost)
    counts = f"{3 * len(llama())} optimizer tensors, 1 other tensor, 1 pickled object"
    assert found.exit == 0 and f"{step}: not compared: {counts}" in found.notes
    assert found.not_compared == {"optimizer": 3 * len(llama()), "other": 1, "objects": 1}
    assert found.total == found.compared == len(llama())
    assert diff_text(found).endswith(f"equal shapes and dtypes; {counts} not compared")


def test_objects_of_other_bytes_are_said(tmp_path: Path) -> None:
    step, other = trained(tmp_path / "step"), trained(tmp_path / "other")
    file = other / "__0_0.distcp"
    data = file.read_bytes()
    assert data.endswith(b"\x80\x02N.")
    file.write_bytes(data[:-2] + b"\x89.")  # False where None was
    found = verify(step, other)
    assert found.exit == 0
    assert found.notes[-1] == 'not compared: 1 pickled object with different bytes: "optim.param_groups"'
    assert found.not_compared == {"optimizer": 0, "other": 0, "objects": 1}
    assert verify(step, other, strict=True).exit == 1


def test_an_object_that_ends_behind_its_file_is_none_that_is_equal() -> None:
    class Files:
        def read_into(self, file: str, offset: int, views: list[memoryview]) -> int:
            return 0

    endless = BytesEntry("x", "f", 0, 1 << 60)
    found = find_uncompared_objects({"x": endless}, {"x": endless}, (Files(), Files()))  # type: ignore[arg-type]  # two that end at once
    assert found.notes == ('not compared: 1 pickled object with different bytes: "x"',)


class MemoryFiles:
    """Files in memory, for reads at a position."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_into(self, file: str, offset: int, views: list[memoryview]) -> int:
        assert file == "f" and len(views) == 1
        found = self.data[offset : offset + len(views[0])]
        views[0][: len(found)] = found
        return len(found)


@settings(deadline=None)
@given(st.binary(max_size=20), st.integers(0, 5), st.integers(0, 5), st.one_of(st.none(), st.integers(0, 19)))
def test_objects_are_compared_in_parts_wherever_they_are(
    data: bytes, before: int, other: int, flip: int | None
) -> None:
    changed = bytearray(data)
    if is_changed := flip is not None and flip < len(data):
        changed[flip or 0] ^= 1
    files = MemoryFiles(b"#" * before + data + b"ab"), MemoryFiles(b"~" * other + changed + b"xyz")
    entries = BytesEntry("x", "f", before, len(data)), BytesEntry("x", "f", other, len(data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptx.comparison.optimizer_state._READ_BYTES", 4)
        found = find_uncompared_objects({"x": entries[0]}, {"x": entries[1]}, files)  # type: ignore[arg-type]  # reads only
    assert found.notes == (('not compared: 1 pickled object with different bytes: "x"',) if is_changed else ())
