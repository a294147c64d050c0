"""`ckptx.verify`: the bytes of two checkpoints, or what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptx.report.report import Report


def verify(reference: Path, checkpoint: Path, *, run: bool = False, **options: Any) -> Report:
    """Compares two checkpoints; `exit` of the report is 1 when they differ.

    Args:
        reference: What the other should be equal to.
        checkpoint: What to check.
        run: Compare what models compute with them, not only their bytes.
        **options: Those of `ckptx.verification.bits.verify`, or with `run` of
            `ckptx.verification.running.verify_running`.

    Raises:
        CkptxError: As these do.
    """
    if run:
        from ckptx.verification.running import verify_running

        return verify_running(Path(reference), Path(checkpoint), **options)
    from ckptx.verification.bits import verify as verify_bits

    return verify_bits(Path(reference), Path(checkpoint), **options)
