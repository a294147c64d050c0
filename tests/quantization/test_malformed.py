"""Malformed quantized checkpoints: one clear line, exit code 3 or 4, and nothing is published."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptx
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import TensorEntry
from ckptx.errors import CkptxError, InputError
from ckptx.quantization.declared import DeclaredQuantization
from ckptx.quantization.tensors import find_quantized
from tests.support.checkpoint_writers import Value, names_in, value, write_hf
from tests.support.quantized import SCHEMES, config_of, float_value, fp8_config, rng_of

NAME = "layers.0.up_proj.weight"
STEM = NAME.removesuffix(".weight")
SHAPE = (96, 160)


@dataclass
class Checkpoint:
    """A checkpoint that a case changes before it is written."""

    tensors: dict[str, Value]
    config: dict[str, Any]
    document: Mapping[str, Any] | None
    has_config: bool = True

    @property
    def declared(self) -> dict[str, Any]:
        return self.config["quantization_config"]  # type: ignore[no-any-return]  # a dict of JSON

    @property
    def weights(self) -> dict[str, Any]:
        """Return the settings of the weights in a declaration of compressed-tensors."""
        return self.declared["config_groups"]["group_0"]["weights"]  # type: ignore[no-any-return]  # a dict of JSON

    def set_bytes(self, name: str, first: int, data: bytes) -> None:
        dtype, shape, old = self.tensors[name]
        self.tensors[name] = dtype, shape, old[:first] + data + old[first + len(data) :]

    def write(self, root: Path) -> Path:
        write_hf(root, self.tensors, config=self.config if self.has_config else None)
        if self.document is not None:
            (root / "hf_quant_config.json").write_text(json.dumps(self.document))
        return root


def checkpoint(label: str) -> Checkpoint:
    scheme = SCHEMES[label]
    name, shape = (NAME, SHAPE) if label != "mxfp4 blocks" else ("layers.0.experts.up_proj", (3, 64, 40))
    weight = scheme.coder.make(name, shape, rng_of("malformed", label))
    config = json.loads(json.dumps(config_of(scheme, {"model_type": "other"})))
    return Checkpoint({"norm.weight": value("BF16", 8), **weight.parts}, config, scheme.document)


def without(part: str) -> Callable[[Checkpoint], None]:
    return lambda each: each.tensors.__delitem__(part)


def with_tensor(name: str, tensor: Value) -> Callable[[Checkpoint], None]:
    return lambda each: each.tensors.__setitem__(name, tensor)


def declaring(**keys: Any) -> Callable[[Checkpoint], None]:
    return lambda each: each.declared.update(keys)


def with_weights(**keys: Any) -> Callable[[Checkpoint], None]:
    return lambda each: each.weights.update(keys)


def with_group_size(size: object) -> Callable[[Checkpoint], None]:
    """Change the group size in `hf_quant_config.json`."""

    def change(checkpoint: Checkpoint) -> None:
        assert checkpoint.document is not None
        document = json.loads(json.dumps(checkpoint.document))
        document["quantization"]["group_size"] = size
        checkpoint.document = document

    return change


def replacing(config: Any) -> Callable[[Checkpoint], None]:
    return lambda each: each.config.__setitem__("quantization_config", config)


def without_config(each: Checkpoint) -> None:
    each.has_config = False


def with_document(document: Mapping[str, Any] | None) -> Callable[[Checkpoint], None]:
    def change(each: Checkpoint) -> None:
        each.document = document

    return change


def nested(config: Any) -> Callable[[Checkpoint], None]:
    return lambda each: each.config.__setitem__("text_config", {"quantization_config": config})


def bytes_at(part: str, first: int, data: bytes) -> Callable[[Checkpoint], None]:
    return lambda each: each.set_bytes(part, first, data)


def two_widths(each: Checkpoint) -> None:
    """Declare groups of int4 and int8 whose scales have the same shape for these codes."""
    group = {"targets": ["a"], "weights": {**each.weights, "num_bits": 8, "group_size": 16}}
    each.declared["config_groups"]["group_1"] = group


def sizes(*numbers: int) -> bytes:
    return np.array(numbers, np.int64).tobytes()


SCALE = f"{NAME}_scale_inv"
F32_NAN, F32_INFINITY = np.float32(np.nan).tobytes(), np.float32(np.inf).tobytes()
PACKED, ZERO_POINT = f"{STEM}.weight_packed", f"{STEM}.weight_zero_point"
WEIGHT_SCALE = f"{STEM}.weight_scale"
# Case -> scheme, change, exit code, words of the message.
CASES: dict[str, tuple[str, Callable[[Checkpoint], None], int, str]] = {
    # Groups of another size than the format has.
    "nvfp4 in groups of 24": ("nvfp4", with_group_size(24), 3, "group_size 24, but NVFP4 has groups of 16"),
    "nvfp4 in groups of -1": ("nvfp4", with_group_size(-1), 3, "group_size -1"),
    "nvfp4 in groups of a list": ("nvfp4", with_group_size([16]), 3, r"group_size \[16\]"),
    "packed nvfp4 in groups of 32": (
        "nvfp4 packed", with_weights(group_size=32), 3, r"groups of 32, .* groups have 16 elements"
    ),
    "packed mxfp4 in groups of 16": (
        "mxfp4 packed", with_weights(group_size=16), 3, r"groups of 16, .* groups have 32 elements"
    ),
    # Parts that are missing, left over, or of another shape or dtype.
    "fp8 without scales": ("fp8 blocks", without(SCALE), 3, "its scales are missing"),
    "scales without weight": ("fp8 blocks", without(NAME), 3, f'"{SCALE}"'),
    "one fp8 weight that nothing scales": (
        "fp8 blocks", with_tensor("layers.1.up_proj.weight", value("F8_E4M3", 96, 160)), 3, "its scales are missing"
    ),
    "fp8 that is no weight and has no scales": (
        "fp8 blocks", with_tensor("layers.1.table", value("F8_E4M3", 96, 160)), 3, "its scales are missing"
    ),
    "one packed weight without scales": (
        "int4", with_tensor("layers.1.up_proj.weight_packed", value("I32", 96, 20)), 3, "weight_packed"
    ),
    "one mxfp4 weight without scales": (
        "mxfp4 deepseek", with_tensor("layers.1.up_proj.weight", value("I8", 96, 80)), 3, "its scales are missing"
    ),
    "one nvfp4 weight without scales": (
        "nvfp4", with_tensor("layers.1.up_proj.weight", value("U8", 96, 80)), 3, "its scales are missing"
    ),
    "scales of another shape": ("fp8 blocks", with_tensor(SCALE, value("F32", 2, 2)), 3, r"\[1, 2\] is required"),
    "scales transposed": ("fp8 blocks", with_tensor(SCALE, value("F32", 2, 1)), 3, r"\[1, 2\] is required"),
    "one scale where blocks are declared": ("fp8 blocks", with_tensor(SCALE, value("F32")), 3, r"\[1, 2\] is required"),
    "scales in integers": ("fp8 blocks", with_tensor(SCALE, value("I32", 1, 2)), 3, "its scales are missing"),
    "scales in float64": ("fp8 blocks", with_tensor(SCALE, value("F64", 1, 2)), 3, "its scales are missing"),
    "codes in bfloat16": ("fp8 blocks", with_tensor(NAME, value("BF16", 96, 160)), 3, f'"{SCALE}"'),
    "codes in float8_e5m2": ("fp8 blocks", with_tensor(NAME, value("F8_E5M2", 96, 160)), 4, "F8_E4M3 only"),
    "codes of one dim": ("fp8 rows", with_tensor(NAME, value("F8_E4M3", 96)), 3, "two or more dims"),
    "two kinds of scales": (
        "fp8 blocks", with_tensor(f"{STEM}.weight_scale", value("F32", 1, 2)), 3, r"weight_scale"
    ),
    "blocks of 15 bytes": (
        "mxfp4 blocks", with_tensor("layers.0.experts.up_proj_blocks", value("U8", 3, 40, 2, 15)), 3,
        r"\[experts, rows, groups, 16\]",
    ),
    "blocks without scales": ("mxfp4 blocks", without("layers.0.experts.up_proj_scales"), 3, "_blocks"),
    "scales without blocks": ("mxfp4 blocks", without("layers.0.experts.up_proj_blocks"), 3, "_scales"),
    "a scale too few": (
        "mxfp4 blocks", with_tensor("layers.0.experts.up_proj_scales", value("U8", 3, 40, 1)), 3,
        r"\[3, 40, 2\] is required",
    ),
    "columns that are no multiple of a group": (
        "nvfp4", with_tensor(NAME, value("U8", 96, 81)), 3, "multiple of 16"
    ),
    "nvfp4 without its second scale": ("nvfp4", without(f"{STEM}.weight_scale_2"), 3, "its scales are missing"),
    "nvfp4 with several second scales": (
        "nvfp4", with_tensor(f"{STEM}.weight_scale_2", value("F32", 96)), 3, "is one number"
    ),
    "nvfp4 with a second scale in float64": (
        "nvfp4", with_tensor(f"{STEM}.weight_scale_2", value("F64")), 3, "is one number in F32"
    ),
    "nvfp4 with a second scale in int64": (
        "nvfp4 packed", with_tensor(f"{STEM}.weight_global_scale", value("I64", 1)), 3, "is one number in F32"
    ),
    "zero points of another shape": (
        "int4 zero points", with_tensor(ZERO_POINT, value("I32", 96, 5)), 3, r"I32 \[12, 5\] is required"
    ),
    "zero points that are not packed": (
        "int4 zero points", with_tensor(ZERO_POINT, value("I8", 96, 5)), 3, r"I32 \[12, 5\] is required"
    ),
    "zero points that are declared and missing": (
        "int4 zero points", without(f"{STEM}.weight_zero_point"), 3, "has no zero points"
    ),
    "zero points of three dims": (
        "int4", lambda each: each.tensors.update({
            PACKED: value("I32", 2, 96, 20), f"{STEM}.weight_scale": value("BF16", 2, 96, 5),
            f"{STEM}.weight_zero_point": value("I32", 2, 12, 5), f"{STEM}.weight_shape": value("I64", 3),
        }), 4, "two dims",
    ),
    "a stored shape of other columns": (
        "int4", bytes_at(f"{STEM}.weight_shape", 8, sizes(157)), 3, r"holds the shape \[96, 157\]"
    ),
    "a stored shape of other rows": (
        "int4", bytes_at(f"{STEM}.weight_shape", 0, sizes(95)), 3, r"holds the shape \[95, 160\]"
    ),
    "a negative stored shape": (
        "int4", bytes_at(f"{STEM}.weight_shape", 0, sizes(-96, -160)), 3, r"holds the shape \[-96, -160\]"
    ),
    "a huge stored shape": (
        "int4 zero points", bytes_at(f"{STEM}.weight_shape", 0, sizes(2**62, 2**62)), 3, "holds the shape"
    ),
    "a stored shape of three sizes": (
        "int4", with_tensor(f"{STEM}.weight_shape", value("I64", 3)), 3, "2 sizes in I64 or I32 are required"
    ),
    "a stored shape in floats": (
        "int4", with_tensor(f"{STEM}.weight_shape", value("F32", 2)), 3, "2 sizes in I64 or I32 are required"
    ),
    "codes beside the decoded weight": (
        "int4", with_tensor(NAME, value("BF16", *SHAPE)), 3, "two forms of one weight"
    ),
    "blocks beside the decoded weight": (
        "mxfp4 blocks", with_tensor("layers.0.experts.up_proj", value("BF16", 3, 64, 40)), 3, "two forms of one weight"
    ),
    # Values.
    "a scale that is NaN": ("fp8 blocks", bytes_at(SCALE, 4, F32_NAN), 3, "holds the scale nan"),
    "an infinite scale": ("fp8 tensor, ModelOpt", bytes_at(WEIGHT_SCALE, 0, F32_INFINITY), 3, "the scale inf"),
    "a bf16 scale that is NaN": ("fp8 rows", bytes_at(f"{STEM}.weight_scale", 0, b"\xc0\x7f"), 3, "the scale nan"),
    "an fp16 scale that is infinite": (
        "int4 zero points", bytes_at(f"{STEM}.weight_scale", 6, b"\x00\x7c"), 3, "the scale inf"
    ),
    "an e8m0 scale that is NaN": ("fp8 blocks, e8m0 scales", bytes_at(f"{STEM}.scale", 1, b"\xff"), 3, "the scale nan"),
    "exponent 255 of mxfp4": ("mxfp4 packed", bytes_at(f"{STEM}.weight_scale", 7, b"\xff"), 3, "exponent 255"),
    "exponent 255 of mxfp4 blocks": (
        "mxfp4 blocks", bytes_at("layers.0.experts.up_proj_scales", 239, b"\xff"), 3, "exponent 255"
    ),
    "an nvfp4 scale that is NaN": ("nvfp4", bytes_at(f"{STEM}.weight_scale", 5, b"\x7f"), 3, "nan .e4m3 code 127."),
    "a second scale that is NaN": ("nvfp4", bytes_at(f"{STEM}.weight_scale_2", 0, F32_NAN), 3, "the scale nan"),
    "a divisor that is zero": (
        "nvfp4 packed", bytes_at(f"{STEM}.weight_global_scale", 0, bytes(4)), 3, "the scale 0.0, but a divisor other"
    ),
    # Declarations.
    "no config": ("fp8 blocks", without_config, 3, "no config declares a quantization"),
    "a config without a declaration": (
        "fp8 blocks", lambda each: each.config.pop("quantization_config"), 3, "no config declares a quantization"
    ),
    "a declaration without quantized weights": (
        "fp8 blocks", lambda each: (without(SCALE)(each), without(NAME)(each)), 3, "no tensor of .* is quantized"
    ),
    "another method": (
        "int4", replacing(fp8_config((128, 128))), 3, "declares fp8 in blocks of 128 x 128, but tensor"
    ),
    "another format": ("mxfp4 packed", declaring(format="pack-quantized"), 3, "declares compressed-tensors"),
    "a number as declaration": ("fp8 blocks", replacing(8), 3, "must be an object"),
    "a list as declaration": ("fp8 blocks", replacing([1]), 3, "must be an object"),
    "no method": ("fp8 blocks", declaring(quant_method=None), 3, "no quant_method"),
    "GPTQ": ("fp8 blocks", declaring(quant_method="gptq"), 4, "quantized with gptq"),
    "AWQ": ("fp8 blocks", declaring(quant_method="awq"), 4, "quantized with awq"),
    "bitsandbytes": ("fp8 blocks", declaring(quant_method="bitsandbytes"), 4, "quantized with bitsandbytes"),
    "a method with line breaks": ("fp8 blocks", declaring(quant_method="a\nb\x1b[31m"), 4, "does not decode"),
    "two declarations that disagree": (
        "fp8 blocks", nested(fp8_config((64, 64))), 3, "blocks of 128 x 128, but .* blocks of 64 x 64"
    ),
    "two declarations that differ in scale_fmt": (
        "fp8 blocks", nested({**fp8_config((128, 128)), "scale_fmt": "ue8m0"}), 3, "the same with another scale_fmt"
    ),
    "two declarations of other methods": ("fp8 blocks", nested({"quant_method": "mxfp4"}), 3, "declares mxfp4"),
    "hf_quant_config.json of another algorithm": (
        "nvfp4", with_document({"quantization": {"quant_algo": "FP8"}}), 3,
        r"modelopt \(NVFP4\), but .*modelopt \(FP8\)",
    ),
    "an algorithm that is not decoded": (
        "fp8 tensor, ModelOpt", with_document({"quantization": {"quant_algo": "FP8_PB_WO"}}), 4, "quant_algo FP8_PB_WO"
    ),
    "layers without an algorithm": (
        "nvfp4", with_document({"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}}), 3,
        "no quantized_layers",
    ),
    "no algorithm": ("fp8 tensor, ModelOpt", with_document({"quantization": {}}), 4, "quant_algo"),
    "hf_quant_config.json that is a list": ("fp8 tensor, ModelOpt", with_document([1]), 3, "hf_quant_config.json"),  # type: ignore[arg-type]  # malformed
    "a block of no rows": ("fp8 blocks", declaring(weight_block_size=[0, 128]), 3, "two positive sizes"),
    "a block of negative size": ("fp8 blocks", declaring(weight_block_size=[128, -128]), 3, "two positive sizes"),
    "a block of one number": ("fp8 blocks", declaring(weight_block_size=128), 3, "two positive sizes"),
    "a block of three numbers": ("fp8 blocks", declaring(weight_block_size=[1, 2, 3]), 3, "two positive sizes"),
    "a huge block": ("fp8 blocks", declaring(weight_block_size=[10**30, 128]), 3, "two positive sizes"),
    "a block of fractions": ("fp8 blocks", declaring(weight_block_size=[128.0, 128]), 3, "two positive sizes"),
    "a block of booleans": ("fp8 blocks", declaring(weight_block_size=[True, 128]), 3, "two positive sizes"),
    "another block size": ("fp8 blocks", declaring(weight_block_size=[64, 64]), 3, r"\[2, 3\] is required"),
    "a block strategy without a block": (
        "fp8 blocks, compressed-tensors", with_weights(block_structure=None), 3, "two positive sizes"
    ),
    "no groups": ("int4", declaring(config_groups={}), 3, "no config_groups"),
    "groups without weights": ("int4", declaring(config_groups={"a": {"weights": None}}), 3, "none with weights"),
    "groups that are numbers": ("int4", declaring(config_groups={"a": 1}), 3, "none with weights"),
    "a group of no elements": ("int4", with_weights(group_size=0), 3, "group_size 0"),
    "a group of negative size": ("int4", with_weights(group_size=-1), 3, "group_size -1"),
    "a huge group": ("int4", with_weights(group_size=10**12), 3, "group_size"),
    "another group size": ("int4", with_weights(group_size=64), 3, r"\[96, 3\] is required"),
    "three bits": ("int4", with_weights(num_bits=3), 4, "3 bits per quantized value"),
    "sixteen bits": ("int4", with_weights(num_bits=16), 4, "16 bits per quantized value"),
    "no bits": ("int4", with_weights(num_bits=None), 3, "num_bits None"),
    "bits as a string": ("int4", with_weights(num_bits="4"), 3, "num_bits '4'"),
    "eight bits where the codes have four": ("int4", with_weights(num_bits=8), 3, "is required"),
    "two widths that fit": ("int4", two_widths, 4, "int4 and int8"),
    "reordered groups": ("int4", with_weights(actorder="group"), 4, "permutes the groups"),
    "a format that is not decoded": ("int4", declaring(format="marlin-24"), 4, "format marlin-24"),
    # Tensors of other methods.
    "g_idx": ("int4", with_tensor(f"{STEM}.weight_g_idx", value("I32", 160)), 4, "reordered groups"),
    "GPTQ tensors": (
        "fp8 blocks", with_tensor("layers.1.up_proj.qweight", value("I32", 20, 96)), 4, "belongs to GPTQ or AWQ"
    ),
    "bitsandbytes tensors": (
        "fp8 blocks", with_tensor("layers.1.up_proj.weight.absmax", value("F32", 20)), 4, "belongs to bitsandbytes"
    ),
    "a state of bitsandbytes": (
        "fp8 blocks", with_tensor("layers.1.up_proj.weight.quant_state.bitsandbytes__nf4", value("U8", 20)), 4,
        "belongs to bitsandbytes",
    ),
    "sparse weights": ("fp8 rows", with_tensor("layers.1.up_proj.bitmask", value("U8", 20)), 4, "with sparsity"),
}  # fmt: skip


def run(command: str, source: Path, dst: Path) -> None:
    if command == "to-dcp":
        ckptx.convert("to-dcp", source, dst, dequantize=True)
    elif command == "to-hf":
        ckptx.convert("to-hf", source, dst, dequantize=True)
    elif command == "reshard":
        ckptx.reshard(source, dst, tp=2, to="dcp", dequantize=True)
    else:
        ckptx.verify(source, source, dequantize=True)


@pytest.mark.parametrize("case", CASES)
def test_one_clear_line_and_nothing_is_published(tmp_path: Path, case: str) -> None:
    label, change, code, words = CASES[case]
    valid = checkpoint(label)
    ckptx.convert("to-dcp", valid.write(tmp_path / "valid"), tmp_path / "ignored", dequantize=True)
    each = checkpoint(label)
    change(each)
    source = each.write(tmp_path / "source")
    commands = ["to-dcp", "verify"] if each.has_config else ["to-dcp"]
    for command in commands:
        with pytest.raises(CkptxError, match=words) as failure:
            run(command, source, tmp_path / "out" / "made")
        message = str(failure.value)
        assert failure.value.exit_code == code, message
        assert "\n" not in message.replace("a\nb", "") and len(message) < 600, message
        assert str(tmp_path) in message or "tensor" in message
        assert ";" in message or "," in message
        assert not (tmp_path / "out").exists() or names_in(tmp_path / "out") == []


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("command", ["to-hf", "reshard"])
def test_other_commands_refuse_them_too(tmp_path: Path, command: str, case: str) -> None:
    label, change, code, words = CASES[case]
    each = checkpoint(label)
    change(each)
    source = each.write(tmp_path / "source")
    if not each.has_config:
        each.has_config, words = True, "config"
        (source / "config.json").write_text("{}")
    with pytest.raises(CkptxError, match=words) as failure:
        run(command, source, tmp_path / "out" / "made")
    assert failure.value.exit_code == code
    assert not (tmp_path / "out").exists() or names_in(tmp_path / "out") == []


@pytest.mark.parametrize("case", ["fp8 without scales", "three bits", "GPTQ", "another group size"])
def test_inspect_prints_a_note(tmp_path: Path, case: str) -> None:
    label, change, _, _ = CASES[case]
    each = checkpoint(label)
    change(each)
    report = ckptx.inspect(each.write(tmp_path / "source"))
    assert report.quantization is None
    assert any(note.startswith("quantization: ") for note in report.notes)


def test_scales_of_two_group_sizes(tmp_path: Path) -> None:
    """A config may declare several widths; each weight has the one that its scales fit."""
    first, second = checkpoint("int4"), SCHEMES["int8"].coder.make("layers.1.up_proj.weight", (8, 40), rng_of("two"))
    first.tensors |= second.parts
    rows = {"targets": ["b"], "weights": {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True}}
    first.declared["config_groups"]["group_1"] = rows
    source = first.write(tmp_path / "source")
    ckptx.convert("to-hf", source, tmp_path / "out", dequantize=True)
    from tests.support.catalog_tensors import read_safetensors

    found = read_safetensors(tmp_path / "out")
    weight = SCHEMES["int4"].coder.make(NAME, SHAPE, rng_of("malformed", "int4"))
    assert found[NAME] == weight.stored_truth()
    assert found["layers.1.up_proj.weight"] == second.stored_truth()
    assert float_value(second.truth, "BF16") == second.stored_truth()


def test_a_config_without_a_block_size_is_named_as_the_cause() -> None:
    entries = {
        NAME: TensorEntry(NAME, DTYPES_BY_NAME["F8_E4M3"], SHAPE, ()),
        f"{NAME}_scale_inv": TensorEntry(f"{NAME}_scale_inv", DTYPES_BY_NAME["F32"], (1, 2), ()),
    }
    declared = DeclaredQuantization("config.json", ("fp8",), codes_with_broadcast_scales=frozenset())
    with pytest.raises(InputError) as caught:
        find_quantized(entries, declared, "MODEL")
    assert str(caught.value) == (
        f'MODEL: tensor "{NAME}": has shape [96, 160] and its scales "{NAME}_scale_inv" have shape [1, 2], but the '
        "config gives no block size; add it to quantization_config, or restore the config.json of this checkpoint"
    )
