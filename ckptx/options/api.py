"""Make Python functions from tables of options: each option becomes a keyword argument.

    @api(ReshardOptions)
    def reshard(options: ReshardOptions) -> ConversionReport: ...

    ckptx.reshard("MODEL", "MODEL-tp4", tp=4)

The constructor of the table is the signature: type checkers take it from `Callable[P, T]`, and `inspect.signature` and
`help` show its types and defaults. The docstring gets an Args section with the texts of `--help`, in which `tp_plan`
replaces `--tp-plan`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, overload

from ckptx.errors import ArgumentTypeError, UsageError
from ckptx.options.commands import unknown_option_error
from ckptx.options.help import OptionHelp, make_help
from ckptx.options.option import SECTIONS, Argument, Hook, Options, Setting, bind_arguments, settings_of
from ckptx.processes.imports import import_all_modules

if TYPE_CHECKING:  # not imported by a command that starts
    P = ParamSpec("P")
    Q = ParamSpec("Q")
    V = ParamSpec("V")
    W = ParamSpec("W")
    T = TypeVar("T", bound=Options)
    R = TypeVar("R", covariant=True)
    S = TypeVar("S", covariant=True)
    U = TypeVar("U", covariant=True)

    class TwoTableFunction(Protocol[P, R, Q, S]):
        """Function with two tables of options; each table has its own arguments and result."""

        @overload
        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
        @overload
        def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> S: ...

    class FourTableFunction(Protocol[P, Q, V, W, U]):
        """Function with four tables of options; each table has its own arguments."""

        @overload
        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> U: ...
        @overload
        def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> U: ...
        @overload
        def __call__(self, *args: V.args, **kwargs: V.kwargs) -> U: ...
        @overload
        def __call__(self, *args: W.args, **kwargs: W.kwargs) -> U: ...


def api(table: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Decorate a function that takes a table of options, so that it takes the options as keyword arguments instead."""

    def decorate(function: Callable[[T], R]) -> Callable[P, R]:
        return cast("Callable[P, R]", _make_function(function, [cast("type[Options]", table)], ""))

    return decorate


def two_table_api(
    first: Callable[P, Options],
    second: Callable[Q, Options],
    results: tuple[type[R], type[S]],
    *,
    selector: str,
) -> Callable[[Callable[[Any], Any]], TwoTableFunction[P, R, Q, S]]:
    """Decorate a function that takes either of two tables, so that it takes their options as keyword arguments instead.

    Args:
        first: First table.
        second: Second table.
        results: Type of the result for each table, for type checkers.
        selector: Argument whose value selects the table: the first with this value among its choices.
    """

    def decorate(function: Callable[[Any], Any]) -> TwoTableFunction[P, R, Q, S]:
        tables = [cast("type[Options]", table) for table in (first, second)]
        return cast("TwoTableFunction[P, R, Q, S]", _make_function(function, tables, selector))

    return decorate


def four_table_api(
    first: Callable[P, Options],
    second: Callable[Q, Options],
    third: Callable[V, Options],
    fourth: Callable[W, Options],
    *,
    selector: str,
) -> Callable[[Callable[[Any], U]], FourTableFunction[P, Q, V, W, U]]:
    """Decorate a function that takes one of four tables, so that it takes their options as keyword arguments instead.

    Args:
        first: First table.
        second: Second table.
        third: Third table.
        fourth: Fourth table.
        selector: Argument whose value selects the table: the first with this value among its choices.
    """

    def decorate(function: Callable[[Any], U]) -> FourTableFunction[P, Q, V, W, U]:
        tables = [cast("type[Options]", table) for table in (first, second, third, fourth)]
        return cast("FourTableFunction[P, Q, V, W, U]", _make_function(function, tables, selector))

    return decorate


def make_options(tables: Sequence[type[Options]], selector: str, arguments: Mapping[str, Any]) -> Options:
    """Make the options of a call.

    Args:
        tables: The tables of the command.
        selector: Argument whose value selects one of several tables; ignored for one table.
        arguments: Arguments by name; None means not set.

    Raises:
        ArgumentTypeError: An argument is unknown or missing, or has a wrong type.
        UsageError: An option has an invalid value, conflicts with another one, or requires another one.
        UnsupportedError: A path is a URL.
    """
    arguments = _resolve_aliases(tables, {name: value for name, value in arguments.items() if value is not None})
    table = tables[0] if len(tables) == 1 else _select_table(tables, selector, arguments)
    for name in arguments:
        if name not in settings_of(table):
            for other in tables:
                setting = settings_of(other).get(name)
                if setting is not None and settings_of(other)[selector].is_switch:
                    raise UsageError(f"{setting.flag} requires {settings_of(other)[selector].flag}")
            raise _unknown_argument_error(table, name)
    for name, setting in settings_of(table).items():
        if setting.is_required and name not in arguments:
            raise ArgumentTypeError(f"{name}: None must be {setting.accepted_types[1]}")
    return table(**arguments)


def _unknown_argument_error(table: type[Options], name: str) -> ArgumentTypeError:
    """Return the error for a keyword argument that no field has; a flag with this name determines the advice."""
    flag = f"--{name.replace('_', '-')}"
    for setting in settings_of(table).values():
        if setting.option is None:
            continue
        value = None
        if flag == setting.option.off_flag:
            value = f"{setting.name}=False"
        elif flag in setting.option.shorthands:
            value = f"{setting.name}={setting.option.shorthands[flag]!r}"
        elif flag in setting.flags:
            value = setting.name
        if value is not None:
            return ArgumentTypeError(f"{table.command} does not take {name}; use {value}, which is {flag}")
    return ArgumentTypeError(str(unknown_option_error(table.command, [table], name)))


