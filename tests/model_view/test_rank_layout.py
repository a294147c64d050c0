"""Who holds what: ranks from file names, mesh from the manifest, and sums over hand-made cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import ckptx
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.manifest import LayoutRecord
from ckptx.catalog.region import Region, full_region
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.model_view.rank_layout import (
    Layout,
    format_layer_ranges,
    layer_of,
    layer_ranges,
    layout_by_rank,
    rank_of,
    recorded_mesh,
)
from tests.formats.stock_goldens import GOLDENS
from tests.support.checkpoint_writers import LLAMA, llama, write_hf

Held = Mapping[str, Sequence[tuple[int, Region]]]


def catalog_of(held: Held, replicas: Held | None = None, dtype: str = "BF16") -> Catalog:
    """A DCP by hand: which rank holds which rectangles of each tensor."""
    offsets: dict[str, int] = {}

    def chunks(blocks: Sequence[tuple[int, Region]]) -> tuple[Chunk, ...]:
        found = []
        for rank, region in blocks:
            file = f"__{rank}_0.distcp"
            nbytes = DTYPES_BY_NAME[dtype].nbytes(region.numel)
            found.append(Chunk(region, file, offsets.get(file, 0), nbytes))
            offsets[file] = offsets.get(file, 0) + nbytes
        return tuple(found)

    tensors = {}
    for name, blocks in held.items():
        shape = tuple(max(r.offsets[dim] + r.sizes[dim] for _, r in blocks) for dim in range(len(blocks[0][1].sizes)))
        more = chunks((replicas or {}).get(name, ()))
        tensors[name] = TensorEntry(name, DTYPES_BY_NAME[dtype], shape, chunks(blocks), more)
    return Catalog(Path("made"), "dcp", tensors, files=dict(sorted(offsets.items())))


def look(catalog: Catalog, dims: ParallelDims | None = None) -> Layout:
    return layout_by_rank(catalog, {name: name for name in catalog.tensors}, dims)


def rows(begin: int, size: int, width: int = 4) -> Region:
    return Region((begin, 0), (size, width))


def halves(first: int, second: int) -> list[tuple[int, Region]]:
    return [(first, rows(0, 2)), (second, rows(2, 2))]


@pytest.mark.parametrize(
    ("file", "rank"),
    [
        ("__3_0.distcp", 3),
        ("__12_34.distcp", 12),
        ("model/__1_0.distcp", 1),
        ("shard-00001-model-00002-of-00002.safetensors", 0),
        ("shard-01024-model-00001-of-00001.safetensors", 1023),
        ("model-00001-of-00002.safetensors", None),
        ("model.safetensors", None),
        ("__x_0.distcp", None),
        ("__0_0.distcp.bak", None),
        (f"__{'9' * 5000}_0.distcp", None),
    ],
)
def test_a_file_tells_its_rank(file: str, rank: int | None) -> None:
    assert rank_of(file) == rank


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.experts.5.up_proj.weight", ("model.layers", 3)),
        ("transformer.h.11.attn.bias", ("transformer.h", 11)),
        ("model.embed_tokens.weight", None),
        ("head.0", None),
        (f"layers.{'9' * 5000}.weight", None),
    ],
)
def test_a_name_tells_its_layer(name: str, layer: tuple[str, int] | None) -> None:
    assert layer_of(name) == layer


def test_layers_are_written_as_ranges() -> None:
    layers = [("h", 9), ("h", 0), ("h", 1), ("h", 2), ("h", 1), ("g", 4), ("h", 11)]
    assert layer_ranges(layers) == [("g", 4, 5), ("h", 0, 3), ("h", 9, 10), ("h", 11, 12)]
    assert format_layer_ranges(layer_ranges(layers)) == "g 4; h 0-2, 9, 11"
    assert format_layer_ranges([]) == "-"


FILES = ["__0_0.distcp", "__3_0.distcp"]


@pytest.mark.parametrize(
    ("layout", "dims", "doubt"),
    [
        (LayoutRecord(2, 2, 1, None), ParallelDims(2, 2, 1), None),
        (LayoutRecord(1, 1, 1, None), ParallelDims(), None),  # files that no rank wrote
        (LayoutRecord(1, 3, 1, None), None, "it has 3 ranks, but file names go up to rank 3"),
        (LayoutRecord(1 << 20, 1, 1, None), None, "it has 1,048,576 ranks, more than the limit of 65,536"),
    ],
)
def test_a_manifest_is_believed_when_it_fits_the_files(
    layout: LayoutRecord, dims: ParallelDims | None, doubt: str
) -> None:
    found, said = recorded_mesh(layout, FILES)
    assert found == dims
    assert (said is None) == (doubt is None) and (doubt or "") in (said or "")
    assert recorded_mesh(None, FILES) == (None, None)


def test_bytes_add_up_by_rank_and_a_shared_name_adds_nothing() -> None:
    catalog = catalog_of({"layers.0.w": halves(0, 1), "norm": [(1, full_region((5,)))]})
    catalog.tensors["twin"] = catalog.tensors["layers.0.w"]._replace(name="twin")
    layout = look(catalog, ParallelDims(tp=2))
    assert [(h.tensor_count, h.nbytes) for h in layout.holders] == [(2, 16), (3, 16 + 10)]
    assert sum(h.nbytes for h in layout.holders) == catalog.nbytes
    assert layout.balance() == {
        "mean": 21.0, "max": 26, "max_rank": 1, "min": 16, "min_rank": 0, "max_over_mean": 26 / 21,
    }  # fmt: skip
    assert layout.sharded_count == 2
    assert layout.names_outside_layers == {0: ["norm", "twin"]}


def test_a_replica_takes_room_and_is_no_cut() -> None:
    whole_tensor = {"layers.0.norm": [(0, full_region((4,)))]}
    layout = look(catalog_of(whole_tensor, {"layers.0.norm": [(1, full_region((4,)))]}), ParallelDims(tp=2))
    assert [h.nbytes for h in layout.holders] == [8, 8]
    assert layout.sharded_count == 0
    assert [piece.is_replica for piece in layout.shardings[0].shards] == [False, True]


def test_ranks_without_a_tensor_are_there_when_the_mesh_is_known() -> None:
    catalog = catalog_of({"layers.0.w": [(0, rows(0, 4))], "layers.1.w": [(4, rows(0, 4))]})
    layout = look(catalog, ParallelDims(tp=2, pp=2, dp_shard=2))
    assert [(h.stage, h.dp, h.tp) for h in layout.holders[3:6]] == [(0, 1, 1), (1, 0, 0), (1, 0, 1)]
    assert [h.rank for h in layout.holders if h.nbytes] == [0, 4]
    assert [h.rank for h in look(catalog).holders] == [0, 4]


def test_stages_are_cut_alike_and_share_a_cut() -> None:
    held = {f"layers.{layer}.w": halves(2 * (layer // 2), 2 * (layer // 2) + 1) for layer in range(4)}
    layout = look(catalog_of(held), ParallelDims(tp=2, pp=2))
    (group,) = layout.groups
    assert (group.pattern, group.indices_by_holder) == ("layers.*.w", {0: ["0", "1"], 2: ["2", "3"]})
    assert [[h.rank for h in holders] for _, holders in layout.holders_by_stage()] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("layers", "stages"),
    [
        ({0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}, [0, 0, 1, 1]),
        ({0: [0, 4], 1: [0, 4], 2: [2, 6], 3: [2, 6]}, [0, 0, 1, 1]),  # interleaved
        ({0: [0, 1], 1: [1, 2], 2: [2, 3]}, [0, 0, 0]),  # a chain
        ({0: [2], 1: [0, 1], 2: [1, 2]}, [0, 0, 0]),
        ({0: [0], 1: [], 2: [0]}, [0, None, 0]),
    ],
)
def test_ranks_with_layers_in_common_are_one_stage(layers: dict[int, list[int]], stages: list[int | None]) -> None:
    held: dict[str, list[tuple[int, Region]]] = {}
    for rank, numbers in layers.items():
        for number in numbers:
            held[f"layers.{number}.of{rank}"] = [(rank, rows(0, 1))]
        held[f"outside{rank}"] = [(rank, rows(0, 1))]
    assert [holder.stage for holder in look(catalog_of(held)).holders] == stages


def test_without_ranks_files_are_the_holders(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", llama(), shards=2)
    layout = look(ckptx.open_checkpoint(tmp_path / "hf"))
    assert not layout.has_ranks
    assert [(h.label, h.stage) for h in layout.holders] == [(f"model-0000{i}-of-00002.safetensors", None) for i in "12"]
    assert sum(h.tensor_count for h in layout.holders) == len(llama())


def test_a_conversion_for_no_mesh_is_told_by_file(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", llama(), config=LLAMA)
    ckptx.convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp", files=3)
    catalog = ckptx.open_checkpoint(tmp_path / "dcp")
    assert look(catalog).has_ranks
    assert not look(catalog, ParallelDims()).has_ranks


def test_what_stock_torch_wrote_adds_up_as_it_says() -> None:
    """`fixtures/dcp/sharded` was saved by three ranks of stock torch, which is asked what is where."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    root = GOLDENS / "sharded"
    read = FileSystemReader(root).read_metadata()
    expected: dict[int, int] = {}
    for index, info in read.storage_data.items():
        entry = read.state_dict_metadata[index.fqn]
        if isinstance(entry, TensorStorageMetadata):
            sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
            rank = int(info.relative_path[2:].partition("_")[0])
            expected[rank] = expected.get(rank, 0) + sizes.numel() * entry.properties.dtype.itemsize
    layout = look(ckptx.open_checkpoint(root))
    assert {h.rank: h.nbytes for h in layout.holders} == expected
    assert len(expected) == 3
