"""`reshard --ep`: each rank finds its experts in its own file, as stock torch shards them; no tensor is lost."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptx
from ckptx.errors import CkptxError
from ckptx.layout.expert_parallel import INNER_SHARDINGS, find_position
from tests.support import reshard_ranks
from tests.support.models import EVERY, load, outputs, read_hf, write
from tests.support.pool import GlooPool
from tests.support.sharded_files import Blocks, coverage_fault, rank_of, read_dcp_regions, read_shard_regions
from tests.support.slow import slow_but

MODELS = (
    "mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss", "gemma4-moe", "qwen2-moe", "glm4-moe", "qwen3-vl-moe", "llama4",
    "qwen3-next",
)  # fmt: skip
FORMS = [("dcp", None), ("dcp", "model"), ("safetensors", None)]
TITAN_MODELS = ("qwen3-moe", "deepseek-v3")
INNER_DIMS = {"experts": 0, "rows": 1, "columns": 2}
MESH = {"tp": 2, "dp_shard": 2}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Function that writes the HF checkpoint of a model once."""
    root = tmp_path_factory.mktemp("experts")

    def checkpoint(model: str) -> Path:
        if not (root / model).exists():
            write(EVERY[model], root / model)
        return root / model

    return checkpoint


def regions_of(root: Path) -> Blocks:
    return read_dcp_regions(root) if (root / ".metadata").exists() else read_shard_regions(root)


def experts_in(blocks: Blocks, shapes: dict[str, tuple[int, ...]]) -> dict[str, int | None]:
    """Name of each tensor of experts -> its expert, or None if it has all experts of a layer."""
    positions = {name: find_position(name, shapes[name]) for name in blocks}
    return {name: position.expert for name, position in positions.items() if position is not None}


