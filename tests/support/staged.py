"""Tiny models of six layers, cut into pipeline stages: run one after another, or under a schedule on ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptx.architecture.table import find_row
from ckptx.layout.stages import StageMap
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries, discover_boundaries, make_shared_stage
from ckptx.runtime.parallel.pipeline.pipeline import Loss, Pipeline
from ckptx.runtime.parallel.pipeline.run import StageRunner
from ckptx.runtime.parallel.pipeline.schedules import find_schedule
from ckptx.runtime.parallel.pipeline.ties import find_ties_across_stages
from ckptx.runtime.parity.execution import full_tensor
from tests.support.microbatches import kinds, microbatches
from tests.support.models import EVERY, Inputs, randomise

LAYERS = 6
CUTS = ("balanced", "1 | rest", "rest | 1", "three")
# Of each kind of carry: the hidden state alone, tied and not; inputs of every layer; keys and values that are shared;
# streams; an encoder with biases, and without; states of an image or a sound; images among the tokens.
TWELVE = (
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


class Whole(NamedTuple):
    """What an unsplit model computes.

    Attributes:
        logits: Of each microbatch.
        gradients: Of their mean loss, under every name that a parameter has; those that are there.
    """

    logits: list[Tensor]
    gradients: dict[str, Tensor]


def deep(name: str, layers: int = LAYERS) -> Any:
    """The model of a recipe with so many layers in each list of its decoder (and encoder), random, in float32."""
    torch.manual_seed(0)
    model = EVERY[name].model()
    config = copy.deepcopy(model.config)
    below = [key for key in getattr(config, "sub_configs", {}) if "vision" not in key and "audio" not in key]
    for each in (config, *(getattr(config, key, None) for key in below)):
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
    return randomise(type(model)(config).float()).eval()


def output_of(found: Any) -> Tensor:
    """Logits, or the last hidden state of a model without a head."""
    names = ("logits", "prediction_logits", "last_hidden_state")
    return next(value for value in (getattr(found, name, None) for name in names) if value is not None)


def stages_of(model: Any, pp: int, how: str = "even") -> StageMap:
    """How a model is cut: by a rule, or by one of `CUTS`."""
    stacks = find_row(type(model).__name__).architecture_for(model.config.to_dict()).stacks(model.config.to_dict())
    count = sum(stack.count for stack in stacks)
    counts = {
        "balanced": [count - count // 2, count // 2], "1 | rest": [1, count - 1], "rest | 1": [count - 1, 1],
        "three": [1, count - 3, 2],
    }.get(how)  # fmt: skip
    return StageMap(stacks, len(counts), ",".join(map(str, counts))) if counts else StageMap(stacks, pp, how)


def whole_of(model: nn.Module, batches: Sequence[Inputs]) -> Whole:
    """Forward and backward of the unsplit model; leaves no gradients."""
    logits = []
    for batch in batches:
        logits.append(output_of(model(**batch)))
        loss_of(logits[-1], len(batches)).backward()
    gradients = gradients_of(model)
    model.zero_grad(set_to_none=True)
    return Whole([each.detach() for each in logits], gradients)


def loss_of(logits: Tensor, count: int) -> Tensor:
    """The part that one of so many microbatches has in the loss."""
    return logits.float().pow(2).mean() / count


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By every name of a parameter that has one; whole where FSDP2 has cut it, which is collective."""
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            gradient = parameter.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            found[canonical_name(name)] = whole.detach().clone()
    return found


