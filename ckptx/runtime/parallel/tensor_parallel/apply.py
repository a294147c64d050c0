"""Cuts the parameters of a model as its plan says, and makes the stock forward pass right on the pieces.

A parameter that is cut becomes a DTensor: `Shard(dim)` where one thing lies along the dim, `_StridedShard` where equal
parts are fused there. DTensor has no word for parts of unequal width; such a parameter says `Shard(dim)` and holds the
rectangles of `TensorParallelLayout.local_regions`, which is what a loader or writer should ask in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from ckptx.catalog.region import Region
from ckptx.errors import UnsupportedError
from ckptx.layout.placement import Placement, ceil_chunks, is_aligned, tp_rectangles
from ckptx.layout.styles import STYLES, Kind
from ckptx.layout.tensor_parallel_plan import Decision, decide
from ckptx.runtime.parallel.tensor_parallel import dropout, sequence, styles
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks, own_part
from ckptx.runtime.parallel.tensor_parallel.loss import use_sharded_loss
from ckptx.runtime.parallel.tensor_parallel.plans import GATHERING, SPLITTING, Plan
from ckptx.runtime.parallel.tensor_parallel.sequence import SequenceSharding
from ckptx.runtime.parallel.tensor_parallel.styles import EXPERTS, LocalParameter, TpSharding
from ckptx.runtime.torch_private import StridedShard


@dataclass(frozen=True, slots=True)
class TensorParallelLayout:
    """What TP did to a model.

    Attributes:
        tp: Number of TP ranks.
        rank: Of this process among them.
        decisions: By parameter; one that several modules share has the first of its names.
        shapes: Of the whole parameters, likewise.
        gathered: Modules around whose forward pass parameters are gathered.
        gathered_outputs: Modules that run on shards and whose output is gathered, because it does not stay sharded:
            True for one whose shards hold whole heads or parts.
    """

    tp: int
    rank: int
    decisions: Mapping[str, Decision]
    shapes: Mapping[str, tuple[int, ...]]
    gathered: tuple[str, ...]
    gathered_outputs: Mapping[str, bool]

    @property
    def placements(self) -> dict[str, Placement | None]:
        """By parameter, None for one that every rank has whole."""
        return {name: decision.placement for name, decision in self.decisions.items()}

    @classmethod
    def merge(cls, layouts: Iterable[TensorParallelLayout | None]) -> TensorParallelLayout | None:
        """Of several pipeline stages of one model; None without TP."""
        found = [each for each in layouts if each is not None]
        if not found:
            return None
        return cls(
            found[0].tp,
            found[0].rank,
            {name: decision for each in found for name, decision in each.decisions.items()},
            {name: shape for each in found for name, shape in each.shapes.items()},
            tuple(dict.fromkeys(name for each in found for name in each.gathered)),
            {name: aligned for each in found for name, aligned in each.gathered_outputs.items()},
        )

    def local_regions(self, name: str, rank: int | None = None) -> list[Region] | None:
        """The rectangles of a parameter that a rank holds, one after the other along the dim that is cut.

        Args:
            name: Of the parameter.
            rank: Among the TP ranks; this one when left out.

        Returns:
            Of one that is not cut, all of it; None for a name that TP does not know, such as that of a buffer.
        """
        if name not in self.decisions:
            return None
        local_regions = tp_rectangles(self.shapes[name], self.decisions[name].placement, self.tp)
        return list(local_regions[self.rank if rank is None else rank])


def apply(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> TensorParallelLayout:
    """Cuts a model for the ranks of a mesh of one dim, in place.

    Args:
        model: On the meta device before it is loaded; on another one each rank keeps its part of what is there.
        mesh: The TP ranks.
        plan: See `find_plan`.

    Raises:
        UnsupportedError: A cut falls inside a head that the forward pass needs whole.
            Or the sequence is to be cut, and a layer is not as its `sequence` row says.
    """
    ranks = TpRanks.of(mesh)
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    decisions = {name: _decision(plan, name, shapes, ranks.size) for name in parameters}
    by_id = {id(parameter): decisions[name] for name, parameter in parameters.items()}
    every = {name: by_id[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    cuts = {id(parameters[name]): _cut_of(shapes[name], decisions[name], ranks.size) for name in parameters}
    local_parameters = list(_local_parameters(model, cuts))
    gathered = _gathered_units(model, plan, every, ranks.size)
    _refuse_cut_heads(plan, decisions, shapes, gathered, ranks.size)
    _replace(local_parameters, ranks)
    if ranks.size > 1:
        _install(model, plan, ranks, local_parameters, gathered)
    scopes = tuple(scope for scopes in gathered.values() for scope in scopes)
    outputs = _gathered_outputs(plan, decisions, scopes)
    return TensorParallelLayout(ranks.size, ranks.rank, decisions, shapes, scopes, outputs)


def unit_of(name: str) -> str:
    """The module of a layer that a tensor belongs to: what is sharded in it fits together, or is gathered together.

    Example:
        >>> unit_of("model.layers.3.self_attn.q_proj.weight")
        'model.layers.3.self_attn'
        >>> unit_of("lm_head.weight")
        'lm_head'
    """
    parts = name.split(".")[:-1]
    index = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts if index is None else parts[: index + 2])


def _decision(plan: Plan, name: str, shapes: Mapping[str, tuple[int, ...]], tp: int) -> Decision:
    """As `ckptx reshard` decides: a scale of a weight follows it."""
    module, _, leaf = name.rpartition(".")
    beside = f"{module}.weight"
    if leaf in ("weight", "bias") or beside not in shapes:
        return decide(plan.cuts, name, shapes[name], tp)
    weight = shapes[beside], decide(plan.cuts, beside, shapes[beside], tp).placement
    return decide(plan.cuts, name, shapes[name], tp, weight)


def _cut_of(shape: tuple[int, ...], decision: Decision, tp: int) -> TpSharding | None:
    if decision.placement is None:
        return None
    return TpSharding(shape, decision.placement.dim, tp_rectangles(shape, decision.placement, tp))


def _local_parameters(model: nn.Module, cuts: Mapping[int, TpSharding | None]) -> Iterator[tuple[str, LocalParameter]]:
    """Every place of a parameter that is cut, with its full name."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            cut = cuts.get(id(parameter)) if parameter is not None else None
            if cut is not None:
                yield (f"{path}.{name}" if path else name), LocalParameter(module, name, cut)