def _resolve_aliases(tables: Sequence[type[Options]], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by the names of their fields: the alias `allow_misfit` becomes `allow_config_mismatch`.

    Raises:
        UsageError: An argument is given under two names, with different values.
    """
    settings = [setting for table in tables for setting in settings_of(table).values() if setting.aliases]
    name_by_alias = {alias.lstrip("-").replace("-", "_"): each.name for each in settings for alias in each.aliases}
    renamed: dict[str, Any] = {}
    for name, value in arguments.items():
        field = name_by_alias.get(name, name)
        if renamed.setdefault(field, value) != value:
            raise UsageError(f"{field} is given as both {renamed[field]} and {value}; leave out one of them")
    return renamed


def _select_table(tables: Sequence[type[Options]], selector: str, arguments: Mapping[str, Any]) -> type[Options]:
    """Return the first table in which the value of the selector, or its default, is among the choices.

    Raises:
        ArgumentTypeError: The value has the wrong type.
        UsageError: The value is not a choice in any table.
    """
    choices: list[Any] = []
    for table in tables:
        setting = settings_of(table)[selector]
        if arguments.get(selector, setting.default) in setting.choices:
            return table
        choices += setting.choices
    value = arguments.get(selector)
    error = UsageError if any(isinstance(value, type(each)) for each in choices) else ArgumentTypeError
    raise error(f"{selector}: {value!r} must be one of {', '.join(map(str, choices))}")


def _make_function(
    function: Callable[[Any], Any], tables: Sequence[type[Options]], selector: str
) -> Callable[..., Any]:
    """Return a function that makes the options of a call, see `make_options`, and passes them to `function`.

    Its signature has the fields of all tables; a field that several tables have accepts the types of all of them, and
    is required only if all of them require it.
    """
    merged: dict[str, Setting] = {}
    for table in tables:
        for name, setting in settings_of(table).items():
            previous = merged.get(name, setting)
            preferred = setting if previous.is_required and not setting.is_required else previous
            merged[name] = (
                preferred if previous.type == setting.type else preferred._replace(type=previous.type | setting.type)
            )
    merged = dict(sorted(merged.items(), key=lambda each: _parameter_order(each[1])))
    positional = {name: each for name, each in merged.items() if isinstance(each.annotation, Argument)}

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        import_all_modules()
        return function(make_options(tables, selector, bind_arguments(function.__name__, positional, args, kwargs)))

    call.__signature__ = _signature(merged, inspect.signature(function).return_annotation)  # type: ignore[attr-defined]
    limits = _limits_to_tables(tables, selector)
    call.__doc__ = _with_argument_help(function.__doc__ or "", merged, make_help(tables), limits)
    return call


def _limits_to_tables(tables: Sequence[type[Options]], selector: str) -> dict[str, str]:
    """Return option -> " Only with to-hf." for options that not all tables have, selected by `direction` or the like.

    For a switch such as `run`, the help of the options already has this.
    """
    choices: dict[str, list[str]] = {}
    for table in tables if selector else ():
        choice = settings_of(table)[selector].choices[0]
        for name in settings_of(table) if isinstance(choice, str) else ():
            choices.setdefault(name, []).append(choice)
    return {name: f" Only with {' and '.join(each)}." for name, each in choices.items() if len(each) < len(tables)}


def _parameter_order(setting: Setting) -> int:
    """Return a sort key for a signature: arguments first, then options in the order of the sections, then hooks."""
    if setting.option is None:
        return len(SECTIONS) if isinstance(setting.annotation, Hook) else -1
    return SECTIONS.index(setting.option.section)


def _signature(settings: Mapping[str, Setting], result: Any) -> inspect.Signature:
    parameters = []
    for name, setting in settings.items():
        is_argument = isinstance(setting.annotation, Argument)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if is_argument else inspect.Parameter.KEYWORD_ONLY
        default = inspect.Parameter.empty if setting.is_required else setting.default
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=setting.type))
    return inspect.Signature(parameters, return_annotation=result)


def _with_argument_help(
    doc: str, settings: Mapping[str, Setting], texts: Mapping[str, OptionHelp], limits: Mapping[str, str]
) -> str:
    """Insert an Args section before the Returns and Raises sections of a docstring."""
    from textwrap import fill

    head, heading, rest = doc.partition("    Returns:")
    if not heading:
        head, heading, rest = doc.partition("    Raises:")
    names = {flag: name for name, setting in settings.items() for flag in setting.flags}
    names |= {each.annotation.metavar: name for name, each in settings.items() if isinstance(each.annotation, Argument)}
    lines = []
    for name, setting in settings.items():
        text = texts[name].full_text() if name in texts else setting.annotation.help
        text = re.sub(r"--[a-z-]+|\b[A-Z]+\b", lambda match: _python_name(match[0], names), text)
        text += limits.get(name, "")
        lines.append(
            fill(f"{name}: {text}", 116, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
        )
    return "\n".join([f"{head.rstrip()}\n\n    Args:", *lines, "", f"{heading}{rest}"])


def _python_name(word: str, names: Mapping[str, str]) -> str:
    """Return a word of a help text: a flag or placeholder as the parameter in backticks, other words unchanged."""
    return f"`{names[word]}`" if names.get(word) else word
