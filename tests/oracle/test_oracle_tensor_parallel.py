"""What the runtime computes under tensor parallelism is what transformers does, uncut and cut by its own plan.

transformers runs in processes that never import ckptx. A difference may be eight times what moving each embedding by
one unit in the last place makes of the same number (`measure_tolerances` of `tests.support.against_transformers`):
sums in another order, nothing else.
"""

from __future__ import annotations

import re

import pytest

from tests.support.against_transformers import (
    TP,
    TransformersResults,
    compare_results,
    load_results,
    measure_tolerances,
    save_sharded_results,
)
from tests.support.models import EVERY
from tests.support.pool import GlooPool
from tests.support.slow import slow_but
from tests.support.transformers_version import IS_TABLES_VERSION

FAST = ("llama-tied", "gemma3-vlm", "qwen3-moe", "deepseek-v3", "phi3", "gpt2")

_MIXED = r"RuntimeError: aten\.\w+\.\w+ got mixed torch\.Tensor and DTensor"
# Where transformers' own tensor parallelism does not run, and what transformers says.
REFUSED = {
    **dict.fromkeys(
        ("gpt2", "t5", "t5-v1.1", "bert-mlm", "bert-pretraining", "bert-base", "mamba", "whisper", "bloom", "opt",
         "falcon", "bart", "roberta", "roberta-classifier", "mamba2", "mllama"),
        r"loading: ValueError: `tp_size=2` was requested, but `\w+` has no `tp_plan`",
    ),
    "qwen3-vl-moe": "loading: RuntimeError: You set `ignore_mismatched_sizes` to `False`, thus raising an error",
    "gemma4-vlm": f"forward: {_MIXED}",
    "gemma4-audio": f"forward: {_MIXED}",
    "qwen3-vl": f"backward: {_MIXED}",
    "lfm2-vl": f"backward: {_MIXED}",
    "llama4": r"backward: RuntimeError: Output 0 of _ToTorchTensor is a view and is being modified inplace",
}  # fmt: skip
# Where it runs, and computes something else than transformers uncut.
DIFFERENT = {
    "qwen3-vl": "outputs$",
    "lfm2-vl": "outputs$",
    "gemma3n": "outputs, loss, ",
    "glm4-moe": r"(model\.layers\.\d\.self_attn\.[qk]_norm\.weight(, |$)){4}$",
    "phi": r"(model\.layers\.\d\.self_attn\.[qk]_layernorm\.(weight|bias)(, |$)){8}$",
}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> TransformersResults:
    return TransformersResults(tmp_path_factory.mktemp("tp"), FAST, tp=TP)


@pytest.mark.parametrize("name", slow_but(EVERY, FAST))
def test_outputs_loss_and_gradients_are_those_of_transformers(
    pool: GlooPool, judge: TransformersResults, name: str
) -> None:
    uncut, cut = judge(name), judge(name, "stock-tp")
    pool.run(save_sharded_results, TP, judge.work, name)
    ours, limits = load_results(judge.work, "ckptx-tp", name), measure_tolerances(judge.work, name, uncut)
    assert compare_results(ours, uncut, limits).faults == []
    error = cut.get("error", "")
    apart = compare_results(cut, uncut, limits).faults if "outputs" in cut else []
    named = ", ".join(each.partition(":")[0] for each in apart)
    if IS_TABLES_VERSION:  # other versions refuse others
        assert re.match(REFUSED.get(name, "$"), error), error
        assert re.match(DIFFERENT.get(name, "$"), named), named
    if "outputs" in cut and not apart:
        assert compare_results(ours, cut, limits).faults == []


@pytest.mark.parametrize(
    ("name", "skipped", "found"),
    [
        ("llama-tied", "sum_over_ranks", "outputs"),
        ("llama-tied", "copy_to_ranks", "model.layers.1.input_layernorm.weight"),
        ("qwen3-moe", "sum_partial_gradients", "model.layers.0.self_attn.q_norm.weight"),
        ("deepseek-v3", "install_mla_kv_a_proj", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"),
    ],
)
def test_a_sum_over_the_ranks_that_is_skipped_is_found(
    pool: GlooPool, judge: TransformersResults, name: str, skipped: str, found: str
) -> None:
    """Of what is computed, or of a gradient."""
    uncut, cut = judge(name), judge(name, "stock-tp")
    pool.run(save_sharded_results, TP, judge.work, name, skipped)
    ours, limits = load_results(judge.work, "ckptx-tp", name), measure_tolerances(judge.work, name, uncut)
    assert "gradients" in cut or not IS_TABLES_VERSION
    for theirs in (uncut, cut) if "gradients" in cut else (uncut,):
        assert found in [each.partition(":")[0] for each in compare_results(ours, theirs, limits).faults]
