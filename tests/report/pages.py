"""A page taken apart with the parser of the standard library, and what may not be in one."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

_VOID = {"meta", "br", "input", "link", "img", "hr"}
_REMOTE = re.compile(r"(?:url\(|@import|src=|//)(?!#)", re.IGNORECASE)


class Element:
    """A start tag as the parser saw it, with the text that directly follows inside of it."""

    def __init__(self, tag: str, attributes: dict[str, str | None]) -> None:
        self.tag, self.attributes, self.text = tag, attributes, ""

    def has(self, name: str) -> bool:
        return name in (self.attributes.get("class") or "").split()


class Page(HTMLParser):
    """Every element of a page in order; tags that are not closed, or closed twice, are faults."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self.faults: list[str] = []
        self._open: list[Element] = []
        self.feed(text)
        self.close()
        self.faults += [f"<{element.tag}> is not closed" for element in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1].tag != tag:
            self.faults.append(f"</{tag}> closes {self._open[-1].tag if self._open else 'nothing'}")
            return
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str = "", name: str = "") -> list[Element]:
        """Elements of a tag and a class, where these are given."""
        return [e for e in self.elements if (not tag or e.tag == tag) and (not name or e.has(name))]

    def by_id(self, wanted: str) -> Element:
        (found,) = [e for e in self.elements if e.attributes.get("id") == wanted]
        return found

    @property
    def data(self) -> dict[str, Any]:
        """What the script draws from."""
        found: dict[str, Any] = json.loads(self.by_id("data").text)
        return found


def fault_of_page(text: str, *, has_script: bool = True) -> str | None:
    """The first reason why a page is not whole, not safe or not alone; None when there is none.

    One with a script has its data beside it; the policy of one without allows none.
    """
    page = Page(text)
    if page.faults:
        return page.faults[0]
    scripts = [e for e in page.all("script") if e.attributes.get("type") != "application/json"]
    if (len(scripts), len(page.all("script"))) != ((1, 2) if has_script else (0, 0)):
        return f"{len(page.all('script'))} scripts"
    policies = [e.attributes.get("content") or "" for e in page.all("meta") if "http-equiv" in e.attributes]
    digests = [base64.b64encode(hashlib.sha256(each.text.encode()).digest()).decode() for each in scripts]
    if not policies or "default-src 'none'" not in policies[0]:
        return "there is no policy"
    if re.findall(r"'sha256-([^']*)'", policies[0]) != digests or ("script-src" in policies[0]) != has_script:
        return "the policy does not name the script"
    ids = [e.attributes["id"] for e in page.elements if "id" in e.attributes]
    if len(ids) != len(set(ids)):
        return "an id is there twice"
    for element in page.elements:
        for key, value in element.attributes.items():
            if key.startswith("on") or key in ("src", "srcset", "action", "xlink:href"):
                return f"<{element.tag} {key}>"
            if key == "href" and not (value or "").startswith("#"):
                return f"<{element.tag} href={value}>"
            if key == "href" and element.tag == "use" and (value or "")[1:] not in ids:
                return f"{value} leads nowhere"
        if element.tag in ("img", "iframe", "object", "embed", "link", "form", "base"):
            return f"<{element.tag}>"
    for style in page.all("style"):
        if _REMOTE.search(style.text.replace("url(#hatch)", "")):
            return "the style asks for something outside"
    return None
