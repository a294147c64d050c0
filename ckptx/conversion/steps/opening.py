"""What every conversion begins with: the source opened, the target free."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ckptx.catalog.catalog import Catalog
from ckptx.errors import OutputError, UnsupportedError
from ckptx.formats.hf.hub import resolve
from ckptx.formats.rank_names import is_file_of_many
from ckptx.formats.registry import open_checkpoint
from ckptx.options.conversion import ConversionOptions
from ckptx.processes.peers import PeerProcesses
from ckptx.publishing.output_place import refuse_existing, refuse_overlap, refuse_unreachable
from ckptx.publishing.replacing import refuse_files_of, refuse_foreign
from ckptx.publishing.report_file import refuse_place
from ckptx.storage.interface import SourceFiles

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """One conversion, before anything is known of the model.

    Attributes:
        source: The checkpoint, its headers read.
        files: Its files, open as long as the conversion lasts.
        dst: The directory to write.
        options: What was asked for.
        processes: The others that make the same output; None for one on its own.
        notes: What the user should know.
    """

    source: Catalog
    files: SourceFiles
    dst: Path
    options: ConversionOptions
    processes: PeerProcesses | None = None
    notes: tuple[str, ...] = ()


@contextmanager
def open_source(src: str | Path, dst: str | Path, options: ConversionOptions) -> Iterator[SourceCheckpoint]:
    """Opens the source, with all processes of the run together.

    Raises:
        InputError, UnsupportedError: The source cannot be opened.
        OutputError: The target is taken, or a file of the source lies in it.
    """
    processes = PeerProcesses.from_environment()
    with processes.session() if processes is not None else nullcontext():
        dst = Path(dst)
        if options.report_file is not None and (processes is None or not processes.rank):
            refuse_place(options.report_file)
        path = resolve(str(src), revision=options.revision, token=options.token, cache_dir=options.cache_dir)
        refuse_unreachable(dst)
        refuse_overlap(path, dst)
        notes = () if options.resume else _refuse_taken(dst, options)
        source = open_checkpoint(path)
        if not options.allow_config_mismatch:
            _refuse_one_of_many(source)
        refuse_files_of(source, dst)
        _logger.info(
            "%s: %s, %d tensors, %d objects, %d files", source.root, source.format, len(source.tensors),
            len(source.objects), len(source.files),
        )  # fmt: skip
        with source.source.open(source.identities) as files:
            yield SourceCheckpoint(source, files, dst, options, processes, notes)


def _refuse_one_of_many(source: Catalog) -> None:
    """Refuse a file that says that it is one of several, where no index says otherwise."""
    if len(source.files) != 1 or any(name.endswith(".index.json") for name in source.verbatim):
        return
    (name,) = source.files
    count = None if source.form.is_of_training or source.form.has_manifest else is_file_of_many(name)
    if count is not None:
        raise UnsupportedError(
            f"{source.root / name}: is one file of {count} of a checkpoint; pass the directory with all of them and "
            "their index, or --allow-config-mismatch to convert this file alone"
        )


def _refuse_taken(dst: Path, options: ConversionOptions) -> tuple[str, ...]:
    """Refuses a target that cannot be written; a dry run only says so."""
    try:
        refuse_existing(dst, options.overwrite)
        refuse_foreign(dst)
    except OutputError as error:
        if not options.dry_run:
            raise
        return (f"nothing could be written there: {error}",)
    return ()
