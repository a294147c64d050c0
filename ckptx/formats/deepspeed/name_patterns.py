"""Match names with regular expressions from a checkpoint, in time that is bounded for any expression.

`re` takes exponential time for some expressions, so it does not evaluate those of a file. Here, an expression maps a
set of positions in a name to the set of positions at which a match can end:

    characters    a  \\.  .  \\d  \\w  [a-z]
    repetition    *  +  ?
    others        ^ at the beginning, $ at the end, (...), (?:...) and |

DeepSpeed's own expressions use these; others are refused. As with `re.match`, a match begins at the first character
of a name, and may end before its last one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

_MAX_LENGTH, _MAX_DEPTH = 1024, 4  # characters of an expression, and levels of parentheses
_PLAIN = re.compile(r"[^\\.^$*+?{}\[\]|()]")
_ESCAPE = re.compile(r"\\(?:[dDwW]|[^0-9A-Za-z])")
_CLASS = re.compile(r"\[\^?(?:[\w./:]|-(?!-)|\\[dwDW.\-])+\]")

# Positions of a name -> positions after a match that begins at one of them.
_Matcher = Callable[[str, frozenset[int]], frozenset[int]]


class UnsupportedPattern(ValueError):
    """An expression uses syntax that is not evaluated."""


class NamePattern:
    """One regular expression.

    Attributes:
        text: The expression.
        whole_name: The only name that it matches; None if it can match several.
    """

    __slots__ = ("_matcher", "text", "whole_name")

    def __init__(self, text: str) -> None:
        """Parse an expression.

        Raises:
            UnsupportedPattern: It is too long, or uses other syntax than that of the module.
        """
        self.text = text
        self.whole_name = _literal_name(text)
        self._matcher = None if self.whole_name is not None else _Parser(text).parse()

    def matches(self, name: str) -> bool:
        """Return True if the expression matches at the beginning of a name."""
        if self._matcher is None:
            return name == self.whole_name
        return bool(self._matcher(name, frozenset((0,))))


class NamePatterns:
    """Several regular expressions; those of a single name are found without trying all of them."""

    __slots__ = ("_others", "_whole_names")

    def __init__(self, texts: Iterable[str]) -> None:
        """Parse the expressions; one that is listed twice counts once.

        Raises:
            UnsupportedPattern: See `NamePattern`.
        """
        patterns = [NamePattern(text) for text in dict.fromkeys(texts)]
        self._whole_names: dict[str, list[str]] = {}
        for pattern in patterns:
            if pattern.whole_name is not None:
                self._whole_names.setdefault(pattern.whole_name, []).append(pattern.text)
        self._others = [pattern for pattern in patterns if pattern.whole_name is None]

    def matching(self, name: str) -> list[str]:
        """Return the expressions that match a name."""
        others = [pattern.text for pattern in self._others if pattern.matches(name)]
        return [*self._whole_names.get(name, ()), *others]


def _literal_name(text: str) -> str | None:
    r"""Return the name of an expression such as `^model\.norm\.weight$`; None for others."""
    if not (text.startswith("^") and text.endswith("$")) or text.endswith("\\$"):
        return None
    name = re.sub(r"\\([^0-9A-Za-z])", r"\1", text[1:-1])
    return name if re.escape(name) == text[1:-1] else None


class _Token(NamedTuple):
    """One token; `kind` is "set" for an expression of one character, else the special character itself."""

    kind: str
    text: str


def _tokens(text: str) -> list[_Token]:
    if len(text) > _MAX_LENGTH:
        raise UnsupportedPattern(f"is longer than {_MAX_LENGTH} characters")
    tokens: list[_Token] = []
    position = 0
    while position < len(text):
        if text.startswith("(?:", position):
            tokens.append(_Token("(", "(?:"))
            position += 3
            continue
        for expression in (_ESCAPE, _CLASS, _PLAIN):
            found = expression.match(text, position)
            if found is not None:
                tokens.append(_Token("set", found[0] if expression is not _PLAIN else re.escape(found[0])))
                position = found.end()
                break
        else:
            character = text[position]
            if character not in ".^$*+?|()":
                raise UnsupportedPattern(f'has "{character}", which is not supported')
            tokens.append(_Token("set" if character == "." else character, character))
            position += 1
    return tokens


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._position = 0

    def parse(self) -> _Matcher:
        matcher = self._parse_alternatives(0)
        if self._position < len(self._tokens):
            raise UnsupportedPattern("has unbalanced parentheses")
        return matcher

    def _peek(self) -> str:
        return self._tokens[self._position].kind if self._position < len(self._tokens) else ""

    def _parse_alternatives(self, depth: int) -> _Matcher:
        if depth > _MAX_DEPTH:
            raise UnsupportedPattern(f"has more than {_MAX_DEPTH} nested groups")
        alternatives = [self._parse_sequence(depth)]
        while self._peek() == "|":
            self._position += 1
            alternatives.append(self._parse_sequence(depth))
        return alternatives[0] if len(alternatives) == 1 else _any_of(alternatives)

    def _parse_sequence(self, depth: int) -> _Matcher:
        parts: list[_Matcher] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._parse_repeated(depth))
        return _in_order(parts)

    def _parse_repeated(self, depth: int) -> _Matcher:
        token = self._tokens[self._position]
        self._position += 1
        if token.kind == "set":
            matcher = _one_of(token.text)
        elif token.kind == "(":
            matcher = self._parse_alternatives(depth + 1)
            if self._peek() != ")":
                raise UnsupportedPattern("has unbalanced parentheses")
            self._position += 1
        elif token.kind == "^":
            return _at_beginning
        elif token.kind == "$":
            return _at_end
        else:
            raise UnsupportedPattern(f'has "{token.text}" without a character before it')
        quantifier = self._peek()
        if quantifier not in ("*", "+", "?"):
            return matcher
        if token.kind == "(" and quantifier != "?":
            raise UnsupportedPattern("has a repeated group")
        self._position += 1
        return _repeated(matcher, quantifier)


def _at_beginning(name: str, starts: frozenset[int]) -> frozenset[int]:
    return starts & {0}


def _at_end(name: str, starts: frozenset[int]) -> frozenset[int]:
    return starts & {len(name)}


def _one_of(text: str) -> _Matcher:
    """Return a matcher of one character, from an expression that matches one character."""
    try:
        expression = re.compile(text)
    except re.error as error:
        raise UnsupportedPattern(f"is not valid: {error}") from None

    def match(name: str, starts: frozenset[int]) -> frozenset[int]:
        return frozenset(at + 1 for at in starts if at < len(name) and expression.fullmatch(name[at]) is not None)

    return match


def _in_order(parts: list[_Matcher]) -> _Matcher:
    """Return a matcher of a sequence of parts."""

    def match(name: str, starts: frozenset[int]) -> frozenset[int]:
        for part in parts:
            if not starts:
                break
            starts = part(name, starts)
        return starts

    return match


def _any_of(alternatives: list[_Matcher]) -> _Matcher:
    """Return a matcher of any one of several alternatives."""

    def match(name: str, starts: frozenset[int]) -> frozenset[int]:
        return frozenset().union(*(alternative(name, starts) for alternative in alternatives))

    return match


def _repeated(matcher: _Matcher, quantifier: str) -> _Matcher:
    """Return a matcher of repetitions. Each position is extended only once, which bounds the time for any name."""

    def match(name: str, starts: frozenset[int]) -> frozenset[int]:
        ends = matcher(name, starts)
        if quantifier != "?":
            added = ends
            while added:
                added = matcher(name, added) - ends
                ends |= added
        return ends if quantifier == "+" else ends | starts

    return match
