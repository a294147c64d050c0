"""Checkpoints of torch_checkpointing: what its writer stored, other layouts, and what is malformed or inconsistent."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptx
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.registry import open_checkpoint
from tests.support import torch_dcp
from tests.support.catalog_tensors import read_checkpoint, read_safetensors
from tests.support.models import EVERY, build, read_hf

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "torch_checkpointing"
CASES = ("archives", "safetensors", "rank_directories", "pipeline")
EMBEDDING = '["model.embed_tokens.weight"]'


def copied(case: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / case, tmp_path / case))


def metadata_of(root: Path) -> Any:
    return pickle.loads((root / "metadata.pkl").read_bytes())


def write_metadata(root: Path, metadata: Any) -> None:
    (root / "metadata.pkl").write_bytes(pickle.dumps(metadata))


def sharding_of(metadata: Any, path: str = EMBEDDING) -> Any:
    """Return the recorded sharding of a tensor of the model, to be changed in place."""
    return metadata["metadata"]["model"]["nested_path_to_metadata"][path][0]["sharding_metadata"]


# ------------------------------------------------------------------------------------------------------ what is read


@pytest.mark.parametrize("case", CASES)
def test_tensors_are_those_that_the_library_saved(case: str) -> None:
    assert read_checkpoint(FIXTURES / case) == read_safetensors(FIXTURES, f"{case}.safetensors")


def test_archives_need_no_metadata(tmp_path: Path) -> None:
    root = copied("archives", tmp_path)
    (root / "metadata.pkl").unlink()
    for path in (root, root / "model_2.pt"):
        assert read_checkpoint(path) == read_safetensors(FIXTURES, "archives.safetensors")


@pytest.mark.parametrize("file", ["metadata.pkl", "model_1.pt"])
def test_a_file_of_it_is_the_whole_checkpoint(file: str) -> None:
    assert len(open_checkpoint(FIXTURES / "archives" / file).tensors) == 22


def test_metadata_of_version_1(tmp_path: Path) -> None:
    root = copied("safetensors", tmp_path)
    metadata = metadata_of(root)
    item = metadata["metadata"]["model"]
    paths = item["nested_path_to_metadata"]
    write_metadata(root, {
        "world_size": 4,
        "metadata": {path.replace("[", '["model", ', 1): groups for path, groups in paths.items()},
        "rank_to_layout_info_mappings": {
            str(rank): {"model": layout} for rank, layout in item["rank_to_layout_info"].items()
        },
    })  # fmt: skip
    assert read_checkpoint(root) == read_safetensors(FIXTURES, "safetensors.safetensors")


def test_parts_anywhere_in_a_local_tensor(tmp_path: Path) -> None:
    """Each rank stores a padded local tensor; the record says which parts of it are where in the whole one."""
    whole = torch.arange(24.0).view(6, 4)
    paths, layouts = {"w": []}, {}
    for rank in range(2):
        local = torch.full((4, 6), -1.0)
        local[1:3, 2:6] = whole[rank * 3 : rank * 3 + 2]
        local[3:4, 0:4] = whole[rank * 3 + 2 : rank * 3 + 3]
        data = {
            "global_shape": [6, 4], "dtype": "torch.float32", "global_offsets": [[rank * 3, 0], [rank * 3 + 2, 0]],
            "local_offsets": [[1, 2], [3, 0]], "local_sizes": [[2, 4], [1, 4]],
        }  # fmt: skip
        paths["w"].append({"ranks": (rank,), "sharding_metadata": {"type": "default_tensor_v1", "data": data}})
        for name, save in (("t", save_file), ("p", torch.save)):
            save({"w": local.clone()}, tmp_path / f"{name}{rank}")
        layouts[rank] = {
            "file_path": f"t{rank}", "serialization_format": {"type": "SafetensorsSerialization"},
        }  # fmt: skip
    item = {"nested_path_to_metadata": {'["w"]': paths["w"]}, "rank_to_layout_info": layouts}
    archives = {
        rank: {"file_path": f"p{rank}", "serialization_format": {"type": "TorchSerialization"}} for rank in range(2)
    }
    other = {"nested_path_to_metadata": {'["w"]': paths["w"]}, "rank_to_layout_info": archives}
    write_metadata(tmp_path, {"version": "2.0", "world_size": 2, "metadata": {"model": item, "ema": other}})
    expected = "F32", (6, 4), whole.numpy().tobytes()
    assert read_checkpoint(tmp_path) == {"w": expected, "ema.w": expected}


def test_one_rank_with_plain_tensors(tmp_path: Path) -> None:
    """The library records a plain tensor as replicated on a mesh of one rank; items without a record are read, too."""
    mesh = {"device_type": "cpu", "mesh_shape": (1,), "mesh_data": (0,), "mesh_dim_names": None}
    data = {
        "global_shape": [3], "dtype": "torch.float32", "stride": [1], "mesh_spec": mesh,
        "placements": [{"type": "Replicate"}],
    }  # fmt: skip
    groups = [{"ranks": (0,), "sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}}]
    item = {"nested_path_to_metadata": {'["w"]': groups}, "rank_to_layout_info": {0: None}}
    write_metadata(tmp_path, {"version": "2.0", "world_size": 1, "metadata": {"model": item}})
    torch.save({"w": torch.ones(3)}, tmp_path / "model_0.pt")
    torch.save({"w": [torch.zeros(2)]}, tmp_path / "ema_0.pt")
    torch.save(5, tmp_path / "step_0.pt")
    catalog = open_checkpoint(tmp_path)
    assert {name: entry.shape for name, entry in catalog.tensors.items()} == {"w": (3,), "ema.w.0": (2,)}
    assert any(note.endswith("how ranks share them: step (1 rank)") for note in catalog.notes)


def test_items_of_which_nothing_is_recorded_are_noted() -> None:
    notes = open_checkpoint(FIXTURES / "archives").notes
    assert "not converted, because nothing records how ranks share them: rng, step (4 ranks)" in notes
    assert any(note.endswith("8 values other than tensors not converted, in param_groups") for note in notes)


@pytest.mark.parametrize("case", CASES)
def test_conversions_and_comparisons(case: str, tmp_path: Path) -> None:
    stored = load_file(FIXTURES / f"{case}.safetensors")
    assert ckptx.inspect(FIXTURES / case).format == "torch-checkpointing"
    ckptx.convert("to-dcp", FIXTURES / case, tmp_path / "dcp", base="none")
    torch_dcp.assert_same_tensors(torch_dcp.load(tmp_path / "dcp"), stored)
    ckptx.reshard(FIXTURES / case, tmp_path / "sharded", dp_shard=3, base="none")
    torch_dcp.assert_same_tensors(torch_dcp.load(tmp_path / "sharded"), stored)
    report = ckptx.convert("to-hf", FIXTURES / case, tmp_path / "hf", base="none")
    model = {name: tensor for name, tensor in stored.items() if not name.startswith("optimizer.")}
    torch_dcp.assert_same_tensors(load_file(tmp_path / "hf" / "model.safetensors"), model)
    assert {row["name"] for row in report.dropped} == stored.keys() - model.keys()
    assert ckptx.verify(tmp_path / "dcp", FIXTURES / case).exit == 0
    assert ckptx.diff(tmp_path / "hf", FIXTURES / case).exit == 0


def test_names_of_torchtitan_are_found(tmp_path: Path) -> None:
    """torchtitan's item `model` has its names without a prefix."""
    build(EVERY["llama-untied"]).save_pretrained(tmp_path / "hub")
    ckptx.convert("to-dcp", tmp_path / "hub", tmp_path / "titan", names="torchtitan")
    (tmp_path / "items").mkdir()
    tensors = torch_dcp.load(tmp_path / "titan")
    torch.save(tensors, tmp_path / "items" / "model_0.pt")
    state = {name: {"exp_avg": torch.zeros_like(tensor)} for name, tensor in tensors.items()}
    torch.save({"state": state}, tmp_path / "items" / "optimizer_0.pt")
    write_metadata(tmp_path / "items", {"version": "2.0", "world_size": 1, "metadata": {}})
    report = ckptx.convert("to-hf", tmp_path / "items", tmp_path / "back", base=tmp_path / "hub")
    assert report.names is not None and report.names["before"] == "torchtitan"
    torch_dcp.assert_same_tensors(read_hf(tmp_path / "back"), read_hf(tmp_path / "hub"))
    assert ckptx.reshard(tmp_path / "items", tmp_path / "tp", tp=2, base=tmp_path / "hub").exit == 0
    resharded = torch_dcp.load(tmp_path / "tp")
    assert {f"optimizer.state.{name}.exp_avg" for name in tensors} | tensors.keys() == resharded.keys()


