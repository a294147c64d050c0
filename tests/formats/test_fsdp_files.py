"""Per-rank FSDP files: regions against torch's own arithmetic, and what is malformed or of another save."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.catalog.region import Region
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.fsdp.pickled_tensors import load_state_dict, shards_of_rank
from ckptx.formats.registry import open_checkpoint
from tests.support.forged_fsdp import Archive, FunctionCall, Name, Object, dtensor, mesh, pickle_value, placement, shard
from tests.support.memory_storage import MemoryPath

SHAPE = (5, 3)
WHOLE = np.arange(15, dtype=np.float32).reshape(SHAPE)
ROWS = ((0, 3), (3, 2))


@dataclass
class Case:
    """The values that one rank writes; a test changes one of them.

    Attributes:
        shape, local, placements: Shape, local tensor and placements of the DTensor.
        sizes, coordinate, saved_by: Mesh, position of the rank in it, and rank that the mesh records.
        name: Name of the tensor.
        also: Other entries of the state dict.
    """

    shape: Any
    local: np.ndarray[Any, Any]
    sizes: Any
    coordinate: Any
    placements: Any
    saved_by: Any
    name: str = "w"
    also: Any = None


def usual(rank: int) -> Case:
    begin, length = ROWS[rank]
    return Case(SHAPE, WHOLE[begin : begin + length], (2,), (rank,), (shard(0),), rank)


def write(root: Path, cases: list[Case], world_size: int = 2) -> Path:
    root.mkdir(exist_ok=True)
    for rank, case in enumerate(cases):
        archive = Archive()
        value = dtensor(
            case.shape, archive.tensor(case.local), mesh(case.sizes, case.coordinate, case.saved_by), case.placements
        )
        state = {case.name: value, **(case.also or {})}
        archive.write(root / f"model_world_size_{world_size}_rank_{rank}.pt", state)
    return root


def changed(**fields: Any) -> Callable[[Path], None]:
    """Rank 1 writes other values."""

    def make(root: Path) -> None:
        second = usual(1)
        for name, value in fields.items():
            setattr(second, name, value)
        write(root, [usual(0), second])

    return make


def files(change: Callable[[Path], Any]) -> Callable[[Path], None]:
    """The files are changed after they were written."""

    def make(root: Path) -> None:
        write(root, [usual(0), usual(1)])
        change(root)

    return make


def name_of(rank: int, world_size: int = 2) -> str:
    return f"model_world_size_{world_size}_rank_{rank}.pt"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


HSDP = (placement("Replicate"), shard(0))
SYSTEM = FunctionCall(Name("posix", "mkdir"), ("was-executed",))

MALFORMED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a rank without a file": (
        files(lambda root: (root / name_of(1)).unlink()),
        r"1 of 2 per-rank FSDP files are missing \(model_world_size_2_rank_1.pt\)",
    ),
    "a copied file": (
        files(lambda root: shutil.copy(root / name_of(0), root / name_of(1))),
        "saved by rank 0, but the file name is that of rank 1",
    ),
    "a copied file of a torch that records no rank": (
        changed(saved_by=None, coordinate=(0,), local=WHOLE[:3]),
        "no rank has",
    ),
    "another world size in the config": (
        files(lambda root: (root / "fsdp_config.json").write_text(json.dumps({"world_size": 4}))),
        "world_size is 4, but there are files of 2 ranks",
    ),
    "files of two world sizes": (
        files(lambda root: shutil.copy(root / name_of(0), root / name_of(0, 1))),
        "contains per-rank FSDP files of 2 world sizes; choose one by passing a file of it: model_world_size_1_rank_0.",
    ),
    "a truncated file": (files(lambda root: truncate(root / name_of(1))), "rank_1.pt: "),
    "an empty file": (files(lambda root: (root / name_of(1)).write_bytes(b"")), "rank_1.pt: not a torch archive"),
    "another name": (changed(name="v"), 'tensor "v": model_world_size_2_rank_0.pt has no such tensor'),
    "a name less": (
        lambda root: write(root, [usual(0), usual(1)]) and Archive().write(root / name_of(1), {}),
        'tensor "w" is missing, but model_world_size_2_rank_0.pt contains it',
    ),
    "another shape": (changed(shape=(5, 4), local=np.zeros((2, 4))), "different saves"),
    "a local shape of other rows": (changed(local=WHOLE[3:4]), r"local shape is \[1, 3\], but the sharding"),
    "a coordinate outside of the mesh": (changed(coordinate=(2,)), "no coordinate in a mesh"),
    "a coordinate of more dims": (changed(coordinate=(1, 0)), "no coordinate in a mesh"),
    "no coordinate": (changed(coordinate=None), "no coordinate in a mesh"),
    "a mesh of more ranks than there are": (changed(sizes=(1 << 40,)), "no shape of the device mesh"),
    "a mesh without dims": (changed(sizes=()), "no shape of the device mesh"),
    "a mesh of no ranks": (changed(sizes=(0,)), "no shape of the device mesh"),
    "a placement of a dim that is not there": (changed(placements=(shard(2),)), "no placement of a tensor of 2 dims"),
    "a negative dim": (changed(placements=(shard(-1),)), "no placement of a tensor of 2 dims"),
    "no placements": (changed(placements=()), "no placement for each of 1 mesh dims"),
    "something else as a placement": (changed(placements=(3,)), "no placement of a tensor"),
    "a negative shape": (changed(shape=(-5, 3)), "no valid shape"),
    "a shape of numbers beyond any": (changed(shape=(1 << 62, 1 << 62)), "a shape of more than"),
    "both ranks hold the whole": (
        lambda root: write(root, [Case(SHAPE, WHOLE, (2,), (rank,), (shard(0),), rank) for rank in (0, 1)]),
        "local shape",
    ),
    "rows that overlap": (
        lambda root: write(root, [usual(0), Case(SHAPE, WHOLE, (1,), (0,), (shard(0),), 1)]), "shards of several ranks"
    ),
}  # fmt: skip
UNSUPPORTED: dict[str, tuple[Callable[[Path], None], str]] = {
    "partial sums": (changed(placements=(placement("Partial", reduce_op="sum"),)), "Partial placement, so its values"),
    "a split factor that fits no mesh": (
        changed(placements=(placement("_StridedShard", dim=0, split_factor=3),)), "split factor 3 of a _StridedShard"
    ),
    "a value that is no tensor": (changed(also={"lr": 0.1}), "expected a tensor, found a value of type float"),
    "a nested dict": (changed(also={"model": {"w": 1}}), "expected a tensor, found a value of type dict"),
    "a key that is no string": (changed(also={3: 1}), "expected tensor names as keys, found a key of type int"),
    "no dict": (
        lambda root: write(root, [usual(0), usual(1)]) and Archive().write(root / name_of(1), [1]),
        "expected a dict of named tensors, found a value of type list",
    ),
    "a flat parameter": (changed(name="layers.0._flat_param"), "LOCAL_STATE_DICT"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused(case: str, tmp_path: Path) -> None:
    make, message = MALFORMED[case]
    make(tmp_path)
    with pytest.raises(InputError, match=message) as refused:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(refused.value) and len(str(refused.value)) < 600 + len(str(tmp_path))


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_not_converted_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, message = UNSUPPORTED[case]
    make(tmp_path)
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("place", ["value", "mesh", "placement", "argument"])
def test_nothing_that_a_pickle_names_is_run(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trap = {
        "value": {"also": {"x": SYSTEM}},
        "mesh": {"sizes": (SYSTEM,)},
        "placement": {"placements": (SYSTEM,)},
        "argument": {"shape": (5, SYSTEM)},
    }[place]
    changed(**trap)(tmp_path)
    with pytest.raises(InputError, match=r"refers to posix.mkdir, which is not allowed .*nothing was executed"):
        open_checkpoint(tmp_path)
    assert not Path("was-executed").exists()


def test_getattr_gives_an_inert_class(tmp_path: Path) -> None:
    """ShardedTensor names it for the class of its process group."""
    asked = FunctionCall(Name("__builtin__", "getattr"), (Name("torch.distributed.tensor", "DTensor"), "__init__"))
    tree = load_state_dict(pickle_value({"x": Object(asked, ("a",), {"b": 1})}), "x")
    assert tree["x"].arguments == ("a",) and tree["x"].field("b") == 1


def test_replicas_of_different_bytes_are_refused(tmp_path: Path) -> None:
    """Rank 2 of an HSDP mesh holds the rows of rank 0."""
    import ckptx

    cases = [
        replace(usual(rank % 2), sizes=(2, 2), coordinate=(rank // 2, rank % 2), placements=HSDP, saved_by=rank)
        for rank in range(4)
    ]
    write(tmp_path / "equal", cases, 4)
    assert ckptx.convert("to-hf", tmp_path / "equal", tmp_path / "out", base="none").exit == 0
    cases[2].local = cases[2].local + 1
    write(tmp_path / "different", cases, 4)
    with pytest.raises(
        InputError, match=r"rank_2.pt and model_world_size_4_rank_0\S* have different bytes for \[0:3, 0:3\]"
    ):
        ckptx.convert("to-hf", tmp_path / "different", tmp_path / "none", base="none")
    assert not (tmp_path / "none").exists()


def test_one_file_chooses_its_world_size(tmp_path: Path) -> None:
    write(tmp_path, [usual(0), usual(1)])
    write(tmp_path, [Case(SHAPE, WHOLE, (1,), (0,), (shard(0),), 0)], 1)
    assert set(open_checkpoint(tmp_path / name_of(0)).files) == {name_of(0), name_of(1)}
    assert set(open_checkpoint(tmp_path / name_of(0, 1)).files) == {name_of(0, 1)}


def test_merged_weights_come_first(tmp_path: Path) -> None:
    """Weights that loaders read win over the files that they were merged from, which are named."""
    from safetensors.numpy import save_file

    write(tmp_path, [usual(0), usual(1)])
    save_file({"w": WHOLE}, tmp_path / "model.safetensors")
    catalog = open_checkpoint(tmp_path)
    assert catalog.format == "huggingface"
    assert any(name_of(0) in note for note in catalog.notes)


@pytest.mark.parametrize("name", ["model_world_size_2_rank_2.pt", "model_world_size_0_rank_0.pt"])
def test_numbers_that_cannot_be_are_no_rank_file(name: str, tmp_path: Path) -> None:
    write(tmp_path / "files", [usual(0), usual(1)])
    (tmp_path / "one").mkdir()
    shutil.copy(tmp_path / "files" / name_of(0), tmp_path / "one" / name)
    with pytest.raises((InputError, UnsupportedError)):
        open_checkpoint(tmp_path / "one")


def test_optimizer_files_alone_are_refused(tmp_path: Path) -> None:
    write(tmp_path, [usual(0), usual(1)])
    for rank in range(2):
        (tmp_path / name_of(rank)).rename(tmp_path / name_of(rank).replace("model", "optim"))
    with pytest.raises(UnsupportedError, match="optimizer or trainer state of FSDP ranks"):
        open_checkpoint(tmp_path)
    with pytest.raises(UnsupportedError, match="model_world_size_"):
        open_checkpoint(tmp_path / "optim_world_size_2_rank_0.pt")


def test_files_in_any_storage(tmp_path: Path) -> None:
    write(tmp_path, [usual(0), usual(1)])
    place = MemoryPath("/actor")
    for file in tmp_path.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    assert open_checkpoint(place).tensors == open_checkpoint(tmp_path).tensors


# ------------------------------------------------------------------------------------------------- torch's arithmetic


@st.composite
def shardings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    """A shape, the sizes of a mesh, and the dim that each mesh dim shards, or None."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.none() | st.integers(0, len(shape) - 1)
    return shape, sizes, tuple(draw(dims) for _ in sizes)


