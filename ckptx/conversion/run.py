"""One conversion under way: what both directions share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptx.architecture.tied import TieDecision
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import TensorEntry
from ckptx.counting import leaders_of, parameters_decided
from ckptx.errors import Defect, InputError
from ckptx.fit import fit_of
from ckptx.formats.hf.reader import read_json
from ckptx.formats.links import leading_out
from ckptx.formats.sidecars import MANIFEST, QUANTIZATION_FILES
from ckptx.mapping.config import edited_config
from ckptx.options import ConvertOptions
from ckptx.publishing.output_place import free_space
from ckptx.publishing.publish import Job, manifest_size, publish
from ckptx.publishing.rendezvous import Rendezvous
from ckptx.publishing.replacing import refuse_foreign
from ckptx.report.report import Report, count_dtypes, counted, human_bytes
from ckptx.storage.files import FilePool
from ckptx.view import ModelView, compare_replicas, decide_ties, locate_payloads, tie_rows, view_model

_NAMED_LINKS = 5
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Conversion:
    """Source, target, options and report of one conversion.

    Attributes:
        ranks: The other processes that make the same output.
        beside: Other checkpoints that the output is made from: a base.
        shared: Names on disk whose bytes a tied name stands for; they need not be written.
        accountable: Names on disk of the tensors that must all end somewhere.
        tied: Name on disk -> a name for the tensor it is, the same for all names that were found to be one tensor.
    """

    source: Catalog
    files: FilePool
    dst: Path
    options: ConvertOptions
    report: Report
    on_progress: Progress
    ranks: Rendezvous | None = None
    beside: list[Catalog] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)
    accountable: tuple[str, ...] = ()
    tied: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.accountable = tuple(self.source.tensors)

    def view(self, config: dict[str, Any] | None, prefix: str | None) -> tuple[ModelView, list[TieDecision]]:
        """Views the source as a model, decides its ties, and reports both."""
        options, report = self.options, self.report
        view = view_model(self.source, config=config, prefix=prefix, trust_remote_code=options.trust_remote_code)
        report.warnings.extend(self.source.notes)
        locate_payloads(view, self.files, later=not options.dry_run)
        compare_replicas(view.catalog, self.files)
        self.source = view.catalog
        missing: list[str] | None = [] if options.allow_misfit else None
        decisions = decide_ties(view, self.files, tie_missing=options.tie_missing, accepted=missing)
        report.warnings.extend(missing or ())
        report.ties = tie_rows(decisions)
        leaders = leaders_of(decisions)
        report.details["parameters"] = parameters_decided(view, leaders)
        self.tied = {view.tensors[name].name: leader for name, leader in leaders.items() if name in view.tensors}
        report.warnings.extend(
            f"declared tied, but not: {decision.evidence}; both are kept"
            for decision in decisions
            if decision.declared and decision.action == "keep-both"
        )
        architecture = view.architecture
        report.details["architecture"] = None
        if architecture is not None:
            report.details["architecture"] = {"class": architecture.class_name, "known_from": architecture.origin}
        if architecture is None and view.config is not None:
            report.warnings.append("config.json names no architecture: ties are unknown, tensors are taken as they are")
        if view.prefix:
            report.details["prefix"] = view.prefix
        if view.unknown and architecture is not None:
            report.details["unknown"] = view.unknown
            report.warnings.append(
                f"{counted(len(view.unknown), 'tensor')} unknown to {architecture.class_name}, passed through: "
                f'"{view.unknown[0]}"{" and more" if len(view.unknown) > 1 else ""}'
            )
        self._hold_against_config(view)
        return view, decisions

    def _hold_against_config(self, view: ModelView) -> None:
        """Names and shapes against the config, and what became of it in the report.

        Raises:
            InputError: They do not fit, and nobody said that they may not.
        """
        if view.config is None or view.architecture is None:
            return
        fit = fit_of(view)
        self.report.details["fit"] = fit.to_dict()
        if not fit.misfits:
            return
        said = fit.summary(str(self.source.root))
        if not self.options.allow_misfit:
            raise InputError(
                f"{said}; copy what is missing, give the config that it was trained with (--base), or pass "
                "--allow-misfit to take it as it is"
            )
        self.report.warnings.append(said)

    def note_wrappers(self, view: ModelView, *, kept: bool = False) -> None:
        """Says what became of the wrappers in names."""
        done = "kept in" if kept else "removed from"
        self.report.warnings.extend(
            f'wrapper "{wrapper}." {done} {counted(count, "name")}' for wrapper, count in view.wrappers.items()
        )

    def drop_training_state(self, view: ModelView, reason: str) -> None:
        """Enters what is not the model into the ledger by name, and into one line of the summary."""
        report, objects = self.report, self.source.objects
        report.dropped.extend({"name": name, "reason": f"optimizer state {reason}"} for name in view.optimizer)
        report.dropped.extend({"name": name, "reason": f"training state {reason}"} for name in view.other)
        report.details["optimizer"] = {"tensors": len(view.optimizer), "bytes": view.nbytes(view.optimizer)}
        report.details["objects"] = {"count": len(objects), "bytes": sum(entry.nbytes for entry in objects.values())}
        if view.optimizer or view.other or objects:
            report.warnings.append(
                f"not converted: {counted(len(view.optimizer), 'optimizer tensor')} "
                f"({human_bytes(view.nbytes(view.optimizer))}), {counted(len(view.other), 'other tensor')}, "
                f"{counted(len(objects), 'pickled object')}"
            )

    def share_ledger(self, names: Iterable[str], view: ModelView) -> None:
        """Enters tied names into the ledger."""
        self.shared = {view.tensors[name].name for name in names if name in view.tensors}

    def carry(self, root: Path, names: Iterable[str], edits: list[dict[str, Any]]) -> dict[str, Path | bytes]:
        """The sidecars of the output; config.json is written anew only when something in it changes."""
        if any(edit["key"].endswith("quantization_config") for edit in edits):
            left = [name for name in names if name in QUANTIZATION_FILES]
            names = [name for name in names if name not in left]
            self.report.warnings.extend(f"{name}: left out, it tells how a base is quantised" for name in left)
        sidecars: dict[str, Path | bytes] = {name: root / name for name in names}
        outside = [f"{name} -> {real}" for name, real in leading_out(root, sidecars)]
        if outside:
            more = f" and {len(outside) - _NAMED_LINKS} more" if len(outside) > _NAMED_LINKS else ""
            self.report.warnings.append(
                f"carried through {counted(len(outside), 'link')} out of the checkpoint: "
                f"{', '.join(outside[:_NAMED_LINKS])}{more}"
            )
        if edits and "config.json" in sidecars:
            sidecars["config.json"] = edited_config(read_json(root / "config.json"), edits)
            self.report.edits = edits
        return sidecars

    def execute(self, job: Job, written: Iterable[str]) -> None:
        """Publishes the job, or says what it would do.

        Args:
            job: What to make.
            written: Names on disk of the source tensors that the job writes.
        """
        report, options = self.report, self.options
        steps = {step.target.name: step for step in job.plan.steps() if step.framed}
        on_disk = set(self.accountable)
        stored = [self._bytes_of(step.source, on_disk) for step in steps.values()]
        shown = [*steps.values(), *(steps[name] for name in report.aliases.values())]
        report.dtypes = {
            "before": count_dtypes(step.source for step in shown),
            "after": count_dtypes(step.target for step in shown),
        }
        report.tensors = len(stored) + len(report.aliases)
        objects = sum(not step.framed for step in job.plan.steps())
        if objects:
            report.details["objects"] = {"count": objects, "carried": True}
        report.bytes_read, report.bytes_written = job.plan.bytes_read, job.nbytes
        self._settle_ledger(set(written), stored)
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
            ranks=self.ranks,
            beside=self.beside,
            may_replace=refuse_foreign,
        )
        if outcome is None:
            report.warnings.append(f"{self.dst} is complete already; nothing to resume")
            report.bytes_read = report.bytes_written = 0
            return
        report.bytes_read = outcome.bytes_read
        manifest = (self.dst / MANIFEST).stat().st_size
        report.bytes_written = outcome.bytes_written + job.nbytes - total + manifest
        if outcome.unrecorded:
            said = counted(outcome.unrecorded, "archive")
            report.warnings.append(f"without a recorded CRC-32: {said}, whose bytes could not be checked")

    def _bytes_of(self, entry: TensorEntry, on_disk: set[str]) -> object:
        """A key for the bytes that an entry of the source stands for: equal for the names of one tensor."""
        if entry.name in self.tied:
            return self.tied[entry.name]
        # An entry that was put together may begin where another begins that was taken out of the same tensor.
        return entry.chunks[0][1:3] if entry.numel and entry.name in on_disk else entry.name

    def _settle_ledger(self, written: set[str], stored: list[object]) -> None:
        """Every source tensor is written, an alias, or dropped by a named rule; every name of the target has its bytes.

        Args:
            written: Names on disk of the source tensors that the target is made of.
            stored: For each tensor that is stored, a key for the bytes it is read from.
        """
        report = self.report
        dropped = {row["name"] for row in report.dropped}
        left = set(self.accountable)
        ends = {}
        for end, names in (("written", written), ("aliases", self.shared), ("dropped", dropped)):
            ends[end] = len(left & names)
            left -= names
        if left:
            raise Defect(f'tensor "{min(left)}" and {len(left) - 1} more would be lost; please report it')
        report.details["ledger"] = {
            "source": len(self.accountable),
            **ends,
            "target": {
                "tensors": report.tensors,
                "stored": len(set(stored)),
                "copies": len(stored) - len(set(stored)),
                "aliases": len(report.aliases),
            },
        }

    def _describe(self, job: Job) -> None:
        """Fills the report of a dry run."""
        sizes = [(file.name, file.nbytes, file.blocks) for file in job.plan.files]
        sizes += [(name, len(data), 0) for name, data in job.markers]
        sizes += [(name, nbytes, 0) for name, nbytes in job.sidecar_sizes().items()]
        sizes.append((MANIFEST, manifest_size(job), 0))
        files = [{"name": name, "bytes": nbytes, "tensors": tensors} for name, nbytes, tensors in sizes]
        self.report.bytes_written = needed = sum(nbytes for _, nbytes, _ in sizes)
        free = free_space(self.dst)
        self.report.details |= {"dry_run": True, "files": files, "memory": self.options.max_memory, "free_space": free}
        if free < needed:
            self.report.warnings.append(
                f"not enough space: needs {human_bytes(needed)}, {human_bytes(free)} free at {self.dst}"
            )
