"""DCP directories: what stock torch wrote reads back bit for bit; what is incomplete or odd is refused by name."""

from __future__ import annotations

import io
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import LazyChunks
from ckptx.catalog.region import Region, full_region
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.dcp.metadata import DcpMetadata, StorageInfo, StorageKey, TensorMetadata, parse_metadata
from ckptx.formats.dcp.metadata_writer import metadata_to_bytes
from ckptx.formats.dcp.reader import locate_payloads, open_dcp
from ckptx.model_view.parameter_count import find_aliases
from ckptx.storage.local import LocalSource
from tests.formats.stock_goldens import (
    GOLDENS,
    archive,
    golden_values,
    raw_bytes,
    raw_tensor,
    values,
    write_dcp,
)
from tests.support import checkpoint_writers
from tests.support.memory_storage import MemoryFiles, MemoryPath, source_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/.metadata"))


def opened(root: Path | MemoryPath) -> Catalog:
    catalog = open_dcp(source_of(root))
    with catalog.source.open() as files:
        return locate_payloads(catalog, files)


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_holds_what_torch_put_into_it(name: str) -> None:
    assert values(opened(GOLDENS / name)) == golden_values(name)


@pytest.mark.parametrize("name", NAMES)
def test_checksums_of_goldens_are_those_of_their_records(name: str) -> None:
    catalog = opened(GOLDENS / name)
    with catalog.source.open() as files:
        for entry in catalog.tensors.values():
            for chunk in entry.chunks:
                assert chunk.record is not None
                assert zlib.crc32(files.read(chunk.file, chunk.record.offset, chunk.record.nbytes)) == chunk.record.crc


def test_opening_reads_metadata_alone_and_keeps_the_order_on_disk() -> None:
    catalog = open_dcp(LocalSource(GOLDENS / "two_files"))
    places = [(entry.chunks[0].file, entry.chunks[0].offset) for entry in catalog.tensors.values()]
    assert places == sorted(places)
    assert catalog.format == "dcp"
    assert all(chunk.is_archive for entry in catalog.tensors.values() for chunk in entry.chunks)
    assert catalog.files == {
        name: (GOLDENS / "two_files" / name).stat().st_size for name in ("__0_0.distcp", "__0_1.distcp")
    }
    assert catalog.planner_data == {name: (name,) for name in catalog.tensors}


def test_objects_are_counted_and_never_opened() -> None:
    catalog = open_dcp(LocalSource(GOLDENS / "objects"))
    assert set(catalog.objects) == {"step", "rng.name"}
    assert set(catalog.tensors) == {"weight", "rng.state", "tensors.0", "tensors.1"}
    assert catalog.planner_data is not None
    assert catalog.planner_data["tensors.1"] == ("tensors", 1)


def test_strides_are_none_only_where_elements_are_row_major() -> None:
    catalog = opened(GOLDENS / "transposed")
    strides = {name: entry.chunks[0].strides for name, entry in catalog.tensors.items()}
    assert strides == {"t": (1, 4), "permuted": (1, 12, 4), "plain": None}
    assert opened(GOLDENS / "channels_last").tensors["conv"].chunks[0].strides == (75, 1, 15, 3)


def test_a_sharded_save_has_a_chunk_per_rank() -> None:
    catalog = open_dcp(LocalSource(GOLDENS / "sharded"))
    regions = {name: [str(chunk.region) for chunk in entry.chunks] for name, entry in catalog.tensors.items()}
    assert regions["rows"] == ["[0:3, 0:4]", "[3:6, 0:4]", "[6:7, 0:4]"]
    assert regions["columns"] == ["[0:3, 0:3]", "[0:3, 3:6]", "[0:3, 6:8]"]
    assert len(regions["replicated"]) == 1


def test_pairs_of_float4_count_double(tmp_path: Path) -> None:
    tensor = raw_tensor("float4_e2m1fn_x2", (4, 6))
    dcp_save({"w": tensor}, checkpoint_id=tmp_path, no_dist=True)
    entry = opened(tmp_path).tensors["w"]
    assert (entry.dtype, entry.shape, entry.nbytes) == (DTYPES_BY_NAME["F4"], (4, 12), 24)
    assert values(opened(tmp_path))["w"][2] == raw_bytes(tensor)


