"""Tensor names as patterns: layer and expert indices become ``*``.

A model has thousands of tensor names but few patterns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptx.mapping.names import pattern_of


def patterns_of(names: Iterable[str]) -> frozenset[str]:
    """Return the distinct patterns of ``names``."""
    return frozenset(pattern_of(name) for name in names)


# A single layer after the last one that the model builds, by number: a multi-token prediction (MTP) layer.
_SINGLE_LAYER = re.compile(r"(?P<layers>.*layers\\?\.)[0-9]+(\\?\.)?(\.\*)?\$?")
# Modules of such a layer that other layers do not have.
_MTP_MODULE = r"(embed_tokens|eh_proj|enorm|hnorm|shared_head)\."


def regex_for_patterns(regex: str) -> str:
    """Convert a regular expression for names to one for patterns, in which every index is ``*``.

    Example:
        >>> regex_for_patterns(r"layers\\.\\d+\\.bias")
        'layers\\\\.\\\\*\\\\.bias'
    """
    layer = _SINGLE_LAYER.fullmatch(regex)
    if layer:
        return layer["layers"] + r"\*\." + _MTP_MODULE
    return re.sub(r"(?<=\.)([0-9]+|\\d\+|\[0-9\]\+)(?=\\?\.|$)", r"\\*", regex)
