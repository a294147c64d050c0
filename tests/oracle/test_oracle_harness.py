"""The harness must notice what it is there to notice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.models import RECIPES, assert_same_outputs, build, load, outputs, read_file, write
from tests.support.pool import MAX_WORLD_SIZE, GlooPool, WorkerError
from tests.support.slow import slow_but
from tests.support.torch_dcp import assert_same_tensors


def test_comparison_of_tensors_notices_bits_shapes_dtypes_and_names() -> None:
    tensors = {"a": torch.zeros(4), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
    assert_same_tensors(dict(tensors), tensors)
    for change in (
        {"a": -tensors["a"]},  # equal numbers, other bytes
        {"a": torch.zeros(2, 2)},
        {"a": torch.zeros(4, dtype=torch.int32)},
        {"c": torch.zeros(1)},
    ):
        with pytest.raises(AssertionError):
            assert_same_tensors(tensors | change, tensors)
    with pytest.raises(AssertionError):
        assert_same_tensors({"a": tensors["a"]}, tensors)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_tensor_of_a_model_is_random(recipe: str) -> None:
    for name, tensor in build(RECIPES[recipe]).state_dict().items():
        if tensor.is_floating_point() and tensor.numel() > 1:
            assert tensor.float().std() > 0, name


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "recipe", slow_but(RECIPES, ("llama-tied", "gpt2", "mixtral", "t5", "gemma3-vlm", "mamba", "whisper"))
)
def test_outputs_depend_on_every_file(recipe: str, tmp_path: Path) -> None:
    """A model whose logits do not move when its files do proves nothing."""
    write(RECIPES[recipe], tmp_path)
    expected = outputs(load(tmp_path), RECIPES[recipe].inputs())
    for file in tmp_path.glob("*.safetensors"):
        changed = {
            name: tensor.roll(1, 0) * 1.5 if tensor.is_floating_point() and tensor.dim() else tensor
            for name, tensor in read_file(file).items()
        }
        original = file.read_bytes()
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(AssertionError):
            assert_same_outputs(outputs(load(tmp_path), RECIPES[recipe].inputs()), expected)
        file.write_bytes(original)
    assert_same_outputs(outputs(load(tmp_path), RECIPES[recipe].inputs()), expected)


def _fail_on_last(rank: int, world_size: int) -> int:
    if rank == world_size - 1:
        raise ValueError("injected")
    return rank


def _die(rank: int, world_size: int) -> None:
    os._exit(3)


def _sum(rank: int, world_size: int) -> float:
    total = torch.tensor(float(rank + 1))
    torch.distributed.all_reduce(total)
    return total.item()


@pytest.mark.slow
def test_pool_runs_raises_and_recovers() -> None:
    pool = GlooPool()
    assert pool.run(_sum, 2) == [3.0, 3.0]
    with pytest.raises(WorkerError, match="injected"):
        pool.run(_fail_on_last, 2)
    with pytest.raises(WorkerError, match="ended"):
        pool.run(_die, 1)
    assert pool.run(_sum, 2) == [3.0, 3.0]
    with pytest.raises(ValueError, match="world size"):
        pool.run(_sum, MAX_WORLD_SIZE + 1)
    pool.close()


def _killed_once(rank: int, world_size: int, marker: str) -> float:
    if rank == 1 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    return _sum(rank, world_size)


def test_what_a_signal_ended_runs_again_and_says_so(tmp_path: Path) -> None:
    pool = GlooPool()
    with pytest.warns(UserWarning, match=r"(?s)a worker died in _killed_once.*rank 1:\nended with -11") as said:
        assert pool.run(_killed_once, 2, str(tmp_path / "marker")) == [3.0, 3.0]
    words = str(said[0].message)
    assert words.index("rank 1") < words.index("rank 0"), "the rank that died comes first"
    assert "_killed_once" in words.partition("rank 1")[2], "and says where it was"
    pool.close()
