"""Read YAML as plain values: None, booleans, numbers, strings, lists and mappings with string keys.

ruamel.yaml parses the text into nodes, and no constructor runs: `_to_value` handles every kind of value. Plain scalars
follow the core schema of YAML 1.2.2 (chapter 10.3), whatever version a `%YAML` line asks for; ruamel.yaml would also
accept dates, 1_000, 0b1 and merge keys. Features that recipes and run configs do not use are refused.

ruamel.yaml is not in the core install: import this module where it is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, MaxDepthExceededError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from ckptx.errors import InputError
from ckptx.untrusted.printable import one_line

_INTEGER_BITS = 63
_MAX_DEPTH = 32
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOLEANS = {text: text.lower() == "true" for text in ("true", "True", "TRUE", "false", "False", "FALSE")}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NON_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


class _YamlError(MarkedYAMLError):  # type: ignore[misc]  # mypy skips ruamel.yaml
    """Valid YAML that is not supported, with our message."""


class _PlainComposer(Composer):  # type: ignore[misc]
    """Refuses tags, and aliases: a few lines of them can stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.parser.peek_event()
        if isinstance(event, AliasEvent):
            _refuse(f"an alias, *{event.anchor}, which is not supported; write out the value", event)
        if event.ctag is not None:
            _refuse(f"a tag, {event.ctag}, which is not supported; leave it out", event)
        return super().compose_node(parent, index)


def parse_yaml(text: str, subject: str, keys: Mapping[str, Any] | None = None) -> Any:
    """Return the value of a YAML document.

    Args:
        text: The document.
        subject: Path or other subject of error messages.
        keys: Selects the keys to return of a document that is a mapping. The value of each selected key is None to
            return its whole value, or a mapping that selects the keys of that value in turn. The values of other keys
            are parsed but not checked, so that they may be numbers of any size. None returns the whole document.

    Raises:
        InputError: It is not YAML, or it contains a repeated key, a key that is not a string, an alias, a tag, NaN,
            infinity, an integer of more than 63 bits, a second document, or values nested deeper than 32.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _PlainComposer
    yaml.max_depth = _MAX_DEPTH
    try:
        return _to_value(yaml.compose(text), keys)
    except MaxDepthExceededError as error:
        raise InputError(f"{subject}: is nested deeper than {_MAX_DEPTH} levels; write it flatter") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark
        location = f" in line {mark.line + 1}" if mark is not None and "\n" in text.rstrip() else ""
        problem = one_line(str(error.problem), 400)
        message = problem if isinstance(error, _YamlError) else f"invalid YAML: {problem}; correct it"
        raise InputError(f"{subject}: found{location} {message}") from error
    except YAMLError as error:
        reason = one_line((str(error).splitlines() or ["no reason"])[0], 400)
        raise InputError(f"{subject}: is not valid YAML: {reason}; correct it") from error


def _to_value(node: Node | None, keys: Mapping[str, Any] | None = None) -> Any:
    """Return the value of a node; None for an empty document. The composer limits the depth.

    Args:
        node: The node.
        keys: Keys to convert, see `parse_yaml`; None for all.
    """
    if node is None:
        return None
    if isinstance(node, ScalarNode):
        return _to_scalar(node)
    if not isinstance(node, MappingNode):
        return [_to_value(each) for each in node.value]
    mapping: dict[str, Any] = {}
    seen: set[str] = set()
    for key_node, value in node.value:
        key = _to_value(key_node) if isinstance(key_node, ScalarNode) else None
        if not isinstance(key, str):
            description = f"{key_node.value:.40}" if isinstance(key_node, ScalarNode) else "but a mapping or a list"
            _refuse(f"a key that is not a string, {description}; put it in quotes", key_node)
        if key in seen:
            _refuse(f'key "{key}" appears twice; remove one', key_node)
        seen.add(key)
        if keys is None or key in keys:
            mapping[key] = _to_value(value, None if keys is None else keys[key])
    return mapping


def _to_scalar(node: ScalarNode) -> Any:
    """Return the value of a scalar by the core schema of YAML 1.2.2; one in quotes is a string."""
    text = node.value
    if node.style is not None:
        return text
    if _NULL.fullmatch(text):
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        if len(text) > 20 or int(text).bit_length() > _INTEGER_BITS:
            _refuse(f"a number of more than {_INTEGER_BITS} bits; give a smaller one", node)
        return int(text)
    if _NON_FINITE.fullmatch(text) or (_NUMBER.fullmatch(text) and float(text) in (float("inf"), float("-inf"))):
        _refuse(f"{text}, but numbers must be finite; correct it", node)
    return float(text) if _NUMBER.fullmatch(text) else text


def _refuse(problem: str, node: Any) -> NoReturn:
    raise _YamlError(problem=problem, problem_mark=node.start_mark)
