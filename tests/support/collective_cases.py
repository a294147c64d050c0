"""Compare each collective and each module of tensor parallelism with what it is defined to compute, on one rank.

Functions for the workers of the gloo pool: their first arguments are rank and world size. Every rank makes the inputs
and the incoming gradients of all ranks, so that it can compute the results itself, and returns what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckptx.catalog.region import Region
from ckptx.layout.placement import Placement, ceil_chunks, tp_regions
from ckptx.runtime.parallel.tensor_parallel import collectives, styles
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks, concat_regions

CLOSE = 1e-5  # sums of a few float32 values in another order


class Case(NamedTuple):
    """A collective with its inputs, and the results by definition.

    Attributes:
        function: Function of the input of this rank.
        inputs: Input of each rank.
        outputs: Output of each rank.
        gradients: Incoming gradient of each rank.
        input_gradients: Gradient of each rank's input.
    """

    function: Callable[[Tensor], Tensor]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    gradients: Sequence[Tensor]
    input_gradients: Sequence[Tensor]


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _slices(whole: Tensor, dim: int, size: int) -> list[Tensor]:
    return [whole.narrow(dim, begin, length) for begin, length in ceil_chunks(whole.shape[dim], size)]


def _cases(name: str, total: int, dim: int, ranks: TpRanks) -> Case:
    """Return one collective on tensors of `total` elements along `dim`."""
    size, shape = ranks.size, [3, 2]
    shape[dim] = total
    whole, gradient = _random(0, *shape), _random(1, *shape)
    partial = [_random(10 + rank, *shape) for rank in range(size)]  # differs by rank
    partial_gradients = [_random(20 + rank, *shape) for rank in range(size)]
    slices, all_ranks = _slices(whole, dim, size), [whole] * size
    total_of = lambda tensors: torch.stack([*tensors]).sum(0)  # noqa: E731  # used in the table only
    sliced = lambda tensor: _slices(tensor, dim, size)  # noqa: E731  # used in the table only
    slice_gradients = sliced(gradient)
    cases = {
        "copy_to_ranks": Case(
            lambda x: collectives.copy_to_ranks(x, ranks),
            all_ranks, all_ranks, partial_gradients, [total_of(partial_gradients)] * size,
        ),
        "sum_over_ranks": Case(
            lambda x: collectives.sum_over_ranks(x, ranks),
            partial, [total_of(partial)] * size, [gradient] * size, [gradient] * size,
        ),
        "gather": Case(
            lambda x: collectives.gather(x, dim, total, ranks), slices, all_ranks, [gradient] * size, slice_gradients
        ),
        "split": Case(
            lambda x: collectives.split(x, dim, ranks), all_ranks, slices, slice_gradients, [gradient] * size
        ),
        "gather_partial": Case(
            lambda x: collectives.gather_partial(x, dim, total, ranks),
            slices, all_ranks, partial_gradients, sliced(total_of(partial_gradients)),
        ),
        "scatter_sum": Case(
            lambda x: collectives.scatter_sum(x, dim, ranks),
            partial, sliced(total_of(partial)), slice_gradients, [gradient] * size,
        ),
    }  # fmt: skip
    return cases[name]


COLLECTIVES = ("copy_to_ranks", "sum_over_ranks", "gather", "split", "gather_partial", "scatter_sum")
_MAX_TOTAL = 9


def find_wrong_collectives(rank: int, world_size: int, name: str) -> list[str]:
    """Return the sizes and dims for which a collective is wrong, forward or backward, from no element to two each."""
    ranks = TpRanks.from_mesh(init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)))
    return [
        f"{total} along {dim}: {fault}"
        for total, dim in product(range(_MAX_TOTAL), (0, 1))
        for fault in _find_faults(_cases(name, total, dim, ranks), rank)
    ]


# Regions of groups of unequal width, such as query, key and value, and ranks whose shards have any width.
GROUPS = [(5, 3, 3), (5, 7), (1, 1), (2, 9), (7,), (8, 4, 4), (1, 6, 2), (3, 0, 5)]


def _irregular_regions(world_size: int) -> Iterator[tuple[int, list[list[Region]]]]:
    """Yield sizes and regions where a rank has less than a later one, or nothing, and regions in any order."""
    for widths in product((0, 1, 3), repeat=world_size):
        offsets = [sum(widths[:rank]) for rank in range(world_size)]
        yield sum(widths), [[Region((begin,), (width,))] for begin, width in zip(offsets, widths, strict=True)]
    yield 2 * world_size, [[Region((world_size + rank,), (1,)), Region((rank,), (1,))] for rank in range(world_size)]


def find_wrong_gathered_shards(rank: int, world_size: int) -> list[str]:
    """Return the regions for which a gathered parameter, or its gradient, is wrong."""
    ranks = TpRanks.from_mesh(init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)))
    faults = []
    shapes = [(sum(groups), tp_regions((sum(groups), 2), Placement(0, groups), world_size)) for groups in GROUPS]
    shapes += [
        (total, [[Region((*each.offsets, 0), (*each.sizes, 2)) for each in parts] for parts in regions])
        for total, regions in _irregular_regions(world_size)
        if total
    ]
    for (total, regions), dim in product(shapes, (0, 1)):
        by_dim = (
            regions if dim == 0 else [[Region(*(pair[::-1] for pair in each)) for each in parts] for parts in regions]
        )
        whole, gradient = _random(0, total, 2), _random(1, total, 2)
        if dim:
            whole, gradient = whole.t(), gradient.t()

        def gather(local: Tensor, shape: Any = whole.shape, dim: int = dim, by_dim: Any = by_dim) -> Tensor:
            return collectives.gather_parameter(local, shape, dim, by_dim, ranks)

        shards = [concat_regions(whole, dim, parts) for parts in by_dim]
        shard_gradients = [concat_regions(gradient, dim, parts) for parts in by_dim]
        case = Case(gather, shards, [whole] * world_size, [gradient] * world_size, shard_gradients)
        faults += [f"{by_dim} along {dim}: {fault}" for fault in _find_faults(case, rank)]
    return faults


def _find_faults(case: Case, rank: int) -> Iterator[str]:
    local = case.inputs[rank].detach().clone().requires_grad_()
    output = case.function(local)
    yield from _differences("output", output.detach(), case.outputs[rank])
    output.backward(case.gradients[rank])
    assert local.grad is not None
    yield from _differences("gradient", local.grad, case.input_gradients[rank])


def _differences(what: str, found: Tensor, expected: Tensor) -> Iterator[str]:
    if found.shape != expected.shape:
        yield f"{what} has shape {tuple(found.shape)} in place of {tuple(expected.shape)}"
    elif found.numel() and not float((found - expected).abs().max()) < CLOSE:
        yield f"{what} differs"


# ------------------------------------------------------------------------------------------------------- modules


class SmallExperts(nn.Module):
    """Fused experts of one layer: the features between `up` and `down` are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(_random(2, 4, 6)), nn.Parameter(_random(3, 6, 4))

    def forward(self, hidden: Tensor, scale: Tensor, index: Any = None, *, bias: Tensor | None = None) -> Tensor:
        features = torch.tanh(hidden @ self.up) if index is None else torch.tanh(hidden[index] @ self.up)
        output = (features @ self.down) * scale
        # Each rank adds what is not sharded once for all of them.
        return output if bias is None else output + bias * features.square().sum(-1, keepdim=True)