def test_our_own_writing_reads_back_with_aliases_sharing_bytes(place: MemoryPath) -> None:
    tensors = {"w": raw_tensor("bfloat16", (5, 4)), "s": raw_tensor("float32", ())}
    cuts = {"w": [(slice(0, 5), slice(0, 1)), (slice(0, 2), slice(1, 4)), (slice(2, 5), slice(1, 4))]}
    write_dcp(place, tensors, cuts, aliases={"head": "w"})
    catalog = opened(place)
    assert catalog.tensors["head"].chunks == catalog.tensors["w"].chunks
    read = values(catalog)
    assert read["w"] == read["head"] == ("BF16", (5, 4), raw_bytes(tensors["w"]))
    assert read["s"] == ("F32", (), raw_bytes(tensors["s"]))


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from pathlib import Path; from ckptx.storage.local import LocalSource;"
        "from ckptx.formats.dcp import reader as dcp; from ckptx.formats.hf import torch_bin;"
        "root = Path(sys.argv[1]); catalog = dcp.open_dcp(LocalSource(root));"
        "dcp.locate_payloads(catalog, catalog.source.open()); assert catalog.tensors;"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(GOLDENS / "sharded")], check=True)


def edit(root: MemoryPath, change: Callable[[DcpMetadata], DcpMetadata]) -> None:
    metadata = parse_metadata((root / ".metadata").read_bytes(), "x")
    (root / ".metadata").write_bytes(metadata_to_bytes(change(metadata)))


def test_a_gap_is_refused(place: MemoryPath) -> None:
    write_dcp(place, {"w": raw_tensor("bfloat16", (4, 2))}, {"w": [(slice(0, 3), slice(0, 2))]})
    with pytest.raises(InputError, match=r'tensor "w" of shape \[4, 2\]: no chunk covers \[3:4, 0:2\]'):
        open_dcp(place)


def test_an_overlap_is_refused(place: MemoryPath) -> None:
    cuts = {"w": [(slice(0, 3), slice(0, 2)), (slice(2, 4), slice(0, 2))]}
    write_dcp(place, {"w": raw_tensor("bfloat16", (4, 2))}, cuts)
    with pytest.raises(InputError, match=r'tensor "w" .*more than one chunk covers \[2:3, 0:2\]'):
        open_dcp(place)


def test_a_chunk_outside_of_its_tensor_is_refused(place: MemoryPath) -> None:
    write_dcp(place, {"w": raw_tensor("bfloat16", (4, 2))})
    edit(place, lambda m: replace(m, tensors={"w": m.tensors["w"]._replace(size=(3, 2))}))
    with pytest.raises(InputError, match=r'tensor "w" .*a chunk is out of bounds at \[0:4, 0:2\]'):
        open_dcp(place)


def test_a_tensor_without_chunks_is_refused(place: MemoryPath) -> None:
    write_dcp(place, {"w": raw_tensor("bfloat16", (4, 2))})
    edit(place, lambda m: replace(m, tensors=m.tensors | {"v": TensorMetadata("int8", (2,), ())}))  # type: ignore[operator]
    with pytest.raises(InputError, match=r'tensor "v" .*no chunk covers \[0:2\]'):
        open_dcp(place)


def test_a_chunk_without_a_place_is_refused(place: MemoryPath) -> None:
    write_dcp(place, {"w": raw_tensor("bfloat16", (4, 2)), "v": raw_tensor("bool", (2,))})
    edit(place, lambda m: replace(m, storage={key: m.storage[key] for key in m.storage if key[0] == "v"}))
    with pytest.raises(InputError, match=r'chunk \[0:4, 0:2\] of tensor "w" has no entry in storage_data'):
        open_dcp(place)


def test_a_place_without_a_chunk_is_refused(place: MemoryPath) -> None:
    write_dcp(place, {"w": raw_tensor("bfloat16", (4, 2)), "v": raw_tensor("bool", (2,))})
    edit(place, lambda m: replace(m, tensors={"v": m.tensors["v"]}))
    with pytest.raises(
        InputError, match=r'storage_data has an entry for "w" at \(0, 0\), but no tensor has that chunk'
    ):
        open_dcp(place)


