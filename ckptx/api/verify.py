"""`ckptx.verify`: the bytes of two checkpoints, or what they compute."""

from __future__ import annotations

from ckptx.options.api import api_of_two
from ckptx.options.verify import CompareOptions, CompareRunOptions
from ckptx.report.documents.comparison import VerifyReport
from ckptx.report.documents.running import RunReport


@api_of_two(CompareOptions, CompareRunOptions, (VerifyReport, RunReport), by="run")
def verify(options: CompareOptions | CompareRunOptions) -> VerifyReport | RunReport:
    """Compare two checkpoints bit for bit, or with `run` what their models compute.

    `exit` of the report is 1 when they differ.

    Raises:
        UsageError: An option has a value it cannot have, or no meaning without another one.
        UnsupportedError: The class cannot run like that.
        EnvironmentProblem: torch or transformers are missing, or there is no such device.
        SpaceError: A run does not fit `gpu_memory`; or the reference needs more memory than it may take, and the
            message names the least.
        InputError: A checkpoint is damaged or incomplete.
    """
    if isinstance(options, CompareRunOptions):
        from ckptx.api.verify_run import verify_running

        return verify_running(options)
    from ckptx.comparison.contents import verify_bytes

    return verify_bytes(options)
