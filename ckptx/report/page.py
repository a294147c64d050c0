"""Render a page of HTML that stands alone: its template, its style, its policy, and how untrusted text gets into it.

Templates lie in `templates/`, one for each page. What they print is escaped, and each string is shown as one line
without active characters (`one_line`), as names in a checkpoint are anybody's; only `Markup` goes in as it is. This
module imports jinja2, so commands import it when they write a page.
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


def page(template: str, title: str, styles: Iterable[str], script: str | None = None, **content: Any) -> str:
    """Return a page that asks for nothing outside of itself, and says so in its Content-Security-Policy.

    Args:
        template: The name of a template; it extends `page.html`.
        title: The title of the page.
        styles: Names of the style sheets that come after `page.css`.
        script: The only script that may run.
        **content: What the template shows.
    """
    digest = b64encode(hashlib.sha256((script or "").encode()).digest()).decode()
    scripts = "" if script is None else f" script-src 'sha256-{digest}';"
    found = _environment().get_template(template)
    return found.render(
        title=title,
        generator=Markup(GENERATOR),
        policy=Markup(f"default-src 'none'; style-src 'unsafe-inline';{scripts} base-uri 'none'"),
        style=Markup("".join(map(asset, ["page.css", *styles]))),
        script=None if script is None else Markup(script),
        **content,
    )


def asset(name: str) -> str:
    """Return a style sheet, a script or a template of this package."""
    return (files("ckptx.report") / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(lambda name: asset(f"templates/{name}")),
        autoescape=True,
        finalize=_finalized,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["human_bytes"] = human_bytes
    environment.globals["counted"] = counted
    return environment


def _finalized(value: Any) -> Any:
    """Return what a template prints: a string without characters that act on the text around it."""
    return one_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value
