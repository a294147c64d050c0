"""`--dequantize` in `convert` and `reshard`: every tensor, the ledger, the config, and what the report counts."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptx
from ckptx.errors import InputError, UnsupportedError, UsageError
from ckptx.formats.registry import open_checkpoint
from ckptx.transfer import plan
from tests.support import torch_dcp
from tests.support.catalog_tensors import read_checkpoint, read_safetensors
from tests.support.checkpoint_writers import Value, names_in, tree_bytes
from tests.support.quantized import (
    SCHEMES,
    Fp8,
    PublishedScheme,
    as_floats,
    float_value,
    fp8_config,
    rng_of,
    write_quantized,
)
from tests.support.quantized_models import MODELS, QuantizedModel, make_model

DTYPE_NAMES = {"BF16": "bf16", "F32": "fp32"}


def assert_equal(found: Mapping[str, Value], expected: Mapping[str, Value]) -> None:
    """Compare names, dtypes, shapes and bytes."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name][:2] == tensor[:2], name
        assert found[name][2] == tensor[2], name


def expected_tensors(model: QuantizedModel, dtype: str | None = None) -> dict[str, Value]:
    """Return the decoded model; with `dtype`, all floats in it but those that a class keeps in float32."""
    if dtype is None:
        return model.truth()
    tensors = {name: weight.stored_truth(dtype) for name, weight in model.weights.items()}
    return {
        **{name: tensor if tensor[0] == "F32" else float_value(as_floats(tensor), dtype)
           for name, tensor in model.plain.items()},
        **tensors,
    }  # fmt: skip


def nbytes(tensors: Mapping[str, Value]) -> int:
    return sum(len(data) for _, _, data in tensors.values())


COMMANDS: dict[str, Any] = {
    "to-dcp": lambda src, dst, **options: ckptx.convert("to-dcp", src, dst, **options),
    "to-hf": lambda src, dst, **options: ckptx.convert("to-hf", src, dst, **options),
    "tp4": lambda src, dst, **options: ckptx.reshard(src, dst, tp=4, to="dcp", **options),
    "tp3 x dp2": lambda src, dst, **options: ckptx.reshard(src, dst, tp=3, dp_shard=2, to="dcp", **options),
    "pp2 x tp2 safetensors": lambda src, dst, **options: ckptx.reshard(
        src, dst, tp=2, pp=2, to="safetensors", names="hf", **options
    ),
}


@pytest.mark.sampled(30)
@pytest.mark.parametrize(("label", "command", "dtype"), list(product(MODELS, COMMANDS, [None, "F32", "F16"])))
def test_every_tensor_is_decoded(tmp_path: Path, label: str, command: str, dtype: str | None) -> None:
    model = make_model(label)
    source = model.write(tmp_path / "source", shards=3)
    options = {} if dtype is None else {"dtype": {"F32": "fp32", "F16": "fp16"}[dtype], "allow_overflow": True}
    if command == "pp2 x tp2 safetensors" and label.startswith("deepseek"):
        options["allow_config_mismatch"] = True
    report = COMMANDS[command](source, tmp_path / "out", dequantize=True, **options)
    assert_equal(read_checkpoint(tmp_path / "out"), expected_tensors(model, dtype))
    assert report.dequantized["decoded"] == model.decoded
    assert {row["name"] for row in report.dropped} == model.activation_scales
    assert report.ledger["source"] == len(model.tensors)
    assert report.ledger["written"] == len(model.plain) + len(model.weights)
    assert report.ledger["decoded"] == len(model.decoded)
    assert report.ledger["dropped"] == len(model.activation_scales)
    assert sum(row["tensors"] for row in report.dequantized["schemes"]) == len(model.weights)
    assert sum(row["parameters"] for row in report.dequantized["schemes"]) == sum(
        each.truth.size for each in model.weights.values()
    )
    assert report.dtypes["before"] == Counter(
        tensor[0]
        for name, tensor in model.tensors.items()
        if name not in model.decoded.keys() | model.activation_scales
    )
    assert report.dtypes["after"] == Counter(tensor[0] for tensor in expected_tensors(model, dtype).values())
    assert names_in(tmp_path / "out") != []
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    if command != "pp2 x tp2 safetensors":
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert "quantization_config" not in config and "expert_dtype" not in config


