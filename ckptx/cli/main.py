"""The `ckptx` group. A command is imported only when it is called."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence

import click

from ckptx.cli.command import CONTEXT_SETTINGS, SectionedCommand, SectionedGroup, name_of_call
from ckptx.cli.signals import install_handlers
from ckptx.cli.streams import prepare_streams, print_error
from ckptx.errors import Terminated, exit_code_of, find_environment_problem
from ckptx.options.commands import COMMANDS, GROUPS, commands_by_name, tables_of, unknown_option_error
from ckptx.options.output import GlobalOptions
from ckptx.version import __version__

# Modules with exit handlers that must run, as they end processes, release devices and remove temporary directories.
_MODULES_WITH_EXIT_HANDLERS = frozenset({"torch", "multiprocessing.forkserver"})


class _LazyGroup(SectionedGroup):
    """Group that imports `ckptx.cli.NAME` when its command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(dict.fromkeys(name.split()[0] for name in COMMANDS))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "help":
            return _help
        if cmd_name not in self.list_commands(ctx):
            return None
        command = importlib.import_module(f"ckptx.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        summaries = {**{name: command.summary for name, command in COMMANDS.items()}, **GROUPS}
        with formatter.section("Commands"):
            rows = [(name, summaries[name]) for name in self.list_commands(ctx)]
            formatter.write_dl([*rows, ("help", "Show the help of a command")])


@click.group(
    cls=_LazyGroup,
    examples=["ckptx inspect PATH", "ckptx convert to-dcp MODEL MODEL-dcp", "ckptx reshard MODEL MODEL-tp4 --tp 4"],
)
@click.version_option(__version__, message="ckptx %(version)s")
def cli(**_: object) -> None:
    """Convert and reshard checkpoints of large language models, and verify the result.

    Run `ckptx COMMAND --help` for the options of a command. Options on the command line take precedence over
    environment variables (CKPTX_MAX_MEMORY=1GB), these over ckptx.toml in the working directory (max-memory = "1GB"; in
    a table such as [reshard] or [convert.to-dcp] for one command), and that file over the table [tool.ckptx] of
    pyproject.toml. `ckptx env` lists the options that are set in these places.

    Exit code 0: success; 1: a difference, a failed check, or a forecast that does not fit in memory; others: an error,
    such as 2 for an invalid option, 3 for a source that is missing, unreadable, damaged or does not match its config,
    and 6 for insufficient memory or disk space. All codes: https://ckptx.github.io/ckptx/troubleshooting/#exit-codes
    """
    ctx = click.get_current_context()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@click.command(
    "help",
    cls=SectionedCommand,
    tables=[GlobalOptions],
    examples=["ckptx help convert to-dcp"],
    context_settings=CONTEXT_SETTINGS,
    hidden=True,
)
@click.argument("words", metavar="[COMMAND]...", nargs=-1)
def _help(words: Sequence[str]) -> None:
    """Show the help of a command, or of the program."""
    ctx = click.get_current_context().find_root()
    command: click.Command = cli
    for word in words:
        if not isinstance(command, SectionedGroup):
            raise click.UsageError(f"{ctx.command_path} has no subcommands; leave out {word}", ctx)
        command = command.require_command(ctx, word)
        ctx = click.Context(command, ctx, word)
    click.echo(command.get_help(ctx))


def commands() -> dict[str, click.Command]:
    """Import and return every command by name: "reshard", "convert to-dcp", and the alias "convert hf2dcp"."""
    by_name: dict[str, click.Command] = {}
    for name in commands_by_name():
        command: click.Command = cli
        for word in name.split():
            assert isinstance(command, click.Group)
            subcommand = command.get_command(click.Context(command), word)
            assert subcommand is not None
            command = subcommand
        by_name[name] = command
    return by_name


def _usage_message(error: click.UsageError) -> str:
    """Return one line for a usage error, with a suggestion for an unknown option."""
    message = error.format_message().rstrip(".")
    ctx = error.ctx
    if isinstance(error, click.NoSuchOption) and ctx is not None:
        name = name_of_call(ctx)
        command = commands_by_name().get(name)
        tables = [GlobalOptions] if command is None else tables_of(command)
        message = str(unknown_option_error(name or "ckptx", tables, error.option_name))
    if ctx is None:
        return message
    return f"{message}{' See' if message.endswith('?') else '; see'} `{ctx.command_path} --help`"


def main(work: Callable[[], object] = lambda: cli.main(standalone_mode=False)) -> None:
    """Run the command line and exit with the code that docs/troubleshooting.md promises.

    Args:
        work: Function to run instead of the command line; returns the exit code. A value that is no integer means 0.
    """
    prepare_streams()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads that ckptx does not use
    gc.disable()  # catalogs have many objects and no reference cycles; collection takes a third of the startup time
    try:
        code = work()
    except click.exceptions.Exit as exit_request:
        code = exit_request.exit_code
    except click.UsageError as error:
        print_error(_usage_message(error), as_json="--json" in sys.argv)
        code = error.exit_code
    except click.Abort:
        code = 130
    except Terminated as termination:
        code = exit_code_of(termination)
    except Exception as error:  # raised outside `Output.run`, which reports the others
        problem = find_environment_problem(error)
        print_error(str(problem or f"internal error: {type(error).__name__}: {error}; please report it"))
        code = exit_code_of(problem or error)
    sys.exit(code if isinstance(code, int) else 0)


def run(work: Callable[[], object] = lambda: cli.main(standalone_mode=False)) -> None:
    """Run `main` with signal handlers, and end the process at once.

    Catalogs of a hundred thousand tensors are not freed first. Exit handlers do not run either, unless a module is
    imported whose exit handlers must.
    """

    def work_with_handlers() -> object:
        install_handlers()
        return work()

    try:
        main(work_with_handlers)
    except SystemExit as exit_request:
        if not _MODULES_WITH_EXIT_HANDLERS.isdisjoint(sys.modules):
            raise
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(exit_request.code if isinstance(exit_request.code, int) else 0)
