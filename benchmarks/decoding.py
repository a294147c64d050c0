"""Compare decoded weights with float32 numpy, torch and transformers, for every scheme, shape and layout.

    python benchmarks/decoding.py [--results DIRECTORY] [SCHEME ...]

Each scheme is decoded by `--dequantize` to bf16 and fp32, to HF files and DCPs, unsharded and sharded (TP 4, TP 3 x
FSDP 2). Every result must have the bytes of the formula in numpy, which shares no code with ckptx. Where torch's reader
and transformers decode a scheme rightly, the result must also have their bytes; the table counts these comparisons.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from measure import publish, table  # noqa: E402 (benchmarks run from a checkout)

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]  # dtype, shape and bytes by name

# Rows and columns of an MLP's weights; blocks are 128 x 128, groups are 16 or 32 columns.
SHAPES = {
    "aligned": (256, 384),
    "ragged rows": (192, 384),
    "ragged columns": (256, 224),
    "ragged rows and columns": (352, 416),
}
LAYOUTS: dict[str, dict[str, int]] = {"hf": {}, "dcp": {}, "tp 4": {"tp": 4}, "tp 3 x fsdp 2": {"tp": 3, "dp_shard": 2}}
EXPERT_NAMES = ("hf", "model")
EXPERTS = 3
DTYPES = {"BF16": "bf16", "F32": "fp32"}


def llama_config(rows: int, columns: int) -> dict[str, Any]:
    """Return the config of a Llama with one layer, whose MLP has these sizes."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": columns, "vocab_size": 40,
        "intermediate_size": rows, "num_hidden_layers": 1, "num_attention_heads": 12, "num_key_value_heads": 12,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip


