"""`verify` of what trainers keep beside the model: moments that were cut again, renamed, shared, spoiled and lost."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

import ckptx
from ckptx.api.verify import verify
from ckptx.catalog.entry import BytesEntry
from ckptx.comparison.optimizer_state import describe_object_differences
from ckptx.report.documents.comparison import VerifyReport
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


def test_objects_of_other_bytes_are_said(tmp_path: Path) -> None:
    step, other = trained(tmp_path / "step"), trained(tmp_path / "other")
    file = other / "__0_0.distcp"
    data = file.read_bytes()
    assert data.endswith(b"\x80\x02N.")
    file.write_bytes(data[:-2] + b"\x89.")  # False where None was
    found = verify(step, other)
    assert found.exit == 0
    assert found.notes[-1] == 'not compared: 1 pickled object with different bytes: "optim.param_groups"'


def test_an_object_that_ends_behind_its_file_is_none_that_is_equal() -> None:
    class Files:
        def read_into(self, file: str, offset: int, views: list[memoryview]) -> int:
            return 0

    endless = BytesEntry("x", "f", 0, 1 << 60)
    notes = describe_object_differences({"x": endless}, {"x": endless}, (Files(), Files()))  # type: ignore[arg-type]  # two that end at once
    assert notes == ['not compared: 1 pickled object with different bytes: "x"']
