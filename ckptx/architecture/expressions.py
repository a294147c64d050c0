"""Numbers that follow from ``config.json``, as data: ``head_dim ?? hidden_size // num_attention_heads``.

An expression holds whole numbers, keys, ``+ - * //``, parentheses, and ``a ?? b`` for "a, or b where the config does
not say a", which binds weakest. A key with dots goes into sub-configs: ``text_config.hidden_size``; ``#key`` is the
length of a list. A key that ``config.json`` leaves out has the default of its config class, which the table records;
``null`` has no value.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptx.architecture.configs import refusal
from ckptx.errors import InputError

_TOKEN = re.compile(r"\s*(?:([0-9]+)|(#?[A-Za-z_][A-Za-z0-9_.]*)|(\?\?|//|[-+*()]))")


# In front of a key in `Scope.defaults`: its value where not only the key, but the whole sub-config is absent.
MADE = "!"


class Scope(NamedTuple):
    """Where keys get their values.

    Attributes:
        config: The contents of `config.json`.
        defaults: Per dotted key, what the config class takes where the key is absent.
        aliases: Per dotted key, another naming of its last part that the config class accepts.
        root: Keys to follow in `config` before anything else: a text model over the config of its composite.
    """

    config: Mapping[str, Any]
    defaults: Mapping[str, int | None] = {}
    aliases: Mapping[str, str] = {}
    root: tuple[str, ...] = ()

    def value(self, key: str) -> int | None:
        """The number of a dotted key, or with `#` in front the length of its list; None where nothing says it.

        Some composites are published with the keys of their text model at the root: a sub-config that is absent is
        read there. One that is nowhere is the one that the composite makes, whose values may be its own (`MADE`).

        Raises:
            InputError: The key holds text or a fraction, which no config class takes for a number.
        """
        kind = _length if key.startswith("#") else _number
        *path, last = key.removeprefix("#").split(".")
        node: Mapping[str, Any] = self.config
        is_absent = False
        for part in (*self.root, *path):
            below = node.get(part)
            is_absent = is_absent or not isinstance(below, Mapping)
            node = below if isinstance(below, Mapping) else node
        for name in (last, self.aliases.get(key, last)):
            if name in node:
                if isinstance(node[name], (str, float)):
                    raise InputError(refusal((*self.root, *path, name), node[name], "a whole number"))
                return kind(node[name])
        if is_absent and MADE + key in self.defaults:
            return self.defaults[MADE + key]
        return self.defaults.get(key)


def evaluate(expression: str, scope: Scope) -> int:
    """The value of an expression under a config.

    Raises:
        InputError: A key has no value, or the division of two keys is by zero.
        ValueError: The text is no expression.
    """
    value = attempt(expression, scope)
    if value is None:
        missing = [key for key in keys_of(expression) if scope.value(key) is None]
        raise InputError(
            f"config.json: {expression}: found no number for {', '.join(missing) or 'it'}, needed one; "
            "add the key to config.json"
        )
    return value


def attempt(expression: str, scope: Scope) -> int | None:
    """The value of an expression, None where a key that it needs has none."""
    return _value(_parsed(expression), scope)


def keys_of(expression: str) -> frozenset[str]:
    """The dotted keys that an expression reads."""
    return frozenset(found[2].removeprefix("#") for found in _TOKEN.finditer(expression) if found[2])


# A number, a key, or an operator between two of these.
_Tree = int | str | tuple[str, Any, Any]


def _value(tree: _Tree, scope: Scope) -> int | None:
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return scope.value(tree)
    operator, first, second = tree
    left = _value(first, scope)
    if operator == "??":
        return left if left is not None else _value(second, scope)
    right = _value(second, scope)
    if left is None or right is None:
        return None
    if operator == "//":
        return left // right if right else None
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


@functools.cache
def _parsed(expression: str) -> _Tree:
    tokens = list(_tokens(expression))
    tree, rest = _alternatives(tokens)
    if rest:
        raise ValueError(f'expression "{expression}": found "{rest[0]}" where it should end')
    return tree


def _tokens(expression: str) -> Iterator[str]:
    at = 0
    text = expression.rstrip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f'expression "{expression}": found "{text[at:]}", needed a number, a key or an operator')
        yield found[0].strip()
        at = found.end()


def _alternatives(tokens: list[str]) -> tuple[_Tree, list[str]]:
    tree, rest = _chain(tokens, ("+", "-"))
    if rest and rest[0] == "??":
        second, rest = _alternatives(rest[1:])
        tree = ("??", tree, second)
    return tree, rest


def _chain(tokens: list[str], operators: tuple[str, ...]) -> tuple[_Tree, list[str]]:
    """Operands of one precedence, from left to right."""

    def operand(rest: list[str]) -> tuple[_Tree, list[str]]:
        return _chain(rest, ("*", "//")) if "+" in operators else _atom(rest)

    tree, rest = operand(tokens)
    while rest and rest[0] in operators:
        operator = rest[0]
        second, rest = operand(rest[1:])
        tree = (operator, tree, second)
    return tree, rest


def _atom(tokens: list[str]) -> tuple[_Tree, list[str]]:
    if not tokens:
        raise ValueError("expression: found its end, needed a number or a key")
    first, rest = tokens[0], tokens[1:]
    if first == "(":
        tree, rest = _alternatives(rest)
        if rest[:1] != [")"]:
            raise ValueError('expression: found no ")" for a "("')
        return tree, rest[1:]
    if first.isdecimal():
        return int(first), rest
    if not (first[0].isalpha() or first[0] in "#_"):
        raise ValueError(f'expression: found "{first}", needed a number or a key')
    return first, rest


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, list) else None


def _number(value: Any) -> int | None:
    """A whole number of `config.json`; booleans count as 0 and 1, the rest (null, lists, words) has no number."""
    return int(value) if isinstance(value, int) else None