def _shard(module: nn.Module, name: str, dim: int, ranks: TpRanks) -> None:
    whole = getattr(module, name).detach()
    local = _slices(whole, dim, ranks.size)[ranks.rank].clone()
    sharded = DTensor.from_local(
        local, ranks.mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    setattr(module, name, nn.Parameter(sharded))


EXPERT_INPUTS = ("hidden", "scale", "index", "bias")


def find_wrong_experts(rank: int, world_size: int) -> list[str]:
    """Return the ways to pass the inputs of experts for which an output or a gradient is wrong."""
    ranks = TpRanks.from_mesh(init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)))
    faults = []
    order = torch.tensor([2, 0, 1])
    for positional, has_index, has_bias, is_sequence_parallel in product(
        range(4), (False, True), (False, True), (False, True)
    ):
        whole, sharded = SmallExperts(), SmallExperts()
        _shard(sharded, "up", 1, ranks), _shard(sharded, "down", 0, ranks)
        styles.install_experts(sharded, ranks, is_sequence_parallel=is_sequence_parallel)
        results = []
        for module in (whole, sharded):
            inputs: dict[str, Any] = {
                "hidden": _random(4, 3, 4).requires_grad_(), "scale": _random(5, 3, 1).requires_grad_(),
                "index": order if has_index else None, "bias": _random(6, 3, 4).requires_grad_() if has_bias else None,
            }  # fmt: skip
            output = module(
                *[inputs[key] for key in EXPERT_INPUTS[:positional]],
                **{key: inputs[key] for key in EXPERT_INPUTS[positional:]},
            )
            gradient = _random(7, 3, 4)
            if is_sequence_parallel and module is sharded:
                gradient = _slices(gradient, 0, ranks.size)[rank]
            output.backward(gradient)
            results.append(
                (
                    output.detach(),
                    {key: inputs[key].grad for key in ("hidden", "scale", "bias") if inputs[key] is not None},
                )
            )
        (expected, expected_gradients), (found, gradients) = results
        if is_sequence_parallel:  # the gather of the inputs sums their gradients
            expected = _slices(expected, 0, ranks.size)[rank]
            gradients = {key: collectives.all_reduce(each, "sum", ranks) for key, each in gradients.items()}
        case = f"{positional} positional, {'index, ' * has_index}{'bias, ' * has_bias}{'SP' * is_sequence_parallel}"
        checks = [("output", found, expected)]
        checks += [(f"gradient of {key}", gradients[key], each) for key, each in expected_gradients.items()]
        for name, dim in (("up", 1), ("down", 0)):
            local = getattr(sharded, name).grad.to_local()
            checks.append((f"gradient of {name}", local, _slices(getattr(whole, name).grad, dim, ranks.size)[rank]))
        faults += [f"{case}: {fault}" for check in checks for fault in _differences(*check)]
    return faults


