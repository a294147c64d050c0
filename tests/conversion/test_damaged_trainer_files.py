"""Damaged files of trainers: each is an error, or the output is right.

Every file of the committed checkpoints is damaged in the ways that copies and jobs damage files. A file that the
conversion does not read, such as optimizer state, may be damaged without an error; then the output equals the recorded
values.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptx
from ckptx.errors import CkptxError
from tests.formats.stock_goldens import GOLDENS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FIXTURES = GOLDENS.parent
SOURCES = {
    **{f"fsdp {case.parent.parent.name} {case.parent.name}": case for case in sorted(FIXTURES.glob("fsdp/*/*/actor"))},
    **{f"deepspeed {stage}": FIXTURES / "deepspeed" / stage for stage in ("stage2", "stage3")},
    **{f"megatron {name}": FIXTURES / "megatron" / name / "torch_dist" for name in ("qwen2", "qwen3_moe")},
    **{
        f"torch_checkpointing {name}": FIXTURES / "torch_checkpointing" / name
        for name in ("archives", "pipeline", "safetensors", "rank_directories")
    },
    "dcp": GOLDENS / "trainer",
}


class Hostile:
    """Object whose pickle makes a directory in the working directory when it is executed."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("was-executed",)


def original_of(source: Path) -> Path:
    """Return the file or directory with the values of a checkpoint."""
    if source.parts[-3] == "megatron":
        return source.with_name("hf")
    if source.name == "actor":
        return source.parent.with_name(f"{source.parent.name}.safetensors")
    return source.with_name(f"{source.name}.safetensors")


def base_of(source: Path) -> Path | str:
    return source.with_name("hf") if source.parts[-3] == "megatron" else "none"


def convert(source: Path, out: Path, base: Path | str) -> None:
    ckptx.convert("to-hf", source, out, base=base)


def is_archive(file: Path) -> bool:
    return file.suffix in (".pt", ".distcp")


def is_pickle(file: Path) -> bool:
    return file.suffix == ".pkl" or file.name == ".metadata"


def remove(file: Path) -> None:
    file.unlink()


def empty(file: Path) -> None:
    file.write_bytes(b"")


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def cut_the_last_byte(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def fill_with_zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def put_a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def link_to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to("missing")


def put_a_hostile_pickle(file: Path) -> None:
    if is_pickle(file):
        file.write_bytes(pickle.dumps(Hostile()))
    else:
        torch.save({"module": Hostile(), "state_dict": Hostile(), "weight": Hostile()}, file)


def put_the_next_file(file: Path) -> None:
    """Replace a file by that of the next rank, or by another file with the same suffix."""
    root = next(parent for parent in file.parents if parent.name in {source.name for source in SOURCES.values()})
    files = files_by_suffix(root)[file.suffix]
    other = files[(files.index(file) + 1) % len(files)]
    if other != file:
        shutil.copy(other, file)


def files_by_suffix(root: Path) -> dict[str, list[Path]]:
    """Return the files of a checkpoint by suffix."""
    files: dict[str, list[Path]] = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        files.setdefault(path.suffix, []).append(path)
    return files


DAMAGES = (
    remove,
    empty,
    cut_in_half,
    cut_the_last_byte,
    fill_with_zeros,
    put_a_directory,
    link_to_nothing,
    put_a_hostile_pickle,
    put_the_next_file,
)


def files_of(source: Path) -> list[Path]:
    return sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())


def assert_right_or_refused(source: Path, tmp_path: Path, original: Path, base: Path | str, what: str) -> bool:
    """Convert a damaged checkpoint, and return True if it was refused."""
    out = tmp_path / "out"
    before = sorted(path.name for path in tmp_path.iterdir())
    try:
        convert(source, out, base)
    except CkptxError as error:
        assert error.exit_code in (3, 4), f"{what}: exit {error.exit_code}: {error}"
        assert "\n" not in str(error) and len(str(error)) < 700, f"{what}: {error}"
        assert sorted(path.name for path in tmp_path.iterdir()) == before, what
        return True
    expected = load_file(original / "model.safetensors" if original.is_dir() else original)
    found = load_file(out / "model.safetensors")
    differing = [name for name in found if name not in expected or not same_bytes(found[name], expected[name])]
    assert not differing, f"{what}: exit 0, but {differing} differ"
    shutil.rmtree(out)
    return False


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    )


def damaged_copies(source: Path, copy: Path) -> Iterator[Path]:
    """Yield each file of a fresh copy of a checkpoint."""
    for name in files_of(source):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        yield copy / name


CASES = [
    pytest.param(name, damage, id=f"{name}-{damage.__name__}")
    for name, source in SOURCES.items()
    for damage in DAMAGES
    if damage is not put_the_next_file or any(len(files) > 1 for files in files_by_suffix(source).values())
]


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_a_damaged_file_is_refused_or_not_read(
    name: str, damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCES[name]
    monkeypatch.chdir(tmp_path)
    refused = 0
    for file in damaged_copies(source, tmp_path / source.name):
        damage(file)
        what = f"{name}: {damage.__name__}: {file.name}"
        refused += assert_right_or_refused(tmp_path / source.name, tmp_path, original_of(source), base_of(source), what)
        assert not (tmp_path / "was-executed").exists(), what
    assert refused, "no damage was found"


@pytest.mark.parametrize("name", [name for name in SOURCES if not name.endswith(("safetensors", "rank_directories"))])
def test_flipped_bits_of_archives_are_refused_or_not_read(name: str, tmp_path: Path) -> None:
    """Payloads of safetensors and the names in a pickle have no checksum, so that their bits are not flipped here."""
    source, generator = SOURCES[name], random.Random(name)
    files = [file for file in files_of(source) if is_archive(file)]
    shutil.copytree(source, tmp_path / source.name)
    refused = 0
    for _ in range(60):
        file = tmp_path / source.name / generator.choice(files)
        whole = file.read_bytes()
        position, bit = generator.randrange(len(whole)), generator.randrange(8)
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :])
        what = f"{name}: bit {bit} of byte {position} of {file.name}"
        refused += assert_right_or_refused(tmp_path / source.name, tmp_path, original_of(source), base_of(source), what)
        file.write_bytes(whole)
    assert refused, "no flipped bit was found"


@pytest.mark.parametrize(("name", "other"), [("qwen2", "qwen3_moe"), ("qwen3_moe", "qwen2")])
def test_the_base_of_another_model_is_refused(name: str, other: str, tmp_path: Path) -> None:
    base = FIXTURES / "megatron" / other / "hf"
    with pytest.raises(CkptxError) as caught:
        convert(FIXTURES / "megatron" / name / "torch_dist", tmp_path / "out", base)
    assert caught.value.exit_code in (3, 4) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


SIZES = ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size")


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *[("qwen2", setting) for setting in (*SIZES, "intermediate_size")],
        *[("qwen3_moe", setting) for setting in (*SIZES, "moe_intermediate_size", "num_experts")],
    ],
)
def test_a_base_of_another_size_is_refused(name: str, setting: str, tmp_path: Path) -> None:
    source = FIXTURES / "megatron" / name / "torch_dist"
    shutil.copytree(source.with_name("hf"), tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config[setting] *= 2
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CkptxError) as caught:
        convert(source, tmp_path / "out", tmp_path / "base")
    assert caught.value.exit_code in (3, 4) and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
