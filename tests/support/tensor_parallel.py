"""Compare a model under tensor parallelism with the same model unsharded.

Functions for the workers of the gloo pool: their first arguments are rank and world size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckptx.architecture.lookup import find_architecture
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import TensorEntry
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.stages import StageMap
from ckptx.model_view.sharder import Sharder, effective_plan
from ckptx.runtime.parallel.activation_checkpointing.wrap import checkpoint_activations
from ckptx.runtime.parallel.tensor_parallel import sequence, styles
from ckptx.runtime.parallel.tensor_parallel.apply import TensorParallelLayout, apply_tensor_parallel
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks, concat_regions, gather_shards
from ckptx.runtime.parallel.tensor_parallel.loss import causal_lm_loss
from ckptx.runtime.parallel.tensor_parallel.plans import find_plan
from tests.support import models
from tests.support.models import EVERY, Inputs, build, randomize, tokens

Placed = dict[str, tuple[int, tuple[int, ...]] | None]


@dataclass(frozen=True)
class Outcome:
    """Largest differences from the unsharded model, relative to the largest value of each tensor.

    Attributes:
        logits: Difference of the gathered logits.
        loss: Difference of the loss.
        gradients: Differences of the gathered gradients by parameter.
        gathered: Modules whose parameters are gathered for their forward pass.
        sharded_logits: True if the logits stay sharded.
        loss_by_model: Difference of the loss of `model(labels=...)`; None if it was not computed.
    """

    logits: float
    loss: float
    gradients: dict[str, float]
    gathered: tuple[str, ...]
    sharded_logits: bool
    loss_by_model: float | None = None

    @property
    def worst(self) -> float:
        return max(self.logits, self.loss, *self.gradients.values())


def config_of(model: Any) -> dict[str, Any]:
    """Return the config as in `config.json`."""
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def build_tiny_model(name: str) -> Any:
    """Build the model of a recipe in float32, without dropout or cache."""
    model = build(EVERY[name]).float().eval()
    model.config.use_cache = False
    return model


def pad_inputs(inputs: Inputs, multiple: int) -> Inputs:
    """Repeat the last token of every input until the length is divisible."""
    length = inputs["input_ids"].shape[1]
    missing = -length % multiple
    return {
        key: torch.cat([value, value[:, -1:].expand(-1, missing)], 1) if value.shape[1:] == (length,) else value
        for key, value in inputs.items()
    }


def labels_of(logits: torch.Tensor) -> torch.Tensor:
    """Return labels for logits: random ones, one ignored one, and the last token of the vocabulary."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, logits.shape[-1], logits.shape[:2], generator=generator)
    labels[0, -1] = logits.shape[-1] - 1
    if labels.shape[1] > 2:
        labels[0, 1] = -100
    return labels


