"""Click commands from tables of options: help in titled sections, choices and ranges, shell completion.

The tables check the values, with the same messages as the Python functions. The click types here pass every value on,
except text where an integer is required, so that a report is written for an invalid value as for any other failure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from ckptx.cli.streams import print_error
from ckptx.errors import CkptxError, UsageError
from ckptx.options.commands import COMMANDS, Command, commands_by_name, tables_of
from ckptx.options.help import make_help, section_titles, size_note
from ckptx.options.option import GLOBAL, SECTIONS, Argument, Option, Options, Setting, settings_of
from ckptx.options.output import GlobalOptions

# Settings of every click context. `--max_memory` means `--max-memory`, as with torchrun.
CONTEXT_SETTINGS = {
    "token_normalize_func": lambda name: name.replace("_", "-"),
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
}


if TYPE_CHECKING:  # generic since click 8.2
    _StringChoice = click.Choice[str]
else:
    _StringChoice = click.Choice


class ChoiceType(_StringChoice):
    """Choice for help and completion; any value is accepted, as the table of options checks it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value


class IntegerType(click.IntRange):
    """Integer; the table of options checks its range, and help does not show it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return int(value)
        except ValueError:
            assert param is not None
            flag = next((each for each in param.opts if each.startswith("--")), param.opts[0])
            raise click.UsageError(f'{flag}: "{value:.80}" must be an integer', ctx) from None

    def _describe_range(self) -> str:
        return ""  # most maxima only reject absurd values


class KeywordType(click.types.StringParamType):
    """String; completion offers the keywords among its values."""

    def __init__(self, keywords: Sequence[str]) -> None:
        self.keywords = keywords

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the keywords."""
        return [CompletionItem(keyword) for keyword in self.keywords if keyword.startswith(incomplete)]


