"""`torch_dist` checkpoints of Megatron: read as any DCP, with stand-ins for the plans that lie in their `.metadata`."""

from __future__ import annotations

import enum
import json
import pickle
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptx
from ckptx.errors import InputError
from ckptx.formats.dcp.metadata import parse_metadata
from ckptx.formats.registry import open_checkpoint
from tests.formats.stock_goldens import GOLDENS

torch = pytest.importorskip("torch")
from torch.distributed.checkpoint import filesystem, metadata, planner  # noqa: E402 (torch may be absent)
from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: E402 (torch may be absent)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FIXTURES = GOLDENS.parent / "megatron"
TORCH_DIST = FIXTURES / "torch_dist"
MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"


@dataclass(frozen=True)
class MCoreSavePlan(planner.SavePlan):  # type: ignore[misc]
    """As megatron-core before 0.9 wrote it."""

    mcore_data: Any = None


@dataclass
class MCoreMetadata(metadata.Metadata):  # type: ignore[misc]
    """As megatron-core before 0.9 wrote it."""

    mcore_data: Any = None


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    """Lets stock pickle name the classes of megatron-core, which need not be installed."""
    name, added = "", []
    for part in MEGATRON.split("."):
        name = f"{name}.{part}" if name else part
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            added.append(name)
    for kind in (MCoreSavePlan, MCoreMetadata):
        kind.__module__ = MEGATRON
        setattr(sys.modules[MEGATRON], kind.__name__, kind)
    yield
    for name in added:
        del sys.modules[name]


# --- What megatron-core itself wrote ---


def test_it_reads_as_any_dcp() -> None:
    catalog = open_checkpoint(TORCH_DIST)
    assert catalog.format == "dcp"
    assert catalog.tensors["decoder.layers.self_attention.linear_qkv.weight"].shape == (2, 24, 8)
    extra = {name.partition("/")[2] for name in catalog.objects}
    assert extra == {"shard_0_2", "shard_1_2"}
    assert [sidecar.name for sidecar in catalog.sidecars] == ["common.pt", "metadata.json"]
    assert any("Megatron" in note for note in catalog.notes)


def test_its_tensors_are_those_that_megatron_reads() -> None:
    report = ckptx.verify(FIXTURES / "torch_dist.safetensors", TORCH_DIST)
    differing = {row["name"] for row in report.differing}
    assert differing == {"optimizer.state.exp_avg.output_layer.weight"}, "the optimizer is no part of the model"
    assert report.compared == report.tensors - 1 == 13


def test_converting_keeps_its_names_and_carries_what_is_common(tmp_path: Path) -> None:
    report = ckptx.convert("dcp2hf", TORCH_DIST, tmp_path / "hf", base="none")
    assert report.exit == 0
    assert ckptx.verify(TORCH_DIST, tmp_path / "hf").exit == 0
    assert (tmp_path / "hf" / "common.pt").read_bytes() == (TORCH_DIST / "common.pt").read_bytes()
    assert not (tmp_path / "hf" / "metadata.json").exists(), "it would call safetensors torch_dist"


