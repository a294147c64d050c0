"""`reshard`: a checkpoint of any layout, cut for another one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckptx.conversion.config import home_of
from ckptx.conversion.run import Conversion, Progress
from ckptx.conversion.start import started
from ckptx.conversion.to_dcp import to_dcp
from ckptx.conversion.to_sharded import to_sharded
from ckptx.options import ConvertArguments, ConvertOptions
from ckptx.report.report import Report

if TYPE_CHECKING:  # Python 3.10 has it there alone
    from typing_extensions import Unpack


def reshard(
    src: str | Path,
    dst: str | Path,
    *,
    on_progress: Progress = lambda done, total: None,
    report: Report | None = None,
    **options: Unpack[ConvertArguments],
) -> Report:
    """Cuts a checkpoint for a mesh of TP x PP x FSDP, so that rank r reads its own files.

    Args:
        src: A directory, file, index, or Hub id: HF, DCP or sharded safetensors, in any layout.
        dst: The directory to write; absent or empty unless `overwrite`.
        on_progress: Called now and then with bytes written and bytes in all.
        report: Filled while working, so that a caller has it even when an error is raised.
        **options: The options of the command line, see `ConvertArguments`.

    Returns:
        The report that `--json` prints.

    Raises:
        CkptxError: One subclass for each exit code from 2 to 7; nothing was published.
    """
    report = report or Report("reshard")
    settings = ConvertOptions.parse("reshard", options)

    def work(run: Conversion) -> None:
        to = settings.to or _family(run.source.format)
        settings.refuse_what_source_lacks(run.source.format, to)
        home = home_of(run)
        if to == "dcp":
            to_dcp(run, home, cut=True)
        else:
            settings.refuse_what_safetensors_lack()
            to_sharded(run, home)

    return started(src, dst, settings, report, on_progress, work)


def _family(format: str) -> str:
    """What a checkpoint of this format becomes unless `--to` says otherwise."""
    return "dcp" if format == "dcp" else "safetensors"
