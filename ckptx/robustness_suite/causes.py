"""Causes of differences after a resume for zero steps: which state differs, and possible reasons.

Each sentence describes items that differ: the certain difference, then possible causes. State that ckptx does not
recognize is given by its name, without a cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptx.robustness_suite.item_names import LEARNING_RATE_KEYS, inner_words, is_moment
from ckptx.robustness_suite.oracles import ORACLE_ORDER, Difference, Items, Verdict
from ckptx.wording import counted

UNSAVED_STATE_CAUSES = (
    "all state in the checkpoint was restored; there are two possible causes. Either some state is missing from the "
    "checkpoint, such as the data position, a scheduler or an EMA: save it as well. Or the checkpoint was saved at the "
    "wrong time, such as before optimizer.step() or before scheduler.step(). The files do not show which: log a digest "
    "of all state before the first step after the save, in the uninterrupted run and after the resume; state that "
    "differs there and is in the checkpoint was saved at the wrong time"
)

_RANK = re.compile(r"rank[ _-]?(\d+)", re.IGNORECASE)
# A number without the word "rank"; numbers after the name of a device or a seed are not ranks.
_BARE_NUMBER = re.compile(r"(?:^|(?<!cuda)(?<!seed)(?<!gpu)(?<!device)(?<!devices)[._])(\d+)(?=\.|$)")
# The description of a tensor: dtype, shape, and digest or single element.
_TENSOR = re.compile(r"([A-Z][A-Z0-9_]*) \[([\d, ]*)\] (.*)")
_DIGEST = re.compile(r"(.*\s)?[0-9a-f]{24,64}")  # a digest in hex, with or without the type of the value before it
_MAX_VALUE_LENGTH = 60  # characters of a value that a sentence shows
_MAX_LISTED_NAMES = 3  # names in a sentence
_SETTINGS = {"lr": "learning rate", "initial_lr": "initial learning rate", "weight_decay": "weight decay"}


class _ResumeComparison(NamedTuple):
    """Comparison of a checkpoint with the one that was saved again after a resume.

    Attributes:
        differences: The items that differ, by oracle.
        source_items: Items of the checkpoint that was resumed from.
        resaved_items: Items of the checkpoint that was saved again.
    """

    differences: Mapping[str, Sequence[Difference]]
    source_items: Items
    resaved_items: Items

    def count(self, oracle: str) -> int:
        """Return the number of items of an oracle before the resume."""
        return sum(1 for each, _ in self.source_items if each == oracle)

    def all_differ(self, oracle: str) -> bool:
        """Return True if every item of an oracle differs."""
        return len(self.differences.get(oracle, ())) >= self.count(oracle) > 0


def likely_causes(verdicts: Sequence[Verdict], source_items: Items, resaved_items: Items) -> list[str]:
    """Return sentences on the state that differs and its possible causes, one for each kind of state.

    Args:
        verdicts: Verdicts of the comparison.
        source_items: Items of the checkpoint that was resumed from.
        resaved_items: Items of the checkpoint that was saved again.

    Returns:
        Lines for the report; empty if nothing differs.
    """
    differences = {each.oracle: each.differences for each in verdicts if each.differences}
    comparison = _ResumeComparison(differences, source_items, resaved_items)
    order = sorted((oracle for oracle in differences if oracle in _EXPLANATIONS), key=ORACLE_ORDER.index)
    return [sentence for oracle in order for sentence in _EXPLANATIONS[oracle](differences[oracle], comparison)]


def rank_in_name(item: str) -> int | None:
    """Return the rank that the name of an item contains; None if it contains none.

    Example:
        app.rng.rank_1.torch -> 1, rng.rank 0.torch_cuda_manual_seed.3 -> 0, rank2/state: rng.torch -> 2, rng.3.cpu -> 3
    """
    span = _rank_span(item)
    return None if span is None else int(item[span])


# ------------------------------------------------------------------------------------- a sentence for a kind of state


def _explain_model(differences: Sequence[Difference], comparison: _ResumeComparison) -> Iterator[str]:
    causes = "weights of another step were loaded, shards or rows were swapped, or the weights were cast and cast back"
    if comparison.all_differ("model"):
        causes = f"the model was not loaded, {causes}"
    yield from _explain_tensors("parameter", differences, comparison.count("model"), f"possible causes: {causes}")


def _explain_second_model(differences: Sequence[Difference], comparison: _ResumeComparison) -> Iterator[str]:
    for root, group in _group_by_root(differences, comparison).items():
        models = {value for (oracle, _), value in comparison.resaved_items.items() if oracle == "model"}
        tensors = [each.actual for each in group if each.actual is not None and _TENSOR.fullmatch(each.actual)]
        is_restarted = bool(tensors) and all(value in models for value in tensors)
        restart_note = "; it restarts from the weights of the model" if is_restarted else ""
        yield (
            f'second model under "{root}" (an EMA, for example): not restored{restart_note} '
            f"({_count_text(group, comparison.count('second model'))}{_example_text(group)})"
        )


def _explain_moments(differences: Sequence[Difference], comparison: _ResumeComparison) -> Iterator[str]:
    names = _join_names(dict.fromkeys(map(_moment_name, differences)))
    if comparison.all_differ("moments"):
        cause = "possible causes: the optimizer state was not restored, or it was cast"
    else:
        cause = (
            "possible causes: optimizer state of some parameters was not restored, or was loaded for other parameters"
        )
    yield from _explain_tensors(f"optimizer state ({names})", differences, comparison.count("moments"), cause)


def _explain_master_weights(differences: Sequence[Difference], comparison: _ResumeComparison) -> Iterator[str]:
    cause = "possible causes: they were not restored, or were recreated from the weights of lower precision"
    yield from _explain_tensors("master weight", differences, comparison.count("master weights"), cause)


def _explain_adam_step(differences: Sequence[Difference], comparison: _ResumeComparison) -> Iterator[str]:
    cause = "possible causes: they were not restored, or a step was run to initialize the state before loading"
    count = _count_text(differences, comparison.count("adam step"))
    yield f"step counts of the optimizer differ ({count}{_example_text(differences)}); {cause}"


def _explain_param_groups(differences: Sequence[Difference], comparison: _ResumeComparison) -> Iterator[str]:
    by_key: dict[str, list[Difference]] = {}
    for each in differences:
        by_key.setdefault(each.item.rpartition(".")[2], []).append(each)
    learning_rates = {key: group for key, group in by_key.items() if key in LEARNING_RATE_KEYS}
    others = {key: group for key, group in by_key.items() if key not in LEARNING_RATE_KEYS}
    groups_cause = "the param groups of the optimizer were not restored"
    if learning_rates:
        scheduler_cause = "the scheduler was not restored"
        if not comparison.count("scheduler"):
            causes = "the scheduler or optimizer state was not restored"
        else:
            causes = f"{scheduler_cause}, or {groups_cause}" if "scheduler" in comparison.differences else groups_cause
        yield f"{_settings_text(learning_rates)}; possible causes: {causes}"
    if others:
        dcp_hint = "dcp.load fills tensors in place; settings come back with set_state_dict or load_state_dict"
        causes = f"{groups_cause} ({dcp_hint}), or were recreated from the config"
        yield f"{_settings_text(others)}; possible causes: {causes}"


def _explain_learning_rate(differences: Sequence[Difference], comparison: _ResumeComparison) -> Iterator[str]:
    explained_items = {each.item for each in comparison.differences.get("param groups", ())}
    if any(each.item not in explained_items for each in differences):
        change = _first_change_text(differences)
        yield f"learning rate differs{change}; possible causes: the scheduler or optimizer state"


def _explain_scheduler(differences: Sequence[Difference], _: _ResumeComparison) -> Iterator[str]:
    causes = "it was not restored, was made for another number of steps, or was stepped after it was restored"
    yield f"scheduler state differs{_values_text(differences)}; possible causes: {causes}"


def _counter_explainer(name: str) -> Callable[[Sequence[Difference], _ResumeComparison], Iterator[str]]:
    def explain(differences: Sequence[Difference], _: _ResumeComparison) -> Iterator[str]:
        values = _values_text(differences)
        yield f"{name} differs{values}; possible causes: it was not restored, or was changed after that"

    return explain


def _explain_rng(differences: Sequence[Difference], comparison: _ResumeComparison) -> Iterator[str]:
    missing = [each for each in differences if each.actual is None]
    if missing:
        ranks = _ranks_in_differences(missing)
        ranks_text = f" on {_ranks_text(ranks)}" if ranks else ""
        yield f"RNG state is missing after the resume{ranks_text}{_names_text(missing)}"
        differences = [each for each in differences if each.actual is not None]
        if not differences:
            return
    swapped_ranks = _swapped_ranks_text(differences, comparison)
    if swapped_ranks is not None:
        yield (
            f"RNG state of another rank was restored{swapped_ranks}; save and load the state of each rank under its "
            "own name"
        )
        return
    causes = ["it was not restored"]
    ranks = _ranks_in_differences(differences)
    saved_ranks = _ranks_in_names(name for oracle, name in comparison.source_items if oracle == "rng")
    if ranks and saved_ranks - ranks:
        causes = [f"it was restored on {_ranks_text(saved_ranks - ranks)} only"]
    if any(_is_torch_cpu_rng(each) for each in differences):
        causes.append(
            "random numbers were drawn after it was restored, as iter(loader) does (make the iterator first, or give "
            "the loader its own generator)"
        )
    else:
        causes.append("random numbers were drawn after it was restored")
    ranks_text = f" on {_ranks_text(ranks)}" if ranks else ""
    yield f"RNG state differs{ranks_text}{_names_text(differences)}; possible causes: {', or '.join(causes)}"


def _explain_batch(differences: Sequence[Difference], _: _ResumeComparison) -> Iterator[str]:
    is_epoch = all(each.item.rpartition(".")[2].lower() in ("epoch", "epochs") for each in differences)
    ranks = _ranks_in_differences(differences)
    ranks_text = f" on {_ranks_text(ranks)}" if ranks else ""
    name = "sampler epoch" if is_epoch else "data position"
    causes = "state of the sampler or data loader was not restored, or was advanced after that"
    yield f"{name} differs{ranks_text}{_values_text(differences)}; possible causes: {causes}"


def _explain_other(differences: Sequence[Difference], comparison: _ResumeComparison) -> Iterator[str]:
    for root, group in _group_by_root(differences, comparison).items():
        yield f'other: state under "{root}" was not restored as it was saved{_values_text(group)}'


_EXPLANATIONS: Mapping[str, Callable[[Sequence[Difference], _ResumeComparison], Iterator[str]]] = {
    "model": _explain_model,
    "second model": _explain_second_model,
    "moments": _explain_moments,
    "master weights": _explain_master_weights,
    "adam step": _explain_adam_step,
    "param groups": _explain_param_groups,
    "scheduler": _explain_scheduler,
    "step": _counter_explainer("step counter"),
    "epoch": _counter_explainer("epoch counter"),
    "samples": _counter_explainer("count of samples or tokens"),
    "rng": _explain_rng,
    "batch": _explain_batch,
    "learning rate": _explain_learning_rate,
    "other": _explain_other,
}


# ----------------------------------------------------------------------------------------------- parts of the sentences


def _explain_tensors(name: str, differences: Sequence[Difference], count: int, cause: str) -> Iterator[str]:
    """Yield a sentence each for tensors that are missing or new, of another dtype or shape, or of other values."""
    missing = [each for each in differences if each.actual is None]
    new = [each for each in differences if each.reference is None]
    changed = [each for each in differences if each.actual is not None and each.reference is not None]
    cast = [each for each in changed if _dtype_and_shape(each.reference) != _dtype_and_shape(each.actual)]
    others = [each for each in changed if _dtype_and_shape(each.reference) == _dtype_and_shape(each.actual)]
    plural = name if name.startswith("optimizer") else f"{name}s"
    verb = "is" if plural == name else "are"
    if missing:
        yield f"{plural} {verb} missing after the resume ({_count_text(missing, count)}{_example_text(missing)})"
    if new:
        yield f"{plural} {verb} new after the resume ({len(new):,}{_example_text(new)})"
    if cast:
        first = cast[0]
        reference, actual = (" ".join(_dtype_and_shape(value)) for value in (first.reference, first.actual))
        yield (
            f"dtypes or shapes of {plural} differ ({_count_text(cast, count)}; {first.item}: {reference} in the "
            f"reference, {actual} after the resume)"
        )
    if others:
        values = f"{name} values differ" if plural != name else f"{name} differs"
        yield f"{values} ({_count_text(others, count)}{_example_text(others)}); {cause}"


def _settings_text(by_key: Mapping[str, Sequence[Difference]]) -> str:
    sentences = [f"{_SETTINGS.get(key, key)} differs{_first_change_text(group)}" for key, group in by_key.items()]
    more = (
        [f"{len(sentences) - _MAX_LISTED_NAMES} more settings of param groups differ"]
        if len(sentences) > _MAX_LISTED_NAMES + 1
        else []
    )
    return ", ".join([*sentences[: _MAX_LISTED_NAMES if more else None], *more])


def _values_text(differences: Sequence[Difference]) -> str:
    """Return the items that differ, in parentheses, with their values if these are short."""
    shown = [f"{each.item}{_change_text(each, ': ')}" for each in differences[:_MAX_LISTED_NAMES]]
    more = [f"and {len(differences) - _MAX_LISTED_NAMES:,} more"] if len(differences) > _MAX_LISTED_NAMES else []
    return f" ({'; '.join([*shown, *more])})"


def _first_change_text(differences: Sequence[Difference]) -> str:
    """Return the change of a setting in the first param group, in parentheses; "" if its values cannot be displayed."""
    changes = list(dict.fromkeys(_change_text(each, "") for each in differences))
    more = f", and {counted(len(changes) - 1, 'other change')}" if len(changes) > 1 else ""
    return f" ({changes[0]}{more})" if changes[0] else ""


def _change_text(difference: Difference, prefix: str) -> str:
    """Return both values behind `prefix`; "" if one cannot be displayed."""
    reference, actual = (_display_value(value) for value in (difference.reference, difference.actual))
    if reference is None or actual is None:
        return ""
    return f"{prefix}{reference} in the reference, {actual} after the resume"


def _display_value(value: str | None) -> str | None:
    """Return a value for a sentence, for a tensor its only element; None for a digest or a long value."""
    if value is None:
        return "missing"
    tensor = _TENSOR.fullmatch(value)
    value = value if tensor is None else tensor[3]
    return None if _DIGEST.fullmatch(value) or len(value) > _MAX_VALUE_LENGTH else value


def _dtype_and_shape(value: str | None) -> tuple[str, str]:
    """Return dtype and shape of a tensor as strings; two empty strings for any other value."""
    tensor = _TENSOR.fullmatch(value or "")
    return ("", "") if tensor is None else (tensor[1], f"[{tensor[2]}]")


def _count_text(differences: Sequence[Difference], count: int) -> str:
    return f"{len(differences):,} of {max(count, len(differences)):,}"


def _example_text(differences: Sequence[Difference]) -> str:
    first = differences[0]
    is_number = _dtype_and_shape(first.reference)[1] in ("", "[]")
    return f": {first.item}{_change_text(first, ': ') if is_number and first.actual and first.reference else ''}"


def _names_text(differences: Sequence[Difference]) -> str:
    return f" ({_join_names([each.item for each in differences])})"


def _join_names(names: Iterable[str]) -> str:
    names = [*names]
    more = [f"and {len(names) - _MAX_LISTED_NAMES:,} more"] if len(names) > _MAX_LISTED_NAMES else []
    return ", ".join([*names[:_MAX_LISTED_NAMES], *more])


def _moment_name(difference: Difference) -> str:
    words = difference.item.split(".")
    return next((word for word in reversed(words) if is_moment(word)), words[-1])


def _group_by_root(differences: Sequence[Difference], comparison: _ResumeComparison) -> dict[str, list[Difference]]:
    """Group differences by the start of their names: the words that all names share, containers, and the next word."""
    prefix_length = _common_prefix_length(_without_file_name(name).split(".") for _, name in comparison.source_items)
    groups: dict[str, list[Difference]] = {}
    for each in differences:
        words = _without_file_name(each.item).split(".")
        begin = len(words) - len(inner_words(".".join(words[prefix_length:]) or words[-1]))
        groups.setdefault(".".join(words[: begin + 1]), []).append(each)
    return groups


def _common_prefix_length(names: Iterable[Sequence[str]]) -> int:
    """Return the number of words with which all names begin, without the last word of any name."""
    shared: Sequence[str] | None = None
    top_level_names = set[str]()
    for words in names:
        parents = words[:-1]
        if not parents:
            top_level_names.add(words[0])
            continue
        if shared is None:
            shared = parents
        while shared != parents[: len(shared)]:
            shared = shared[:-1]
    return len(shared) if shared and top_level_names <= {shared[0]} else 0


def _without_file_name(item: str) -> str:
    """Return a name without its file, which precedes it if several files have an item of this name."""
    return item.rpartition(": ")[2]


# --------------------------------------------------------------------------------------------------------------- ranks


def _ranks_in_differences(differences: Sequence[Difference]) -> set[int]:
    return _ranks_in_names(each.item for each in differences)


def _ranks_in_names(items: Iterable[str]) -> set[int]:
    """Return the ranks in names. If only some names contain a rank, the others belong to rank 0.

    Items of the same name in several files are named after their file, which has the rank, except for the first one.
    """
    names = [*items]
    ranks = {rank for rank in map(rank_in_name, names) if rank is not None}
    return ranks | {0} if ranks and 0 not in ranks and any(rank_in_name(name) is None for name in names) else ranks


def _ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text: `rank 3`, `ranks 0, 2-5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"{'rank' if len(texts) == 1 and '-' not in texts[0] else 'ranks'} {', '.join(texts)}"


def _rank_span(item: str) -> slice | None:
    """Return the character positions of the number of a rank in a name; None if there is none."""
    match = _RANK.search(item) or _BARE_NUMBER.search(item)
    return None if match is None else slice(*match.span(1))


def _mask_rank(item: str) -> str:
    """Return a name with "#" for the number of its rank; the name itself if it has none."""
    span = _rank_span(item)
    return item if span is None else f"{item[: span.start]}#{item[span.stop :]}"


def _swapped_ranks_text(differences: Sequence[Difference], comparison: _ResumeComparison) -> str | None:
    """Return a text that tells which ranks have the RNG state of which other rank.

    None unless each state that differs equals the saved state of a rank.
    """
    saved_rank_by_state: dict[tuple[str, str], int | None] = {}
    for (oracle, name), value in comparison.source_items.items():
        if oracle == "rng":
            saved_rank_by_state.setdefault((_mask_rank(name), value), rank_in_name(name))
    restored_ranks: dict[int | None, set[int]] = {}
    for each in differences:
        key = (_mask_rank(each.item), each.actual or "")
        rank = rank_in_name(each.item)
        if key not in saved_rank_by_state or rank is None:
            return None
        restored_ranks.setdefault(saved_rank_by_state[key], set()).add(rank)
    sentences = [
        f"{_ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} that of rank {saved_rank}"
        for saved_rank, ranks in restored_ranks.items()
    ]
    return f" ({_join_names(sentences)})"


def _is_torch_cpu_rng(difference: Difference) -> bool:
    """Return True for a state of torch's CPU generator, from which iter(loader) draws."""
    is_bytes = any(
        _dtype_and_shape(value)[0] == "U8" and _dtype_and_shape(value)[1] in ("[5056]", "[5048]")
        for value in (difference.reference, difference.actual)
    )
    return is_bytes or any("torch" in word and "cuda" not in word for word in difference.item.lower().split("."))
