"""Torch's own tests of checkpoint formats by name, with what they expect, of ckptx.

Source: `test/distributed/checkpoint/` of pytorch/pytorch: test_hf_storage.py, test_hf_safetensor_e2e.py,
test_consolidate_hf_safetensors.py, test_quantized_hf_storage.py, test_format_utils.py, test_dcp_to_torch_save.py and
test_torch_save_to_dcp.py. Each test here has the name of one there; the code is our own. Stock torch writes on gloo
ranks, ckptx converts or cuts anew, and stock torch reads what came out, at the placements of the original.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from ckptx.catalog.region import full_region
from ckptx.cli.main import cli
from ckptx.formats.registry import open_checkpoint
from tests.processes.test_several_processes import finish, start
from tests.support import replay_ranks
from tests.support.pool import GlooPool
from tests.support.replay_ranks import square, uneven
from tests.support.replays import index_of, names_of_tests, nbytes, read_tensors, run_convert, write_shard
from tests.support.runner import CliRunner
from tests.support.torch_dcp import assert_same_tensors, file_bytes
from tests.support.torch_dcp import load as stock_load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

ONE, FIRST, SECOND = (
    "model-00001-of-00001.safetensors", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
)  # fmt: skip

ORIGINALS = {
    "TestHfStorage": {
        "test_write_data_hf", "test_write_data_with_sharding", "test_read_data_hf", "test_write_metadata_hf",
        "test_read_metadata_hf",
    },
    "TestSingleRankSaveLoad": {"test_save", "test_load", "test_load_into_empty_dict", "test_load_allowing_resize"},
    "TestDTensorReshardPlacementChange": {
        "test_1d_to_1d_reshard_placement_change", "test_2d_to_2d_reshard_placement_change",
    },
    "TestDTensorReshardMeshChange": {
        "test_1d_to_2d_reshard_mesh_change", "test_2d_to_1d_reshard_mesh_change",
        "test_dtensor_checkpoint_resharding_with_empty_shard",
    },
    "TestConsolidateHFSafeTensors": {
        "test_consolidate_to_one_file", "test_consolidate_to_two_files",
        "test_parse_input_metadata_supports_integer_and_bool_dtypes",
        "test_calculate_max_contiguous_elements_validations", "test_calculate_max_contiguous_elements_valid_cases",
        "test_consolidate_with_two_ranks", "test_consolidate_one_file_with_two_ranks",
        "test_write_sub_tensor_to_file_optimized",
    },
    "TestQuantizedHfStorage": {"test_dequantization", "test_dtensor_slice_dequantization_block_alignment"},
    "TestFormatUtilsNoDist": {"test_dcp_to_torch_save", "test_torch_save_to_dcp"},
    "TestFormatUtils": {"test_online_torch_save_to_dcp"},
    "TestDCPToTorchSave": {"test_dcp_to_torch_save"},
    "TestTorchSaveToDCP": {"test_offline_conversion", "test_onine_conversion"},
}  # fmt: skip
NOT_REPLAYED = {
    "TestSingleRankSaveLoad.test_load_allowing_resize": (
        "a planner that resizes the tensors it loads into, a matter of the reader; torch has dropped it since"
    ),
    "TestConsolidateHFSafeTensors.test_calculate_max_contiguous_elements_validations": (
        "arguments of an internal function; what a shard may say is in tests/formats/test_sharding_info.py"
    ),
    "TestConsolidateHFSafeTensors.test_calculate_max_contiguous_elements_valid_cases": (
        "results of an internal function; runs of bytes are in tests/transfer/"
    ),
    "TestTorchSaveToDCP.test_onine_conversion": (
        "a reader defined in the test loads a pickle without converting it; the file itself is converted offline above"
    ),
}


def test_every_original_is_replayed_or_listed_with_its_reason() -> None:
    originals = {f"{group}.{name}" for group, names in ORIGINALS.items() for name in names}
    ours = names_of_tests(__name__)
    assert ours - originals == {"test_every_original_is_replayed_or_listed_with_its_reason"}
    assert (ours & originals) | NOT_REPLAYED.keys() == originals
    assert not ours & NOT_REPLAYED.keys()


def ran(*arguments: object) -> None:
    result = CliRunner().invoke(cli, list(map(str, arguments)), standalone_mode=False)
    assert result.return_value == 0, result.stderr


def small() -> dict[str, torch.Tensor]:
    """A module of linear layers and an embedding, as torch's tests save it."""
    torch.manual_seed(1)
    layers = {"linear_1": nn.Linear(5, 5), "linear_2": nn.Linear(5, 1), "emb": nn.EmbeddingBag(5, 10)}
    return nn.ModuleDict(layers).state_dict()


