"""`convert hf2dcp` and `convert dcp2hf`: the difference between two catalogs, carried out.

Both directions are the same five steps: view the source as a model, decide ties, say what the target holds, lay it out,
publish. They differ in what an alias may be (a DCP points twice at the same bytes, safetensors cannot) and
in what is left behind (HF holds no optimizer state).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptx.architecture.tied import TieDecision, config_edits
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import CAST_TARGETS, DType
from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.manifest import SCHEMA
from ckptx.errors import Defect, InputError, UnsupportedError, UsageError
from ckptx.formats import dcp_layout, huggingface_layout
from ckptx.formats.dcp import METADATA, open_payloads
from ckptx.formats.hub import resolve
from ckptx.formats.huggingface import read_header, read_json
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.sidecars import look_around
from ckptx.mapping.config import dtype_edits, edited_config
from ckptx.mapping.dtypes import cast_targets
from ckptx.options import ConvertOptions
from ckptx.publish import Job, publish
from ckptx.report.report import Report, count_dtypes, human_bytes
from ckptx.staging import free_space, refuse_existing, refuse_overlap
from ckptx.storage import FilePool
from ckptx.transfer.digest import digest_bytes
from ckptx.transfer.executor import Outcome
from ckptx.transfer.planner import plan_copy
from ckptx.version import __version__
from ckptx.view import ModelView, aliases_of, decide_ties, tie_rows, view_model

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class _Target:
    """What the target holds: `tensors` by name with the name each is read from, and names that share their bytes."""

    tensors: dict[str, TensorEntry]
    origin: dict[str, str]
    aliases: dict[str, str]


def convert(
    direction: str,
    src: str | Path,
    dst: str | Path,
    *,
    on_progress: Progress = lambda done, total: None,
    report: Report | None = None,
    **options: Any,
) -> Report:
    """Converts a checkpoint.

    Args:
        direction: "hf2dcp" or "dcp2hf".
        src: A directory, file, index, or Hub id.
        dst: The directory to write; absent or empty unless `overwrite`.
        on_progress: Called now and then with bytes written and bytes in all.
        report: Filled while working, so that a caller has it even when an error is raised.
        **options: The options of the command line, see `ConvertOptions`.

    Returns:
        The report that `--json` prints.

    Raises:
        CkptxError: One subclass for each exit code from 2 to 7; nothing was published.
    """
    if direction not in ("hf2dcp", "dcp2hf"):
        raise UsageError(f'convert: direction "{direction}", needed hf2dcp or dcp2hf')
    report = report or Report(f"convert {direction}")
    settings = ConvertOptions.parse(direction, options)
    path = resolve(str(src), revision=settings.revision, token=settings.token, cache_dir=settings.cache_dir)
    refuse_overlap(path, Path(dst))
    if not settings.resume and not settings.dry_run:
        refuse_existing(Path(dst), settings.overwrite)
    source = open_checkpoint(path)
    report.warnings.extend(source.notes)
    with FilePool(source.root) as files:
        if source.format == "dcp":
            source = open_payloads(source, files)
        run = _to_dcp if direction == "hf2dcp" else _to_huggingface
        run(_Conversion(source, files, Path(dst), settings, report, on_progress))
    return report.finish()


@dataclass(slots=True)
class _Conversion:
    """One conversion under way."""

    source: Catalog
    files: FilePool
    dst: Path
    options: ConvertOptions
    report: Report
    on_progress: Progress

    def execute(self, job: Job, source_names: set[str]) -> None:
        """Publishes the job, or says what it would do."""
        report, options = self.report, self.options
        report.tensors = sum(len(file.items) for file in job.plan.files)
        report.bytes_read, report.bytes_written = job.plan.bytes_read, job.nbytes
        self._settle_ledger(source_names)
        if options.dry_run:
            self._describe(job)
            return
        total = job.plan.bytes_written
        outcome = publish(
            job,
            self.dst,
            self.files,
            workers=options.workers,
            max_memory=options.max_memory,
            overwrite=options.overwrite,
            resume=options.resume,
            on_progress=lambda done: self.on_progress(done, total),
        )
        if outcome is None:
            report.warnings.append(f"{self.dst} is complete already; nothing to resume")
            report.bytes_read = report.bytes_written = 0
            return
        report.bytes_read = outcome.bytes_read
        report.bytes_written = outcome.bytes_written + job.nbytes - total
        if outcome.unrecorded:
            report.warnings.append(f"{outcome.unrecorded} archives record no CRC-32; their bytes could not be checked")

    def _settle_ledger(self, written: set[str]) -> None:
        """Every source tensor is written, an alias, or dropped by a named rule."""
        report = self.report
        dropped = {row["name"] for row in report.dropped}
        shared = set(report.details.pop("_shared", ()))
        accounted = written | dropped | shared
        lost = [name for name in self.source.tensors if name not in accounted]
        if lost:
            raise Defect(f'tensor "{lost[0]}" and {len(lost) - 1} more would be lost; this is a defect of ckptx')
        report.details["ledger"] = {
            "source": len(self.source.tensors),
            "written": len(written),
            "alias": len(shared - written),
            "dropped": len(dropped),
        }

    def _describe(self, job: Job) -> None:
        """Fills the report of a dry run."""
        files = [{"name": file.name, "bytes": file.nbytes, "tensors": len(file.items)} for file in job.plan.files]
        files += [{"name": name, "bytes": len(data), "tensors": 0} for name, data in job.markers]
        free = free_space(self.dst)
        self.report.details |= {"dry_run": True, "files": files, "memory": self.options.max_memory, "free_space": free}
        if free < job.nbytes:
            self.report.warnings.append(
                f"not enough space: needs {human_bytes(job.nbytes)}, {human_bytes(free)} free at {self.dst}"
            )


def _view(run: _Conversion, config: dict[str, Any] | None, prefix: str | None) -> tuple[ModelView, list[TieDecision]]:
    """Views the source as a model, decides its ties, and reports both."""
    options, report = run.options, run.report
    view = view_model(run.source, config=config, prefix=prefix, trust_remote_code=options.trust_remote_code)
    decisions = decide_ties(view, run.files, tie_missing=options.tie_missing)
    report.ties = tie_rows(decisions)
    report.details["architecture"] = None
    if view.architecture is not None:
        report.details["architecture"] = {"class": view.architecture.class_name, "known_from": view.architecture.origin}
    for wrapper, count in view.wrappers.items():
        report.warnings.append(f'wrapper "{wrapper}." removed from {count} names')
    if view.prefix:
        report.details["prefix"] = view.prefix
    if view.unknown:
        report.details["unknown"] = view.unknown
        report.warnings.append(
            f"{len(view.unknown)} tensors are unknown to {view.architecture and view.architecture.class_name} and pass "
            f'through: "{view.unknown[0]}"' + (" and more" if len(view.unknown) > 1 else "")
        )
    return view, decisions


def _share(view: ModelView, decisions: list[TieDecision], tied: str, *, aliases_possible: bool) -> _Target:
    """Which tensors the target stores, and which names share them, by `--tied`."""
    tensors, origin = dict(view.tensors), {name: entry.name for name, entry in view.tensors.items()}
    aliases: dict[str, str] = {}
    for decision in decisions:
        if tied == "drop" and decision.case == "different":
            raise InputError(
                f'tensors "{decision.target}" and "{decision.source}" differ, so --tied drop would lose one; '
                "use --tied auto, which keeps both"
            )
    shared = aliases_of(decisions)
    for name, stored in shared.items():
        target = name if name in {decision.target for decision in decisions} else stored
        if tied == "copy":
            origin[name] = origin[stored]
            tensors[name] = tensors[stored]
            continue
        if name in tensors:
            del tensors[name], origin[name]
        if aliases_possible and tied != "drop":
            aliases[name] = stored
        elif tied == "drop" and target == stored:
            # The target is the one on disk: its bytes stay, under the name of the source.
            tensors[name], origin[name] = tensors.pop(stored), origin.pop(stored)
    return _Target({name: entry._replace(name=name) for name, entry in tensors.items()}, origin, aliases)


def _cast(run: _Conversion, view: ModelView, target: _Target, base: Catalog | None) -> bool:
    """Gives each target tensor its dtype; True when any is cast."""
    wanted: DType | None = CAST_TARGETS.get(run.options.dtype)
    architecture = view.architecture
    wanted_name: Any = run.options.dtype
    keep_base = {
        name for name, entry in (base.tensors if base is not None else {}).items() if entry.dtype.name == "F32"
    }
    if base is not None and len(keep_base) == len(base.tensors):
        keep_base = set()  # a base wholly in float32 says nothing about what must stay so
    dtypes = cast_targets(
        target.tensors,
        wanted,
        lambda name: architecture is not None and wanted_name != "fp32" and architecture.keeps_fp32(name, wanted_name),
        keep_base,
    )
    before = count_dtypes(target.tensors.values())
    changed = False
    for name, dtype in dtypes.items():
        if target.tensors[name].dtype is not dtype:
            target.tensors[name] = target.tensors[name]._replace(dtype=dtype)
            changed = True
    run.report.dtypes = {"before": before, "after": count_dtypes(target.tensors.values())}
    if wanted is not None:
        kept = [name for name, entry in target.tensors.items() if entry.dtype.cast and entry.dtype is not wanted]
        if kept:
            run.report.details["kept_dtype"] = kept
    return changed


def _mark_shared(run: _Conversion, view: ModelView, target: _Target, decisions: list[TieDecision]) -> set[str]:
    """Enters aliases into the report; gives the names on disk that are written."""
    run.report.aliases = dict(target.aliases)
    shared = aliases_of(decisions)
    run.report.details["_shared"] = [view.tensors[name].name for name in shared if name in view.tensors]
    return set(target.origin.values())


def _sidecars(run: _Conversion, root: Path, carried: list[str], edits: list[dict[str, Any]]) -> dict[str, Path | bytes]:
    """The files to carry; config.json is written anew only when something in it changes."""
    sidecars: dict[str, Path | bytes] = {name: root / name for name in carried}
    if edits and "config.json" in sidecars:
        sidecars["config.json"] = edited_config(read_json(root / "config.json"), edits)
        run.report.edits = edits
    return sidecars


def _to_dcp(run: _Conversion) -> None:
    source, options = run.source, run.options
    if source.format == "dcp":
        raise UsageError(f"{source.root}: is a DCP already; convert dcp2hf turns it into safetensors")
    view, decisions = _view(run, None, None)
    if source.config is None:
        run.report.warnings.append("no config.json: tied names are unknown, every tensor is converted as it is")
    target = _share(view, decisions, options.tied, aliases_possible=True)
    was_cast = _cast(run, view, target, None)
    written = _mark_shared(run, view, target, decisions)
    prefix = options.prefix or ""
    if prefix:
        target = _Target(
            {prefix + name: entry._replace(name=prefix + name) for name, entry in target.tensors.items()},
            {prefix + name: on_disk for name, on_disk in target.origin.items()},
            {prefix + name: prefix + stored for name, stored in target.aliases.items()},
        )
        run.report.aliases = dict(target.aliases)
    layout = dcp_layout.allocate(run.dst, target.tensors.values(), options.files)
    plan = plan_copy(source, layout, target.origin, frame_of=dcp_layout.archive_frame)
    edits = dtype_edits(source.config, options.dtype) if was_cast else []
    restorable = source.format == "huggingface" and not (was_cast or prefix or view.wrappers)
    order = list(source.tensors) if restorable else list(target.tensors)
    job = Job(
        plan,
        source,
        _sidecars(run, source.root, [sidecar.name for sidecar in source.sidecars], edits),
        options.fingerprint(),
        lambda outcome: _dcp_manifest(source, layout, target, outcome, order, restorable),
        markers=[(METADATA, dcp_layout.metadata_bytes(layout, target.aliases))],
    )
    run.execute(job, written)


def _dcp_manifest(
    source: Catalog, layout: Catalog, target: _Target, outcome: Outcome, order: list[str], restorable: bool
) -> dict[str, Any]:
    """The manifest of a DCP; names are in the order of the source, which a way back needs."""
    files = {name: index for index, name in enumerate(layout.files)}
    shards = {name: index for index, name in enumerate(source.files)}
    rows: dict[str, Any] = {}
    for name in [*order, *(name for name in target.aliases if name not in order)]:
        stored = target.aliases.get(name, name)
        entry = layout.tensors[stored]
        row = {
            "dtype": entry.dtype.name,
            "shape": entry.shape,
            "digest": outcome.digests[stored],
            "file": files[entry.chunks[0].file],
        }
        if stored != name:
            row["tied_to"] = stored
        if restorable and name in source.tensors:
            row["origin"] = shards[source.tensors[name].chunks[0].file]
        rows[name] = row
    origin = huggingface_layout.remember(source) if restorable else None
    return _manifest("dcp", origin, rows)


def _manifest(kind: str, origin: dict[str, Any] | None, tensors: dict[str, Any]) -> dict[str, Any]:
    layout = {"tp": 1, "pp": 1, "dp_shard": 1, "rank_order": "pp,dp,tp", "stages": None}
    return {
        "ckptx": SCHEMA,
        "tool": __version__,
        "format": kind,
        "layout": layout,
        "origin": origin,
        "tensors": tensors,
    }


def _to_huggingface(run: _Conversion) -> None:
    source, options, report = run.source, run.options, run.report
    if source.format == "huggingface":
        raise UsageError(f"{source.root}: is a safetensors checkpoint already; convert hf2dcp turns it into a DCP")
    base = _open_base(options)
    config = base.config if base is not None else source.config
    if config is None and options.base != "none":
        raise InputError(
            f"{source.root}: has no config.json, which names the architecture and its ties; pass --base HF, the "
            "checkpoint it was trained from, or --base none to write the tensors alone"
        )
    if options.base == "none":
        config = None
        report.warnings.append("--base none: no config, ties were not resolved and no prefix was looked for")
    view, decisions = _view(run, config, options.prefix)
    _drop_training_state(run, view)
    memory = _remembered(run, view) if base is None and config is not None else None
    if memory is not None:
        target = _Target(
            {name: entry._replace(name=name) for name, (entry, _) in memory.items()},
            {name: entry.name for name, (entry, _) in memory.items()},
            {},
        )
        was_cast = _cast(run, view, target, None)
        assert source.manifest is not None
        layout = huggingface_layout.restore(run.dst, source.manifest["origin"], memory)
    else:
        # Of names that share bytes a safetensors file holds one: the source, as `save_pretrained` writes it.
        tied = "drop" if options.tied == "auto" else options.tied
        target = _share(view, decisions, tied, aliases_possible=False)
        was_cast = _cast(run, view, target, base)
        layout = huggingface_layout.allocate(run.dst, target.tensors.values(), options.max_shard_size)
    written = _mark_shared(run, view, target, decisions)
    plan = plan_copy(source, layout.catalog, target.origin, prologues=layout.prologues)
    edits = dtype_edits(config, options.dtype) if was_cast else []
    if memory is None and view.architecture is not None and config is not None:
        edits += _untie_edits(run, view, config, decisions)
    root = base.root if base is not None else source.root
    carried = [] if options.base == "none" else [sidecar.name for sidecar in (base or source).sidecars]
    job = Job(
        plan,
        source,
        _sidecars(run, root, carried, edits),
        options.fingerprint(),
        lambda outcome: _manifest("huggingface", None, _tensor_rows(layout.catalog, outcome)),
        lambda tree, outcome: _check_written(tree, layout.catalog, outcome, memory and source.manifest),
        [(layout.index_name, layout.index_text.encode())] if layout.index_text is not None else [],
    )
    run.execute(job, written)


def _untie_edits(
    run: _Conversion, view: ModelView, config: dict[str, Any], decisions: list[TieDecision]
) -> list[dict[str, Any]]:
    """Edits that stop the config from calling different tensors tied."""
    assert view.architecture is not None
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


def _open_base(options: ConvertOptions) -> Catalog | None:
    """The checkpoint whose config and sidecars the output gets."""
    if options.base in (None, "none"):
        return None
    root = resolve(str(options.base), revision=options.revision, token=options.token, cache_dir=options.cache_dir)
    if root.is_dir() and (root / "config.json").is_file():
        try:
            base = open_checkpoint(root)
        except InputError:
            # Config and tokenizer alone are a base too.
            base = Catalog(root, "huggingface", {}, config=read_json(root / "config.json"))
            base.sidecars = look_around(root, frozenset()).carried
    else:
        base = open_checkpoint(root)
    if base.config is None:
        raise InputError(f"{base.root}: has no config.json; --base needs an HF checkpoint")
    if base.format == "dcp":
        raise UnsupportedError(f"{base.root}: is a DCP; --base needs an HF checkpoint")
    return base


def _drop_training_state(run: _Conversion, view: ModelView) -> None:
    """HF holds the model alone; what else there is goes into the ledger by name and into one line of the summary."""
    report, source = run.report, run.source
    report.dropped.extend({"name": name, "reason": "optimizer state is not converted to HF"} for name in view.optimizer)
    report.dropped.extend({"name": name, "reason": "training state is not converted to HF"} for name in view.other)
    report.details["optimizer"] = {"tensors": len(view.optimizer), "bytes": view.nbytes(view.optimizer)}
    report.details["objects"] = {
        "count": len(source.objects),
        "bytes": sum(entry.nbytes for entry in source.objects.values()),
    }
    if view.optimizer or view.other or source.objects:
        report.warnings.append(
            f"not converted: {len(view.optimizer)} optimizer tensors ({human_bytes(view.nbytes(view.optimizer))}), "
            f"{len(view.other)} other tensors, {len(source.objects)} pickled objects"
        )
    if not view.tensors:
        raise InputError(f"{source.root}: holds no model tensors; look at its names with `ckptx inspect --tensors`")


def _remembered(run: _Conversion, view: ModelView) -> dict[str, tuple[TensorEntry, int]] | None:
    """Name -> entry and index of the original file, when the manifest describes this very DCP and nothing changes."""
    manifest, options = run.source.manifest, run.options
    if manifest is None or manifest.get("format") != "dcp" or manifest.get("origin") is None:
        return None
    if not _is_of_this_metadata(run.source, manifest):
        run.report.warnings.append("ckptx.json describes another .metadata; ignored")
        return None
    if options.dtype != "auto" or options.max_shard_size_given or view.prefix or options.tied != "auto":
        return None
    remembered = {}
    for name, row in manifest["tensors"].items():
        entry = view.tensors.get(row.get("tied_to", name))
        if entry is None or (entry.dtype.name, list(entry.shape)) != (row["dtype"], row["shape"]):
            return None
        if "origin" in row:
            remembered[name] = (entry, row["origin"])
    known = set(manifest["tensors"])
    return remembered if all(name in known for name in view.tensors) else None


def _is_of_this_metadata(source: Catalog, manifest: dict[str, Any]) -> bool:
    """True when nobody saved another checkpoint into the directory since."""
    row = manifest["files"].get(METADATA)
    data = (source.root / METADATA).read_bytes() if row is not None else b""
    return row is not None and row == {"bytes": len(data), "digest": digest_bytes(data)}


def _tensor_rows(layout: Catalog, outcome: Outcome) -> dict[str, Any]:
    files = {name: index for index, name in enumerate(layout.files)}
    return {
        name: {
            "dtype": entry.dtype.name,
            "shape": entry.shape,
            "digest": outcome.digests[name],
            "file": files[entry.chunks[0].file],
        }
        for name, entry in layout.tensors.items()
    }


def _check_written(tree: Path, layout: Catalog, outcome: Outcome, manifest: dict[str, Any] | None) -> None:
    """Reads the headers back, and holds the bytes read against the digests taken when the DCP was written."""
    with FilePool(tree) as files:
        for name in layout.files:
            for tensor in read_header(files, name).tensors:
                entry = layout.tensors[tensor.name]
                if (tensor.dtype, tensor.shape, name) != (entry.dtype, entry.shape, entry.chunks[0].file):
                    raise Defect(f'{name}: header of "{tensor.name}" is not what was planned; defect of ckptx')
    for name, row in (manifest or {"tensors": {}})["tensors"].items():
        if name in outcome.digests and outcome.digests[name] != row["digest"]:
            raise InputError(
                f'tensor "{name}": digest {outcome.digests[name]}, ckptx.json records {row["digest"]}; the bytes '
                "changed since they were converted, restore them from a copy"
            )
