"""Checkpoints of real trainers: FSDP2 x TP under gloo, saved and loaded by stock torch.

What the trainer saved, gathered by torch itself, is what `dcp2hf` must give, bit for bit; and what `hf2dcp` gives,
stock torch must load into sharded models. Shapes are uneven: 101 tokens, 97 inner features.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import ckptx
from ckptx.errors import InputError
from ckptx.report.report import human_bytes
from tests.support import models, torch_training
from tests.support.models import Recipe, assert_same_outputs, load, outputs, read_file, read_hf, tokens, write
from tests.support.pool import GlooPool
from tests.support.slow import slow_but
from tests.support.torch_dcp import assert_same_tensors, metadata, raw

MESHES = pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4)])


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "hf"
    write(Recipe(lambda: models.llama(num_key_value_heads=4), tokens), path)
    return path


@pytest.fixture(scope="module")
def tied_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tied") / "hf"
    write(Recipe(lambda: models.llama(num_key_value_heads=4, tie_word_embeddings=True), tokens), path)
    return path


def train(pool: GlooPool, hf: Path, out: Path, dp: int, tp: int, layout: str, threads: int = 1) -> Path:
    return torch_training.trained_once(pool, hf, out, dp, tp, layout, threads)


def assert_trained(hf: Path, out: Path, expected: dict[str, torch.Tensor]) -> None:
    """The output holds `expected`, which is not what training started from, and loads."""
    found = read_hf(out)
    assert_same_tensors(found, expected)
    before = read_hf(hf)
    assert all(raw(before[name]) != raw(tensor) for name, tensor in expected.items())
    reference = load(hf)
    reference.load_state_dict(expected, strict=False)
    assert_same_outputs(outputs(load(out), tokens()), outputs(reference, tokens()))


@pytest.mark.sampled(1)
@MESHES
def test_sharded_training_checkpoint_becomes_the_gathered_model(
    pool: GlooPool, hf: Path, tmp_path: Path, dp: int, tp: int
) -> None:
    saved = train(pool, hf, tmp_path, dp, tp, "model-optim")
    chunks = [len(entry.chunks) for name, entry in metadata(saved).items() if name.startswith("model.")]
    assert max(chunks) >= dp * tp
    ckptx.convert("dcp2hf", saved, tmp_path / "out", base=str(hf))
    assert_trained(hf, tmp_path / "out", read_file(tmp_path / "expected.safetensors"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("how", "world_size"), [("replicated", 4), ("columns", 2), ("columns", 4)])
@pytest.mark.parametrize("recipe", ["llama-untied", "mixtral"])
def test_other_ways_to_shard_become_the_gathered_model(
    pool: GlooPool, tmp_path: Path, how: str, world_size: int, recipe: str
) -> None:
    """Copies of shards on several ranks, and cuts along the last dim; Mixtral's experts are fused in 3-d tensors."""
    write(models.RECIPES[recipe], tmp_path / "hf")
    pool.run(torch_training.save_otherwise_sharded, world_size, tmp_path / "hf", tmp_path, how)
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", base=str(tmp_path / "hf"), names="model")
    expected = read_file(tmp_path / "expected.safetensors")
    assert_same_tensors(read_hf(tmp_path / "out"), expected)
    reference = load(tmp_path / "hf")
    reference.load_state_dict(expected)
    assert_same_outputs(outputs(load(tmp_path / "out"), tokens()), outputs(reference, tokens()))


@pytest.mark.parametrize("name", slow_but(models.EVERY, ("qwen3-moe", "mixtral", "gemma3-vlm", "bert-mlm", "t5")))
def test_what_a_trainer_saves_is_published_as_save_pretrained_does(tmp_path: Path, name: str) -> None:
    """A trainer knows the names of the model alone: its experts are fused, its towers lie elsewhere."""
    recipe = models.EVERY[name]
    model = models.build(recipe)
    model.save_pretrained(tmp_path / "hf", max_shard_size=recipe.shard)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", base=str(tmp_path / "hf"))
    assert_same_tensors(read_hf(tmp_path / "out"), read_hf(tmp_path / "hf"))
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "same", base=str(tmp_path / "hf"), names="model")
    kept = read_hf(tmp_path / "same")
    assert_same_tensors(kept, {each: model.state_dict()[each] for each in kept})
    report = ckptx.verify(tmp_path / "out", tmp_path / "dcp")
    assert report.ok, report


