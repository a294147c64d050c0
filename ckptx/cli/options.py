"""Options that several commands share, and help in titled sections."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import click
from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])

# `--max_memory` is `--max-memory`: torchrun users type both.
SETTINGS = {
    "token_normalize_func": lambda name: name.replace("_", "-"),
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
}


class Section(NamedTuple):
    """A titled part of a help page: names of parameters."""

    title: str
    names: Sequence[str]


class Words(click.types.StringParamType):
    """Any text, of which a shell can complete some: `auto|bf16|TEXT` offers auto and bf16.

    What is not among them is refused where options are checked for the command line and the Python API alike.
    """

    def __init__(self, metavar: str) -> None:
        self.words = [word for word in metavar.split("|") if re.fullmatch(r"[a-z0-9]{2,}", word)]

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The words that begin like what was typed."""
        return [CompletionItem(word) for word in self.words if word.startswith(incomplete)]


class _Sectioned(click.Command):
    """Writes options section by section, then examples that run as written."""

    def __init__(
        self, *args: Any, sections: Sequence[Section] = (), examples: Sequence[str] = (), **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.sections, self.examples = sections, examples
        for param in self.params:
            if isinstance(param.type, click.types.StringParamType) and "|" in (param.metavar or ""):
                param.type = Words(str(param.metavar))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # By its flag: how click names its help option depends on its version, as does whether arguments have a record.
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        left = {"help" if "--help" in param.opts else param.name: param for param in options}
        for title, names in [*self.sections, ("Options", list(left))]:
            records = [left.pop(name).get_help_record(ctx) for name in names if name in left]
            rows = [record for record in records if record is not None]
            if rows:
                with formatter.section(title):
                    # click puts a default given as text into parentheses of its own
                    formatter.write_dl(
                        [(flags, re.sub(r"\[default: \((.*)\)\]$", r"[default: \1]", said)) for flags, said in rows]
                    )

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


class SectionedCommand(_Sectioned):
    """A command with titled help sections."""


class SectionedGroup(_Sectioned, click.Group):
    """A group with titled help sections. Without a command it is wrong usage, said in one line; see `need_command`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, invoke_without_command=True, **settings)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _Sectioned.format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def with_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """What puts several options on a command, in their order."""

    def put(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return put


def need_command() -> None:
    """What a group does itself: nothing, but it says which commands it has when none was given.

    Raises:
        UsageError: There was no command.
    """
    ctx = click.get_current_context()
    group = ctx.command
    if ctx.invoked_subcommand is None and isinstance(group, click.Group):
        raise click.UsageError(f"{ctx.command_path}: needs a command: {', '.join(group.list_commands(ctx))}", ctx)


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Global options count wherever they stand: before the command or after it."""
    settings = ctx.find_root().ensure_object(dict)
    if value:
        settings[param.name] = value
    return value


def global_options() -> list[click.Parameter]:
    """Fresh copies of the options every command takes."""
    return [
        click.Option(
            ["-q", "--quiet"],
            is_flag=True,
            expose_value=False,
            callback=_remember,
            help="Say errors only; verify still says its verdict, in one line.",
        ),
        click.Option(
            ["-v", "--verbose"],
            is_flag=True,
            expose_value=False,
            callback=_remember,
            help="Say each step, and show tracebacks.",
        ),
        click.Option(["--no-color"], is_flag=True, expose_value=False, callback=_remember, help="Never use colour."),
    ]


GLOBAL = Section("Global options", ["quiet", "verbose", "no_color", "help"])


def with_global_options(function: F) -> F:
    """Adds the global options to a command."""
    return _with(function, global_options())


def _with(function: F, params: list[click.Parameter]) -> F:
    known = getattr(function, "__click_params__", [])
    function.__click_params__ = [*reversed(params), *known]  # type: ignore[attr-defined]  # where click looks for them
    return function


def hub_options(function: F) -> F:
    """Options for a SRC that is a Hub id."""
    params: list[click.Parameter] = [
        click.Option(["--revision"], metavar="REV", show_default="main", help="Branch, tag or commit of a Hub id."),
        click.Option(
            ["--token"], metavar="TOKEN", show_default="HF_TOKEN, else that of hf auth login", help="Hub token."
        ),
        click.Option(
            ["--cache-dir"],
            metavar="DIR",
            type=click.Path(),
            show_default="HF_HUB_CACHE, else that below HF_HOME",
            help="Hub cache.",
        ),
    ]
    return _with(function, params)


HUB = Section("Hub", ["revision", "token", "cache_dir"])


def output_options(function: F) -> F:
    """`--json` and `--report`."""
    params: list[click.Parameter] = [
        click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document on stdout, also on failure."),
        click.Option(
            ["--report", "report_file"],
            metavar="FILE",
            type=click.Path(),
            show_default="no file",
            help="Write the same document to FILE, on success and on failure.",
        ),
    ]
    return _with(function, params)


OUTPUT = Section("Output", ["as_json", "report_file"])
