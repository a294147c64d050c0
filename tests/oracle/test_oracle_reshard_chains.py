"""Chains of `reshard`, and its options for names, ties and dtypes: what comes out at the end is what went in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptx
from tests.support.models import EVERY, Recipe, assert_same_outputs, load, outputs, read_hf, write
from tests.support.sharded_files import layer_of, rank_of, read_dcp_regions, read_shard_regions, state_of, with_layers
from tests.support.slow import slow_but
from tests.support.torch_dcp import assert_same_tensors, file_bytes, raw
from tests.support.torch_dcp import load as stock_load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RECIPES: dict[str, Recipe] = {
    "tied": with_layers("llama-tied", 5),
    "untied": with_layers("llama-untied", 4),
    "both-equal": with_layers("llama-both-equal", 4),
    "tower": with_layers("llava", 4),
    "tied-tower": with_layers("gemma3-vlm", 4),
    "experts": with_layers("mixtral", 4),
    "experts-of-some-layers": with_layers("deepseek-v3", 5),
    "conv1d": with_layers("gpt2", 4),
}
NAMES = slow_but(RECIPES, ["tied", "untied", "tower", "experts"])
MESHES: tuple[dict[str, int], ...] = ({"tp": 4, "pp": 2}, {"tp": 2, "dp_shard": 2}, {"pp": 4})
# What each step of a chain writes.
KINDS = {
    "dcp": ("dcp", "dcp", "dcp"),
    "safetensors": ("safetensors", "safetensors", "safetensors"),
    "both": ("dcp", "safetensors", "dcp"),
    "other": ("safetensors", "dcp", "safetensors"),
}


@pytest.fixture(scope="module")
def hf_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """HF checkpoints by name of a recipe, each written once."""
    root = tmp_path_factory.mktemp("hf")

    def hf(name: str) -> Path:
        if not (root / name).exists():
            write(RECIPES.get(name) or EVERY[name], root / name)
        return root / name

    yield hf


def steps_of(hf: Path, root: Path, kinds: tuple[str, ...]) -> list[Path]:
    """The checkpoint through every mesh."""
    made = [hf]
    for at, (kind, mesh) in enumerate(zip(kinds, MESHES, strict=True)):
        ckptx.reshard(made[-1], root / f"step{at}", to=kind, **mesh)
        made.append(root / f"step{at}")
    return made[1:]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kinds", slow_but(["dcp", "both", "safetensors", "other"], ["dcp", "both"]))
@pytest.mark.parametrize("name", NAMES)
def test_a_chain_ends_where_it_began(hf_of: Callable[[str], Path], tmp_path: Path, name: str, kinds: str) -> None:
    hf = hf_of(name)
    steps = steps_of(hf, tmp_path, KINDS[kinds])
    ckptx.convert("dcp2hf", steps[-1], tmp_path / "back")
    before, after = file_bytes(hf), file_bytes(tmp_path / "back")
    assert after.pop("ckptx.json")
    assert after == before
    for step in steps:
        for report in (ckptx.verify(hf, step), ckptx.diff(step, hf)):
            assert (report.exit, report.differing) == (0, [])


@pytest.mark.parametrize("kinds", slow_but(["dcp", "safetensors"], ["dcp"]))
@pytest.mark.parametrize("name", NAMES)
def test_a_chain_without_manifests_ends_in_the_same_tensors(
    hf_of: Callable[[str], Path], tmp_path: Path, name: str, kinds: str
) -> None:
    hf, recipe, at = hf_of(name), RECIPES[name], hf_of(name)
    for number, (kind, mesh) in enumerate(zip(KINDS[kinds], MESHES, strict=True)):
        ckptx.reshard(at, tmp_path / f"step{number}", to=kind, **mesh)
        at = tmp_path / f"step{number}"
        (at / "ckptx.json").unlink()
    ckptx.convert("dcp2hf", at, tmp_path / "back")
    expected = {key: value for key, value in read_hf(hf).items() if key not in recipe.aliases}
    assert_same_tensors(read_hf(tmp_path / "back"), expected)
    assert_same_outputs(outputs(load(tmp_path / "back"), recipe.inputs()), outputs(load(hf), recipe.inputs()))


def test_a_mesh_and_back_gives_the_same_bytes(hf_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Layouts do not remember how they came about."""
    first, *_ = steps_of(hf_of("tied"), tmp_path, KINDS["dcp"])
    ckptx.reshard(tmp_path / "step2", tmp_path / "again", **MESHES[0])
    assert file_bytes(tmp_path / "again") == file_bytes(first)


