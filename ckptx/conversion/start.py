"""What every conversion begins with: the source opened, the target free."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from ckptx.conversion.run import Conversion, Progress
from ckptx.errors import OutputError
from ckptx.formats.hf.hub import resolve
from ckptx.formats.registry import open_checkpoint
from ckptx.options import ConvertOptions
from ckptx.publishing.output_place import refuse_existing, refuse_overlap, refuse_unreachable
from ckptx.publishing.rendezvous import Rendezvous
from ckptx.publishing.replacing import refuse_files_of, refuse_foreign
from ckptx.publishing.report_file import refuse_place
from ckptx.report.report import Report
from ckptx.storage.files import FilePool


def started(
    src: str | Path,
    dst: str | Path,
    settings: ConvertOptions,
    report: Report,
    on_progress: Progress,
    work: Callable[[Conversion], None],
) -> Report:
    """Opens the source, does the work, and closes the report."""
    ranks = Rendezvous.from_environment(Path(dst))
    with ranks.session() if ranks is not None else nullcontext():
        if report.file is not None and (ranks is None or not ranks.rank):
            refuse_place(report.file)
        path = resolve(str(src), revision=settings.revision, token=settings.token, cache_dir=settings.cache_dir)
        refuse_unreachable(Path(dst))
        refuse_overlap(path, Path(dst))
        if not settings.resume:
            try:
                refuse_existing(Path(dst), settings.overwrite)
                refuse_foreign(Path(dst))
            except OutputError as error:
                if not settings.dry_run:
                    raise
                report.warnings.append(f"nothing could be written there: {error}")
        source = open_checkpoint(path)
        refuse_files_of(source, Path(dst))
        with FilePool(source.root, source.identities) as files:
            work(Conversion(source, files, Path(dst), settings, report, on_progress, ranks))
    return report.finish()
