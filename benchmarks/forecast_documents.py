"""Compare forecasts with published measurements of GPU memory.

    python benchmarks/forecast_documents.py [--results DIR] [NAME ...]

If a report omits a value (sequence length, precision, checkpointing), it was inferred; the table marks it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from measure import HERE, publish, table

from ckptx.api.forecast import forecast
from ckptx.report.documents.forecast import ForecastReport
from ckptx.runtime.training.recipe_file import read_recipe

_GIB = 2**30
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "norm_topk_prob": True, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


class Case(NamedTuple):
    """A run with published memory.

    Attributes:
        model: Config of the model.
        options: Options of `forecast`.
        published_gib: Published memory in GiB; None if only the outcome was published.
        inferred: Settings that the report omits and that were inferred, or "".
        get_bytes: Function that returns the bytes of the forecast to compare.
    """

    model: Mapping[str, Any]
    options: Mapping[str, Any]
    published_gib: float | None
    inferred: str
    get_bytes: Callable[[ForecastReport], int]


def _peak_bytes(report: ForecastReport) -> int:
    return max(int(row["peak"]) for row in report.by_pipeline_rank)


def _forward_bytes(report: ForecastReport) -> int:
    return max(sum(each[3:]) for row in report.by_pipeline_rank for each in row["timeline"] if each[0] == "forward")


def _bytes_between_steps(report: ForecastReport) -> int:
    return max(int(row["between_steps"]) for row in report.by_pipeline_rank)


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    phi = dict(read_recipe("phi_4_squad").model.shrunk_from)
    gemma = dict(read_recipe("gemma4_31b").model.shrunk_from)
    llama_options = {"tp": 4, "dp_shard": 2, "seq": 16384, "dtype": "fp32", "param_dtype": "bf16",
             "activation_checkpointing": "submodule"}  # fmt: skip
    llama_note = (
        "16,384 tokens (the saved memory equals their logits in bf16), float32 weights, bf16 compute, submodule"
    )
    phi_options = {"dp_shard": 8, "seq": 5280, "dtype": "bf16"}
    phi_note = "5,280 tokens, not reported"
    gemma_options = {"dp_shard": 8, "seq": 2048, "dtype": "bf16", "gpu_memory": "80GiB"}
    gemma_pp = {"tp": 4, "seq": 2048, "dtype": "bf16", "activation_checkpointing": "full"}
    deepseek_options = {"tp": 8, "dtype": "bf16", "activation_checkpointing": "full"}
    gemma_note = "2,048 tokens of text; images left out"
    return {
        "Llama 3.1 8B, tp4 x dp2, sharded head, forward of lm_head": Case(
            LLAMA, {**llama_options, "loss": "none"}, 29.665, llama_note, _forward_bytes
        ),
        "Llama 3.1 8B, tp4 x dp2, sharded head, step": Case(LLAMA, llama_options, 35.66, llama_note, _peak_bytes),
        "Llama 3.1 8B, tp4 x dp2, gathered head, step": Case(
            LLAMA, {**llama_options, "loss": "full"}, 51.93, llama_note, _peak_bytes
        ),
        "phi-4, FSDP2 x 8, no checkpointing": Case(phi, {**phi_options, "loss": "full"}, 74.0, phi_note, _peak_bytes),
        "phi-4, FSDP2 x 8, no checkpointing, between steps": Case(
            phi, phi_options, 10.0, phi_note, _bytes_between_steps
        ),
        "phi-4, FSDP2 x 8, full checkpointing": Case(
            phi, {**phi_options, "activation_checkpointing": "full"}, 70.0,
            f"{phi_note}; the figure is for a whole test with several models in sequence", _peak_bytes,
        ),
        "Gemma 4 31B, FSDP2 x 8, 0 layers checkpointed": Case(
            gemma, gemma_options, None, f"{gemma_note}; it ran out of memory", _peak_bytes
        ),
        "Gemma 4 31B, FSDP2 x 8, 60 layers checkpointed": Case(
            gemma, {**gemma_options, "activation_checkpointing": "full"}, 40.34, gemma_note, _peak_bytes
        ),
        "Gemma 4 31B, tp4 x pp2, 1 row a microbatch": Case(
            gemma, {**gemma_pp, "pp": 2}, None, gemma_note, _peak_bytes
        ),
        "Gemma 4 31B, tp4 x pp4 x dp2, 1 row a microbatch": Case(
            gemma, {**gemma_pp, "pp": 4, "dp_shard": 2}, 29.18, gemma_note, _peak_bytes
        ),
        "DeepSeek-V3 671B, tp8 x dp16": Case(
            DEEPSEEK, {**deepseek_options, "dp_shard": 16}, None, "", _peak_bytes
        ),
        "DeepSeek-V3 671B, tp8 x dp128, 1,024 ranks": Case(
            DEEPSEEK, {**deepseek_options, "dp_shard": 128}, None, "", _peak_bytes
        ),
    }  # fmt: skip


def forecast_case(name: str, case: Case) -> dict[str, Any]:
    """Forecast a case, and return its row."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "config.json")
        config.write_text(json.dumps(case.model))
        report = forecast(config, **case.options)
    worst = max(report.by_pipeline_rank, key=lambda row: row["peak"])
    kinds = sorted(worst["by_kind"].items(), key=lambda item: -item[1])[:3]
    return {
        "case": name,
        "published_gib": case.published_gib,
        "forecast_gib": case.get_bytes(report) / _GIB,
        "largest_kinds": ", ".join(f"{kind} {nbytes / _GIB:.1f}" for kind, nbytes in kinds),
        "peak_location": f"{worst['peak_tensor']['phase']} of {worst['peak_tensor']['module'] or 'the model'}",
        "fits": report.fits,
        "inferred": case.inferred,
        "seconds": report.seconds,
    }


def main() -> None:
    """Run the cases, and write forecast_documents.json and forecast_documents.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only cases whose name contains this string")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    rows = []
    for name, case in cases().items():
        if not options.names or any(each in name for each in options.names):
            rows.append(forecast_case(name, case))
            print(rows[-1], flush=True)
    cells = [
        {
            "run": row["case"],
            "published, GiB": "" if row["published_gib"] is None else f"{row['published_gib']:.2f}",
            "forecast, GiB": f"{row['forecast_gib']:.2f}",
            "ratio": "" if row["published_gib"] is None else f"{row['forecast_gib'] / row['published_gib']:.3f}",
            "fits 80 GiB": "" if row["fits"] is None else "yes" if row["fits"] else "no",
            "largest kinds at the peak, GiB": row["largest_kinds"],
            "location of the peak": row["peak_location"],
            "inferred": row["inferred"],
        }
        for row in rows
    ]
    publish(
        options.results,
        "forecast_documents",
        {"rows": rows},
        [table("Runs with published memory", list(cells[0]), [list(each.values()) for each in cells])],
    )


if __name__ == "__main__":
    main()
