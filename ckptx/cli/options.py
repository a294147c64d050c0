"""Options that several commands share, and help in titled sections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import click

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


class _Sectioned(click.Command):
    """Writes options section by section, then examples that run as written."""

    def __init__(
        self, *args: Any, sections: Sequence[Section] = (), examples: Sequence[str] = (), **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.sections, self.examples = sections, examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # By its flag: how click names its help option depends on its version, as does whether arguments have a record.
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        left = {"help" if "--help" in param.opts else param.name: param for param in options}
        for title, names in [*self.sections, ("Options", list(left))]:
            records = [left.pop(name).get_help_record(ctx) for name in names if name in left]
            rows = [record for record in records if record is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


class SectionedCommand(_Sectioned):
    """A command with titled help sections."""


class SectionedGroup(_Sectioned, click.Group):
    """A group with titled help sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _Sectioned.format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Global options count wherever they stand: before the command or after it."""
    settings = ctx.find_root().ensure_object(dict)
    if value:
        settings[param.name] = value
    return value


def global_options() -> list[click.Parameter]:
    """Fresh copies of the options every command takes."""
    return [
        click.Option(["-q", "--quiet"], is_flag=True, expose_value=False, callback=_remember, help="Say errors only."),
        click.Option(
            ["-v", "--verbose"], is_flag=True, expose_value=False, callback=_remember, help="Show tracebacks."
        ),
        click.Option(["--no-color"], is_flag=True, expose_value=False, callback=_remember, help="Never use colour."),
    ]


GLOBAL = Section("Global options", ["quiet", "verbose", "no_color", "help"])


def with_global_options(function: F) -> F:
    """Adds the global options to a command."""
    return _with(function, global_options())


def _with(function: F, params: list[click.Parameter]) -> F:
    known = getattr(function, "__click_params__", [])
    function.__click_params__ = [*reversed(params), *known]  # type: ignore[attr-defined]
    return function


def hub_options(function: F) -> F:
    """Options for a SRC that is a Hub id."""
    params: list[click.Parameter] = [
        click.Option(["--revision"], metavar="REV", help="Branch, tag or commit of a Hub id."),
        click.Option(["--token"], metavar="TOKEN", help="Hub token; HF_TOKEN is read too."),
        click.Option(["--cache-dir"], metavar="DIR", help="Hub cache; HF_HOME and HF_HUB_CACHE are read too."),
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
            type=click.Path(dir_okay=False),
            help="Write the same document to FILE, on success and on failure.",
        ),
    ]
    return _with(function, params)


OUTPUT = Section("Output", ["as_json", "report_file"])