def test_an_object_without_a_place_is_refused(place: MemoryPath) -> None:
    write_dcp(place, {"w": raw_tensor("bfloat16", (4, 2))})
    edit(place, lambda m: replace(m, objects=("step",)))
    with pytest.raises(InputError, match='object "step" has no entry in storage_data'):
        open_dcp(place)


def test_a_missing_file_is_refused(place: MemoryPath) -> None:
    (place / "c").copy_from(GOLDENS / "two_files")
    (place / "c" / "__0_1.distcp").unlink()
    with pytest.raises(InputError, match=r"__0_1\.distcp: no such file"):
        open_dcp(place / "c")


def test_a_truncated_file_is_refused(place: MemoryPath) -> None:
    (place / "c").copy_from(GOLDENS / "two_files")
    path = place / "c" / "__0_1.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"__0_1\.distcp: has 3153 bytes, but \.metadata refers to bytes up to 3154"):
        open_dcp(place / "c")


def test_git_lfs_pointers_are_named(place: MemoryPath) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (place / "c").copy_from(GOLDENS / "two_files")
    for name in ("__0_0.distcp", ".metadata"):
        (place / "c" / name).write_bytes(pointer)
        with pytest.raises(InputError, match=f"{name}: a git-lfs pointer"):
            open_dcp(place / "c")


@pytest.mark.parametrize("name", ["../__0_0.distcp", "/etc/passwd", "a/../../b"])
def test_file_names_that_lead_out_are_refused(name: str, place: MemoryPath) -> None:
    root = place / "c"
    write_dcp(root, {"w": raw_tensor("bfloat16", (4, 2))})
    edit(
        root,
        lambda m: replace(m, storage={key: info._replace(path=name) for key, info in m.storage.items()}),
    )
    with pytest.raises(InputError, match="leads out of the checkpoint directory"):
        open_dcp(root)


def test_an_unknown_dtype_is_named(place: MemoryPath) -> None:
    write_dcp(place, {"w": raw_tensor("bfloat16", (4, 2))})
    edit(place, lambda m: replace(m, tensors={"w": m.tensors["w"]._replace(dtype="qint8")}))
    with pytest.raises(UnsupportedError, match='tensor "w" has dtype qint8'):
        open_dcp(place)


def test_stream_transforms_are_named(place: MemoryPath) -> None:
    write_dcp(place, {"w": raw_tensor("bfloat16", (4, 2))})
    edit(
        place,
        lambda m: replace(m, storage={k: info._replace(transforms=("stream.zstd",)) for k, info in m.storage.items()}),
    )
    with pytest.raises(UnsupportedError, match=r'tensor "w" was saved with stream transforms \(stream\.zstd'):
        open_dcp(place)


def test_an_interrupted_save_is_named(place: MemoryPath) -> None:
    (place / "c").copy_from(GOLDENS / "two_files")
    (place / "c" / ".metadata").unlink()
    with pytest.raises(InputError, match="the save was interrupted"):
        open_dcp(place / "c")
    (place / "c" / "__0.metadata").touch()
    with pytest.raises(UnsupportedError, match=r"one \.metadata per rank"):
        open_dcp(place / "c")


def test_a_directory_without_any_dcp_is_an_input_error(place: MemoryPath) -> None:
    with pytest.raises(InputError, match="no such file"):
        open_dcp(place)
    (place / ".metadata").mkdir()
    with pytest.raises(InputError, match="expected a regular file"):
        open_dcp(place)


def rewrite(root: MemoryPath, name: str, payload: bytes, size: tuple[int, ...], dtype: str) -> None:
    """A checkpoint of one tensor whose payload is `payload`."""
    (root / "__0_0.distcp").write_bytes(payload)
    metadata = DcpMetadata(
        {name: TensorMetadata(dtype, size, (full_region(size),))},
        (),
        {(name, (0,) * len(size)): StorageInfo("__0_0.distcp", 0, len(payload))},
    )
    (root / ".metadata").write_bytes(metadata_to_bytes(metadata))


def test_a_payload_of_another_dtype_or_shape_is_refused(place: MemoryPath) -> None:
    payload = archive(raw_tensor("bfloat16", (4, 2)))
    rewrite(place, "w", payload, (4, 2), "float16")
    with pytest.raises(
        InputError, match=r'tensor "w": payload is bfloat16 \[4, 2\], but .metadata lists float16 \[4, 2\]'
    ):
        opened(place)
    rewrite(place, "w", payload, (2, 4), "bfloat16")
    with pytest.raises(InputError, match=r"payload is bfloat16 \[4, 2\], but .metadata lists bfloat16 \[2, 4\]"):
        opened(place)


