"""`diff`: compare names, shapes, dtypes and tied weights of two checkpoints.

Headers are read, and samples of tied weights that are stored separately; no other tensor data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import full_region
from ckptx.comparison.adapters import compare_adapter_settings
from ckptx.comparison.common_names import with_common_names
from ckptx.comparison.uncompared import count_uncompared, note_on_uncompared
from ckptx.errors import InputError, ReadError, UnsupportedError
from ckptx.formats.hf.hub import resolve_source
from ckptx.formats.registry import open_checkpoint
from ckptx.mapping.duplicates import find_duplicate_names
from ckptx.mapping.models import describe_prefix
from ckptx.mapping.names import without_wrappers
from ckptx.mapping.rules import TrainerRules
from ckptx.model_view.config_check import match_config_with_notes
from ckptx.model_view.parameter_count import count_parameters, hold_equal_samples
from ckptx.model_view.recorded_ties import recorded_ties
from ckptx.model_view.unknown_class import note_on_unknown_ties, shared_prefix_of_unknown_class
from ckptx.model_view.view import ModelView, SeveralModelsError, rules_of, view_model_under
from ckptx.options.api import api
from ckptx.options.diff import DiffOptions
from ckptx.report.documents.comparison import DiffReport
from ckptx.report.report import Log, Stopwatch, count_dtypes
from ckptx.wording import counted, first_of


@api(DiffOptions)
def diff(options: DiffOptions) -> DiffReport:
    """Compare names, shapes, dtypes and tied weights of two checkpoints of any format.

    This function reads headers, and samples of 64 KiB from tied weights that are stored twice. It does not compare
    contents; `verify` does.

    Optimizer state and other state is not compared; `not_compared` of the report has the numbers of its tensors and
    objects.

    The `exit` of the report is 1 if they differ. A tied name that only one checkpoint stores is not a difference if
    the other stores the tensor that it is tied to in the same shape and dtype, and if samples of both tensors are equal
    where the checkpoint with the name stores both.

    Raises:
        InputError, UnsupportedError: A checkpoint cannot be opened.
    """
    stopwatch, log = Stopwatch(), options.log or Log()
    paths = [
        resolve_source(str(each), revision=options.revision, token=options.token, cache_dir=options.cache_dir)
        for each in (options.a, options.b)
    ]
    opened = with_common_names(*(open_checkpoint(path) for path in paths), needs_bytes=False)
    setting_differences = compare_adapter_settings(*opened)
    a_view, b_view = view_both(
        *opened, prefix=options.source_prefix_or_none, trust_remote_code=options.trust_remote_code
    )
    for view in (a_view, b_view):
        match_config_with_notes(view, log.notes)
    a_common, b_common, _ = convert_to_common_names(_replace_chunks(a_view), _replace_chunks(b_view))
    for view in (a_common, b_common):
        log.note(*(f"{view.catalog.location}: {note}" for note in view.notes))
    for view in (a_view, b_view):
        log.note(
            *(
                f"{view.catalog.location}: {note}"
                for note in (*view.notes_on_other_models("not compared"), *_note_on_duplicates(view))
            )
        )
        log.note(*note_on_uncompared(view, objects=len(view.catalog.objects)))
    differences = compare_headers(a_common, b_common)
    tied_tensors, untied = _split_by_samples(_find_one_sided_ties(a_common, b_common), a_view, b_view)
    differing_names = {difference["name"] for difference in differences}
    differences += [each for each in untied if each["name"] not in differing_names]
    differences += setting_differences
    missing_count = sum(difference["what"] == "missing" for difference in differences)
    log.note(*(note_on_unknown_ties(a_view, b_view) if missing_count else ()))
    total = len(a_common.tensors.keys() | b_common.tensors.keys())
    report = DiffReport(
        command="diff",
        exit=1 if differences else 0,
        tensors=len(a_view.catalog.tensors),
        dtypes={
            "before": count_dtypes(a_common.tensors.values()),
            "after": count_dtypes(b_common.tensors.values()),
        },
        notes=list(log.notes),
        parameters=count_parameters(a_view).count,
        compared=total - missing_count,
        total=total,
        not_compared=count_uncompared(
            a_view, b_view, objects=len(a_view.catalog.objects) + len(b_view.catalog.objects)
        ),
        differing=differences,
        tied_tensors=tied_tensors,
    )
    return stopwatch.stop(report)


def view_both(
    a: Catalog, b: Catalog, *, prefix: str | None = None, trust_remote_code: bool = False
) -> tuple[ModelView, ModelView]:
    """View two checkpoints as models; one without a config uses that of the other, as `verify --run` does.

    Args:
        a: First checkpoint.
        b: Second checkpoint.
        prefix: Prefix of model names, applied to each checkpoint with a model under it; None to detect it.
        trust_remote_code: True to run code from the checkpoints for classes that transformers lacks.

    Raises:
        InputError, UnsupportedError: A checkpoint cannot be viewed, or neither has a model under the prefix.
    """
    views = (
        _view_with_config_of(a, b, prefix, trust_remote_code),
        _view_with_config_of(b, a, prefix, trust_remote_code),
    )
    if prefix is None:
        return (
            _without_shared_prefix(views[0], views[1], trust_remote_code),
            _without_shared_prefix(views[1], views[0], trust_remote_code),
        )
    spellings = (prefix, without_wrappers(prefix))
    if not any(view.catalog.traits.is_training_format and view.prefix in spellings for view in views):
        raise InputError(
            f'--source-prefix "{prefix}": neither {a.location} nor {b.location} is a training checkpoint with a '
            f"model {describe_prefix(prefix)}; list their names with `ckptx inspect --tensors`"
        )
    return views


def _without_shared_prefix(view: ModelView, other: ModelView, trust_remote_code: bool) -> ModelView:
    """Return the view without a prefix that all its names have and the names of the other checkpoint lack.

    `convert` does the same with the names of the base. A model of a known class stays unchanged, because its prefix was
    found by the names of the class.
    """
    shared = shared_prefix_of_unknown_class(view, other.tensors.keys())
    if shared is None or not shared.is_absent_in_base:
        return view
    view = _view_with_config_of(view.catalog, other.catalog, shared.prefix, trust_remote_code)
    note = f'prefix "{shared.prefix}" removed from names, which {other.catalog.root} lacks'
    return replace(view, notes=(*view.notes, note))


def _view_with_config_of(
    catalog: Catalog, other: Catalog, prefix: str | None, trust_remote_code: bool = False
) -> ModelView:
    """Return the view of a checkpoint; without a config, with that of the other checkpoint if it matches, and a note.

    Raises:
        InputError, UnsupportedError: See `view_model_under`.
    """
    if catalog.config is not None or other.config is None:
        return view_model_under(catalog, prefix, trust_remote_code=trust_remote_code)
    try:
        view, note = (
            view_model_under(
                catalog, prefix, config=other.config, trust_remote_code=trust_remote_code, code_checkpoint=other
            ),
            f"no config.json; using that of {other.root}",
        )
    except (SeveralModelsError, ReadError):
        raise
    except (InputError, UnsupportedError) as error:
        view = view_model_under(catalog, prefix)
        note = f"no config.json, and that of {other.root} does not match: {error}"
    return replace(view, notes=(*view.notes, note))


def _note_on_duplicates(view: ModelView) -> list[str]:
    """Return a note on tensors that are stored under two names, whose bytes `diff` does not compare."""
    rules = rules_of(view) if not view.trainer_conversions else None
    names = [*view.duplicates, *(find_duplicate_names(rules, view.tensors) if rules is not None else ())]
    if not names:
        return []
    return [f"{counted(len(names), 'tensor')} stored under two names: {first_of(names)}; `verify` compares their bytes"]


def _replace_chunks(view: ModelView) -> ModelView:
    """Replace the chunks of each tensor by one that only identifies its bytes, so that archives are not opened.

    Two tensors get equal chunks if they share bytes; a tensor without elements shares them with no other.
    """
    tensors = {}
    for name, entry in view.tensors.items():
        chunk = entry.chunks[0] if entry.chunks and entry.numel else None
        key = name if chunk is None else f"{chunk.file}:{chunk.offset}"
        tensors[name] = entry._replace(chunks=(Chunk(full_region(entry.shape), key, 0, entry.nbytes),), replicas=())
    return replace(view, tensors=tensors)


class CommonNames(NamedTuple):
    """Two views whose names are compared.

    Attributes:
        a: First view.
        b: Second view.
        were_converted: True if both were renamed to model names; False if they are unchanged.
    """

    a: ModelView
    b: ModelView
    were_converted: bool


def convert_to_common_names(a: ModelView, b: ModelView) -> CommonNames:
    """Rename both views to model names, if fewer names are then in only one of them; otherwise return them unchanged.

    Checkpoints may store experts separately or as one tensor, and may use different names for the same module.
    """
    unchanged = CommonNames(a, b, were_converted=False)
    if a.tensors.keys() == b.tensors.keys():
        return unchanged
    rules = rules_of(a) or rules_of(b)
    if rules is None:
        return unchanged
    try:
        tensors = []
        for view in (a, b):
            disk_tensors = (
                TrainerRules(view.trainer_conversions).from_trainer(view.tensors).tensors
                if view.trainer_conversions
                else view.tensors
            )
            tensors.append(rules.to_model(disk_tensors).tensors)
    except (InputError, UnsupportedError):
        return unchanged  # a view is incomplete or has unknown names; its own names show the differences best
    before, after = (len(first.keys() ^ second.keys()) for first, second in ((a.tensors, b.tensors), tensors))
    if after >= before:
        return unchanged
    return CommonNames(replace(a, tensors=tensors[0]), replace(b, tensors=tensors[1]), were_converted=True)


def compare_headers(a: ModelView, b: ModelView) -> list[dict[str, Any]]:
    """Return the entries of `differing` in the report: each name that differs, the kind of difference, and both values.

    A tied name that one view lacks is compared with the name that it is tied to in that view.
    """
    ties = TiedNames.from_views(a, b)
    differences: list[dict[str, Any]] = []
    for name in [*a.tensors, *(name for name in b.tensors if name not in a.tensors)]:
        difference = compare_entries(
            name, ties.find_entry(name, in_view=a, other_view=b), ties.find_entry(name, in_view=b, other_view=a)
        )
        if difference is not None:
            differences.append(difference)
    return differences


def compare_entries(name: str, a: TensorEntry | None, b: TensorEntry | None) -> dict[str, Any] | None:
    """Return the entry of `differing` in the report for a tensor that one side lacks or that differs in shape or dtype.

    None if both have the tensor with the same shape and dtype.
    """
    kind = None
    if a is None or b is None:
        kind = "missing"
    elif a.shape != b.shape:
        kind = "shape"
    elif a.dtype is not b.dtype:
        kind = "dtype"
    return None if kind is None else {"name": name, "what": kind, "a": _describe(a), "b": _describe(b)}


def _describe(entry: TensorEntry | None) -> str | None:
    return None if entry is None else f"{entry.dtype.name} {list(entry.shape)}"


def _find_one_sided_ties(a: ModelView, b: ModelView) -> list[dict[str, str]]:
    """Return the `tied_tensors` of the report: names that only one side stores, each with a tied name on the other."""
    one_sided = []
    ties = TiedNames.from_views(a, b)
    for view, other in ((a, b), (b, a)):
        for name in view.tensors:
            partner = None
            if name not in other.tensors:
                partner = ties.find_counterpart(name, in_view=other, other_view=view)
            if partner is not None:
                one_sided.append({"name": name, "tied_to": partner, "only_in": str(view.catalog.location)})
    return one_sided


def _split_by_samples(
    rows: Sequence[dict[str, str]], a: ModelView, b: ModelView
) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """Split one-sided ties into those of equal tensors, and entries of `differing` for the others.

    A checkpoint that stores a name and the one that it is tied to in the other checkpoint may hold two different
    tensors; three samples of each are compared. A name that was converted for the comparison is not sampled.

    Args:
        rows: Result of `_find_one_sided_ties`.
        a: First checkpoint, with the chunks of its files.
        b: Second checkpoint.

    Raises:
        ReadError: The storage failed.
    """
    tied, differences = [], []
    for row in rows:
        view = next(each for each in (a, b) if str(each.catalog.location) == row["only_in"])
        names = (row["name"], row["tied_to"])
        if all(name in view.tensors for name in names) and not hold_equal_samples(view, names):
            values = [f"tied to {row['tied_to']}", "a separate tensor"]
            first, second = reversed(values) if view is a else values
            differences.append({"name": row["name"], "what": "tie", "a": first, "b": second})
        else:
            tied.append(row)
    return tied, differences


@dataclass(frozen=True, slots=True)
class TiedNames:
    """Names of the same tensor: tied by the config, recorded as tied by a manifest, or sharing bytes in a DCP.

    Attributes:
        groups: Name -> itself and all names tied to it, directly or indirectly, in all spellings that the class loads.
        sources: Name -> names that the config directly ties it to.
        state: Stored name of training state -> stored name of the state that a manifest records as the same tensor.
    """

    groups: dict[str, set[str]] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_views(cls, *views: ModelView) -> TiedNames:
        """Collect the tied names of all views."""
        ties = cls()
        for view in views:
            name_by_chunks: dict[object, str] = {}
            for name, entry in view.tensors.items():
                first_name = name_by_chunks.setdefault(entry.chunks, name) if entry.numel else name
                if first_name != name:
                    ties._merge_groups(name, first_name)
            if view.architecture is not None and view.config is not None:
                for pair in view.architecture.ties:
                    if pair.flag.is_set(view.config):
                        for target, source in pair.namings:
                            ties._merge_groups(target, source)
                            ties.sources.setdefault(target, set()).add(source)
        # Manifests are read only if a name may need its tie.
        if any(view.catalog.tensors.keys() != views[0].catalog.tensors.keys() for view in views[1:]):
            for view in views:
                names = {entry.name: name for name, entry in view.tensors.items()}
                for target, source in recorded_ties(view).items():
                    if target in names and source in names:
                        ties._merge_groups(names[target], names[source])
                    else:
                        ties.state[target] = source
        return ties

    def _merge_groups(self, a: str, b: str) -> None:
        group = self.groups.get(a, {a}) | self.groups.get(b, {b})
        self.groups.update(dict.fromkeys(group, group))

    def find_entry(self, name: str, *, in_view: ModelView, other_view: ModelView) -> TensorEntry | None:
        """Return the tensor in `in_view` with this name, or, if only `other_view` has the name, its counterpart.

        None if there is none.
        """
        counterpart: str | None = name
        if name not in in_view.tensors and name in other_view.tensors:
            counterpart = self.find_counterpart(name, in_view=in_view, other_view=other_view)
        return None if counterpart is None else in_view.tensors.get(counterpart)

    def find_counterpart(self, name: str, *, in_view: ModelView, other_view: ModelView) -> str | None:
        """Return the name in `in_view` to compare with `name`, which only `other_view` has; None if there is none.

        Names that are declared tied may be different tensors (T5 v1.1 declares its separate head tied). So a name that
        shares the bytes of `name` comes first, then the source of its own pair, then any other.
        """
        candidates = sorted(other for other in self.groups.get(name, ()) if other in in_view.tensors)
        chunks = other_view.tensors[name].chunks
        sharing_bytes = [
            other for other in candidates if other in other_view.tensors and other_view.tensors[other].chunks == chunks
        ]
        tied_directly = [other for other in candidates if other in self.sources.get(name, ())]
        return next(iter(sharing_bytes + tied_directly + candidates), None)
