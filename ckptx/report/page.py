"""Render a self-contained HTML page from its template, with its Content-Security-Policy and escaping.

Templates are in `templates/`, one for each page. Values in a template are escaped, and each string is shown as one line
without control characters (`one_line`), because names in a checkpoint are untrusted; only `Markup` is inserted as it
is. This module imports jinja2, so commands import it only when they write a page.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from ckptx.publishing.report_file import GENERATOR
from ckptx.report.report import human_bytes
from ckptx.untrusted.printable import one_line
from ckptx.wording import counted


def render_page(template: str, title: str, styles: Iterable[str], script: str | None = None, **content: Any) -> str:
    """Return the HTML of a page that loads nothing, as its Content-Security-Policy requires.

    Args:
        template: Name of a template that extends `page.html`.
        title: Title of the page.
        styles: Names of the style sheets after `page.css`.
        script: JavaScript of the page, the only script that may run; None for a page without scripts.
        **content: Variables of the template.
    """
    digest = b64encode(hashlib.sha256((script or "").encode()).digest()).decode()
    scripts = "" if script is None else f" script-src 'sha256-{digest}';"
    page_template = _environment().get_template(template)
    return page_template.render(
        title=title,
        generator=Markup(GENERATOR),
        policy=Markup(f"default-src 'none'; style-src 'unsafe-inline';{scripts} base-uri 'none'"),
        style=Markup("".join(map(read_asset, ["page.css", *styles]))),
        script=None if script is None else Markup(script),
        **content,
    )


def read_asset(name: str) -> str:
    """Return the text of a style sheet, a script or a template of this package.

    Args:
        name: File name, relative to this package.
    """
    return (files("ckptx.report") / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(lambda name: read_asset(f"templates/{name}")),
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["human_bytes"] = human_bytes
    environment.globals["counted"] = counted
    return environment


def _printable(value: Any) -> Any:
    """Return a value as a template prints it: strings on one line, without control characters."""
    return one_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value