# Names, ties, dtypes


def load_into_model(recipe: Recipe, root: Path) -> dict[str, torch.Tensor]:
    """Stock `dcp.load` into the state dict of a model, where every byte is another one before."""
    state = recipe.model().to(recipe.dtype).state_dict()
    for tensor in state.values():
        tensor.view(-1).view(torch.uint8).fill_(0x5A)
    dcp.load(state, storage_reader=dcp.FileSystemReader(root), no_dist=True)
    return {key: tensor.detach() for key, tensor in state.items()}


@pytest.mark.parametrize(
    "name",
    slow_but(["mixtral", "llava", "gemma3-vlm", "qwen3-moe", "gpt-neox"], ["mixtral", "llava"]),
)
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "pp": 2}])
def test_names_of_the_model_load_into_it(
    hf_of: Callable[[str], Path], tmp_path: Path, name: str, mesh: dict[str, int]
) -> None:
    hf, recipe = hf_of(name), EVERY[name]
    ckptx.reshard(hf, tmp_path / "cut", to="dcp", names="model", **mesh)
    expected = state_of(recipe, hf)
    assert_same_tensors(load_into_model(recipe, tmp_path / "cut"), expected)
    # and come back under those they had
    ckptx.convert("dcp2hf", tmp_path / "cut", tmp_path / "back", names="hf")
    assert_same_tensors(read_hf(tmp_path / "back"), read_hf(hf))


@pytest.mark.parametrize("name", ["mixtral", "llava"])
def test_names_on_disk_stay_in_safetensors_if_asked(hf_of: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    hf = hf_of(name)
    ckptx.reshard(hf, tmp_path / "cut", to="safetensors", names="hf", tp=2, pp=2)
    expected = read_hf(hf)
    assert read_shard_regions(tmp_path / "cut").keys() == expected.keys() != state_of(EVERY[name], hf).keys()
    state = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "cut")), no_dist=True)
    assert_same_tensors(state, expected)


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
@pytest.mark.parametrize("name", ["llama-fp32", "gpt2"])
def test_a_cast_is_the_one_of_torch(hf_of: Callable[[str], Path], tmp_path: Path, name: str, to: str) -> None:
    hf = hf_of(name)
    report = ckptx.reshard(hf, tmp_path / "cut", to=to, dtype="bf16", tp=2, pp=2)
    expected = {key: tensor.bfloat16() for key, tensor in state_of(EVERY[name], hf).items()}
    if to == "dcp":
        found = stock_load(tmp_path / "cut")
        named = {key: tensor.bfloat16() for key, tensor in read_hf(hf).items()}
        assert_same_tensors({key: found[key] for key in named}, named)
        assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    else:
        assert_same_tensors(dict(load(tmp_path / "cut").state_dict()), expected)
    assert list(report.dtypes["after"]) == ["BF16"]


