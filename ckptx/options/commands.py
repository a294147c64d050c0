"""Commands: summary, tables of options and Python function of each; their modules are imported on first use.

A table of options is a subclass of `Options`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from ckptx.errors import UsageError
from ckptx.options.option import Options, settings_of


class Command(NamedTuple):
    """A command.

    Attributes:
        summary: Line in the list of commands, without a period; begins with a verb.
        table_names: Tables of options of the Python function, as `module:class` below `ckptx.options`. The second
            table, if any, is selected by a switch such as `--run`.
        function: Python function as `module:name`; empty for a command without one.
        output_table_name: Table of options that only the command line has, as `module:class`.
        aliases: Other names of the command, without the name of its group.
        writes_checkpoint: True if the command writes a checkpoint.
    """

    summary: str
    table_names: Sequence[str]
    function: str = ""
    output_table_name: str = "output:JsonOutput"
    aliases: Sequence[str] = ()
    writes_checkpoint: bool = False

    @property
    def option_tables(self) -> list[type[Options]]:
        """Import and return the tables of options of the Python function."""
        return [_import_table(name) for name in self.table_names]

    @property
    def output_table(self) -> type[Options]:
        """Import and return the table of options that only the command line has."""
        return _import_table(self.output_table_name)


COMMANDS: Mapping[str, Command] = {
    "inspect": Command("Summarize a checkpoint", ["inspect:InspectOptions"], "ckptx.api.inspect:inspect"),
    "convert to-dcp": Command(
        "Convert a checkpoint to a torch DCP", ["conversion:ToDcpOptions"], "ckptx.api.convert:convert",
        "output:ReportOutput", aliases=["hf2dcp"], writes_checkpoint=True,
    ),
    "convert to-hf": Command(
        "Convert a checkpoint to HF safetensors", ["conversion:ToHfOptions"], "ckptx.api.convert:convert",
        "output:ReportOutput", aliases=["dcp2hf"], writes_checkpoint=True,
    ),
    "convert to-megatron": Command(
        "Convert a checkpoint to Megatron torch_dist", ["conversion:ToMegatronOptions"],
        "ckptx.api.convert:convert", "output:ReportOutput", writes_checkpoint=True,
    ),
    "convert to-peft": Command(
        "Convert the adapter of a training checkpoint to PEFT", ["to_peft:ToPeftOptions"],
        "ckptx.api.convert:convert", "output:ReportOutput", writes_checkpoint=True,
    ),
    "reshard": Command(
        "Reshard a checkpoint for a TP x PP x FSDP mesh", ["conversion:ReshardOptions"],
        "ckptx.api.reshard:reshard", "output:ReportOutput", writes_checkpoint=True,
    ),
    "merge": Command(
        "Merge LoRA adapters into a model", ["merge:MergeOptions"], "ckptx.api.merge:merge", "output:ReportOutput",
        writes_checkpoint=True,
    ),
    "diff": Command(
        "Compare names, shapes, dtypes and tied weights of two checkpoints", ["diff:DiffOptions"],
        "ckptx.comparison.headers:diff",
    ),
    "verify": Command(
        "Compare two checkpoints bit for bit, or with --run what their models compute",
        ["verify:VerifyOptions", "verify:VerifyRunOptions"], "ckptx.api.verify:verify",
        "output:ReportOutput",
    ),
    "forecast": Command(
        "Forecast the memory of a training step on each rank", ["forecast:ForecastOptions", "forecast:SearchOptions"],
        "ckptx.api.forecast:forecast", "forecast:ForecastOutput",
    ),
    "robustness": Command(
        "Train a recipe, and test that its checkpoints reload, export, reshard and resume exactly",
        ["robustness:RobustnessOptions"],
        "ckptx.robustness_suite:robustness", "robustness:RobustnessOutput",
    ),
    "env": Command("Print versions and system information", ["env:EnvOptions"]),
}  # fmt: skip
# Group of commands -> its line in the list of commands.
GROUPS = {"convert": "Convert a checkpoint to DCP, HF safetensors, Megatron torch_dist or a PEFT adapter"}


def commands_by_name() -> dict[str, Command]:
    """Return every command by name, aliases included."""
    by_name: dict[str, Command] = {}
    for name, command in COMMANDS.items():
        group = name.rpartition(" ")[0]
        by_name |= {name: command, **{f"{group} {alias}".strip(): command for alias in command.aliases}}
    return by_name


def tables_of(command: Command) -> list[type[Options]]:
    """Return every table of a command, including the table of its output and that of the global options."""
    return [*command.option_tables, command.output_table, _import_table("output:GlobalOptions")]


_MIN_SIMILARITY = 0.75  # ratio of difflib, 0 to 1, from which a flag is suggested; "--bogus" and "--gpu" have 0.67


def unknown_option_error(command_name: str, tables: Sequence[type[Options]], name: str) -> UsageError:
    """Return the error for an option that a command does not have.

    Args:
        command_name: Name of the command, for the message.
        tables: Tables of the command.
        name: Flag, or name of a keyword argument.
    """
    name = name.lstrip("-").replace("-", "_")
    settings = {field: setting for table in tables for field, setting in settings_of(table).items()}
    flag = f"--{name.replace('_', '-')}"
    replacement = next(
        (each for each in settings.values() if each.option is not None and name in each.option.replaces), None
    )
    if replacement is not None:
        return UsageError(f"{command_name} does not take {flag}; use {replacement.flag}")
    others = [each for each in _commands_with_option(name) if each != command_name]
    if others:
        return UsageError(f"{command_name} does not take {flag} ({_join_commands(others)})")
    known_flags = [each_flag for each in settings.values() if each.option is not None for each_flag in each.flags]
    from difflib import get_close_matches  # slow to import

    matches = get_close_matches(flag, known_flags, 1, _MIN_SIMILARITY)
    return UsageError(f"{command_name} does not take {flag}" + (f"; did you mean {matches[0]}?" if matches else ""))


def _commands_with_option(name: str) -> Iterator[str]:
    """Yield the commands with an option, with their switch if they require it, as in "forecast --search"."""
    for command_name, command in COMMANDS.items():
        owners = [table for table in tables_of(command) if name in _option_names(table)]
        if owners and owners == command.option_tables[1:]:
            yield owners[0].command
        elif owners:
            yield command_name


def _join_commands(names: Sequence[str]) -> str:
    """Return the end of an error message: "reshard does", or "convert to-dcp and reshard do"."""
    if len(names) == 1:
        return f"{names[0]} does"
    return f"{', '.join(names[:-1])} and {names[-1]} do"


def _option_names(table: type[Options]) -> Iterator[str]:
    """Yield every name of each option of a table, with underscores, including shorthands and flags that turn it off."""
    for setting in settings_of(table).values():
        if setting.option is not None:
            yield from setting.names
            for flag in (*setting.option.shorthands, setting.option.off_flag):
                yield flag.lstrip("-").replace("-", "_")


def _import_table(name: str) -> type[Options]:
    module, _, class_name = name.partition(":")
    table: type[Options] = getattr(import_module(f"ckptx.options.{module}"), class_name)
    return table