class _SectionedHelp(click.Command):
    """A help page: arguments, options section by section, then examples that run as written."""

    def __init__(
        self, *args: Any, tables: Sequence[type[Options]], examples: Sequence[str] = (), **kwargs: Any
    ) -> None:
        """Make the parameters.

        Args:
            args: Positional arguments of `click.Command`.
            tables: Tables of options.
            examples: Calls that run as written.
            kwargs: Keyword arguments of `click.Command`.
        """
        super().__init__(*args, **{**kwargs, "params": [*kwargs.get("params", ()), *make_params(tables)]})
        self.tables, self.examples = tables, examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        entries = make_help(self.tables)
        titles = {GLOBAL: GLOBAL, **section_titles([*entries.values()])}
        rows: dict[str, list[tuple[str, str]]] = {section: [] for section in SECTIONS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                entry = entries.get(str(param.name).partition(_SUFFIX_MARK)[0])  # None for --help and --version
                # click puts a default that is a string into parentheses
                text = re.sub(r"\[default: \((.*)\)\]$", r"[default: \1]", record[1])
                rows[GLOBAL if entry is None else entry.section].append((record[0], text))
        arguments = _argument_rows(self.tables)
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        for section, records in rows.items():
            if records:
                with formatter.section(titles[section]):
                    _write_rows(formatter, records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sizes = size_note(self.tables)
        if sizes:
            with formatter.section("Sizes"):
                formatter.write_text(sizes)
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


def _write_rows(formatter: click.HelpFormatter, rows: Sequence[tuple[str, str]]) -> None:
    """Write flags and help texts; no line break splits a flag or a short default."""
    unbreakable_rows = []
    for flags, text in rows:
        text = re.sub(r"--[a-z-]+", lambda match: match[0].replace("-", _HYPHEN), text)
        text = re.sub(r"\[default: .{,28}\]$", lambda match: match[0].replace(" ", _SPACE), text)
        unbreakable_rows.append((flags, text))
    start = len(formatter.buffer)
    formatter.write_dl(unbreakable_rows)
    formatter.buffer[start:] = [each.replace(_HYPHEN, "-").replace(_SPACE, " ") for each in formatter.buffer[start:]]


class _PathArgument(click.Path):
    """Type of an argument that is a path, with advice for the error if it is missing; "" for the message of click."""

    def __init__(self, advice: str) -> None:
        super().__init__()
        self.advice = advice

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return self.advice or None


class SectionedCommand(_SectionedHelp):
    """Command with titled help sections."""


class SectionedGroup(_SectionedHelp, click.Group):
    """Group of commands with titled help sections."""

    def __init__(self, *args: Any, params: Sequence[click.Parameter] | None = None, **kwargs: Any) -> None:
        kwargs = {"context_settings": CONTEXT_SETTINGS, "invoke_without_command": True, **kwargs}
        super().__init__(*args, tables=[GlobalOptions], params=params or (), **kwargs)

    def require_command(self, ctx: click.Context, name: str) -> click.Command:
        """Return a command of this group by name or alias.

        Raises:
            UsageError: There is no command of this name.
        """
        command = self.get_command(ctx, name)
        if command is None:
            from difflib import get_close_matches  # takes longer to import than most commands take to start

            names, group = self.list_commands(ctx), name_of_call(ctx)
            aliases = [each.split()[-1] for each in commands_by_name() if each.rpartition(" ")[0] == group]
            matches = get_close_matches(name, [*names, *aliases], 1)
            # A command of another group with exactly this name takes precedence over a similar name.
            matches = [each for each in commands_by_name() if each.split()[-1] == name] or matches
            if matches and group and matches[0] not in names + aliases:
                matches[0] = f"ckptx {matches[0]}"
            advice = f"did you mean {matches[0]}?" if matches else f"the commands are {', '.join(names)}"
            raise click.UsageError(f"unknown command: {name}; {advice}", ctx)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        self.require_command(ctx, args[0])
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        _SectionedHelp.format_options(self, ctx, formatter)


class CommandCall(NamedTuple):
    """A call of a command.

    Attributes:
        name: Name of the command in the call, which may be an alias such as "convert hf2dcp".
        values: Keyword arguments for the Python function: options and arguments that are set, by name.
        output: Table of the options for the output of the command.
        defaults: Flag and origin of each default from a file or the environment, such as "--tp (CKPTX_TP)", for a note.
    """

    name: str
    values: dict[str, Any]
    output: Any
    defaults: Sequence[str] = ()


def define_command(name: str, *, examples: Sequence[str]) -> Callable[[Callable[[CommandCall], int]], SectionedCommand]:
    """Decorate a function that runs a call and returns the exit code, as a click command; its docstring is the help.

    Args:
        name: Name of the command in `COMMANDS`.
        examples: Calls that run as written.
    """
    entry = COMMANDS[name]

    def decorate(function: Callable[[CommandCall], int]) -> SectionedCommand:
        def run(**values: Any) -> int:
            try:
                call = _make_call(entry, values)
            except CkptxError as error:
                print_error(str(error), as_json=bool(values.get("as_json")), exit_code=error.exit_code)
                return error.exit_code
            exit_code = function(call)
            if exit_code == UsageError.exit_code and call.defaults:
                click.echo(f"note: settings in use: {', '.join(call.defaults)}", err=True)
            return exit_code

        return SectionedCommand(
            name.rpartition(" ")[2],
            callback=run,
            tables=tables_of(entry),
            examples=examples,
            help=function.__doc__,
            short_help=entry.summary,
            context_settings=CONTEXT_SETTINGS,
        )

    return decorate


def _make_call(entry: Command, values: Mapping[str, Any]) -> CommandCall:
    """Add defaults to the values that click has parsed, and split them into options of the function and of the output.

    Global options are added to the object of the root context.

    Raises:
        CkptxError: An option of the output or a default has an invalid value.
    """
    context = click.get_current_context()
    command_name, global_values = name_of_call(context), context.find_root().ensure_object(dict)
    set_values: dict[str, Any] = {}
    for name, value in values.items():
        name = name.partition(_SUFFIX_MARK)[0]
        if value is None or value == ():
            continue
        if set_values.setdefault(name, value) != value:
            flag = next(settings_of(table)[name].flag for table in entry.option_tables if name in settings_of(table))
            raise click.UsageError(f"{flag} is given as both {set_values[name]} and {value}; leave out one of them")
    origins: list[str] = []
    if _has_default_sources():
        from ckptx.options.defaults import applicable_defaults

        defaults = applicable_defaults(command_name, {**global_values, **set_values})
        set_values |= {name: each.value for name, each in defaults.items()}
        origins = [f"{each.setting.flag} ({each.origin})" for each in defaults.values()]
    output_names, global_names = settings_of(entry.output_table), settings_of(GlobalOptions)
    global_values |= {name: value for name, value in set_values.items() if name in global_names}
    return CommandCall(
        command_name,
        {name: value for name, value in set_values.items() if name not in output_names and name not in global_names},
        entry.output_table(**{name: value for name, value in set_values.items() if name in output_names}),
        origins,
    )


def _has_default_sources() -> bool:
    """Return True if a file or an environment variable may set defaults; most calls need not import `defaults`."""
    has_file = any(os.path.lexists(name) for name in ("ckptx.toml", "pyproject.toml"))
    return has_file or any(name.startswith("CKPTX_") for name in os.environ)


def name_of_call(context: click.Context) -> str:
    """Return the name of the called command, such as "convert to-dcp", without the name of the program."""
    words = []
    while context.parent is not None:
        words.append(context.info_name or "")
        context = context.parent
    return " ".join(reversed(words))


_HYPHEN, _SPACE = "\u2011", "\xa0"  # non-breaking characters, so that text is not wrapped there
_SUFFIX_MARK = "__"  # separates the name of an option from the value of a shorthand, or from a former flag


def make_params(tables: Sequence[type[Options]]) -> list[click.Parameter]:
    """Make the click parameters of the tables of a command."""
    params: dict[str, click.Parameter] = {}
    entries = make_help(tables)
    titles = section_titles([*entries.values()])
    for table in tables:
        for name, setting in settings_of(table).items():
            entry = entries.get(name)
            # A title that differs from the section shows the condition that all its options have.
            text = "" if entry is None else entry.full_text(with_condition=titles[entry.section] == entry.section)
            for param in _params_of_setting(setting, text, is_global=table is GlobalOptions):
                params.setdefault(str(param.name), param)
    return list(params.values())


def _argument_rows(tables: Sequence[type[Options]]) -> list[tuple[str, str]]:
    """Return placeholder and help of each positional argument that a command line takes."""
    annotations = [each.annotation for table in tables for each in settings_of(table).values()]
    help_by_placeholder = {
        each.metavar: each.help for each in annotations if isinstance(each, Argument) and each.metavar
    }
    return list(help_by_placeholder.items())


def _params_of_setting(setting: Setting, text: str, *, is_global: bool) -> list[click.Parameter]:
    """Return the click parameters of a setting: an argument, or an option with its shorthands and former flags.

    Args:
        setting: Field of a table of options.
        text: Help of the option.
        is_global: True to store the value in the root context instead of passing it to the command.

    Returns:
        The parameters; empty for a hook, and for an argument that the name of the command sets.
    """
    annotation = setting.annotation
    if isinstance(annotation, Argument):
        is_required = setting.is_required and not annotation.is_optional
        metavar = annotation.metavar if is_required else f"[{annotation.metavar}]"
        argument = click.Argument(
            [setting.name], metavar=metavar, required=is_required, type=_PathArgument(annotation.advice)
        )
        return [argument] if annotation.metavar else []
    if not isinstance(annotation, Option):
        return []
    kwargs: dict[str, Any] = {"expose_value": False, "callback": _store_global} if is_global else {}
    if setting.kind is bool:
        flags = (
            [*setting.flags[:-1], f"{setting.flags[-1]}/{annotation.off_flag}"]
            if annotation.off_flag
            else setting.flags
        )
        kwargs |= {"is_flag": True, "default": None}
    else:
        flags, kwargs["type"] = setting.flags, _param_type(setting, annotation)
        kwargs |= {"metavar": setting.metavar, "multiple": setting.kind is tuple}
    if annotation.is_hidden:
        kwargs["hidden"] = True
    if setting.default_text:
        kwargs["show_default"] = setting.default_text
    main_option = click.Option([*flags, setting.name], help=text, **kwargs)
    shorthands = [
        click.Option(
            [flag, f"{setting.name}{_SUFFIX_MARK}{value}"], flag_value=value, default=None, is_flag=True,
            help=f"Same as {setting.flag} {value}.",
        )
        for flag, value in annotation.shorthands.items()
    ]  # fmt: skip
    aliases = [
        click.Option(
            [flag, f"{setting.name}{_SUFFIX_MARK}{flag.lstrip('-').replace('-', '_')}"], **{**kwargs, "hidden": True}
        )
        for flag in annotation.aliases
    ]
    return [main_option, *shorthands, *aliases]


def _param_type(setting: Setting, option: Option) -> click.ParamType[Any]:
    if setting.choices:
        return ChoiceType(setting.main_choices)
    if setting.is_path and not option.keywords:
        return click.Path()
    if setting.kind is int and not option.is_size:
        return IntegerType(option.minimum, option.maximum)
    return KeywordType(option.keywords)


def _store_global(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Store a global option in the root context, whether it is given before or after the command."""
    settings = ctx.find_root().ensure_object(dict)
    if value:
        settings[param.name] = value
    return value
