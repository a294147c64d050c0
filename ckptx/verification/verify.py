"""`ckptx.verify`: the bytes of two checkpoints, or what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, overload

from ckptx.errors import UsageError
from ckptx.formats.hf.hub import resolve
from ckptx.report.documents import RunReport, VerifyReport

_OF_BYTES = frozenset({"dtype", "workers", "max_memory", "on_progress", "log"})
_OF_RUNNING = frozenset(
    {
        "tp", "dp_shard", "tp_plan", "device", "backend", "compute_dtype", "activation_checkpointing", "ac_scope",
        "compile", "backward", "trust_remote_code", "log",
    }
)  # fmt: skip


@overload
def verify(
    reference: str | Path, checkpoint: str | Path, *, run: Literal[False] = False, **options: Any
) -> VerifyReport: ...
@overload
def verify(reference: str | Path, checkpoint: str | Path, *, run: Literal[True], **options: Any) -> RunReport: ...
def verify(
    reference: str | Path,
    checkpoint: str | Path,
    *,
    run: bool = False,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | None = None,
    **options: Any,
) -> VerifyReport | RunReport:
    """Compares two checkpoints; `exit` of the report is 1 when they differ.

    Args:
        reference: What the other should be equal to: a directory, file, index, or Hub id.
        checkpoint: What to check.
        run: Compare what models compute with them, not only their bytes.
        revision: Branch, tag or commit of what is a Hub id.
        token: Hub token.
        cache_dir: Hub cache.
        **options: Those of `ckptx.verification.bits.verify`, or with `run` of
            `ckptx.verification.running.verify_running`; None is not given.

    Raises:
        UsageError: An option has no meaning here.
        CkptxError: As these do.
    """
    given = {name: value for name, value in options.items() if value is not None}
    _refuse_others(given, run)
    paths = [
        resolve(str(path), revision=revision, token=token, cache_dir=cache_dir) for path in (reference, checkpoint)
    ]
    if run:
        from ckptx.verification.running import verify_running

        return verify_running(paths[0], paths[1], **given)
    from ckptx.verification.bits import verify as verify_bits

    return verify_bits(paths[0], paths[1], **given)


def _refuse_others(given: dict[str, Any], run: bool) -> None:
    """Raises for an option that would be ignored."""
    for name in sorted(given.keys() - (_OF_RUNNING if run else _OF_BYTES)):
        said = f"--{name.replace('_', '-')}"
        if name == "dtype":
            raise UsageError(f"{said}: is about comparing bytes; with --run, --compute-dtype says what to compute in")
        if name in _OF_RUNNING:
            raise UsageError(f"{said}: is about running the models, needed --run with it")
        raise UsageError(f"{said}: has no meaning for verify{' --run' if run else ''}")