def save(state: dict[str, torch.Tensor], out: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(out), **options), no_dist=True)


class TestHfStorage:
    """What torch's writer and reader of safetensors do with files, metadata and the index."""

    def test_write_data_hf(self, tmp_path: Path) -> None:
        """Tensors go into the files of a mapping; the checkpoint is an HF one, and comes back from a DCP as it was."""
        state = {"tensor_0": torch.rand(4), "tensor_1": torch.rand(10)}
        save(state, tmp_path / "hf", fqn_to_index_mapping={"tensor_0": 1, "tensor_1": 2})
        catalog = open_checkpoint(tmp_path / "hf")
        assert catalog.format == "huggingface"
        assert {name: entry.chunks[0].file for name, entry in catalog.tensors.items()} == {
            "tensor_0": FIRST, "tensor_1": SECOND,
        }  # fmt: skip
        assert [entry.nbytes for entry in catalog.tensors.values()] == [16, 40]
        run_convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
        assert_same_tensors(stock_load(tmp_path / "dcp"), state)
        run_convert("dcp2hf", tmp_path / "dcp", tmp_path / "back", "--base", "none")
        assert_same_tensors(read_tensors(tmp_path / "back"), state)

    def test_write_data_with_sharding(self, tmp_path: Path) -> None:
        """Saved as a shard of one rank, it is read as that and made whole."""
        state = {"tensor_0": torch.rand(4), "tensor_1": torch.rand(10)}
        save(state, tmp_path / "sharded", save_distributed=True)
        catalog = open_checkpoint(tmp_path / "sharded")
        assert (catalog.format, list(catalog.files)) == ("sharded", ["shard-00001-model-00001-of-00001.safetensors"])
        run_convert("dcp2hf", tmp_path / "sharded", tmp_path / "hf", "--base", "none")
        assert_same_tensors(read_tensors(tmp_path / "hf"), state)

    def test_read_data_hf(self, tmp_path: Path) -> None:
        """A file without `__metadata__` is read for what it holds."""
        header = json.dumps({"tensor_0": {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]}}).encode()
        expected = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / ONE).write_bytes(len(header).to_bytes(8, "little") + header + expected.numpy().tobytes())
        run_convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
        assert_same_tensors(stock_load(tmp_path / "dcp"), {"tensor_0": expected})

    def test_write_metadata_hf(self, tmp_path: Path) -> None:
        """The index says for each tensor its file, and the bytes of all."""
        state = {"tensor_0": torch.rand(5, 5), "tensor_1": torch.rand(25)}
        save(state, tmp_path / "hf")
        theirs = index_of(tmp_path / "hf")
        assert theirs == {"metadata": {"total_size": 200}, "weight_map": dict.fromkeys(state, ONE)}
        run_convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
        run_convert("dcp2hf", tmp_path / "dcp", tmp_path / "new", "--base", "none", "--index", "always")
        ours = index_of(tmp_path / "new")
        assert ours["metadata"]["total_size"] == 200
        assert ours["weight_map"] == dict.fromkeys(state, "model.safetensors")
        (tmp_path / "dcp" / "config.json").write_text("{}")
        run_convert("dcp2hf", tmp_path / "dcp", tmp_path / "back")
        kept = {name: data for name, data in file_bytes(tmp_path / "back").items() if "safetensors" in name}
        assert kept == file_bytes(tmp_path / "hf")

    def test_read_metadata_hf(self, tmp_path: Path) -> None:
        """Names, dtypes, shapes and places come from the header of a file of any name."""
        header = json.dumps({"tensor_0": {"dtype": "F32", "shape": [5, 10], "data_offsets": [0, 200]}}).encode()
        (tmp_path / "test.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(200))
        (entry,) = open_checkpoint(tmp_path).tensors.values()
        assert (entry.name, entry.dtype.name, entry.shape) == ("tensor_0", "F32", (5, 10))
        (chunk,) = entry.chunks
        assert chunk[:4] == (full_region((5, 10)), "test.safetensors", 8 + len(header), 200)


class TestSingleRankSaveLoad:
    """One process saves, another form is loaded."""

    def test_save(self, tmp_path: Path) -> None:
        """What torch's writer saved is what ckptx makes a DCP of."""
        save(small(), tmp_path / "hf")
        assert_same_tensors(load_file(tmp_path / "hf" / ONE), small())
        run_convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
        assert_same_tensors(stock_load(tmp_path / "dcp"), small())

    def test_load(self, tmp_path: Path) -> None:
        """What the safetensors library saved comes out of torch's reader after both conversions."""
        (tmp_path / "hf").mkdir()
        save_file(small(), tmp_path / "hf" / ONE)
        run_convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
        ran("reshard", tmp_path / "dcp", tmp_path / "cut", "--to", "safetensors", "--dp-shard", 3, "--base", "none")
        state = {name: torch.full_like(tensor, -1) for name, tensor in small().items()}
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "cut")), no_dist=True)
        assert_same_tensors(state, small())

    def test_load_into_empty_dict(self, tmp_path: Path) -> None:
        """A loader that asks for no name gets all there are, from files of either form."""
        (tmp_path / "hf").mkdir()
        save_file(small(), tmp_path / "hf" / ONE)
        run_convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp")
        ran("reshard", tmp_path / "dcp", tmp_path / "cut", "--to", "safetensors", "--dp-shard", 2, "--base", "none")
        for checkpoint in (tmp_path / "dcp", tmp_path / "cut"):
            found = _load_state_dict_from_keys(storage_reader=replay_ranks.reader_of(checkpoint))
            assert_same_tensors(found, small())


