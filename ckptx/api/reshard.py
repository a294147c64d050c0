"""`reshard`: a checkpoint of any layout, cut for another one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckptx.conversion.outputs.dcp import DcpFormat
from ckptx.conversion.outputs.output_format import OutputFormat
from ckptx.conversion.outputs.sharded import ShardedFormat
from ckptx.conversion.pipeline import convert_opened
from ckptx.conversion.steps.opening import Progress, opened
from ckptx.options import ConvertArguments, ConvertOptions
from ckptx.report.documents.conversion import ConversionReport
from ckptx.report.report import Log, Stopwatch

if TYPE_CHECKING:  # Python 3.10 has it there alone
    from typing_extensions import Unpack


def reshard(
    src: str | Path,
    dst: str | Path,
    *,
    on_progress: Progress = lambda done, total: None,
    log: Log | None = None,
    report_file: str | Path | None = None,
    **options: Unpack[ConvertArguments],
) -> ConversionReport:
    """Cuts a checkpoint for a mesh of TP x PP x FSDP, so that rank r reads its own files.

    Args:
        src: A directory, file, index, or Hub id: HF, DCP or sharded safetensors, in any layout.
        dst: The directory to write; absent or empty unless `overwrite`.
        on_progress: Called now and then with bytes written and bytes in all.
        log: Has what the user should know, when an error is raised, too.
        report_file: Where the caller will write the report, if anywhere; refused before the work if that cannot be.
        **options: The options of the command line, see `ConvertArguments`.

    Returns:
        The report that `--json` prints.

    Raises:
        CkptxError: One subclass for each exit code from 2 to 7; nothing was published.
    """
    stopwatch, settings = Stopwatch(), ConvertOptions.parse("reshard", options)
    log = log or Log()
    with opened(src, dst, settings, report_file) as ready:
        log(ready)
        form = ready.source.form
        to = settings.to or form.family
        settings.refuse_what_source_lacks(form, to)
        output: OutputFormat = DcpFormat(is_cut=True)
        if to == "safetensors":
            settings.refuse_what_safetensors_lack()
            output = ShardedFormat()
        return stopwatch.stop(convert_opened("reshard", ready, output, "config", log, on_progress))
