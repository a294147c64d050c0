"""Each step of a conversion alone: from a frozen value to a frozen value, with its notes."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.format_traits import TRAITS_BY_FORMAT
from ckptx.conversion.outputs.dcp import DcpFormat
from ckptx.conversion.outputs.huggingface import HuggingFaceFormat
from ckptx.conversion.outputs.output_format import OutputFormat
from ckptx.conversion.outputs.sharded import ShardedFormat
from ckptx.conversion.steps.dtypes import cast_tensors
from ckptx.conversion.steps.ledger import build_ledger
from ckptx.conversion.steps.naming import rename_tensors
from ckptx.conversion.steps.restoration import record_original, restore_original
from ckptx.conversion.steps.selection import select_tensors
from ckptx.conversion.steps.sharding import ShardedTarget, rank_entries, shard_tensors
from ckptx.conversion.steps.sidecars import collect_sidecars
from ckptx.conversion.steps.source_model import check_against_config, drop_training_state, refuse_without_model
from ckptx.conversion.steps.target_tensors import TargetTensors, apply_ties
from ckptx.conversion.steps.training_state import map_training_state
from ckptx.errors import InputError, InternalError, UnsupportedError, UsageError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.options.conversion import ReshardOptions, ToHfOptions
from ckptx.storage.interface import StoredFile
from tests.conversion.steps import CONFIG, TIED, decided, find_base, frozen, source, viewed
from tests.support.checkpoint_writers import llama, names_in, value, write_dcp, write_hf

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
MIXTRAL = {
    **CONFIG, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 2,
    "num_experts_per_tok": 1,
}  # fmt: skip
FORMATS: dict[str, OutputFormat] = {
    "dcp": DcpFormat(ReshardOptions("", ""), ReshardOptions("", "")), "sharded": ShardedFormat(ReshardOptions("", "")),
    "huggingface": HuggingFaceFormat(ToHfOptions("to-hf", "", "")),
}  # fmt: skip


def equal_head() -> dict[str, Any]:
    tensors = llama()
    return {**tensors, HEAD: tensors[EMBED]}


def trained(root: Path, **options: Any) -> Path:
    """A DCP with moments, one of which is called after no parameter, and an object."""
    model = llama()
    moments = {f"optimizer.state.{name}.exp_avg": tensor for name, tensor in model.items()}
    others = {
        "optimizer.state.nobody.exp_avg": value("F32", 3, seed=99),
        f"optimizer.state.{NORM}.factors": value("F32", 2, seed=98),
        "train_state.step": value("I64", seed=97),
    }
    tensors = {**{f"model.{name}": each for name, each in model.items()}, **moments, **others}
    return write_dcp(root, tensors, objects=["optimizer.param_groups"], config=CONFIG, **options)


# The config


@pytest.mark.parametrize("need", ["none", "unless recorded", "config"])
def test_a_source_without_a_config(tmp_path: Path, need: Any) -> None:
    write_hf(tmp_path / "hf", llama(), config=None)
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    for root, is_recorded in ((tmp_path / "hf", False), (tmp_path / "dcp", True)):
        with source(root) as ready:
            if need == "none" or (need == "unless recorded" and is_recorded):
                base = find_base(ready, need)
                assert base.config is None and len(base.notes) == 1
                assert "no config.json" in base.notes[0]
            else:
                with pytest.raises(InputError, match=r"has no config\.json"):
                    find_base(ready, need)


def test_files_travel_from_the_base_that_is_named(tmp_path: Path) -> None:
    write_hf(tmp_path / "base", llama(dtype="F32"), config=TIED)
    write_dcp(tmp_path / "dcp", llama(), config=CONFIG)
    with source(tmp_path / "dcp", base=str(tmp_path / "base")) as ready:
        base = find_base(ready, "config")
        assert base.sidecar_source.root == tmp_path / "base" and base.source is ready.source
        assert base.config == TIED and {each.name for each in base.dtypes.values()} == {"F32"}
    with source(tmp_path / "dcp", base="none") as ready:
        base = find_base(ready, "config")
        assert (base.catalog, base.config) == (None, None) and base.sidecar_source is ready.source


# The model


def test_a_model_that_does_not_fit_is_refused_or_noted(tmp_path: Path) -> None:
    tensors = {name: each for name, each in llama().items() if name != NORM}
    write_hf(tmp_path / "hf", {**tensors, "strange": value("F32", 2)}, config=CONFIG)
    with source(tmp_path / "hf") as ready:
        view, base = viewed(ready), find_base(ready, "config")
        with pytest.raises(InputError, match="allow-config-mismatch"):
            check_against_config(view, base, allow_config_mismatch=False)
        held = check_against_config(view, base, allow_config_mismatch=True)
        assert held.match is not None and [each.name for each in held.match.mismatches] == [NORM]
        said = '1 tensor not defined by LlamaForCausalLM, written unchanged: "strange" (outside the modules of the '
        assert held.notes[0] == f"{said}class)"


@pytest.mark.parametrize(("declared", "is_equal"), product([True, False], [True, False]))
def test_ties_are_decided_by_config_and_bytes(tmp_path: Path, declared: bool, is_equal: bool) -> None:
    write_hf(tmp_path / "hf", equal_head() if is_equal else llama(), config=TIED if declared else CONFIG)
    with source(tmp_path / "hf") as ready:
        view, ties = decided(ready)
    every = sum(entry.numel for entry in view.tensors.values())
    is_one = declared and is_equal
    assert ties.parameters == (every - view.tensors[HEAD].numel if is_one else every)
    assert bool(ties.representatives) == is_one
    assert any("the config ties two tensors that differ" in note for note in ties.notes) == (declared and not is_equal)


def test_what_stays_behind_is_named(tmp_path: Path) -> None:
    with source(trained(tmp_path / "dcp")) as ready:
        view = viewed(ready)
        left = drop_training_state(view, ready.source.objects, "stays")
    names = {row["name"] for row in left.tensors}
    assert names == {*view.optimizer, *view.other} and len(view.other) == 1
    assert {row["reason"] for row in left.tensors} == {"optimizer state stays", "training state stays"}
    assert left.optimizer is not None and left.optimizer["tensors"] == len(view.optimizer)
    assert left.objects is not None and left.objects["count"] == 1 and not left.notes


def test_a_checkpoint_of_optimizer_state_alone_is_no_model(tmp_path: Path) -> None:
    write_dcp(tmp_path / "dcp", {"optimizer.state.w.exp_avg": value("F32", 2)}, config=CONFIG)
    with (
        source(tmp_path / "dcp", allow_config_mismatch=True) as ready,
        pytest.raises(InputError, match="no model tensors"),
    ):
        refuse_without_model(viewed(ready))


# Which tensors


@pytest.mark.parametrize(
    ("tied", "can_alias", "stored", "aliases"),
    [
        ("auto", True, {EMBED}, {HEAD: EMBED}),
        ("auto", False, {EMBED}, {}),
        ("alias", True, {EMBED}, {HEAD: EMBED}),
        ("copy", True, {EMBED, HEAD}, {}),
        ("copy", False, {EMBED, HEAD}, {}),
        ("drop", True, {EMBED}, {}),
        ("drop", False, {EMBED}, {}),
    ],
)
def test_ties_are_carried_out(
    tmp_path: Path, tied: str, can_alias: bool, stored: set[str], aliases: dict[str, str]
) -> None:
    write_hf(tmp_path / "hf", equal_head(), config=TIED)
    with source(tmp_path / "hf") as ready:
        view, ties = decided(ready)
    before = frozen(view.tensors)
    target = apply_ties(view, ties.decisions, tied=tied, can_alias=can_alias)
    assert target.tensors.keys() & {EMBED, HEAD} == stored
    assert target.aliases == aliases and target.tied_stored_names == {EMBED, HEAD}
    assert target.tensors.keys() == target.source_names.keys() == target.stored_names.keys()
    assert view.tensors == before


def test_a_tie_that_is_none_is_not_dropped(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", llama(), config=TIED)
    with source(tmp_path / "hf") as ready:
        view, ties = decided(ready)
    with pytest.raises(InputError, match="--tied drop would lose one"):
        apply_ties(view, ties.decisions, tied="drop", can_alias=False)


def test_targets_are_not_changed_but_made_anew(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", equal_head(), config=TIED)
    with source(tmp_path / "hf") as ready:
        view, ties = decided(ready)
    target = apply_ties(view, ties.decisions, tied="auto", can_alias=True)
    before = [frozen(getattr(target, each.name)) for each in fields(target)]
    copied = target.with_copies([HEAD])
    assert copied.aliases == {} and copied.copied_aliases == {HEAD: EMBED}
    assert copied.source_names[HEAD] == EMBED and copied.tensors[HEAD].name == HEAD
    renamed = copied.renamed(lambda name: f"x.{name}")
    assert renamed.copied_aliases == {f"x.{HEAD}": f"x.{EMBED}"} and renamed.tensors["x." + NORM].name == "x." + NORM
    assert renamed.written_stored_names() == target.written_stored_names() == set(view.tensors) - {HEAD}
    selected = target.select([NORM, EMBED])
    assert list(selected.tensors) == [NORM, EMBED] and selected.aliases == target.aliases
    assert target.select([NORM]).aliases == {}
    assert copied.select([NORM, HEAD]).copied_aliases == {}
    assert copied.select([EMBED, HEAD]).copied_aliases == {HEAD: EMBED}
    assert target.with_copies([]) is target
    assert [frozen(getattr(target, each.name)) for each in fields(target)] == before
    with pytest.raises(FrozenInstanceError):
        target.tensors = {}  # type: ignore[misc]


def experts() -> dict[str, Any]:
    """A Mixtral of two experts, as it is published."""
    tensors = {name: each for name, each in llama().items() if ".mlp." not in name}
    for layer in range(2):
        lead = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{lead}.gate.weight"] = value("BF16", 2, 8, seed=layer)
        for expert, (leaf, shape) in product(range(2), {"w1": (24, 8), "w2": (8, 24), "w3": (24, 8)}.items()):
            tensors[f"{lead}.experts.{expert}.{leaf}.weight"] = value("BF16", *shape, seed=layer + 2 * expert)
    return tensors


def test_names_of_the_model_put_experts_together(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", experts(), config=MIXTRAL)
    with source(tmp_path / "hf") as ready:
        view, ties = decided(ready)
    target = apply_ties(view, ties.decisions, tied="auto", can_alias=True)
    assert rename_tensors(view, target, names=None, default=None).target is target
    assert rename_tensors(view, target, names="hf", default=None).target is target
    named = rename_tensors(view, target, names="model", default=None)
    fused = "model.layers.1.mlp.experts.gate_up_proj"
    assert named.target.tensors[fused].shape == (2, 48, 8)
    assert len(named.target.stored_names[fused]) == len(named.naming.sources[fused]) == 4
    assert named.target.written_stored_names() == set(view.tensors)
    assert fused in named.target.source.tensors and fused not in target.source.tensors
    assert named.naming.loaded_name(fused) == fused
    assert named.naming.target_names(view)[NORM] == NORM
    assert not any("experts" in name for name in named.naming.target_names(view))


def test_names_are_chosen_before_dtypes_and_copies(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", equal_head(), config=TIED)
    with source(tmp_path / "hf") as ready:
        view, ties = decided(ready)
    target = apply_ties(view, ties.decisions, tied="auto", can_alias=True)
    cast = {name: entry._replace(dtype=DTYPES_BY_NAME["F64"]) for name, entry in target.tensors.items()}
    for later in (replace(target, tensors=cast), target.with_copies([HEAD])):
        with pytest.raises(AssertionError):
            rename_tensors(view, later, names="model", default=None)


def test_names_of_an_unknown_class_stay(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", llama(), config={"architectures": ["Nobody"]})
    with source(tmp_path / "hf", base="none") as ready:
        view = viewed(ready)
        target = TargetTensors.from_source(view.catalog, view.tensors)
    assert rename_tensors(view, target, names=None, default="model").target is target
    with pytest.raises(UnsupportedError, match="naming of this class is unknown"):
        rename_tensors(view, target, names="model", default=None)


def test_original_files_are_remembered_until_they_are_other_files(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", equal_head(), shards=2, config=TIED)
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    with source(tmp_path / "hf") as ready:
        own = record_original(viewed(ready)).original
    with source(tmp_path / "dcp") as ready:
        view, ties = decided(ready)
        assert record_original(view).original == own
        found = restore_original(view, ties.decisions, None).files
        assert found is not None and found.original == own
        assert list(found.named_target.target.tensors) == list(own.tensors if own else ())
        assert found.digests.keys() == found.named_target.target.tensors.keys()
        less = replace(view, tensors={name: each for name, each in view.tensors.items() if name != NORM})
        gone = restore_original(less, ties.decisions, None)
        assert gone.files is None and "does not describe these tensors" in gone.notes[0]


@pytest.mark.parametrize("output", FORMATS)
def test_what_a_format_chooses(tmp_path: Path, output: str) -> None:
    write_hf(tmp_path / "hf", equal_head(), config=TIED)
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    with source(tmp_path / "dcp") as ready:
        view, ties = decided(ready)
        chosen = select_tensors(find_base(ready, "config"), view, ties, FORMATS[output], ready.options)
    assert (chosen.restored_files is not None) == (output == "huggingface")
    assert (chosen.original is not None) == (output != "huggingface")
    assert (HEAD in chosen.named_target.target.aliases) == (output != "huggingface")


# Dtypes


def test_a_cast_keeps_what_is_no_float(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", {**llama(), "counts": value("I64", 4)}, config=CONFIG)
    with source(tmp_path / "hf") as ready:
        view, base = viewed(ready), find_base(ready, "config")
        named = rename_tensors(view, TargetTensors.from_source(view.catalog, view.tensors), names=None, default=None)
        same, half = (cast_tensors(view, named, base, wanted) for wanted in ("auto", "fp16"))
        assert cast_tensors(view, named, base, "bf16").was_cast is False
        with pytest.raises(UsageError, match="--dtype base"):
            cast_tensors(view, named, base, "base")
    assert same.target is named.target and same.uncast is None and not same.was_cast
    assert half.was_cast and half.uncast == []
    assert {name for name, each in half.target.tensors.items() if each.dtype is not DTYPES_BY_NAME["F16"]} == {"counts"}
    assert named.target.tensors[NORM].dtype is DTYPES_BY_NAME["BF16"]


def test_dtypes_of_a_base_are_counted(tmp_path: Path) -> None:
    mixed = {name: value("F32", *each[1]) if name == NORM else each for name, each in llama().items()}
    write_hf(tmp_path / "base", {name: each for name, each in mixed.items() if name != HEAD}, config=TIED)
    write_dcp(tmp_path / "dcp", llama(dtype="F32"), config=CONFIG)
    with source(tmp_path / "dcp", base=str(tmp_path / "base"), dtype="base") as ready:
        view, base = viewed(ready), find_base(ready, "config")
        named = rename_tensors(view, TargetTensors.from_source(view.catalog, view.tensors), names=None, default=None)
        cast = cast_tensors(view, named, base, "base")
    assert cast.base_dtype_counts == {"matching": len(llama()) - 1, "not_in_base": [HEAD], "quantized_in_base": []}
    assert {name for name, each in cast.target.tensors.items() if each.dtype is DTYPES_BY_NAME["F32"]} == {NORM, HEAD}
    assert len(cast.notes) == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("in_float32", ["none", "one", "norms", "all but one", "all"])
def test_a_base_keeps_tensors_in_float32_unless_all_of_it_is(tmp_path: Path, in_float32: str, dtype: str) -> None:
    """A base in one dtype says nothing about what a cast must keep."""
    names = list(llama())
    kept = {
        "none": [], "one": [NORM], "norms": [name for name in names if "norm" in name], "all but one": names[1:],
        "all": names,
    }[in_float32]  # fmt: skip
    mixed = {name: value("F32", *each[1]) if name in kept else each for name, each in llama().items()}
    write_hf(tmp_path / "base", mixed, config=CONFIG)
    write_dcp(tmp_path / "dcp", llama(dtype="F32"), config=CONFIG)
    with source(tmp_path / "dcp", base=str(tmp_path / "base")) as ready:
        view, base = viewed(ready), find_base(ready, "config")
        named = rename_tensors(view, TargetTensors.from_source(view.catalog, view.tensors), names=None, default=None)
        cast = cast_tensors(view, named, base, dtype)
    in_target = {name for name, each in cast.target.tensors.items() if each.dtype is DTYPES_BY_NAME["F32"]}
    expected = {*names} if dtype == "fp32" else {*kept} if in_float32 != "all" else set()
    assert in_target == expected
    assert set(cast.uncast or ()) == (set() if dtype == "fp32" else expected)


# The cut


@pytest.mark.parametrize("alone", [True, False])
def test_a_name_on_another_stage_becomes_a_copy(tmp_path: Path, alone: bool) -> None:
    write_hf(tmp_path / "hf", equal_head(), config=TIED)
    for pp in (1, 2):
        with source(tmp_path / "hf", tp=2, pp=pp) as ready:
            view, ties = decided(ready)
            named = rename_tensors(
                view,
                apply_ties(view, ties.decisions, tied="auto", can_alias=True),
                names=None,
                default=None,
            )
            sharded = shard_tensors(
                view, named.target, named.naming, ready.options, ties.decisions, own_files_only=alone
            )
        is_copy = alone or pp == 2
        assert sharded.target.copied_aliases == ({HEAD: EMBED} if is_copy else {})
        assert sharded.target.aliases == ({} if is_copy else {HEAD: EMBED})
        assert (
            sharded.sharded_model is not None
            and sharded.sharded_model.placements.keys() == sharded.target.tensors.keys()
        )
        blocks = sharded.sharded_model.placements[NORM].blocks
        assert len(blocks) == (2 if alone else 1)
        names = {name: f"p.{name}" for name in (*sharded.target.tensors, *sharded.target.aliases)}
        renamed = sharded.renamed(names)
        assert (
            renamed.sharded_model is not None
            and renamed.sharded_model.placements[f"p.{NORM}"] is sharded.sharded_model.placements[NORM]
        )


@pytest.mark.parametrize("shape", [(8, 1), (8, 8), (2, 2)])
def test_scales_of_a_layer_after_the_last_are_replicated_like_their_weights(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """MTP layers, for which the class has names but no layer."""
    query = "self_attn.q_proj.weight"
    tensors = llama()
    for layer in range(3):
        name = f"model.layers.{layer}.{query}"
        tensors |= {name: value("F8_E4M3", 8, 8), f"{name}_scale": value("F32", *shape)}
    write_hf(tmp_path / "hf", tensors, config=CONFIG)
    with source(tmp_path / "hf", tp=2) as ready:
        view = viewed(ready)
        named = rename_tensors(view, TargetTensors.from_source(view.catalog, view.tensors), names=None, default=None)
        sharded = shard_tensors(view, named.target, named.naming, ready.options, [], own_files_only=False)
    model = sharded.sharded_model
    assert (
        f'2 tensors not defined or not used by LlamaForCausalLM ("model.layers.2.{query}", ...): replicated '
        "across TP ranks; nothing to do if you expect these tensors"
    ) in sharded.notes
    assert model is not None
    assert {*model.unknown_tensors} == {f"model.layers.2.{query}", f"model.layers.2.{query}_scale"}
    shards = [
        [len(model.placements[f"model.layers.{n}.{query}{end}"].blocks) for n in range(3)] for end in ("", "_scale")
    ]
    assert shards == [[2, 2, 1], [2, 2, 1]]


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2}, {"tp": 2, "dp_shard": 2, "pp": 2}, {"tp": 3}], ids=str)
def test_a_manifest_lists_every_block_and_which_of_them_are_replicas(
    tmp_path: Path, mesh: dict[str, int], to: str
) -> None:
    """Replicas are the blocks of a region that an earlier file has, which shards of a tensor never are."""
    write_hf(tmp_path / "hf", llama(), config=CONFIG)
    ckptx.reshard(tmp_path / "hf", tmp_path / "made", to=to, **mesh)
    manifest = json.loads((tmp_path / "made" / "ckptx.json").read_text())
    replicated = 0
    for cut in manifest["cuts"]:
        regions = list(zip(cut["offsets"], cut["sizes"], strict=True))
        assert cut["replicas"] == [index for index, region in enumerate(regions) if region in regions[:index]]
        assert len(cut["files"]) == len(regions) == len({*cut["files"]})
        replicated += bool(cut["replicas"])
    assert (replicated > 0) is (to == "safetensors" and mesh.get("tp", 1) > 1)
    assert {row.get("cut") for row in manifest["tensors"].values()} - {None} == {*range(len(manifest["cuts"]))}


def test_every_byte_of_a_rank_is_counted() -> None:
    rows = rank_entries({"a": 3, "b": 4, "c": 5}, {"a": 0, "b": 3, "c": 0}, ParallelDims(tp=2, pp=2))
    assert [(row["bytes"], row["files"]) for row in rows] == [(8, ["a", "c"]), (0, []), (0, []), (4, ["b"])]
    assert [(row["stage"], row["tp"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_state_lies_with_its_parameter(tmp_path: Path) -> None:
    with source(trained(tmp_path / "dcp"), tp=2, pp=2) as ready:
        view = viewed(ready, with_state=True)
        named = rename_tensors(view, TargetTensors.from_source(view.catalog, view.tensors), names=None, default=None)
        sharded = shard_tensors(view, named.target, named.naming, ready.options, [], own_files_only=False)
        state = map_training_state(view, ready.files, sharded, {name: name for name in view.tensors})
        whole = map_training_state(
            view, ready.files, ShardedTarget(named.target), {name: name for name in view.tensors}
        )
    assert sharded.sharded_model is not None
    query = "model.layers.1.self_attn.q_proj.weight"
    placed = sharded.sharded_model.placements[query]
    assert state.placements[f"optimizer.state.{query}.exp_avg"] == (placed.stage, placed.blocks)
    assert placed.stage == 1 and len(placed.blocks) == 2
    assert state.without_parameter == ("optimizer.state.nobody.exp_avg",)
    assert state.replicated == (f"optimizer.state.{NORM}.factors",)
    assert list(state.objects) == ["optimizer.param_groups"] and len(state.notes) == 2
    assert state.written_stored_names() == {*view.optimizer, *view.other}
    assert whole.placements == {} and whole.without_parameter == ()


# What goes along, and what is counted


def test_config_is_written_anew_where_it_changes(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", llama(), config={**CONFIG, "quantization_config": {"bits": 4}})
    (tmp_path / "hf" / "quantize_config.json").write_text("{}")
    (tmp_path / "elsewhere").write_text("{}")
    (tmp_path / "hf" / "tokenizer.json").symlink_to(tmp_path / "elsewhere")
    names = ["config.json", "quantize_config.json", "tokenizer.json"]
    with source(tmp_path / "hf") as ready:
        base = find_base(ready, "config")
    plain = collect_sidecars(base, names, [])
    copied = {name: file.location for name, file in plain.files.items() if isinstance(file, StoredFile)}
    assert copied == {name: tmp_path / "hf" / name for name in names} and plain.edits == ()
    assert len(plain.notes) == 1 and "tokenizer.json" in plain.notes[0]
    edit = {"key": "quantization_config", "before": {"bits": 4}, "after": None}
    edited = collect_sidecars(base, names, [edit])
    written = edited.files["config.json"]
    assert isinstance(written, bytes) and "quantization_config" not in json.loads(written)
    assert edited.edits == (edit,) and "quantize_config.json" not in edited.files
    assert collect_sidecars(base, names[1:], [edit]).edits == ()


class _NoSteps:
    """A plan that writes nothing."""

    @staticmethod
    def steps() -> list[Any]:
        return []


def test_a_tensor_that_ends_nowhere_is_a_defect() -> None:
    ends: dict[str, Any] = {"written": {"a"}, "shared": {"b"}, "dropped": {"c"}, "aliases": {}, "representatives": {}}
    plan: Any = _NoSteps()
    assert build_ledger(["a", "b", "c"], plan, **ends).counts_by_outcome == {
        "written": 1,
        "tied": 1,
        "decoded": 0,
        "dropped": 1,
    }
    assert build_ledger(["a"], plan, **{**ends, "shared": {"a"}, "dropped": {"a"}}).counts_by_outcome["written"] == 1
    for end in ("written", "shared", "dropped"):
        with pytest.raises(InternalError, match="would be lost"):
            build_ledger(["a", "b", "c"], plan, **{**ends, end: set()})


# Formats


@pytest.mark.parametrize("name", TRAITS_BY_FORMAT)
def test_every_format_that_is_read_says_what_follows_from_it(name: str) -> None:
    traits = TRAITS_BY_FORMAT[name]
    assert traits.name == name and traits.reshard_output in ("dcp", "safetensors")
    assert not (traits.is_published and traits.has_manifest)  # what ckptx writes for training, or what authors publish
    assert traits.is_published or traits.has_manifest or traits.is_training_format or traits.is_adapter
    assert not traits.has_archives or traits.is_training_format
    assert not traits.can_be_restored or traits.is_published


@pytest.mark.parametrize("output", FORMATS)
def test_every_format_that_is_written_can_be_read_and_says_so(tmp_path: Path, output: str) -> None:
    """The dry run, the output and what a reader makes of it agree for each format."""
    write_hf(tmp_path / "hf", equal_head(), config=TIED)
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    out = tmp_path / "out"

    def make(**options: Any) -> Any:
        if output == "huggingface":
            return ckptx.convert("dcp2hf", tmp_path / "dcp", out, **options)
        return ckptx.reshard(tmp_path / "hf", out, to="dcp" if output == "dcp" else "safetensors", tp=2, **options)

    planned, done = make(dry_run=True), make()
    assert ckptx.inspect(out).format == output
    assert {row["name"]: row["bytes"] for row in planned.files} == {
        str(path.relative_to(out)): path.stat().st_size for path in out.rglob("*") if path.is_file()
    }
    assert planned.ledger == done.ledger and planned.parameters == done.parameters
    assert json.loads((out / "ckptx.json").read_text())["format"] == output
    shutil.rmtree(out)


def test_what_steps_hand_on_is_frozen() -> None:
    """Every dataclass of the rooms of conversion and report."""
    from importlib import import_module
    from pkgutil import walk_packages

    import ckptx.conversion
    import ckptx.report

    loose = []
    for package in (ckptx.conversion, ckptx.report):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            found = vars(import_module(module.name)).values()
            classes = [each for each in found if isinstance(each, type) and each.__module__ == module.name]
            loose += [each.__name__ for each in classes if is_dataclass(each) and not each.__dataclass_params__.frozen]
    assert loose == []


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "data", [b'{"version": "1.0", "model": {"vocab": {"a"', b"", b'{"a": "\xff"}', b"version https://git-lfs.x"]
)
def test_a_malformed_file_of_the_base_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    base = write_hf(tmp_path / "base", llama(), config=CONFIG)
    write_dcp(tmp_path / "dcp", llama(), config=None)
    (base / name).write_bytes(data)
    with pytest.raises(InputError, match=re.escape(str(base / name))) as caught:
        ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", base=base)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("eval_results.json", "{"),  # no loader reads it
        ("tokenizer.json", '{"a": 1, "a": 2}'),
        ("vocab.json", '["\\ud800"]'),
        ("tokenizer_config.json", f'{{"model_max_length": {"9" * 5000}}}'),
    ],
)
def test_a_file_that_loaders_accept_or_do_not_read_is_copied(tmp_path: Path, name: str, text: str) -> None:
    base = write_hf(tmp_path / "base", llama(), config=CONFIG)
    write_dcp(tmp_path / "dcp", llama(), config=None)
    (base / name).write_text(text)
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", base=base)
    assert (tmp_path / "out" / name).read_text() == text


def test_the_config_of_a_base_stands_for_its_directory(tmp_path: Path) -> None:
    base = write_hf(tmp_path / "base", llama(), config=CONFIG)
    (base / "tokenizer.json").write_text("{}")
    write_dcp(tmp_path / "dcp", llama(), config=None)
    for name, path in (("directory", base), ("file", base / "config.json")):
        ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / name, base=path)
    assert names_in(tmp_path / "file") == names_in(tmp_path / "directory")
    assert "tokenizer.json" in names_in(tmp_path / "file")


@pytest.mark.parametrize("name", ["nodir", "no/such/dir"])
def test_a_missing_base_is_named_as_the_base(tmp_path: Path, name: str) -> None:
    write_dcp(tmp_path / "dcp", llama(), config=None)
    with pytest.raises(InputError, match=f"^--base {tmp_path / name}: no such file or directory"):
        ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "out", base=tmp_path / name)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer.model", "vocab.txt", "spiece.model", "tekken.json", "qwen.tiktoken", None]
)
def test_a_base_without_a_tokenizer_is_noted(tmp_path: Path, name: str | None) -> None:
    base = write_hf(tmp_path / "base", llama(), config=CONFIG)
    write_dcp(tmp_path / "dcp", llama(), config=None)
    if name is not None:
        (base / name).write_text("{}")
    notes = ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "out", base=base).notes
    expected = f"no tokenizer files in {base}, so the output has none; vLLM and SGLang need them"
    assert (expected in notes) == (name is None)
    assert (expected in ckptx.convert("to-hf", base, tmp_path / "hf").notes) == (name is None)
    assert expected not in ckptx.convert("to-hf", base, tmp_path / "plain", base="none").notes
    assert expected not in ckptx.convert("to-dcp", base, tmp_path / "again").notes
    assert expected not in ckptx.reshard(tmp_path / "dcp", tmp_path / "cut", tp=2, base=base).notes
