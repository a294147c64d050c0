"""Shards the parameters of a model by its plan, and makes the stock forward pass correct on the shards.

A sharded parameter becomes a DTensor: `Shard(dim)` for one tensor along the dim, `_StridedShard` for equal fused parts.
DTensor cannot express parts of unequal width; such a parameter is marked `Shard(dim)` and holds the regions of
`TensorParallelLayout.local_regions`, which loaders and writers should use in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from ckptx.architecture.run_support import GATHER_STYLES, SPLIT_STYLES
from ckptx.catalog.region import Region
from ckptx.errors import UnsupportedError
from ckptx.layout.placement import Placement, ceil_chunks, is_aligned, tp_regions
from ckptx.layout.styles import STYLES, StyleKind
from ckptx.layout.tensor_parallel_plan import PlacementDecision, decide_placement
from ckptx.runtime.parallel.tensor_parallel import dropout, sequence, styles
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks, concat_regions
from ckptx.runtime.parallel.tensor_parallel.loss import install_sharded_loss
from ckptx.runtime.parallel.tensor_parallel.plans import TpPlan
from ckptx.runtime.parallel.tensor_parallel.sequence import SequenceSharding
from ckptx.runtime.parallel.tensor_parallel.styles import EXPERT_STYLES, ShardedParameter, TpSharding
from ckptx.runtime.torch_private import StridedShard


@dataclass(frozen=True, slots=True)
class TensorParallelLayout:
    """The TP layout of a model: the decision for each parameter, and the modules that gather.

    Attributes:
        tp: Number of TP ranks.
        rank: TP rank of this process.
        decisions: Decision by parameter name; a tied parameter has its first name.
        shapes: Shape of each whole parameter, by the same names.
        gathered_modules: Paths of the modules whose parameters are gathered around their forward pass.
        gathered_outputs: Path of each module that runs on shards and gathers its output -> False if a shard is known to
            split a head or a fused part, else True.
        sharded_head: Name of the module whose output stays sharded over the vocabulary; empty for none.
    """

    tp: int
    rank: int
    decisions: Mapping[str, PlacementDecision]
    shapes: Mapping[str, tuple[int, ...]]
    gathered_modules: tuple[str, ...]
    gathered_outputs: Mapping[str, bool]
    sharded_head: str = ""

    @property
    def placements(self) -> dict[str, Placement | None]:
        """Placement by parameter name; None for a replicated parameter."""
        return {name: decision.placement for name, decision in self.decisions.items()}

    @classmethod
    def merge(cls, layouts: Iterable[TensorParallelLayout | None]) -> TensorParallelLayout | None:
        """Merge the layouts of this rank's stages of one model; return None if all are None, as without TP."""
        stage_layouts = [each for each in layouts if each is not None]
        if not stage_layouts:
            return None
        return cls(
            stage_layouts[0].tp,
            stage_layouts[0].rank,
            {name: decision for each in stage_layouts for name, decision in each.decisions.items()},
            {name: shape for each in stage_layouts for name, shape in each.shapes.items()},
            tuple(dict.fromkeys(name for each in stage_layouts for name in each.gathered_modules)),
            {name: aligned for each in stage_layouts for name, aligned in each.gathered_outputs.items()},
            next((each.sharded_head for each in stage_layouts if each.sharded_head), ""),
        )

    def local_regions(self, name: str, rank: int | None = None) -> list[Region] | None:
        """Return the regions of a parameter that a rank holds, concatenated along the sharded dim.

        Args:
            name: Name of the parameter.
            rank: TP rank; None means this one.

        Returns:
            The whole tensor as one region if it is replicated; empty if the rank has no part of it; None for a name
            without a TP decision: a buffer, or any name but the first of a tied parameter.
        """
        if name not in self.decisions:
            return None
        local_regions = tp_regions(self.shapes[name], self.decisions[name].placement, self.tp)
        return list(local_regions[self.rank if rank is None else rank])


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: TpPlan) -> TensorParallelLayout:
    """Shard a model over the ranks of a mesh of one dim, in place.

    Args:
        model: On the meta device before it is loaded; on another device each rank keeps its shard of the values.
        mesh: Mesh of the TP ranks.
        plan: Plan from `find_plan`.

    Raises:
        UnsupportedError: A shard splits a head that the forward pass requires whole, or a layer does not match the
            modules that `plan.sequence` names, or has others that may not get a slice of the sequence.
    """
    ranks = TpRanks.from_mesh(mesh)
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    decisions = {name: _decide_parameter_placement(plan, name, shapes, ranks.size) for name in parameters}
    decisions_by_id = {id(parameter): decisions[name] for name, parameter in parameters.items()}
    all_decisions = {
        name: decisions_by_id[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    shardings = {
        id(parameters[name]): _make_tp_sharding(shapes[name], decisions[name], ranks.size) for name in parameters
    }
    local_parameters = list(_iter_sharded_parameters(model, shardings))
    gathered_by_unit = _find_gathered_modules(model, plan, all_decisions, ranks.size)
    _refuse_split_heads(plan, decisions, shapes, gathered_by_unit, ranks.size)
    _replace_by_dtensors(local_parameters, ranks)
    if ranks.size > 1:
        _install_styles(model, plan, ranks, local_parameters, gathered_by_unit)
    gathered_modules = tuple(chain.from_iterable(gathered_by_unit.values()))
    outputs = _find_gathered_outputs(plan, decisions, gathered_modules)
    sharded_modules = {name.rpartition(".")[0] for name, _ in local_parameters}
    has_sharded_head = plan.sharded_head in sharded_modules and not _is_in_any_module(
        f"{plan.sharded_head}.", gathered_modules
    )
    head = plan.sharded_head if has_sharded_head else ""
    return TensorParallelLayout(ranks.size, ranks.rank, decisions, shapes, gathered_modules, outputs, head)


def find_gather_unit(name: str) -> str:
    """Return the path of the unit of a tensor: a module whose tensors either all run as shards, or are all gathered.

    It is a child of a layer (of the first module in the path whose name is an index), or outside of layers the module
    that holds the tensor.

    Example:
        >>> find_gather_unit("model.layers.3.self_attn.q_proj.weight")
        'model.layers.3.self_attn'
        >>> find_gather_unit("lm_head.weight")
        'lm_head'
    """
    parts = name.split(".")[:-1]
    index = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts if index is None else parts[: index + 2])


def _decide_parameter_placement(
    plan: TpPlan, name: str, shapes: Mapping[str, tuple[int, ...]], tp: int
) -> PlacementDecision:
    """Decide the placement of a parameter as `ckptx reshard` does: a scale follows its weight."""
    module, _, leaf = name.rpartition(".")
    weight_name = f"{module}.weight"
    if leaf in ("weight", "bias") or weight_name not in shapes:
        return decide_placement(plan.sharding, name, shapes[name], tp)
    weight = shapes[weight_name], decide_placement(plan.sharding, weight_name, shapes[weight_name], tp).placement
    return decide_placement(plan.sharding, name, shapes[name], tp, weight)


def _make_tp_sharding(shape: tuple[int, ...], decision: PlacementDecision, tp: int) -> TpSharding | None:
    """Return the sharding of a parameter that follows from the decision; None if it is replicated."""
    if decision.placement is None:
        return None
    return TpSharding(shape, decision.placement.dim, tp_regions(shape, decision.placement, tp))


def _iter_sharded_parameters(
    model: nn.Module, shardings: Mapping[int, TpSharding | None]
) -> Iterator[tuple[str, ShardedParameter]]:
    """Yield (full name, place in the model) of each sharded parameter; a tied one under each of its names."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            sharding = shardings.get(id(parameter)) if parameter is not None else None
            if sharding is not None:
                yield (f"{path}.{name}" if path else name), ShardedParameter(module, name, sharding)


def _replace_by_dtensors(parameters: list[tuple[str, ShardedParameter]], ranks: TpRanks) -> None:
    """Replace parameters by DTensors; tied parameters stay tied."""
    sharded_by_id: dict[int, nn.Parameter] = {}
    for _, (module, name, sharding) in parameters:
        parameter = module._parameters[name]
        assert parameter is not None
        if id(parameter) not in sharded_by_id:
            sharded_by_id[id(parameter)] = _shard_parameter(parameter, sharding, ranks)
        module._parameters[name] = sharded_by_id[id(parameter)]


def _shard_parameter(parameter: nn.Parameter, sharding: TpSharding, ranks: TpRanks) -> nn.Parameter:
    local = concat_regions(parameter.detach(), sharding.dim, sharding.regions[ranks.rank]).contiguous()
    sharded = DTensor.from_local(
        local,
        ranks.mesh,
        [_torch_placement(sharding)],
        run_check=False,
        shape=parameter.shape,
        stride=torch.empty(parameter.shape, device="meta").stride(),
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _torch_placement(sharding: TpSharding) -> TorchPlacement:
    groups = len(sharding.regions[0])  # the first rank has a part of each group
    # width of each group, summed over ranks
    widths = {sum(local[i].sizes[sharding.dim] for local in sharding.regions if len(local) > i) for i in range(groups)}
    if groups > 1 and len(widths) == 1:
        return StridedShard(sharding.dim, split_factor=groups)
    return Shard(sharding.dim)


def _find_gathered_modules(
    model: nn.Module, plan: TpPlan, decisions: Mapping[str, PlacementDecision], tp: int
) -> dict[str, tuple[str, ...]]:
    """Return each unit that cannot run on shards -> the modules around whose forward pass its tensors are gathered."""
    modules = dict(model.named_modules())
    units: dict[str, list[str]] = {}
    for name in decisions:
        units.setdefault(find_gather_unit(name), []).append(name)
    gathered_by_unit: dict[str, tuple[str, ...]] = {}
    for unit, names in units.items():
        sharded_names = [name for name in names if decisions[name].placement is not None]
        if sharded_names and not _can_run_on_shards(plan, modules, names, decisions, tp):
            owner_modules = dict.fromkeys(name.rpartition(".")[0] for name in sharded_names)
            gathered_by_unit[unit] = (unit,) if _has_forward(modules[unit]) else tuple(owner_modules)
    return gathered_by_unit


def _can_run_on_shards(
    plan: TpPlan,
    modules: Mapping[str, nn.Module],
    names: list[str],
    decisions: Mapping[str, PlacementDecision],
    tp: int,
) -> bool:
    """Return True if everything in a unit can run on shards."""
    head_widths: set[int] = set()
    for name in names:
        match, placement = plan.rule_of(name), decisions[name].placement
        if match is None:
            if placement is not None or _is_activation_parameter(modules, name):
                return False  # tied to a parameter with a rule, or applied to the features of one rank only (Apertus)
            continue
        kind = STYLES[match[1].style]
        if not plan.runs_on_shards(name) and (kind.is_sharding or match[1].decided_by == "user plan"):
            return False
        if placement is None and kind.is_sharding and not name.endswith("bias"):
            return False  # too small to shard, while the parameters that it is used with are sharded
        if placement is not None and not _is_style_supported(plan, modules, name, match[1].style, decisions, tp):
            return False
        head_widths |= {width for _, width in match[1].heads}
    return not (head_widths and any(_is_per_head(plan, modules, name, head_widths) for name in names))


def _is_activation_parameter(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Return True for a parameter of an activation function, such as xIELU."""
    return type(modules[name.rpartition(".")[0]]).__module__ == "transformers.activations"


def _is_per_head(plan: TpPlan, modules: Mapping[str, nn.Module], name: str, head_widths: Collection[int]) -> bool:
    """Return True if a replicated parameter may be per head, so that each rank's gradient is partial.

    This applies to a norm with a row for each head, a norm as wide as a head that no rule matches (GLM-4.5), and a
    parameter of the attention module itself without a rule (Doge).
    """
    path, _, leaf = name.rpartition(".")
    module = modules[path]
    weight = module._parameters.get(leaf)
    has_rule = plan.rule_of(name) is not None
    if weight is not None and "Norm" in type(module).__name__:
        return weight.dim() == 2 or (not has_rule and weight.numel() in head_widths)
    return not has_rule and next(module.children(), None) is not None


def _is_style_supported(
    plan: TpPlan,
    modules: Mapping[str, nn.Module],
    name: str,
    style: str,
    decisions: Mapping[str, PlacementDecision],
    tp: int,
) -> bool:
    """Return True if a style can replace the forward pass of the module that holds a sharded parameter."""
    path, _, leaf = name.rpartition(".")
    module, kind, placement = modules[path], STYLES[style], decisions[name].placement
    assert placement is not None
    if _has_unchanged_forward(module, nn.Linear):
        dim = {StyleKind.COLWISE: 0, StyleKind.ROWWISE: 1}.get(kind)
        return leaf in ("weight", "bias") and placement.dim == dim and len(placement.groups) == 1
    if isinstance(module, nn.Embedding):
        dim = {StyleKind.EMBEDDING_ROWWISE: 0, StyleKind.EMBEDDING_COLWISE: 1}.get(kind)
        # The forward pass looks up rows, and may scale them.
        is_lookup = _has_unchanged_forward(module, nn.Embedding) or type(module).__name__.endswith(
            "ScaledWordEmbedding"
        )
        return placement.dim == dim and is_lookup
    module_style = plan.style_of(path)
    if module_style == "local_params":
        return kind is StyleKind.COLWISE
    return module_style in EXPERT_STYLES and _can_experts_run_on_shards(path, module, decisions, tp)


def _can_experts_run_on_shards(
    path: str, module: nn.Module, decisions: Mapping[str, PlacementDecision], tp: int
) -> bool:
    """Return True if fused experts can run on shards: then each rank computes a partial sum.

    A replicated bias would be added once by each rank. A [gate|up] tensor that is sharded as one part gives a rank
    gates without their ups; such a tensor is twice as wide as the input of the down projection (Inkling, whose plan in
    transformers 5.23 is "colwise"). A grouped matmul requires rows that begin at multiples of 16 bytes.
    """
    widths: dict[str, int] = {}
    for name, parameter in module._parameters.items():
        placement = decisions[f"{path}.{name}"].placement if parameter is not None else None
        if placement is not None and parameter is not None and len(placement.groups) == 1:
            widths[name] = parameter.shape[placement.dim]
            if any(size * parameter.element_size() % 16 for _, size in ceil_chunks(widths[name], tp)):
                return False
        elif placement is None and "bias" in name and parameter is not None:
            return False
    return max(widths.values(), default=0) == min(widths.values(), default=0)


def _has_unchanged_forward(module: nn.Module, cls: type[nn.Module]) -> bool:
    return isinstance(module, cls) and type(module).forward is cls.forward


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _find_gathered_outputs(
    plan: TpPlan, decisions: Mapping[str, PlacementDecision], gathered_modules: Iterable[str]
) -> dict[str, bool]:
    """Return `TensorParallelLayout.gathered_outputs`, in which modules inside `gathered_modules` are left out."""
    gathered_outputs: dict[str, bool] = {}
    for name, decision in decisions.items():
        module = name.rpartition(".")[0]
        is_sharded = decision.placement is not None and module != plan.sharded_head
        if is_sharded and plan.style_of(module) in GATHER_STYLES and not _is_in_any_module(name, gathered_modules):
            gathered_outputs[module] = gathered_outputs.get(module, True) and decision.aligned is not False
    return gathered_outputs


def _refuse_split_heads(
    plan: TpPlan,
    decisions: Mapping[str, PlacementDecision],
    shapes: Mapping[str, tuple[int, ...]],
    gathered_by_unit: Mapping[str, tuple[str, ...]],
    tp: int,
) -> None:
    """Refuse shards that split a head, unless the unit is gathered or the style allows it.

    Raises:
        UnsupportedError: A parameter that the forward pass uses as shards is split inside a head.
    """
    for name, decision in decisions.items():
        match = plan.rule_of(name)
        if (
            is_aligned(shapes[name], decision.placement, tp)
            or match is None
            or match[1].style in (*GATHER_STYLES, *SPLIT_STYLES)
        ):
            continue
        if not _is_in_any_module(name, gathered_by_unit):
            assert decision.placement is not None
            raise UnsupportedError(
                f"{plan.class_name}: tp={tp} would split {name} inside a head of size "
                f"{decision.placement.align}; choose a smaller tp"
            )


def _is_in_any_module(name: str, paths: Iterable[str]) -> bool:
    """Return True if a parameter belongs to one of the modules; to ask for a module, pass its path with a final dot."""
    return any(name.startswith(f"{path}.") for path in paths)


def _install_styles(
    model: nn.Module,
    plan: TpPlan,
    ranks: TpRanks,
    parameters: list[tuple[str, ShardedParameter]],
    gathered_by_unit: Mapping[str, tuple[str, ...]],
) -> None:
    """Install the styles on the modules: first those that run on shards, then those that gather around them."""
    modules = dict(model.named_modules())
    sharded_modules = {name.rpartition(".")[0] for name, _ in parameters}
    gathered_modules = list(chain.from_iterable(gathered_by_unit.values()))
    sequence_sharding = sequence.shard_sequence(modules, plan, sharded_modules, gathered_modules)
    sequence.install_gradient_sums(modules, sequence_sharding, ranks)
    for path, module in modules.items():
        if path and not _is_in_any_module(f"{path}.", gathered_by_unit):
            _install_style(model, module, plan, path, path in sharded_modules, sequence_sharding, ranks)
    for path in gathered_modules:
        inner_parameters = [each for name, each in parameters if name.startswith(f"{path}.")]
        styles.gather_parameters(modules[path], inner_parameters, ranks)
    sequence.install_sequence_parallel(modules, sequence_sharding, ranks)
    if plan.sharded_head in sharded_modules:
        install_sharded_loss(model)
    for reader, source in plan.reads_weight.items():
        if reader in modules and source in modules:
            source_parameters = [each for name, each in parameters if name.startswith(f"{source}.")]
            styles.gather_parameters(modules[reader], source_parameters, ranks)
    dropout.install_rng_streams(model, modules, plan, sharded_modules, gathered_modules, sequence_sharding, ranks)


def _install_style(
    model: nn.Module,
    module: nn.Module,
    plan: TpPlan,
    path: str,
    is_sharded: bool,
    sequence_sharding: SequenceSharding,
    ranks: TpRanks,
) -> None:
    """Install the style of one module, if it has one."""
    style = plan.style_of(path)
    # True if the style itself has to scatter the sum of its partial outputs along the sequence.
    is_sequence_parallel = sequence_sharding.has_partial_output(path)
    kind = STYLES[style]
    if style == "replicated_with_grad_allreduce":
        styles.sum_partial_gradients(module, ranks)
    elif style == "mla_kv_a_proj":
        styles.install_mla_kv_a_proj(module, ranks, _rope_dim(model))
    elif style == "moe_identity_expert":
        styles.install_identity_expert(module, ranks)
    elif not is_sharded:
        return
    elif style == "local_params":
        styles.install_local_params(module, ranks)
    elif style in EXPERT_STYLES:
        styles.install_experts(module, ranks, is_sequence_parallel=is_sequence_parallel)
    elif isinstance(module, nn.Embedding):
        install = (
            styles.install_embedding_rowwise
            if kind is StyleKind.EMBEDDING_ROWWISE
            else styles.install_embedding_colwise
        )
        install(module, ranks)
    elif kind is StyleKind.COLWISE:
        output = "gathered" if style in GATHER_STYLES else "sharded"
        styles.install_colwise(
            module,
            ranks,
            output="dtensor" if path == plan.sharded_head else output,
            is_sequence_parallel=is_sequence_parallel,
        )
    elif kind is StyleKind.ROWWISE:
        styles.install_rowwise(
            module, ranks, splits_input=style in SPLIT_STYLES, is_sequence_parallel=is_sequence_parallel
        )


def _rope_dim(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.get_text_config().qk_rope_head_dim)
