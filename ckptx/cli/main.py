"""The `ckptx` group. Commands are imported when called, so that each costs what it needs and no more."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper

import click

from ckptx.cli.command import SectionedGroup, words_of
from ckptx.cli.signals import listen
from ckptx.cli.streams import say_error, settle_streams
from ckptx.errors import Defect, Terminated, exit_code_of
from ckptx.options.commands import COMMANDS, GROUPS, all_words, refuse_unknown, tables_of
from ckptx.options.output import GlobalOptions
from ckptx.version import __version__

# Of processes, devices, and the directory where a forkserver listens.
_HAVE_TO_TAKE_LEAVE = frozenset({"torch", "multiprocessing.forkserver"})


class _LazyGroup(SectionedGroup):
    """A group that imports `ckptx.cli.NAME` when its command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(dict.fromkeys(words.split()[0] for words in COMMANDS))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "help":
            return _help
        if cmd_name not in self.list_commands(ctx):
            return None
        command = importlib.import_module(f"ckptx.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        summaries = {**{words: command.summary for words, command in COMMANDS.items()}, **GROUPS}
        with formatter.section("Commands"):
            formatter.write_dl([(name, summaries[name]) for name in self.list_commands(ctx)])


@click.group(
    cls=_LazyGroup,
    examples=["ckptx inspect PATH", "ckptx convert to-dcp MODEL MODEL-dcp", "ckptx reshard MODEL MODEL-tp4 --tp 4"],
)
@click.version_option(__version__, message="ckptx %(version)s")
def cli(**_: object) -> None:
    """Convert and reshard checkpoints of large language models, and verify the result.

    Run `ckptx COMMAND --help` for the options of a command.
    """
    ctx = click.get_current_context()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@click.command("help", hidden=True, add_help_option=False)
@click.argument("words", nargs=-1)
def _help(words: Sequence[str]) -> None:
    """Print the help of the program or of a command."""
    ctx = click.get_current_context().find_root()
    command: click.Command = cli
    for word in words:
        if not isinstance(command, SectionedGroup):
            raise click.UsageError(f"{ctx.command_path} has no subcommands; leave out {word}", ctx)
        command = command.known_command(ctx, word)
        ctx = click.Context(command, ctx, word)
    click.echo(command.get_help(ctx))


def commands() -> dict[str, click.Command]:
    """Return every command by its words: "reshard", "convert to-dcp", and its other name "convert hf2dcp".

    Importing all of them takes a moment.
    """
    found: dict[str, click.Command] = {}
    for words in all_words():
        command: click.Command = cli
        for word in words.split():
            assert isinstance(command, click.Group)
            below = command.get_command(click.Context(command), word)
            assert below is not None
            command = below
        found[words] = command
    return found


def _message(error: click.UsageError) -> str:
    """Return one line for wrong usage, with the command that has an option, or the nearest spelling."""
    message = error.format_message().rstrip(".")
    ctx = error.ctx
    if isinstance(error, click.NoSuchOption) and ctx is not None:
        words = words_of(ctx)
        command = all_words().get(words)
        tables = [GlobalOptions] if command is None else tables_of(command)
        message = str(refuse_unknown(words or "ckptx", tables, error.option_name))
    if ctx is None:
        return message
    return f"{message}{' See' if message.endswith('?') else '; see'} `{ctx.command_path} --help`"


def main(work: Callable[[], object] = lambda: cli.main(standalone_mode=False)) -> None:
    """Run the command line and exit with the code that docs/running.md promises.

    Args:
        work: Function to run in place of the command line; returns the exit code.
    """
    settle_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that cannot show a letter shows its number
            stream.reconfigure(errors="backslashreplace")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy only moves bytes here, but would start threads
    gc.disable()  # catalogs are many small objects without cycles; looking for some costs a third of the start
    try:
        code = work()
    except click.exceptions.Exit as leave:
        code = leave.exit_code
    except click.UsageError as error:
        say_error(_message(error), as_json="--json" in sys.argv)
        code = error.exit_code
    except click.Abort:
        code = 130
    except Terminated as stopped:
        code = exit_code_of(stopped)
    except Exception as error:  # not in the work itself, whose errors are reported, but in telling of it
        say_error(f"internal error: {type(error).__name__}: {error}; please report it")
        code = Defect.exit_code
    sys.exit(code if isinstance(code, int) else 0)


def run(work: Callable[[], object] = lambda: cli.main(standalone_mode=False)) -> None:
    """Run `main` as a process, which ends without taking apart catalogs of a hundred thousand tensors first."""
    listen()
    try:
        main(work)
    except SystemExit as leave:
        if not _HAVE_TO_TAKE_LEAVE.isdisjoint(sys.modules):
            raise
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(leave.code if isinstance(leave.code, int) else 0)
