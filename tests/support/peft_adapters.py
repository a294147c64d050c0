"""Adapters that PEFT itself trains, saves and merges, for the models of `tests.support.models`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from tests.support.models import Inputs, Recipe, load, outputs, write


@dataclass(frozen=True)
class Variant:
    """Settings of an adapter.

    Attributes:
        settings: Arguments of `LoraConfig`, in addition to rank and targets.
        targets: Kinds of modules in addition to linear layers: "embedding" and "head".
        saved: Kinds of modules that are trained whole: "head".
        has_bias: True if the linear layers must have biases.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    has_bias: bool = False


VARIANTS = {
    "plain": Variant(),
    "rslora": Variant({"use_rslora": True}),
    "dora": Variant({"use_dora": True}),
    "patterns": Variant({"rank_pattern": {"layers.0.*": 3}, "alpha_pattern": {"layers.1.*": 5}}),
    "bias": Variant({"bias": "all"}),
    "saved": Variant(saved=("head",)),
    "embedding": Variant(targets=("embedding",)),
    "dora-embedding": Variant({"use_dora": True}, targets=("embedding",)),
    "head": Variant(targets=("head",)),
    "lora-bias": Variant({"lora_bias": True}, has_bias=True),
}


@dataclass(frozen=True)
class Trained:
    """An adapter on disk with what PEFT computes with it.

    Attributes:
        model: Directory of the model.
        adapter: Directory of the adapter.
        merged: State dict after `merge_and_unload`.
        exact: The same, computed in float64 and rounded to the dtype of the model.
        wide: The same in float64.
        base: State dict of the model.
        outputs: Outputs of the model with the adapter, not merged.
        changed: Names of the tensors that PEFT changes.
        unchanged_ties: Names among `changed` of tied weights whose other name is the one with an adapter.
    """

    model: Path
    adapter: Path
    merged: dict[str, torch.Tensor]
    exact: dict[str, torch.Tensor]
    wide: dict[str, torch.Tensor]
    base: dict[str, torch.Tensor]
    outputs: list[torch.Tensor]
    changed: frozenset[str]
    unchanged_ties: frozenset[str]


def linear_modules(model: Any, *, has_bias: bool = False) -> list[str]:
    """Return the last components of the names of the linear and Conv1D layers, without the output head.

    Args:
        model: The model.
        has_bias: True for those names whose layers all have biases.
    """
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    head = model.get_output_embeddings()
    layers = {name: each for name, each in model.named_modules() if isinstance(each, kinds) and each is not head}
    without_bias = {name.rpartition(".")[2] for name, each in layers.items() if has_bias and each.bias is None}
    names = {name.rpartition(".")[2] for name in layers} - without_bias
    return sorted(name for name in names if not name.isdigit())


def module_name(model: Any, kind: str) -> str:
    """Return the last component of the name of the input embedding ("embedding") or the output head ("head")."""
    module = model.get_input_embeddings() if kind == "embedding" else model.get_output_embeddings()
    (name, *_) = [name for name, each in model.named_modules() if each is module]
    return name.rpartition(".")[2]


def train(recipe: Recipe, variant: Variant, inputs: Inputs, root: Path) -> Trained:
    """Write a model and an adapter with random values."""
    write(recipe, root / "model")
    model = load(root / "model")
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    targets = [
        *linear_modules(model, has_bias=variant.has_bias),
        *(module_name(model, each) for each in variant.targets),
    ]
    saved = [module_name(model, each) for each in variant.saved]
    ties = (model.get_input_embeddings(), model.get_output_embeddings())
    embedding_names = [f"{name}.weight" for name, module in model.named_modules() if module in ties]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(
            r=4, lora_alpha=6, target_modules=targets, modules_to_save=saved or None, init_lora_weights=False,
            **variant.settings,
        )  # fmt: skip
        peft_model = get_peft_model(model, config)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in peft_model.named_parameters():
            if parameter.requires_grad:
                values = torch.randn(parameter.shape, generator=generator) * 0.2
                with torch.no_grad():
                    parameter.copy_(values.abs() + 0.5 if "magnitude" in name else values)
        peft_model.save_pretrained(root / "adapter")
        loaded = PeftModel.from_pretrained(load(root / "model"), root / "adapter").eval()
        found = outputs(loaded, inputs)
        merged = PeftModel.from_pretrained(load(root / "model"), root / "adapter").merge_and_unload().state_dict()
        wide = (
            PeftModel.from_pretrained(load(root / "model"), root / "adapter").double().merge_and_unload().state_dict()
        )
    exact = {name: tensor.to(merged[name].dtype) for name, tensor in wide.items()}
    changed = frozenset(name for name, tensor in merged.items() if not torch.equal(tensor, base[name]))
    ends = tuple(f"{module}.weight" for module in (*targets, *saved))
    unchanged = {name for name in embedding_names if name in changed and not name.endswith(ends)}
    return Trained(root / "model", root / "adapter", merged, exact, wide, base, found, changed, frozenset(unchanged))


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the largest distance of two tensors of one float dtype, in units in the last place."""
    dtype = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}[a.dtype]
    ordered = []
    for tensor in (a, b):
        bits = tensor.contiguous().view(dtype).long()
        ordered.append(torch.where(bits < 0, -(bits & ((1 << (8 * tensor.element_size() - 1)) - 1)), bits))
    return int((ordered[0] - ordered[1]).abs().max()) if a.numel() else 0