@pytest.mark.parametrize("label", ["llama, fp8 blocks", "llama, nvfp4", "gpt_oss, mxfp4", "deepseek, int4 experts"])
def test_stock_torch_reads_the_decoded_weights(tmp_path: Path, label: str) -> None:
    import torch

    model = make_model(label)
    source = model.write(tmp_path / "source")
    ckptx.convert("to-dcp", source, tmp_path / "dcp", dequantize=True)
    ckptx.reshard(source, tmp_path / "sharded", tp=2, dp_shard=2, to="dcp", names="hf", dequantize=True)
    for name in ("dcp", "sharded"):
        loaded = torch_dcp.load(tmp_path / name)
        found = {
            key: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for key, tensor in loaded.items()
        }
        assert found == {key: data for key, (_, _, data) in model.truth().items()}


# ------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("label", [label for label in MODELS if label.startswith("qwen3_moe")])
@pytest.mark.parametrize("command", ["to-dcp", "tp4", "tp3 x dp2"])
def test_fused_names(tmp_path: Path, command: str, label: str) -> None:
    """Experts are fused after they are decoded, so that their blocks need not fit together."""
    model = make_model(label)
    COMMANDS[command](model.write(tmp_path / "source"), tmp_path / "out", dequantize=True, names="model")
    found, truth = read_checkpoint(tmp_path / "out"), model.truth()
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        numbers = [np.frombuffer(truth[f"{at}{i}.{part}_proj.weight"][2], np.uint16).reshape(
            truth[f"{at}{i}.{part}_proj.weight"][1]) for i in range(4) for part in ("gate", "up", "down")]  # fmt: skip
        gate_up = np.stack([np.concatenate(numbers[3 * i : 3 * i + 2]) for i in range(4)])
        down = np.stack(numbers[2::3])
        for name, expected in ((f"{at}gate_up_proj", gate_up), (f"{at}down_proj", down)):
            assert found[name] == ("BF16", expected.shape, expected.tobytes())
    assert not any("scale" in name for name in found)


def test_torchtitan_names(tmp_path: Path) -> None:
    """Rows of heads are reordered after they are decoded; back in Hugging Face names they are as before."""
    model = make_model("llama, fp8 blocks")
    ckptx.convert("to-dcp", model.write(tmp_path / "source"), tmp_path / "dcp", dequantize=True, names="torchtitan")
    assert "tok_embeddings.weight" in open_checkpoint(tmp_path / "dcp").tensors
    ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "hf")
    assert_equal(read_safetensors(tmp_path / "hf"), model.truth())


# ------------------------------------------------------------------------------------------------- other sources


@pytest.mark.sampled(12)
@pytest.mark.parametrize("label", MODELS)
@pytest.mark.parametrize("command", ["to-hf", "tp3 x dp2"])
def test_a_quantized_dcp(tmp_path: Path, command: str, label: str) -> None:
    model = make_model(label)
    ckptx.convert("to-dcp", model.write(tmp_path / "source"), tmp_path / "dcp")
    assert_equal(read_checkpoint(tmp_path / "dcp"), model.tensors)
    report = COMMANDS[command](tmp_path / "dcp", tmp_path / "out", dequantize=True)
    assert_equal(read_checkpoint(tmp_path / "out"), model.truth())
    assert report.dequantized["decoded"] == model.decoded


SHARDED = ["llama, fp8 blocks", "llama, nvfp4", "llama, fp8 rows", "gpt_oss, mxfp4", "llama, fp8 tensor"]


@pytest.mark.parametrize("label", SHARDED)
@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_a_sharded_quantized_source(tmp_path: Path, to: str, label: str) -> None:
    """Codes and scales in several chunks."""
    model = make_model(label)
    ckptx.reshard(model.write(tmp_path / "source"), tmp_path / "sharded", tp=2, dp_shard=2, to=to, names="hf")
    ckptx.convert("to-hf", tmp_path / "sharded", tmp_path / "out", dequantize=True)
    assert_equal(read_safetensors(tmp_path / "out"), model.truth())


