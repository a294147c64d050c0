"""`convert hf2dcp` and `convert dcp2hf`: the difference between two catalogs, carried out.

Both directions are the same five steps: view the source as a model, decide ties, say what the target holds, lay it out,
publish. They differ in what an alias may be (a DCP points twice at the same bytes, safetensors cannot) and
in what is left behind (HF holds no optimizer state).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptx.conversion.run import Conversion, Progress
from ckptx.conversion.to_dcp import to_dcp
from ckptx.conversion.to_huggingface import to_huggingface
from ckptx.errors import UsageError
from ckptx.formats.hub import resolve
from ckptx.formats.registry import open_checkpoint
from ckptx.options import ConvertOptions
from ckptx.report.report import Report
from ckptx.staging import refuse_existing, refuse_overlap
from ckptx.storage import FilePool


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
    with FilePool(source.root) as files:
        run = to_dcp if direction == "hf2dcp" else to_huggingface
        run(Conversion(source, files, Path(dst), settings, report, on_progress))
    return report.finish()
