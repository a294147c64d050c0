"""Names that share a parameter, on several stages: each has its own copy, and both gradients are summed on all of them.

The copies begin with the same bytes, get the same gradient bit for bit, and so stay equal under any optimizer that
looks at one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ckptx.errors import InputError, UnsupportedError
from ckptx.layout.stages import StageMap
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.torch_private import local_tensor

_BAND = 1 << 22  # elements
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Tie(NamedTuple):
    """A parameter of several stages.

    Attributes:
        name: The first that it has in the whole model.
        copies: Its first name on each stage that has it.
    """

    name: str
    copies: Mapping[int, str]


def ties_across_stages(model: nn.Module, stages: StageMap) -> list[Tie]:
    """The parameters of a whole model that several stages get.

    Args:
        model: Whole, on whatever device.
        stages: How it will be cut.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(canonical_name(name))
    found = []
    for each in names.values():
        copies: dict[int, str] = {}
        for name in each:
            copies.setdefault(stages.stage_of(name), name)
        if len(copies) > 1:
            found.append(Tie(each[0], dict(sorted(copies.items()))))
    return found


def later_copies(ties: Sequence[Tie], models: Mapping[int, nn.Module]) -> list[Tensor]:
    """Every copy but that on the first stage of its tie, of the stages of this rank: what counts once is there."""
    return [
        parameter_of(models[stage], name)
        for tie in ties
        for stage, name in list(tie.copies.items())[1:]
        if stage in models
    ]


def take_gradients(ties: Sequence[Tie], models: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    """Takes from every copy what was summed in earlier steps, which must not be summed again; by name of the tie."""
    held = {}
    for tie in ties:
        for stage, name in tie.copies.items():
            if stage in models:
                parameter = parameter_of(models[stage], name)
                if parameter.grad is not None:
                    held[tie.name] = _local(parameter.grad)
                    parameter.grad = None
    return held


def sum_gradients(
    ties: Sequence[Tie],
    models: Mapping[int, nn.Module],
    rank_of: Mapping[int, int],
    group: dist.ProcessGroup,
    held: Mapping[str, Tensor],
) -> None:
    """Gives every copy the sum of the gradients of all, in the order of the stages.

    Args:
        ties: From `ties_across_stages`; the same on every rank.
        models: The stages of this rank, by number.
        rank_of: Of every stage, the rank among all processes; those of this pipeline.
        group: The ranks of the pipeline; each calls this when its step is over, and FSDP2 has reduced.
        held: From `take_gradients` before the step; is added to the sum.

    Raises:
        UnsupportedError: The stages do not cut a parameter alike.
    """
    here = dist.get_rank()
    for tie in ties:
        ranks = [rank_of[stage] for stage in tie.copies]
        if here not in ranks:
            continue
        own = {stage: parameter_of(models[stage], name) for stage, name in tie.copies.items() if stage in models}
        like = next(iter(own.values()))
        if not like.requires_grad:
            continue
        first, total = ranks[0], None
        for stage, rank in zip(tie.copies, ranks, strict=True):
            part = _local_gradient(own[stage]) if rank == here else None
            if rank != first and rank == here:
                assert part is not None
                dist.send(part, dst=first, group=group)
            elif first == here:
                if part is None:
                    part = torch.empty_like(_local(like))
                    dist.recv(part, src=rank, group=group)
                total = part.clone() if total is None else total.add_(part)
        if first != here:
            total = torch.empty_like(_local(like))
            dist.recv(total, src=first, group=group)
        else:
            assert total is not None
            for rank in dict.fromkeys(ranks[1:]):
                if rank != here:
                    dist.send(total, dst=rank, group=group)
        assert total is not None
        if tie.name in held:
            total = held[tie.name] + total
        for parameter in own.values():
            _set_gradient(parameter, total.clone())


def _checksum(tensor: Tensor) -> str:
    """Of its bits; two numbers that depend on all of them and on their places."""
    found = [0, 0]
    bits = tensor.contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    for index, band in enumerate(bits.split(_BAND)):
        wide = band.to(torch.int64)
        places = torch.arange(1, len(wide) + 1, device=wide.device)
        found = [found[0] + int(wide.sum()), found[1] + int((wide * places).sum()) * (2 * index + 1)]
    return f"{found[0]:x}.{found[1]:x}"


def check_copies_are_equal(ties: Sequence[Tie], models: Mapping[int, nn.Module], group: dist.ProcessGroup) -> None:
    """Refuses copies that stages cut differently, whose gradients could not be summed up part by part, and such that
    do not hold the same.

    Raises:
        InputError: Copies hold other values; on every rank of the pipeline.
        UnsupportedError: They are cut in other ways; likewise.
    """
    mine = {
        tie.name: [_form(parameter_of(models[stage], name)) for stage, name in tie.copies.items() if stage in models]
        for tie in ties
    }
    sums = {
        tie.name: [
            _checksum(_local(parameter_of(models[stage], name)))
            for stage, name in tie.copies.items()
            if stage in models
        ]
        for tie in ties
    }
    everyone: list[tuple[dict[str, list[str]], dict[str, list[str]]]] = [
        ({}, {}) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather_object(everyone, (mine, sums), group=group)
    for tie in ties:
        forms = sorted({form for each, _ in everyone for form in each[tie.name]})
        if len(forms) > 1:
            raise UnsupportedError(
                f"{tie.name}: its copies {', '.join(tie.copies.values())} on several pipeline stages are cut in other "
                f"ways ({' and '.join(forms)}), needed one; give both one style with --tp-plan, or leave out --pp"
            )
        if len({each for _, found in everyone for each in found[tie.name]}) > 1:
            raise InputError(
                f"{tie.name}: the config ties {' and '.join(tie.copies.values())}, and they hold different values; set "
                "tie_word_embeddings to false, or use a checkpoint where they are equal"
            )


def _form(parameter: Tensor) -> str:
    placed = f", {parameter.placements}" if isinstance(parameter, DTensor) else ""
    return f"{tuple(_local(parameter).shape)}{placed}"


def parameter_of(model: nn.Module, name: str) -> nn.Parameter:
    """The parameter of a stage by one of its names, without wrappers."""
    return next(each for other, each in model.named_parameters(remove_duplicate=False) if canonical_name(other) == name)


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


def _local_gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(_local(parameter))
    return _local(parameter.grad).contiguous()


def _set_gradient(parameter: Tensor, local: Tensor) -> None:
    if isinstance(parameter, DTensor):
        like = parameter.grad if isinstance(parameter.grad, DTensor) else parameter
        parameter.grad = DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    else:
        parameter.grad = local