def test_a_config_from_a_base(tmp_path: Path) -> None:
    model = make_model("llama, fp8 blocks")
    source = model.write(tmp_path / "source")
    ckptx.convert("to-dcp", source, tmp_path / "dcp")
    (tmp_path / "dcp" / "config.json").unlink()
    report = ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "out", base=source, dequantize=True)
    assert_equal(read_safetensors(tmp_path / "out"), model.truth())
    assert [edit["key"] for edit in report.config_edits] == ["quantization_config"]
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


# ------------------------------------------------------------------------------------------------- config and index


def test_declarations_in_nested_configs(tmp_path: Path) -> None:
    model = make_model("llama, fp8 blocks")
    source = model.write(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    declared = config.pop("quantization_config")
    config["text_config"] = {"size": 3, "quantization_config": declared}
    (source / "config.json").write_text(json.dumps(config))
    report = ckptx.convert("to-dcp", source, tmp_path / "out", dequantize=True)
    assert_equal(read_checkpoint(tmp_path / "out"), model.truth())
    assert report.config_edits == [
        {"key": "text_config.quantization_config", "before": declared, "after": None}
    ]  # fmt: skip
    del config["text_config"]["quantization_config"]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


@pytest.mark.parametrize("label", ["llama, nvfp4", "deepseek, fp8 and mxfp4"])
def test_index_and_shards(tmp_path: Path, label: str) -> None:
    model = make_model(label)
    source = model.write(tmp_path / "source", shards=4)
    ckptx.convert("to-hf", source, tmp_path / "out", dequantize=True, max_shard_size="40KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    truth = model.truth()
    assert index["metadata"]["total_size"] == nbytes(truth)
    assert index["weight_map"].keys() == truth.keys()
    sizes = Counter[str]()
    for name, file in index["weight_map"].items():
        sizes[file] += len(truth[name][2])
    assert len(sizes) > 1 and max(sizes.values()) <= 40_000
    assert_equal(read_safetensors(tmp_path / "out"), truth)


def test_dtype_of_the_config(tmp_path: Path) -> None:
    model = make_model("llama, int4")
    source = model.write(tmp_path / "source")
    for dtype, name in (("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")):
        ckptx.convert("to-hf", source, tmp_path / dtype, dequantize=True, dtype=dtype)
        assert json.loads((tmp_path / dtype / "config.json").read_text())["torch_dtype"] == name


def test_dtypes_of_a_base(tmp_path: Path) -> None:
    model = make_model("llama, fp8 blocks")
    base = tmp_path / "base"
    ckptx.convert("to-hf", model.write(tmp_path / "source"), base, dequantize=True, dtype="fp32")
    ckptx.convert("to-hf", tmp_path / "source", tmp_path / "out", dequantize=True, base=base, dtype="base")
    assert_equal(read_safetensors(tmp_path / "out"), read_safetensors(base))


@pytest.mark.parametrize("label", ["llama, fp8 blocks", "llama, nvfp4", "llama, int4", "gpt_oss, mxfp4"])
def test_a_cast_requires_dequantize(tmp_path: Path, label: str) -> None:
    source = make_model(label).write(tmp_path / "in" / "source")
    for command in ("to-dcp", "to-hf", "tp4"):
        with pytest.raises(UsageError, match="add --dequantize"):
            COMMANDS[command](source, tmp_path / "out" / "made", dtype="fp32")
        assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("label", ["llama, fp8 blocks", "llama, nvfp4", "deepseek, int4 experts", "gpt_oss, mxfp4"])
def test_bytes_read(tmp_path: Path, label: str) -> None:
    """Each stored byte is read once, and a dry run knows how many."""
    model = make_model(label)
    source = model.write(tmp_path / "source")
    stored = nbytes({name: each for name, each in model.tensors.items() if name not in model.activation_scales})
    dry = ckptx.convert("to-dcp", source, tmp_path / "out", dequantize=True, dry_run=True)
    assert not (tmp_path / "out").exists()
    report = ckptx.convert("to-dcp", source, tmp_path / "out", dequantize=True)
    assert (dry.bytes_read, report.bytes_read) == (stored, stored)
    assert report.bytes_written == dry.bytes_written == nbytes_of_tree(tmp_path / "out")
    assert {row["name"]: row["bytes"] for row in dry.files} == {
        name: len(data) for name, data in tree_bytes(tmp_path / "out").items()
    }


def test_the_checksum_of_codes_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that decode parts of one weight from a DCP read its record once more in all, to check it."""
    monkeypatch.setattr(plan, "STEP_RANGE_NBYTES", 2 << 20)
    coder = Fp8()
    weight = coder.make("a.weight", (4096, 4096), rng_of("checksum"))
    scheme = PublishedScheme(coder, fp8_config((128, 128)))
    ckptx.convert("to-dcp", write_quantized(tmp_path / "source", weight.parts, scheme), tmp_path / "dcp")
    report = ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "out", dequantize=True, workers=4)
    assert report.bytes_read <= 2.01 * nbytes(weight.parts)
    assert_equal(read_safetensors(tmp_path / "out"), {"a.weight": weight.stored_truth()})


@pytest.mark.parametrize("workers", [1, 8])
def test_memory_of_transposed_weights(tmp_path: Path, workers: int) -> None:
    """Each thread buffers one matrix of a transposed weight; with little memory, there are fewer threads."""
    scheme = SCHEMES["mxfp4 blocks"]
    weights = [scheme.coder.make(f"{i}.experts.up_proj", (2, 1024, 1152), rng_of("wide", i)) for i in range(8)]
    parts = {name: each for weight in weights for name, each in weight.parts.items()}
    source = write_quantized(tmp_path / "source", parts, scheme, shards=8)
    options: dict[str, Any] = {"dequantize": True, "workers": workers, "max_memory": "17MB"}
    for command in ("to-dcp", "tp4"):
        COMMANDS[command](source, tmp_path / command, **options)
        assert_equal(read_checkpoint(tmp_path / command), {weight.name: weight.stored_truth() for weight in weights})
        assert ckptx.verify(source, tmp_path / command, **options).exit == 0
    # A single matrix that is larger than the limit is refused.
    options |= {"workers": 1, "max_memory": "2MiB"}
    with pytest.raises(UnsupportedError, match="raise --max-memory"):
        ckptx.convert("to-dcp", source, tmp_path / "small", **options)


@pytest.mark.parametrize("part", ["codes", "scales"])
def test_a_corrupt_dcp(tmp_path: Path, part: str) -> None:
    model = make_model("llama, fp8 blocks")
    ckptx.convert("to-dcp", model.write(tmp_path / "in" / "source"), tmp_path / "in" / "dcp", files=1)
    name = next(name for name in (model.weights if part == "codes" else model.decoded))
    (file,) = (tmp_path / "in" / "dcp").glob("*.distcp")
    data, stored = file.read_bytes(), model.tensors[name][2]
    at = data.index(stored) + len(stored) // 2
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    (tmp_path / "in" / "dcp" / "ckptx.json").unlink()
    with pytest.raises(InputError, match=f'tensor "{name}": CRC-32 of its bytes'):
        ckptx.convert("to-hf", tmp_path / "in" / "dcp", tmp_path / "out" / "made", dequantize=True)
    assert not (tmp_path / "out").exists() or names_in(tmp_path / "out") == []


def nbytes_of_tree(root: Path) -> int:
    return sum(len(data) for data in tree_bytes(root).values())


def interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("label", ["llama, fp8 blocks", "qwen3_moe, nvfp4", "gpt_oss, mxfp4"])
@pytest.mark.parametrize("command", ["to-dcp", "to-hf", "tp4"])
def test_an_interrupted_run_is_resumed(tmp_path: Path, command: str, label: str) -> None:
    source = make_model(label).write(tmp_path / "in" / "source", shards=3)
    options: dict[str, Any] = {"dequantize": True, "workers": 1}
    with pytest.raises(KeyboardInterrupt):
        COMMANDS[command](source, tmp_path / "out" / "made", on_progress=interrupt, **options)
    assert names_in(tmp_path / "out") == [".made.ckptx-partial"]
    report = COMMANDS[command](source, tmp_path / "out" / "made", resume=True, **options)
    whole = COMMANDS[command](source, tmp_path / "whole", **options)
    assert report.bytes_written <= whole.bytes_written
    assert tree_bytes(tmp_path / "out" / "made") == tree_bytes(tmp_path / "whole")


@pytest.mark.parametrize("changed", ["dequantize", "codes", "scales"])
def test_a_resumed_run_that_makes_something_else_starts_afresh(tmp_path: Path, changed: str) -> None:
    model = make_model("llama, fp8 blocks")
    other = make_model("llama, fp8 blocks", seed=1)
    source = model.write(tmp_path / "in" / "source")
    with pytest.raises(KeyboardInterrupt):
        ckptx.convert("to-dcp", source, tmp_path / "out", dequantize=True, on_progress=interrupt, workers=1)
    tensors = dict(model.tensors)
    if changed != "dequantize":
        suffix = "_scale_inv" if changed == "scales" else ".weight"
        tensors |= {name: each for name, each in other.tensors.items() if name.endswith(suffix)}
        QuantizedModel(model.config, model.scheme, tensors, {}, {}).write(source)
    options = {} if changed == "dequantize" else {"dequantize": True}
    ckptx.convert("to-dcp", source, tmp_path / "out", resume=True, **options)
    ckptx.convert("to-dcp", source, tmp_path / "whole", **options)
    assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "whole")


@pytest.mark.parametrize("part", ["codes", "scales"])
@pytest.mark.parametrize("how", ["rewritten", "truncated", "removed"])
def test_a_source_that_changes_is_refused(tmp_path: Path, how: str, part: str) -> None:
    """Codes and scales are in different files; either may change while it is read."""
    model = make_model("llama, fp8 blocks")
    scales = {name: each for name, each in model.tensors.items() if name in model.decoded}
    codes = {name: each for name, each in model.tensors.items() if name not in scales}
    # Two shards: all codes, then all scales.
    names = list(codes) + list(scales)
    source = model.write(tmp_path / "in" / "source")
    write_two_shards(source, {name: model.tensors[name] for name in names}, len(codes))
    file = source / f"model-0000{1 if part == 'codes' else 2}-of-00002.safetensors"
    assert_equal(read_safetensors(source), model.tensors)

    def change(done: int, total: int) -> None:
        if how == "removed":
            file.unlink(missing_ok=True)
        elif how == "truncated":
            os.truncate(file, file.stat().st_size - 1)
        else:
            with file.open("r+b") as opened:
                opened.seek(-1, os.SEEK_END)
                opened.write(b"\x01")

    with pytest.raises(InputError, match=r"changed while it was being read|no such file|ends at byte") as failure:
        ckptx.convert("to-dcp", source, tmp_path / "out" / "made", dequantize=True, on_progress=change, workers=1)
    assert "\n" not in str(failure.value) and file.name in str(failure.value)
    assert names_in(tmp_path / "out") == []


def write_two_shards(root: Path, tensors: Mapping[str, Value], count: int) -> None:
    from tests.support.checkpoint_writers import write_index, write_safetensors

    (root / "model.safetensors").unlink()
    names = list(tensors)
    weight_map = {}
    for number, own in enumerate((names[:count], names[count:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        write_safetensors(root / file, {name: tensors[name] for name in own})
        weight_map.update(dict.fromkeys(own, file))
    write_index(root, weight_map, nbytes(tensors))


# ------------------------------------------------------------------------------------------------- inspect, verify


@pytest.mark.parametrize("label", MODELS)
def test_inspect_counts_parameters_and_schemes(tmp_path: Path, label: str) -> None:
    model = make_model(label)
    report = ckptx.inspect(model.write(tmp_path / "source"))
    entry, truth = report.quantization, model.truth()
    assert not report.notes or "quantization" not in " ".join(report.notes)
    assert entry is not None
    assert entry["dequantized_bytes"] == nbytes(truth)
    assert entry["not_quantized"] == {"tensors": len(model.plain), "bytes": nbytes(model.plain)}
    assert entry["activation_scales"] == len(model.activation_scales)
    assert sum(row["tensors"] for row in entry["schemes"]) == len(model.weights)
    parts = {**model.decoded, **dict.fromkeys(next(iter(each.parts)) for each in model.weights.values())}
    assert sum(row["bytes"] for row in entry["schemes"]) == nbytes({name: model.tensors[name] for name in parts})
    assert sum(row["parameters"] for row in entry["schemes"]) == sum(each.truth.size for each in model.weights.values())
    expected = len({tuple(sorted(row)) for row in [[row["scheme"]] for row in entry["schemes"]]})
    assert len(entry["schemes"]) == expected == (2 if " and " in label else 1)


_WINDOW = 1 << 20  # bytes of a decoded weight that `verify` decodes at once


def reread_bytes(model: QuantizedModel) -> int:
    """Return the bytes that are read twice, because two windows of a weight need the same row of codes or of scales.

    Only weights in fp8 with blocks are larger than a window here.
    """
    total = 0
    for name, (_, shape, data) in model.truth().items():
        if len(data) <= _WINDOW or name not in model.weights:
            continue
        assert model.scheme.config is not None
        block_rows, block_columns = model.scheme.config["weight_block_size"]
        row_nbytes = 2 * shape[1]
        for boundary in range(_WINDOW, len(data), _WINDOW):
            row, part_of_row = divmod(boundary, row_nbytes)
            total += shape[1] if part_of_row else 0
            total += 4 * -(-shape[1] // block_columns) if part_of_row or row % block_rows else 0
    return total


@pytest.mark.sampled(8)
@pytest.mark.parametrize("label", MODELS)
def test_verify_finds_one_wrong_scale(tmp_path: Path, label: str) -> None:
    model = make_model(label)
    source = model.write(tmp_path / "source")
    ckptx.convert("to-dcp", source, tmp_path / "dcp", dequantize=True)
    report = ckptx.verify(source, tmp_path / "dcp", dequantize=True)
    assert (report.exit, report.differing) == (0, [])
    assert report.compared == report.total == len(model.truth())
    stored = {name: each for name, each in model.tensors.items() if name not in model.activation_scales}
    assert report.bytes_read == nbytes(stored) + nbytes(model.truth()) + reread_bytes(model)
    part, weight = next(iter(model.decoded.items()))
    dtype, shape, data = model.tensors[part]
    wrong = dict(model.tensors) | {part: (dtype, shape, bytes([data[0] ^ 1]) + data[1:])}
    if dtype == "F32":
        wrong[part] = dtype, shape, data[:3] + bytes([data[3] ^ 1]) + data[4:]
    elif dtype in ("BF16", "F16"):
        wrong[part] = dtype, shape, data[:1] + bytes([data[1] ^ 1]) + data[2:]
    changed = QuantizedModel(model.config, model.scheme, wrong, {}, {}).write(tmp_path / "changed")
    report = ckptx.verify(changed, tmp_path / "dcp", dequantize=True)
    assert report.exit == 1
    assert [row["name"] for row in report.differing] == [weight]


def test_verify_proposes_dequantize(tmp_path: Path) -> None:
    model = make_model("llama, fp8 blocks")
    source = model.write(tmp_path / "source")
    ckptx.convert("to-dcp", source, tmp_path / "dcp", dequantize=True)
    for pair in ((source, tmp_path / "dcp"), (tmp_path / "dcp", source)):
        report = ckptx.verify(*pair)
        assert report.exit == 1
        assert any("pass --dequantize to decode it" in note for note in report.notes)


def test_verify_of_plain_checkpoints_refuses_dequantize(tmp_path: Path) -> None:
    model = make_model("llama, fp8 blocks")
    ckptx.convert("to-hf", model.write(tmp_path / "source"), tmp_path / "plain", dequantize=True)
    with pytest.raises(InputError, match="leave out --dequantize"):
        ckptx.verify(tmp_path / "plain", tmp_path / "plain", dequantize=True)
    for command in ("to-dcp", "tp4"):
        with pytest.raises(InputError, match="no tensor is quantized; leave out --dequantize"):
            COMMANDS[command](tmp_path / "plain", tmp_path / "out", dequantize=True)
