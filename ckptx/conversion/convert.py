"""`convert hf2dcp` and `convert dcp2hf`: the difference between two catalogs, carried out.

Both directions are the same five steps: view the source as a model, decide ties, say what the target holds, lay it out,
publish. They differ in what an alias may be (a DCP points twice at the same bytes, safetensors cannot) and
in what is left behind (HF holds no optimizer state).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckptx.conversion.config import home_beside, home_of
from ckptx.conversion.run import Conversion, Progress
from ckptx.conversion.start import started
from ckptx.conversion.to_dcp import to_dcp
from ckptx.conversion.to_huggingface import to_huggingface
from ckptx.errors import UsageError
from ckptx.options import ConvertArguments, ConvertOptions
from ckptx.report.report import Report

if TYPE_CHECKING:  # Python 3.10 has it there alone
    from typing_extensions import Unpack


def convert(
    direction: str,
    src: str | Path,
    dst: str | Path,
    *,
    on_progress: Progress = lambda done, total: None,
    report: Report | None = None,
    **options: Unpack[ConvertArguments],
) -> Report:
    """Converts a checkpoint.

    Args:
        direction: "hf2dcp" or "dcp2hf".
        src: A directory, file, index, or Hub id.
        dst: The directory to write; absent or empty unless `overwrite`.
        on_progress: Called now and then with bytes written and bytes in all.
        report: Filled while working, so that a caller has it even when an error is raised.
        **options: The options of the command line, see `ConvertArguments`.

    Returns:
        The report that `--json` prints.

    Raises:
        CkptxError: One subclass for each exit code from 2 to 7; nothing was published.
    """
    if direction not in ("hf2dcp", "dcp2hf"):
        raise UsageError(f'convert: direction "{direction}", needed hf2dcp or dcp2hf')
    report = report or Report(f"convert {direction}")
    settings = ConvertOptions.parse(direction, options)
    return started(src, dst, settings, report, on_progress, _to_dcp if direction == "hf2dcp" else _to_huggingface)


def _to_dcp(run: Conversion) -> None:
    if run.source.format == "dcp":
        raise UsageError(
            f"{run.source.root}: is a DCP already; convert dcp2hf turns it into safetensors, reshard cuts it anew"
        )
    to_dcp(run, home_beside(run), cut=run.options.is_cut)


def _to_huggingface(run: Conversion) -> None:
    if run.source.format == "huggingface":
        raise UsageError(f"{run.source.root}: is a safetensors checkpoint already; convert hf2dcp turns it into a DCP")
    to_huggingface(run, home_of(run, needs_config=False))