def shapes_of(blocks: Blocks) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, from its regions."""
    return {
        name: tuple(
            max(region.offsets[dim] + region.sizes[dim] for region in regions) for dim in range(len(regions[0].sizes))
        )
        for name, regions in blocks.items()
    }


@pytest.mark.parametrize(
    ("model", "form", "inner"),
    slow_but(
        [*product(MODELS, FORMS, INNER_SHARDINGS), *product(TITAN_MODELS, [("dcp", "torchtitan")], INNER_SHARDINGS)],
        [
            ("mixtral", ("dcp", "model"), "experts"),
            ("qwen3-moe", ("dcp", None), "rows"),
            ("gpt-oss", ("safetensors", None), "columns"),
            ("deepseek-v3", ("safetensors", None), "experts"),
            ("qwen3-moe", ("dcp", "torchtitan"), "rows"),
        ],
    ),
)
def test_a_rank_stores_the_experts_of_its_ep_rank(
    checkpoints: Any, tmp_path: Path, model: str, form: tuple[str, str | None], inner: str
) -> None:
    hf, cut, ep, num_experts = checkpoints(model), tmp_path / "cut", 2, 4
    report = ckptx.reshard(hf, cut, to=form[0], names=form[1], **MESH, ep=ep, ep_inner=inner)
    assert report.layout is not None and (report.layout["ep"], report.layout["ep_inner"]) == (ep, inner)
    assert ckptx.verify(hf, cut).ok
    blocks = regions_of(cut)
    shapes = shapes_of(blocks)
    experts = experts_in(blocks, shapes)
    assert experts
    per_rank = num_experts // ep
    for name, expert in experts.items():
        assert coverage_fault(shapes[name], {each._replace(file="") for each in blocks[name]}) is None
        for region in blocks[name]:
            ep_rank = rank_of(region.file) % ep
            first = region.offsets[0] if expert is None else expert
            last = first + (region.sizes[0] if expert is None else 1) - 1
            assert ep_rank * per_rank <= first <= last < (ep_rank + 1) * per_rank, (name, region)
    # All other tensors lie where they lie without --ep.
    ckptx.reshard(hf, tmp_path / "dense", to=form[0], names=form[1], **MESH)
    dense = regions_of(tmp_path / "dense")
    assert dense.keys() == blocks.keys()
    assert {name for name in blocks if place_of(blocks[name]) != place_of(dense[name])} <= experts.keys()


def place_of(regions: list[Any]) -> list[tuple[int, Any, Any]]:
    return sorted((rank_of(region.file), region.offsets, region.sizes) for region in regions)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("tp", "dp_shard", "ep", "inner"), [
    (2, 2, 2, "experts"), (2, 2, 4, "experts"), (2, 2, 2, "rows"), (2, 2, 2, "columns"), (1, 4, 2, "rows"),
])  # fmt: skip
def test_stock_torch_opens_only_the_file_of_the_rank(
    pool: GlooPool, checkpoints: Any, tmp_path: Path, tp: int, dp_shard: int, ep: int, inner: str
) -> None:
    """A state dict of DTensors over an EP mesh, loaded by `dcp.load`; and without --ep, other files are opened."""
    hf, whole = checkpoints("mixtral"), tmp_path / "whole.safetensors"
    ckptx.reshard(hf, tmp_path / "cut", to="dcp", names="model", tp=tp, dp_shard=dp_shard, ep=ep, ep_inner=inner)
    ckptx.reshard(hf, tmp_path / "dense", to="dcp", names="model", tp=tp, dp_shard=dp_shard)
    tensors = load(hf).state_dict()
    names = [name for name in tensors if ".mlp.experts." in name]
    assert names
    save_file({name: tensors[name].contiguous() for name in names}, whole)
    dim = INNER_DIMS[inner]
    for rank, (wrong, opened) in enumerate(
        pool.run(reshard_ranks.load_experts, 4, tmp_path / "cut", whole, names, ep, dim)
    ):
        assert wrong == []
        assert set(opened) == {".metadata", f"__{rank}_0.distcp"}
    without = pool.run(reshard_ranks.load_experts, 4, tmp_path / "dense", whole, names, ep, dim)
    assert [wrong for wrong, _ in without] == [[]] * 4
    assert any(len(opened) > 2 for _, opened in without)


def test_a_wrong_expert_on_one_rank_is_named(checkpoints: Any, tmp_path: Path) -> None:
    hf = checkpoints("qwen3-moe")
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(hf / "config.json", other)
    wrong = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors = read_hf(hf)
    tensors[wrong] = tensors[wrong].flip(0).contiguous()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    for source, cut in ((hf, tmp_path / "cut"), (other, tmp_path / "wrong")):
        ckptx.reshard(source, cut, to="dcp", **MESH, ep=2)
    changed = [file.name for file in (tmp_path / "cut").glob("*.distcp")
               if file.read_bytes() != (tmp_path / "wrong" / file.name).read_bytes()]  # fmt: skip
    assert changed == ["__3_0.distcp"]  # EP rank 1, its second expert
    shutil.copy(tmp_path / "wrong" / changed[0], tmp_path / "cut")
    report = ckptx.verify(hf, tmp_path / "cut")
    assert report.exit == 1 and [row["name"] for row in report.differing] == [wrong]


def test_optimizer_state_lies_with_its_experts(checkpoints: Any, tmp_path: Path) -> None:
    tensors = load(checkpoints("qwen3-moe")).state_dict()
    state = {f"optim.state.{name}.exp_avg": tensor.float() for name, tensor in tensors.items()}
    dcp.save({"model": tensors, **state}, checkpoint_id=tmp_path / "step", no_dist=True)
    ckptx.reshard(tmp_path / "step", tmp_path / "cut", base=checkpoints("qwen3-moe"), **MESH, ep=2, ep_inner="rows")
    blocks = read_dcp_regions(tmp_path / "cut")
    experts = [name for name in tensors if ".mlp.experts." in name]
    for name in experts:
        assert place_of(blocks[f"model.{name}"]) == place_of(blocks[f"optim.state.{name}.exp_avg"])
        assert {rank for rank, _, _ in place_of(blocks[f"model.{name}"])} == {0, 1, 2, 3}
    assert experts and ckptx.verify(tmp_path / "step", tmp_path / "cut", strict=True).ok


@pytest.mark.parametrize("pp", [1, 2])
def test_another_layout_and_hugging_face_follow(checkpoints: Any, tmp_path: Path, pp: int) -> None:
    hf = checkpoints("mixtral")
    ckptx.reshard(hf, tmp_path / "cut", **MESH, pp=pp, ep=4)
    ckptx.reshard(tmp_path / "cut", tmp_path / "other", tp=2, ep=2, to="dcp")
    ckptx.convert("to-hf", tmp_path / "other", tmp_path / "hf")
    written, original = read_hf(tmp_path / "hf"), read_hf(hf)
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
    inputs = EVERY["mixtral"].inputs()
    assert all(
        torch.equal(a, b)
        for a, b in zip(outputs(load(tmp_path / "cut"), inputs), outputs(load(hf), inputs), strict=True)
    )


def test_inspect_shows_the_ep_rank(checkpoints: Any, tmp_path: Path) -> None:
    ckptx.reshard(checkpoints("mixtral"), tmp_path / "cut", to="dcp", **MESH, ep=2)
    report = ckptx.inspect(tmp_path / "cut", ranks=True, html=tmp_path / "page.html")
    assert [row["ep"] for row in report.ranks] == [0, 1, 0, 1]
    assert report.by_rank is not None and report.by_rank.layout is not None and report.by_rank.layout["ep"] == 2
    assert (
        report.by_rank.stored_by_one_tp_rank
        == sum(1 for name in ("input_layernorm", "post_attention_layernorm", "gate") for _ in range(2)) + 1
    )
    page = (tmp_path / "page.html").read_text()
    assert "with ep 2" in page and ", ep 1: " in page


@pytest.mark.parametrize(
    ("model", "options", "said", "code"),
    [
        ("qwen3", {"tp": 2, "ep": 2}, "--ep 2: the checkpoint has no experts; leave out --ep", 2),
        ("mixtral", {"tp": 3, "ep": 3}, "--ep 3: must divide the number of experts", 2),
        ("mixtral", {"tp": 2, "ep": 4}, "--ep 4: must divide --tp x --dp-shard, the 2 ranks", 2),
        ("mixtral", {"tp": 2, "dp_shard": 4, "ep": 2}, "--ep-inner experts: each EP rank has 2 of the 4 experts", 2),
        ("mixtral", {"tp": 2, "ep_inner": "rows"}, "--ep-inner requires --ep 2 or more", 2),
    ],
)
def test_what_cannot_be_divided_is_refused(
    checkpoints: Any, tmp_path: Path, model: str, options: dict[str, Any], said: str, code: int
) -> None:
    with pytest.raises(CkptxError, match=said) as refused:
        ckptx.reshard(checkpoints(model), tmp_path / "cut", **options)
    assert refused.value.exit_code == code and not (tmp_path / "cut").exists()


# Files of Hugging Face by EP rank


@pytest.mark.parametrize("model", slow_but(["mixtral", "qwen3-moe", "deepseek-v3", "glm4-moe"], ["deepseek-v3"]))
@pytest.mark.parametrize("ep", [2, 4])
def test_the_experts_of_an_ep_rank_have_files_of_their_own(
    checkpoints: Any, tmp_path: Path, model: str, ep: int
) -> None:
    hf, grouped = checkpoints(model), tmp_path / "grouped"
    ckptx.convert("to-dcp", hf, tmp_path / "dcp")
    ckptx.convert("to-hf", tmp_path / "dcp", grouped, group_experts=ep, max_shard_size="6KB")
    files = json.loads((grouped / "model.safetensors.index.json").read_text())["weight_map"]
    ranks: dict[str, set[int | None]] = defaultdict(set)
    for name, file in files.items():
        position = find_position(name, (1, 1))
        ranks[file].add(None if position is None or position.expert is None else position.expert // (4 // ep))
    assert {rank for held in ranks.values() for rank in held} == {None, *range(ep)}
    assert all(len(held) == 1 for held in ranks.values())
    assert ckptx.verify(hf, grouped).ok
    inputs = EVERY[model].inputs()
    assert all(
        torch.equal(a, b) for a, b in zip(outputs(load(grouped), inputs), outputs(load(hf), inputs), strict=True)
    )


@pytest.mark.parametrize(
    ("model", "ep", "said"),
    [
        ("gpt-oss", 2, "has all experts of a layer, which would be in the files of one EP rank"),
        ("qwen3-moe", 3, "--group-experts 3: must divide the number of experts, .* use one of 1, 2, 4$"),
        ("qwen3", 2, "--group-experts 2: the checkpoint has no experts; leave out --group-experts"),
    ],
)
def test_experts_that_cannot_be_grouped_are_refused(
    checkpoints: Any, tmp_path: Path, model: str, ep: int, said: str
) -> None:
    with pytest.raises(CkptxError, match=said):
        ckptx.convert("to-hf", checkpoints(model), tmp_path / "grouped", group_experts=ep)
    assert not (tmp_path / "grouped").exists()
