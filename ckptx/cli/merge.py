"""`ckptx merge`."""

from __future__ import annotations

from ckptx.cli.command import CommandCall, define_command
from ckptx.cli.output import Output


@define_command(
    "merge",
    examples=[
        "ckptx merge MODEL ADAPTER MODEL-merged",
        "ckptx merge MODEL ADAPTER MODEL-tp4-pp2 --tp 4 --pp 2",
        "ckptx merge org/name org/adapter NAME-merged --add style-adapter:0.5",
        "ckptx merge MODEL-fp8 ADAPTER MODEL-merged --dequantize",
        "torchrun --nproc-per-node 4 -m -- ckptx merge MODEL ADAPTER MODEL-merged",
    ],
)
def command(call: CommandCall) -> int:
    """Merge LoRA adapters into a model: add scaling x B x A to each weight that they change.

    rsLoRA, DoRA, rank and alpha patterns, embeddings, Conv1D modules, experts in one tensor, biases and modules_to_save
    are supported. Each weight is within one unit in the last place of the correctly rounded sum. Tensors that no
    adapter changes are copied byte for byte.

    The output is a whole model: in HF safetensors, or with --tp, --pp or --dp-shard a sharded checkpoint as reshard
    writes it. Under torchrun, as in the last example, the processes share the work.
    """
    from ckptx.api.merge import merge
    from ckptx.report.text import conversion_text

    output = Output(call.output)
    return output.run(
        call.name,
        lambda log: merge(**call.values, log=log, on_progress=output.progress, report_file=output.report_file),
        conversion_text,
        target=call.values.get("dst"),
    )