@pytest.mark.slow
@MESHES
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("layout", ["bare", "state", "app", "accelerate", "two-directories", "flattened"])
def test_every_layout_on_every_mesh(
    pool: GlooPool, hf: Path, tmp_path: Path, dp: int, tp: int, layout: str, threads: int
) -> None:
    saved = train(pool, hf, tmp_path, dp, tp, layout, threads)
    ckptx.convert("dcp2hf", saved, tmp_path / "out", base=str(hf))
    assert_trained(hf, tmp_path / "out", read_file(tmp_path / "expected.safetensors"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "prefix", "roots"),
    [
        ("bare", None, ()),
        ("model-optim", "model.", ("optim.",)),
        ("flattened", "model.", ("optimizer.",)),
        ("state", "state.model.", ("state.optimizers.",)),
        ("app", "app.model.", ("app.optim.",)),
        ("accelerate", "model.", ("optimizer.",)),
        ("two-directories", None, ("state.", "param_groups.")),
    ],
)
@pytest.mark.parametrize("threads", slow_but((1, 2), (2,)))
def test_prefix_is_found_and_optimizer_state_is_counted(
    pool: GlooPool, hf: Path, tmp_path: Path, layout: str, prefix: str | None, roots: tuple[str, ...], threads: int
) -> None:
    saved = train(pool, hf, tmp_path, 2, 1, layout, threads)
    parts = [saved] if (saved / ".metadata").exists() else sorted(path for path in saved.iterdir() if path.is_dir())
    assert all(len(list(part.glob("*.distcp"))) == 2 * threads for part in parts)
    state = {
        name: entry.properties.dtype.itemsize * entry.size.numel()
        for part in parts
        for name, entry in metadata(part).items()
        if name.startswith(roots)
    }
    assert bool(roots) == bool(state)
    objects = [
        name
        for part in parts
        for name, entry in dcp.FileSystemReader(part).read_metadata().state_dict_metadata.items()
        if isinstance(entry, BytesStorageMetadata)
    ]
    report = ckptx.convert("dcp2hf", saved, tmp_path / "out", base=str(hf))
    assert_same_tensors(read_hf(tmp_path / "out"), read_file(tmp_path / "expected.safetensors"))
    assert report.prefix == prefix
    assert report.dropped_optimizer == {"tensors": len(state), "bytes": sum(state.values())}
    assert report.objects["count"] == len(objects)
    root = "optimizer." if layout == "two-directories" else ""
    assert {row["name"] for row in report.dropped} == {f"{root}{name}" for name in state}
    assert not [note for note in report.notes if note.startswith("dropped: ")]
    lines = [line for line in report.summary().splitlines() if line.startswith("dropped: ")]
    size = f"{sum(state.values()) / 1024:.2f} KiB"
    expected = [f"dropped: {len(state)} tensors, {size} (optimizer state is not converted to HF)"] if state else []
    if objects:
        noun = "object" if len(objects) == 1 else "objects"
        expected.append(f"dropped: {len(objects)} pickled {noun}, {human_bytes(report.objects['bytes'])}")
    assert lines == expected


def test_prefix_can_be_given(pool: GlooPool, hf: Path, tmp_path: Path) -> None:
    saved = train(pool, hf, tmp_path, 2, 1, "state")
    ckptx.convert("dcp2hf", saved, tmp_path / "out", base=str(hf), source_prefix="state.model.")
    assert_same_tensors(read_hf(tmp_path / "out"), read_file(tmp_path / "expected.safetensors"))
    with pytest.raises(InputError, match="begins with"):
        ckptx.convert("dcp2hf", saved, tmp_path / "no", base=str(hf), source_prefix="elsewhere.")


def test_tied_model_saved_twice_by_fsdp_becomes_one_tensor(pool: GlooPool, tied_hf: Path, tmp_path: Path) -> None:
    saved = train(pool, tied_hf, tmp_path, 2, 1, "model-optim")
    expected = read_file(tmp_path / "expected.safetensors")
    assert raw(expected.pop("lm_head.weight")) == raw(expected["model.embed_tokens.weight"])
    assert {"model.lm_head.weight", "model.model.embed_tokens.weight"} < set(metadata(saved))
    report = ckptx.convert("dcp2hf", saved, tmp_path / "out", base=str(tied_hf))
    assert [row["stored"] for row in report.ties] == ["equal"]
    assert_trained(tied_hf, tmp_path / "out", expected)


def test_tie_that_tensor_parallelism_broke_is_given_up_in_the_config(
    pool: GlooPool, tied_hf: Path, tmp_path: Path
) -> None:
    """`parallelize_module` gives embedding and head a parameter each; from then on they are trained apart."""
    saved = train(pool, tied_hf, tmp_path, 1, 2, "model-optim")
    expected = read_file(tmp_path / "expected.safetensors")
    assert raw(expected["lm_head.weight"]) != raw(expected["model.embed_tokens.weight"])
    report = ckptx.convert("dcp2hf", saved, tmp_path / "out", base=str(tied_hf))
    assert report.config_edits == [{"key": "tie_word_embeddings", "before": True, "after": False}]
    assert any("lm_head.weight" in warning for warning in report.notes)
    assert_same_tensors(read_hf(tmp_path / "out"), expected)
    model = load(tmp_path / "out")
    assert_same_tensors(dict(model.state_dict()), expected)


