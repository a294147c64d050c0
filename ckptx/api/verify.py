"""`verify`: comparison of two checkpoints, by their bytes or by the outputs of their models."""

from __future__ import annotations

from ckptx.options.api import two_table_api
from ckptx.options.verify import VerifyOptions, VerifyRunOptions
from ckptx.report.documents.comparison import VerifyReport
from ckptx.report.documents.verify_run import RunReport


@two_table_api(VerifyOptions, VerifyRunOptions, (VerifyReport, RunReport), selector="run")
def verify(options: VerifyOptions | VerifyRunOptions) -> VerifyReport | RunReport:
    """Compare two checkpoints bit for bit, and with `run` also the outputs of their models.

    The `exit` of the report is 1 if they differ. It is also 1 if no tensor can be compared, and with `strict` if
    optimizer state or other state could not be compared, or with `run` if the result is inconclusive.

    Raises:
        UsageError: An option has an invalid value, or requires another option.
        UnsupportedError: A checkpoint is of a kind that ckptx cannot read, or with `run` the model class cannot run
            with these options.
        EnvironmentProblem: torch or transformers is missing, or the device does not exist.
        SpaceError: The run does not fit `gpu_memory`, or the reference does not fit `reference_memory`; the message
            names the minimum.
        InputError: A checkpoint is damaged or incomplete.
    """
    if isinstance(options, VerifyRunOptions):
        from ckptx.api.verify_run import verify_models

        return verify_models(options)
    from ckptx.comparison.contents import verify_bytes

    return verify_bytes(options)