def compute(model: Any, inputs: Inputs, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits, gathered or sharded, and the loss, with the router loss if the settings of the model enable it."""
    inputs = {key: value.float() if value.is_floating_point() else value for key, value in inputs.items()}
    found = model(**inputs, **settings)
    logits = next(found[key] for key in ("logits", "prediction_logits", "last_hidden_state") if key in found)
    if logits.dim() == 2:
        logits = logits[:, None].expand(-1, 2, -1)  # logits of a classifier
    loss = causal_lm_loss(logits, labels_of(logits))
    return logits, loss + found.aux_loss if settings else loss


def relative(found: torch.Tensor, expected: torch.Tensor, floor: float = 1e-30) -> float:
    """Return the largest difference divided by the largest value, or by `floor` if it is larger."""
    assert found.shape == expected.shape
    return float((found - expected).detach().abs().max() / max(float(expected.detach().abs().max()), floor))


def gather_gradient(name: str, parameter: nn.Parameter, layout: TensorParallelLayout, ranks: TpRanks) -> Any:
    """Gather the gradient of a parameter from the regions of all ranks."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient
    placement = layout.decisions[name].placement
    assert placement is not None
    regions = [layout.local_regions(name, rank) or [] for rank in range(layout.tp)]
    return gather_shards(gradient.to_local(), layout.shapes[name], placement.dim, regions, ranks)


def gradient_differences(model: nn.Module, sharded: nn.Module, layout: TensorParallelLayout, ranks: TpRanks) -> Any:
    """Return the gradient differences by parameter; check that the same parameters have gradients."""
    expected = dict(model.named_parameters())
    # the gradient of a key bias is zero except for rounding: softmax is invariant to a constant added to all keys
    floor = 1e-2 * max(float(each.grad.abs().max()) for each in expected.values() if each.grad is not None)
    differences = {}
    for key, parameter in sharded.named_parameters():
        key = key.replace("_checkpoint_wrapped_module.", "")
        reference = expected[key].grad
        gradient = gather_gradient(key, parameter, layout, ranks)
        if reference is None:
            assert gradient is None or not gradient.any(), key
        else:
            assert gradient is not None, key
            differences[key] = relative(gradient, reference, floor)
    return differences


def compare_with_unsharded(
    rank: int,
    world_size: int,
    name: str,
    user: dict[str, str] | None = None,
    sequence_parallel: bool = False,
    checkpointing: str = "none",
    is_custom_class: bool = False,
    defect: str = "",
    microbatches: int = 1,
    kv_heads: int = 2,
    with_routers: bool = False,
) -> Outcome:
    """Run forward and backward of both models, and compare them.

    Args:
        rank: Rank of this process.
        world_size: Number of TP ranks.
        name: Name of a recipe.
        user: Plan of the user, which overrides that of the model.
        sequence_parallel: See `find_plan`.
        checkpointing: Activation checkpointing mode of the sharded model.
        is_custom_class: Use a custom class with the same bare name for the sharded model.
        defect: Function of `styles` or `sequence` that does nothing.
        microbatches: Number of microbatches over which gradients are accumulated.
        kv_heads: Number of key-value heads, if the recipe does not set it.
        with_routers: Add the load-balancing loss of routers.
    """
    with mock.patch.dict(models._TEXT, num_key_value_heads=kv_heads):
        model = build_tiny_model(name)
    settings = {"output_router_logits": True} if with_routers else {}
    inputs = EVERY[name].inputs()
    if sequence_parallel:
        inputs = pad_inputs(inputs, world_size)
    sharded = copy.deepcopy(model)
    if is_custom_class:
        stock = type(model)
        sharded.__class__ = type(
            stock.__name__, (stock,), {"forward": lambda self, **kwargs: stock.forward(self, **kwargs)}
        )
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    plan = find_plan(sharded, config_of(model), user, sequence_parallel)
    with disabled_function(defect):
        layout = apply_tensor_parallel(sharded, mesh, plan)
    if checkpointing != "none":
        checkpoint_activations(sharded, checkpointing)
    for _ in range(microbatches):
        logits, loss = compute(model, inputs, **settings)
        loss.backward()
        found, found_loss = compute(sharded, inputs, **settings)
        found_loss.backward()
    differences = gradient_differences(model, sharded, layout, TpRanks.from_mesh(mesh))
    is_sharded = isinstance(found, DTensor)
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    by_model = None
    if is_sharded and inputs.keys() == {"input_ids"}:
        labels = labels_of(logits)
        by_model = relative(sharded(**inputs, labels=labels).loss, model(**inputs, labels=labels).loss)
    return Outcome(
        relative(whole, logits), relative(found_loss, loss), differences, layout.gathered_modules, is_sharded, by_model
    )


@contextmanager
def disabled_function(name: str) -> Iterator[None]:
    """Make a function of `styles` or `sequence` do nothing in the block."""
    if not name:
        yield
        return
    with mock.patch.object(styles if hasattr(styles, name) else sequence, name, lambda *args, **kwargs: None):
        yield


def shard_on_meta(rank: int, world_size: int, name: str) -> tuple[Placed, dict[str, list[Any]], list[str]]:
    """Shard a model before it is loaded; return placements, the regions of this rank, and errors."""
    with torch.device("meta"):
        model = EVERY[name].model()
    shared = {id(p): n for n, p in model.named_parameters()}
    tied = {n: shared[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if shared[id(p)] != n}
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    layout = apply_tensor_parallel(model, mesh, find_plan(model, config_of(model)))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    faults = [
        f"{alias} is no longer {source}"
        for alias, source in tied.items()
        if parameters[alias] is not parameters[source]
    ]
    for key, placement in layout.placements.items():
        parameter, regions = parameters[key], layout.local_regions(key)
        assert regions is not None
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if isinstance(parameter, DTensor) != (placement is not None):
            faults.append(f"{key}: {type(parameter).__name__} for {placement}")
        if tuple(parameter.shape) != layout.shapes[key] or not local.is_meta:
            faults.append(f"{key}: {tuple(parameter.shape)} on {local.device}")
        if local.numel() != sum(region.numel for region in regions):
            faults.append(f"{key}: holds {tuple(local.shape)} for {regions}")
    placed = {key: None if each is None else each[:2] for key, each in layout.placements.items()}
    held = {key: layout.local_regions(key) or [] for key in placed}
    return placed, held, faults


def reshard_regions(model: nn.Module, config: dict[str, Any], tp: int) -> dict[str, list[list[Any]]]:
    """Return the regions of `ckptx reshard` by parameter and TP rank."""
    sharder = Sharder(
        effective_plan(find_architecture(config), config, None), ParallelDims(tp), StageMap([], 1), None, True
    )
    shapes = {key: tuple(value.shape) for key, value in model.named_parameters()}
    entries = {key: TensorEntry(key, DTYPES_BY_NAME["F32"], shape, ()) for key, shape in shapes.items()}
    placed = sharder.place(entries, ()).placements
    return {
        key: [
            [tuple(block.region) for block in placed[key].blocks if block.rank_in_stage == rank_in_stage]
            for rank_in_stage in range(tp)
        ]
        for key in shapes
    }


def stock_classes() -> list[str]:
    """Return the transformers classes with an output head that can be built from their default config."""
    from transformers.models.auto import modeling_auto

    found = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return sorted({name for names in found for name in names.values() if isinstance(name, str)})


def shard_many_on_meta(rank: int, world_size: int, part: int, parts: int) -> tuple[dict[str, str], int, int]:
    """Shard every n-th stock class; return errors by class, and how many are sharded, and without gathering."""
    faults: dict[str, str] = {}
    sharded, not_gathered = 0, 0
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    for name in stock_classes()[part::parts]:
        try:
            cls = getattr(transformers, name)
            with torch.device("meta"):
                model = cls(cls.config_class())
            config = config_of(model)
            expected = reshard_regions(model, config, world_size)
        except Exception:  # the default config cannot be built, or a package is missing
            continue
        try:
            layout = apply_tensor_parallel(model, mesh, find_plan(model, config))
        except Exception as error:  # listed by class; the caller fails if there is one
            faults[name] = f"{type(error).__name__}: {error}"
            continue
        held = {key: [tuple(each) for each in layout.local_regions(key) or []] for key in expected}
        if held != {key: each[rank] for key, each in expected.items()}:
            faults[name] = "has other regions than reshard writes"
        is_sharded = any(placement is not None for placement in layout.placements.values())
        sharded, not_gathered = sharded + is_sharded, not_gathered + (is_sharded and not layout.gathered_modules)
    return faults, sharded, not_gathered


def compare_with_fsdp(rank: int, world_size: int, name: str, sequence_parallel: bool = False) -> tuple[float, float]:
    """Run TP with FSDP2 on a square mesh; return the largest differences of logits and of gathered gradients."""
    model = build_tiny_model(name)
    inputs = pad_inputs(EVERY[name].inputs(), 2)
    sharded = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp_shard", "tp"))
    layout = apply_tensor_parallel(sharded, mesh["tp"], find_plan(sharded, config_of(model), None, sequence_parallel))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"], reshard_after_forward=True)
    fully_shard(sharded, mesh=mesh["dp_shard"])
    logits, loss = compute(model, inputs)
    loss.backward()
    found, found_loss = compute(sharded, inputs)
    found_loss.backward()
    expected = dict(model.named_parameters())
    worst = 0.0
    for key, parameter in sharded.named_parameters():
        placement = layout.placements[key]
        if placement is None or len(placement.groups) == 1:
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            worst = max(worst, relative(gradient.full_tensor(), expected[key].grad))
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    return relative(whole, logits), worst


def find_wrong_full_tensors(rank: int, world_size: int, name: str) -> list[str]:
    """Return the parameters that `DTensor.full_tensor` does not restore."""
    model = build_tiny_model(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    apply_tensor_parallel(model, mesh, find_plan(model, config_of(model)))
    return [
        key
        for key, value in model.named_parameters()
        if isinstance(value, DTensor) and not torch.equal(value.full_tensor(), before[key])
    ]


class Small(nn.Module):
    """A module with all TP styles, with sizes for which the last of four ranks has empty shards."""

    def __init__(self, tp_plan: dict[str, str]) -> None:
        super().__init__()
        self.tp_plan = tp_plan
        self.embed = nn.Embedding(5, 8, padding_idx=3)
        self.vectors = nn.Embedding(7, 8)
        self.up = nn.Linear(8, 5)
        self.down = nn.Linear(5, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.vectors(ids)
        found: torch.Tensor = self.head(x + self.down(torch.tanh(self.up(x))))
        return found


def compare_small_module(rank: int, world_size: int, tp_plan: dict[str, str]) -> tuple[float, tuple[str, ...]]:
    """Return the largest difference of outputs and gradients, and the gathered modules."""
    torch.manual_seed(1)
    model = Small(tp_plan)
    sharded = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    layout = apply_tensor_parallel(sharded, mesh, find_plan(sharded, {}))
    ids = torch.tensor([[0, 1, 2], [3, 4, 4]])
    expected, found = model(ids), sharded(ids)
    for each in (expected, found):
        each.pow(2).sum().backward()
    differences = gradient_differences(model, sharded, layout, TpRanks.from_mesh(mesh))
    return max(relative(found, expected), *differences.values()), layout.gathered_modules


def compare_losses(rank: int, world_size: int, vocabulary: int, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Compare loss and gradient with transformers on gathered logits: plain, with a count, with shifted labels."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    generator = torch.Generator().manual_seed(2)
    whole = (torch.randn(2, 6, vocabulary, generator=generator) * 30).to(dtype)  # some exponentials overflow
    labels = torch.randint(0, vocabulary, (2, 6), generator=generator)
    labels[0, 2:4], labels[1, 5] = -100, vocabulary - 1
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    ranks = TpRanks.from_mesh(mesh)
    found = []
    for options in ({}, {"num_items_in_batch": torch.tensor(7)}, {"shift_labels": labels.roll(1, 1)}):
        expected_logits = whole.clone().requires_grad_()
        expected = ForCausalLMLoss(expected_logits, labels, vocabulary, **options)
        local = _slice(whole, ranks).requires_grad_()
        sharded = styles._as_dtensor(local, vocabulary, ranks)
        loss = causal_lm_loss(sharded, labels, vocabulary, **options)
        expected.backward(), loss.backward()
        assert expected_logits.grad is not None and local.grad is not None
        found.append(
            (
                relative(loss, expected),
                relative(local.grad, _slice(expected_logits.grad, ranks), 1e-6) if local.numel() else 0.0,
            )
        )
    return found


def _slice(whole: torch.Tensor, ranks: TpRanks) -> torch.Tensor:
    """Return this rank's shard of the last dimension, computed by torch."""
    chunks = whole.detach().chunk(ranks.size, -1)
    return chunks[ranks.rank].clone() if ranks.rank < len(chunks) else whole[..., :0].clone()


def sharding_error(rank: int, world_size: int, name: str, user: dict[str, str] | None = None) -> str:
    """Shard a model; return its error, or "" if it has none."""
    model = build_tiny_model(name)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    try:
        apply_tensor_parallel(model, mesh, find_plan(model, config_of(model), user))
    except Exception as error:  # the caller checks it
        return f"{type(error).__name__}: {error}"
    return ""


def gathers_uneven_groups(rank: int, world_size: int) -> bool:
    """Check that a tensor sharded in groups of unequal width is gathered correctly."""
    from ckptx.layout.placement import Placement, tp_regions

    full = torch.arange(33.0).reshape(11, 3)
    regions = tp_regions((11, 3), Placement(0, (5, 3, 3)), world_size)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    ranks = TpRanks.from_mesh(mesh)
    return torch.equal(gather_shards(concat_regions(full, 0, regions[rank]), (11, 3), 0, regions, ranks), full)


# Small sizes; a config takes the keys that it has.
_SMALL: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "shared_expert_intermediate_size": 24, "sliding_window": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0, "d_model": 32, "d_ff": 48,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "ffn_dim": 48, "word_embed_proj_dim": 32,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "rotary_dim": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


def small_classes() -> list[str]:
    """Return the language model classes of transformers."""
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return sorted({name for name in names if isinstance(name, str)})


def _small_stock(name: str) -> Any:
    """Build a small model of a class in float32; None if it cannot run with these sizes."""
    cls = getattr(transformers, name)
    try:
        default = cls.config_class()
        keys = {key: value for key, value in _SMALL.items() if isinstance(vars(default).get(key), (int, float))}
        torch.manual_seed(0)
        config = cls.config_class(**keys)
        config._attn_implementation = "eager"
        with torch.device("meta"):
            if sum(each.numel() for each in cls(config).parameters()) > 2_000_000:
                return None  # a size with another key
        model = randomize(cls(config).float()).eval()
        model.config.use_cache = False
        logits, loss = compute(model, tokens())
        return model if logits.isfinite().all() and loss.isfinite() else None
    except Exception:  # incompatible sizes, or a missing package
        return None


def compare_many_small(
    rank: int, world_size: int, part: int, parts: int
) -> tuple[dict[str, str], dict[str, float], list[str]]:
    """Compare small models of every n-th class; return errors, the largest difference, and the classes not built."""
    failed: dict[str, str] = {}
    worst: dict[str, float] = {}
    skipped: list[str] = []
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    for name in small_classes()[part::parts]:
        model = _small_stock(name)
        if model is None:
            skipped.append(name)
            continue
        try:
            sharded = _small_stock(name)  # some store states of their outputs, which cannot be copied
            layout = apply_tensor_parallel(sharded, mesh, find_plan(sharded, config_of(model)))
            logits, loss = compute(model, tokens())
            loss.backward()
            found, found_loss = compute(sharded, tokens())
            found_loss.backward()
            differences = gradient_differences(model, sharded, layout, TpRanks.from_mesh(mesh))
            whole = found.full_tensor() if isinstance(found, DTensor) else found
            worst[name] = max(relative(whole, logits), *differences.values())
        except Exception as error:  # every rank fails at the same point, so the ranks stay in step
            failed[name] = f"{type(error).__name__}: {error}"
    return failed, worst, skipped