def test_resharding_leaves_a_torch_dist_checkpoint(tmp_path: Path) -> None:
    ckptx.reshard(TORCH_DIST, tmp_path / "cut", base="none", tp=2, to="dcp")
    assert ckptx.verify(TORCH_DIST, tmp_path / "cut").exit == 0
    for name in ("common.pt", "metadata.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (TORCH_DIST / name).read_bytes()
    before, after = open_checkpoint(TORCH_DIST), open_checkpoint(tmp_path / "cut")
    assert after.objects.keys() == before.objects.keys()
    assert after.tensors.keys() == before.tensors.keys(), "optimizer state goes along"


def test_without_a_base_the_error_says_that_names_are_megatrons_own(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Megatron-Core names.*--base none"):
        ckptx.convert("dcp2hf", TORCH_DIST, tmp_path / "hf")


@pytest.mark.parametrize(
    "said", ["not json", "[]", "{}", json.dumps({"sharded_backend": "zarr"}), json.dumps({"sharded_backend": []})]
)
def test_another_metadata_json_decides_nothing(tmp_path: Path, said: str) -> None:
    shutil.copytree(GOLDENS / "kinds", tmp_path / "c")
    (tmp_path / "c" / "metadata.json").write_text(said)
    (tmp_path / "c" / "common.pt").write_bytes(b"")
    catalog = open_checkpoint(tmp_path / "c")
    assert catalog.sidecars == () and not any("Megatron" in note for note in catalog.notes)


# --- Plans of every shape, by stock pickle ---

NAMES = st.text("abc./", min_size=1, max_size=8)
SIZES = st.lists(st.integers(0, 5), max_size=3).map(torch.Size)


@st.composite
def write_items(draw: st.DrawFn) -> Any:
    index = metadata.MetadataIndex(draw(NAMES), draw(st.none() | SIZES), draw(st.none() | st.integers(0, 3)))
    kind = draw(st.sampled_from(list(planner.WriteItemType)))
    chunk = metadata.ChunkStorageMetadata(draw(SIZES), draw(SIZES))
    properties = metadata.TensorProperties(dtype=draw(st.sampled_from([torch.bfloat16, torch.float8_e4m3fn])))
    tensor = draw(st.none() | st.just(planner.TensorWriteData(chunk, properties, draw(SIZES))))
    return planner.WriteItem(index, kind, tensor_data=tensor)


MCORE_DATA = st.none() | st.dictionaries(
    NAMES, st.dictionaries(st.just("nd_reformulated_orig_global_shape"), SIZES.map(tuple), max_size=1), max_size=2
)


@st.composite
def plans(draw: st.DrawFn) -> Any:
    given_plan = {
        "items": draw(st.lists(write_items(), max_size=4)),
        "storage_data": draw(st.none() | st.just(filesystem._StoragePrefix("__0_"))),
        "planner_data": draw(st.none() | st.dictionaries(NAMES, st.tuples(NAMES), max_size=2)),
    }
    if draw(st.booleans()):
        return MCoreSavePlan(**given_plan, mcore_data=draw(MCORE_DATA))
    return planner.SavePlan(**given_plan)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["kinds", "sharded", "trainer", "objects"]),
    st.lists(plans(), max_size=3),
    MCORE_DATA,
    st.booleans(),
    st.sampled_from([2, 4, 5]),
)
def test_plans_change_nothing_of_what_is_read(
    name: str, all_plans: list[Any], mcore_data: Any, is_older: bool, protocol: int
) -> None:
    read = FileSystemReader(GOLDENS / name).read_metadata()
    expected = parse_metadata(pickle.dumps(read, protocol), "x")
    values = {field.name: getattr(read, field.name) for field in fields(read)}
    theirs = MCoreMetadata(**values, mcore_data=mcore_data) if is_older else replace(read)
    theirs.all_local_plans = all_plans
    theirs.mcore_data = mcore_data
    assert parse_metadata(pickle.dumps(theirs, protocol), "x") == expected


def injected(where: str, module: str, name: str, call: bool) -> bytes:
    """A torch_dist `.metadata` with one more global in a plan, in its items, or beside the plans."""
    read = FileSystemReader(GOLDENS / "kinds").read_metadata()
    item = planner.WriteItem(metadata.MetadataIndex("w"), planner.WriteItemType.BYTE_IO)
    marker = "injected-here"
    read.all_local_plans = [
        planner.SavePlan([marker if where == "item" else item], marker if where == "plan" else None)
    ]
    if where == "beside":
        read.mcore_data = marker
    text = pickle.dumps(read, 2)
    said = pickle.dumps(marker, 2)[2:].split(b"q", 1)[0]
    assert text.count(said) == 1
    return text.replace(said, f"c{module}\n{name}\n".encode() + (b")R" if call else b""))


REFUSED = [
    ("os", "system"),
    ("builtins", "eval"),
    ("builtins", "setattr"),
    ("builtins", "set"),
    ("copyreg", "_reconstructor"),
    ("torch.distributed.checkpoint.planner", "SavePlanner"),
    ("torch.distributed.checkpoint.planner", "LoadPlan"),
    ("torch.distributed.checkpoint.planner", "pickle"),
    ("torch.distributed.checkpoint.planner", "WriteItemType.SHARD"),
    ("torch.distributed.checkpoint.default_planner", "SavePlan"),
    ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
    (MEGATRON, "MCoreSavePlanner"),
    (MEGATRON, "torch"),
    ("megatron.core.dist_checkpointing.mapping", "ShardedTensor"),
    ("megatron", "MCoreSavePlan"),
    ("nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async", "FileSystemWriterAsync"),
]


@pytest.mark.parametrize("call", [False, True])
@pytest.mark.parametrize("where", ["item", "plan", "beside"])
@pytest.mark.parametrize(("module", "name"), REFUSED)
def test_no_class_outside_the_list_is_admitted(where: str, module: str, name: str, call: bool) -> None:
    with pytest.raises(InputError, match="is not allowed in a checkpoint; nothing was executed"):
        parse_metadata(injected(where, module, name, call), "x")


def by_name(member: enum.Enum, protocol: int) -> tuple[object, ...]:
    """How Python 3.11.0 to 3.11.3 pickles a member of an enumeration."""
    return getattr, (type(member), member.name)


def by_value(member: enum.Enum, protocol: int) -> tuple[object, ...]:
    """How all others do."""
    return type(member), (member.value,)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", ["kinds", "sharded", "trainer", "objects"])
