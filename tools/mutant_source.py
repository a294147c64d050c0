"""List the mutants of a source file: small changes of the code, made by the operators of mutmut.

Not mutated, because no test should depend on them or because a change has no effect:

* docstrings, type annotations (`Literal`, too), imports, decorators and `cast`
* messages: `raise` statements, `assert` (its condition cannot fail), every string with a space or line break, f-strings
  with such text, and calls of `ckptx.wording` and of the classes of `ckptx.errors`
* logs and warnings: calls of a logger and of `warnings`
* `__repr__`, `__str__`, and code for type checkers only (`if TYPE_CHECKING`)
* the arguments `strict=` (an assertion that cannot fail), `encoding=` (the encoding of every supported system) and
  `repr=`
* the argument `False`, if the change is None, which is false as well
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

SKIPPED_NODES = (cst.Annotation, cst.Assert, cst.Decorator, cst.Import, cst.ImportFrom, cst.Raise)
SKIPPED_KEYWORDS = {"encoding", "repr", "strict"}
SKIPPED_CALLS = {"cast", "TypeVar", "ParamSpec", "_logger", "logger", "log", "logging", "warnings"}
MESSAGE_MODULES = ("ckptx.errors", "ckptx.wording")


@dataclass(frozen=True)
class Mutant:
    """One change of a file.

    Attributes:
        path: Path of the file.
        module: Syntax tree of the file.
        original: Node of the tree that is replaced.
        replacement: Node that replaces it.
        operator: Name of the operator of mutmut.
        line: Line of the change, from 1.
        lines: Lines of the innermost statement with the change, without the body of that statement.
    """

    path: Path
    module: cst.Module
    original: cst.CSTNode
    replacement: cst.CSTNode
    operator: str
    line: int
    lines: range

    @cached_property
    def source(self) -> str:
        """Return the text of the whole file with the change."""
        changed = self.module.deep_replace(self.original, self.replacement)
        assert isinstance(changed, cst.Module)
        return changed.code

    @cached_property
    def diff(self) -> str:
        """Return the changed lines, as `- old` and `+ new`."""
        lines = difflib.unified_diff(self.module.code.splitlines(), self.source.splitlines(), lineterm="", n=0)
        return "\n".join(f"{line[0]} {line[1:].strip()}" for line in list(lines)[2:] if line[0] in "+-")

    def changes_code(self) -> bool:
        """Return True if the change compiles, and to other code than the original."""
        try:
            changed = compile(self.source, str(self.path), "exec", dont_inherit=True)
        except SyntaxError:
            return False
        return changed != compile(self.module.code, str(self.path), "exec", dont_inherit=True)


def mutants_of(path: Path) -> list[Mutant]:
    """Return all mutants of a file, in the order of its code."""
    wrapper = MetadataWrapper(cst.parse_module(path.read_text(encoding="utf-8")))
    visitor = _Visitor(path, wrapper.module)
    wrapper.visit(visitor)
    return visitor.mutants


class _Visitor(cst.CSTVisitor):
    """Collect the mutants of a file.

    Args:
        path: Path of the file.
        module: Syntax tree of the file.
    """

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, path: Path, module: cst.Module) -> None:
        super().__init__()
        self.path = path
        self.module = module
        self.mutants: list[Mutant] = []
        self.skipped_calls = SKIPPED_CALLS | _message_functions(module)
        self.statements: list[range] = []  # lines of each statement around the current node, the innermost last

    def on_visit(self, node: cst.CSTNode) -> bool:
        if self._is_skipped(node):
            return False
        if isinstance(node, (cst.BaseCompoundStatement, cst.SimpleStatementLine)):
            self.statements.append(self._lines(node))
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                for replacement in operator(node):
                    if not _is_skipped_change(node, replacement):
                        self._add(node, replacement, operator.__name__.removeprefix("operator_"))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        is_statement = isinstance(original_node, (cst.BaseCompoundStatement, cst.SimpleStatementLine))
        if is_statement and not self._is_skipped(original_node):
            self.statements.pop()

    def _add(self, node: cst.CSTNode, replacement: cst.CSTNode, operator: str) -> None:
        position = self.get_metadata(PositionProvider, node, None)
        lines = self.statements[-1]
        line = position.start.line if position is not None else lines.start  # operators such as `<` have no position
        self.mutants.append(Mutant(self.path, self.module, node, replacement, operator, line, lines))

    def _lines(self, node: cst.BaseCompoundStatement | cst.SimpleStatementLine) -> range:
        """Return the lines of a statement, without the body of a compound statement."""
        position = self.get_metadata(PositionProvider, node)
        if isinstance(node, cst.SimpleStatementLine):
            return range(position.start.line, position.end.line + 1)
        body = node if isinstance(node, cst.Match) else node.body
        first = body.cases[0] if isinstance(body, cst.Match) else body.body[0]
        return range(
            position.start.line, max(self.get_metadata(PositionProvider, first).start.line, position.start.line + 1)
        )

    def _is_skipped(self, node: cst.CSTNode) -> bool:
        if isinstance(node, SKIPPED_NODES) or _is_text(node):
            return True
        if isinstance(node, cst.FunctionDef):
            return node.name.value in {"__repr__", "__str__"}
        if isinstance(node, cst.If):
            return isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING"
        if isinstance(node, cst.Expr):
            return isinstance(node.value, (cst.SimpleString, cst.ConcatenatedString))
        if isinstance(node, cst.Arg):
            return node.keyword is not None and node.keyword.value in SKIPPED_KEYWORDS
        if isinstance(node, cst.Call):
            function = node.func.value if isinstance(node.func, cst.Attribute) else node.func
            return isinstance(function, cst.Name) and function.value in self.skipped_calls
        if isinstance(node, cst.Subscript):
            return isinstance(node.value, cst.Name) and node.value.value == "Literal"
        return False


def _message_functions(module: cst.Module) -> set[str]:
    """Return the names that a file imports from `MESSAGE_MODULES`."""
    names = set()
    for statement in module.body:
        for part in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
            if not isinstance(part, cst.ImportFrom) or part.module is None or isinstance(part.names, cst.ImportStar):
                continue
            if module.code_for_node(part.module) in MESSAGE_MODULES:
                names |= {
                    module.code_for_node(alias.asname.name if alias.asname else alias.name) for alias in part.names
                }
    return names


def _is_text(node: cst.CSTNode) -> bool:
    """Return True if a node is a string with a space or line break, as messages are."""
    if isinstance(node, cst.ConcatenatedString):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, cst.FormattedString):
        return any(isinstance(part, cst.FormattedStringText) and _has_space(part.value) for part in node.parts)
    return isinstance(node, cst.SimpleString) and _has_space(node.value)


def _has_space(text: str) -> bool:
    return " " in text or "\\n" in text


def _is_skipped_change(node: cst.CSTNode, replacement: cst.CSTNode) -> bool:
    """Return True if a change affects a message or a skipped argument, or replaces an argument False by None."""
    if isinstance(node, cst.IfExp):
        return _is_text(node.body) or _is_text(node.orelse)
    if isinstance(node, (cst.Assign, cst.AnnAssign, cst.AugAssign)):
        return node.value is not None and _is_text(node.value)
    if not isinstance(node, cst.Call) or not isinstance(replacement, cst.Call):
        return False
    kept = {id(arg) for arg in replacement.args}
    removed = [arg for arg in node.args if id(arg) not in kept]
    if any(_is_text(arg.value) or (arg.keyword and arg.keyword.value in SKIPPED_KEYWORDS) for arg in removed):
        return True
    is_false = any(isinstance(arg.value, cst.Name) and arg.value.value == "False" for arg in removed)
    return is_false and len(replacement.args) == len(node.args)
