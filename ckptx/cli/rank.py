"""Entry point of a rank that ckptx starts: `python -m ckptx.cli.rank OPTIONS REPORT`.

OPTIONS is the path of a JSON document, which already contains the defaults from files and the environment. REPORT is
the path that rank 0 writes its JSON report to.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from ckptx.cli.main import run
from ckptx.cli.output import Output
from ckptx.options.document import from_json
from ckptx.options.output import ReportOutput
from ckptx.options.verify import VerifyRunOptions


def run_rank() -> int:
    """Run `verify --run` with the options of the document, write the report on rank 0, and return the exit code."""
    from ckptx.api.verify_run import verify_models
    from ckptx.report.verify_run import run_text, run_verdict

    gc.enable()  # models are full of reference cycles
    options_path, report_file = sys.argv[1:]
    options = from_json(Path(options_path).read_text(encoding="utf-8"), VerifyRunOptions)
    output = Output(ReportOutput(report_file=report_file), is_quiet=True)
    return output.run("verify", lambda log: verify_models(options.with_values(log=log)), run_text, run_verdict)


if __name__ == "__main__":
    run(run_rank)
