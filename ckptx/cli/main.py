"""The `ckptx` group. Commands are imported when called, so that each costs what it needs and no more."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from io import TextIOWrapper

import click

from ckptx.cli.options import SETTINGS, Section, SectionedGroup, global_options, need_command
from ckptx.cli.output import say_error
from ckptx.cli.signals import listen
from ckptx.cli.streams import settle_streams
from ckptx.errors import Defect, Terminated, exit_code_of
from ckptx.version import __version__

_COMMANDS = {
    "inspect": "what a checkpoint holds, from its headers",
    "convert": "HF safetensors to DCP and back",
    "reshard": "a checkpoint cut for TP x PP x FSDP",
    "diff": "names, shapes, dtypes and ties of two checkpoints",
    "verify": "two checkpoints compared bit for bit",
    "forecast": "memory of a training step on each rank, before it runs",
    "robustness": "what a training run saves: read back, exported, re-laid, resumed",
    "env": "versions and machine, for bug reports",
}


# Of processes, devices, and the directory where a forkserver listens.
_HAVE_TO_TAKE_LEAVE = frozenset({"torch", "multiprocessing.forkserver"})


class _LazyGroup(SectionedGroup):
    """Imports `ckptx.cli.NAME` when its command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(f"ckptx.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(
    cls=_LazyGroup,
    context_settings=SETTINGS,
    params=global_options(),
    sections=[
        Section("Global options", ["quiet", "verbose", "no_color", "version", "help"]),
    ],
    examples=["ckptx inspect PATH", "ckptx convert hf2dcp MODEL MODEL-dcp", "ckptx reshard MODEL MODEL-tp4 --tp 4"],
)
@click.version_option(__version__, message="ckptx %(version)s")
def cli(**_: object) -> None:
    """Convert checkpoints of large language models, and prove that the result is right."""
    need_command()


def commands() -> dict[str, click.Command]:
    """Every command by its words: "reshard", "convert hf2dcp"; importing all of them takes a moment."""
    found: dict[str, click.Command] = {}
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        below = command.commands if isinstance(command, click.Group) else {}
        found |= {f"{name} {each}": command for each, command in below.items()} or {name: command}
    return found


def _words(context: click.Context) -> str:
    """The words of a command, without the name of the program, which torchrun and `python -m` choose."""
    words = []
    while context.parent is not None:
        words.append(context.info_name or "")
        context = context.parent
    return " ".join(reversed(words)) or "ckptx itself"


def _said(error: click.UsageError) -> str:
    """One line for wrong usage; an option of other commands is told from one that nobody has."""
    said = error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        having = [
            words
            for words, command in commands().items()
            if any(error.option_name in param.opts for param in command.params)
        ]
        if having:
            said = f"{error.option_name}: has no meaning for {_words(error.ctx)}, only for {', '.join(having)}"
    hint = f"; see `{error.ctx.command_path} --help`" if error.ctx is not None else ""
    return said + hint


def main() -> None:
    """Runs the command line and exits with the code that docs/running.md promises."""
    settle_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that cannot show a letter shows its number
            stream.reconfigure(errors="backslashreplace")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy only moves bytes here, but would start threads
    gc.disable()  # catalogs are many small objects without cycles; looking for some costs a third of the start
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Exit as leave:
        code = leave.exit_code
    except click.UsageError as error:
        say_error(_said(error), as_json="--json" in sys.argv)
        code = error.exit_code
    except click.Abort:
        code = 130
    except Terminated as stopped:
        code = exit_code_of(stopped)
    except Exception as error:  # not in the work itself, whose errors are reported, but in telling of it
        say_error(f"internal error: {type(error).__name__}: {error}; please report it")
        code = Defect.exit_code
    sys.exit(code if isinstance(code, int) else 0)


def run() -> None:
    """What the shell starts: `main`, and out, without taking apart catalogs of a hundred thousand tensors first."""
    listen()
    try:
        main()
    except SystemExit as leave:
        if not _HAVE_TO_TAKE_LEAVE.isdisjoint(sys.modules):
            raise
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(leave.code if isinstance(leave.code, int) else 0)
