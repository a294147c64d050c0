"""Optimizer state of tensors whose rows another naming reorders is refused, because its own rows would not move."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptx
from ckptx.errors import UnsupportedError
from tests.conversion.test_renamed_tensors import CONFIG, both_spellings, contents
from tests.support.checkpoint_writers import write_dcp, write_hf


def write_step(root: Path, titan: bool) -> Path:
    """Write a step whose moments equal its weights, under published names or torchtitan's."""
    weights = both_spellings()[titan]
    state = {f"optimizer.state.{name}.exp_avg": tensor for name, tensor in weights.items()}
    return write_dcp(root / "step", weights | state, config=CONFIG)


@pytest.mark.parametrize("command", ["to-dcp", "reshard", "dry run"])
@pytest.mark.parametrize(("titan", "names"), [(False, "torchtitan"), (True, "hf"), (True, "model")])
def test_they_are_refused(titan: bool, names: str, command: str, tmp_path: Path) -> None:
    step = write_step(tmp_path, titan)
    with pytest.raises(UnsupportedError, match="combine, split or reorder") as caught:
        if command == "reshard":
            ckptx.reshard(step, tmp_path / "out", names=names, tp=2)
        else:
            ckptx.convert("to-dcp", step, tmp_path / "out", names=names, dry_run=command == "dry run")
    assert "\n" not in str(caught.value) and sorted(path.name for path in tmp_path.iterdir()) == ["step"]


@pytest.mark.parametrize(("titan", "names"), [(False, "torchtitan"), (True, "hf")])
def test_weights_alone_are_converted(titan: bool, names: str, tmp_path: Path) -> None:
    step = write_step(tmp_path, titan)
    ckptx.convert("to-dcp", step, tmp_path / "out", names=names, optimizer="drop")
    expected = both_spellings()[not titan]
    assert contents(tmp_path / "out") == {name: data for name, (_, _, data) in expected.items()}


@pytest.mark.parametrize("titan", [False, True])
def test_under_their_own_names_they_are_kept(titan: bool, tmp_path: Path) -> None:
    step = write_step(tmp_path, titan)
    write_hf(tmp_path / "hf", both_spellings()[0], config=CONFIG)
    ckptx.reshard(step, tmp_path / "out", tp=2, pp=2)
    assert ckptx.verify(step, tmp_path / "out", strict=True).exit == 0
    assert ckptx.verify(tmp_path / "hf", tmp_path / "out").exit == 0
