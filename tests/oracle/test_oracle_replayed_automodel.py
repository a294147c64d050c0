"""Automodel's consolidation tests by name, with what they expect, of ckptx.

Source: `tests/unit_tests/checkpoint/test_consolidate_safetensors.py` of NVIDIA-NeMo/Automodel (36044ad3d), all 21.
Each test here has the name of one there and holds what that one holds of the output; the code is our own. What
Automodel passes to its function as arguments lies in `.hf_metadata/` here, where its trainer writes it. Two things
differ everywhere: a single file is called `model.safetensors`, which more loaders look for than
`model-00001-of-00001`, and the dtypes of the original come back when they are asked for (`--dtype base`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptx.errors import UsageError
from ckptx.options.conversion import ToHfOptions
from tests.support.replays import index_of, names_of_tests, nbytes, read_tensors, run_convert, write_shard
from tests.support.torch_dcp import assert_same_tensors, raw

ONE, FIRST, SECOND = (
    "model-00001-of-00001.safetensors",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
)

ORIGINALS = {
    "test_write_scalar_tensor",
    "test_consolidate_writes_output_safetensors_without_append",
    "test_consolidate_preserves_semantics_for_multi_shard_outputs_without_append",
    "test_consolidate_casts_float_tensors_only_when_cast_dtype_is_set",
    "test_consolidate_cast_dtype_does_not_cast_fp8_tensors",
    "test_consolidate_cast_dtype_preserves_mapped_fp32_tensors",
    "test_consolidate_preserves_original_hf_float_dtypes_when_available",
    "test_consolidate_keeps_saved_dtype_when_original_hf_dtype_metadata_is_missing",
    "test_consolidate_ignores_mapping_keys_missing_from_input_shards",
    "test_consolidate_keeps_float_when_original_dtype_is_quantized",
    "test_resolve_dtype_cast_accepts_aliases_and_none",
    "test_every_rank_consolidation_uses_supplied_group_for_failure_sync",
    "test_every_rank_consolidation_explains_peer_failure_during_sync",
    "test_every_rank_consolidation_surfaces_originating_rank_error",
    "TestMaybeRenameIndexForDiffusers.test_renames_when_index_exists",
    "TestMaybeRenameIndexForDiffusers.test_noop_when_index_missing",
    "TestMaybeRenameIndexForDiffusers.test_preserves_other_files",
    "TestStorageWriterFinishDiffusersCompatible.test_finish_renames_index_when_diffusers_compatible",
    "TestStorageWriterFinishDiffusersCompatible.test_finish_preserves_index_name_when_not_diffusers_compatible",
    "TestStorageWriterFinishDiffusersCompatible.test_finish_early_return_when_no_consolidated_path",
    "TestStorageWriterFinishDiffusersCompatible.test_finish_uses_direct_consolidation_by_default",
}
_DIFFUSERS = "renames the index for diffusers; ckptx writes checkpoints of transformers and has no such name"
NOT_REPLAYED = {
    "test_every_rank_consolidation_uses_supplied_group_for_failure_sync": (
        "counts calls of a mocked all_gather_object; that ranks fail together is in processes/test_several_processes.py"
    ),
    "test_every_rank_consolidation_explains_peer_failure_during_sync": (
        "the text of an error about a mocked collective; a peer that dies is in processes/test_several_processes.py"
    ),
    "TestMaybeRenameIndexForDiffusers.test_renames_when_index_exists": _DIFFUSERS,
    "TestMaybeRenameIndexForDiffusers.test_noop_when_index_missing": _DIFFUSERS,
    "TestMaybeRenameIndexForDiffusers.test_preserves_other_files": _DIFFUSERS,
    "TestStorageWriterFinishDiffusersCompatible.test_finish_renames_index_when_diffusers_compatible": _DIFFUSERS,
    "TestStorageWriterFinishDiffusersCompatible.test_finish_early_return_when_no_consolidated_path": (
        "a writer that returns early inside a trainer; ckptx does not save"
    ),
    "TestStorageWriterFinishDiffusersCompatible.test_finish_uses_direct_consolidation_by_default": (
        "the arguments of a mocked call inside a trainer; ckptx does not save"
    ),
}


def test_every_original_is_replayed_or_listed_with_its_reason() -> None:
    ours = names_of_tests(__name__) & ORIGINALS
    assert len(ORIGINALS) == 21
    assert ours | NOT_REPLAYED.keys() == ORIGINALS
    assert not ours & NOT_REPLAYED.keys()
    assert names_of_tests(__name__) - ORIGINALS == {"test_every_original_is_replayed_or_listed_with_its_reason"}


def write_metadata(root: Path, files: Mapping[str, int] | None = None, dtypes: Mapping[str, str] | None = None) -> Path:
    """`.hf_metadata/` as the trainer writes it, for a class that nobody knows."""
    hidden = root / ".hf_metadata"
    hidden.mkdir(parents=True)
    (hidden / "config.json").write_text("{}")
    for name, said in (("file_index", files), ("dtype", dtypes)):
        if said is not None:
            (hidden / f"fqn_to_{name}_mapping.json").write_text(json.dumps(said, indent=2, sort_keys=True))
    return root


def consolidated(src: Path, dst: Path, *options: object) -> dict[str, Any]:
    return run_convert("dcp2hf", src, dst, "--index", "always", *options)


def arange(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).to(dtype)


def test_write_scalar_tensor(tmp_path: Path) -> None:
    """A tensor without dims is written with exactly its bytes; some consolidators leave it out."""
    scalar = torch.tensor([0x1234], dtype=torch.int16).view(torch.bfloat16)[0]
    write_shard(tmp_path / "in" / ONE, {"scale": scalar})
    consolidated(tmp_path / "in", tmp_path / "out", "--base", "none")
    found = read_tensors(tmp_path / "out")["scale"]
    assert (found.shape, found.dtype, raw(found)) == (torch.Size([]), torch.bfloat16, b"\x34\x12")


def test_consolidate_writes_output_safetensors_without_append(tmp_path: Path) -> None:
    """The output file is written once from the start: nothing before the header, nothing after the last tensor."""
    weight = arange(4).reshape(2, 2)
    write_shard(tmp_path / "in" / ONE, {"weight": weight})
    for _ in range(2):  # a second run over the first must not add to it either
        consolidated(tmp_path / "in", tmp_path / "out", "--base", "none", "--overwrite")
    assert_same_tensors(read_tensors(tmp_path / "out"), {"weight": weight})
    written = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert len(written) == 8 + int.from_bytes(written[:8], "little") + nbytes([weight])


def test_consolidate_preserves_semantics_for_multi_shard_outputs_without_append(tmp_path: Path) -> None:
    """Tensors lie in the files that the mapping says, and the index names them and their size."""
    expected = {"linear.weight": arange(12).reshape(4, 3), "norm.weight": arange(4, torch.float16)}
    src = write_metadata(tmp_path / "in", {"linear.weight": 1, "norm.weight": 2})
    write_shard(src / FIRST, {"linear.weight": expected["linear.weight"][:2], "norm.weight": expected["norm.weight"]})
    write_shard(src / SECOND, {"linear.weight": expected["linear.weight"][2:]}, {"linear.weight": [2, 0]})
    consolidated(src, tmp_path / "out")
    assert_same_tensors(read_tensors(tmp_path / "out"), expected)
    index = index_of(tmp_path / "out")
    assert index["weight_map"] == {"linear.weight": FIRST, "norm.weight": SECOND}
    assert index["metadata"]["total_size"] == nbytes(expected.values())
    assert set(load_file(tmp_path / "out" / FIRST)) == {"linear.weight"}


def test_consolidate_casts_float_tensors_only_when_cast_dtype_is_set(tmp_path: Path) -> None:
    """A cast touches floats alone, and it is said what was asked and what became of it."""
    tensors = {"float_weight": arange(4).reshape(2, 2), "int_weight": torch.arange(4)}
    write_shard(tmp_path / "in" / ONE, tensors)
    report = consolidated(tmp_path / "in", tmp_path / "out", "--base", "none", "--dtype", "bf16")
    expected = {"float_weight": tensors["float_weight"].bfloat16(), "int_weight": tensors["int_weight"]}
    assert_same_tensors(read_tensors(tmp_path / "out"), expected)
    assert index_of(tmp_path / "out")["metadata"]["total_size"] == 4 * 2 + 4 * 8
    assert report["dtypes"] == {"before": {"F32": 1, "I64": 1}, "after": {"BF16": 1, "I64": 1}}
    assert_same_tensors(_kept(tmp_path), tensors)


def _kept(tmp_path: Path) -> dict[str, torch.Tensor]:
    """The same without a cast."""
    consolidated(tmp_path / "in", tmp_path / "kept", "--base", "none")
    return read_tensors(tmp_path / "kept")


def test_consolidate_cast_dtype_does_not_cast_fp8_tensors(tmp_path: Path) -> None:
    """Quantised floats are not cast with the plain ones."""
    tensors = {"fp8_weight": arange(4, torch.float8_e4m3fn), "fp32_weight": arange(4)}
    write_shard(tmp_path / "in" / ONE, tensors)
    consolidated(tmp_path / "in", tmp_path / "out", "--base", "none", "--dtype", "bf16")
    expected = {"fp8_weight": tensors["fp8_weight"], "fp32_weight": tensors["fp32_weight"].bfloat16()}
    assert_same_tensors(read_tensors(tmp_path / "out"), expected)


def test_consolidate_cast_dtype_preserves_mapped_fp32_tensors(tmp_path: Path) -> None:
    """What the original keeps in float32 among others stays so under a cast; the rest is cast, mapped or not."""
    tensors = {name: arange(4) for name in ("protected_fp32_weight", "ordinary_weight", "ordinary_with_original_dtype")}
    dtypes = {"protected_fp32_weight": "F32", "ordinary_with_original_dtype": "BF16"}
    write_shard(write_metadata(tmp_path / "in", dict.fromkeys(tensors, 1), dtypes) / ONE, tensors)
    consolidated(tmp_path / "in", tmp_path / "out", "--dtype", "fp16")
    expected = {name: arange(4, torch.float32 if "protected" in name else torch.float16) for name in tensors}
    assert_same_tensors(read_tensors(tmp_path / "out"), expected)
    assert index_of(tmp_path / "out")["metadata"]["total_size"] == 4 * 4 + 8 * 2


def test_consolidate_preserves_original_hf_float_dtypes_when_available(tmp_path: Path) -> None:
    """Each tensor gets the dtype of the original, and one that the original lacks keeps its own."""
    tensors = {
        "bf16_weight": arange(4).reshape(2, 2), "fp32_weight": arange(4), "missing_original_dtype": arange(2)
    }  # fmt: skip
    src = write_metadata(tmp_path / "in", dict.fromkeys(tensors, 1), {"bf16_weight": "BF16", "fp32_weight": "F32"})
    write_shard(src / ONE, tensors)
    report = consolidated(src, tmp_path / "out", "--dtype", "base")
    assert_same_tensors(read_tensors(tmp_path / "out"), tensors | {"bf16_weight": tensors["bf16_weight"].bfloat16()})
    assert index_of(tmp_path / "out")["metadata"]["total_size"] == 4 * 2 + 4 * 4 + 2 * 4
    assert report["base_dtypes"]["not_in_base"] == ["missing_original_dtype"]


@pytest.mark.parametrize("options", [(), ("--dtype", "auto")])
def test_consolidate_keeps_saved_dtype_when_original_hf_dtype_metadata_is_missing(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Without dtypes of an original nothing is cast."""
    tensors = {"fp32_weight": arange(4), "bf16_weight": arange(4, torch.bfloat16)}
    write_shard(write_metadata(tmp_path / "in", dict.fromkeys(tensors, 1)) / ONE, tensors)
    consolidated(tmp_path / "in", tmp_path / "out", *options)
    assert_same_tensors(read_tensors(tmp_path / "out"), tensors)


