"""The tensors of experts in a model, and the number of experts of each layer.

The experts of a tensor follow from its name and shape: `experts.gate_up_proj` has all experts along dim 0,
`experts.3.up_proj.weight` belongs to one. A tensor whose stored name shows neither (`block_sparse_moe.input_linear` of
Granite) is recognized by the model tensor into which it is loaded. Tensors of experts in any other form are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import Shape
from ckptx.errors import UnsupportedError, UsageError
from ckptx.layout.expert_parallel import ExpertPosition, check_expert_count, find_position, is_below_experts
from ckptx.wording import counted


class Experts(NamedTuple):
    """The tensors of experts in a model.

    Attributes:
        positions: Name of a tensor -> its place among the experts of its layer.
        counts: Path of a module with experts -> number of its experts.
    """

    positions: Mapping[str, ExpertPosition]
    counts: Mapping[str, int]


def find_experts(tensors: Mapping[str, TensorEntry], model_name: Callable[[str], str | None], option: str) -> Experts:
    """Find the tensors of experts.

    Args:
        tensors: Tensors by name; only their shapes matter.
        model_name: Function that returns the name that a tensor is loaded as; None if it is unknown.
        option: Option that requires experts, with its value, for errors: "--ep 4".

    Raises:
        UsageError: There is no expert.
        UnsupportedError: Tensors of experts are stored in a form that cannot be divided by expert.
    """
    positions = dict(_find_positions(tensors, model_name, option))
    if not positions:
        raise UsageError(f"{option}: the checkpoint has no experts; leave out {_flag(option)}")
    counts = _count_experts(positions, tensors, option)
    for name, entry in tensors.items():
        # A tensor of a module with another name, whose dim 0 seems to count experts.
        shape = entry.shape
        is_matrix_by_expert = len(shape) == 3 and shape[0] in counts.values() and min(shape) > 1 and "conv" not in name
        if is_matrix_by_expert and name not in positions:
            raise _unknown_form(name, shape, option)
    return Experts(positions, counts)


def ep_ranks_of_experts(tensors: Mapping[str, TensorEntry], ep: int, option: str) -> dict[str, int]:
    """Return name -> EP rank for the tensors of experts, each of which must belong to a single expert.

    Args:
        tensors: Tensors by the names in the output.
        ep: Number of EP ranks.
        option: Option that requires experts, with its value, for errors.

    Raises:
        UsageError: There is no expert, or `ep` does not divide their number.
        UnsupportedError: A tensor has the experts of a whole layer, or experts are stored in an unknown form.
    """
    positions, counts = find_experts(tensors, lambda name: name, option)
    ranks: dict[str, int] = {}
    for name, (module, expert) in positions.items():
        if expert is None:
            raise UnsupportedError(
                f'{option}: "{name}" has all experts of a layer, which would be in the files of one EP rank; only '
                f"experts that are stored as separate tensors can be grouped; leave out {_flag(option)}"
            )
        check_expert_count(name, counts[module], ep, option)
        ranks[name] = expert // (counts[module] // ep)
    return ranks


def _find_positions(
    tensors: Mapping[str, TensorEntry], model_name: Callable[[str], str | None], option: str
) -> Iterator[tuple[str, ExpertPosition]]:
    """Yield the name and position of each tensor that belongs to experts.

    Raises:
        UnsupportedError: A tensor has another form.
    """
    for name, entry in tensors.items():
        position = find_position(name, entry.shape)
        loaded = None if position is not None else model_name(name)
        if loaded is not None and loaded != name:
            position = find_position(loaded, entry.shape)
        # A name that shows no experts, but is loaded as one expert, is a tensor of several in an unknown form.
        if position is not None and (loaded is None or position.expert is None):
            yield name, position
        elif len(entry.shape) > 1 and (is_below_experts(name) or (loaded is not None and is_below_experts(loaded))):
            raise _unknown_form(name, entry.shape, option)


def _count_experts(
    positions: Mapping[str, ExpertPosition], tensors: Mapping[str, TensorEntry], option: str
) -> dict[str, int]:
    """Return the number of experts by the path of their module.

    Raises:
        UnsupportedError: Tensors of one module have different numbers of experts, or an expert is missing.
    """
    counts: dict[str, int] = {}
    indices: dict[str, set[int]] = {}
    for name, (module, expert) in positions.items():
        if expert is not None:
            indices.setdefault(module, set()).add(expert)
            continue
        size = tensors[name].shape[0]
        if counts.setdefault(module, size) != size:
            raise UnsupportedError(
                f'{option}: tensors of "{module}" have different sizes along dim 0, {counts[module]} and {size} '
                f'("{name}"), which should be the number of experts; leave out {_flag(option)}'
            )
    for module, found in indices.items():
        count = counts.setdefault(module, max(found) + 1)
        if len(found) != count or max(found) >= count:
            # Not more steps than experts were found, whatever the largest index is.
            missing = next(expert for expert in range(len(found) + 1) if expert not in found)
            lacking = f"no expert {missing}" if missing < count else f"an expert {max(found)}"
            raise UnsupportedError(
                f'{option}: "{module}" has {counted(count, "expert")}, but {lacking}; expert parallelism requires all '
                f"of them; leave out {_flag(option)}"
            )
    return counts


def _unknown_form(name: str, shape: Shape, option: str) -> UnsupportedError:
    """Return the error for a tensor that may hold experts in an unknown form."""
    return UnsupportedError(
        f'{option}: ckptx does not know where the experts are in "{name}" of shape {list(shape)}; it must be a '
        "parameter of a module `experts` with all experts along dim 0, or of one expert (`experts.3.up_proj.weight`); "
        f"leave out {_flag(option)}"
    )


def _flag(option: str) -> str:
    """Return the flag of an option without its value."""
    return option.partition(" ")[0]
