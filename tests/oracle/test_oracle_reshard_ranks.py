"""What each rank finds in its own files: its slices as torch and transformers place them, and nothing else to read."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckptx
from tests.layout.fake_ranks import Asked, Elements, ask
from tests.support import reshard_ranks
from tests.support.models import EVERY, read_hf, write
from tests.support.pool import GlooPool
from tests.support.sharded_files import StoredRegion as Rectangle
from tests.support.sharded_files import layer_of, rank_of, read_dcp_regions, read_shard_regions, with_layers
from tests.support.slow import slow_but
from tests.support.transformers_version import requires_tables_version

Indices = np.ndarray[Any, np.dtype[np.int64]]

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 layers, 101 tokens and 97 inner features; a head of its own."""
    path = tmp_path_factory.mktemp("llama") / "hf"
    write(with_layers("llama-untied", 4), path)
    save_file(read_hf(path), path.parent / "whole.safetensors")
    return path


def plan_of(hf: Path, pp: int) -> dict[str, tuple[int, int | None]]:
    """Stage and dim of every tensor of `llama`."""
    plan: dict[str, tuple[int, int | None]] = {}
    for name in read_hf(hf):
        layer, part = layer_of(name, 0), name.split(".")[-2]
        stage = 0 if "embed" in name else pp - 1 if layer is None else layer * pp // 4
        plan[name] = (stage, 0 if part in ROWS else 1 if part in COLUMNS else None)
    return plan


def file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (4, 1), (1, 4)])
def test_a_rank_opens_its_own_file_and_the_first_of_its_stage(
    pool: GlooPool, llama: Path, tmp_path: Path, tp: int, pp: int
) -> None:
    ckptx.reshard(llama, tmp_path / "cut", to="dcp", tp=tp, pp=pp)
    plan = plan_of(llama, pp)
    whole = llama.parent / "whole.safetensors"
    for rank, (wrong, opened) in enumerate(pool.run(reshard_ranks.load_stage, 4, tmp_path / "cut", whole, plan, tp)):
        assert wrong == []
        assert set(opened) == {".metadata", file_of(rank), file_of(rank - rank % tp)}

    sharded = {name: place for name, place in plan.items() if place[1] is not None}
    for rank, (wrong, opened) in enumerate(pool.run(reshard_ranks.load_stage, 4, tmp_path / "cut", whole, sharded, tp)):
        assert wrong == []
        assert set(opened) == {".metadata", file_of(rank)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (4, 1)])
def test_a_rank_of_fsdp_inside_tp_opens_its_own_file(
    pool: GlooPool, llama: Path, tmp_path: Path, dp: int, tp: int
) -> None:
    """A stock model after `parallelize_module` and `fully_shard`; what TP does not cut lies with the first TP rank."""
    ckptx.reshard(llama, tmp_path / "cut", to="dcp", tp=tp, dp_shard=dp)
    found = pool.run(reshard_ranks.load_fsdp, 4, llama, tmp_path / "cut", dp, tp)
    assert [wrong for wrong, _ in found] == [[]] * 4
    for rank, (_, opened) in enumerate(found):
        assert set(opened) == {".metadata", file_of(rank), file_of(rank - rank % tp)}


def test_a_rank_at_another_mesh_opens_others_too(pool: GlooPool, llama: Path, tmp_path: Path) -> None:
    """Stock torch loads it all the same; and the list of opened files is not always the short one."""
    ckptx.reshard(llama, tmp_path / "cut", to="dcp", tp=4)
    found = pool.run(
        reshard_ranks.load_stage, 4, tmp_path / "cut", llama.parent / "whole.safetensors", plan_of(llama, 2), 2
    )
    assert [wrong for wrong, _ in found] == [[]] * 4
    assert all({file_of(0), file_of(1)} < set(opened) or {file_of(2), file_of(3)} < set(opened) for _, opened in found)