def test_consolidate_ignores_mapping_keys_missing_from_input_shards(tmp_path: Path) -> None:
    """A tied name that the mapping has and the shards have not is left out of files and index, and named."""
    wte = arange(4).reshape(2, 2)
    src = write_metadata(tmp_path / "in", {"transformer.wte.weight": 1, "lm_head.weight": 1})
    write_shard(src / ONE, {"transformer.wte.weight": wte})
    report = consolidated(src, tmp_path / "out")
    assert_same_tensors(read_tensors(tmp_path / "out"), {"transformer.wte.weight": wte})
    index = index_of(tmp_path / "out")
    assert index["weight_map"] == {"transformer.wte.weight": "model.safetensors"}
    assert index["metadata"]["total_size"] == nbytes([wte])
    assert any("1 name without a stored tensor" in line and '"lm_head.weight"' in line for line in report["notes"])


def test_consolidate_keeps_float_when_original_dtype_is_quantized(tmp_path: Path) -> None:
    """Trained floats whose original was quantised stay floats, and it is said by name and dtypes."""
    write_shard(write_metadata(tmp_path / "in", {"weight": 1}, {"weight": "F8_E4M3"}) / ONE, {"weight": arange(4)})
    report = consolidated(tmp_path / "in", tmp_path / "out", "--dtype", "base")
    assert_same_tensors(read_tensors(tmp_path / "out"), {"weight": arange(4)})
    assert any(
        "quantized in the base" in line and '"weight" is F8_E4M3 in the base, F32 here' in line
        for line in report["notes"]
    )


