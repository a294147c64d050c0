"""Make Python functions from tables of options: a function of a table becomes one of its keyword arguments.

    @api(ReshardOptions)
    def reshard(options: ReshardOptions) -> ConversionReport: ...

    ckptx.reshard("MODEL", "MODEL-tp4", tp=4)

The constructor of the table is the signature: type checkers take it from `Callable[P, T]`, `inspect.signature` and
`help` show its types and defaults, and the docstring gets an Args section with the texts of `--help`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, overload

from ckptx.errors import UsageError
from ckptx.options.commands import refuse_unknown
from ckptx.options.option import Argument, Options, Setting, bound, settings_of

if TYPE_CHECKING:  # what type checkers know, at no cost for a command that starts
    P = ParamSpec("P")
    Q = ParamSpec("Q")
    T = TypeVar("T", bound=Options)
    R = TypeVar("R", covariant=True)
    S = TypeVar("S", covariant=True)

    class TwoWays(Protocol[P, R, Q, S]):
        """A function with two tables: each has its own arguments, and its own result."""

        @overload
        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
        @overload
        def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> S: ...


def api(table: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Make the Python function of a command from a function of its options."""

    def decorate(function: Callable[[T], R]) -> Callable[P, R]:
        return cast("Callable[P, R]", _made(function, [cast("type[Options]", table)], ""))

    return decorate


def api_of_two(
    first: Callable[P, Options],
    second: Callable[Q, Options],
    results: tuple[type[R], type[S]],
    *,
    by: str,
) -> Callable[[Callable[[Any], Any]], TwoWays[P, R, Q, S]]:
    """Make the Python function of a command with two tables.

    Args:
        first: Table with one result.
        second: Table with the other.
        results: The results, for type checkers.
        by: Argument whose value chooses the table.
    """

    def decorate(function: Callable[[Any], Any]) -> TwoWays[P, R, Q, S]:
        tables = [cast("type[Options]", table) for table in (first, second)]
        return cast("TwoWays[P, R, Q, S]", _made(function, tables, by))

    return decorate


def options_from(tables: Sequence[type[Options]], by: str, given: Mapping[str, Any]) -> Options:
    """Make the options of a call.

    Args:
        tables: The tables of the command.
        by: Argument whose value chooses among several tables.
        given: Arguments by name; None stands for one that is not set.

    Raises:
        UsageError: An option is unknown, has a value it cannot have, or contradicts another one.
    """
    given = _with_current_names(tables, {name: value for name, value in given.items() if value is not None})
    table = tables[0] if len(tables) == 1 else _chosen(tables, by, given)
    for name in given:
        if name not in settings_of(table):
            for other in tables:
                setting = settings_of(other).get(name)
                if setting is not None and settings_of(other)[by].choices == (True,):
                    raise UsageError(f"{setting.flag} requires {settings_of(other)[by].flag}")
            raise refuse_unknown(table.command, [table], name)
    return table(**given)


def _with_current_names(tables: Sequence[type[Options]], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments under the names of their fields; `allow_misfit` is `allow_config_mismatch`.

    Raises:
        UsageError: An argument is given under two names.
    """
    settings = [setting for table in tables for setting in settings_of(table).values() if setting.aliases]
    current = {alias.lstrip("-").replace("-", "_"): each.name for each in settings for alias in each.aliases}
    found: dict[str, Any] = {}
    for name, value in given.items():
        field = current.get(name, name)
        if found.setdefault(field, value) != value:
            raise UsageError(f"{field} is given as both {found[field]} and {value}; leave out one of them")
    return found


def _chosen(tables: Sequence[type[Options]], by: str, given: Mapping[str, Any]) -> type[Options]:
    choices: list[Any] = []
    for table in tables:
        setting = settings_of(table)[by]
        if given.get(by, setting.default) in setting.choices:
            return table
        choices += setting.choices
    raise UsageError(f"{by}: {given.get(by)!r} must be one of {', '.join(map(str, choices))}")


def _made(function: Callable[[Any], Any], tables: Sequence[type[Options]], by: str) -> Callable[..., Any]:
    merged: dict[str, Setting] = {}
    for table in tables:
        for name, setting in settings_of(table).items():
            known = merged.get(name, setting)
            kept = setting if known.is_required else known
            merged[name] = kept if known.type == setting.type else kept._replace(type=known.type | setting.type)
    required = {name: each for name, each in merged.items() if isinstance(each.annotation, Argument)}

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        return function(options_from(tables, by, bound(function.__name__, required, args, given)))

    call.__signature__ = _signature(merged, inspect.signature(function).return_annotation)  # type: ignore[attr-defined]
    call.__doc__ = _documented(function.__doc__ or "", merged)
    return call


def _signature(settings: Mapping[str, Setting], result: Any) -> inspect.Signature:
    parameters = []
    for name, setting in settings.items():
        is_argument = isinstance(setting.annotation, Argument)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if is_argument else inspect.Parameter.KEYWORD_ONLY
        default = inspect.Parameter.empty if setting.is_required else setting.default
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=setting.type))
    return inspect.Signature(parameters, return_annotation=result)


def _documented(doc: str, settings: Mapping[str, Setting]) -> str:
    """Return a docstring with an Args section in front of what it returns and raises."""
    head, mark, rest = doc.partition("    Returns:")
    if not mark:
        head, mark, rest = doc.partition("    Raises:")
    rows = [f"        {name}: {setting.annotation.help}" for name, setting in settings.items()]
    return "\n".join([f"{head.rstrip()}\n\n    Args:", *rows, "", f"{mark}{rest}"])
