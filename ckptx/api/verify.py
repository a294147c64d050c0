"""`ckptx.verify`: the bytes of two checkpoints, or what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from ckptx.errors import UsageError
from ckptx.formats.hf.hub import resolve
from ckptx.report.documents.comparison import VerifyReport
from ckptx.report.documents.running import RunReport
from ckptx.runtime.parity.arguments import BytesArguments, RunArguments
from ckptx.untrusted.remote_name import refuse_remote

if TYPE_CHECKING:  # Python 3.10 has it there alone
    from typing_extensions import Unpack


@overload
def verify(
    reference: str | Path,
    checkpoint: str | Path,
    *,
    run: Literal[False] = False,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | None = None,
    **options: Unpack[BytesArguments],
) -> VerifyReport: ...
@overload
def verify(
    reference: str | Path,
    checkpoint: str | Path,
    *,
    run: Literal[True],
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | None = None,
    **options: Unpack[RunArguments],
) -> RunReport: ...
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
        **options: See `BytesArguments`, or with `run` `RunArguments`.

    Raises:
        UsageError: An option has no meaning here.
        CkptxError: As these do.
    """
    given = {name: value for name, value in options.items() if value is not None}
    _refuse_others(given, run)
    refuse_remote(reference, checkpoint, cache_dir, given.get("tp_plan"))
    paths = [
        resolve(str(path), revision=revision, token=token, cache_dir=cache_dir) for path in (reference, checkpoint)
    ]
    if run:
        from ckptx.api.verify_run import verify_running

        return verify_running(paths[0], paths[1], **given)
    from ckptx.comparison.contents import verify as verify_bits

    return verify_bits(paths[0], paths[1], **given)


def _refuse_others(given: dict[str, Any], run: bool) -> None:
    """Raises for an option that would be ignored."""
    for name in sorted(given.keys() - (_of(RunArguments) if run else _of(BytesArguments))):
        said = f"--{name.replace('_', '-')}"
        if name == "dtype":
            raise UsageError(f"{said}: is about comparing bytes; with --run, --compute-dtype says what to compute in")
        if name in _of(RunArguments):
            raise UsageError(f"{said}: is about running the models, needed --run with it")
        raise UsageError(f"{said}: has no meaning for verify{' --run' if run else ''}")


def _of(arguments: type) -> set[str]:
    return {*arguments.__annotations__}