def test_resolve_dtype_cast_accepts_aliases_and_none() -> None:
    """None is no cast, and a dtype goes by its short and its long name; `torch.float16` and "" are refused here."""

    def dtype_of(dtype: Any) -> str:
        return ToHfOptions("dcp2hf", "in", "out", base="none", dtype=dtype).dtype

    assert dtype_of(None) == "auto"
    for short, long in {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.items():
        assert dtype_of(short) == short
        assert dtype_of(long) == short
    for other in ("", "none", "torch.float16", "fp8"):
        with pytest.raises(UsageError, match="--dtype"):
            dtype_of(other)


def test_every_rank_consolidation_surfaces_originating_rank_error(tmp_path: Path) -> None:
    """There a tensor that the mapping lacks is a KeyError on every rank; here it goes into the last file, and no error.

    That an error of one rank is that of all is in tests/processes/test_several_processes.py.
    """
    tensors = {"weight": torch.ones(2), "other": torch.ones(3), "adapter_created.bias": torch.zeros(2)}
    write_shard(write_metadata(tmp_path / "in", {"weight": 1, "other": 2}) / ONE, tensors)
    consolidated(tmp_path / "in", tmp_path / "out")
    assert_same_tensors(read_tensors(tmp_path / "out"), tensors)
    assert index_of(tmp_path / "out")["weight_map"]["adapter_created.bias"] == SECOND


class TestStorageWriterFinishDiffusersCompatible:
    """What is left of a class about the name of the index."""

    def test_finish_preserves_index_name_when_not_diffusers_compatible(self, tmp_path: Path) -> None:
        """The index is called as transformers calls it, beside one file as beside several."""
        write_shard(tmp_path / "in" / ONE, {"a": torch.ones(4), "b": torch.zeros(4)})
        for size in ("16B", "1KB"):
            consolidated(tmp_path / "in", tmp_path / size, "--base", "none", "--max-shard-size", size)
            assert [path.name for path in tmp_path.glob(f"{size}/*.index.json")] == ["model.safetensors.index.json"]
