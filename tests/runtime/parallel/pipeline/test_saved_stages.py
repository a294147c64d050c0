"""What stages save adds up to one checkpoint, and what they load is theirs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

import ckptx
from tests.support.models import EVERY, write
from tests.support.pool import GlooPool


def save_stages(rank: int, world_size: int, root: str, out: str, dims: dict[str, int], steps: int) -> list[str]:
    """Loads the stages of a checkpoint and saves them again, with an optimizer after so many steps."""
    from ckptx.architecture.class_table import find_class_record
    from ckptx.formats.hf.reader import read_json
    from ckptx.layout.parallel_dims import ParallelDims
    from ckptx.layout.stages import StageMap
    from ckptx.runtime.checkpointing.load import load
    from ckptx.runtime.checkpointing.save import save
    from ckptx.runtime.model.build import build_model, materialize
    from ckptx.runtime.parallel.distributed import mesh_of
    from ckptx.runtime.parallel.parallelize import parallelize
    from ckptx.runtime.parallel.pipeline.stage import make_stage
    from ckptx.runtime.parallel.tensor_parallel.plans import find_plan

    mesh = mesh_of(ParallelDims(**dims), "cpu")
    model = build_model(Path(root))
    config = read_json(Path(root) / "config.json")
    row = find_class_record(type(model).__name__)
    architecture = row.architecture_for(config) if row is not None else None
    assert architecture is not None
    plan = find_plan(model, config) if dims.get("tp", 1) > 1 else None
    make_stage(model, StageMap(architecture.stacks(config), dims["pp"]), mesh["pp"].get_local_rank(), {})
    done = parallelize(model, mesh, plan)
    materialize(model)
    ledger = load(model, Path(root), regions=done.layout.local_regions if done.layout else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0) if steps else None
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert optimizer is not None
        optimizer.step()
    save(model, optimizer, Path(out), layout=done.layout, base=Path(root))
    return sorted(ledger.loaded_tensors)


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("llama-tied", {"pp": 2}),
        ("gemma4-shared-kv", {"pp": 2, "tp": 2}),
        ("t5", {"pp": 2, "dp_shard": 2}),
        ("gemma3-vlm", {"pp": 2}),
    ],
)
def test_saved_stages_are_the_checkpoint_they_came_from(
    pool: GlooPool, tmp_path: Path, name: str, dims: dict[str, int]
) -> None:
    write(EVERY[name], tmp_path / "hf")
    ranks = dims["pp"] * dims.get("tp", 1) * dims.get("dp_shard", 1)
    loaded: Any = pool.run(save_stages, ranks, str(tmp_path / "hf"), str(tmp_path / "dcp"), dims, 0)
    assert loaded[0] != loaded[-1]
    ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "back", base=tmp_path / "hf")
    assert ckptx.verify(tmp_path / "hf", tmp_path / "back").exit == 0
    assert ckptx.diff(tmp_path / "hf", tmp_path / "back").exit == 0


def test_the_last_stage_has_the_embedding_as_its_head_wherever_it_is_stored(pool: GlooPool, tmp_path: Path) -> None:
    """In a HF checkpoint and a DCP without the name of the head, and in a DCP that has it as an alias."""
    write(EVERY["llama-tied"], tmp_path / "hf")
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "alias")
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "without", tied="drop")
    stored = [
        set(FileSystemReader(tmp_path / each).read_metadata().state_dict_metadata) for each in ("alias", "without")
    ]
    assert [any(name.endswith("lm_head.weight") for name in each) for each in stored] == [True, False]
    for source in ("hf", "alias", "without"):
        found = pool.run(save_stages, 2, str(tmp_path / source), str(tmp_path / f"{source}-saved"), {"pp": 2}, 1)
        assert "lm_head.weight" in found[1]
        assert "model.embed_tokens.weight" not in found[1]
        assert ckptx.verify(tmp_path / "hf", tmp_path / f"{source}-saved").exit == 0