def test_consolidated_weights_in_the_same_directory_come_first(tmp_path: Path) -> None:
    root = copied("safetensors", tmp_path)
    tensors = load_file(FIXTURES / "safetensors.safetensors")
    save_file(tensors, root / "model.safetensors")
    assert open_checkpoint(root).format == "huggingface"
    assert open_checkpoint(root / "model_0.safetensors").format == "torch-checkpointing"


def test_a_metadata_pkl_of_another_program_is_no_checkpoint(tmp_path: Path) -> None:
    write_metadata(tmp_path, {"metadata": 1})
    with pytest.raises(UnsupportedError, match="a plain pickle is not supported"):
        open_checkpoint(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    write_metadata(tmp_path, torch.float32)
    assert open_checkpoint(tmp_path).format == "huggingface"


# ---------------------------------------------------------------------------------------------------- what is refused


class _Hostile:
    def __reduce__(self) -> Any:
        return (__import__("os").mkdir, ("was-executed",))


def _change_record(**changes: object) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        metadata = metadata_of(root)
        sharding_of(metadata)["data"].update(changes)
        write_metadata(root, metadata)

    return change


def _change_metadata(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        metadata = metadata_of(root)
        change(metadata)
        write_metadata(root, metadata)

    return apply


def _cut(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:-100]) and None


def _swap(first: str, second: str) -> Callable[[Path], None]:
    def swap(root: Path) -> None:
        contents = [(root / name).read_bytes() for name in (first, second)]
        for name, data in zip((second, first), contents, strict=True):
            (root / name).write_bytes(data)

    return swap


def _mesh(**changes: object) -> dict[str, object]:
    return {"device_type": "cpu", "mesh_shape": (2, 2), "mesh_data": (0, 1, 2, 3), "mesh_dim_names": None, **changes}


def _layouts(metadata: Any) -> Any:
    return metadata["metadata"]["model"]["rank_to_layout_info"]


def _paths(metadata: Any) -> Any:
    return metadata["metadata"]["model"]["nested_path_to_metadata"]


def _strays(root: Path) -> None:
    shutil.copy(root / "model_3.pt", root / "model_4.pt")


def _rank_of_another_step(root: Path) -> None:
    tensors = load_file(root / "model_1.safetensors")
    tensors["model.norm.weight"] = torch.ones(1)
    save_file(tensors, root / "model_1.safetensors")


def _tensor_of_another_save(root: Path) -> None:
    tensors = load_file(root / "model_1.safetensors")
    tensors["model.extra.weight"] = torch.ones(1)
    save_file(tensors, root / "model_1.safetensors")


def _tensor_lost(root: Path) -> None:
    tensors = load_file(root / "model_1.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, root / "model_1.safetensors")


DAMAGED = InputError
REFUSED: dict[str, tuple[str, Callable[[Path], object], type[CkptxError], str]] = {
    "a rank without its file": ("archives", lambda root: (root / "model_2.pt").unlink(), DAMAGED,
        r"1 of 4 files of an item are missing \(model_2.pt\)"),
    "a safetensors file missing": ("safetensors", lambda root: (root / "model_3.safetensors").unlink(), DAMAGED,
        r"missing \(model_3.safetensors\)"),
    "files of two ranks exchanged": ("archives", _swap("model_0.pt", "model_3.pt"), DAMAGED,
        "saved by rank 3, but the file name is that of rank 0"),
    "safetensors of two ranks exchanged": ("safetensors", _swap("model_0.safetensors", "model_2.safetensors"), DAMAGED,
        r"has shape \[6, 4\], but metadata.pkl lists \[7, 4\] of \[13, 4\]; the files are of different saves"),
    "a cut archive": ("archives", _cut("model_1.pt"), DAMAGED, "model_1.pt: damaged torch archive"),
    "a cut safetensors file": ("safetensors", _cut("model_1.safetensors"), DAMAGED, "model_1.safetensors"),
    "an empty archive": ("archives", lambda root: (root / "model_1.pt").write_bytes(b""), DAMAGED, "model_1.pt"),
    "a file of more ranks": ("archives", _strays, DAMAGED, "model_4.pt: metadata.pkl is of 4 ranks"),
    "another world size": ("safetensors", _change_metadata(lambda data: data.update(world_size=8)), DAMAGED,
        "files of other ranks than 0 to 7"),
    "no world size": ("safetensors", _change_metadata(lambda data: data.update(world_size=0)), DAMAGED,
        "no world size of 1 to"),
    "another shape": ("archives", _change_record(global_shape=[12, 4]), DAMAGED, "of different saves"),
    "another dtype": ("safetensors", _change_record(dtype="torch.float16"), DAMAGED,
        "has dtype bfloat16, but metadata.pkl lists float16"),
    "another mesh": ("safetensors", _change_record(mesh_spec=_mesh(mesh_data=(3, 2, 1, 0))), DAMAGED,
        "has shape|no rank has|differ"),
    "a mesh of another size": ("safetensors", _change_record(mesh_spec=_mesh(mesh_shape=(2, 3))), DAMAGED,
        "no mesh that contains rank 0 once"),
    "a rank twice in a mesh": ("safetensors", _change_record(mesh_spec=_mesh(mesh_data=(0, 0, 2, 3))), DAMAGED,
        "no mesh that contains rank 0 once"),
    "a placement too few": ("safetensors", _change_record(placements=[{"type": "Replicate"}]), DAMAGED,
        "no placement for each of 2 mesh dims"),
    "a dim that the tensor lacks": ("safetensors",
        _change_record(placements=[{"type": "Shard", "dim": 2}, {"type": "Replicate"}]), DAMAGED,
        "no placement of a tensor of 2 dims"),
    "an unknown placement": ("safetensors",
        _change_record(placements=[{"type": "Partial"}, {"type": "Replicate"}]), UnsupportedError,
        "the placement Partial is not supported"),
    "an unknown sharding": ("safetensors",
        _change_metadata(lambda data: sharding_of(data).update(type="mine")), UnsupportedError,
        "sharding of the type mine"),
    "nested tuples as a type": ("safetensors",
        _change_metadata(lambda data: sharding_of(data).update(type=_deep())), UnsupportedError,
        "sharding of the type tuple"),
    "an unknown version": ("safetensors", _change_metadata(lambda data: data.update(version="3.0")), UnsupportedError,
        "has version 3.0, but this ckptx supports 1.0 and 2.0"),
    "an unknown format": ("safetensors", _change_metadata(
        lambda data: _layouts(data)[0]["serialization_format"].update(type="MySerialization")), UnsupportedError,
        "has the format MySerialization"),
    "JSON with tensors": ("safetensors", _change_metadata(
        lambda data: _layouts(data)[0]["serialization_format"].update(type="JsonSerialization")), UnsupportedError,
        "is stored as JSON"),
    "a path that leads out": ("safetensors", _change_metadata(
        lambda data: _layouts(data)[0].update(file_path="../model_0.safetensors")), DAMAGED,
        "because it leads out of the directory"),
    "an absolute path": ("safetensors", _change_metadata(
        lambda data: _layouts(data)[0].update(file_path="/etc/passwd")), DAMAGED, "it is not a relative path"),
    "one file for two ranks": ("safetensors", _change_metadata(
        lambda data: _layouts(data)[1].update(file_path="model_0.safetensors")), DAMAGED,
        'the file "model_0.safetensors" twice'),
    "a tensor without a record": ("safetensors", _change_metadata(lambda data: _paths(data).pop(EMBEDDING)), DAMAGED,
        "metadata.pkl does not list it for rank 0"),
    "a rank without a record": ("archives", _change_metadata(
        lambda data: _paths(data)[EMBEDDING][0].update(ranks=(0, 1, 2))), DAMAGED,
        "metadata.pkl does not list it for rank 3"),
    "a rank in two groups": ("archives", _change_metadata(
        lambda data: _paths(data)[EMBEDDING].append(_paths(data)[EMBEDDING][0])), DAMAGED,
        "no sharding of each rank"),
    "a path that is no JSON": ("safetensors", _change_metadata(
        lambda data: _paths(data).update({"[": []})), DAMAGED, "path is not a list of keys"),
    "a shard of another step": ("safetensors", _rank_of_another_step, DAMAGED, "of different saves"),
    "a tensor of another save": ("safetensors", _tensor_of_another_save, DAMAGED, "does not list it for rank 1"),
    "a tensor lost": ("safetensors", _tensor_lost, DAMAGED, 'tensor "lm_head.weight" is missing'),
    "hostile metadata": ("safetensors", lambda root: write_metadata(root, _Hostile()), DAMAGED,
        "mkdir.*nothing in it was executed|nothing.*was executed"),
    "a hostile archive": ("archives", lambda root: torch.save({"w": _Hostile()}, root / "model_1.pt"), DAMAGED,
        "nothing.*was executed"),
    "metadata cut": ("safetensors", _cut("metadata.pkl"), DAMAGED, "metadata.pkl: pickle ends before its end mark"),
    "a stage missing": ("pipeline", _change_metadata(
        lambda data: _paths(data)[EMBEDDING][0].update(ranks=())), DAMAGED, "does not list it for rank 0"),
}  # fmt: skip


def _deep() -> object:
    value: object = ()
    for _ in range(70):
        value = (value, value)
    return value


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_malformed_or_of_another_save_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, damage, error_class, message = REFUSED[name]
    root = copied(case, tmp_path)
    damage(root)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error_class, match=message) as error:
        catalog = open_checkpoint(root)
        ckptx.convert("to-dcp", root, tmp_path / "out", base="none")  # replicas are compared when they are read
        raise AssertionError(catalog)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "was-executed").exists() and not (tmp_path / "out").exists()


