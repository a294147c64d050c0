"""Per-rank FSDP files of older releases of torch, which `tools/build_fsdp_fixtures.py` wrote to `fixtures/fsdp`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptx
from ckptx.errors import CkptxError
from tests.formats.stock_goldens import GOLDENS

FIXTURES = GOLDENS.parent / "fsdp"
CASES = sorted(path.parent for path in FIXTURES.glob("*/*/actor"))


def case_id(case: Path) -> str:
    return f"{case.parent.name}-{case.name}"


def test_the_forms_of_the_pickles_are_those_that_changed() -> None:
    """Until 2.4 tensors are in `torch.distributed._tensor`, and meshes of all of these releases hold a tensor."""
    pickles = {case_id(case): (case / "actor/model_world_size_2_rank_0.pt").read_bytes() for case in CASES}
    assert {
        "2.2.2-fsdp1",
        "2.2.2-sharded1",
        "2.4.1-fsdp1",
        "2.4.1-fsdp2",
        "2.4.1-sharded1",
        "2.6.0-fsdp1",
        "2.6.0-fsdp2",
        "2.6.0-sharded1",
    } <= set(pickles)
    assert (
        b"torch.distributed._tensor" in pickles["2.4.1-fsdp2"]
        and b"torch.distributed._tensor" not in pickles["2.6.0-fsdp2"]
    )
    assert b"_mesh_layout" not in pickles["2.6.0-fsdp2"] and b"ShardedTensorMetadata" in pickles["2.4.1-sharded1"]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_it_is_the_state_of_the_trainer(case: Path, tmp_path: Path) -> None:
    expected = load_file(case.with_name(f"{case.name}.safetensors"))
    report = ckptx.convert("to-hf", case / "actor", tmp_path / "out", base="none")
    assert report.ledger["source"] == len(expected) and report.ledger["dropped"] == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert [name for name in found if found[name].dtype is not expected[name].dtype] == []
    assert expected.keys() - found.keys() <= {"head.weight", "embed.weight"}  # tied, and both stored in some forms
    assert ckptx.verify(case.with_name(f"{case.name}.safetensors"), case / "actor", strict=True).exit == 0


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_missing_rank_is_refused(case: Path, tmp_path: Path) -> None:
    shutil.copytree(case / "actor", tmp_path / "actor")
    (tmp_path / "actor" / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(CkptxError, match="rank") as caught:
        ckptx.convert("to-hf", tmp_path / "actor", tmp_path / "out", base="none")
    assert caught.value.exit_code == 3 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_rank_of_another_release_has_the_same_tensors(case: Path, tmp_path: Path) -> None:
    """All releases save the same model, so that a mix of their files is one consistent checkpoint."""
    other = next(each for each in CASES if each.name == case.name and each != case)
    shutil.copytree(case / "actor", tmp_path / "actor")
    name = "model_world_size_2_rank_1.pt"
    shutil.copy(other / "actor" / name, tmp_path / "actor" / name)
    assert ckptx.verify(case.with_name(f"{case.name}.safetensors"), tmp_path / "actor", strict=True).exit == 0