def test_a_conjugate_payload_is_refused(tmp_path: Path) -> None:
    dcp_save({"w": torch.randn(3, dtype=torch.complex64).conj()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(UnsupportedError, match=r'__0_0\.distcp: tensor "w": conj view'):
        opened(tmp_path)


def test_a_safetensors_payload_is_refused(place: MemoryPath) -> None:
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    rewrite(place, "w", len(header).to_bytes(8, "little") + header + bytes(8), (2,), "float32")
    with pytest.raises(UnsupportedError, match=r'tensor "w": has a safetensors payload'):
        opened(place)


def test_a_damaged_payload_is_refused(place: MemoryPath) -> None:
    rewrite(place, "w", bytes(2000), (2,), "float32")
    with pytest.raises(InputError, match=r'tensor "w": not a torch archive'):
        opened(place)


def test_planner_data_of_another_planner_is_noted(place: MemoryPath) -> None:
    write_dcp(place, {"w": raw_tensor("bfloat16", (4, 2))}, planner_data=["own"])
    catalog = open_dcp(place)
    assert catalog.planner_data is None
    assert catalog.notes == ["planner_data of type list ignored: expected a dict"]


class _Counting(MemoryFiles):
    """Counts its reads."""

    def __init__(self, root: MemoryPath) -> None:
        super().__init__(root, None)
        self.reads = 0

    def read_up_to(self, name: str, offset: int, nbytes: int) -> bytes:
        self.reads += 1
        return super().read_up_to(name, offset, nbytes)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        self.reads += 1
        return super().read(name, offset, nbytes)


def test_archives_of_a_mixture_of_experts_are_not_read_one_by_one(place: MemoryPath) -> None:
    shape, count = (8, 8), 2_000
    block = archive(raw_tensor("bfloat16", shape))
    (place / "__0_0.distcp").write_bytes(block * count)
    names = [f"model.layers.{i // 400}.mlp.experts.{i % 400}.down_proj.weight" for i in range(count)]
    tensor = TensorMetadata("bfloat16", shape, (Region((0, 0), shape),))
    storage: dict[StorageKey, StorageInfo] = {
        (name, (0, 0)): StorageInfo("__0_0.distcp", i * len(block), len(block)) for i, name in enumerate(names)
    }
    (place / ".metadata").write_bytes(metadata_to_bytes(DcpMetadata(dict.fromkeys(names, tensor), (), storage)))
    catalog = open_dcp(place)
    with _Counting(place) as files:
        located = locate_payloads(catalog, files)
        assert files.reads <= count + 1, "behind the end of one lies the head of the next"
        files.reads = 0
        later = locate_payloads(catalog, files, lazy=True)
        assert files.reads == 0
        assert find_aliases(later) == {} and files.reads == 0, "names that share bytes are found without a look"
        assert tuple(later.tensors[names[7]].chunks) == located.tensors[names[7]].chunks
        assert files.reads <= 2
        assert locate_payloads(later, files).tensors[names[8]].chunks[0] == located.tensors[names[8]].chunks[0]


def test_an_archive_of_another_length_is_looked_into_at_once(place: MemoryPath) -> None:
    tensor = checkpoint_writers.value("F32", 4, 6)
    stream = io.BytesIO()
    torch.save(torch.zeros(4, 12)[:, :6], stream)
    checkpoint_writers.write_dcp(place, {"w": tensor, "v": tensor}, payloads={"w": stream.getvalue()})
    with place.open() as files:
        later = locate_payloads(open_dcp(place), files, lazy=True)
        found, waiting = later.tensors["w"].chunks, later.tensors["v"].chunks
        assert isinstance(found, tuple) and found[0].strides == (12, 1)
        assert isinstance(waiting, LazyChunks)
        assert waiting[0] == opened(place).tensors["v"].chunks[0]
        assert waiting == locate_payloads(open_dcp(place), files, lazy=True).tensors["v"].chunks
        assert waiting != found
