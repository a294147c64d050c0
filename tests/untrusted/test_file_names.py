"""Names of output files, held against a file system: what is allowed can be made below a directory, and only there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.untrusted.file_name import find_conflicting_name, find_name_fault, find_weights_fault

PARTS = ["", ".", "..", "a", "b", "~", "...", "\0", "\n", "\x7f", "\x9b", "\ud800", "\\", "é", "x" * 255, "é" * 128]
PARTS += [".a.ckptx-partial", ".a.ckptx-old", "a.ckptx-old", "-"]


@given(st.lists(st.sampled_from(PARTS), max_size=4).map("/".join))
@settings(max_examples=300, deadline=None)
def test_a_name_without_a_fault_is_made_below_the_directory_and_printed(name: str) -> None:
    if find_name_fault(name) is not None:
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        (found,) = (Path(at, file) for at, _, files in os.walk(directory) for file in files)
        assert str(found.relative_to(directory)) == name
    assert name.isprintable()


@pytest.mark.parametrize(
    "part", [part for part in PARTS if part not in ("a", "b", "~", "...", "é", "x" * 255, "a.ckptx-old", "-")]
)
@pytest.mark.parametrize("around", ["{}", "{}/a", "a/{}", "a/{}/b"])
def test_a_faulty_part_is_a_fault_wherever_it_stands(part: str, around: str) -> None:
    assert find_name_fault(around.format(part)) is not None


def can_all_be_files(names: list[str]) -> bool:
    """Asks a file system."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            for name in names:
                path = Path(directory, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("x").close()
        except OSError:
            return False
    return True


@given(st.lists(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3).map("/".join), max_size=6))
@settings(max_examples=300, deadline=None)
def test_names_collide_exactly_when_they_cannot_all_be_files(names: list[str]) -> None:
    assert (find_conflicting_name(names) is None) == can_all_be_files(names)


@pytest.mark.parametrize(
    ("files", "index", "fault"),
    [
        (["model.safetensors"], None, None),
        (["any.safetensors"], None, None),
        (["model.safetensors"], "model.safetensors.index.json", None),
        (["a.safetensors", "sub/b.safetensors"], "model.safetensors.index.json", None),
        (["a.safetensors", "b.safetensors"], None, "require an index"),
        ([], None, "require an index"),
        (["sub/a.safetensors"], None, "top"),
        (["a.safetensors"], "sub/a.safetensors.index.json", "top"),
        (["a.safetensors", "model.safetensors"], "model.safetensors.index.json", "ignore the other files"),
        (["a.safetensors", "a.safetensors"], "model.safetensors.index.json", "duplicate"),
        (["a.safetensors", "a.safetensors/b.safetensors"], "model.safetensors.index.json", "duplicate"),
        (["a.bin"], None, "does not end"),
        (["a.safetensors"], "config.json", "does not end"),
        (["adapter_model.safetensors"], None, "adapter"),
        (["../a.safetensors"], None, "leads out"),
    ],
)
def test_names_of_an_hf_checkpoint(files: list[str], index: str | None, fault: str | None) -> None:
    found = find_weights_fault(files, index)
    assert found == fault if fault is None else fault in str(found)