def cut_anew_loads_everywhere(pool: GlooPool, root: Path, saved: int, loaded_at: int) -> None:
    """Saves at every placement of one mesh, cuts anew in both forms, loads at every placement of another."""
    pool.run(replay_ranks.save_placed, 4, root / "saved", saved)
    names = [f"dtensor_{at}" for at in range(2 if saved == 1 else 4)]
    for to in ("dcp", "safetensors"):
        ran("reshard", root / "saved", root / to, "--to", to, "--dp-shard", 3, "--base", "none")
        for wrong in pool.run(replay_ranks.load_placed, 4, root / to, names, loaded_at):
            assert wrong == []
    run_convert("dcp2hf", root / "saved", root / "hf", "--base", "none")
    assert_same_tensors(read_tensors(root / "hf"), dict.fromkeys(names, square()))


class TestDTensorReshardPlacementChange:
    """Saved at one placement and loaded at another of the same mesh."""

    def test_1d_to_1d_reshard_placement_change(self, pool: GlooPool, tmp_path: Path) -> None:
        """Rows and replicas, over one dim of four ranks."""
        cut_anew_loads_everywhere(pool, tmp_path, 1, 1)

    def test_2d_to_2d_reshard_placement_change(self, pool: GlooPool, tmp_path: Path) -> None:
        """Rows and replicas, over both dims of 2 x 2 ranks."""
        cut_anew_loads_everywhere(pool, tmp_path, 2, 2)


class TestDTensorReshardMeshChange:
    """Saved on one mesh and loaded on another."""

    def test_1d_to_2d_reshard_mesh_change(self, pool: GlooPool, tmp_path: Path) -> None:
        """From four ranks to 2 x 2."""
        cut_anew_loads_everywhere(pool, tmp_path, 1, 2)

    def test_2d_to_1d_reshard_mesh_change(self, pool: GlooPool, tmp_path: Path) -> None:
        """From 2 x 2 ranks to four."""
        cut_anew_loads_everywhere(pool, tmp_path, 2, 1)

    def test_dtensor_checkpoint_resharding_with_empty_shard(self, pool: GlooPool, tmp_path: Path) -> None:
        """One element over four ranks: three of them hold nothing, before and after."""
        pool.run(replay_ranks.save_one_element, 4, tmp_path / "saved")
        for to in ("dcp", "safetensors"):
            ran("reshard", tmp_path / "saved", tmp_path / to, "--to", to, "--dp-shard", 4, "--base", "none")
            assert pool.run(replay_ranks.load_one_element, 4, tmp_path / to) == [0.625] * 4


