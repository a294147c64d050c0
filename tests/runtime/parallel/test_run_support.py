"""The tables state which checkpoints run on which mesh; the runtime runs exactly these."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptx.architecture.corrections import corrections_of, model_types_with_corrections
from ckptx.architecture.lookup import find_architecture
from ckptx.architecture.run_support import check_run_support, find_run_refusal
from ckptx.errors import UnsupportedError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.stages import StageMap
from ckptx.runtime.forecasting.fake_process_group import fake_process_group
from ckptx.runtime.model.build import build_on_meta
from ckptx.runtime.model.shrink_config import iter_configs
from ckptx.runtime.parallel.distributed import mesh_of
from ckptx.runtime.parallel.pipeline.plan import find_and_check_boundaries, make_text_batches
from ckptx.runtime.parallel.tensor_parallel.apply import apply_tensor_parallel
from ckptx.runtime.parallel.tensor_parallel.plans import find_plan
from ckptx.runtime.parity.execution import logits_or_hidden_states
from tests.support.slow import slow_but

_LIST = Path(__file__).parents[3] / "tools" / "classes_with_shapes.txt"
# Their default config cannot be built with few layers, or needs a package.
_NOT_BUILT = {
    "AyaVisionForConditionalGeneration", "DbrxForCausalLM", "Dots1ForCausalLM", "Gemma3nForCausalLM",
    "Gemma3nForConditionalGeneration", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "Lfm2MoeForCausalLM",
    "MinistralForCausalLM", "NemotronForCausalLM",
}  # fmt: skip
CLASSES = [
    line for line in _LIST.read_text().splitlines() if line and not line.startswith("#") and line not in _NOT_BUILT
]
FEW = (
    "LlamaForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM",
    "Qwen3VLForConditionalGeneration",
)  # fmt: skip
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers", "num_decoder_layers")
NO_STAGES = [row for kind in model_types_with_corrections() for row in corrections_of(kind).no_stages]


def class_and_config(name: str) -> tuple[Any, Any]:
    """Return class and default config, with few layers."""
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class()
    for part in iter_configs(config):
        values = vars(part)
        for key in _LAYER_COUNTS:
            if isinstance(values.get(key), int) and values[key] > 4:
                setattr(part, key, 4)
        if isinstance(values.get("layer_types"), list):
            part.layer_types = values["layer_types"][:4]
    config.architectures = [name]
    return cls, config


def runtime_accepts(cls: Any, config: Any, values: Mapping[str, Any], tp: int) -> bool:
    """Return True if the runtime shards the class: the check before it builds, then the plan on the model itself."""
    architecture = find_architecture(values)
    assert architecture is not None
    try:
        check_run_support(values, architecture, tp, 1)
        model = build_on_meta(cls, config, torch.float32, "sdpa")
        with fake_process_group(0, tp):
            apply_tensor_parallel(model, mesh_of(ParallelDims(tp=tp), "cpu")["tp"], find_plan(model, values))
    except UnsupportedError:
        return False
    return True


@pytest.mark.parametrize("name", slow_but(CLASSES, FEW))
def test_what_the_tables_refuse_is_what_the_runtime_refuses(name: str) -> None:
    cls, config = class_and_config(name)
    values = {**config.to_dict(), "architectures": [name]}
    architecture = find_architecture(values)
    assert architecture is not None
    for tp in (2, 3, 8, 64):
        refusal = find_run_refusal(values, architecture, tp, 1)
        assert runtime_accepts(cls, config, values, tp) == (not refusal), (tp, refusal)


@pytest.mark.parametrize("name", slow_but([row.class_name for row in NO_STAGES], ["MarianMTModel"]))
def test_classes_with_a_row_cannot_run_as_stages(name: str) -> None:
    cls, config = class_and_config(name)
    values = {**config.to_dict(), "architectures": [name]}
    architecture = find_architecture(values)
    assert architecture is not None
    assert find_run_refusal(values, architecture, 1, 1) == ""
    assert "cannot run as 2 pipeline stages" in find_run_refusal(values, architecture, 1, 2)
    stages = StageMap(architecture.stacks(values), 2, "even", name)
    model: Any = build_on_meta(cls, config, torch.float32, "sdpa")
    with pytest.raises(UnsupportedError, match="leave out --pp"):
        find_and_check_boundaries(model, stages, make_text_batches, logits_or_hidden_states)