def _replace(parameters: list[tuple[str, LocalParameter]], ranks: TpRanks) -> None:
    """Puts DTensors in the place of parameters; what was shared stays shared."""
    made: dict[int, nn.Parameter] = {}
    for _, (module, name, cut) in parameters:
        parameter = module._parameters[name]
        assert parameter is not None
        if id(parameter) not in made:
            made[id(parameter)] = _sharded(parameter, cut, ranks)
        module._parameters[name] = made[id(parameter)]


def _sharded(parameter: nn.Parameter, cut: TpSharding, ranks: TpRanks) -> nn.Parameter:
    local = own_part(parameter.detach(), cut.dim, cut.regions[ranks.rank]).contiguous()
    sharded = DTensor.from_local(
        local,
        ranks.mesh,
        [_torch_placement(cut)],
        run_check=False,
        shape=parameter.shape,
        stride=torch.empty(parameter.shape, device="meta").stride(),
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _torch_placement(cut: TpSharding) -> TorchPlacement:
    groups = len(cut.regions[0])  # the first rank has a part of each
    widths = {sum(local[i].sizes[cut.dim] for local in cut.regions if len(local) > i) for i in range(groups)}
    if groups > 1 and len(widths) == 1:
        return StridedShard(cut.dim, split_factor=groups)
    return Shard(cut.dim)


def _gathered_units(
    model: nn.Module, plan: Plan, decisions: Mapping[str, Decision], tp: int
) -> dict[str, tuple[str, ...]]:
    """Units that cannot run as they are cut, and in each the modules around whose forward pass it is gathered."""
    modules = dict(model.named_modules())
    units: dict[str, list[str]] = {}
    for name in decisions:
        units.setdefault(unit_of(name), []).append(name)
    found: dict[str, tuple[str, ...]] = {}
    for unit, names in units.items():
        is_cut = [name for name in names if decisions[name].placement is not None]
        if is_cut and not _runs(plan, modules, names, decisions, tp):
            owners = dict.fromkeys(name.rpartition(".")[0] for name in is_cut)
            found[unit] = (unit,) if _has_forward(modules[unit]) else tuple(owners)
    return found


def _runs(
    plan: Plan, modules: Mapping[str, nn.Module], names: list[str], decisions: Mapping[str, Decision], tp: int
) -> bool:
    """Whether everything in a unit can run as it is cut."""
    widths: set[int] = set()  # of heads
    for name in names:
        found, placement = plan.rule_of(name), decisions[name].placement
        if found is None:
            if placement is not None or _is_of_activation(modules, name):
                return False  # shared with what a rule speaks of, or it sees the features of one rank only (Apertus)
            continue
        kind = STYLES[found[1].style]
        if not plan.runs_on_shards(name) and (kind.cuts or found[1].decided_by == "user plan"):
            return False
        if placement is None and kind.cuts and not name.endswith("bias"):
            return False  # too small to be cut, while what fits to it is
        if placement is not None and not _fits(plan, modules, name, found[1].style, decisions, tp):
            return False
        widths |= {width for _, width in found[1].heads}
    return not (widths and any(_is_by_head(plan, modules, name, widths) for name in names))


def _is_of_activation(modules: Mapping[str, nn.Module], name: str) -> bool:
    return type(modules[name.rpartition(".")[0]]).__module__ == "transformers.activations"


def _is_by_head(plan: Plan, modules: Mapping[str, nn.Module], name: str, widths: Collection[int]) -> bool:
    """Whether a whole parameter may be of heads, of which a rank sees its own only: its gradient would be a part.

    That is a norm with a row for each head, a norm as wide as a head that no rule matches (GLM-4.5), and a parameter
    of the attention module itself without a rule (Doge).
    """
    path, _, leaf = name.rpartition(".")
    module = modules[path]
    weight = module._parameters.get(leaf)
    has_rule = plan.rule_of(name) is not None
    if weight is not None and "Norm" in type(module).__name__:
        return weight.dim() == 2 or (not has_rule and weight.numel() in widths)
    return not has_rule and next(module.children(), None) is not None


def _fits(
    plan: Plan, modules: Mapping[str, nn.Module], name: str, style: str, decisions: Mapping[str, Decision], tp: int
) -> bool:
    """Whether a style knows the forward pass of the module that holds a parameter."""
    path, _, leaf = name.rpartition(".")
    module, kind, placement = modules[path], STYLES[style], decisions[name].placement
    assert placement is not None
    if _is_own_forward(module, nn.Linear):
        dim = {Kind.COLWISE: 0, Kind.ROWWISE: 1}.get(kind)
        return leaf in ("weight", "bias") and placement.dim == dim and len(placement.groups) == 1
    if isinstance(module, nn.Embedding):
        dim = {Kind.EMBEDDING_ROWWISE: 0, Kind.EMBEDDING_COLWISE: 1}.get(kind)
        is_linear = _is_own_forward(module, nn.Embedding) or type(module).__name__.endswith("ScaledWordEmbedding")
        return placement.dim == dim and is_linear
    owner_style = plan.style_of(path)
    if owner_style == "local_params":
        return kind is Kind.COLWISE
    return owner_style in EXPERTS and _are_experts_cut_alike(path, module, decisions, tp)


def _are_experts_cut_alike(path: str, module: nn.Module, decisions: Mapping[str, Decision], tp: int) -> bool:
    """Whether fused experts compute a summand each rank.

    A whole bias would be added once by each rank. And [gate|up] cut as one thing gives a rank gates without their ups:
    it is told by being twice as wide as what the experts project back (Inkling, whose plan in transformers 5.23 says
    "colwise"). A grouped matmul wants rows that begin at multiples of 16 bytes.
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


def _is_own_forward(module: nn.Module, cls: type[nn.Module]) -> bool:
    return isinstance(module, cls) and type(module).forward is cls.forward


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _gathered_outputs(plan: Plan, decisions: Mapping[str, Decision], scopes: Iterable[str]) -> dict[str, bool]:
    """Return the modules whose output is gathered after they ran on shards, and whether these are aligned."""
    found: dict[str, bool] = {}
    for name, decision in decisions.items():
        module = name.rpartition(".")[0]
        is_sharded = decision.placement is not None and module != plan.sharded_head
        if is_sharded and plan.style_of(module) in GATHERING and not _is_below(name, scopes):
            found[module] = found.get(module, True) and decision.aligned
    return found


def _refuse_cut_heads(
    plan: Plan,
    decisions: Mapping[str, Decision],
    shapes: Mapping[str, tuple[int, ...]],
    gathered: Mapping[str, tuple[str, ...]],
    tp: int,
) -> None:
    for name, decision in decisions.items():
        style = plan.rule_of(name)
        if (
            is_aligned(shapes[name], decision.placement, tp)
            or style is None
            or style[1].style in (*GATHERING, *SPLITTING)
        ):
            continue
        if not _is_below(name, gathered):
            assert decision.placement is not None
            raise UnsupportedError(
                f"{plan.class_name}: tp={tp} cuts {name} inside a head, needed heads of "
                f"{decision.placement.align} that divide by {tp}; choose a smaller tp"
            )


def _is_below(name: str, paths: Iterable[str]) -> bool:
    return any(name.startswith(f"{path}.") for path in paths)


def _install(
    model: nn.Module,
    plan: Plan,
    ranks: TpRanks,
    parameters: list[tuple[str, LocalParameter]],
    gathered: Mapping[str, tuple[str, ...]],
) -> None:
    """Puts the styles on the modules: those of shards first, then what gathers around them."""
    modules = dict(model.named_modules())
    is_sharded = {name.rpartition(".")[0] for name, _ in parameters}
    scopes = [scope for scopes in gathered.values() for scope in scopes]
    cut = sequence.cut_sequence(modules, plan, is_sharded, scopes)
    sequence.sum_gradients(modules, cut, ranks)
    for path, module in modules.items():
        if path and not _is_below(f"{path}.", gathered):
            _install_style(model, module, plan, path, path in is_sharded, cut, ranks)
    for scope in scopes:
        inside = [each for name, each in parameters if name.startswith(f"{scope}.")]
        styles.gathered(modules[scope], inside, ranks)
    sequence.install(modules, cut, ranks)
    if plan.sharded_head in is_sharded:
        use_sharded_loss(model)
    for scope, source in plan.reads_weight.items():
        if scope in modules and source in modules:
            read = [each for name, each in parameters if name.startswith(f"{source}.")]
            styles.gathered(modules[scope], read, ranks)
    dropout.install(model, modules, plan, is_sharded, scopes, cut, ranks)


def _install_style(
    model: nn.Module, module: nn.Module, plan: Plan, path: str, is_sharded: bool, cut: SequenceSharding, ranks: TpRanks
) -> None:
    """Puts the style of one module on it, if it has one."""
    style = plan.style_of(path)
    on_sequence = cut.is_summand(path)
    kind = STYLES[style]
    if style == "replicated_with_grad_allreduce":
        styles.partial_gradient(module, ranks)
    elif style == "mla_kv_a_proj":
        styles.mla_kv_a_proj(module, ranks, _rope_dim(model))
    elif style == "moe_identity_expert":
        styles.identity_expert(module, ranks)
    elif not is_sharded:
        return
    elif style == "local_params":
        styles.local_params(module, ranks)
    elif style in EXPERTS:
        styles.experts(module, ranks, on_sequence=on_sequence)
    elif isinstance(module, nn.Embedding):
        install = styles.embedding_rowwise if kind is Kind.EMBEDDING_ROWWISE else styles.embedding_colwise
        install(module, ranks)
    elif kind is Kind.COLWISE:
        output = "gathered" if style in GATHERING else "sharded"
        styles.colwise(
            module, ranks, output="dtensor" if path == plan.sharded_head else output, on_sequence=on_sequence
        )
    elif kind is Kind.ROWWISE:
        styles.rowwise(module, ranks, splits_input=style in SPLITTING, on_sequence=on_sequence)


def _rope_dim(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.get_text_config().qk_rope_head_dim)