def two_ranks(pool: GlooPool, root: Path) -> Path:
    pool.run(replay_ranks.save_rows_and_columns, 2, root / "saved")
    return root / "saved"


class TestConsolidateHFSafeTensors:
    """Shards of several ranks made into whole tensors."""

    def test_consolidate_to_one_file(self, pool: GlooPool, tmp_path: Path) -> None:
        """Rows and columns of two ranks become whole tensors in one file, listed in an index when one is asked for."""
        run_convert("dcp2hf", two_ranks(pool, tmp_path), tmp_path / "hf", "--base", "none", "--index", "always")
        assert_same_tensors(read_tensors(tmp_path / "hf"), {"dtensor": square(), "dtensor_col": square()})
        index = index_of(tmp_path / "hf")
        assert index["metadata"]["total_size"] == 16 * 4 * 2
        assert index["weight_map"] == dict.fromkeys(("dtensor", "dtensor_col"), "model.safetensors")

    def test_consolidate_to_two_files(self, pool: GlooPool, tmp_path: Path) -> None:
        """Into one file each, under the names that torch gives, with an index."""
        run_convert("dcp2hf", two_ranks(pool, tmp_path), tmp_path / "hf", "--base", "none", "--max-shard-size", "64B")
        assert_same_tensors(load_file(tmp_path / "hf" / FIRST), {"dtensor": square()})
        assert_same_tensors(load_file(tmp_path / "hf" / SECOND), {"dtensor_col": square()})
        index = index_of(tmp_path / "hf")
        assert index["metadata"]["total_size"] == 16 * 4 * 2
        assert index["weight_map"] == {"dtensor": FIRST, "dtensor_col": SECOND}

    @pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.int64, torch.uint8, torch.int16])
    def test_parse_input_metadata_supports_integer_and_bool_dtypes(self, tmp_path: Path, dtype: torch.dtype) -> None:
        """Integers and flags are made whole as floats are; before torch 2.14 its consolidation stops at them."""
        weight = torch.arange(8).reshape(2, 4).to(dtype)
        write_shard(tmp_path / "in" / "shard.safetensors", {"weight": weight[:1]})
        write_shard(tmp_path / "in" / "other.safetensors", {"weight": weight[1:]}, {"weight": [1, 0]})
        run_convert("dcp2hf", tmp_path / "in", tmp_path / "out", "--base", "none", "--index", "always")
        assert_same_tensors(read_tensors(tmp_path / "out"), {"weight": weight})
        assert index_of(tmp_path / "out")["metadata"]["total_size"] == nbytes([weight])

    @pytest.mark.slow
    def test_consolidate_with_two_ranks(self, pool: GlooPool, tmp_path: Path) -> None:
        """Two processes make two files, and one index of both."""
        by_two_processes(two_ranks(pool, tmp_path), tmp_path / "hf", "--max-shard-size", "64B")
        assert_same_tensors(load_file(tmp_path / "hf" / FIRST), {"dtensor": square()})
        assert_same_tensors(load_file(tmp_path / "hf" / SECOND), {"dtensor_col": square()})
        assert index_of(tmp_path / "hf")["weight_map"] == {"dtensor": FIRST, "dtensor_col": SECOND}
        assert index_of(tmp_path / "hf")["metadata"]["total_size"] == 16 * 4 * 2

    @pytest.mark.slow
    def test_consolidate_one_file_with_two_ranks(self, pool: GlooPool, tmp_path: Path) -> None:
        """With one file for two processes, the one without work waits for the other."""
        by_two_processes(two_ranks(pool, tmp_path), tmp_path / "hf")
        assert_same_tensors(read_tensors(tmp_path / "hf"), {"dtensor": square(), "dtensor_col": square()})

    @pytest.mark.parametrize(
        ("shape", "offsets", "sizes"),
        [
            ((4, 6), (1, 0), (2, 6)),
            ((3, 8), (0, 3), (3, 2)),
            ((5, 2, 4), (1, 0, 0), (3, 2, 4)),
            ((6, 8), (1, 2), (3, 4)),
        ],
    )
    def test_write_sub_tensor_to_file_optimized(
        self, tmp_path: Path, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """A rectangle lands where its offsets say; what torch leaves at 0 around it, other shards fill here."""
        full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        cuts = [sorted({0, begin, begin + size, end}) for begin, size, end in zip(offsets, sizes, shape, strict=True)]
        for number, spans in enumerate(_boxes(cuts)):
            block = full[tuple(slice(begin, end) for begin, end in spans)]
            write_shard(
                tmp_path / "in" / f"part{number}.safetensors", {"t": block}, {"t": [begin for begin, _ in spans]}
            )
        run_convert("dcp2hf", tmp_path / "in", tmp_path / "out", "--base", "none")
        assert_same_tensors(read_tensors(tmp_path / "out"), {"t": full})


def _boxes(cuts: list[list[int]]) -> list[list[tuple[int, int]]]:
    """Every box of a grid, as (begin, end) of each dim."""
    boxes: list[list[tuple[int, int]]] = [[]]
    for edges in cuts:
        boxes = [[*box, span] for box in boxes for span in pairwise(edges)]
    return boxes


def by_two_processes(src: Path, dst: Path, *options: object) -> None:
    """`convert dcp2hf` as torchrun starts it on two processes."""
    arguments = ["dcp2hf", src, dst, "--base", "none", *options]
    found = finish(start(arguments, arguments, codes=dict.fromkeys(range(2), CONVERT)))
    assert [code for code, _ in found] == [0, 0], found


CONVERT = "import sys; sys.argv[1] = 'convert'; from ckptx.cli.main import main; main()"


class TestQuantizedHfStorage:
    """Torch's reader of block-quantised checkpoints, on what ckptx wrote; it needs an index beside every file."""

    @pytest.mark.parametrize("size", ["16B", "1KB"])
    def test_dequantization(self, tmp_path: Path, size: str) -> None:
        """Weights find their scales, in the same file and in another."""
        state = {
            "0.q_proj.weight": torch.ones(4, 4), "0.q_proj.weight_scale_inv": torch.tensor([[2.0]]),
            "0.k_proj.weight": torch.full((4, 4), 3.0), "0.k_proj.weight_scale_inv": torch.tensor([[0.5]]),
        }  # fmt: skip
        files = _quantised(tmp_path, state, size)
        assert len(files) == (4 if size == "16B" else 1)
        found = {name: torch.zeros(4, 4) for name in state if name.endswith(".weight")}
        dcp.load(found, storage_reader=QuantizedHuggingFaceStorageReader(str(tmp_path / "hf")), no_dist=True)
        assert found["0.q_proj.weight"].equal(torch.full((4, 4), 2.0))
        assert found["0.k_proj.weight"].equal(torch.full((4, 4), 1.5))

    def test_dtensor_slice_dequantization_block_alignment(self, tmp_path: Path) -> None:
        """Each block of a weight is multiplied by its own scale."""
        scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        _quantised(tmp_path, {"q_proj.weight": torch.full((8, 8), 2.0), "q_proj.weight_scale_inv": scales}, "1KB")
        found = {"q_proj.weight": torch.zeros(8, 8)}
        reader = QuantizedHuggingFaceStorageReader(str(tmp_path / "hf"), block_size=4)
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert found["q_proj.weight"].equal(2 * scales.repeat_interleave(4, 0).repeat_interleave(4, 1))


def _quantised(root: Path, state: dict[str, torch.Tensor], size: str) -> list[Path]:
    """A DCP with fp8 weights, made into an HF checkpoint."""
    stored = {name: t if name.endswith("_inv") else t.to(torch.float8_e4m3fn) for name, t in state.items()}
    dcp.save(stored, checkpoint_id=root / "dcp", no_dist=True)
    run_convert(
        "dcp2hf", root / "dcp", root / "hf", "--base", "none", "--index", "always", "--max-shard-size", size
    )  # fmt: skip
    assert_same_tensors(read_tensors(root / "hf"), stored)
    return list((root / "hf").glob("*.safetensors"))


def prefixed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"model.{name}": tensor for name, tensor in state.items()}


