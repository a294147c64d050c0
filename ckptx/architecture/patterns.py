"""Tensor names as patterns: layer and expert indices become ``*``, and a set of patterns packs into one line.

A model has thousands of tensor names but few patterns, and the patterns of one model share most of their
text. ``pack`` writes the set as a brace tree, which keeps the generated table small and still readable::

    {"lm_head.weight", "model.layers.*.mlp.up_proj.weight", "model.layers.*.mlp.up_proj.bias"}
    "lm_head.weight,model.layers.*.mlp.up_proj.{bias,weight}"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptx.mapping.names import pattern_of

_SEPARATORS = frozenset("{},")


def patterns_of(names: Iterable[str]) -> frozenset[str]:
    """The distinct patterns of ``names``."""
    return frozenset(pattern_of(name) for name in names)


# A whole layer by its number, behind the last one that the model builds: it predicts further tokens.
_LAYER = re.compile(r"(?P<layers>.*layers\\?\.)[0-9]+(\\?\.)?(\.\*)?\$?")
# What such a layer has besides the names of every layer.
_MTP_MODULE = r"(embed_tokens|eh_proj|enorm|hnorm|shared_head)\."


def regex_for_patterns(regex: str) -> str:
    """A regular expression for names as one for patterns, in which every index is ``*``.

    Example:
        >>> regex_for_patterns(r"layers\\.\\d+\\.bias")
        'layers\\\\.\\\\*\\\\.bias'
    """
    layer = _LAYER.fullmatch(regex)
    if layer:
        return layer["layers"] + r"\*\." + _MTP_MODULE
    return re.sub(r"(?<=\.)([0-9]+|\\d\+|\[0-9\]\+)(?=\\?\.|$)", r"\\*", regex)


def pack(patterns: Iterable[str]) -> str:
    """Write a set of patterns as one brace tree, the same text for the same set.

    Raises:
        ValueError: A pattern holds ``{``, ``}`` or ``,``.
    """
    root: dict[str, Any] = {}
    for pattern in patterns:
        if _SEPARATORS & set(pattern):
            raise ValueError(f'tensor name pattern "{pattern}" holds one of "{{", "}}", ","')
        node = root
        for part in pattern.split("."):
            node = node.setdefault(part, {})
        node[""] = {}  # a name ends here: a name may be the prefix of another (`gate`, `gate.weight`)
    return ",".join(_written(root))


def unpack(text: str) -> frozenset[str]:
    """The set of patterns that ``pack`` wrote."""
    found: list[str] = []
    heads: list[str] = []  # the text in front of each open brace
    head, part = "", ""
    for char in text:
        if char == "{":
            heads.append(head)
            head, part = head + part, ""
        elif char in ",}":
            if part:
                found.append(head + part)
            part = ""
            if char == "}":
                head = heads.pop()
        else:
            part += char
    if part:
        found.append(head + part)
    return frozenset(found)


def _written(node: Mapping[str, Any]) -> Iterator[str]:
    for part in sorted(key for key in node if key):
        below = node[part]
        if "" in below:
            yield part
        branches = list(_written(below))
        if len(branches) == 1:
            yield f"{part}.{branches[0]}"
        elif branches:
            yield part + ".{" + ",".join(branches) + "}"