def test_members_of_enumerations_are_read_as_any_python_pickles_them(
    name: str, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FileSystemReader(GOLDENS / name).read_metadata()
    item = planner.WriteItem(metadata.MetadataIndex("w"), planner.WriteItemType.SHARD)
    read.all_local_plans = [planner.SavePlan([item])]
    pickles = []
    for reduce in (by_name, by_value):
        for enumeration in (planner.WriteItemType, metadata._MEM_FORMAT_ENCODING):
            monkeypatch.setattr(enumeration, "__reduce_ex__", reduce)
        pickles.append(pickle.dumps(read, protocol))
    assert [b"getattr" in data for data in pickles] == [True, False]
    assert parse_metadata(pickles[0], "x") == parse_metadata(pickles[1], "x")


MEMBER = b"c%s\ngetattr\nctorch.distributed.checkpoint.planner\nWriteItemType\nX\x05\0\0\0SHARD\x86R"


@pytest.mark.parametrize("module", [b"builtins", b"__builtin__"])
@pytest.mark.parametrize(
    ("taken", "instead"),
    [
        (b"WriteItemType\n", b"WriteItem\n"),
        (b"WriteItemType\n", b"SavePlan\n"),
        (b"WriteItemType\n", b"WriteItemType\nK\x00\x85R"),  # a member, not its class
        (b"ctorch.distributed.checkpoint.planner\nWriteItemType\n", b"X\x02\0\0\0os"),
        (b"ctorch.distributed.checkpoint.planner\nWriteItemType\n", b"cbuiltins\ngetattr\n"),
        (b"ctorch.distributed.checkpoint.planner\nWriteItemType\n", b"ccollections\nOrderedDict\n"),
        (b"X\x05\0\0\0SHARD", b"K\x01"),
        (b"X\x05\0\0\0SHARD", b"}"),
    ],
)
def test_getattr_is_for_members_of_enumerations_alone(module: bytes, taken: bytes, instead: bytes) -> None:
    whole = injected("plan", "torch.distributed.checkpoint.planner", "WriteItem", call=False)
    admitted = b"ctorch.distributed.checkpoint.planner\nWriteItem\n"
    at = whole.rindex(admitted)
    member = MEMBER % module
    head, tail = whole[:at], whole[at + len(admitted) :]
    parse_metadata(head + member + tail, "x")
    with pytest.raises(InputError, match=r"builtins\.getattr, which is not allowed in a checkpoint; nothing was"):
        parse_metadata(head + member.replace(taken, instead, 1) + tail, "x")


@pytest.mark.parametrize("name", [b"__class__", b"__init__", b"__reduce_ex__", b"_function"])
def test_no_attribute_of_a_stand_in_is_reached(name: bytes) -> None:
    whole = injected("plan", "torch.distributed.checkpoint.planner", "WriteItem", call=False)
    admitted = b"ctorch.distributed.checkpoint.planner\nWriteItem\n"
    at = whole.rindex(admitted)
    member = (MEMBER % b"builtins").replace(b"X\x05\0\0\0SHARD", b"X" + len(name).to_bytes(4, "little") + name)
    head, tail = whole[:at], whole[at + len(admitted) :]
    expected = parse_metadata(head + MEMBER % b"builtins" + tail, "x")
    assert parse_metadata(head + member + tail, "x") == expected
    with pytest.raises(InputError, match="damaged pickle"):  # what came of it is no function
        parse_metadata(head + member + b")R" + tail, "x")


ADMITTED = [
    ("torch.distributed.checkpoint.planner", "SavePlan"),
    ("torch.distributed.checkpoint.planner", "WriteItem"),
    ("torch.distributed.checkpoint.planner", "WriteItemType"),
    ("torch.distributed.checkpoint.planner", "TensorWriteData"),
    ("torch.distributed.checkpoint.planner", "BytesIOWriteData"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    (MEGATRON, "MCoreSavePlan"),
]


@pytest.mark.parametrize(("module", "name"), ADMITTED)
@pytest.mark.parametrize("attribute", ["items", "__class__", "__setstate__", "__dict__"])
@pytest.mark.parametrize("is_slots", [False, True])
def test_a_stand_in_keeps_nothing_and_cannot_be_changed(module: str, name: str, attribute: str, is_slots: bool) -> None:
    values = b"}X" + len(attribute).to_bytes(4, "little") + attribute.encode() + b"K\x01s"
    state = b"N" + values + b"\x86b" if is_slots else values + b"b"
    clean = injected("plan", module, name, call=True)
    expected = parse_metadata(clean, "x")
    named = f"c{module}\n{name}\n".encode()
    assert parse_metadata(clean.replace(named + b")R", named + b")R" + state), "x") == expected
    with pytest.raises(InputError):  # the class itself, which is not built
        parse_metadata(clean.replace(named + b")R", named + state), "x")
    assert parse_metadata(clean, "x") == expected


@pytest.mark.parametrize(("module", "name"), ADMITTED)
def test_a_plan_is_no_metadata(module: str, name: str) -> None:
    with pytest.raises(InputError):
        parse_metadata(b"\x80\x02" + f"c{module}\n{name}\n)R.".encode(), "x")