def moe_config(rows: int, columns: int) -> dict[str, Any]:
    """Return the config of a Qwen3-MoE with one layer, whose experts have these sizes."""
    return {
        **llama_config(rows, columns), "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "moe_intermediate_size": rows, "num_experts": EXPERTS, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }  # fmt: skip


def make_weights(label: str, rows: int, columns: int, names: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return random quantized weights of a scheme by name, with the values that they decode to."""
    from tests.support.quantized import SCHEMES, rng_of

    rng = rng_of(label, rows, columns)
    return {name: SCHEMES[label].coder.make(name, shape, rng) for name, shape in names.items()}


def run_commands(source: Path, directory: Path, dtype: str, layouts: Iterator[tuple[str, dict[str, Any]]]) -> Any:
    """Yield the name of each layout, and the tensors that `--dequantize` writes for it."""
    import ckptx
    from tests.support.catalog_tensors import read_checkpoint

    for number, (layout, options) in zip(count(), layouts):
        output = directory / f"{dtype}-{number}"
        options = {"dequantize": True, "dtype": DTYPES[dtype], "allow_config_mismatch": True, **options}
        if layout == "hf":
            ckptx.convert("to-hf", source, output, **options)
        elif layout == "dcp":
            ckptx.convert("to-dcp", source, output, **options)
        else:
            ckptx.reshard(source, output, to="dcp", **{"names": "hf", **options})
        yield layout, read_checkpoint(output)


def compare(label: str, case: str, directory: Path) -> dict[str, int]:
    """Return the number of comparisons of one scheme and case with numpy, and how many of them were equal."""
    from tests.support.quantized import SCHEMES, write_quantized

    scheme = SCHEMES[label]
    rows, columns = SHAPES.get(case, SHAPES["ragged rows and columns"])
    if case == "experts":
        config = moe_config(rows, columns)
        at = "model.layers.0.mlp.experts."
        if label == "mxfp4 blocks":  # only fused, transposed
            config |= {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": EXPERTS}
            names = {f"{at}gate_up_proj": (EXPERTS, columns, 2 * rows)}
            names[f"{at}down_proj"] = (EXPERTS, rows, columns)
        else:
            names = {}
            for expert in range(EXPERTS):
                names |= {f"{at}{expert}.{each}_proj.weight": (rows, columns) for each in ("gate", "up")}
                names[f"{at}{expert}.down_proj.weight"] = (columns, rows)
        layouts = [
            (layout, {**sizes, "names": naming})
            for layout, sizes in LAYOUTS.items()
            for naming in (("hf",) if label == "mxfp4 blocks" or layout == "hf" else EXPERT_NAMES)
        ]
    else:
        config = llama_config(rows, columns)
        at = "model.layers.0.mlp."
        names = {f"{at}up_proj.weight": (rows, columns), f"{at}down_proj.weight": (columns, rows)}
        layouts = list(LAYOUTS.items())
    weights = make_weights(label, rows, columns, names)
    tensors = {name: part for weight in weights.values() for name, part in weight.parts.items()}
    if case == "scales in another file":
        tensors = dict(sorted(tensors.items(), key=lambda each: "scale" in each[0]))
    source = write_quantized(directory / "source", tensors, scheme, config, shards=3)
    results = {"compared": 0, "equal": 0}
    for dtype in DTYPES:
        expected = {name: weight.stored_truth(dtype) for name, weight in weights.items()}
        for (_, options), (_, found) in zip(
            layouts, run_commands(source, directory, dtype, iter(layouts)), strict=True
        ):
            wanted = fuse(expected) if options.get("names") == "model" else expected
            results["compared"] += 1
            results["equal"] += {name: found.get(name) for name in wanted} == wanted and len(found) == len(wanted)
    return results


def fuse(tensors: Tensors) -> Tensors:
    """Return experts as transformers stacks them: all gate_up matrices in one tensor, all down matrices in another."""
    at = "model.layers.0.mlp.experts."
    fused: Tensors = {}
    for name, parts in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.items():
        matrices = [[tensors[f"{at}{expert}.{part}_proj.weight"] for part in parts] for expert in range(EXPERTS)]
        dtype, (rows, columns), _ = matrices[0][0]
        data = b"".join(each[2] for expert in matrices for each in expert)
        fused[f"{at}{name}"] = dtype, (EXPERTS, len(parts) * rows, columns), data
    return fused


def compare_with_references(label: str, directory: Path) -> tuple[str, int, int]:
    """Return which implementation decodes a scheme, the number of shapes compared with it, and how many were equal."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    import ckptx
    from tests.quantization.test_references import read_with_torch
    from tests.support.catalog_tensors import read_checkpoint
    from tests.support.quantized import SCHEMES, write_quantized
    from tests.support.torch_dcp import raw

    is_read_by_torch = label in ("fp8 blocks", "fp8 blocks, bf16 scales", "fp8 blocks, fp16 scales")
    if not is_read_by_torch and label != "mxfp4 blocks":
        return "", 0, 0
    equal = 0
    for number, (rows, columns) in enumerate(SHAPES.values()):
        name = "model.layers.0.mlp.down_proj.weight"
        shape: tuple[int, ...] = (rows, columns)
        if label == "mxfp4 blocks":
            name, shape = "model.layers.0.mlp.experts.down_proj", (EXPERTS, columns, rows)
        (weight,) = make_weights(label, rows, columns, {name: shape}).values()
        root = directory / str(number)
        write_quantized(root, weight.parts, SCHEMES[label], shards=2)
        ckptx.convert("to-hf", root, directory / f"{number}-out", dequantize=True)
        ours = read_checkpoint(directory / f"{number}-out")[name][2]
        if is_read_by_torch:
            theirs = raw(read_with_torch(root)[name])
        else:
            parts = [torch.frombuffer(bytearray(data), dtype=torch.uint8).view(sizes)
                     for _, sizes, data in list(weight.parts.values())[:2]]  # fmt: skip
            theirs = raw(convert_moe_packed_tensors(*parts, dtype=torch.bfloat16))
        equal += ours == theirs
    return "torch" if is_read_by_torch else "transformers", len(SHAPES), equal


def main() -> None:
    """Run every comparison, and write decoding.json and decoding.md; exit with 1 if one differs."""
    from tests.support.quantized import SCHEMES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemes", nargs="*", metavar="SCHEME", help="only schemes whose name contains this string")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    cases = [*SHAPES, "scales in another file", "experts"]
    rows: list[dict[str, Any]] = []
    for label in SCHEMES:
        if options.schemes and not any(each in label for each in options.schemes):
            continue
        row: dict[str, Any] = {"scheme": label}
        for case in cases:
            if label == "mxfp4 blocks" and case != "experts":
                continue  # gpt-oss has quantized experts only
            with tempfile.TemporaryDirectory() as name:
                row[case] = compare(label, case, Path(name))
        with tempfile.TemporaryDirectory() as name:
            reference, compared, equal = compare_with_references(label, Path(name))
        row["reference"] = {"name": reference, "compared": compared, "equal": equal}
        rows.append(row)
        print(row, flush=True)
    results = [each for row in rows for each in row.values() if isinstance(each, dict)]
    compared, equal = (sum(each[key] for each in results) for key in ("compared", "equal"))
    cells = [
        [
            row["scheme"],
            *(f"{row[case]['equal']} of {row[case]['compared']}" if case in row else "" for case in cases),
            "{name}: {equal} of {compared}".format(**row["reference"]) if row["reference"]["compared"] else "",
        ]
        for row in rows
    ]
    summary = f"{equal} of {compared} results have the expected bytes.\n"
    text = table("Decoded weights with the expected bytes", ["scheme", *cases, "other implementation"], cells)
    publish(options.results, "decoding", {"rows": rows}, [summary, text])
    sys.exit(equal != compared)


if __name__ == "__main__":
    main()
