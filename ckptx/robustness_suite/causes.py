"""Causes of differences after a resume for zero steps: which state differs, and possible reasons.

Each sentence describes items that differ: the certain difference, then possible causes. State that ckptx does not
recognize is given by its name, without a cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptx.robustness_suite.item_names import RATES, inner_words, is_moment
from ckptx.robustness_suite.oracles import ORDER, Difference, Items, Verdict

IN_NO_CHECKPOINT = (
    "all state in the checkpoint was restored; there are two possible causes. Either some state is missing from the "
    "checkpoint, such as the data position, a scheduler or an EMA: save it as well. Or the checkpoint was saved at the "
    "wrong time, such as before optimizer.step() or before scheduler.step(). The files do not show which: log a digest "
    "of all state before the first step after the save, in the uninterrupted run and after the resume; state that "
    "differs there and is in the checkpoint was saved at the wrong time"
)

_RANK = re.compile(r"rank[ _-]?(\d+)", re.IGNORECASE)
# Without the word, a number by itself; those in a list of devices are none of ranks.
_NUMBER = re.compile(r"(?:^|(?<!cuda)(?<!seed)(?<!gpu)(?<!device)(?<!devices)[._])(\d+)(?=\.|$)")
_TENSOR = re.compile(r"([A-Z][A-Z0-9_]*) \[([\d, ]*)\] (.*)")
_DIGEST = re.compile(r"(.*\s)?[0-9a-f]{24,64}")
_LONGEST = 60  # characters of a value that a sentence shows
_SHOWN = 3  # names in a sentence
_SETTINGS = {"lr": "learning rate", "initial_lr": "initial learning rate", "weight_decay": "weight decay"}


class _CauseInputs(NamedTuple):
    """Everything that a sentence may depend on.

    Attributes:
        differences: The items that differ, by oracle.
        before: Items of the checkpoint that was resumed from.
        after: Items of the one that was saved again.
    """

    differences: Mapping[str, Sequence[Difference]]
    before: Items
    after: Items

    def count(self, oracle: str) -> int:
        """Return the number of items of an oracle before the resume."""
        return sum(1 for each, _ in self.before if each == oracle)

    def is_whole(self, oracle: str) -> bool:
        """Return True if every item of an oracle differs."""
        return len(self.differences.get(oracle, ())) >= self.count(oracle) > 0


def likely_causes(verdicts: Sequence[Verdict], before: Items, after: Items) -> list[str]:
    """Return sentences on the state that differs and its possible causes, one for each kind of state.

    Args:
        verdicts: Verdicts of the comparison.
        before: Items of the checkpoint that was resumed from.
        after: Items of the checkpoint that was saved again.

    Returns:
        Lines for the report; empty if nothing differs.
    """
    differences = {each.oracle: each.differences for each in verdicts if each.differences}
    comparison = _CauseInputs(differences, before, after)
    order = sorted((oracle for oracle in differences if oracle in _SENTENCES), key=ORDER.index)
    return [sentence for oracle in order for sentence in _SENTENCES[oracle](differences[oracle], comparison)]


def rank_of(item: str) -> int | None:
    """Return the rank that the name of an item has in it; None if it has none.

    Example:
        app.rng.rank_1.torch -> 1, rng.rank 0.torch_cuda_manual_seed.3 -> 0, rank2/state: rng.torch -> 2, rng.3.cpu -> 3
    """
    place = _place_of_rank(item)
    return None if place is None else int(item[place])


# ------------------------------------------------------------------------------------- a sentence for a kind of state


def _of_model(differences: Sequence[Difference], comparison: _CauseInputs) -> Iterator[str]:
    causes = "weights of another step were loaded, shards or rows were swapped, or the weights were cast and cast back"
    if comparison.is_whole("model"):
        causes = f"the model was not loaded, {causes}"
    yield from _of_tensors("parameter", differences, comparison.count("model"), f"possible causes: {causes}")


def _of_second_model(differences: Sequence[Difference], comparison: _CauseInputs) -> Iterator[str]:
    for root, those in _by_root(differences, comparison).items():
        models = {value for (oracle, _), value in comparison.after.items() if oracle == "model"}
        tensors = [each.found for each in those if each.found is not None and _TENSOR.fullmatch(each.found)]
        is_restarted = bool(tensors) and all(value in models for value in tensors)
        how = "; it restarts from the weights of the model" if is_restarted else ""
        yield (
            f'second model under "{root}" (an EMA, for example): not restored{how} '
            f"({_count(those, comparison.count('second model'))}{_example(those)})"
        )


def _of_moments(differences: Sequence[Difference], comparison: _CauseInputs) -> Iterator[str]:
    names = _listed(dict.fromkeys(map(_moment, differences)))
    if comparison.is_whole("moments"):
        cause = "possible causes: the optimizer state was not restored, or it was cast"
    else:
        cause = (
            "possible causes: optimizer state of some parameters was not restored, or was loaded for other parameters"
        )
    yield from _of_tensors(f"optimizer state ({names})", differences, comparison.count("moments"), cause)


def _of_masters(differences: Sequence[Difference], comparison: _CauseInputs) -> Iterator[str]:
    cause = "possible causes: they were not restored, or were recreated from the weights of lower precision"
    yield from _of_tensors("master weight", differences, comparison.count("master weights"), cause)


def _of_adam_step(differences: Sequence[Difference], comparison: _CauseInputs) -> Iterator[str]:
    cause = "possible causes: they were not restored, or a step was run to initialize the state before loading"
    count = _count(differences, comparison.count("adam step"))
    yield f"step counts of the optimizer differ ({count}{_example(differences)}); {cause}"


def _of_groups(differences: Sequence[Difference], comparison: _CauseInputs) -> Iterator[str]:
    by_key: dict[str, list[Difference]] = {}
    for each in differences:
        by_key.setdefault(each.item.rpartition(".")[2], []).append(each)
    rates = {key: those for key, those in by_key.items() if key in RATES}
    others = {key: those for key, those in by_key.items() if key not in RATES}
    groups = "the param groups of the optimizer were not restored"
    if rates:
        schedule = "the scheduler was not restored"
        if not comparison.count("scheduler"):
            causes = "the scheduler or optimizer state was not restored"
        else:
            causes = f"{schedule}, or {groups}" if "scheduler" in comparison.differences else groups
        yield f"{_settings(rates)}; possible causes: {causes}"
    if others:
        filled = "dcp.load fills tensors in place; settings come back with set_state_dict or load_state_dict"
        yield f"{_settings(others)}; possible causes: {groups} ({filled}), or were recreated from the config"


def _of_rates(differences: Sequence[Difference], comparison: _CauseInputs) -> Iterator[str]:
    said = {each.item for each in comparison.differences.get("group", ())}
    if any(each.item not in said for each in differences):
        yield f"learning rate differs{_change_of(differences)}; possible causes: the scheduler or optimizer state"


def _of_scheduler(differences: Sequence[Difference], _: _CauseInputs) -> Iterator[str]:
    causes = "it was not restored, was made for another number of steps, or was stepped after it was restored"
    yield f"scheduler state differs{_values(differences)}; possible causes: {causes}"


def _of_counter(name: str) -> Callable[[Sequence[Difference], _CauseInputs], Iterator[str]]:
    def sentence(differences: Sequence[Difference], _: _CauseInputs) -> Iterator[str]:
        yield f"{name} differs{_values(differences)}; possible causes: it was not restored, or was changed after that"

    return sentence


def _of_random(differences: Sequence[Difference], comparison: _CauseInputs) -> Iterator[str]:
    missing = [each for each in differences if each.found is None]
    if missing:
        ranks = _ranks_of(missing)
        where = f" on {_rank_text(ranks)}" if ranks else ""
        yield f"RNG state is missing after the resume{where}{_named(missing)}"
        differences = [each for each in differences if each.found is not None]
        if not differences:
            return
    of_others = _states_of_other_ranks(differences, comparison)
    if of_others is not None:
        yield (
            f"RNG state of another rank was restored{of_others}; save and load the state of each rank under its own "
            "name"
        )
        return
    causes = ["it was not restored"]
    ranks = _ranks_of(differences)
    known = _ranks_of_items(name for oracle, name in comparison.before if oracle == "rng")
    if ranks and known - ranks:
        causes = [f"it was restored on {_rank_text(known - ranks)} only"]
    if any(_is_of_torch(each) for each in differences):
        causes.append(
            "random numbers were drawn after it was restored, as iter(loader) does (make the iterator first, or give "
            "the loader its own generator)"
        )
    else:
        causes.append("random numbers were drawn after it was restored")
    where = f" on {_rank_text(ranks)}" if ranks else ""
    yield f"RNG state differs{where}{_named(differences)}; possible causes: {', or '.join(causes)}"


def _of_data(differences: Sequence[Difference], _: _CauseInputs) -> Iterator[str]:
    is_epoch = all(each.item.rpartition(".")[2].lower() in ("epoch", "epochs") for each in differences)
    ranks = _ranks_of(differences)
    where = f" on {_rank_text(ranks)}" if ranks else ""
    name = "sampler epoch" if is_epoch else "data position"
    causes = "state of the sampler or data loader was not restored, or was advanced after that"
    yield f"{name} differs{where}{_values(differences)}; possible causes: {causes}"


def _of_other(differences: Sequence[Difference], comparison: _CauseInputs) -> Iterator[str]:
    for root, those in _by_root(differences, comparison).items():
        yield f'other: state under "{root}" was not restored as it was saved{_values(those)}'


_SENTENCES: Mapping[str, Callable[[Sequence[Difference], _CauseInputs], Iterator[str]]] = {
    "model": _of_model,
    "second model": _of_second_model,
    "moments": _of_moments,
    "master weights": _of_masters,
    "adam step": _of_adam_step,
    "group": _of_groups,
    "scheduler": _of_scheduler,
    "step": _of_counter("step counter"),
    "epoch": _of_counter("epoch counter"),
    "samples": _of_counter("count of samples or tokens"),
    "rng": _of_random,
    "batch": _of_data,
    "rate": _of_rates,
    "other": _of_other,
}


# ----------------------------------------------------------------------------------------------------- parts of them


def _of_tensors(name: str, differences: Sequence[Difference], count: int, cause: str) -> Iterator[str]:
    """Yield a sentence each for tensors that are missing or new, of another dtype or shape, or of other values."""
    missing = [each for each in differences if each.found is None]
    new = [each for each in differences if each.reference is None]
    changed = [each for each in differences if each.found is not None and each.reference is not None]
    cast = [each for each in changed if _header(each.reference) != _header(each.found)]
    others = [each for each in changed if _header(each.reference) == _header(each.found)]
    plural = name if name.startswith("optimizer") else f"{name}s"
    verb = "is" if plural == name else "are"
    if missing:
        yield f"{plural} {verb} missing after the resume ({_count(missing, count)}{_example(missing)})"
    if new:
        yield f"{plural} {verb} new after the resume ({len(new):,}{_example(new)})"
    if cast:
        first = cast[0]
        was, now = (" ".join(_header(value)) for value in (first.reference, first.found))
        yield (
            f"dtypes or shapes of {plural} differ ({_count(cast, count)}; {first.item}: {was} in the reference, {now} "
            "after the resume)"
        )
    if others:
        values = f"{name} values differ" if plural != name else f"{name} differs"
        yield f"{values} ({_count(others, count)}{_example(others)}); {cause}"


def _settings(by_key: Mapping[str, Sequence[Difference]]) -> str:
    said = [f"{_SETTINGS.get(key, key)} differs{_change_of(those)}" for key, those in by_key.items()]
    more = [f"{len(said) - _SHOWN} more settings of param groups differ"] if len(said) > _SHOWN + 1 else []
    return ", ".join([*said[: _SHOWN if more else None], *more])


def _values(differences: Sequence[Difference]) -> str:
    """Return the items that differ in brackets, with their values where these can be read."""
    shown = [f"{each.item}{_change(each, ': ')}" for each in differences[:_SHOWN]]
    more = [f"and {len(differences) - _SHOWN:,} more"] if len(differences) > _SHOWN else []
    return f" ({'; '.join([*shown, *more])})"


def _change_of(differences: Sequence[Difference]) -> str:
    """Return the change of a setting in brackets: that of the first group."""
    changes = list(dict.fromkeys(_change(each, "") for each in differences))
    more = f", and {len(changes) - 1:,} other changes" if len(changes) > 1 else ""
    return f" ({changes[0]}{more})" if changes[0] else ""


def _change(difference: Difference, before: str) -> str:
    was, now = (_readable(value) for value in (difference.reference, difference.found))
    return "" if was is None or now is None else f"{before}{was} in the reference, {now} after the resume"


def _readable(value: str | None) -> str | None:
    """Return a value as a sentence shows it: the number in a tensor; None for a digest or a long value."""
    if value is None:
        return "missing"
    tensor = _TENSOR.fullmatch(value)
    value = value if tensor is None else tensor[3]
    return None if _DIGEST.fullmatch(value) or len(value) > _LONGEST else value


def _header(value: str | None) -> tuple[str, str]:
    """Return dtype and shape of a tensor, two empty texts for anything else."""
    tensor = _TENSOR.fullmatch(value or "")
    return ("", "") if tensor is None else (tensor[1], f"[{tensor[2]}]")


def _count(differences: Sequence[Difference], count: int) -> str:
    return f"{len(differences):,} of {max(count, len(differences)):,}"


def _example(differences: Sequence[Difference]) -> str:
    first = differences[0]
    is_number = _header(first.reference)[1] in ("", "[]")
    return f": {first.item}{_change(first, ': ') if is_number and first.found and first.reference else ''}"


def _named(differences: Sequence[Difference]) -> str:
    return f" ({_listed([each.item for each in differences])})"


def _listed(names: Iterable[str]) -> str:
    names = [*names]
    more = [f"and {len(names) - _SHOWN:,} more"] if len(names) > _SHOWN else []
    return ", ".join([*names[:_SHOWN], *more])


def _moment(difference: Difference) -> str:
    words = difference.item.split(".")
    return next((word for word in reversed(words) if is_moment(word)), words[-1])


def _by_root(differences: Sequence[Difference], comparison: _CauseInputs) -> dict[str, list[Difference]]:
    """Return differences by the first word of their names that not all names have, with the words around it."""
    around = _words_around(_inside_file(name).split(".") for _, name in comparison.before)
    found: dict[str, list[Difference]] = {}
    for each in differences:
        words = _inside_file(each.item).split(".")
        begin = len(words) - len(inner_words(".".join(words[around:]) or words[-1]))
        found.setdefault(".".join(words[: begin + 1]), []).append(each)
    return found


def _words_around(names: Iterable[Sequence[str]]) -> int:
    """Return how many words all names begin with; the last word of a name is never one of them."""
    shared: Sequence[str] | None = None
    alone = set[str]()
    for words in names:
        inside = words[:-1]
        if not inside:
            alone.add(words[0])
            continue
        if shared is None:
            shared = inside
        while shared != inside[: len(shared)]:
            shared = shared[:-1]
    return len(shared) if shared and alone <= {shared[0]} else 0


def _inside_file(item: str) -> str:
    """Return a name without the file that stands before it where two files have the same name."""
    return item.rpartition(": ")[2]


# --------------------------------------------------------------------------------------------------------------- ranks


def _ranks_of(differences: Sequence[Difference]) -> set[int]:
    return _ranks_of_items(each.item for each in differences)


def _ranks_of_items(items: Iterable[str]) -> set[int]:
    """Return the ranks in names; a name that others have behind their file, with a rank in it, is of rank 0."""
    names = [*items]
    ranks = {rank for rank in map(rank_of, names) if rank is not None}
    return ranks | {0} if ranks and 0 not in ranks and any(rank_of(name) is None for name in names) else ranks


def _rank_text(ranks: Iterable[int]) -> str:
    """Return ranks as text: `rank 3`, `ranks 0, 2-5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    said = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"{'rank' if len(said) == 1 and '-' not in said[0] else 'ranks'} {', '.join(said)}"


def _place_of_rank(item: str) -> slice | None:
    """Return where the number of a rank stands in a name."""
    found = _RANK.search(item) or _NUMBER.search(item)
    return None if found is None else slice(*found.span(1))


def _without_rank(item: str) -> str:
    place = _place_of_rank(item)
    return item if place is None else f"{item[: place.start]}#{item[place.stop :]}"


def _states_of_other_ranks(differences: Sequence[Difference], comparison: _CauseInputs) -> str | None:
    """Say which rank has whose state where every RNG state that differs is one that another rank had; else None."""
    had: dict[tuple[str, str], int | None] = {}
    for (oracle, name), value in comparison.before.items():
        if oracle == "rng":
            had.setdefault((_without_rank(name), value), rank_of(name))
    owners: dict[int | None, set[int]] = {}
    for each in differences:
        key = (_without_rank(each.item), each.found or "")
        rank = rank_of(each.item)
        if key not in had or rank is None:
            return None
        owners.setdefault(had[key], set()).add(rank)
    said = [
        f"{_rank_text(ranks)} {'has' if len(ranks) == 1 else 'have'} that of rank {owner}"
        for owner, ranks in owners.items()
    ]
    return f" ({_listed(said)})"


def _is_of_torch(difference: Difference) -> bool:
    """Return True for a state of torch's CPU generator, from which iter(loader) draws."""
    is_bytes = any(_header(value)[0] == "U8" and _header(value)[1] in ("[5056]", "[5048]") for value in difference[3:5])
    return is_bytes or any("torch" in word and "cuda" not in word for word in difference.item.lower().split("."))
