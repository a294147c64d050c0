"""The nouns of how a class is built: its plan, its layers, its heads, and how disk names become model names.

Numbers are expressions over ``config.json`` (`expressions`); tensor names are patterns, indices replaced by ``*``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptx.architecture.expressions import MADE


class StackRule(NamedTuple):
    """One list of layers; see `ckptx.layout.stages.Stack`.

    Attributes:
        path: Of the list, in model names.
        length: How many layers it has, an expression.
        before: Modules and parameters that run right before the first layer (only of a second stack).
        after: Modules and parameters that run after the last layer.
    """

    path: str
    length: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class LoadConversion(NamedTuple):
    """How tensors on disk become tensors of the model; a rename when there are no operations.

    Attributes:
        sources: Patterns on disk.
        targets: Patterns in the model.
        ops: Per operation, in the order of loading: its kind, its numbers, and after a colon expressions with
            semicolons between them (``merge 0``, ``transpose 1 2 0``, ``split 0 : hidden_size ; head_dim``).
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    ops: tuple[str, ...] = ()


Heads = tuple[tuple[str, str], ...]  # candidates (count, size), both expressions


@dataclass(frozen=True, slots=True)
class Structure:
    """How a model class is built, as far as cutting its tensors needs it.

    Attributes:
        text: Dotted path from the root config to the config of the layers (``text_config``), empty for the root.
        text_type: The model type of that config.
        head: The module that maps to the vocabulary, empty when there is none.
        embedding: The module that maps from it, likewise.
        plan: The model's own tensor parallel plan, pattern -> style, without entries that match nothing.
        stacks: Lists of layers in the order they run.
        heads: Per pattern of the plan, what the cut dim of an attention projection is made of.
        transposed: Modules whose weight is stored [in, out].
        changes: Between what `save_pretrained` writes and the model: every pair of names that differ, and every tensor
            that is put together otherwise on disk.
        variants: The same for the other namings that load, where they differ from `changes`.
        defaults: What the config classes take for the keys of expressions that `config.json` leaves out.
        aliases: Another naming of a key that the config class accepts; the last part of the dotted key only.
        root: Keys to follow in `config.json` before any other, see `Scope`.
    """

    text: str = ""
    text_type: str = ""
    head: str = ""
    embedding: str = ""
    plan: Mapping[str, str] = field(default_factory=dict)
    stacks: tuple[StackRule, ...] = ()
    heads: Mapping[str, Heads] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    changes: frozenset[LoadConversion] = frozenset()
    variants: frozenset[LoadConversion] = frozenset()
    defaults: Mapping[str, int | None] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    root: tuple[str, ...] = ()

    def joined(self, other: Structure) -> Structure:
        """With what `other`, the same class under another config, has besides."""
        return dataclasses.replace(
            self,
            plan={**other.plan, **self.plan},
            heads={**other.heads, **self.heads},
            stacks=_joined_stacks(self.stacks, other.stacks),
            transposed=self.transposed | other.transposed,
            changes=self.changes | other.changes,
            variants=(self.variants | other.variants) - self.changes - other.changes,
            defaults={**_of_given(other.defaults), **self.defaults},
            aliases={**other.aliases, **self.aliases},
        )

    def with_changes_of(self, other: Structure) -> Structure:
        """With the changes of `other`, the same class with another sub-model, too."""
        changes = self.changes | other.changes
        variants = (self.variants | other.variants) - changes
        return dataclasses.replace(self, changes=changes, variants=variants)

    def expressions(self) -> set[str]:
        """Every expression in it."""
        found = {stack.length for stack in self.stacks}
        found |= {each for pairs in self.heads.values() for pair in pairs for each in pair}
        for change in self.changes | self.variants:
            for op in change.ops:
                found.update(op_parts(op)[1])
        return found


def _joined_stacks(ours: tuple[StackRule, ...], theirs: tuple[StackRule, ...]) -> tuple[StackRule, ...]:
    """Our stacks, with what stands before and after theirs of the same path."""
    if not ours:
        return theirs
    others = {stack.path: stack for stack in theirs}
    return tuple(
        stack._replace(
            before=_joined_ends(stack, stack.before, others[stack.path].before),
            after=_joined_ends(stack, stack.after, others[stack.path].after),
        )
        if stack.path in others
        else stack
        for stack in ours
    )


def _joined_ends(stack: StackRule, ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[str, ...]:
    """Both, what lies beside the list of layers before what lies around it, as rows keep them."""
    lead = stack.path.rpartition(".")[0] + "."
    names = dict.fromkeys((*ours, *theirs))
    return tuple(sorted(names, key=lambda name: not name.startswith(lead)))


def _of_given(defaults: Mapping[str, int | None]) -> dict[str, int | None]:
    """Without the values of sub-configs that a composite makes: a variant has them from whoever varied them."""
    return {key: value for key, value in defaults.items() if not key.startswith(MADE)}


def op_parts(text: str) -> tuple[list[str], list[str]]:
    """The words of an operation of a `Change` (kind and numbers), and its expressions."""
    words, _, expressions = text.partition(" : ")
    return words.split(), expressions.split(" ; ") if expressions else []


def below(path: str, name: str) -> str:
    """`name` below the module or config at `path`, which may be empty."""
    return f"{path}.{name}" if path else name


def under(expression: str, path: str) -> str:
    """The expression with every key below the config at `path`."""
    return re.sub(r"[A-Za-z_][A-Za-z0-9_.]*", lambda key: below(path, key[0]), expression)


def is_live(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern of a plan names a parameter, or a module around one."""
    return any(name == pattern or name.startswith(pattern + ".") for name in names)
