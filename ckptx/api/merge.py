"""`merge`: add LoRA adapters to a model, and write it in any format and layout."""

from __future__ import annotations

from ckptx.conversion.outputs.output_format import OutputFormat
from ckptx.conversion.run_conversion import run_conversion
from ckptx.conversion.steps.base_checkpoint import ConfigNeed
from ckptx.conversion.steps.open_source import open_source
from ckptx.options.api import api
from ckptx.options.merge import MergeOptions
from ckptx.report.documents.conversion import ConversionReport
from ckptx.report.report import Log, Stopwatch


@api(MergeOptions)
def merge(options: MergeOptions) -> ConversionReport:
    """Merge LoRA adapters into a model: add `scaling * B A` to each weight that they change.

    The sum is computed in float32 (in float64 for float32 weights) and rounded once to the dtype of the weight. All
    other tensors are copied byte for byte.

    Returns:
        The report that `--json` prints.

    Raises:
        CkptxError: The subclass for the exit code, 2 to 7. No output is created in this case.
    """
    from threadpoolctl import threadpool_limits

    stopwatch, log = Stopwatch(), options.log or Log()
    with open_source(options.model, options.dst, options) as checkpoint:
        log(checkpoint)  # records its notes
        traits = checkpoint.source.traits
        options.check_source(traits)
        format_name = options.output(traits)
        options.check_output(format_name)
        output: OutputFormat
        config_need: ConfigNeed = "config"
        if format_name == "hf":
            from ckptx.conversion.outputs.huggingface import HuggingFaceFormat

            output, config_need = HuggingFaceFormat(options.hf_options()), "unless recorded"
        elif format_name == "safetensors":
            from ckptx.conversion.outputs.sharded import ShardedFormat

            output = ShardedFormat(options)
        else:
            from ckptx.conversion.outputs.dcp import DcpFormat

            options.check_prefix(traits)
            is_sharded = options.dims.world_size > 1 or traits.is_training_format
            output = DcpFormat(options, options if is_sharded else None)
        # The threads of ckptx multiply at the same time: those of the BLAS library would only wait for each other.
        with threadpool_limits(1, user_api="blas"):
            report = run_conversion("merge", checkpoint, output, config_need, log)
        return stopwatch.stop(report)
