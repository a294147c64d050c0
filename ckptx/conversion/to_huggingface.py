"""`convert dcp2hf`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptx.architecture.tied import TieDecision, config_edits
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import TensorEntry
from ckptx.conversion.manifest import manifest_of
from ckptx.conversion.run import Conversion
from ckptx.conversion.target import Target, cast, share
from ckptx.errors import Defect, InputError, UnsupportedError, UsageError
from ckptx.formats import huggingface_layout
from ckptx.formats.hub import resolve
from ckptx.formats.huggingface import read_header, read_json
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.sidecars import look_around
from ckptx.mapping.config import dtype_edits
from ckptx.options import ConvertOptions
from ckptx.publish import Job
from ckptx.report.report import counted, human_bytes
from ckptx.staging import refuse_overlap
from ckptx.storage import FilePool
from ckptx.transfer.executor import Outcome
from ckptx.transfer.planner import plan_copy
from ckptx.view import ModelView, manifest_beside


def to_huggingface(run: Conversion) -> None:
    """Carries out one conversion to HF.

    Raises:
        UsageError: The source is HF already.
        InputError: Nothing says which architecture it is.
        CkptxError: Whatever else is in the way.
    """
    options = run.options
    if run.source.format == "huggingface":
        raise UsageError(f"{run.source.root}: is a safetensors checkpoint already; convert hf2dcp turns it into a DCP")
    base = _open_base(options)
    if base is not None:
        refuse_overlap(base.root, run.dst)
    config = _config(run, base)
    view, decisions = run.view(config, options.prefix)
    _drop_training_state(run, view)
    memory = _remember(run, view) if base is None and config is not None else None
    if memory is not None:
        target = Target.of(memory.tensors)
        cast(run, view, target, None)
        run.share_ledger(memory.tied, view)
        layout = memory.restore(run.dst, target)
        edits: list[dict[str, Any]] = []
    else:
        target = share(run, view, decisions, aliases_possible=False)
        edits = dtype_edits(config, options.dtype) if cast(run, view, target, base) else []
        edits += _untie_edits(run, view, config, decisions)
        layout = huggingface_layout.allocate(run.dst, target.tensors.values(), options.max_shard_size)
    plan = plan_copy(run.source, layout.catalog, target.origin, prologues=layout.prologues)
    home = base if base is not None else run.source
    carried = [] if options.base == "none" else [sidecar.name for sidecar in home.sidecars]
    recorded = {} if memory is None else memory.digests
    job = Job(
        plan,
        run.source,
        run.carry(home.root, carried, edits),
        options.fingerprint(),
        lambda outcome: manifest_of("huggingface", layout.catalog, outcome.digests),
        lambda tree, outcome: _check_written(tree, layout.catalog, outcome, recorded),
        [] if layout.index_text is None else [(layout.index_name, layout.index_text.encode())],
    )
    run.execute(job, target.origin.values())


def _config(run: Conversion, base: Catalog | None) -> dict[str, Any] | None:
    """The config that says what the tensors are: of the base, else the one beside them."""
    if run.options.base == "none":
        run.report.warnings.append("--base none: no config, ties were not resolved and no prefix was looked for")
        return None
    config = base.config if base is not None else run.source.config
    if config is None:
        raise InputError(
            f"{run.source.root}: has no config.json, which names the architecture and its ties; pass --base HF, the "
            "checkpoint it was trained from, or --base none to write the tensors alone"
        )
    return config


def _untie_edits(
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


def _drop_training_state(run: Conversion, view: ModelView) -> None:
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
            f"not converted: {counted(len(view.optimizer), 'optimizer tensor')} "
            f"({human_bytes(view.nbytes(view.optimizer))}), {counted(len(view.other), 'other tensor')}, "
            f"{counted(len(source.objects), 'pickled object')}"
        )
    if not view.tensors:
        raise InputError(f"{source.root}: holds no model tensors; look at its names with `ckptx inspect --tensors`")


@dataclass(frozen=True, slots=True)
class _Memory:
    """The files an HF checkpoint had before it became this DCP.

    Attributes:
        tensors: Entry in the DCP by original name, in the order of the files.
        files: Index of the original file by name.
        digests: Recorded when the DCP was written.
        tied: Names that share the bytes of another.
        origin: What `huggingface_layout.remember` gave.
    """

    tensors: dict[str, TensorEntry]
    files: dict[str, int]
    digests: dict[str, str]
    tied: set[str]
    origin: dict[str, Any]

    def restore(self, root: Path, target: Target) -> huggingface_layout.HuggingFaceLayout:
        """The layout of the original files."""
        placed = {name: (target.tensors[name], file) for name, file in self.files.items()}
        return huggingface_layout.restore(root, self.origin, placed)


def _remember(run: Conversion, view: ModelView) -> _Memory | None:
    """What the manifest of this very DCP remembers, unless the options ask for something else."""
    options = run.options
    manifest = manifest_beside(run.source, run.report.warnings)
    asked = options.dtype != "auto" or options.max_shard_size_given or options.tied != "auto" or view.prefix
    if manifest is None or asked:
        return None
    memory = _Memory({}, {}, {}, set(), manifest["origin"])
    for name, row in manifest["tensors"].items():
        entry = view.tensors.get(row.get("tied_to", name))
        if entry is None or (entry.dtype.name, list(entry.shape)) != (row["dtype"], row["shape"]):
            return None
        if "tied_to" in row:
            memory.tied.add(name)
        if "origin" in row:
            memory.tensors[name], memory.files[name] = entry, row["origin"]
            memory.digests[name] = row["digest"]
    return memory if view.tensors.keys() <= manifest["tensors"].keys() else None


def _check_written(tree: Path, layout: Catalog, outcome: Outcome, recorded: dict[str, str]) -> None:
    """Reads the headers back, and holds the bytes read against the digests taken when the DCP was written."""
    with FilePool(tree) as files:
        for name in layout.files:
            for tensor in read_header(files, name).tensors:
                entry = layout.tensors[tensor.name]
                if (tensor.dtype, tensor.shape, name) != (entry.dtype, entry.shape, entry.chunks[0].file):
                    raise Defect(f'{name}: header of "{tensor.name}" is not what was planned; please report it')
    for name, digest in recorded.items():
        if outcome.digests[name] != digest:
            raise InputError(
                f'tensor "{name}": digest {outcome.digests[name]}, ckptx.json records {digest}; the bytes changed '
                "since they were converted, restore them from a copy"
            )
