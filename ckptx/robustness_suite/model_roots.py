"""Find the roots of the model in a checkpoint, and of its copies: optimizer state, master weights, an EMA.

A root is the common prefix of the names of a model, as words: `("net",)` for `net.layers.0.weight`. A model without a
prefix, as in checkpoints of torchtitan, has one root for each top-level module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptx.robustness_suite.item_names import is_master, is_moment, kind_of_word

Words = tuple[str, ...]
Shape = tuple[int, ...]
Roots = frozenset[Words]

_WRAPPERS = frozenset(
    {"module", "model", "state_dict", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
_MOMENT_PAIRS = ({"m", "v"}, {"mu", "nu"}, {"m1", "m2"}, {"first", "second"})
_SINGLE_MOMENTS = frozenset({"momentum", "momentums", "momenta", "velocity", "velocities", "trace", "moments"})
# Minimum fraction of the parameters that a copy has; an EMA may omit frozen parameters and buffers.
_MIN_COPY_SHARE = 0.5


class NamedShape(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        words: Words of the name, split at dots.
        shape: Shape of the tensor.
        is_float: True for a floating-point dtype.
    """

    words: Words
    shape: Shape
    is_float: bool


class ModelRoots(NamedTuple):
    """Roots of the model and of its copies.

    Attributes:
        model: Roots of parameters and buffers.
        second_model: Roots of other copies of the model, such as an EMA.
        moments: Roots of optimizer state with the names and shapes of parameters.
        master_weights: Roots of master weights, in full precision.
        optimizer: Roots of all state of optimizers.
    """

    model: Roots = frozenset()
    second_model: Roots = frozenset()
    moments: Roots = frozenset()
    master_weights: Roots = frozenset()
    optimizer: Roots = frozenset()


def find_roots(tensors: Sequence[NamedShape], moments: Sequence[NamedShape]) -> ModelRoots:
    """Find the model and the copies of it.

    Args:
        tensors: Tensors whose names do not identify them as optimizer state.
        moments: Tensors whose names have a word that only optimizers use, such as `exp_avg`.
    """
    named_model = [each for each in tensors if kind_of_word(each.words[0]) == "model"]
    unknown = [each for each in tensors if kind_of_word(each.words[0]) in (None, "second model")]
    model = frozenset(each.words[:1] for each in named_model)
    model = model or _roots_by_optimizer_names(unknown, moments) or _roots_by_optimizer_shapes(unknown, moments)
    names = _shapes_by_relative_name(tensors, model)
    copies = {"second_model": set[Words](), "moments": set[Words](), "master_weights": set[Words]()}
    others = [each for each in tensors if not has_root(each.words, model)]
    roots = {*_copies_by_name(others, names, moments), *_copies_by_shape(others, names, moments)}
    for root in roots:
        kind = _kind_of_copy(root, roots)
        if kind is not None:
            copies[kind].add(root)
    optimizer = {_optimizer_root(each.words, names) for each in moments}
    return ModelRoots(
        model,
        frozenset(copies["second_model"]),
        frozenset(copies["moments"]),
        frozenset(copies["master_weights"]),
        frozenset(root for root in optimizer if root and not has_root(root, model)),
    )


def has_root(words: Words, roots: Roots) -> bool:
    """Return True for a name that begins with the words of a root."""
    return bool(roots) and any(words[:length] in roots for length in range(1, len(words) + 1))


# ------------------------------------------------------------------------------------------------------- the model


def _roots_by_optimizer_names(tensors: Sequence[NamedShape], moments: Sequence[NamedShape]) -> Roots:
    """Return the roots of the tensors whose names are part of the names of `moments`."""
    names = {each.words for each in tensors}
    roots_by_name: dict[Words, list[str]] = {}
    for each in tensors:
        roots_by_name.setdefault(each.words[1:], []).append(each.words[0])
    model_roots: set[Words] = set()
    candidates: list[list[str]] = []
    for moment in moments:
        for name in _possible_parameters(moment.words):
            if name in names:
                model_roots.add(name[:1])
            elif name and name in roots_by_name:
                candidates.append(roots_by_name[name])
            else:
                continue
            break
    votes = Counter(root for roots in candidates for root in dict.fromkeys(roots))
    # The model has at least the tensors of an EMA; if it has as many, the first of them is the model.
    sizes = Counter(each.words[0] for each in tensors)
    for root in sorted(votes, key=lambda each: (_is_second_model(each), -votes[each], -sizes[each])):
        if any(root in roots for roots in candidates):
            model_roots.add((root,))
            candidates = [roots for roots in candidates if root not in roots]
    return frozenset(model_roots)


def _possible_parameters(words: Words) -> Iterator[Words]:
    """Yield possible names of the parameter that an optimizer state tensor belongs to, longest first."""
    if is_moment(words[-1]):
        yield from (words[begin:-1] for begin in range(len(words) - 1))
        return
    moment_index = max(index for index, word in enumerate(words) if is_moment(word))
    yield words[moment_index + 1 :]


