"""Names and entries between namings, on real models of transformers and on names alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptx.architecture.lookup import find_architecture
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import full_region
from ckptx.errors import InputError
from ckptx.formats.registry import open_checkpoint
from ckptx.mapping.name_index import NameIndex, fill_pattern
from ckptx.mapping.ops import Conversion, Op
from ckptx.mapping.rules import NameRules
from tests.support.models import EVERY, build, read_hf
from tests.support.stored_tensors import assert_reads, bits, numbers, read, store

MODELS = ("mixtral", "qwen3-moe", "llava", "gemma3-vlm", "gpt-neox", "gpt2", "qwen2.5-vl", "llama-tied")
MORE = tuple(name for name in EVERY if name not in MODELS)


def rules_of(model: Any, saved: Path, **settings: Any) -> NameRules:
    config, _ = type(model).config_class.get_config_dict(saved)  # reads infinities, which plain JSON lacks
    known = find_architecture(config)
    assert known is not None and known.known_from == "table"
    return NameRules(known.conversions(config), known.base_prefix, known.model_name_patterns, **settings)


def wanted_by(model: Any, tensors: Any) -> dict[str, torch.Tensor]:
    """The state dict, without the tied names that the checkpoint leaves out."""
    return {name: tensor for name, tensor in model.state_dict().items() if name in tensors}


def check_both_ways(name: str, tmp_path: Path, **settings: Any) -> None:
    model = build(EVERY[name])
    model.save_pretrained(tmp_path, max_shard_size=EVERY[name].shard, **settings)
    disk = read_hf(tmp_path)
    source = open_checkpoint(tmp_path)
    rules = rules_of(model, tmp_path, shape_of=lambda wanted: shapes.get(wanted))
    shapes = {wanted: tuple(tensor.shape) for wanted, tensor in model.state_dict().items()}

    renamed = rules.to_model(source.tensors)

    assert not renamed.unknown
    tied = set(model.state_dict()) - set(renamed.tensors)
    assert tied <= set(model.all_tied_weights_keys), tied
    assert_reads(tmp_path, renamed.tensors, wanted_by(model, renamed.tensors))
    assert {each for members in renamed.sources.values() for each in members} == set(disk)
    assert all(rules.model_name(each) in renamed.tensors for each in disk)
    # Names of one pattern share what is found for the first of them.
    alone = {each: rules_of(model, tmp_path).destinations([each]) for each in disk}
    assert all(rules.destinations([each]) == alone[each] for each in disk)
    assert all(rules.model_name(each) == rules_of(model, tmp_path).model_name(each) for each in disk)

    back = rules.to_disk(renamed.tensors, disk_names=list(disk))
    assert not back.unknown
    assert_reads(tmp_path, back.tensors, disk)
    if not settings:
        assert_reads(tmp_path, rules.to_disk(renamed.tensors).tensors, disk)


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_is_its_state_dict_and_comes_back(name: str, tmp_path: Path) -> None:
    check_both_ways(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_every_saved_model_is_its_state_dict_and_comes_back(name: str, tmp_path: Path) -> None:
    check_both_ways(name, tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "llava"])
def test_a_model_saved_in_its_own_names_stays(name: str, tmp_path: Path) -> None:
    check_both_ways(name, tmp_path, save_original_format=False)


def test_gpt2_without_its_prefix_is_known_and_keeps_its_spelling(tmp_path: Path) -> None:
    model = build(EVERY["gpt2"])
    model.save_pretrained(tmp_path)
    rules = rules_of(model, tmp_path)
    hub = {
        name.removeprefix("transformer."): entry for name, entry in open_checkpoint(tmp_path).tensors.items()
    }  # as on the hub
    renamed = rules.to_model(hub)
    assert_reads(tmp_path, renamed.tensors, wanted_by(model, renamed.tensors))
    assert renamed.notes == [f'base model prefix "transformer." added to {len(hub)} names']
    assert renamed.sources["transformer.wte.weight"] == ("wte.weight",)
    assert rules.model_name("h.1.attn.c_attn.weight") == "transformer.h.1.attn.c_attn.weight"
    assert list(rules.to_disk(renamed.tensors, disk_names=hub).tensors) == list(hub)
    assert list(rules.to_disk(renamed.tensors).tensors) == list(renamed.tensors)


def test_a_spelling_that_saving_would_not_write_comes_back(tmp_path: Path) -> None:
    model = build(EVERY["llava"])
    model.save_pretrained(tmp_path)
    rules = rules_of(model, tmp_path)
    hub = {
        name.replace("vision_tower.", "vision_tower.vision_model."): entry
        for name, entry in open_checkpoint(tmp_path).tensors.items()
    }
    renamed = rules.to_model(hub)
    assert_reads(tmp_path, renamed.tensors, wanted_by(model, renamed.tensors))
    assert set(rules.to_disk(renamed.tensors, disk_names=hub).tensors) == set(hub)
    assert set(rules.to_disk(renamed.tensors).tensors) == set(open_checkpoint(tmp_path).tensors)


# -- names alone

GATE, UP = "model.layers.*.mlp.experts.*.gate_proj.weight", "model.layers.*.mlp.experts.*.up_proj.weight"
FUSED = "model.layers.*.mlp.experts.gate_up_proj"
MOE = Conversion((GATE, UP), (FUSED,), (Op("merge"), Op("concat", 1)))
NORM = "model.norm.weight"


def moe(**settings: Any) -> NameRules:
    return NameRules([MOE], "model", ["model.layers.*.mlp.gate.weight", NORM], **settings)


def entries(*names: str, shape: tuple[int, ...] = (4, 6)) -> dict[str, TensorEntry]:
    dtype, numel = DTYPES_BY_NAME["F32"], 24
    return {name: TensorEntry(name, dtype, shape, (Chunk(full_region(shape), name, 0, 4 * numel),)) for name in names}


def experts(layers: int = 1, count: int = 3) -> dict[str, TensorEntry]:
    return entries(*(fill_pattern(leaf, (n, e)) for n in range(layers) for e in range(count) for leaf in (GATE, UP)))


def test_experts_of_a_layer_become_one_tensor() -> None:
    renamed = moe().to_model(experts(layers=2))
    assert {name: entry.shape for name, entry in renamed.tensors.items()} == {
        "model.layers.0.mlp.experts.gate_up_proj": (3, 8, 6),
        "model.layers.1.mlp.experts.gate_up_proj": (3, 8, 6),
    }
    chunks = renamed.tensors["model.layers.1.mlp.experts.gate_up_proj"].chunks
    assert [(chunk.region.offsets, chunk.file) for chunk in chunks][:2] == [
        ((0, 0, 0), "model.layers.1.mlp.experts.0.gate_proj.weight"),
        ((1, 0, 0), "model.layers.1.mlp.experts.1.gate_proj.weight"),
    ]
    assert renamed.sources["model.layers.0.mlp.experts.gate_up_proj"] == (
        *(fill_pattern(GATE, (0, e)) for e in range(3)), *(fill_pattern(UP, (0, e)) for e in range(3)),
    )  # fmt: skip


def test_eleven_experts_are_in_the_order_of_their_numbers() -> None:
    tensors = dict(sorted(experts(count=11).items()))
    chunks = moe().to_model(tensors).tensors["model.layers.0.mlp.experts.gate_up_proj"].chunks
    assert all(f".experts.{chunk.region.offsets[0]}." in chunk.file for chunk in chunks) and len(chunks) == 22


@pytest.mark.parametrize("missing", [fill_pattern(UP, (0, 1)), fill_pattern(GATE, (0, 0)), fill_pattern(UP, (0, 2))])
def test_a_missing_part_is_named(missing: str) -> None:
    tensors = experts()
    del tensors[missing]
    with pytest.raises(
        InputError, match=rf'"{re.escape(missing)}": missing, but required for .*mlp.experts.gate_up_proj"'
    ):
        moe().to_model(tensors)


def test_a_projection_that_is_missing_altogether_is_named() -> None:
    with pytest.raises(InputError, match=rf'"{re.escape(fill_pattern(UP, (0, 0)))}": missing, but required for'):
        moe().to_model(entries(*(fill_pattern(GATE, (0, e)) for e in range(3))))


def test_lost_last_experts_are_seen_by_the_shape() -> None:
    rules = moe(shape_of=lambda name: (4, 8, 6) if name.endswith("gate_up_proj") else None)
    assert rules.to_model(experts(count=4))
    with pytest.raises(InputError, match=r"made of 6 tensors.*has shape \[3, 8, 6\], expected \[4, 8, 6\]"):
        rules.to_model(experts(count=3))


def test_two_spellings_of_one_tensor_are_refused() -> None:
    with pytest.raises(InputError, match=r'"norm.weight" and "model.norm.weight".*remove one'):
        moe().to_model(entries("norm.weight", "model.norm.weight"))
    twice = {**experts(), **entries("layers.0.mlp.experts.1.gate_proj.weight")}
    with pytest.raises(InputError, match="are two names of one tensor"):
        moe().to_model(twice)
    both = {**experts(), **entries("model.layers.0.mlp.experts.gate_up_proj", shape=(3, 8, 6))}
    with pytest.raises(InputError, match=r'both are "model.layers.0.mlp.experts.gate_up_proj"'):
        moe().to_model(both)


def test_what_no_rule_knows_passes_through() -> None:
    tensors = {**experts(), **entries("mtp.fc.weight", "model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv")}
    renamed = moe().to_model(tensors)
    assert renamed.unknown == ["mtp.fc.weight", "model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv"]
    assert renamed.tensors["mtp.fc.weight"] is tensors["mtp.fc.weight"]
    assert moe().model_name("mtp.fc.weight") is None
    assert set(moe().to_disk(renamed.tensors, disk_names=tensors).tensors) == set(tensors)


def test_a_layer_behind_the_last_keeps_its_spelling() -> None:
    rules = moe(is_extra=lambda name: name.startswith("model.layers.1."))
    tensors = {**experts(layers=2), **entries("model.layers.1.mlp.gate.weight")}
    renamed = rules.to_model(tensors)
    assert "model.layers.0.mlp.experts.gate_up_proj" in renamed.tensors
    assert sorted(renamed.unknown) == sorted(name for name in tensors if name.startswith("model.layers.1."))
    assert set(rules.to_disk(renamed.tensors, disk_names=tensors).tensors) == set(tensors)


CHAIN = [Conversion(("norm0",), ("norm1",)), Conversion(("norm1",), ("norm2",))]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("norm0", "norm1"), {"norm1": ("norm0",), "norm2": ("norm1",)}),
        (("norm1", "norm2"), {"norm1": ("norm1",), "norm2": ("norm2",)}),
    ],
)
def test_a_chain_of_renamings_is_not_applied_to_its_own_result(
    names: tuple[str, ...], expected: dict[str, tuple[str, ...]]
) -> None:
    rules = NameRules(CHAIN)
    tensors = entries(*names)
    renamed = rules.to_model(tensors)
    assert renamed.sources == expected and not renamed.unknown
    assert rules.to_disk(renamed.tensors, disk_names=names).sources == {
        old: (new,) for new, (old,) in expected.items()
    }  # fmt: skip


def test_saving_takes_the_first_of_several_spellings() -> None:
    old, new = Conversion(("old.*.weight",), ("x.*.weight",)), Conversion(("new.*.weight",), ("x.*.weight",))
    own = Conversion(("x.*.weight",), ("x.*.weight",))
    tensors = entries("x.3.weight")
    assert list(NameRules([new, old]).to_disk(tensors).tensors) == ["new.3.weight"]
    assert list(NameRules([own, new, old]).to_disk(tensors).tensors) == ["x.3.weight"]
    assert list(NameRules([own, new, old]).to_disk(tensors, ["old.3.weight"]).tensors) == ["old.3.weight"]
    assert NameRules([own, new, old]).to_model(tensors).unknown == []


def test_fused_on_disk_is_split_and_fused_again(tmp_path: Path) -> None:
    fused = Conversion(("h.*.qkv",), ("h.*.q", "h.*.k", "h.*.v"), (Op("chunk"),))
    rules, tensor = NameRules([fused]), numbers(12, 5)
    renamed = rules.to_model({"h.7.qkv": store(tmp_path, "h.7.qkv", tensor, "grid")})
    assert list(renamed.tensors) == ["h.7.q", "h.7.k", "h.7.v"]
    assert renamed.sources["h.7.k"] == ("h.7.qkv",)
    assert torch.equal(bits(read(tmp_path, renamed.tensors["h.7.k"])), bits(tensor[4:8]))
    assert_reads(tmp_path, rules.to_disk(renamed.tensors).tensors, {"h.7.qkv": tensor})
    del renamed.tensors["h.7.k"]
    with pytest.raises(InputError, match=r'"h.7.k": missing, but required for'):
        rules.to_disk(renamed.tensors)


def test_patterns_with_numbers_and_with_stars_in_a_component() -> None:
    index = NameIndex([("a.0.b.*.w",), ("a.*.b.*.w",), ("t.shard_*.w",)])
    assert [tuple(fit) for fit in index.find("a.0.b.5.w")] == [(0, 0, (5,)), (1, 0, (0, 5))]
    assert [tuple(fit) for fit in index.find("a.2.b.5.w")] == [(1, 0, (2, 5))]
    assert [tuple(fit) for fit in index.find("t.shard_12.w")] == [(2, 0, (12,))]
    assert list(index.find("t.shard_x.w")) == list(index.find("a.2.b.w")) == []
    shards = Conversion(("t.shard_*.w",), ("t.w",), (Op("concat"),))
    renamed = NameRules([shards]).to_model(entries("t.shard_0.w", "t.shard_1.w", "t.shard_2.w"))
    assert renamed.tensors["t.w"].shape == (12, 6)
