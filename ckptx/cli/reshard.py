"""`ckptx reshard`."""

from __future__ import annotations

from ckptx.cli.command import CommandCall, define_command
from ckptx.cli.output import Output


@define_command(
    "reshard",
    examples=[
        "ckptx reshard MODEL MODEL-tp4-pp2 --tp 4 --pp 2",
        "ckptx reshard step-1000 step-1000-tp2 --tp 2 --base MODEL",
        "ckptx reshard MODEL MODEL-tp8 --tp 8 --to dcp --dry-run",
        "torchrun --nproc-per-node 4 -m -- ckptx reshard MODEL MODEL-tp4-pp2 --tp 4 --pp 2",
    ],
)
def command(call: CommandCall) -> int:
    """Reshard a checkpoint for a TP x PP x FSDP mesh, so that each rank reads little besides its own files.

    The output is a DCP or sharded safetensors. torch.distributed.checkpoint loads a DCP on any mesh. In a DCP, only TP
    rank 0 stores the tensors that TP replicates, and the other TP ranks read them from its files.

    In sharded safetensors, each file has the shards of one rank (the files of save_pretrained have full tensors), and
    tensors that TP replicates are in the files of every TP rank. from_pretrained (transformers 5.20 or later) and
    torch's HuggingFaceStorageReader load them; for vLLM, use convert to-hf.

    Under torchrun, the processes share the work; their number need not match the mesh. In the last example, -- keeps
    torchrun from reading the options of ckptx.
    """
    from ckptx.api.reshard import reshard
    from ckptx.report.text import conversion_text

    output = Output(call.output)
    return output.run(
        call.name,
        lambda log: reshard(**call.values, log=log, on_progress=output.progress, report_file=output.report_file),
        conversion_text,
        target=call.values.get("dst"),
    )