def with_axes(sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> Object:
    """A mesh as torch 2.13 pickles it."""
    module = "torch.distributed._mesh_layout"
    axes = tuple(Object(Name(module, "_FlatLayout"), (), {"shape": (size,), "stride": (1,)}) for size in sizes)
    return mesh(sizes, coordinate, _layout=Object(Name(module, "_MeshLayout"), (), {"axes": axes}))


def with_tensor(sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> Object:
    """A mesh as torch 2.2 to 2.9 pickles it: a tensor of ranks."""
    return mesh(sizes, list(coordinate), _layout=None, mesh=Archive().tensor(np.zeros(sizes)))


@pytest.mark.parametrize("mesh_of", [mesh, with_axes, with_tensor], ids=["2.11", "2.13", "2.6"])
@given(shardings(), st.data())
@settings(max_examples=150, deadline=None)
def test_regions_are_those_of_torch(
    mesh_of: Callable[..., Object],
    sharding: tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]],
    data: st.DataObject,
) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    shape, sizes, dims = sharding
    coordinate = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    local, offsets = _compute_local_shape_and_global_offset(shape, sizes, lambda dim: coordinate[dim], placements)
    archive = Archive()
    forged = tuple(placement("Replicate") if dim is None else shard(dim) for dim in dims)
    value = dtensor(shape, archive.tensor(np.zeros(local)), mesh_of(sizes, coordinate), forged)
    parts = shards_of_rank(load_state_dict(pickle_value(value), "x"), 0, "x")
    ((_, region),) = parts.local_shards
    assert parts.shape == shape
    assert region.sizes == tuple(local)
    if prod(local):
        assert region == Region(tuple(offsets), tuple(local))
