"""Tiny models with six layers, split into pipeline stages that run in order, or under a schedule on ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptx.architecture.class_table import find_class_record
from ckptx.layout.stages import StageMap
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries, discover_boundaries, make_shared_stage
from ckptx.runtime.parallel.pipeline.pipeline import Loss, Pipeline
from ckptx.runtime.parallel.pipeline.run import StageRunner
from ckptx.runtime.parallel.pipeline.schedules import find_schedule
from ckptx.runtime.parallel.pipeline.ties import find_ties_across_stages
from ckptx.runtime.parity.execution import full_tensor
from tests.support.microbatches import kinds, microbatches
from tests.support.models import EVERY, Inputs, randomize

LAYERS = 6
SPLITS = ("balanced", "1 | rest", "rest | 1", "three")
# Models with each kind of stage boundary: hidden states only, tied and untied; per-layer inputs; shared keys and
# values; streams; an encoder with and without biases; states of an image or audio encoder; images among the tokens.
PIPELINE_MODELS = (
    "llama-tied", "llama-untied", "gemma4-ple", "gemma4-shared-kv", "gemma3n", "t5", "bart", "whisper", "mllama",
    "qwen3-vl", "gemma3-vlm", "qwen2.5-vl",
)  # fmt: skip

_COUNTS = (
    "num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers", "n_layers",
)  # fmt: skip
_LISTS = (
    "layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "moe_layers", "hybrid_layer_ids",
    "attention_types",
)  # fmt: skip


class UnsplitResults(NamedTuple):
    """Results of an unsplit model.

    Attributes:
        logits: Logits of each microbatch.
        gradients: Gradients of the mean loss by every name of a parameter, without parameters that have none.
    """

    logits: list[Tensor]
    gradients: dict[str, Tensor]


def build_deep_model(name: str, layers: int = LAYERS) -> Any:
    """Build the model of a recipe with a number of layers in each stack, with random weights in float32."""
    torch.manual_seed(0)
    model = EVERY[name].model()
    config = copy.deepcopy(model.config)
    text_keys = [key for key in getattr(config, "sub_configs", {}) if "vision" not in key and "audio" not in key]
    for each in (config, *(getattr(config, key, None) for key in text_keys)):
        if each is None:
            continue
        for key in _COUNTS:
            count = getattr(each, key, None)
            if not isinstance(count, int):
                continue
            setattr(each, key, layers)
            for listed in _LISTS:
                kinds = getattr(each, listed, None)
                if isinstance(kinds, list) and len(kinds) == count:
                    setattr(each, listed, (kinds * layers)[:layers])
        each.use_cache = False
    return randomize(type(model)(config).float()).eval()


def output_of(found: Any) -> Tensor:
    """Return the logits, or the last hidden state of a model without a head."""
    names = ("logits", "prediction_logits", "last_hidden_state")
    return next(value for value in (getattr(found, name, None) for name in names) if value is not None)


def split_into_stages(model: Any, pp: int, how: str = "even") -> StageMap:
    """Split a model into stages by a rule of `StageMap`, or by one of `SPLITS`."""
    stacks = (
        find_class_record(type(model).__name__).architecture_for(model.config.to_dict()).stacks(model.config.to_dict())
    )
    count = sum(stack.count for stack in stacks)
    counts = {
        "balanced": [count - count // 2, count // 2], "1 | rest": [1, count - 1], "rest | 1": [count - 1, 1],
        "three": [1, count - 3, 2],
    }.get(how)  # fmt: skip
    return StageMap(stacks, len(counts), ",".join(map(str, counts))) if counts else StageMap(stacks, pp, how)


def run_unsplit(model: nn.Module, batches: Sequence[Inputs]) -> UnsplitResults:
    """Run forward and backward of the unsplit model, then clear its gradients."""
    logits = []
    for batch in batches:
        logits.append(output_of(model(**batch)))
        loss_of(logits[-1], len(batches)).backward()
    gradients = gradients_of(model)
    model.zero_grad(set_to_none=True)
    return UnsplitResults([each.detach() for each in logits], gradients)


def loss_of(logits: Tensor, count: int) -> Tensor:
    """Return the part of one microbatch in the loss of `count` microbatches."""
    return logits.float().pow(2).mean() / count


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by every name of a parameter; FSDP2 shards are gathered, which is collective."""
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            gradient = parameter.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            found[canonical_name(name)] = whole.detach().clone()
    return found