def test_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    root = copied("safetensors", tmp_path)
    tensors = load_file(root / "model_2.safetensors")
    tensors["lm_head.weight"][3, 1] += 1
    save_file(tensors, root / "model_2.safetensors")
    with pytest.raises(InputError, match=r"lm_head\.weight"):
        ckptx.convert("to-hf", root, tmp_path / "out", base="none")


@pytest.mark.parametrize("case", ["archives", "safetensors"])
def test_an_unfinished_save_is_refused(case: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(FIXTURES / case, tmp_path / "runs" / "tmp_step_2"))
    for path in (root, root.parent):
        with pytest.raises(UnsupportedError, match="an unfinished save of torch_checkpointing"):
            open_checkpoint(path)
    shutil.copytree(FIXTURES / case, tmp_path / "runs" / "step_1")
    assert open_checkpoint(tmp_path / "runs").root.name == "step_1"


@pytest.mark.parametrize("case", ["safetensors", "rank_directories"])
def test_safetensors_of_which_nothing_records_the_sharding_are_refused(case: str, tmp_path: Path) -> None:
    root = copied(case, tmp_path)
    (root / "metadata.pkl").unlink()
    first = "model_0.safetensors" if case == "safetensors" else "rank_0"
    for path in (root, root / first):
        with pytest.raises(UnsupportedError, match="nothing records how"):
            open_checkpoint(path)


