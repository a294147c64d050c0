"""`reshard`: convert a checkpoint of any layout to the layout of a mesh."""

from __future__ import annotations

from ckptx.conversion.outputs.output_format import OutputFormat
from ckptx.conversion.run_conversion import run_conversion
from ckptx.conversion.steps.open_source import open_source
from ckptx.options.api import api
from ckptx.options.conversion import ReshardOptions
from ckptx.report.documents.conversion import ConversionReport
from ckptx.report.report import Log, Stopwatch


@api(ReshardOptions)
def reshard(options: ReshardOptions) -> ConversionReport:
    """Reshard a checkpoint for a TP x PP x FSDP mesh, so that each rank reads little besides its own files.

    Returns:
        The report that `--json` prints.

    Raises:
        CkptxError: The subclass for the exit code, 2 to 7. No output is created in this case.
    """
    stopwatch, log = Stopwatch(), options.log or Log()
    with open_source(options.src, options.dst, options) as checkpoint:
        log(checkpoint)  # records its notes
        traits = checkpoint.source.traits
        options.check_source(traits)
        output: OutputFormat
        if (options.to or traits.reshard_output) == "safetensors":
            from ckptx.conversion.outputs.sharded import ShardedFormat

            options.check_sharded()
            output = ShardedFormat(options)
        else:
            from ckptx.conversion.outputs.dcp import DcpFormat

            options.check_prefix(traits)
            output = DcpFormat(options, options)
        return stopwatch.stop(run_conversion("reshard", checkpoint, output, "config", log))