class TestFormatUtilsNoDist:
    """Between a DCP and a file of torch.save, in one process."""

    def test_dcp_to_torch_save(self, tmp_path: Path) -> None:
        """A DCP holds the same state after it was cut anew, by stock torch's own conversion."""
        dcp.save({"model": uneven()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
        run_convert("dcp2hf", tmp_path / "dcp", tmp_path / "hf", "--base", "none")
        assert_same_tensors(read_tensors(tmp_path / "hf"), prefixed(uneven().state_dict()))
        ran("reshard", tmp_path / "dcp", tmp_path / "cut", "--to", "dcp", "--dp-shard", 3, "--base", "none")
        dcp_to_torch_save(tmp_path / "cut", tmp_path / "model.pt")
        found = torch.load(tmp_path / "model.pt", weights_only=True)
        assert found.keys() == {"model"}
        assert_same_tensors(found["model"], dict(uneven().state_dict()))

    def test_torch_save_to_dcp(self, tmp_path: Path) -> None:
        """A state dict of torch.save becomes a DCP, with and without the nest that torch's test puts it in."""
        torch.save(uneven().state_dict(), tmp_path / "model.pt")
        run_convert("hf2dcp", tmp_path / "model.pt", tmp_path / "dcp")
        assert_same_tensors(stock_load(tmp_path / "dcp"), dict(uneven().state_dict()))
        torch.save({"model": uneven().state_dict()}, tmp_path / "nested.pt")
        run_convert("hf2dcp", tmp_path / "nested.pt", tmp_path / "nested", "--base", "none")
        torch_save_to_dcp(tmp_path / "nested.pt", tmp_path / "stock")
        assert_same_tensors(stock_load(tmp_path / "nested"), stock_load(tmp_path / "stock"))
        assert_same_tensors(stock_load(tmp_path / "nested"), prefixed(uneven().state_dict()))


class TestFormatUtils:
    """The same with ranks."""

    def test_online_torch_save_to_dcp(self, pool: GlooPool, tmp_path: Path) -> None:
        """A file of torch.save ends up in a model that is sharded over two ranks."""
        torch.save(uneven().state_dict(), tmp_path / "model.pt")
        run_convert("hf2dcp", tmp_path / "model.pt", tmp_path / "dcp", "--dp-shard", 2)
        assert pool.run(replay_ranks.load_model, 2, tmp_path / "dcp", "") == [[], []]


class TestDCPToTorchSave:
    """A model that ranks saved sharded."""

    def test_dcp_to_torch_save(self, pool: GlooPool, tmp_path: Path) -> None:
        """What FSDP saved on two ranks is whole in the files of ckptx, and in a file of torch.save after them."""
        pool.run(replay_ranks.save_model, 2, tmp_path / "dcp")
        run_convert("dcp2hf", tmp_path / "dcp", tmp_path / "hf", "--base", "none")
        assert_same_tensors(read_tensors(tmp_path / "hf"), prefixed(uneven().state_dict()))
        run_convert("hf2dcp", tmp_path / "hf", tmp_path / "again")
        dcp_to_torch_save(tmp_path / "again", tmp_path / "model.pt")
        found = torch.load(tmp_path / "model.pt", weights_only=True)
        assert_same_tensors(found, prefixed(uneven().state_dict()))


class TestTorchSaveToDCP:
    """A file of torch.save, made into a sharded DCP."""

    def test_offline_conversion(self, pool: GlooPool, tmp_path: Path) -> None:
        """Each rank gets a part, and a loader of one process and of three gets the model."""
        torch.save(uneven().state_dict(), tmp_path / "model.pt")
        run_convert("hf2dcp", tmp_path / "model.pt", tmp_path / "dcp", "--dp-shard", 4, "--prefix", "model.")
        assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 4
        assert_same_tensors(stock_load(tmp_path / "dcp"), prefixed(uneven().state_dict()))
        assert pool.run(replay_ranks.load_model, 3, tmp_path / "dcp", "model.") == [[], [], []]