def test_plain_tensors_of_several_ranks_are_refused(tmp_path: Path) -> None:
    root = copied("archives", tmp_path)
    metadata = metadata_of(root)
    del metadata["metadata"]["model"]
    write_metadata(root, metadata)
    for rank in range(4):
        torch.save({"w": torch.ones(3)}, root / f"model_{rank}.pt")
    with pytest.raises(UnsupportedError, match=r"no metadata\.pkl records how 4 ranks share them"):
        open_checkpoint(root)


def test_a_rank_is_missing_and_nothing_lists_it(tmp_path: Path) -> None:
    root = copied("archives", tmp_path)
    (root / "metadata.pkl").unlink()
    (root / "model_1.pt").unlink()
    with pytest.raises(InputError, match=re.escape("(model_1.pt); copy them")):
        open_checkpoint(root)
    for name in root.glob("*_[23].pt"):
        name.unlink()
    shutil.copy(FIXTURES / "archives" / "model_1.pt", root)
    with pytest.raises(InputError, match="no rank has"):  # half of the ranks
        open_checkpoint(root)


def test_items_with_a_tensor_of_one_name_are_refused(tmp_path: Path) -> None:
    torch.save({"ema.w": torch.ones(1)}, tmp_path / "model_0.pt")
    torch.save({"w": torch.ones(1)}, tmp_path / "ema_0.pt")
    write_metadata(tmp_path, {"version": "2.0", "world_size": 1, "metadata": {}})
    with pytest.raises(InputError, match=r'"ema\.w" is in the items'):
        open_checkpoint(tmp_path)


def test_values_that_refer_to_each_other_end(tmp_path: Path) -> None:
    """A list of 100 lists that are one list, 16 levels deep, would have more values than can be visited."""
    value: Any = [torch.ones(1)]
    for _ in range(14):
        value = [value] * 100
    torch.save({"w": torch.ones(1), "deep": value}, tmp_path / "model_0.pt")
    write_metadata(tmp_path, {"version": "2.0", "world_size": 1, "metadata": {}})
    with pytest.raises(UnsupportedError, match="has more than"):
        open_checkpoint(tmp_path)
