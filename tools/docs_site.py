"""Hooks of mkdocs: make a site of Markdown files that are written for GitHub (`make docs-site`).

GitHub and Python-Markdown, which mkdocs uses, differ in four points:

    links     a page links to files of the repository (`../README.md`, `../ckptx/errors.py`); the site has pages for
              some of them (`EXTRA_PAGES`), and links to the others lead to GitHub
    lists     on GitHub, a nested list is indented to the column where the text of its parent item begins, in
              Python-Markdown by four columns per level; and Python-Markdown needs an empty line above a list
    tables    GitHub needs a backslash before a `|` in code, Python-Markdown prints the backslash
    start     GitHub shows docs/README.md, a list of the pages, for docs/; the site has its navigation instead and
              starts with README.md

`on_page_content` compares the HTML of Python-Markdown with that of a CommonMark parser, which is what GitHub has, and
fails the build if they differ.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
BRANCH = "main"

# Files outside docs/ -> name of their page on the site.
EXTRA_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
# Not on the site: its navigation lists the pages.
LIST_OF_PAGES = "docs/README.md"

# Code in the pages has lines of up to 120 columns, and output has longer lines: commands and output wrap, programs and
# diagrams do not. In a table, short code does not break.
STYLE = "site.css"
_CSS = """\
.md-grid { max-width: 78rem; }
.md-typeset h1 { color: inherit; }
.md-typeset pre > code { font-size: 0.6rem; }
.md-typeset :is(.language-console, .language-sh) pre > code { white-space: pre-wrap; overflow-wrap: anywhere; }
.md-typeset table:not([class]) :is(th, td) { min-width: 0; padding: 0.6em 0.8em; }
.md-typeset td code { word-break: normal; overflow-wrap: anywhere; }
.md-typeset td code.short { white-space: nowrap; }
.md-typeset td:last-child { overflow-wrap: anywhere; }
@media (min-width: 60em) { .md-typeset :is(p, li) > code { white-space: nowrap; } }
"""

_FENCE = re.compile(r" *(`{3,}|~{3,})")
_LINK = re.compile(r"(\]\(\s*)([^)\s]+)(\s*\))")
_ITEM = re.compile(r"( *)([*+-]|\d+[.)])( +)(?=\S)")
_CODE = re.compile(r"`[^`]+`")
_SHORT_CODE = re.compile(r"<code>([^<\s]{1,32})</code>")
_COMMENT = re.compile(r" *<!-- .* -->")
_INDENT = 4  # spaces per list level in Python-Markdown
_COMPARED_TAGS = ("h1", "h2", "h3", "h4", "li", "pre", "table", "tr", "a", "img", "strong", "code")


def source_path(src_uri: str) -> str:
    """Return the path in the repository of the source of a page.

    Args:
        src_uri: Path of the source as mkdocs has it, relative to docs/; for an extra page its name on the site.
    """
    extra_sources = {page: path for path, page in EXTRA_PAGES.items()}
    return extra_sources.get(src_uri, f"docs/{src_uri}")


def site_link(target: str, source: str, repository: str) -> str:
    """Return the target of a link for the site.

    Args:
        target: The target as written, relative to the file that has the link.
        source: Path of that file in the repository.
        repository: Address of the repository on GitHub.

    Raises:
        ValueError: The link leads to no file of the repository.
    """
    name, hash_sign, anchor = target.partition("#")
    if not name or "://" in target or target.startswith("mailto:"):
        return target
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
    if path == LIST_OF_PAGES or path == "docs":
        path, anchor, hash_sign = "README.md", "", ""
    linked_file = ROOT / path
    if path.startswith("..") or not linked_file.exists():
        raise ValueError(f"{source}: the link {target} leads to no file of the repository")
    page = EXTRA_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if page is None:
        kind = "tree" if linked_file.is_dir() else "blob"
        return f"{repository}/{kind}/{BRANCH}/{path}{hash_sign}{anchor}"
    page_folder = posixpath.dirname(EXTRA_PAGES.get(source) or source.removeprefix("docs/"))
    return f"{posixpath.relpath(page, page_folder or '.')}{hash_sign}{anchor}"


def with_site_links(text: str, source: str, repository: str) -> str:
    """Return a page whose links lead to pages of the site, or to GitHub; code stays as it is."""
    lines = []
    for line, is_code in _lines(text):
        if not is_code:
            line = _LINK.sub(lambda link: f"{link[1]}{site_link(link[2], source, repository)}{link[3]}", line)
        lines.append(line)
    return "\n".join(lines)


def with_wide_lists(text: str) -> str:
    """Return a page whose lists are indented by four columns a level, with an empty line above each list."""
    lines: list[str] = []
    columns: list[int] = []  # where the text of each open item begins, the outermost first
    for line, is_code in _lines(text):
        if not line.strip():
            lines.append(line)
            continue
        indent = len(line) - len(line.lstrip(" "))
        item = None if is_code else _ITEM.match(line)
        after_blank = not lines or not lines[-1].strip()
        if item or after_blank or is_code:  # any other line continues the paragraph above it
            while columns and indent < columns[-1]:
                columns.pop()
        depth = len(columns)
        text_column = columns[-1] if columns else 0
        if item:
            if not after_blank and not any(_ITEM.match(each) for each in _last_paragraph(lines)):
                lines.append("")
            columns.append(item.end())
            lines.append(f"{' ' * _INDENT * depth}{line[text_column:]}")
        else:
            lines.append(f"{' ' * _INDENT * depth}{line[min(text_column, indent) :]}")
    return "\n".join(lines)


def with_plain_pipes(text: str) -> str:
    """Return a page without backslashes before the `|` in code in tables."""
    return "\n".join(
        _CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") and not is_code else line
        for line, is_code in _lines(text)
    )


def _last_paragraph(lines: list[str]) -> list[str]:
    """Return the lines after the last empty line, in reversed order."""
    found: list[str] = []
    for line in reversed(lines):
        if not line.strip():
            break
        found.append(line)
    return found


def _lines(text: str) -> list[tuple[str, bool]]:
    """Return each line of a page, and True if it is in a fenced block; the fences are part of the block."""
    found, fence = [], ""
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if fence:
            found.append((line, True))
            if line.strip() == fence:
                fence = ""
        else:
            found.append((line, mark is not None))
            fence = mark[1] if mark else ""
    return found


def count_tags(html: str) -> Counter[str]:
    """Return tag -> number of elements, for the tags that both Markdown parsers must agree on."""
    return Counter(tag for tag in re.findall(r"<(\w+)[\s>]", html) if tag in _COMPARED_TAGS)


# --------------------------------------------------------------------------------------------------- called by mkdocs


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and leave out the list of pages."""
    from mkdocs.structure.files import File

    list_page = files.get_file_from_path("README.md")
    if list_page is not None:
        files.remove(list_page)
    for path, page in EXTRA_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, STYLE, content=_CSS))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links and lists of a page."""
    source = source_path(page.file.src_uri)
    content = "\n".join(line for line in markdown.splitlines() if not _COMMENT.fullmatch(line))
    text = with_site_links(content, source, str(config.repo_url).rstrip("/"))
    page.meta["commonmark"] = text
    return with_wide_lists(with_plain_pipes(text))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Remove the attribute that makes the theme ask GitHub for the version and the stars of the repository."""
    return output.replace(' data-md-component="source"', "")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Compare the page with the HTML of a CommonMark parser, and give short code the class `short` for the style sheet.

    Raises:
        PluginError: The numbers of some element in `_COMPARED_TAGS` differ.
    """
    from markdown_it import MarkdownIt
    from mkdocs.exceptions import PluginError

    expected = count_tags(MarkdownIt("commonmark").enable("table").render(page.meta.pop("commonmark")))
    without_heading_links = re.sub(r'<a class="headerlink".*?</a>', "", html)
    found = count_tags(re.sub(r'<a id="__codelineno.*?</a>', "", without_heading_links))
    differing_tags = [tag for tag in _COMPARED_TAGS if found[tag] != expected[tag]]
    if differing_tags:
        differences = ", ".join(f"{found[tag]} <{tag}> instead of {expected[tag]}" for tag in differing_tags)
        raise PluginError(f"{source_path(page.file.src_uri)}: the site would differ from GitHub: {differences}")
    return _SHORT_CODE.sub(r'<code class="short">\1</code>', html)
