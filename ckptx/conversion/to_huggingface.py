"""`convert dcp2hf`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptx.architecture.tied import TieDecision, config_edits
from ckptx.conversion.config import Home, no_config
from ckptx.conversion.dtypes import cast, lossless_edits, quantization_edits
from ckptx.conversion.manifest import manifest_of
from ckptx.conversion.memory import Memory, kept_manifest, names_on_disk, recall
from ckptx.conversion.names import respell
from ckptx.conversion.run import Conversion
from ckptx.conversion.target import Target, share
from ckptx.conversion.written import check_digests, check_huggingface
from ckptx.errors import InputError
from ckptx.formats.dcp.megatron import COMMON_FILE, without_backend
from ckptx.formats.hf import layout as huggingface_layout
from ckptx.formats.hf.hf_metadata import FILES
from ckptx.formats.sidecars import MANIFEST
from ckptx.publishing.publish import Job
from ckptx.report.report import counted
from ckptx.transfer.executor import Outcome
from ckptx.transfer.planner import plan_copy
from ckptx.view import ModelView


def to_huggingface(run: Conversion, home: Home) -> None:
    """Carries out one conversion to HF.

    Raises:
        InputError: There is no model in it.
        CkptxError: Whatever else is in the way.
    """
    options, root = run.options, run.source.root
    is_sharded = run.source.format == "sharded"
    view, decisions = run.view(home.config, options.prefix)
    run.note_wrappers(view)
    run.drop_training_state(view, "is not converted to HF")
    if not view.tensors:
        raise InputError(f"{root}: holds no model tensors; look at its names with `ckptx inspect --tensors`")
    memory, target = _recall(run, view, home, decisions)
    if memory is None and home.config is None and options.base is None:
        raise no_config(root)
    if memory is not None and target is not None:
        layout = memory.restore(run.dst, target.tensors)
        edits: list[dict[str, Any]] = []
    else:
        target = share(run, view, decisions, aliases_possible=False)
        spelling = respell(run, view, target, by_default="disk" if is_sharded or view.dialect else None)
        was_cast = cast(run, view, target, home, spelling)
        edits = lossless_edits(run, view, target, home, spelling, was_cast=was_cast)
        edits += quantization_edits(run, view, target)
        edits += untie_edits(run, view, home.config, decisions)
        files = _files_of_base(run, home, target)
        layout = huggingface_layout.allocate(run.dst, target.tensors.values(), options.max_shard_size, files)
    if options.index == "always":
        layout = huggingface_layout.with_index(layout)
    plan = plan_copy(run.source, layout.catalog, target.origin, prologues=layout.prologues)
    origin = home.base if home.base is not None else run.source
    carried = without_backend(origin.root, origin.sidecars)
    if options.base == "none":
        carried = [name for name in carried if name == COMMON_FILE]
    recorded = {} if memory is None else memory.digests

    def check(tree: Path, outcome: Outcome) -> None:
        check_huggingface(tree, layout)
        check_digests(outcome, recorded)

    job = Job(
        plan,
        run.source,
        run.carry(origin.root, carried, edits),
        options.fingerprint(),
        lambda outcome: manifest_of("huggingface", layout.catalog, outcome.digests),
        check,
        [] if layout.index_text is None else [(layout.index_name, layout.index_text.encode())],
    )
    run.execute(job, target.written())


def _files_of_base(run: Conversion, home: Home, target: Target) -> Mapping[str, int] | None:
    """Which file of the base each tensor was in, where the trainer noted it and nothing else is asked for."""
    asked = run.options.max_shard_size_given or run.options.names not in (None, "disk")
    if asked or home.files.keys().isdisjoint(target.tensors):
        return None
    lost = [name for name in home.files if name not in target.tensors]
    if lost:
        run.report.warnings.append(
            f"{FILES}: {counted(len(lost), 'name')} of no tensor here, as tied ones are, left out of the files: "
            f'"{lost[0]}"{" and more" if len(lost) > 1 else ""}'
        )
    return home.files


def _recall(
    run: Conversion, view: ModelView, home: Home, decisions: list[TieDecision]
) -> tuple[Memory | None, Target | None]:
    """What the manifest of this very checkpoint remembers, unless the options ask for something else."""
    options = run.options
    asked = options.dtype != "auto" or options.max_shard_size_given or options.tied != "auto" or view.prefix
    if asked or home.base is not None or options.base == "none" or options.names not in (None, "disk"):
        return None, None
    manifest = kept_manifest(view, run.report.warnings)
    if manifest is None:
        return None, None
    before, target = run.source, Target.of(view.tensors)
    spelling = respell(run, view, target, by_default="disk", original=names_on_disk(manifest.original))
    old = {new: name for name, new in spelling.renamed(view).items()}
    # A digest is that of the bytes in the order they were written: those of other rows are other bytes.
    as_written = {
        name for name, entry in target.tensors.items() if name in old and entry.chunks is view.tensors[old[name]].chunks
    }
    memory = recall(manifest, target, old, as_written, decisions)
    if memory is None:
        run.source = before
        run.report.warnings.append(f"{MANIFEST} remembers files of other tensors; they are laid out anew")
        return None, None
    kept = Target({}, {}, {})
    for name in memory.original.tensors:
        kept.tensors[name] = target.tensors[name]
        kept.origin[name], kept.read[name] = target.origin[name], target.read[name]
    run.share_ledger([old.get(name, name) for name in memory.shared], view)
    cast(run, view, kept, home, spelling)
    return memory, kept


def untie_edits(
    run: Conversion, view: ModelView, config: dict[str, Any] | None, decisions: list[TieDecision]
) -> list[dict[str, Any]]:
    """Edits that stop the config from calling different tensors tied."""
    if view.architecture is None or config is None:
        return []
    found = config_edits(view.architecture, config, decisions)
    if found.note:
        run.report.warnings.append(found.note)
    edits = []
    for path, after in found.values.items():
        place: Any = config
        for key in path[:-1]:
            place = place.get(key, {})
        edits.append({"key": ".".join(path), "before": place.get(path[-1]), "after": after})
    return edits
