"""First step of every conversion: open the source and check that the target can be written."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ckptx.catalog.catalog import Catalog
from ckptx.errors import OutputError, ReportTargetError, UnsupportedError
from ckptx.formats.hf.hub import resolve_source
from ckptx.formats.rank_names import file_count_from_name
from ckptx.formats.registry import open_checkpoint
from ckptx.options.conversion import ConversionOptions
from ckptx.processes.peers import PeerProcesses
from ckptx.publishing.output_checks import refuse_existing, refuse_overlap, refuse_unreachable
from ckptx.publishing.overwrite_checks import refuse_input_files, refuse_unrelated_files
from ckptx.publishing.report_file import check_report_path
from ckptx.storage.interface import SourceFiles
from ckptx.wording import counted

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """Opened source checkpoint of a conversion.

    Attributes:
        source: Catalog of the source, from its headers.
        files: Files of the source, open until the conversion ends.
        dst: Directory to write.
        options: Options of the conversion.
        processes: Other processes that write the same output; None for a single process.
        notes: Notes for the user.
    """

    source: Catalog
    files: SourceFiles
    dst: Path
    options: ConversionOptions
    processes: PeerProcesses | None = None
    notes: tuple[str, ...] = ()


@contextmanager
def open_source(src: str | Path, dst: str | Path, options: ConversionOptions) -> Iterator[SourceCheckpoint]:
    """Open the source, on all processes of the run.

    Raises:
        InputError, UnsupportedError: The source cannot be opened.
        OutputError: The target already exists, overlaps the source, or is the report file. A dry run only notes that it
            exists.
    """
    processes = PeerProcesses.from_environment(options.timeout)
    with processes.session() if processes is not None else nullcontext():
        if not str(dst):  # an unset variable of a shell, not the current directory
            raise OutputError('"": the path is empty; choose a DST')
        dst = Path(dst)
        if options.report_file is not None and (processes is None or not processes.rank):
            check_report_path(options.report_file)
            if os.path.realpath(options.report_file) == os.path.realpath(dst):
                raise ReportTargetError(f"{options.report_file}: is the report and DST; choose another report file")
        path = resolve_source(str(src), revision=options.revision, token=options.token, cache_dir=options.cache_dir)
        refuse_unreachable(dst)
        refuse_overlap(path, dst)
        notes = () if options.resume else _refuse_existing_target(dst, options)
        source = open_checkpoint(path)
        if source.traits.is_adapter and not options.accepts_adapter:
            raise UnsupportedError(
                f"{source.location}: is an adapter, not a model; add it to its model with "
                "`ckptx merge MODEL ADAPTER DST`"
            )
        if not options.allow_config_mismatch:
            _refuse_incomplete_set(source)
        if source.traits.has_archives:
            from ckptx.formats.dcp.veomni import refuse_reordered_experts  # not needed for other formats

            refuse_reordered_experts(source)
        refuse_input_files(source, dst)
        _logger.info(
            "%s: %s, %d tensors, %d objects, %d files", source.location, source.format, len(source.tensors),
            len(source.objects), len(source.files),
        )  # fmt: skip
        with source.source.open(source.identities) as files:
            yield SourceCheckpoint(source, files, dst, options, processes, notes)


def _refuse_incomplete_set(source: Catalog) -> None:
    """Refuse a single file whose name marks it as one of several (`model-00001-of-00004`), unless an index exists."""
    if len(source.files) != 1 or any(name.endswith(".index.json") for name in source.verbatim):
        return
    (name,) = source.files
    count = None if source.traits.is_training_format or source.traits.has_manifest else file_count_from_name(name)
    if count is not None:
        raise UnsupportedError(
            f"{source.root / name}: is one of {counted(count, 'file')} of a checkpoint; pass the directory with all "
            "of them and their index, or --allow-config-mismatch to convert this file only"
        )


def _refuse_existing_target(dst: Path, options: ConversionOptions) -> tuple[str, ...]:
    """Refuse a target that cannot be written; in a dry run, return the error as a note."""
    try:
        refuse_existing(dst, options.overwrite)
        refuse_unrelated_files(dst)
    except OutputError as error:
        if not options.dry_run:
            raise
        return (f"a conversion would fail: {error}",)
    return ()
