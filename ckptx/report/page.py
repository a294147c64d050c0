"""A page of HTML that stands alone: its head, its policy, its style, and how anybody's text gets into it."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable
from html import escape as escape_html
from importlib.resources import files

from ckptx.publishing.report_file import GENERATOR
from ckptx.untrusted.printable import one_line


def page(title: str, styles: Iterable[str], body: Iterable[str], script: str | None = None) -> str:
    """A page that asks for nothing outside of itself, and says so in its Content-Security-Policy.

    Args:
        title: Escaped.
        styles: Names of the style sheets that come after `page.css`.
        body: HTML, line by line.
        script: The only one that may run.
    """
    digest = b64encode(hashlib.sha256((script or "").encode()).digest()).decode()
    scripts = "" if script is None else f" script-src 'sha256-{digest}';"
    policy = f"default-src 'none'; style-src 'unsafe-inline';{scripts} base-uri 'none'"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            GENERATOR,
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{title}</title>",
            f"<style>{''.join(map(asset, ['page.css', *styles]))}</style>",
            "</head>",
            "<body>",
            *body,
            *([] if script is None else [f"<script>{script}</script>"]),
            "</body>",
            "</html>",
            "",
        ]
    )


def escape(text: str) -> str:
    """Anybody's text in a page: no markup, and nothing that turns or hides the text around it."""
    return escape_html(one_line(text))


def asset(name: str) -> str:
    """A style sheet or a script that lies beside this file."""
    return (files("ckptx.report") / name).read_text(encoding="utf-8")