TIED = ("lm_head.weight", "model.embed_tokens.weight")


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(
    ("tied", "stored", "aliased"),
    [("auto", False, True), ("alias", False, True), ("copy", True, False), ("drop", False, False)],
)
def test_tied_names_in_a_dcp(
    hf_of: Callable[[str], Path], tmp_path: Path, tied: str, pp: int, stored: bool, aliased: bool
) -> None:
    """On the stage of the embedding the head may share its bytes; on another it is a copy, for its ranks."""
    hf = hf_of("llama-tied")
    report = ckptx.reshard(hf, tmp_path / "cut", to="dcp", tied=tied, tp=2, pp=pp)
    held = read_dcp_regions(tmp_path / "cut")
    head, embedding = TIED
    assert (head in held) == (stored or aliased)
    assert report.aliases == ({head: embedding} if aliased and pp == 1 else {})
    if head in held:
        found = stock_load(tmp_path / "cut")
        assert raw(found[head]) == raw(found[embedding]) == raw(read_hf(hf)[embedding])
        files = {each.file for each in held[head]}, {each.file for each in held[embedding]}
        ranks = {rank_of(file) for file in files[0]}, {rank_of(file) for file in files[1]}
        assert ranks == (set(range((pp - 1) * 2, pp * 2)), {0, 1})


def test_a_dropped_head_is_not_in_safetensors(hf_of: Callable[[str], Path], tmp_path: Path) -> None:
    ckptx.reshard(hf_of("llama-tied"), tmp_path / "cut", to="safetensors", tied="drop", tp=2, pp=2)
    assert read_shard_regions(tmp_path / "cut").keys() == read_hf(hf_of("llama-tied")).keys()
    ckptx.reshard(hf_of("llama-tied"), tmp_path / "auto", to="safetensors", tp=2, pp=2)
    assert read_shard_regions(tmp_path / "auto").keys() == read_hf(hf_of("llama-tied")).keys() | {TIED[0]}


# Which layers lie where


@pytest.mark.parametrize(
    ("how", "counts"),
    [
        ("even", (2, 1, 1)), ("vllm", (1, 2, 1)), ("torchtitan", (1, 2, 1)), ("hf", (1, 1, 2)), ("0,3,1", (0, 3, 1)),
        ("4,0,0", (4, 0, 0)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_layers_lie_where_the_split_says(
    hf_of: Callable[[str], Path], tmp_path: Path, how: str, counts: tuple[int, ...], to: str
) -> None:
    report = ckptx.reshard(hf_of("untied"), tmp_path / "cut", to=to, pp=3, tp=2, pp_split=how)
    held = (read_dcp_regions if to == "dcp" else read_shard_regions)(tmp_path / "cut")
    stages: dict[int, set[int]] = {}
    for name, blocks in held.items():
        layer = layer_of(name, 0)
        if layer is not None:
            stages.setdefault(layer, set()).update(rank_of(each.file) // 2 for each in blocks)
    expected = [stage for stage, count in enumerate(counts) for _ in range(count)]
    assert stages == {layer: {stage} for layer, stage in enumerate(expected)}
    assert {rank_of(each.file) // 2 for each in held["model.embed_tokens.weight"]} == {0}
    for name in ("model.norm.weight", "lm_head.weight"):
        assert {rank_of(each.file) // 2 for each in held[name]} == {2}
    spans: list[Any] = report.layout["stages"]
    assert [sum(stop - first for _, first, stop in each) for each in spans] == list(counts)
    if to == "dcp":
        expected_tensors = read_hf(hf_of("untied"))
        found = stock_load(tmp_path / "cut", expected_tensors)
        assert_same_tensors(found, expected_tensors)


# Heads that tp does not divide


def test_heads_that_do_not_divide_are_cut_all_the_same_and_said_so(
    hf_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """4 heads of queries and 2 of keys over 3 ranks: ceil-chunks, as DTensor stores them."""
    hf = hf_of("llama-untied")
    report = ckptx.reshard(hf, tmp_path / "cut", to="dcp", tp=3)
    assert [warning for warning in report.notes if warning.startswith("not aligned: ") and "8 tensors" in warning]
    assert {name.split(".")[-2] for name in report.unaligned_tensors} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert_same_tensors(stock_load(tmp_path / "cut"), read_hf(hf))
    assert ckptx.reshard(hf, tmp_path / "two", to="dcp", tp=2).unaligned_tensors == []
