"""YAML of a recipe as plain values: None, bools, numbers, texts, lists and mappings with texts for keys.

PyYAML reads YAML 1.1, where 1e-5 is a text, 010 is 8, 1:30 is 90 and `no` is false. Here scalars mean what the core
schema of YAML 1.2.2 (chapter 10.3) says. Nothing is executed; what a recipe has no use for is refused.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from ckptx.errors import UsageError
from ckptx.untrusted.printable import one_line

_INTEGER_BITS = 63
_DEPTH = 32

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """SafeLoader with the scalars of YAML 1.2, without aliases, tags and keys that come twice."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # of the class: PyYAML fills it in `add_implicit_resolver`

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem=f"an alias, *{self.peek_event().anchor}, needed the value itself; write it out",
                problem_mark=self.peek_event().start_mark,
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.MarkedYAMLError(
                    problem=f"a key that is no text, {key.value!s:.40}; put it in quotes", problem_mark=key.start_mark
                )
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f'key "{key.value}" appears twice; remove one', problem_mark=key.start_mark
                )
            seen.add(key.value)
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}


def _mapping(loader: _Loader, node: Any) -> dict[Any, Any]:
    return loader.construct_mapping(node)


def _integer(loader: _Loader, node: Any) -> int:
    text = loader.construct_scalar(node)
    if len(text) > 20 or int(text).bit_length() > _INTEGER_BITS:
        raise yaml.MarkedYAMLError(
            problem=f"a number of more than {_INTEGER_BITS} bits; give a smaller one", problem_mark=node.start_mark
        )
    return int(text)


def _number(loader: _Loader, node: Any) -> float:
    text = loader.construct_scalar(node)
    found = float(text.replace(".inf", "inf").replace(".nan", "nan")) if text[-1].isdigit() or text[-1] == "." else None
    if found is None or found in (float("inf"), float("-inf")):
        raise yaml.MarkedYAMLError(problem=f"{text}, needed a finite number", problem_mark=node.start_mark)
    return found


def _refused(loader: _Loader, node: Any) -> Any:
    raise yaml.MarkedYAMLError(
        problem=f"a tag, {node.tag}, needed plain values; leave it out", problem_mark=node.start_mark
    )


for _tag, _pattern, _first in (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern.pattern})\Z"), _first)
_Loader.yaml_constructors = {
    f"tag:yaml.org,2002:{_tag}": _construct
    for _tag, _construct in (
        ("null", yaml.SafeLoader.construct_yaml_null),
        ("bool", yaml.SafeLoader.construct_yaml_bool),
        ("str", yaml.SafeLoader.construct_yaml_str),
        ("seq", lambda loader, node: loader.construct_sequence(node, deep=True)),
        ("map", _mapping),
        ("int", _integer),
        ("float", _number),
    )
} | {None: _refused}


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text.

    Args:
        text: One document.
        where: Subject of errors.

    Raises:
        UsageError: It is not YAML, or has what a recipe has no use for: a key twice, keys that are no texts, aliases,
            tags, NaN, infinity, numbers of more than 63 bits, several documents, or values nested deeper than 32.
    """
    try:
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f" in line {mark.line + 1}" if mark is not None and "\n" in text.rstrip() else ""
        raise UsageError(f"{where}: found{at} {_said(error)}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{where}: is no YAML: {_line(error)}; correct it") from error
    except RecursionError as error:
        raise UsageError(f"{where}: is nested too deeply, needed at most {_DEPTH} levels; write it flatter") from error
    _check_depth(value, where)
    return value


def _said(error: yaml.MarkedYAMLError) -> str:
    """What is wrong: ours as it is, PyYAML's with what it is about."""
    problem = one_line(str(error.problem), 400)
    if ";" in problem or ", needed" in problem:
        return problem
    return f"what is no YAML: {problem}; correct it"


def _line(error: Exception) -> str:
    return one_line((str(error).splitlines() or ["no reason"])[0], 400)


def _check_depth(value: Any, where: str) -> None:
    """Walks level by level; no recursion, whatever the nest."""
    level = [value]
    for _ in range(_DEPTH):
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
        if not level:
            return
    raise UsageError(f"{where}: is nested too deeply, needed at most {_DEPTH} levels; write it flatter")