def max_relative_difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """Return the largest difference relative to the largest element; infinite if a gradient is missing or extra."""
    largest = 0.0
    for name in expected.keys() | found.keys():
        if name not in expected:
            largest = max(largest, float("inf") if bool(found[name].any()) else 0.0)
        elif name not in found:
            largest = max(largest, float("inf") if bool(expected[name].any()) else 0.0)
        else:
            difference = (expected[name] - found[name]).abs().max() / expected[name].abs().max().clamp_min(1e-30)
            largest = max(largest, float("inf") if bool(difference.isnan()) else float(difference))
    return largest


def run_stages(
    model: nn.Module, stages: StageMap, boundaries: StageBoundaries, batch: Inputs, count: int = 1
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run forward and backward of one microbatch through all stages in this process.

    Returns:
        Logits, and gradients. They are added to those of the model, because the stages share its tensors.
    """
    parts = [
        StageRunner(make_shared_stage(model, stages, each, boundaries.output_structures), stages, each, boundaries)
        for each in range(stages.count)
    ]
    received: list[tuple[Any, ...]] = [()]
    output: Any = None
    all_sent = []
    for part in parts:
        output, sent = part(part.model, batch, received[-1])
        all_sent.append(sent)
        received.append(
            tuple(
                each.detach().clone().requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each
                for each in sent
            )
        )
    logits = output_of(output)
    loss_of(logits, count).backward()
    for sent, arrived in reversed(list(zip(all_sent[:-1], received[1:-1], strict=True))):
        pairs = [
            (a, b.grad) for a, b in zip(sent, arrived, strict=True) if isinstance(b, Tensor) and b.grad is not None
        ]
        torch.autograd.backward([a for a, _ in pairs], [b for _, b in pairs])
    return logits.detach(), gradients_of(model)


def compare_split(name: str, how: str) -> tuple[bool, float, StageBoundaries]:
    """Compare a split with the unsplit model.

    Returns:
        True if the logits are equal, the largest relative difference of a gradient, and the stage boundaries.
    """
    model = build_deep_model(name)
    (batch,) = microbatches(name, 1)
    stages = split_into_stages(model, 2, how)
    boundaries = discover_boundaries(build_deep_model(name), stages, [batch], output_of)
    unsplit = run_unsplit(build_deep_model(name), [batch])
    logits, gradients = run_stages(model, stages, boundaries, batch)
    return torch.equal(logits, unsplit.logits[0]), max_relative_difference(unsplit.gradients, gradients), boundaries


def compare_split_in_microbatches(name: str, how: str, image_indices: Sequence[int]) -> tuple[bool, float]:
    """Compare as `compare_split`, with different numbers of images per microbatch; the last microbatch has none."""
    batches = microbatches(name, max(image_indices) + 1, image_indices)
    model = build_deep_model(name)
    stages = split_into_stages(model, 2, how)
    boundaries = discover_boundaries(build_deep_model(name), stages, kinds(batches), output_of)
    unsplit = run_unsplit(build_deep_model(name), batches)
    found = [run_stages(model, stages, boundaries, batch, len(batches)) for batch in batches]
    is_equal = all(torch.equal(logits, right) for (logits, _), right in zip(found, unsplit.logits, strict=True))
    return is_equal, max_relative_difference(unsplit.gradients, found[-1][1])


class RankStages(NamedTuple):
    """Stages of a model on one rank under a schedule.

    Attributes:
        pipeline: Pipeline with the stages of this rank.
        models: Modules of the stages by stage index.
        logits: Logits by microbatch index on the rank of the last stage; each step fills them.
        loss: Loss function of a step.
    """

    pipeline: Pipeline
    models: dict[int, nn.Module]
    logits: dict[int, Tensor]
    loss: Loss

    def step(self, batches: Sequence[Inputs]) -> list[Tensor]:
        """Run one step of the pipeline, and return the losses."""
        return self.pipeline.step(batches, self.loss)


def build_rank_stages(
    name: str,
    schedule: str,
    batches: Sequence[Inputs],
    *,
    mesh: Any = None,
    how: str = "even",
    count: int | None = None,
    **settings: Any,
) -> RankStages:
    """Build the stages of this rank with separate storage.

    Args:
        name: Name of the recipe.
        schedule: Name of the pipeline schedule.
        batches: Inputs to discover the stage boundaries with.
        mesh: Mesh from `mesh_of`; None to use all ranks for the pipeline.
        how: Split of the layers, as for `split_into_stages`.
        count: Number of microbatches of the loss [default: the number of `batches`].
        settings: Arguments of `parallelize`.
    """
    from ckptx.runtime.parallel.parallelize import parallelize
    from ckptx.runtime.parallel.tensor_parallel.plans import find_plan

    group = dist.group.WORLD if mesh is None else mesh["pp"].get_group()
    assert group is not None
    pp, chosen = dist.get_world_size(group), find_schedule(schedule)
    model = build_deep_model(name)
    stages = split_into_stages(model, pp * chosen.stages_per_rank, how)
    boundaries = discover_boundaries(build_deep_model(name), stages, batches, output_of)
    has_tp = mesh is not None and mesh["tp"].size() > 1
    plan = find_plan(model, {**model.config.to_dict(), "architectures": [type(model).__name__]}) if has_tp else None
    models = {}
    for number in chosen.stages_of(dist.get_rank(group), pp):
        models[number] = copy.deepcopy(make_shared_stage(model, stages, number, boundaries.output_structures))
        if mesh is not None:
            parallelize(models[number], mesh, plan, **settings)
    logits: dict[int, Tensor] = {}

    def loss(found: Any, index: int) -> Tensor:
        output = full_tensor(output_of(found))
        logits[index] = output.detach()
        return loss_of(output, count or len(batches))

    ties = find_ties_across_stages(model, stages)
    pipeline = Pipeline(models, stages, boundaries, chosen, group, torch.device("cpu"), ties)
    return RankStages(pipeline, models, logits, loss)


def compare_with_unsplit(run: RankStages, unsplit: UnsplitResults) -> tuple[bool, float]:
    """Compare the stages of this rank with the unsplit model.

    Returns:
        True if the logits are equal, and the largest relative difference of a gradient.
    """
    owned: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for model in run.models.values():
        owned |= gradients_of(model)
        names = [canonical_name(name) for name, _ in model.named_parameters(remove_duplicate=False)]
        expected |= {name: unsplit.gradients[name] for name in names if name in unsplit.gradients}
    return all(torch.equal(each, unsplit.logits[index]) for index, each in run.logits.items()), max_relative_difference(
        expected, owned
    )


def run_one_step(
    rank: int,
    world_size: int,
    name: str,
    schedule: str,
    count: int,
    image_indices: Sequence[int] | None = None,
    how: str = "even",
) -> tuple[bool, float, int, float]:
    """Run one step of a recipe under a schedule, and compare it with the unsplit model.

    Returns:
        True if the logits are equal, the largest relative difference of a gradient, the number of microbatches with
        logits on this rank, and the difference of the loss.
    """
    batches = microbatches(name, count, image_indices)
    unsplit = run_unsplit(build_deep_model(name), batches)
    run = build_rank_stages(name, schedule, kinds(batches), how=how, count=count)
    losses = run.step(batches)
    expected_loss = sum(float(loss_of(each, count)) for each in unsplit.logits)
    is_equal, gradients = compare_with_unsplit(run, unsplit)
    return is_equal, gradients, len(run.logits), abs(sum(map(float, losses)) - expected_loss) if losses else 0.0