def test_other_weights_would_be_noticed(pool: GlooPool, llama: Path, tmp_path: Path) -> None:
    ckptx.reshard(llama, tmp_path / "cut", to="dcp", tp=2, pp=2)
    tensors = read_hf(llama)
    tensors["model.layers.3.mlp.up_proj.weight"] = tensors["model.layers.3.mlp.up_proj.weight"].flip(0).contiguous()
    save_file(tensors, tmp_path / "other.safetensors")
    found = pool.run(
        reshard_ranks.load_stage, 4, tmp_path / "cut", tmp_path / "other.safetensors", plan_of(llama, 2), 2
    )
    assert [wrong for wrong, _ in found] == [[], [], *[["model.layers.3.mlp.up_proj.weight"]] * 2]


# Every model as transformers shards it

MODELS = ("llama-untied", "mixtral", "gemma4-moe", "phi3")
MORE_MODELS = ("gpt-neox", "qwen3-moe", "gemma4-vlm", "deepseek-v3", "gemma3-vlm", "qwen2.5-vl", "glm4-moe")
SIZES = (2, 3)

Held = dict[int, list[dict[str, Elements]]]  # TP size -> by rank, the elements it reads of each parameter


@pytest.fixture(scope="module")
def held_by_transformers() -> Callable[[str], Held]:
    """Asks for all models of a group at once."""

    @cache
    def of_group(names: tuple[str, ...]) -> dict[str, Held]:
        answers = ask(Asked([], [], [], [], list(names), SIZES))
        return {name: model.held for name, model in answers.models.items()}

    return lambda name: of_group(MODELS if name in MODELS else MORE_MODELS)[name]


def elements_of(shape: tuple[int, ...], held: list[Rectangle], rank: int) -> Indices:
    """The sorted indices of the elements that lie in the files of a rank."""
    numbered = np.arange(int(np.prod(shape))).reshape(shape)
    parts = [numbered[each.slices].ravel() for each in held if rank_of(each.file) == rank]
    return np.sort(np.concatenate(parts)) if parts else np.zeros(0, int)


def rows_of(local: Elements, dp: int, index: int) -> Indices:
    """What FSDP leaves of the local tensor of a TP rank to one of its ranks: a piece of `torch.chunk` along dim 0."""
    if not local.ndim:
        return local.ravel() if index == 0 else np.zeros(0, int)
    pieces = torch.chunk(torch.from_numpy(np.ascontiguousarray(local)), dp)
    return np.sort(pieces[index].numpy().ravel()) if index < len(pieces) else np.zeros(0, int)


@pytest.mark.sampled(5)
@requires_tables_version
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("to", ["dcp", "safetensors"])
@pytest.mark.parametrize("name", slow_but((*MODELS, *MORE_MODELS), MODELS))
def test_a_rank_has_what_transformers_gives_it(
    held_by_transformers: Callable[[str], Held], tmp_path: Path, name: str, to: str, tp: int, dp: int
) -> None:
    """But for tensors that transformers has no rule for, or a wrong one: the report calls theirs an override."""
    write(EVERY[name], tmp_path / "hf")
    report = ckptx.reshard(tmp_path / "hf", tmp_path / "cut", to=to, names="model", tp=tp, dp_shard=dp)
    held = (read_dcp_regions if to == "dcp" else read_shard_regions)(tmp_path / "cut")
    overridden = {row["pattern"] for row in report.rules if row["rule"] == "override"}
    by_rank = held_by_transformers(name)[tp]
    cut = set()
    for parameter in by_rank[0]:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", parameter)
        if pattern in overridden:
            continue
        shape = tuple(
            max(at + n for at, n in spans)
            for spans in zip(*(zip(each.offsets, each.sizes, strict=True) for each in held[parameter]), strict=True)
        )
        is_whole = all(rank[parameter].size == int(np.prod(shape)) for rank in by_rank)
        if not is_whole:
            cut.add(pattern)
        for rank in range(tp * dp):
            at, inside = divmod(rank, tp)
            expected = rows_of(by_rank[inside][parameter], dp, at)
            if is_whole and to == "dcp" and inside:
                expected = np.zeros(0, int)  # it is stored once
            assert np.array_equal(elements_of(shape, held[parameter], rank), expected), (parameter, rank)
    assert len(cut) >= 3, cut
