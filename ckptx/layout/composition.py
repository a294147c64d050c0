"""Describe the attention heads or fused parts along one dim of a tensor, and check that TP shards hold whole heads.

A TP layer can compute on a shard as stored only if rank r holds slice r of every part, where the heads of a part are
divided into slices as `torch.chunk` does:

    [q|k|v], 4 query and 2 key/value heads of 8 rows, tp=2

    rank 0 holds   q0 q1 k0 v0        aligned: heads 0-1 of q, head 0 of k and of v
    rank 0 holds   q0 q1 q2 q3        not aligned: the first half of all rows has no key and no value head
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

from ckptx.catalog.region import Shape
from ckptx.layout.placement import Placement, Span, ceil_chunks

Part = tuple[int, int]  # number of heads and the size of a head; or number of features, and 1
FeatureSide = Literal["out", "in"]


class Composition(NamedTuple):
    """The heads or fused parts (q, k, v) that lie along the output or the input dim of a module's weight.

    Attributes:
        side: "out" for output features, "in" for input features.
        candidates: Alternatives for the parts, in the order in which they are stored; the first whose sizes add up to
            the dim is used.
        num_equal_parts: If no candidate fits, number of equally large parts that the dim consists of, none of which has
            heads; 1 if the dim is not fused. 0 if unknown.
    """

    side: FeatureSide
    candidates: tuple[tuple[Part, ...], ...]
    num_equal_parts: int = 0

    def parts(self, n: int) -> tuple[Part, ...] | None:
        """Return the parts of a dim of size `n`; None if they are unknown."""
        for candidate in self.candidates:
            if sum(count * size for count, size in candidate) == n:
                return candidate
        if self.num_equal_parts and n % self.num_equal_parts == 0:
            return ((n // self.num_equal_parts, 1),) * self.num_equal_parts
        return None


@dataclass(frozen=True, slots=True)
class Compositions:
    """The compositions of the tensors of one model, under one config.

    Attributes:
        layers: Compositions for modules inside the layer lists in `stacks`, by the last one or two components of the
            module path.
        others: Compositions for all other modules, such as those of a vision tower, by the same keys.
        stacks: Paths of the layer lists; empty to use `layers` for every module.
        transposed: Patterns of module paths, with `*` for each index, whose weight is stored [in, out].
        is_complete: True if a tensor without a composition is known to be neither fused nor divided into heads.
        is_of_unknown_class: True for a class that ckptx has no table for. Its compositions are guessed from names of
            modules, so that a tensor without one may be fused, too, unless the style of its TP rule shows its parts.
    """

    layers: Mapping[str, Composition] = field(default_factory=dict)
    others: Mapping[str, Composition] = field(default_factory=dict)
    stacks: tuple[str, ...] = ()
    transposed: frozenset[str] = frozenset()
    is_complete: bool = False
    is_of_unknown_class: bool = False

    def find(self, name: str) -> Composition | None:
        """Return the composition of a parameter; None if none is known, see `is_complete`."""
        is_layer = not self.stacks or any(name.startswith(f"{path}.") for path in self.stacks)
        compositions = self.layers if is_layer else self.others
        # `attn.in_proj_weight` and `experts.gate_up_proj_bias` are parameters without a module of their own; their keys
        # are `attn.in_proj` and `gate_up_proj`.
        components = name.removesuffix("_bias").removesuffix("_weight").split(".")
        for module in (components[:-1], components):  # path of the module; for such a parameter, its own name
            for length in (2, 1):
                composition = compositions.get(".".join(module[-length:]))
                if composition is not None and len(module) >= length:
                    return composition
        return None


def holds_whole_parts(shape: Shape, placement: Placement, parts: Sequence[Part], tp: int) -> bool:
    """Return True if each TP rank holds its slice of every part, of those that `torch.chunk` makes of its heads.

    With several parts, or heads of more than one element, it is also required that no slice is empty.

    Args:
        shape: Shape of the whole tensor.
        placement: Placement of its TP shards.
        parts: Parts along the sharded dim; they add up to it.
        tp: Number of TP ranks.
    """
    dim, groups, _ = placement
    assert sum(count * size for count, size in parts) == shape[dim]
    has_structure = len(parts) > 1 or any(size > 1 for _, size in parts)
    stored = _spans_by_rank(((width, 1) for width in groups), tp)
    required = _spans_by_rank(parts, tp)
    if has_structure and any(num_heads < 1 for count, _ in parts for _, num_heads in ceil_chunks(count, tp)):
        return False
    return stored == required


def _spans_by_rank(parts: Iterable[Part], tp: int) -> list[list[Span]]:
    """Return for each rank the spans of its slices of the parts, in their order; adjacent spans are merged."""
    parts = list(parts)
    starts = accumulate((count * size for count, size in parts), initial=0)
    spans: list[list[Span]] = [[] for _ in range(tp)]
    for start, (count, size) in zip(starts, parts, strict=False):
        for rank, (begin, n) in enumerate(ceil_chunks(count, tp)):
            if not n:
                continue
            span = (start + begin * size, n * size)
            rank_spans = spans[rank]
            if rank_spans and sum(rank_spans[-1]) == span[0]:
                rank_spans[-1] = (rank_spans[-1][0], rank_spans[-1][1] + span[1])
            else:
                rank_spans.append(span)
    return spans