def find_wrong_mla_projections(rank: int, world_size: int) -> list[str]:
    """Return the sizes of the rotary part for which the latent projection is wrong.

    Each rank uses the rotary part for its own heads, and the latent part through projections that sum its gradient.
    """
    ranks = TpRanks.from_mesh(init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)))
    faults = []
    for rope_dim in range(7):
        module = nn.Linear(4, 6, bias=False)
        with torch.no_grad():
            module.weight.copy_(_random(1, 6, 4))
        styles.install_mla_kv_a_proj(module, ranks, rope_dim)
        x = _random(2, 2, 3, 4).requires_grad_()
        latent = 6 - rope_dim
        by_rank = [_random(10 + each, 2, 3, 6) for each in range(world_size)]
        for each in by_rank:
            each[..., :latent] = by_rank[0][..., :latent]  # equal on all ranks
        output = module(x)
        output.backward(by_rank[rank])
        total = torch.cat([by_rank[0][..., :latent], torch.stack(by_rank).sum(0)[..., latent:]], -1)
        weight = module.weight.detach()
        assert x.grad is not None and module.weight.grad is not None
        checks = [
            ("output", output.detach(), x.detach() @ weight.t()),
            ("gradient of the input", x.grad, total @ weight),
            ("gradient of the weight", module.weight.grad, torch.einsum("bso,bsi->oi", total, x.detach())),
        ]
        faults += [f"rope_dim {rope_dim}: {fault}" for check in checks for fault in _differences(*check)]
    return faults


def find_wrong_parameter_styles(rank: int, world_size: int) -> list[str]:
    """Return what is wrong with modules whose parameters are whole or local, on inputs that differ by rank."""
    ranks = TpRanks.from_mesh(init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)))
    inputs = [_random(10 + each, 3, 4) for each in range(world_size)]
    gradients = [_random(20 + each, 3, 4) for each in range(world_size)]
    checks = []

    norm = nn.LayerNorm(4)
    styles.sum_partial_gradients(norm, ranks)
    plain = nn.LayerNorm(4)
    for each, gradient in zip(inputs, gradients, strict=True):
        plain(each).backward(gradient)
    for _ in range(2):  # two microbatches: what is accumulated is not summed again
        norm(inputs[rank]).backward(gradients[rank])
    for name in ("weight", "bias"):
        checks.append((f"sum of the gradient of {name}", getattr(norm, name).grad, 2 * getattr(plain, name).grad))

    local = nn.Linear(4, 4, bias=False)
    whole = local.weight.detach().copy_(_random(1, 4, 4)).clone()
    _shard(local, "weight", 0, ranks)
    styles.install_local_params(local, ranks)
    checks.append(("local", local(inputs[rank]).detach(), inputs[rank] @ _slices(whole, 0, world_size)[rank].t()))

    identity = nn.Identity()
    styles.install_identity_expert(identity, ranks)
    shared = inputs[0]
    checks.append(("identity", collectives.all_reduce(identity(shared), "sum", ranks), shared))
    return [fault for check in checks for fault in _differences(*check)]
