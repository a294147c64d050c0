"""Expressions that compute integers from ``config.json``: ``head_dim ?? hidden_size // num_attention_heads``.

An expression has integers, keys, ``+ - * //``, parentheses, and ``a ?? b`` for "a, or b if a has no value", which binds
weakest. A key with dots is in a sub-config: ``text_config.hidden_size``; ``#key`` is the length of a list. A key that
``config.json`` omits has the default of its config class, which the table records, or else no value; ``null`` has no
value. A composite is a class whose config has sub-configs, such as a vision language model.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptx.architecture.configs import invalid_value_message
from ckptx.errors import InputError

_TOKEN = re.compile(r"\s*(?:([0-9]+)|(#?[A-Za-z_][A-Za-z0-9_.]*)|(\?\?|//|[-+*()]))")


# Prefix of a key in `Scope.defaults` whose value applies if the whole sub-config is absent, not only the key.
COMPOSITE_PREFIX = "!"


class Scope(NamedTuple):
    """Config, defaults and aliases from which the values of keys are read.

    Attributes:
        config: Contents of `config.json`.
        defaults: Default of the config class by dotted key, for keys that `config` omits; see also `COMPOSITE_PREFIX`.
        aliases: Dotted key -> another name of its last part that the config class accepts.
        root: Keys to follow in `config` before those of each dotted key: ("text_config",) for a class of the text model
            alone whose `config.json` is that of a composite, else ().
    """

    config: Mapping[str, Any]
    defaults: Mapping[str, int | None] = {}
    aliases: Mapping[str, str] = {}
    root: tuple[str, ...] = ()

    def value(self, key: str) -> int | None:
        """Return the number of a dotted key, or with `#` before it the length of its list; None if it has no value.

        Some composites are published with the keys of their text model at the root, so the keys of an absent sub-config
        are read at the level above it. If they are absent there, too, their defaults are those of the sub-config that
        the composite builds, which may differ from those of the sub-config's class (`COMPOSITE_PREFIX`).

        Raises:
            InputError: The value is a string or a fraction, which no config class accepts as a number.
        """
        convert = _list_length if key.startswith("#") else _integer
        *path, last = key.removeprefix("#").split(".")
        node: Mapping[str, Any] = self.config
        is_absent = False
        for part in (*self.root, *path):
            nested = node.get(part)
            is_absent = is_absent or not isinstance(nested, Mapping)
            node = nested if isinstance(nested, Mapping) else node
        for name in (last, self.aliases.get(key, last)):
            if name in node:
                if isinstance(node[name], (str, float)):
                    raise InputError(invalid_value_message((*self.root, *path, name), node[name], "a whole number"))
                return convert(node[name])
        if is_absent and COMPOSITE_PREFIX + key in self.defaults:
            return self.defaults[COMPOSITE_PREFIX + key]
        return self.defaults.get(key)


def evaluate(expression: str, scope: Scope) -> int:
    """Return the value of an expression under a config.

    Raises:
        InputError: A key has no value or an invalid one, or a division is by zero.
        ValueError: `expression` is malformed.
    """
    value = try_evaluate(expression, scope)
    if value is None:
        missing = dict.fromkeys(_missing_keys(_parse(expression), scope))
        if not missing:  # the only other cause
            raise InputError(f"config.json: {expression}: division by zero; correct the divisor in config.json")
        raise InputError(f"config.json: {expression}: no number for {', '.join(missing)}; add it to config.json")
    return value


def try_evaluate(expression: str, scope: Scope) -> int | None:
    """Return the value of an expression; None if a key that it needs has no value, or a division is by zero.

    Raises:
        InputError: A key has a string or a fraction as its value.
        ValueError: `expression` is malformed.
    """
    return _evaluate_tree(_parse(expression), scope)


def keys_of(expression: str) -> frozenset[str]:
    """Return the dotted keys that an expression reads, without `#`."""
    return frozenset(found[2].removeprefix("#") for found in _TOKEN.finditer(expression) if found[2])


# Syntax tree: a number, a key, or an operator with the trees of its two operands.
_Tree = int | str | tuple[str, Any, Any]


def _evaluate_tree(tree: _Tree, scope: Scope) -> int | None:
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return scope.value(tree)
    operator, first, second = tree
    left = _evaluate_tree(first, scope)
    if operator == "??":
        return left if left is not None else _evaluate_tree(second, scope)
    right = _evaluate_tree(second, scope)
    if left is None or right is None:
        return None
    if operator == "//":
        return left // right if right else None
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _missing_keys(tree: _Tree, scope: Scope) -> Iterator[str]:
    """Yield the keys whose missing values leave an expression without a value."""
    if isinstance(tree, int) or _evaluate_tree(tree, scope) is not None:
        return
    if isinstance(tree, str):
        yield tree
    else:
        yield from _missing_keys(tree[1], scope)
        yield from _missing_keys(tree[2], scope)


@functools.cache
def _parse(expression: str) -> _Tree:
    tokens = list(_tokenize(expression))
    tree, rest = _parse_alternatives(tokens)
    if rest:
        raise ValueError(f'expression "{expression}": found "{rest[0]}" where it should end')
    return tree


def _tokenize(expression: str) -> Iterator[str]:
    position = 0
    text = expression.rstrip()
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise ValueError(f'expression "{expression}": "{text[position:]}" is not a number, a key or an operator')
        yield found[0].strip()
        position = found.end()


def _parse_alternatives(tokens: list[str]) -> tuple[_Tree, list[str]]:
    tree, rest = _parse_chain(tokens, ("+", "-"))
    if rest and rest[0] == "??":
        second, rest = _parse_alternatives(rest[1:])
        tree = ("??", tree, second)
    return tree, rest


def _parse_chain(tokens: list[str], operators: tuple[str, ...]) -> tuple[_Tree, list[str]]:
    """Parse operands of one precedence, from left to right; return their tree and the remaining tokens."""

    def parse_operand(rest: list[str]) -> tuple[_Tree, list[str]]:
        return _parse_chain(rest, ("*", "//")) if "+" in operators else _parse_atom(rest)

    tree, rest = parse_operand(tokens)
    while rest and rest[0] in operators:
        operator = rest[0]
        second, rest = parse_operand(rest[1:])
        tree = (operator, tree, second)
    return tree, rest


def _parse_atom(tokens: list[str]) -> tuple[_Tree, list[str]]:
    if not tokens:
        raise ValueError("expression: ends where a number or a key is expected")
    first, rest = tokens[0], tokens[1:]
    if first == "(":
        tree, rest = _parse_alternatives(rest)
        if rest[:1] != [")"]:
            raise ValueError('expression: a "(" has no ")"')
        return tree, rest[1:]
    if first.isdecimal():
        return int(first), rest
    if not (first[0].isalpha() or first[0] in "#_"):
        raise ValueError(f'expression: "{first}" is not a number or a key')
    return first, rest


def _list_length(value: Any) -> int | None:
    return len(value) if isinstance(value, list) else None


def _integer(value: Any) -> int | None:
    """Return an integer of `config.json`; booleans count as 0 and 1, other values (null, lists, strings) as None."""
    return int(value) if isinstance(value, int) else None