# Names with wrappers


def _checkpointed(model: Any) -> dict[str, torch.Tensor]:
    layer = type(model.model.layers[0])
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layer))
    return dict(model.named_parameters())


def _compiled(model: Any) -> dict[str, torch.Tensor]:
    return dict(torch.compile(model).state_dict())


def _compiled_by_layer(model: Any) -> dict[str, torch.Tensor]:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer)
    return dict(model.state_dict())


def _compiled_and_checkpointed(model: Any) -> dict[str, torch.Tensor]:
    _checkpointed(model)
    return dict(torch.compile(model).named_parameters())


def _data_parallel(model: Any) -> dict[str, torch.Tensor]:
    return dict(torch.nn.DataParallel(model).state_dict())


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("wrap", "counts"),
    [
        (_checkpointed, {"_checkpoint_wrapped_module": 18}),
        (_compiled, {"_orig_mod": 21}),
        (_compiled_by_layer, {"_orig_mod": 18}),
        (_compiled_and_checkpointed, {"_orig_mod": 21, "_checkpoint_wrapped_module": 18}),
        (_data_parallel, {"module": 21}),
    ],
)
@pytest.mark.parametrize("prefix", ["", "model.", "state.model."])
def test_wrappers_in_names_are_removed_and_counted(
    hf: Path, tmp_path: Path, wrap: Any, counts: dict[str, int], prefix: str
) -> None:
    state = {f"{prefix}{name}": tensor.detach() for name, tensor in wrap(load(hf)).items()}
    for wrapper, count in counts.items():
        assert sum(f"{wrapper}." in name for name in state) == count
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    report = ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", base=str(hf))
    assert_same_tensors(read_hf(tmp_path / "out"), read_hf(hf))
    for wrapper, count in counts.items():
        assert f'wrapper "{wrapper}." removed from {count} names' in report.notes
    assert_same_outputs(outputs(load(tmp_path / "out"), tokens()), outputs(load(hf), tokens()))


def test_a_name_with_and_without_a_wrapper_is_one_tensor_where_the_bytes_are_equal(hf: Path, tmp_path: Path) -> None:
    state = read_hf(hf)
    wrapped = {**state, "_orig_mod.lm_head.weight": state["lm_head.weight"].clone()}
    dcp.save(dict(wrapped), storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    report = ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", base=str(hf))
    assert any("two names" in warning and "_orig_mod.lm_head.weight" in warning for warning in report.notes)
    assert report.ledger["tied"] == 1 and not report.unknown_tensors
    assert_same_tensors(read_hf(tmp_path / "out"), state)
    wrapped["_orig_mod.lm_head.weight"] += 1
    dcp.save(dict(wrapped), storage_writer=dcp.FileSystemWriter(tmp_path / "other"), no_dist=True)
    with pytest.raises(InputError, match=r'"lm_head.weight" and "_orig_mod.lm_head.weight".*different bytes'):
        ckptx.convert("dcp2hf", tmp_path / "other", tmp_path / "none", base=str(hf))


# The other way: stock torch loads what ckptx wrote


@pytest.mark.sampled(1)
@MESHES
def test_stock_torch_loads_into_a_sharded_model(pool: GlooPool, hf: Path, tmp_path: Path, dp: int, tp: int) -> None:
    ckptx.convert("hf2dcp", hf, tmp_path / "dcp")
    for wrong in pool.run(torch_training.load_and_compare, dp * tp, hf, tmp_path / "dcp", dp, tp):
        assert wrong == []


@pytest.mark.sampled(2)
@MESHES
def test_stock_torch_finds_the_head_of_a_tied_model(
    pool: GlooPool, tied_hf: Path, tmp_path: Path, dp: int, tp: int
) -> None:
    """A model with a head of its own, as a last pipeline stage has, asks for a name that the HF files leave out."""
    assert "lm_head.weight" not in read_hf(tied_hf)
    ckptx.convert("hf2dcp", tied_hf, tmp_path / "dcp", files=3)
    for wrong in pool.run(torch_training.load_and_compare, dp * tp, tied_hf, tmp_path / "dcp", dp, tp, True):
        assert wrong == []


def test_comparison_after_loading_notices_other_weights(pool: GlooPool, hf: Path, tmp_path: Path) -> None:
    ckptx.convert("hf2dcp", hf, tmp_path / "dcp")
    other = tmp_path / "other"
    changed = {"lm_head.weight": ("lm_head.weight", False)}
    write(Recipe(lambda: models.llama(num_key_value_heads=4), tokens, add=changed), other)
    for wrong in pool.run(torch_training.load_and_compare, 2, other, tmp_path / "dcp", 2, 1):
        assert wrong == ["lm_head.weight"]