def _roots_by_optimizer_shapes(tensors: Sequence[NamedShape], moments: Sequence[NamedShape]) -> Roots:
    """Return the roots of the tensors with the shapes of `moments`, for an optimizer that numbers its parameters."""
    expected = _parameter_shapes(moments)
    groups: dict[str, list[NamedShape]] = {}
    for each in tensors:
        groups.setdefault(each.words[0], []).append(each)
    groups = {first: group for first, group in groups.items() if any(each.is_float for each in group)}
    if not expected or not groups:
        return frozenset()
    shapes = {each.words: each.shape for each in tensors}
    unique_groups = {first: group for first, group in groups.items() if not _is_repeated(group, shapes)}
    for first in sorted(unique_groups, key=lambda each: (_is_second_model(each), -len(unique_groups[each]))):
        if expected <= _count_shapes(unique_groups[first]):
            return frozenset({(first,)})
    unique_groups = {first: group for first, group in unique_groups.items() if not _is_second_model(first)}
    all_shapes = _count_shapes(each for group in unique_groups.values() for each in group)
    return frozenset((first,) for first in unique_groups) if expected <= all_shapes else frozenset()


def _parameter_shapes(moments: Sequence[NamedShape]) -> Counter[Shape]:
    """Return the number of parameters of each shape, from the kind of moment that has the most tensors."""
    kinds: dict[str, list[NamedShape]] = {}
    for each in moments:
        kinds.setdefault(next(word for word in reversed(each.words) if is_moment(word)), []).append(each)
    return max(map(_count_shapes, kinds.values()), key=Counter.total, default=Counter())


def _count_shapes(tensors: Iterable[NamedShape]) -> Counter[Shape]:
    return Counter(each.shape for each in tensors if each.is_float)


def _is_repeated(group: Sequence[NamedShape], shapes: Mapping[Words, Shape]) -> bool:
    """Return True if each tensor of a group also exists without the first word of its name."""
    return all(shapes.get(each.words[1:]) == each.shape for each in group)


def _is_second_model(word: str) -> bool:
    return kind_of_word(word) == "second model"


# -------------------------------------------------------------------------------------------------- copies of the model


def _shapes_by_relative_name(tensors: Sequence[NamedShape], model: Roots) -> dict[Words, Shape]:
    """Return the shapes of the model's tensors, by name relative to a root and, without a single root, by full name."""
    shapes = {}
    for each in tensors:
        if has_root(each.words, model):
            shapes[_strip_wrappers(each.words)] = each.shape
            if len(model) == 1 or kind_of_word(each.words[0]) == "model":
                shapes[_strip_wrappers(each.words[1:])] = each.shape
    shapes.pop((), None)
    return shapes


def _strip_wrappers(words: Words) -> Words:
    while words and words[0] in _WRAPPERS:
        words = words[1:]
    return words


def _copies_by_name(
    tensors: Sequence[NamedShape], names: Mapping[Words, Shape], moments: Sequence[NamedShape]
) -> Iterator[Words]:
    """Yield the prefixes below which enough of the model's tensors exist, with their relative names and shapes.

    Args:
        tensors: Tensors outside of the model.
        names: Shapes of the model's tensors, from `_shapes_by_relative_name`.
        moments: See `find_roots`.
    """
    counts: Counter[Words] = Counter()
    for each in tensors:
        for begin in range(1, len(each.words)):
            if names.get(_strip_wrappers(each.words[begin:])) == each.shape:
                counts[each.words[:begin]] += 1
                break
    sizes = [len({*names}), sum(_parameter_shapes(moments).values())]
    min_count = _MIN_COPY_SHARE * min((size for size in sizes if size), default=0)
    yield from (root for root, count in counts.items() if count >= max(min_count, 1))


def _copies_by_shape(
    tensors: Sequence[NamedShape], names: Mapping[Words, Shape], moments: Sequence[NamedShape]
) -> Iterator[Words]:
    """Yield the roots of numbered lists of tensors that have the shapes of all parameters."""
    lists: dict[Words, list[NamedShape]] = {}
    for each in tensors:
        if each.words[-1].isdigit() and len(each.words) > 1 and each.is_float:
            lists.setdefault(each.words[:-1], []).append(each)
    expected = [Counter(names.values()), _parameter_shapes(moments)]
    yield from (root for root, group in lists.items() if len(group) > 1 and _count_shapes(group) in expected)


def _kind_of_copy(root: Words, roots: set[Words]) -> str | None:
    """Return the field of `ModelRoots` that a copy belongs to, from the words of its root; None for gradients."""
    last = root[-1].lower()
    siblings = {each[-1].lower() for each in roots if each[:-1] == root[:-1]}
    is_pair = any(last in pair and pair <= siblings for pair in _MOMENT_PAIRS)
    if is_pair or last in _SINGLE_MOMENTS:
        return "moments"
    if any(map(is_master, root)):
        return "master_weights"
    if last.startswith("grad"):
        return None
    is_of_optimizer = kind_of_word(root[0]) == "optimizer" and not any(map(_is_second_model, root))
    return "moments" if is_of_optimizer else "second_model"


def _optimizer_root(words: Words, names: Mapping[Words, Shape]) -> Words:
    """Return the root of the optimizer that an optimizer state tensor belongs to; empty if unknown."""
    if "state" in words[1:]:
        return words[: words.index("state", 1)]
    moment_index = max(index for index, word in enumerate(words) if is_moment(word))
    if moment_index < len(words) - 1:
        return words[:moment_index]
    for begin in range(len(words) - 1):
        if _strip_wrappers(words[begin:-1]) in names:
            return words[:begin]
    return words[:-2] if len(words) > 2 and words[-2].isdigit() else ()
