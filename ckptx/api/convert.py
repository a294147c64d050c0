"""`convert hf2dcp` and `convert dcp2hf`: the same steps with another output; see pipeline.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckptx.conversion.outputs.dcp import DcpFormat
from ckptx.conversion.outputs.huggingface import HuggingFaceFormat
from ckptx.conversion.outputs.output_format import OutputFormat
from ckptx.conversion.pipeline import convert_opened
from ckptx.conversion.steps.base import Need
from ckptx.conversion.steps.opening import Progress, opened
from ckptx.errors import UsageError
from ckptx.options import ConvertArguments, ConvertOptions
from ckptx.report.documents.conversion import ConversionReport
from ckptx.report.report import Log, Stopwatch

if TYPE_CHECKING:  # Python 3.10 has it there alone
    from typing_extensions import Unpack

_ALREADY = {
    "hf2dcp": "is a DCP already; convert dcp2hf turns it into safetensors, reshard cuts it anew",
    "dcp2hf": "is a safetensors checkpoint already; convert hf2dcp turns it into a DCP",
}


def convert(
    direction: str,
    src: str | Path,
    dst: str | Path,
    *,
    on_progress: Progress = lambda done, total: None,
    log: Log | None = None,
    report_file: str | Path | None = None,
    **options: Unpack[ConvertArguments],
) -> ConversionReport:
    """Converts a checkpoint.

    Args:
        direction: "hf2dcp" or "dcp2hf".
        src: A directory, file, index, or Hub id.
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
    if direction not in _ALREADY:
        raise UsageError(f'convert: direction "{direction}", needed hf2dcp or dcp2hf')
    stopwatch, settings = Stopwatch(), ConvertOptions.parse(direction, options)
    output: OutputFormat = DcpFormat(settings.is_cut) if direction == "hf2dcp" else HuggingFaceFormat()
    need: Need = "none" if direction == "hf2dcp" else "unless remembered"
    log = log or Log()
    with opened(src, dst, settings, report_file) as ready:
        log(ready)
        if ready.source.form.written_by == direction:
            raise UsageError(f"{ready.source.root}: {_ALREADY[direction]}")
        return stopwatch.stop(convert_opened(f"convert {direction}", ready, output, need, log, on_progress))
