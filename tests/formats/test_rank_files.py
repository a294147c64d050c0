"""Parts that ranks wrote are refused, whatever they are called; steps, versions and sizes are checkpoints as before."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.rank_names import file_count_from_name, group_of, world_size_from_name
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.unsupported import kind_of_name
from tests.support.checkpoint_writers import (
    LLAMA,
    Value,
    llama,
    names_in,
    value,
    write_dcp,
    write_hf,
    write_index,
    write_safetensors,
)

WHOLE = llama()
SIZED = {
    **LLAMA, "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 24,
    "num_attention_heads": 2,
}  # fmt: skip
Tensors = dict[str, Value]


def by_tensor_parallel(rank: int, ranks: int) -> Tensors:
    """Rows of matrices, and all of what has one dim."""
    cut = {}
    for at, (name, (dtype, shape, data)) in enumerate(WHOLE.items()):
        is_cut = len(shape) == 2 and shape[0] >= ranks
        cut[name] = value(dtype, shape[0] // ranks, shape[1], seed=100 * rank + at) if is_cut else (dtype, shape, data)
    return cut


def by_rows(rank: int, ranks: int) -> Tensors:
    """Rows of everything, as FSDP has them."""
    return {
        name: value(dtype, max(1, shape[0] // ranks), *shape[1:], seed=100 * rank + at)
        for at, (name, (dtype, shape, _)) in enumerate(WHOLE.items())
    }


def by_stage(rank: int, ranks: int) -> Tensors:
    """Whole tensors, some on each rank, of layers with the same patterns of names."""
    names = [name for name in WHOLE if ".layers." in name]
    rest = [name for name in WHOLE if ".layers." not in name]
    return {name: WHOLE[name] for name in [*names[rank::ranks], *(rest if rank == 0 else [])]}


CUTS: Mapping[str, Callable[[int, int], Tensors]] = {"tp": by_tensor_parallel, "fsdp": by_rows, "pp": by_stage}

FILES = (
    "model_{}", "model-{}", "model{}", "model_rank{}", "model-rank-{}", "model_rank_{:02d}", "rank{}", "rank_{}",
    "rank-{:03d}", "tp_rank_{:02d}", "mp_rank_{:02d}", "tp{}", "pp_{}", "dp0_tp{}_pp0", "dp{}", "pytorch_model_{}",
    "pytorch_model-{:05d}", "consolidated.{:02d}", "shard_{}", "shard-{}", "part-{}", "params_{}", "weights.{}",
    "model_part_{}", "actor_rank_{}", "step10-rank{}", "epoch1_tp{}", "model-{}-of-8", "gpu{}", "{}",
    "model_world_size_8_rank_{}", "checkpoint_rank{}", "llama3_rank{}", "TP_{}", "Model_Rank{}", "ft-model-{}",
)  # fmt: skip
DIRECTORIES = (
    "rank_{}", "rank{}", "rank-{:02d}", "tp_rank_{:02d}", "mp_rank_{:02d}", "tp{}", "dp0_tp{}_pp0", "model_{}",
    "model_rank_{}", "actor_rank{}", "part-{}", "shard_{}", "stage{}", "gpu{}", "node_{}", "step10-rank{}", "RANK_{}",
    "weights_{}", "tp{}_pp0", "worker-{}",
)  # fmt: skip
SAID = "nothing records how"

COMMANDS: Mapping[str, Callable[[Path, Path], Any]] = {
    "inspect": lambda path, root: ckptx.inspect(path),
    "hf2dcp": lambda path, root: ckptx.convert("hf2dcp", path, root / "out"),
    "dcp2hf": lambda path, root: ckptx.convert("dcp2hf", path, root / "out", base="none"),
    "reshard": lambda path, root: ckptx.reshard(path, root / "out", base="none"),
    "reshard, a misfit allowed": lambda path, root: ckptx.reshard(
        path, root / "out", base="none", allow_config_mismatch=True
    ),
    "diff a": lambda path, root: ckptx.diff(path, path),
    "verify": lambda path, root: ckptx.verify(path, path),
    "open_checkpoint": lambda path, root: open_checkpoint(path),
}


def refused(command: str, path: Path, root: Path) -> str:
    with pytest.raises(UnsupportedError) as error:
        COMMANDS[command](path, root)
    said = str(error.value)
    assert error.value.exit_code == 4 and "\n" not in said and "choose one" not in said
    assert not (root / "out").exists()
    return said


@pytest.mark.sampled(60)
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("pattern", FILES)
def test_files_of_ranks(pattern: str, cut: str, ranks: int, tmp_path: Path) -> None:
    names = [f"{pattern.format(rank)}.safetensors" for rank in range(ranks)]
    for rank, name in enumerate(names):
        write_safetensors(tmp_path / "in" / name, CUTS[cut](rank, ranks))
    is_known, is_of_many = kind_of_name(names[0]) is not None, file_count_from_name(names[0]) is not None
    for command in COMMANDS:
        said = refused(command, tmp_path / "in", tmp_path)
        assert is_known or is_of_many or SAID in said
        for at in () if is_of_many else (0, ranks - 1):
            said = refused(command, tmp_path / "in" / names[at], tmp_path)
            assert is_known or (SAID in said and names[1 if at == 0 else 0] in said)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("config", ["none", "in each", "above"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("pattern", DIRECTORIES)
def test_directories_of_ranks(pattern: str, cut: str, ranks: int, config: str, tmp_path: Path) -> None:
    names = [pattern.format(rank) for rank in range(ranks)]
    for rank, name in enumerate(names):
        write_safetensors(tmp_path / "in" / name / "model.safetensors", CUTS[cut](rank, ranks))
        if config == "in each":
            (tmp_path / "in" / name / "config.json").write_text(json.dumps(SIZED))
    if config == "above":
        (tmp_path / "in" / "config.json").write_text(json.dumps(SIZED))
    for command in COMMANDS:
        said = refused(command, tmp_path / "in", tmp_path)
        assert SAID in said or kind_of_name(names[0]) is not None
        for at in (0, ranks - 1):
            for path in (tmp_path / "in" / names[at], tmp_path / "in" / names[at] / "model.safetensors"):
                said = refused(command, path, tmp_path)
                assert SAID in said and names[1 if at == 0 else 0] in said


@pytest.mark.parametrize("cut", ["tp", "fsdp"])
@pytest.mark.parametrize("pattern", ["rank_{}", "tp_{}", "model_rank{}"])
def test_a_dcp_of_each_rank(pattern: str, cut: str, tmp_path: Path) -> None:
    """`dcp.save` without a process group writes what it has as if it were all."""
    for rank in range(2):
        write_dcp(tmp_path / "in" / pattern.format(rank), CUTS[cut](rank, 2))
    for path in (tmp_path / "in", tmp_path / "in" / pattern.format(1)):
        assert SAID in refused("reshard", path, tmp_path)


@pytest.mark.parametrize("path", ["", "tp_0", "tp_1", "tp_0/pp_1", "tp_1/pp_0/model.safetensors"])
def test_directories_of_ranks_inside_of_each_other(path: str, tmp_path: Path) -> None:
    for tp in range(2):
        for pp in range(2):
            write_safetensors(tmp_path / f"in/tp_{tp}/pp_{pp}/model.safetensors", by_tensor_parallel(tp, 2))
    assert SAID in refused("reshard", tmp_path / "in" / path, tmp_path)


@pytest.mark.parametrize("path", ["tp_rank_0", "tp_rank_0/pp_rank_0"])
def test_one_directory_in_one_of_several(path: str, tmp_path: Path) -> None:
    for tp in range(2):
        write_safetensors(tmp_path / f"in/tp_rank_{tp}/pp_rank_0/model.safetensors", by_tensor_parallel(tp, 2))
    said = refused("reshard", tmp_path / "in" / path, tmp_path)
    assert SAID in said and "tp_rank_1" in said


@pytest.mark.parametrize("ending", [".pt", ".bin", ".pth"])
@pytest.mark.parametrize(
    "pattern", ["model_{}", "model-rank-{}", "pytorch_model_{}", "tp_{}", "shard_{}", "weights.{}"]
)
@pytest.mark.parametrize("command", ["inspect", "reshard"])
def test_files_of_torch(pattern: str, ending: str, command: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    names = [pattern.format(rank) + ending for rank in range(2)]
    (tmp_path / "in").mkdir()
    for name in names:
        torch.save({"model.embed.weight": torch.ones(2, 4), "model.norm.weight": torch.ones(4)}, tmp_path / "in" / name)
    said = refused(command, tmp_path / "in", tmp_path)
    assert kind_of_name(names[0]) is not None or (SAID in said and names[1] in said)
    said = refused(command, tmp_path / "in" / names[0], tmp_path)
    assert kind_of_name(names[0]) is not None or (SAID in said and names[1] in said)


@pytest.mark.parametrize("of", [
    {"name": "model_world_size_8_rank_0"}, {"name": "rank-0-of-2"}, {"name": "model_rank0", "world_size": "4"},
    {"name": "tp_0", "tp_size": "2"},
])  # fmt: skip
@pytest.mark.parametrize("directory", [True, False])
def test_one_part_that_was_left_over(of: dict[str, str], directory: bool, tmp_path: Path) -> None:
    """No sibling is there, but a world size is, in the name or in the header."""
    metadata = {key: value for key, value in of.items() if key != "name"}
    file = f"{of['name']}/model.safetensors" if directory else f"{of['name']}.safetensors"
    path = write_safetensors(tmp_path / "in" / file, by_tensor_parallel(0, 2), metadata)
    for each in (path, path.parent):
        said = refused("reshard", each, tmp_path)
        assert (
            re.search(r" (1 part of 2 is|\d parts of \d are) missing, and nothing records how", said) and SAID in said
        )


OTHERS = (
    ("step-100", "step-200"), ("step_0", "step_1"), ("checkpoint-500", "checkpoint-1000"), ("epoch_0", "epoch_1"),
    ("epoch-1", "epoch-2"), ("global_step10", "global_step20"), ("iter_0000100", "iter_0000200"), ("v1", "v2"),
    ("v0", "v1"), ("model-7b", "model-13b"), ("llama-3.1-8b", "llama-3.1-70b"), ("qwen2", "qwen3"), ("rank8", "rank16"),
    ("lora-rank-1", "lora-rank-2"), ("MODEL-tp1", "MODEL-tp2"), ("MODEL-tp2-pp2", "MODEL-tp4-pp2"), ("run0", "run1"),
    ("seed_0", "seed_1"), ("phase0", "phase1"), ("trial-0", "trial-1"), ("ba100", "ba200"), ("exp0", "exp1"),
    ("model-2024-01-01", "model-2024-01-02"), ("0", "1"), ("10", "20"), ("a0", "a1"), ("model_3", "model_7"),
    ("model_1", "model_2"), ("model_v0", "model_v1"), ("step0-model", "step1-model"), ("gpt-2", "gpt-3"),
    ("ckpt_0", "ckpt_1"), ("best_0", "best_1"), ("iter0", "iter1"), ("1b-step0", "1b-step1"), ("tp4", "tp8"),
)  # fmt: skip


@pytest.mark.sampled(40)
@pytest.mark.parametrize("names", OTHERS, ids=" ".join)
@pytest.mark.parametrize("form", ["hf", "hf without a config", "dcp", "files"])
def test_what_is_numbered_otherwise_is_a_checkpoint_by_itself(
    names: tuple[str, str], form: str, tmp_path: Path
) -> None:
    root = tmp_path / "in"
    if form == "files" and names[0] in ("0", "a0"):
        pytest.skip("files called 0 and 1 that hold the same tensors may be those of ranks, and are refused")
    if form == "files" and kind_of_name(f"{names[0]}.safetensors") is not None:
        pytest.skip("TensorRT-LLM calls its files like this, and they are refused by name")
    for name in names:
        if form == "dcp":
            write_dcp(root / name, WHOLE, config=SIZED)
        elif form == "files":
            write_safetensors(root / f"{name}.safetensors", WHOLE)
        else:
            write_hf(root / name, WHOLE, config=SIZED if form == "hf" else None)
    with pytest.raises(InputError) as error:
        open_checkpoint(root)
    assert "choose one" in str(error.value) and all(name in str(error.value) for name in names)
    for name in names:
        path = root / (f"{name}.safetensors" if form == "files" else name)
        assert len(open_checkpoint(path).tensors) == len(WHOLE)
    assert ckptx.reshard(path, tmp_path / "out", base="none").exit == 0


@pytest.mark.parametrize("pattern", ["rank_{}", "tp_{}", "model_{}", "gpu{}", "part-{}"])
@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_a_whole_model_by_its_config_is_one_whatever_it_is_called(
    pattern: str, above: bool, form: str, tmp_path: Path
) -> None:
    """Replicas of data parallel ranks, or an ensemble."""
    for rank in range(2):
        write = write_hf if form == "hf" else write_dcp
        write(tmp_path / "in" / pattern.format(rank), WHOLE, config=None if above else SIZED)
    if above:
        (tmp_path / "in" / "config.json").write_text(json.dumps(SIZED))
    with pytest.raises(InputError, match="contains 2 checkpoints; choose one: "):
        open_checkpoint(tmp_path / "in")
    assert ckptx.reshard(tmp_path / "in" / pattern.format(0), tmp_path / "out", base="none").exit == 0


def test_a_whole_model_beside_parts_is_offered_alone(tmp_path: Path) -> None:
    for rank in range(2):
        write_hf(tmp_path / f"rank_{rank}", by_tensor_parallel(rank, 2))
    write_hf(tmp_path / "final", WHOLE)
    with pytest.raises(InputError, match=r"contains 1 checkpoint and 2 parts of others, one per rank; pass \S*final$"):
        open_checkpoint(tmp_path)


def test_accelerates_models_by_number_are_checkpoints(tmp_path: Path) -> None:
    """Two models of one run, each a DCP of its own."""
    for number in range(2):
        write_dcp(tmp_path / f"pytorch_model_fsdp_{number}", WHOLE)
        write_dcp(tmp_path / f"optimizer_{number}", {"optim.w": WHOLE["model.norm.weight"]})
    assert open_checkpoint(tmp_path).parts[0].directory == "pytorch_model_fsdp_0"
    assert len(open_checkpoint(tmp_path / "pytorch_model_fsdp_1").tensors) == len(WHOLE)


@pytest.mark.parametrize("name", ["model-{:05d}-of-00002", "ft-model-{:05d}-of-00002", "model_{}_of_2", "a-{}of2"])
def test_files_of_several_without_their_index(name: str, tmp_path: Path) -> None:
    files = [f"{name.format(number)}.safetensors" for number in (1, 2)]
    parts = [by_stage(0, 2), by_stage(1, 2)]
    for file, tensors in zip(files, parts, strict=True):
        write_safetensors(tmp_path / "in" / file, tensors)
    assert "the index that lists their tensors is missing" in refused("inspect", tmp_path / "in", tmp_path)
    assert len(open_checkpoint(tmp_path / "in" / files[0]).tensors) == len(parts[0])  # a look at one file
    for command in ("hf2dcp", "reshard"):
        assert "is one of 2 files of a checkpoint" in refused(command, tmp_path / "in" / files[0], tmp_path)
    (tmp_path / "in" / files[1]).unlink()
    assert "is one of 2 files of a checkpoint" in refused("hf2dcp", tmp_path / "in", tmp_path)
    assert ckptx.convert("hf2dcp", tmp_path / "in" / files[0], tmp_path / "out", allow_config_mismatch=True).exit == 0
    write_index(tmp_path / "in", dict.fromkeys(parts[0], files[0]))
    assert ckptx.convert("hf2dcp", tmp_path / "in", tmp_path / "out2").exit == 0  # one file, and an index that says so


@pytest.mark.parametrize("shards", [2, 3])
def test_shards_with_an_index_are_one_checkpoint(shards: int, tmp_path: Path) -> None:
    write_hf(tmp_path / "in", WHOLE, shards=shards)
    assert len(open_checkpoint(tmp_path / "in").tensors) == len(WHOLE)


def test_a_refusal_is_one_of_ours(tmp_path: Path) -> None:
    """What cannot be opened beside a part neither hides it nor ends the look."""
    write_safetensors(tmp_path / "rank_0" / "model.safetensors", by_rows(0, 2))
    (tmp_path / "rank_1").mkdir()
    (tmp_path / "rank_1" / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(UnsupportedError, match=SAID):
        open_checkpoint(tmp_path / "rank_0")
    (tmp_path / "rank_1" / "model.safetensors").unlink()
    assert open_checkpoint(tmp_path / "rank_0").tensors  # no weights, no rank
    with pytest.raises(CkptxError):
        open_checkpoint(tmp_path / "rank_1")


@pytest.mark.parametrize("name", ["pytorch_model.bin.0", "x", "", "0" * 40, "-".join(["rank"] * 99), "rank" * 1000])
def test_names_that_say_nothing(name: str) -> None:
    assert group_of(name, [name, "model.safetensors"], directories=False) is None
    assert world_size_from_name(name) is None
    assert names_in  # the helper is there for failures


def test_a_large_directory_is_looked_at_once(tmp_path: Path) -> None:
    """10,000 names cost no more than one pass for each family."""
    names = [f"step{step}-rank{rank}.safetensors" for step in range(100) for rank in range(100)]
    family = group_of(names[0], names, directories=False)
    assert family is not None and len(family.names) == 100
