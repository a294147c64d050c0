"""The commands of `ckptx convert`, with the aliases `hf2dcp` and `dcp2hf` of `to-dcp` and `to-hf`."""

from __future__ import annotations

from typing import Any

import click

from ckptx.cli.command import CommandCall, SectionedGroup, define_command
from ckptx.cli.output import Output
from ckptx.options.commands import COMMANDS, Command


class _ConvertGroup(SectionedGroup):
    """Group of the conversions, which are also found by their aliases."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for name, subcommand in self.commands.items():
            if cmd_name == name or cmd_name in COMMANDS[f"convert {name}"].aliases:
                return subcommand
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            rows = [(name, COMMANDS[f"convert {name}"]) for name in self.commands]
            formatter.write_dl([(name, f"{entry.summary}{_alias_text(entry)}") for name, entry in rows])


def _alias_text(entry: Command) -> str:
    return f" (alias: {', '.join(entry.aliases)})" if entry.aliases else ""


@click.group(
    cls=_ConvertGroup,
    examples=["ckptx convert to-dcp MODEL MODEL-dcp", "ckptx convert to-hf MODEL-dcp MODEL-back"],
)
def convert_group(**_: object) -> None:
    """Convert a checkpoint to a torch DCP, to HF safetensors or to Megatron torch_dist, or its adapter to PEFT.

    The format of the source is detected: HF safetensors, pytorch_model.bin, a dict saved with torch.save, a torch DCP
    (also Megatron torch_dist), per-rank FSDP files (verl), DeepSpeed, torch_checkpointing (of meta-pytorch), or sharded
    safetensors (each file has the shards of one rank, as reshard writes).
    """
    ctx = click.get_current_context()
    if ctx.invoked_subcommand is None:
        raise click.UsageError(
            f"{ctx.command_path} requires a command: {', '.join(convert_group.list_commands(ctx))}", ctx
        )


@define_command(
    "convert to-dcp",
    examples=[
        "ckptx convert to-dcp MODEL MODEL-dcp",
        "ckptx convert to-dcp MODEL MODEL-dcp --tp 4 --pp 2",
        "ckptx convert to-dcp org/name NAME-dcp --revision main --dtype bf16",
        "ckptx convert to-dcp MODEL MODEL-titan --names torchtitan",
        "torchrun --nproc-per-node 4 -m -- ckptx convert to-dcp MODEL MODEL-dcp",
    ],
)
def to_dcp(call: CommandCall) -> int:
    """Convert a checkpoint to a torch DCP, with full tensors or sharded for a mesh (alias: ckptx convert hf2dcp).

    With a mesh, the output is the same as that of reshard --to dcp. Under torchrun, as in the last example, the
    processes share the work.
    """
    return _run(call)


@define_command(
    "convert to-hf",
    examples=[
        "ckptx convert to-hf MODEL-dcp MODEL-back",
        "ckptx convert to-hf step-1000 MODEL-1000 --base MODEL --max-shard-size 5GB",
        "ckptx convert to-hf step-1000 step-1000-tensors --base none",
        "torchrun --nproc-per-node 4 -m -- ckptx convert to-hf step-1000 MODEL-1000 --base MODEL",
    ],
)
def to_hf(call: CommandCall) -> int:
    """Convert a checkpoint to HF safetensors with config and tokenizer (alias: ckptx convert dcp2hf).

    Optimizer state is dropped, because HF checkpoints have no place for it. Under torchrun, as in the last example, the
    processes share the work.
    """
    return _run(call)


@define_command(
    "convert to-megatron",
    examples=[
        "ckptx convert to-megatron MODEL MODEL-megatron",
        "ckptx convert to-megatron step-1000 MODEL-megatron --base MODEL --pad-vocab-to-multiple-of 1024",
        "torchrun --nproc-per-node 4 -m -- ckptx convert to-megatron MODEL MODEL-megatron",
    ],
)
def to_megatron(call: CommandCall) -> int:
    """Convert a checkpoint to a Megatron torch_dist directory, which loads at any TP x PP x EP.

    The output has weights only: optimizer state is dropped. Megatron-LM loads it with --load DST --dist-ckpt-strictness
    log_unexpected. Under torchrun, as in the last example, the processes share the work.
    """
    return _run(call)


@define_command(
    "convert to-peft",
    examples=[
        "ckptx convert to-peft step-1000 ADAPTER --adapter-config run/adapter_config.json",
        "ckptx convert to-peft step-1000 ADAPTER --alpha 32 --base-model-name org/name",
        "ckptx convert to-peft step-1000 ADAPTER --alpha 32 --base MODEL",
    ],
)
def to_peft(call: CommandCall) -> int:
    """Convert the LoRA adapter in a training checkpoint to adapter_model.safetensors and adapter_config.json.

    SRC can have PEFT's names (lora_A, lora_B) or torchtitan's (lora_a, lora_b). Weights of the base model and optimizer
    state are dropped. The tensors do not show the alpha of the adapter: pass --adapter-config or --alpha, unless an
    adapter_config.json (as Trainer writes) or verl's lora_train_meta.json is next to the checkpoint.

    Under torchrun, the processes share the work.
    """
    return _run(call)


convert_group.add_command(to_dcp)
convert_group.add_command(to_hf)
convert_group.add_command(to_megatron)
convert_group.add_command(to_peft)
command = convert_group  # the name that `ckptx.cli.main` imports from every module


def _run(call: CommandCall) -> int:
    from ckptx.api.convert import convert
    from ckptx.report.text import conversion_text

    output = Output(call.output)
    arguments: dict[str, Any] = {"direction": call.name.rpartition(" ")[2], **call.values}
    return output.run(
        call.name,
        lambda log: convert(**arguments, log=log, on_progress=output.progress, report_file=output.report_file),
        conversion_text,
        target=call.values.get("dst"),
    )