def furthest(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """The largest difference, relative to the largest of each; infinite where one is lacking, or there for nothing."""
    largest = 0.0
    for name in wanted.keys() | found.keys():
        if name not in wanted:
            largest = max(largest, float("inf") if bool(found[name].any()) else 0.0)
        elif name not in found:
            largest = max(largest, float("inf") if bool(wanted[name].any()) else 0.0)
        else:
            away = (wanted[name] - found[name]).abs().max() / wanted[name].abs().max().clamp_min(1e-30)
            largest = max(largest, float("inf") if bool(away.isnan()) else float(away))
    return largest


def run_stages(
    model: nn.Module, stages: StageMap, carry: StageBoundaries, batch: Inputs, count: int = 1
) -> tuple[Tensor, dict[str, Tensor]]:
    """One of so many microbatches through the stages, one after another in this process, and back.

    Returns:
        Logits, and gradients, which are added to those that the model has; the stages share its tensors.
    """
    parts = [
        StageRunner(make_shared_stage(model, stages, each, carry.output_structures), stages, each, carry)
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


def compared(name: str, how: str) -> tuple[bool, float, StageBoundaries]:
    """Whether a recipe that is cut so gives the unsplit model's logits, how far its gradients are, what travels."""
    model = deep(name)
    (batch,) = microbatches(name, 1)
    stages = stages_of(model, 2, how)
    carry = discover_boundaries(deep(name), stages, [batch], output_of)
    whole = whole_of(deep(name), [batch])
    logits, gradients = run_stages(model, stages, carry, batch)
    return torch.equal(logits, whole.logits[0]), furthest(whole.gradients, gradients), carry


def compared_in_microbatches(name: str, how: str, pictured: Sequence[int]) -> tuple[bool, float]:
    """As `compared`, over microbatches with other numbers of images: one more of them than the last that has any."""
    batches = microbatches(name, max(pictured) + 1, pictured)
    model = deep(name)
    stages = stages_of(model, 2, how)
    carry = discover_boundaries(deep(name), stages, kinds(batches), output_of)
    whole = whole_of(deep(name), batches)
    found = [run_stages(model, stages, carry, batch, len(batches)) for batch in batches]
    is_equal = all(torch.equal(logits, right) for (logits, _), right in zip(found, whole.logits, strict=True))
    return is_equal, furthest(whole.gradients, found[-1][1])


class Ranked(NamedTuple):
    """What one rank has of a model under a schedule.

    Attributes:
        pipeline: Its stages.
        models: The same, by number.
        logits: Of each microbatch by its number, on the rank of the last stage; filled by steps.
        loss: For steps.
    """

    pipeline: Pipeline
    models: dict[int, nn.Module]
    logits: dict[int, Tensor]
    loss: Loss

    def step(self, batches: Sequence[Inputs]) -> list[Tensor]:
        """Of the pipeline."""
        return self.pipeline.step(batches, self.loss)


def ranked(
    name: str,
    schedule: str,
    batches: Sequence[Inputs],
    *,
    mesh: Any = None,
    how: str = "even",
    count: int | None = None,
    **settings: Any,
) -> Ranked:
    """The stages of this rank, with storage of their own.

    Args:
        name: Of the recipe.
        schedule: Its name.
        batches: For finding what travels.
        mesh: As `mesh_of` made it; without it all ranks are those of the pipeline.
        how: It is cut.
        count: Microbatches that make up the loss; as many as `batches` if not given.
        settings: For `parallelize`.
    """
    from ckptx.runtime.parallel.parallelize import parallelize
    from ckptx.runtime.parallel.tensor_parallel.plans import find_plan

    group = dist.group.WORLD if mesh is None else mesh["pp"].get_group()
    assert group is not None
    pp, chosen = dist.get_world_size(group), find_schedule(schedule)
    model = deep(name)
    stages = stages_of(model, pp * chosen.stages_per_rank, how)
    carry = discover_boundaries(deep(name), stages, batches, output_of)
    is_cut = mesh is not None and mesh["tp"].size() > 1
    plan = find_plan(model, {**model.config.to_dict(), "architectures": [type(model).__name__]}) if is_cut else None
    models = {}
    for number in chosen.stages_of(dist.get_rank(group), pp):
        models[number] = copy.deepcopy(make_shared_stage(model, stages, number, carry.output_structures))
        if mesh is not None:
            parallelize(models[number], mesh, plan, **settings)
    logits: dict[int, Tensor] = {}

    def loss(found: Any, index: int) -> Tensor:
        output = full_tensor(output_of(found))
        logits[index] = output.detach()
        return loss_of(output, count or len(batches))

    ties = find_ties_across_stages(model, stages)
    pipeline = Pipeline(models, stages, carry, chosen, group, torch.device("cpu"), ties)
    return Ranked(pipeline, models, logits, loss)


def away(run: Ranked, whole: Whole) -> tuple[bool, float]:
    """Whether all logits that this rank has are those of the unsplit model, and how far its gradients are."""
    owned: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for model in run.models.values():
        owned |= gradients_of(model)
        names = [canonical_name(name) for name, _ in model.named_parameters(remove_duplicate=False)]
        wanted |= {name: whole.gradients[name] for name in names if name in whole.gradients}
    return all(torch.equal(each, whole.logits[index]) for index, each in run.logits.items()), furthest(wanted, owned)


def one_step(
    rank: int,
    world_size: int,
    name: str,
    schedule: str,
    count: int,
    pictured: Sequence[int] | None = None,
    how: str = "even",
) -> tuple[bool, float, int, float]:
    """One step of a recipe: are logits equal, how far are gradients, logits seen here, difference of the loss."""
    batches = microbatches(name, count, pictured)
    whole = whole_of(deep(name), batches)
    run = ranked(name, schedule, kinds(batches), how=how, count=count)
    losses = run.step(batches)
    expected = sum(float(loss_of(each, count)) for each in whole.logits)
    is_equal, gradients = away(run, whole)
    return is_equal, gradients, len(run.logits), abs(sum(map(float, losses)) - expected) if losses else 0.0
