"""The commands of `convert`: the same steps with different outputs; see conversion/run_conversion.py."""

from __future__ import annotations

from ckptx.conversion.outputs.output_format import OutputFormat
from ckptx.conversion.run_conversion import run_conversion
from ckptx.conversion.steps.base_checkpoint import ConfigNeed
from ckptx.conversion.steps.open_source import open_source
from ckptx.options.api import four_table_api
from ckptx.options.conversion import ToDcpOptions, ToHfOptions, ToMegatronOptions
from ckptx.options.to_peft import ToPeftOptions
from ckptx.report.documents.conversion import ConversionReport
from ckptx.report.report import Log, Stopwatch


@four_table_api(ToDcpOptions, ToHfOptions, ToMegatronOptions, ToPeftOptions, selector="direction")
def convert(options: ToDcpOptions | ToHfOptions | ToMegatronOptions | ToPeftOptions) -> ConversionReport:
    """Convert a checkpoint to a torch DCP, HF safetensors, Megatron torch_dist, or its adapter to the format of PEFT.

    The format of the source is detected.

    With to-hf, `tied="alias"` and `optimizer="keep"` raise an error, because safetensors have no aliases and hold the
    model only.

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
        config_need: ConfigNeed
        if isinstance(options, ToHfOptions):
            from ckptx.conversion.outputs.huggingface import HuggingFaceFormat

            output, config_need = HuggingFaceFormat(options), "unless recorded"
        elif isinstance(options, ToMegatronOptions):
            from ckptx.conversion.outputs.megatron import MegatronFormat

            output, config_need = MegatronFormat(options), "always"
        elif isinstance(options, ToPeftOptions):
            from ckptx.conversion.outputs.peft import PeftFormat

            output, config_need = PeftFormat(options), "none"
        else:
            from ckptx.conversion.outputs.dcp import DcpFormat

            options.check_prefix(traits)
            # A training checkpoint may have optimizer state, which is sharded and assigned to ranks like parameters.
            is_sharded = options.dims.world_size > 1 or traits.is_training_format
            output = DcpFormat(options, options if is_sharded else None)
            config_need = "config" if traits.is_training_format else "none"
        return stopwatch.stop(run_conversion(f"convert {options.direction}", checkpoint, output, config_need, log))
