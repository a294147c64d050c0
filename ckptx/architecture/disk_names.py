"""Find the naming that a checkpoint uses for each tied pair, including names that it does not contain."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckptx.architecture.architecture import Architecture, TiePair
from ckptx.processes.threads import lazy_property


class CheckpointNames:
    """The names of one checkpoint, with the queries that tie decisions need."""

    def __init__(self, architecture: Architecture, names: Collection[str]) -> None:
        """Store the architecture and the names on disk; everything else is computed on demand."""
        self._architecture = architecture
        self._names = names

    def __contains__(self, name: str) -> bool:
        """Return True if a tensor of exactly this name is on disk."""
        return name in self._names

    @lazy_property
    def match_fraction(self) -> float:
        """Return the fraction of the names that belong to the architecture, from 0.0 to 1.0."""
        return self._architecture.match_fraction(self._names)

    @lazy_property
    def _modules(self) -> frozenset[str]:
        """Return all dotted prefixes: ``a.b.c`` gives ``a`` and ``a.b``."""
        found: set[str] = set()
        level = {name.rpartition(".")[0] for name in self._names}
        while level:
            found |= level
            level = {module.rpartition(".")[0] for module in level} - found
        return frozenset(found - {""})

    def count_missing_modules(self, name: str) -> int:
        """Return the number of modules around ``name`` in which the checkpoint has no tensor.

        Of several names of one tensor, the one in the naming of the checkpoint has the lowest number.
        """
        module = name.rpartition(".")[0]
        count = 0
        while module and module not in self._modules:
            count += 1
            module = module.rpartition(".")[0]
        return count

    def has_other_form(self, name: str) -> bool:
        """Return True if the module of an absent tensor has tensors unknown to the class, as a quantized module has."""
        module = name.rpartition(".")[0]
        if module not in self._modules:
            return False
        lead = module + "."
        return any(each.startswith(lead) and not self._architecture.expects(each) for each in self._names)

    def lacks_base_prefix(self, pair: TiePair, source: str) -> bool:
        """Return True if ``source``, a source name of the pair, is the one in a checkpoint of the base model alone."""
        prefix = self._architecture.base_prefix
        return bool(prefix) and any(source_name == f"{prefix}.{source}" for _, source_name in pair.namings)

    def prefixes_of(self, name: str) -> list[str]:
        """Return what precedes ``name``, with the dot at its end, in each longer name on disk that ends with it."""
        ending = "." + name
        return [each.removesuffix(name) for each in self._names if each.endswith(ending)]


def tie_names(ties: Sequence[TiePair], names: CheckpointNames) -> list[tuple[str, str]]:
    """Return ``(target, source)`` of each pair in the naming of the checkpoint, which may lack one or both of them.

    Pairs that are tied to the same model tensor get the same source name.
    """
    sources = {pair.namings[0][1]: _choose_source_name(pair.namings[0][1], ties, names) for pair in ties}
    return [_choose_pair_names(pair, sources[pair.namings[0][1]], names) for pair in ties]


def _choose_source_name(model_name: str, ties: Sequence[TiePair], names: CheckpointNames) -> str:
    """Return the name that a source, given by its model name, has in the naming of the checkpoint.

    It is the one with the most names on disk, its own and those of its targets, then with the fewest missing modules.
    """
    candidates: dict[str, int] = {}  # source name -> number of target names on disk in its namings
    for pair in ties:
        if pair.namings[0][1] == model_name:
            for target, source in pair.namings:
                candidates[source] = candidates.get(source, 0) + (target in names)
    return min(
        candidates, key=lambda source: (-candidates[source] - (source in names), names.count_missing_modules(source))
    )


def _choose_pair_names(pair: TiePair, source: str, names: CheckpointNames) -> tuple[str, str]:
    """Return ``(target, source)`` of a pair in the naming of the checkpoint.

    ``source`` is the result of `_choose_source_name`. If neither name of a primary pair is on disk, the pair may have a
    prefix that no naming has.
    """
    targets = [target for target, paired in pair.namings if paired == source]
    targets = targets or [target for target, _ in pair.namings]
    target = min(targets, key=lambda name: (name not in names, names.count_missing_modules(name)))
    if target in names or source in names or not pair.is_primary:
        return target, source
    return _pair_with_unknown_prefix(pair, names) or (target, source)


def _pair_with_unknown_prefix(pair: TiePair, names: CheckpointNames) -> tuple[str, str] | None:
    """Return the pair in an unknown naming: one unknown prefix before known names.

    None if no name on disk has such a prefix, or if two prefixes are equally likely.
    """
    votes: dict[tuple[int, str], int] = {}  # (naming, prefix) -> number of names on disk that fit
    for index, naming in enumerate(pair.namings):
        for name in naming:
            for prefix in names.prefixes_of(name):
                votes[index, prefix] = votes.get((index, prefix), 0) + 1
    if not votes:
        return None
    most = max(votes.values())
    first = min(index for (index, _), count in votes.items() if count == most)
    prefixes = [prefix for (index, prefix), count in votes.items() if count == most and index == first]
    if len(prefixes) > 1:
        return None
    target, source = pair.namings[first]
    return prefixes[0] + target, prefixes[0] + source
